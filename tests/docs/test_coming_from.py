"""docs/coming-from/: weft's options and defaults are those of the code, TRL's those of the
installed TRL; commands exist.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_pages import ROOT
from weft import registry
from weft.cli import dialects
from weft.cli.main import COMMANDS
from weft.experiments.common import RunConfig
from weft.options import OptionDescription, iterate_options

PAGES = sorted((ROOT / "docs" / "coming-from").glob("*.md"))
HEAD = re.compile(
    r"^\| (?P<old>[^|]+) \| default \| weft (?P<quickstart>\w+) \| default \| remarks \|$"
)
NAMES = re.compile(r"`([^`]+)`")
CELL = re.compile(r"(?<!\\)\|")


@dataclasses.dataclass(frozen=True)
class Row:
    old: tuple[str, ...]
    old_default: str
    names: tuple[str, ...]
    default: str


@dataclasses.dataclass(frozen=True)
class Table:
    page: str
    old: str
    quickstart: str
    rows: tuple[Row, ...]


def tables(path: Path) -> list[Table]:
    found: list[tuple[re.Match[str], list[Row]]] = []
    inside = False
    for line in path.read_text().splitlines():
        if head := HEAD.match(line):
            found.append((head, []))
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            old, old_default, names, default, _ = (
                cell.strip() for cell in CELL.split(line.strip("|"))
            )
            found[-1][1].append(
                Row(tuple(NAMES.findall(old)), old_default, tuple(NAMES.findall(names)), default)
            )
    return [Table(path.stem, head["old"], head["quickstart"], tuple(rows)) for head, rows in found]


TABLES = [table for path in PAGES for table in tables(path)]


def options_of(quickstart: str) -> dict[str, OptionDescription]:
    config = registry.quickstarts.get(quickstart)()
    assert isinstance(config, RunConfig)
    return {leaf.name: leaf for leaf in iterate_options(config)}


def says(cell: str, value: Any) -> bool:
    """Whether a cell of a table shows this default."""
    if value is None or value == "":
        return cell in ("none", "")
    shown = yaml.safe_load(cell.strip("`"))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return bool(re.fullmatch(r"[-+.e\d]+", cell)) and float(shown) == float(value)
    return bool(shown == (list(value) if isinstance(value, tuple) else value))


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.page}-{t.old}")
def test_weft_has_what_the_table_names(table: Table) -> None:
    options = options_of(table.quickstart)
    for row in table.rows:
        assert set(row.names) <= set(options), row
        if len(row.names) != 1:
            assert row.default == "", row
            continue
        leaf = options[row.names[0]]
        computed = (
            leaf.default is None and row.default != "none"
        )  # what is taken where nothing is set: the help says it
        assert says(row.default, leaf.default) or (computed and row.default in leaf.help), (
            row,
            leaf,
        )


@pytest.mark.slow  # importing TRL takes seconds
@pytest.mark.parametrize("table", [t for t in TABLES if t.page == "trl"], ids=lambda t: t.old)
def test_trl_has_what_the_table_names(table: Table) -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name: field for field in dataclasses.fields(getattr(trl, table.old))}
    for row in table.rows:
        assert set(row.old) <= set(fields), row
        if len(row.old) == 1:
            field = fields[row.old[0]]
            made = (
                field.default
                if field.default is not dataclasses.MISSING
                else field.default_factory()
            )
            assert says(row.old_default, made), (row, made)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_commands_and_settings_in_the_text_exist(path: Path) -> None:
    """`weft COMMAND`, and settings `a.b=c` behind `weft quickstart NAME`; elsewhere options of any
    quickstart.
    """
    known = {
        name
        for quickstart in registry.quickstarts.load_all()
        if _shipped(quickstart)
        for name in options_of(quickstart)
    }
    for code in NAMES.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
        words = shlex.split(code)
        if words[:1] != ["weft"]:
            continue
        assert words[1] in (*COMMANDS, *dialects.COMMANDS), code
        if words[1] == "quickstart" and len(words) > 2:
            known_here = set(options_of(words[2]))
            given = [
                word.partition("=")[0]
                for word in words[3:]
                if "=" in word and not word.startswith("-")
            ]
            aliases = {"model_name_or_path", "learning_rate"}
            assert set(given) <= known_here | aliases, code
    settings = re.findall(
        r"`((?:grpo|ppo|dpo|dataset|model|actor|critic|optimizer)\.[a-z_.]+)=", path.read_text()
    )
    assert {
        name for name in settings if not name.startswith(("optimizer.", "dataset.args."))
    } <= known


def _shipped(quickstart: str) -> bool:
    return registry.quickstarts.get(quickstart).__module__.startswith("weft.")


def test_every_page_has_tables_that_are_held_against_the_code() -> None:
    assert {table.page for table in TABLES} == {path.stem for path in PAGES}
    assert all(len(table.rows) > 1 for table in TABLES)


def test_defaults_are_read_as_they_are_shown() -> None:
    assert (
        says("1e-5", 1e-5)
        and says("`true`", True)
        and says("none", None)
        and says("`[sigmoid]`", ["sigmoid"])
    )
    assert not says("0.1", 0.2) and not says("none", 0) and not says("`false`", None)
