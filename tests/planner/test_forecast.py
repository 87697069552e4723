"""What a forecast says of its total."""

from __future__ import annotations

from weft.planner.forecast import MemoryForecast
from weft.planner.memory import RoleMemory


def test_a_total_without_activations_is_no_upper_limit() -> None:
    role = RoleMemory(2**30, 0, 0, 0, 0, 0, 0)
    whole = MemoryForecast({"actor": role}, "cuda", (), 0.0)
    part = MemoryForecast({"actor": role}, "cuda", ("actor",), 0.0)
    assert list(whole.format_lines())[-1] == "memory: about 1.00 GiB at most"
    assert list(part.format_lines())[-1] == "memory: about 1.00 GiB without activations of actor"
    assert part.format_comparison(2.0, 2.0).endswith(
        "1.00 GiB without activations of actor were expected (200%)"
    )
    assert whole.format_comparison(2.0, 2.0).endswith("1.00 GiB were expected (200%)")


def test_offloaded_memory_is_told_beside_its_role() -> None:
    lines = list(
        MemoryForecast(
            {"ref": RoleMemory(2**30, 0, 0, 0, 0, 0, 0, away=2**30)}, "cuda", (), 0.0
        ).format_lines()
    )
    assert (
        lines[0]
        == "memory of ref: parameters 1.00 GiB; 1.00 GiB of it in host memory between its calls"
    )
