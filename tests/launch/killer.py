"""Runs a case in a child process and kills it with SIGKILL at random moments until it has come to
its end.

`python -m tests.launch.killer ROOT CASE FOLDER KILLS SEED`: the child is forked after torch is
imported, so that a kill costs a second. A run that was over before it was killed twice begins anew,
a few times, and its kills come sooner. Prints the number of kills.

If FOLDER is a URL of `tests.object_store`, the disk is lost with each process: the working copy of
the run is removed before the next one begins.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path


def main(root: Path, case: str, folder: str, kills: int, seed: int) -> None:
    import weft.launch.assemble  # noqa: F401  # everything heavy, before the first fork
    from tests import object_store
    from tests.launch.cases import CASES
    from weft.errors import ConfigError
    from weft.launch import run
    from weft.storage.buckets import BucketFolder
    from weft.storage.copies import find_cache_folder

    in_bucket = "://" in folder
    object_store.register()
    draw = random.Random(seed)
    killed, latest = 0, 2.0  # seconds until a kill
    while True:
        if in_bucket:
            shutil.rmtree(find_cache_folder(), ignore_errors=True)
        child = os.fork()
        if child == 0:
            try:
                run(CASES[case](root, folder))
            except ConfigError as error:
                # The kill before came after the run had written down that it was finished.
                if killed and "contains a finished run of this configuration" in str(error):
                    os._exit(0)
                print(f"ConfigError: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if killed < kills:
            deadline = time.monotonic() + draw.uniform(0.1, 1.0) * latest
            while time.monotonic() < deadline:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    break
                time.sleep(0.002)
            else:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                killed += 1
                continue
        else:
            _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and killed < min(2, kills) and latest > 0.2:
            if in_bucket:
                bucket = BucketFolder.open(folder)
                bucket.remove(bucket.list_files())
            else:
                shutil.rmtree(root / folder)
            killed, latest = 0, latest / 2
            continue
        print(killed)
        sys.exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
