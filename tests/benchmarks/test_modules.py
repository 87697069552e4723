"""Every benchmark can be imported and started, also what it imports only while it runs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.benchmarks.forked import run_module

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MODULES = sorted(FOLDER.glob("*.py"))
PROGRAMS = [path for path in MODULES if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_everything_it_imports_from_weft_is_there(path: Path) -> None:
    importlib.import_module("benchmarks" if path.stem == "__init__" else f"benchmarks.{path.stem}")
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] in ("weft", "benchmarks")
        ):
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                there = (
                    hasattr(module, name)
                    or importlib.util.find_spec(f"{node.module}.{name}") is not None
                )
                assert there, f"line {node.lineno}: {node.module} has no {name}"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_it_says_what_it_measures(path: Path) -> None:
    code, out, err = run_module(f"benchmarks.{path.stem}", "--help", cwd=FOLDER.parent)
    assert code == 0 and out.startswith("usage: "), err[-2000:]
