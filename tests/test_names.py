"""What can be counted of plain English: line lengths, density, and how docstrings begin."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "weft"
COLUMNS = 100
LONGER_LINES = 0.01  # share of the lines that may be longer: markup, tables, addresses

# Most per 1,000 lines. Above these, a line holds more than one idea.
DENSITY = {"conditional expressions": 22.5, "comprehensions": 42.0, "tuple assignments": 5.0}

# Words that begin a relative clause or a phrase whose noun stands elsewhere.
STILTED_OPENING = re.compile(r"(Whether|Which|Where|What|How|Why|Of|As|Those|That|One that)\b")


def read_sources() -> dict[Path, str]:
    """Return the source text of each module, by its path below `src/weft`."""
    return {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of each function, method and class that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.lineno, text


def count_dense_lines(source: str) -> dict[str, int]:
    """Return the number of expressions of each kind in `DENSITY`."""
    counts = dict.fromkeys(DENSITY, 0)
    comprehensions = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp):
            counts["conditional expressions"] += 1
        elif isinstance(node, comprehensions):
            counts["comprehensions"] += 1
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            counts["tuple assignments"] += isinstance(node.targets[0], ast.Tuple)
    return counts


def test_lines_are_at_most_100_columns_wide():
    lines = [line for text in read_sources().values() for line in text.splitlines()]
    longer = [line for line in lines if len(line) > COLUMNS]
    assert len(longer) < LONGER_LINES * len(lines), f"{len(longer)} of {len(lines)} lines"


def test_no_statement_is_kept_from_the_formatter():
    assert [str(path) for path, text in read_sources().items() if "# fmt: " in text] == []


def test_a_line_holds_one_idea():
    sources = read_sources().values()
    lines = sum(bool(line.strip()) for text in sources for line in text.splitlines())
    counts = [count_dense_lines(text) for text in sources]
    for kind, most in DENSITY.items():
        found = sum(count[kind] for count in counts) / lines * 1000
        assert found <= most, f"{found:.1f} {kind} per 1,000 lines; at most {most:g}"


def test_docstrings_begin_with_a_verb_or_a_noun():
    stilted = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path, source in read_sources().items()
        for line, text in docstrings(source)
        if STILTED_OPENING.match(text)
    ]
    assert not stilted, "\n".join(stilted)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("x = 1 if y else 2", "conditional expressions"),
        ("x = [y for y in z]", "comprehensions"),
        ("x, y = 1, 2", "tuple assignments"),
    ],
)
def test_what_is_dense_is_counted(source, kind):
    assert count_dense_lines(source) == {name: int(name == kind) for name in DENSITY}


@pytest.mark.parametrize("text", ["Whether anything is.", "Of one step.", "What is done."])
def test_riddles_are_found(text):
    assert STILTED_OPENING.match(text)
