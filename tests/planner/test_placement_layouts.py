"""What `allocation_mode` makes of roles: a layout for all that name none, whole or sharded; and the
options of its estimates.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.engine.spec import ModelSpec, ParallelSpec
from weft.errors import ConfigError
from weft.options import validate
from weft.planner.placement import SearchSpec, allocate_layouts

ROLES = {
    "actor": ModelSpec(),
    "ref": ModelSpec(),
    "critic": ModelSpec(layout="t2", device_mesh="2-3"),
    "rew": ModelSpec(parallel=ParallelSpec(data_parallel_size=2)),
    "judge": ModelSpec(backend="null"),
}


def layouts(mode: str, num_devices: int) -> dict[str, str]:
    made = allocate_layouts(ROLES, mode, num_devices)
    trained = {
        role: replace(spec, trained=role in ("actor", "critic")) for role, spec in made.items()
    }
    return {
        role: str(spec.resolve_layout()).removesuffix("p1c1e1") for role, spec in trained.items()
    }


OWN = {"critic": "d1f1t2", "rew": "d2f1t1", "judge": "d1f1t1"}


@pytest.mark.parametrize(
    ("mode", "num_devices", "actor", "ref"),
    [
        ("manual", 8, "d1f1t1", "d1f1t1"),
        ("d2t2", 1, "d2f2t2", "d2f1t2"),
        ("d4f1", 4, "d4f1t1", "d4f1t1"),
        ("heuristic", 1, "d1f1t1", "d1f1t1"),
        ("heuristic", 4, "d4f4t1", "d4f1t1"),
        ("search", 1, "d1f1t1", "d1f1t1"),
        ("search", 4, "d4f4t1", "d4f1t1"),
    ],
)
def test_layouts_by_role(mode: str, num_devices: int, actor: str, ref: str) -> None:
    assert layouts(mode, num_devices) == {"actor": actor, "ref": ref, **OWN}


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory_gb=0\.0: a device needs memory; write a number"):
        validate(SearchSpec(memory_gb=0.0))
    validate(SearchSpec(memory_gb=0.5))
