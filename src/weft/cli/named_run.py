"""Which run a word on the command line means."""

from __future__ import annotations

from pathlib import Path

from weft.errors import ConfigError, nearest
from weft.observe.run_list import find_runs, is_run, list_runs

LATEST = "latest"
SHOWN = 6


def find_run(word: str, root: Path) -> Path:
    """The directory of a run: a path, `EXPERIMENT/TRIAL` below `root`, or `latest`. Raises `ConfigError`."""
    given = Path(word).expanduser()
    for path in (given, root / given):
        if is_run(path):
            return path
    if word == LATEST:
        runs = list_runs(root)
        if runs:
            return runs[0].path
        raise ConfigError(f"latest: there is no run in {root}")
    there = [str(path) for path in find_runs(root)]
    close = [*nearest(word, there), *nearest(word, [str(Path(path).relative_to(root)) for path in there])][:SHOWN]
    inside = [str(path) for path in find_runs(given)][:SHOWN] if given.is_dir() else []
    if inside:
        raise ConfigError(f"{word} is no run but holds some: {', '.join(inside)}; name one of them")
    if given.exists():
        raise ConfigError(f"{word} is not the directory of a run; weft ls lists the runs in a folder")
    hint = f"did you mean {' or '.join(close)}?" if close else f"runs here: {', '.join(there[:SHOWN]) or 'none'}"
    raise ConfigError(f"{word}: there is no such run; {hint}")
