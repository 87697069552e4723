"""`weft data trees`: count, filter, split, flatten and rebuild Open-Assistant's message trees."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.cli.parsing import CommandParser, split_names
from weft.data import message_trees
from weft.data.message_trees import Tree, TreeFilter
from weft.data.mixture import hold_out
from weft.data.rows import BadRow
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.errors import ConfigError, DataError
from weft.writing import replace_file

STATS_ALIASES = ("count", "counts")  # other names of the subcommand `stats`
EPILOG = """examples:
  weft data trees stats trees.jsonl.gz
  weft data trees filter trees.jsonl.gz german.jsonl --lang de --least quality=0.5 --most toxicity=0.3
  weft data trees split trees.jsonl train.jsonl valid.jsonl --valid 0.05
  weft data trees flatten trees.jsonl messages.jsonl
  weft data trees build messages.jsonl trees.jsonl.gz"""


def main(argv: Sequence[str]) -> int:
    """Run `weft data trees ...` and return the exit code.

    Raises `UserError` for unusable files and options.
    """
    arguments = _build_parser().parse_args(list(argv))
    if arguments.command is None:
        _build_parser().print_help()
        return 2
    trees = read_tree_file(arguments.input)
    if arguments.command in ("stats", *STATS_ALIASES):
        print("\n".join(format_statistics(trees)))
    elif arguments.command == "filter":
        selection = _build_selection(arguments)
        count = write_json_lines(arguments.output, _prune_trees(trees, selection))
        print(f"{count:,} trees in {arguments.output}")
        if not count:
            print(
                f"warning: no tree of {arguments.input} passes the filters; weft data trees stats "
                f"counts its contents",
                file=sys.stderr,
            )
    elif arguments.command == "split":
        _write_splits(trees, arguments)
    elif arguments.command == "flatten":
        count = write_json_lines(
            arguments.output, (message for tree in trees for message in message_trees.flatten(tree))
        )
        print(f"{count:,} messages in {arguments.output}")
    else:
        print(f"{write_json_lines(arguments.output, trees):,} trees in {arguments.output}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft data trees", description=__doc__, epilog=EPILOG)
    commands = parser.add_subparsers(dest="command", metavar="{stats,filter,split,flatten,build}")
    subcommands = {
        "stats": "count trees, messages, threads, ranked replies, languages, states",
        "filter": (
            "write the trees that pass the filters, without rejected messages and the messages "
            "below them"
        ),
        "split": "write two files of whole trees",
        "flatten": "write single messages, a parent before its replies",
        "build": "write trees, from messages in any order or threads",
    }
    for name, help in subcommands.items():
        aliases = STATS_ALIASES if name == "stats" else ()
        command = commands.add_parser(name, aliases=aliases, help=help, description=help)
        command.add_argument("input", help="trees, messages or threads, .jsonl or .jsonl.gz")
        if name != "stats":
            command.add_argument("output", help=".jsonl or .jsonl.gz")
    _, filtering, splitting, *_ = (commands.choices[name] for name in subcommands)
    filtering.add_argument(
        "--lang", default="", metavar="en,de", help="languages of the first message (default: all)"
    )
    filtering.add_argument(
        "--states",
        default="ready_for_export",
        metavar="S,S",
        help="states of trees, or all (default: ready_for_export)",
    )
    filtering.add_argument(
        "--top-k", type=int, metavar="K", help="keep only the replies of the first K ranks"
    )
    for name, word in (("least", "at least"), ("most", "at most")):
        filtering.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="LABEL=X",
            help=f"keep messages whose label is {word} X",
        )
    filtering.add_argument(
        "--unreviewed", action="store_true", help="keep trees whose first message failed its review"
    )
    filtering.add_argument("--deleted", action="store_true", help="keep deleted messages")
    filtering.add_argument(
        "--synthetic", action="store_true", help="keep messages that a model wrote"
    )
    splitting.add_argument(
        "valid_output", metavar="valid", help="file of the trees that are set aside"
    )
    splitting.add_argument(
        "--valid",
        type=float,
        default=0.1,
        metavar="X",
        help="share of the trees to set aside (default 0.1)",
    )
    splitting.add_argument(
        "--seed", type=int, default=1, help="seed of the choice of trees (default 1)"
    )
    return parser


def read_tree_file(path: str) -> Iterator[Tree]:
    """Iterate over the message trees in a file.

    Raises a `DataError` that states the location of an invalid row.
    """
    location = path

    def iterate_rows() -> Iterator[Mapping[str, Any]]:
        nonlocal location
        for file in find_files(path):
            for row_location, row in read_rows(file):
                location = str(row_location)
                if isinstance(row, UnreadableRow):
                    raise BadRow(row.reason)
                yield row

    try:
        yield from message_trees.read_trees(iterate_rows())
    except BadRow as error:
        raise DataError(f"{location}: {error}") from error


def write_json_lines(path: str, objects: Iterable[Mapping[str, Any]]) -> int:
    """Write one object per line, compressed with gzip if the path ends in .gz.

    Returns the number of objects. Raises `ConfigError` unless the path ends in .jsonl or .jsonl.gz.
    """
    _check_output(path)
    count = 0
    with (
        replace_file(Path(path)) as partial,
        (gzip.open if path.endswith(".gz") else open)(partial, "wt", encoding="utf-8") as out,
    ):
        for each in objects:
            out.write(json.dumps(each, ensure_ascii=False) + "\n")
            count += 1
    return count


def _check_output(path: str) -> None:
    """Raise `ConfigError` unless the path ends in .jsonl or .jsonl.gz."""
    if not path.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"{path}: must end in .jsonl or .jsonl.gz")


def format_statistics(trees: Iterable[Tree]) -> list[str]:
    """Return lines with counts of trees, messages, training rows, roles, languages and states."""
    no_filter = TreeFilter(states=(), reviewed=False)
    counts = Counter[str]()
    languages = Counter[str]()
    states = Counter[str]()
    roles = Counter[str]()
    for tree in trees:
        counts["trees"] += 1
        states[str(tree.get("tree_state"))] += 1
        for node in message_trees.iterate_nodes(tree["prompt"]):
            counts["messages"] += 1
            roles[str(node.get("role"))] += 1
            languages[str(node.get("lang"))] += 1
            counts["deleted"] += bool(node.get("deleted"))
            counts["synthetic"] += bool(node.get("synthetic"))
            counts["with a rank"] += node.get("rank") is not None
            counts["with labels"] += bool(node.get("labels"))
        counts["threads (sft)"] += sum(1 for _ in message_trees.iterate_threads(tree, no_filter))
        counts["rankings (rm)"] += sum(1 for _ in message_trees.iterate_rankings(tree, no_filter))
        counts["prompts (rl)"] += sum(1 for _ in message_trees.iterate_prompts(tree, no_filter))
    tables = {"roles": roles, "languages": languages, "states": states}
    lines = [f"{count:>9,}  {name}" for name, count in counts.items()]
    for name, table in tables.items():
        listed = ", ".join(f"{key} {number:,}" for key, number in table.most_common())
        lines.append(f"{name}: {listed}")
    return lines


def _prune_trees(trees: Iterable[Tree], selection: TreeFilter) -> Iterator[Tree]:
    """Yield the trees that pass the filters, without the messages that do not."""
    for tree in trees:
        pruned = message_trees.prune(tree, selection)
        if pruned is not None:
            yield pruned


def _write_splits(trees: Iterable[Tree], arguments: argparse.Namespace) -> None:
    """Write training trees to one file, and the share `--valid` of the trees to another.

    All options are checked before the first tree is read.
    """
    if not 0 < arguments.valid < 1:
        raise ConfigError(f"--valid {arguments.valid}: must be between 0 and 1")
    for path in (arguments.output, arguments.valid_output):
        _check_output(path)
    all_trees = list(trees)
    is_held_out = hold_out(
        [f"{arguments.seed}|{tree['message_tree_id']}" for tree in all_trees], arguments.valid
    ).tolist()
    for path, wants_validation in ((arguments.output, False), (arguments.valid_output, True)):
        count = write_json_lines(
            path,
            (
                tree
                for tree, is_validation in zip(all_trees, is_held_out, strict=True)
                if is_validation == wants_validation
            ),
        )
        print(f"{count:,} trees in {path}")


def _build_selection(arguments: argparse.Namespace) -> TreeFilter:
    if arguments.top_k is not None and arguments.top_k < 1:
        raise ConfigError(f"--top-k {arguments.top_k}: must be at least 1")
    return TreeFilter(
        langs=tuple(split_names([arguments.lang])),
        states=() if arguments.states == "all" else tuple(arguments.states.split(",")),
        top_k=arguments.top_k,
        reviewed=not arguments.unreviewed,
        deleted=arguments.deleted,
        synthetic=arguments.synthetic,
        least=_parse_bounds("--least", arguments.least),
        most=_parse_bounds("--most", arguments.most),
    )


def _parse_bounds(flag: str, words: Sequence[str]) -> dict[str, float]:
    """Return the numbers in words `LABEL=X` of the flag, by label."""
    bounds = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            bounds[name] = float(value)
        except ValueError as error:
            raise ConfigError(
                f"{flag} {word}: must be LABEL=NUMBER, such as quality=0.5"
            ) from error
    return bounds
