"""The floors of docs/architecture.md: a module imports only from lower floors, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "registry", "options", "randomness", "topology", "observe", "algorithms"),
    ("data", "graph", "models", "host"),
    ("parallel", "realloc"),
    ("engine",),
    ("interfaces",),
    ("experiment",),
    ("experiments", "runtime", "planner"),
    ("launch",),
    ("cli", "apps", "testing"),
)
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

# One floor is one row of rooms: a room looks into its neighbour only where this says so. No arrow may close a loop.
NEIGHBOURS = {
    ("registry", "errors"), ("options", "errors"), ("randomness", "errors"), ("topology", "errors"),
    ("observe", "errors"), ("observe", "registry"), ("observe", "options"),
    ("algorithms", "errors"), ("algorithms", "registry"), ("algorithms", "options"),
    ("host", "data"), ("apps", "cli"),
}  # fmt: skip

# Plain values that configurations hold: read from above the floor they describe, and free of torch.
SPECS = {"weft.engine.spec": 1, "weft.data.spec": 0}

TORCH_FREE = ("torch", "transformers", "ray")
LIGHT = ("weft", "weft.experiments", "weft.experiment", "weft.graph.graph", "weft.cli.main", "weft.algorithms.ppo")


def part_of(module: str) -> str:
    """`weft.data.sample` -> `data`; `weft` itself -> ''."""
    return module.split(".")[1] if "." in module else ""


def imported(source: str, module: str, *, package: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, wherever it stands: also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") if package else module.split(".")[:-1]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def violation(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    source, wanted = part_of(module), part_of(target)
    if not target.startswith("weft.") or source == wanted or not source or wanted not in FLOOR:
        return None
    if any(target == spec or target.startswith(f"{spec}.") for spec in SPECS):
        floor = next(SPECS[s] for s in SPECS if target == s or target.startswith(f"{s}."))
        return None if floor <= FLOOR[source] else f"{module} (floor {FLOOR[source]}) imports {target} (floor {floor})"
    if module in SPECS and wanted in FLOORS[0]:
        return None
    if source == "runtime" and wanted in ("experiments", "algorithms"):
        return f"{module} imports {target}: the runtime knows no algorithm"
    if source == "experiments" and wanted == "runtime":
        return f"{module} imports {target}: experiments describe, the runtime runs"
    if FLOOR[wanted] < FLOOR[source] or (source, wanted) in NEIGHBOURS:
        return None
    return f"{module} (floor {FLOOR[source]}) imports {target} (floor {FLOOR[wanted]})"


def violations() -> list[str]:
    """Every import of the package that goes up or sideways."""
    found = []
    for path in sorted((SRC / "weft").rglob("*.py")):
        package = path.name == "__init__.py"
        parts = path.relative_to(SRC).with_suffix("").parts
        module = ".".join(parts[:-1] if package else parts)
        for line, target in imported(path.read_text(), module, package=package):
            wrong = violation(module, target)
            if wrong:
                found.append(f"{path.relative_to(SRC)}:{line}: {wrong}")
    return found


def test_imports_go_down() -> None:
    assert violations() == []


def test_every_part_has_a_floor() -> None:
    parts = {p.stem for p in (SRC / "weft").iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))}
    assert parts - {"__init__", "__main__"} <= set(FLOOR), "a new part of weft needs a floor in FLOORS"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("weft.data.sample", "from weft.engine import base", True),
        ("weft.data.sample", "def f():\n    import weft.runtime.master", True),
        ("weft.data.sample", "if TYPE_CHECKING:\n    from weft.cli.main import main", True),
        ("weft.graph.graph", "from weft.models.config import TransformerConfig", True),
        ("weft.runtime.master", "from weft.algorithms.ppo import PPOActorLoss", True),
        ("weft.experiments.ppo", "from weft.runtime.master import Master", True),
        ("weft.data.sample", "from ..engine.base import Engine", True),
        ("weft.observe.report", "import importlib\nimportlib.import_module('weft.data.sample')", True),
        ("weft.engine.torch_engine", "from weft.models.transformer import Transformer", False),
        ("weft.host.reward", "from weft.data.sample import SequenceSample", False),
    ],
)
def test_the_walk_finds_wrong_imports(module: str, source: str, wrong: bool) -> None:
    found = [violation(module, target) for _, target in imported(source, module, package=False)]
    assert any(found) is wrong


def test_neighbours_close_no_loop() -> None:
    def reach(room: str, seen: frozenset[str]) -> set[str]:
        nexts = {b for a, b in NEIGHBOURS if a == room}
        assert not nexts & (seen | {room}), f"a loop through {room}"
        return nexts.union(*(reach(n, seen | {room}) for n in nexts)) if nexts else set()

    for room in FLOOR:
        reach(room, frozenset())


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_no_framework(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {TORCH_FREE!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_light_check_can_fail() -> None:
    code = "import sys, weft.data.sample; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.parametrize("package", ["ray", "wandb", "trackio", "tensorboard"])
def test_optional_packages_have_one_home(package: str) -> None:
    homes = []
    for path in sorted((SRC / "weft").rglob("*.py")):
        names = {target.split(".")[0] for _, target in imported(path.read_text(), "weft.x", package=False)}
        names |= {"tensorboard"} if "torch.utils.tensorboard" in path.read_text() else set()
        if package in names:
            homes.append(str(path.relative_to(SRC)))
    assert len(homes) <= 1, homes
