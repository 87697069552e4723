"""Build the page of a run, or one that compares several: what they were, what differs, which was better, what they said."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from weft.errors import ConfigError
from weft.observe import compare
from weft.observe.page import write
from weft.observe.report import NAME, build_report, page
from weft.observe.run_files import RunFiles

EPILOG = """examples:
  weft report runs/first/ppo                  writes runs/first/ppo/report.html
  weft report runs/first/ppo runs/first/grpo  writes compare.html: curves, settings and answers side by side
  weft report runs/first/ppo --open           shows it in a browser"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="weft report", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, or EXPERIMENT/TRIAL below ./runs"
    )
    made.add_argument(
        "-o", "--output", metavar="FILE", type=Path,
        help=f"where the page goes (default: {NAME} in the run's folder, ./{compare.NAME} for several runs)",
    )  # fmt: skip
    made.add_argument("--open", action="store_true", help="show the page in a browser")
    return made


def main(argv: Sequence[str]) -> int:
    """Write the page and say where. Raises `UserError` for a folder that holds no run, and a file that cannot be written."""
    given = parser().parse_args(list(argv))
    runs = [find(path) for path in given.runs]
    try:
        made = _build(runs, given.output)
    except OSError as error:
        raise ConfigError(
            f"{given.output or error.filename}: the page cannot be written there: {error.strerror}; choose another place with -o"
        ) from error
    print(made)
    if given.open and not webbrowser.open(made.resolve().as_uri()):
        print("no browser was found; open the file yourself")
    return 0


def _build(runs: Sequence[Path], output: Path | None) -> Path:
    if len(runs) > 1:
        return compare.build_comparison(runs, output or Path(compare.NAME))
    if output is None:
        return build_report(runs[0])
    return write(output, page(RunFiles.read(runs[0])).html())


def find(path: Path, root: Path = Path("runs")) -> Path:
    """The folder of a run: the path itself, or EXPERIMENT/TRIAL below ./runs."""
    path = path.expanduser()
    return root / path if not path.exists() and (root / path).is_dir() else path
