"""The floors of docs/architecture.md: a module imports only from lower floors, and what must stay
light stays light.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "extras",
        "reading",
        "writing",
        "storage",
        "redaction",
        "registry",
        "options",
        "randomness",
        "placement",
        "topology",
        "observe",
        "algorithms",
        "kernels",
    ),
    ("data", "graph", "models", "host"),
    ("checkpoints", "parallel", "realloc"),
    ("engine",),
    ("interfaces",),
    ("experiment", "planner"),
    ("experiments", "runtime"),
    ("launch", "evaluation", "serve"),
    ("cli", "compat", "apps", "scripts", "testing"),
)
FLOOR = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}

# One floor is one row of rooms: a room looks into its neighbour only where this says so. No arrow
# may close a loop.
NEIGHBOURS = {
    ("errors", "redaction"),
    ("observe", "redaction"),
    ("registry", "errors"),
    ("reading", "errors"),
    ("options", "errors"),
    ("options", "reading"),
    ("writing", "errors"),
    ("writing", "reading"),
    ("storage", "errors"),
    ("storage", "extras"),
    ("storage", "reading"),
    ("storage", "writing"),
    ("observe", "writing"),
    ("randomness", "errors"),
    ("topology", "errors"),
    ("topology", "placement"),
    ("observe", "extras"),
    ("observe", "errors"),
    ("observe", "registry"),
    ("observe", "options"),
    ("observe", "reading"),
    ("observe", "topology"),
    ("kernels", "errors"),
    ("algorithms", "errors"),
    ("algorithms", "registry"),
    ("algorithms", "options"),
    ("host", "data"),
    ("planner", "experiment"),
    ("launch", "evaluation"),
    ("apps", "cli"),
    ("compat", "cli"),
    ("scripts", "cli"),
}


TORCH_FREE = ("torch", "transformers", "ray")
LIGHT = (
    "weft",
    "weft.experiments",
    "weft.experiment",
    "weft.graph.graph",
    "weft.cli.main",
    "weft.algorithms.ppo",
    *(
        f"weft.planner.{path.stem}"
        for path in sorted((SRC / "weft" / "planner").glob("*.py"))
        if path.stem != "__init__"
    ),
)


def part_of(module: str) -> str:
    """`weft.data.sample` -> `data`; `weft` itself -> ''."""
    return module.split(".")[1] if "." in module else ""


@functools.cache  # several tests look at all files
def imported(source: str, module: str, *, package: bool) -> tuple[tuple[int, str], ...]:
    """(line, module) of every import in a file, wherever it stands: also in functions and under
    TYPE_CHECKING.
    """
    return tuple(find_imports(source, module, package=package))


def find_imports(source: str, module: str, *, package: bool) -> Iterator[tuple[int, str]]:
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
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)


def violation(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, or None."""
    source, wanted = part_of(module), part_of(target)
    if not target.startswith("weft.") or source == wanted or not source or wanted not in FLOOR:
        return None
    if source == "runtime" and wanted in ("experiments", "algorithms"):
        return f"{module} imports {target}: the runtime knows no algorithm"
    if source == "experiments" and wanted == "runtime":
        return f"{module} imports {target}: experiments describe, the runtime runs"
    if FLOOR[wanted] < FLOOR[source] or (source, wanted) in NEIGHBOURS:
        return None
    return f"{module} (floor {FLOOR[source]}) imports {target} (floor {FLOOR[wanted]})"


def modules() -> dict[str, Path]:
    """Every module and package of weft by its name."""
    found = {}
    for path in sorted((SRC / "weft").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> tuple[tuple[int, str], ...]:
    return imported(path.read_text(), module, package=path.name == "__init__.py")


def violations() -> list[str]:
    """Every import of the package that goes up or sideways."""
    return [
        f"{path.relative_to(SRC)}:{line}: {wrong}"
        for module, path in modules().items()
        for line, target in imports_of(module, path)
        if (wrong := violation(module, target))
    ]


def file_graph() -> dict[str, set[str]]:
    """Which files each file imports, type-only imports and those in functions included."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = set()
        for _, target in imports_of(module, path):
            while target and target not in files:  # `weft.a.b.Name` is the file `weft.a.b`
                target = target.rpartition(".")[0]
            found.add(target)
        graph[module] = found - {"", "weft", module}
    return graph


def circle(graph: Mapping[str, Iterable[str]]) -> list[str] | None:
    """The files of one circle of imports, the first again at the end; None where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(module) for module in error.args[1]]
    return None


