#!/bin/sh
exec "$(dirname "$0")/convert_and_submit_tuned" "$@"
