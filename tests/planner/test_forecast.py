"""What a forecast says of its total."""

from __future__ import annotations

import pytest

from weft.planner.forecast import CallMemory, MemoryForecast
from weft.planner.memory import HOLES, PROGRAM, RoleMemory


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


def test_a_call_needs_what_its_device_holds_and_what_it_adds() -> None:
    """On device 0 are actor and ref, on device 1 a copy of the actor."""
    roles = {
        "actor": RoleMemory(100, 20, 30, 0, 0, 0, 70, away=50),
        "ref": RoleMemory(40, 0, 0, 0, 0, 0, 9),
        "actor (gen)": RoleMemory(100, 0, 0, 0, 0, 0, 5),
    }
    calls = {
        "train": CallMemory("actor", 70),
        "score": CallMemory("actor", 10),
        "ref_inf": CallMemory("ref", 9),
        "gen": CallMemory("actor (gen)", 5),
    }
    on = {0: ["actor", "ref"], 1: ["actor (gen)"]}
    known = MemoryForecast(roles, "cuda", (), 0.0, calls=calls)
    # 150 of the actor and 40 of the reference, 50 of it away between the actor's calls
    assert known.compute_call_peaks(on) == {
        "train": 190 + 70,
        "score": 190 + 10,
        "ref_inf": 140 + 9,
        "gen": 105,
    }
    unknown = MemoryForecast(roles, "cuda", ("ref",), 0.0, calls=calls)
    assert unknown.compute_call_peaks(on) == {"gen": 105}
    # the reference is on both devices, and device 1 holds more of other roles
    on = {0: ["ref"], 1: ["ref", "actor (gen)"]}
    assert known.compute_call_peaks(on) == {"ref_inf": 140 + 9, "gen": 140 + 5}
    unknown = MemoryForecast(roles, "cuda", ("actor (gen)",), 0.0, calls=calls)
    assert unknown.compute_call_peaks(on) == {}


def test_all_calls_of_a_process_on_a_cpu_have_the_peak_of_the_largest() -> None:
    roles = {"actor": RoleMemory(100, 0, 0, 0, 0, 0, 70), "ref": RoleMemory(40, 0, 0, 0, 0, 0, 9)}
    calls = {"train": CallMemory("actor", 70), "ref_inf": CallMemory("ref", 9)}
    peaks = MemoryForecast(roles, "cpu", (), 0.0, calls=calls).compute_call_peaks({0: list(roles)})
    assert peaks == dict.fromkeys(calls, pytest.approx(140 + HOLES * 70 + PROGRAM))
