"""What a reader has to open to follow an algorithm: PPO and GRPO each stand in one file and lean on
two more of the folder.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from weft import experiments

FOLDER = Path(experiments.__file__).parent
MOST = 2


def neighbours(source: str) -> set[str]:
    """Files of `weft.experiments` that a file imports from, wherever the import stands."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "weft.experiments":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "weft.experiments."
        ):
            found.add(str(node.module).removeprefix("weft.experiments."))
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("weft.experiments.")
                for a in node.names
                if a.name.startswith("weft.experiments.")
            }
    return found


@pytest.mark.parametrize("name", ["ppo", "grpo", "online_dpo"])
def test_an_algorithm_is_read_with_two_other_files(name: str) -> None:
    opened = neighbours((FOLDER / f"{name}.py").read_text())
    allowed = MOST + (name == "online_dpo")  # which takes the options of `dpo` as they are
    assert len(opened) <= allowed, opened


def test_neighbours_are_found() -> None:
    source = (
        "from weft.experiments._rl_graph import RLGraphBuilder\n"
        "from weft.experiments import common\n"
        "import weft.experiments.dpo\n"
    )
    assert neighbours(source) == {"_rl_graph", "common", "dpo"}
