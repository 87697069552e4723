"""`weft eval rm MODEL DATA`: how well a reward model orders replies that people have ordered, over all and by category."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.cli import _models
from weft.cli.parsing import Parser
from weft.errors import ConfigError

EPILOG = """examples:
  weft eval rm runs/E/T pairs.jsonl
  weft eval rm RM_DIR rewardbench.parquet --type preference --category subset --out scores.json
  weft eval rm RM_DIR trees.jsonl.gz --type ranking max_replies=5"""


def parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    made = Parser(prog="weft eval", description=__doc__, epilog=EPILOG, formatter_class=form)
    commands = made.add_subparsers(dest="command", metavar="{rm}", required=True)
    rm = commands.add_parser("rm", help="a reward model on pairs and rankings", epilog=EPILOG, formatter_class=form)
    rm.add_argument("model", metavar="MODEL", help="reward model or run of one")
    rm.add_argument(
        "data", nargs="+", metavar="DATA|argument=value", help="files, folders or hub names; dataset.args of their form"
    )
    rm.add_argument("--type", help="preference, paired_comparison or ranking (default: guessed from the first row)")
    rm.add_argument("--split", help="the files of this split")
    rm.add_argument("--category", metavar="COLUMN", help="column that groups the rows")
    rm.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    _models.add_options(rm)
    return made


def main(argv: Sequence[str]) -> int:
    """Run `weft eval ...`; returns the exit code. Raises `UserError` for input that cannot be used."""
    given = parser().parse_args(list(argv))
    from weft.evaluation.reward_model import by_category, evaluate

    paths = [word for word in given.data if "=" not in word]
    args = _arguments([word for word in given.data if "=" in word])
    if not paths:
        raise ConfigError("weft eval rm: there are no data; name a file, a folder or a hub name")
    kinds = [given.type or _kind(path, given.split) for path in paths]
    opened = _models.scorer(given.model, given, "MODEL")
    figures: dict[str, Any] = {}
    for path, kind in zip(paths, kinds, strict=True):
        with _models.progress(path) as bar:
            groups = evaluate(opened, path, kind, category=given.category, split=given.split, args=args, progress=bar)
        found = by_category(groups)
        everything = by_category([replace(group, category="") for group in groups])[""]
        figures[path] = {"type": kind, "all": asdict(everything)}
        figures[path] |= {"categories": {name: asdict(each) for name, each in found.items()}} if given.category else {}
        _print(path, {**(found if given.category else {}), "all": everything})
    if given.out is not None:
        from weft.evaluation.sampling_report import write

        write(given.out, json.dumps({"model": opened.name, "data": figures}, indent=1) + "\n")
        print(given.out)
    return 0


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    import yaml

    return {name: yaml.safe_load(value) for name, _, value in (word.partition("=") for word in words)}


def _kind(path: str, split: str | None) -> str:
    """What form the first row has. Raises `ConfigError` where it tells none with an order of replies."""
    from weft.data import trees
    from weft.data.rows import looks_like
    from weft.data.sources import Unreadable, find_files, read_rows

    place, row = next(read_rows(find_files(path, split)[0]))
    found = None if isinstance(row, Unreadable) else "ranking" if trees.is_tree(row) else looks_like(row)
    if found is None:
        raise ConfigError(f"{place}: this row tells no form; set --type to preference, paired_comparison or ranking")
    return found


def _print(path: str, found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=path, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("rows", "pairs", "accuracy", "best over worst", "kendalltau", "margin"):
        table.add_column(name, justify="right")
    for name, each in found.items():
        shares = f"{each.accuracy:.3f} \u00b1 {each.error:.3f}", f"{each.best_accuracy:.3f}", f"{each.kendalltau:.3f}"
        table.add_row(name, str(each.rows), str(each.pairs), *shares, f"{each.margin:.3f}")
    Console(highlight=False).print(table)
