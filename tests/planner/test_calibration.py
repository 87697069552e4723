"""Factors that make the estimates of measured calls right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.decoders import SMALL, with_settings
from tests.planner.profiles import KEY, contents
from weft.planner.calibration import LEAST_FACTOR, compute_factors
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import DeviceRates, estimate_cpu_rates
from weft.planner.profile import DeviceProfile, parse_links, parse_times
from weft.topology import Layout, Mesh

TRAINED = with_settings(
    SMALL,
    trained=True,
)
LOAD = CallWorkload("train_step", 8, 1, 63)


def build_rates(tensor: int, factors: dict[str, float]) -> DeviceRates:
    times = parse_times(contents(factors=factors))
    links = parse_links(contents()["links"])
    profile = DeviceProfile({(KEY, "float32", tensor, 1): times}, links)
    return estimate_cpu_rates(2, 4.0, 2, threads=1).with_profile(profile)


def joined(seconds: float) -> dict[str, Any]:
    call = {"sequences": 8, "length": 64, "layers": 4, "seconds": seconds}
    return {"shards": call, "tensor": call, "decode": call}


@pytest.mark.parametrize(
    ("kind", "layout", "tensor", "sequences"),
    [("shards", "d2f2", 1, 16), ("tensor", "t2", 2, 8)],
)
def test_with_its_factor_the_measured_call_is_estimated_right(
    kind: str, layout: str, tensor: int, sequences: int
) -> None:
    mesh = Mesh(Layout.parse(layout), (0, 1))
    load = replace(LOAD, num_sequences=sequences)
    plain = estimate_call(TRAINED, load, mesh, build_rates(tensor, {}).share_cores(2, 2))
    measured = plain.seconds + 2 * plain.parts["messages"]
    factors = compute_factors(TRAINED, joined(measured), build_rates(tensor, {}), tensor)
    assert factors[kind] == pytest.approx(3.0)
    corrected = build_rates(tensor, factors).share_cores(2, 2)
    assert estimate_call(TRAINED, load, mesh, corrected).seconds == pytest.approx(measured)


def test_only_messages_of_measured_computation_have_factors() -> None:
    assert set(compute_factors(TRAINED, joined(1.0), build_rates(1, {}), 1)) == {"shards"}
    assert set(compute_factors(TRAINED, joined(1.0), build_rates(2, {}), 2)) == {"tensor", "decode"}
    assert compute_factors(TRAINED, {}, build_rates(1, {}), 1) == {}


def test_noise_makes_no_messages_free() -> None:
    factors = compute_factors(TRAINED, joined(1e-6), build_rates(2, {}), 2)
    assert set(factors.values()) == {LEAST_FACTOR}


def test_decode_steps_have_their_own_factor() -> None:
    mesh = Mesh(Layout(tensor=2), (0, 1))
    load = replace(LOAD, method="generate")
    plain = estimate_call(TRAINED, load, mesh, build_rates(2, {}).share_cores(2, 2))
    corrected = build_rates(2, {"decode": 2.0}).share_cores(2, 2)
    slow = estimate_call(TRAINED, load, mesh, corrected)
    # Eight sums in each of 63 steps, and three exchanges; the prompts' sums are as before.
    exchanged = 8 * (1e-4 + 8 * 100 * 4 / 1e9) + 3 * (1e-4 + 8 * 4 / 1e9)
    assert slow.seconds - plain.seconds == pytest.approx(63 * exchanged, rel=1e-9)
