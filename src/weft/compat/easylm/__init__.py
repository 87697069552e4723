"""EasyLM's files, flags and commands."""
