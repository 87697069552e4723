"""Which run a word on the command line means."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

from weft.errors import ConfigError
from weft.observe.run_list import find_runs, is_run, list_runs
from weft.reading import refuse_url

RUNS, LATEST = "./runs", "latest"
SHOWN = 6
SUGGESTED = 3
LIKENESS = 0.6  # of each part of a name to that of the run that may have been meant


def find_run(word: str, root: Path) -> Path:
    """The directory of a run: a path, `EXPERIMENT/TRIAL` below `root`, or `latest`. Raises `ConfigError`."""
    refuse_url(word, word, ConfigError)
    given = Path(word).expanduser()
    for path in (given, root / given):
        if is_run(path):
            return path
    if word == LATEST:
        runs = list_runs(root)
        if runs:
            return runs[0].path
        raise ConfigError(f"latest: there is no run in {root}")
    inside = [str(path) for path in find_runs(given)][:SHOWN] if given.is_dir() else []
    if inside:
        raise ConfigError(f"{word} is no run but holds some: {', '.join(inside)}; name one of them")
    if given.exists():
        raise ConfigError(f"{word} is not the directory of a run; weft ls lists the runs in a folder")
    close = _like(given, root)
    listing = f"weft ls {root}" if root != Path(RUNS) else "weft ls"
    hint = f"did you mean {' or '.join(close)}?" if close else f"{listing} lists those that are there"
    raise ConfigError(f"{word}: there is no such run; {hint}")


def _like(given: Path, root: Path) -> list[str]:
    """The runs in `root` named like `given`, the likest first: EXPERIMENT/TRIAL part by part, or TRIAL where it is all."""
    asked = (given.relative_to(root) if given.is_relative_to(root) else given).parts

    def likeness(run: Path) -> float:
        name = run.relative_to(root).parts[-len(asked) :] if asked else ()
        pairs = zip(asked, name, strict=True) if len(asked) == len(name) else ()
        return min((SequenceMatcher(None, one, other).ratio() for one, other in pairs), default=0.0)

    alike = {str(run): likeness(run) for run in find_runs(root)}
    return sorted((run for run in alike if alike[run] >= LIKENESS), key=lambda run: -alike[run])[:SUGGESTED]
