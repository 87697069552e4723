"""Names that users' code imports: each keeps its path and its spelling.

They are the names in docs/, examples/ and the README, read from there, and a list of names that
users' code and outside tests import.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Extension points, the single batch type, and what algorithms and interfaces are written with.
LISTED = {
    "weft": "register_advantage register_backend register_dataset register_experiment "
    "register_filter register_function register_hf_family register_interface register_loss "
    "register_quickstart",
    "weft.algorithms.base": "Loss Max Min RowBatch Stat Sum exp_ratio fixed",
    "weft.cli.open_assistant.commands": "run",
    "weft.data.sample": "SequenceSample",
    "weft.engine.base": "Engine Generator Partial Request TokenEvent",
    "weft.experiment": "Experiment Scheduling Workers",
    "weft.experiments": "DPOConfig GRPOConfig PPOConfig SFTConfig",
    "weft.graph.graph": "DataflowGraph",
    "weft.graph.mfc": "HostFunction MFCDef ParamSync",
    "weft.interfaces.base": "MFCResult Model ModelInterface",
    "weft.launch": "run",
    "weft.models.families.base": "ConfigReader Family",
    "weft.models.network.config": "TransformerConfig",
    "weft.models.network.packed": "Packed",
    "weft.options": "option",
    "weft.placement": "Placement",
    "weft.realloc.execute": "Reallocation",
    "weft.realloc.plan": "holdings_of plan",
    "weft.testing": "check_dataset check_family check_interface",
    "weft.topology": "Layout Mesh",
}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each `from weft... import name` in Python source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("weft."):
            for alias in node.names:
                yield str(node.module), alias.name


def imports_of_page(text: str) -> Iterator[tuple[str, str]]:
    """Yield the imports of a page's code blocks, which need not be whole programs."""
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
        for line in textwrap.dedent(block).splitlines():
            if re.match(r"\s*from weft[\w.]* import [\w, ]+$", line):
                yield from imports(line.strip())


def documented_names() -> set[tuple[str, str]]:
    """Return (module, name) of what the documentation and the examples import."""
    found: set[tuple[str, str]] = set()
    for path in (ROOT / "examples").rglob("*.py"):
        found.update(imports(path.read_text()))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        if "decisions" not in path.parts:
            found.update(imports_of_page(path.read_text()))
    return found


LISTED_NAMES = {(module, name) for module, names in LISTED.items() for name in names.split()}


@pytest.mark.parametrize(("module", "name"), sorted(LISTED_NAMES | documented_names()))
def test_a_public_name_is_where_it_is_documented(module: str, name: str) -> None:
    found = importlib.import_module(module)
    if not hasattr(found, name):  # a module of a package
        importlib.import_module(f"{module}.{name}")


def test_the_documentation_imports_names() -> None:
    assert ("weft.data.sample", "SequenceSample") in documented_names()
    assert list(imports_of_page("```python\nfrom weft.launch import run\n```")) == [
        ("weft.launch", "run")
    ]