def test_imports_go_down() -> None:
    assert violations() == []


def test_no_circle_of_files() -> None:
    assert circle(file_graph()) is None


def intrusion(module: str, target: str) -> str | None:
    """Why `module` may not import `target`, a private module of experiments, or None."""
    if target.startswith("weft.experiments._") and part_of(module) != "experiments":
        return f"{module} imports {target}"
    return None


def test_private_modules_of_experiments_stay_there() -> None:
    assert [
        f"{path.relative_to(SRC)}:{line}: {wrong}"
        for module, path in modules().items()
        for line, target in imports_of(module, path)
        if (wrong := intrusion(module, target))
    ] == []


@pytest.mark.parametrize(
    ("module", "target", "wrong"),
    [
        ("weft.cli.aliases", "weft.experiments._roles.build_critic", True),
        ("weft.planner.cost", "weft.experiments._placement", True),
        ("weft.compat.deepspeed", "weft.experiments._roles.build_critic", True),
        ("weft.cli.aliases", "weft.experiments.common.RunConfig", False),
        ("weft.experiments.ppo", "weft.experiments._roles.build_critic", False),
    ],
)
def test_an_import_of_a_private_module_is_found(module: str, target: str, wrong: bool) -> None:
    assert (intrusion(module, target) is not None) is wrong


def test_a_circle_of_files_is_found() -> None:
    graph = file_graph()
    graph["weft.kernels.types"] |= {"weft.models.network.transformer"}
    found = circle(graph)
    assert found is not None and {"weft.kernels.types", "weft.models.network.transformer"} <= set(
        found
    )


def test_a_type_only_import_is_an_arrow() -> None:
    assert "weft.runtime.checkpoints" in {
        target.rpartition(".")[0]
        for _, target in imported(
            "if TYPE_CHECKING:\n    from weft.runtime.checkpoints import State",
            "weft.graph.x",
            package=False,
        )
    }


def test_every_part_has_a_floor() -> None:
    parts = {
        p.stem
        for p in (SRC / "weft").iterdir()
        if p.suffix == ".py" or (p.is_dir() and any(p.glob("*.py")))
    }
    assert parts - {"__init__", "__main__"} <= set(FLOOR), (
        "a new part of weft needs a floor in FLOORS"
    )


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("weft.data.sample", "from weft.engine import base", True),
        ("weft.data.sample", "def f():\n    import weft.runtime.master", True),
        ("weft.data.sample", "if TYPE_CHECKING:\n    from weft.cli.main import main", True),
        ("weft.graph.graph", "from weft.models.network.config import TransformerConfig", True),
        ("weft.runtime.master", "from weft.algorithms.ppo import PPOActorLoss", True),
        ("weft.experiments.ppo", "from weft.runtime.master import Master", True),
        ("weft.data.sample", "from ..engine.base import Engine", True),
        ("weft.kernels.types", "from weft.models.network.config import TransformerConfig", True),
        ("weft.models.network.lora", "from weft.engine.spec import LoRASpec", True),
        (
            "weft.observe.report",
            "import importlib\nimportlib.import_module('weft.data.sample')",
            True,
        ),
        (
            "weft.engine.torch.engine",
            "from weft.models.network.transformer import Transformer",
            False,
        ),
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
        names = {
            target.split(".")[0]
            for _, target in imported(path.read_text(), "weft.x", package=False)
        }
        names |= {"tensorboard"} if "torch.utils.tensorboard" in path.read_text() else set()
        if package in names:
            homes.append(str(path.relative_to(SRC)))
    assert len(homes) <= 1, homes


def test_jax_is_imported_in_its_engine_alone() -> None:
    """And where losses stop the gradient of JAX's arrays, which are there only with that engine."""
    for path in sorted((SRC / "weft").rglob("*.py")):
        names = {
            target.split(".")[0]
            for _, target in imported(path.read_text(), "weft.x", package=False)
        }
        if names & {"jax", "optax"} and path.parts[-2:] != ("algorithms", "base.py"):
            assert path.parent == SRC / "weft" / "engine" / "jax", path
