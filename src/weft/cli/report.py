"""Build the HTML page of a run, or a page that compares several runs.

A comparison shows which run was better, the options that differ, and the models' answers.
"""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from weft.cli.named_run import find_run, open_root
from weft.cli.parsing import CommandParser, add_fileroot, print_help_if_empty
from weft.errors import ConfigError
from weft.observe import compare
from weft.observe.page import write
from weft.observe.report import NAME, build_page, build_report
from weft.observe.run_files import RUN_FILES, RunFiles

EPILOG = """examples:
  weft report first/ppo               writes runs/first/ppo/report.html
  weft report first/ppo first/grpo    writes compare.html
  weft report latest --open           shows it in a browser"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="weft report", description=__doc__, epilog=EPILOG, url_arguments=("fileroot",)
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folder of a run, EXPERIMENT/TRIAL, or latest"
    )
    add_fileroot(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"file or folder of the page (default: {NAME} in the run's folder, ./{compare.NAME} "
        f"for several runs)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `weft report`: write the page, print its path, and return the exit code.

    Raises `UserError` if a folder is not a run, or if the page cannot be written.
    """
    parser = build_parser()
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))
    root = open_root(arguments.fileroot)
    runs = [_find(word, root) for word in arguments.runs]
    try:
        page_path = _build(runs, arguments.output)
    except OSError as error:
        place = arguments.output or error.filename
        raise ConfigError(
            f"{place}: the page cannot be written: {error.strerror}; choose another file with -o"
        ) from error
    print(page_path)
    if arguments.open and not webbrowser.open(page_path.resolve().as_uri()):
        print("no browser was found; open the file yourself")
    return 0


def _build(runs: Sequence[Path], output: Path | None) -> Path:
    """Write the page of a run, or of the comparison of several, and return its path."""
    if len(runs) > 1:
        return compare.build_comparison(runs, output or Path(compare.NAME))
    if output is None:
        return build_report(runs[0])
    return write(output, build_page(RunFiles.read(runs[0])).render())


def _find(word: str, root: Path) -> Path:
    """Return the folder of the run that `word` names.

    A folder with only some of the files of a run is also accepted.
    """
    folder = open_root(word)
    if any((folder / name).is_file() for name in RUN_FILES):
        return folder
    return find_run(word, root)
