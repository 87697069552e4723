"""Times of messages besides, which make the estimates of measured calls right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.planner.decoders import SMALL, with_settings
from tests.planner.profiles import KEY, contents
from weft.planner.calibration import compute_waits
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import DeviceRates, estimate_cpu_rates
from weft.planner.profile import DeviceProfile, parse_links, parse_times
from weft.topology import Layout, Mesh

TRAINED = with_settings(
    SMALL,
    trained=True,
)
LOAD = CallWorkload("train_step", 8, 1, 63)


def build_rates(tensor: int, waits: dict[str, float]) -> DeviceRates:
    times = parse_times(contents(waits=waits))
    links = parse_links(contents()["links"])
    profile = DeviceProfile({(KEY, "float32", tensor, 1): times}, links)
    return estimate_cpu_rates(2, 4.0, 2, threads=1).with_profile(profile)


def joined(seconds: float) -> dict[str, Any]:
    call = {"sequences": 8, "length": 64, "layers": 4, "seconds": seconds}
    return {"shards": call, "tensor": call, "decode": call}


@pytest.mark.parametrize(
    ("kind", "layout", "tensor", "sequences", "messages"),
    [
        # Four layers gathered twice and scattered, the ends once
        ("shards", "d2f2", 1, 16, 4 * 3 + 2),
        # Two sums a layer in both passes, and one of the embeddings
        ("tensor", "t2", 2, 8, 4 * 4 + 1),
    ],
)
def test_with_these_times_the_measured_call_is_estimated_right(
    kind: str, layout: str, tensor: int, sequences: int, messages: int
) -> None:
    mesh = Mesh(Layout.parse(layout), (0, 1))
    load = replace(LOAD, num_sequences=sequences)
    plain = estimate_call(TRAINED, load, mesh, build_rates(tensor, {}).share_cores(2, 2))
    measured = plain.seconds + 0.02 * messages
    waits = compute_waits(TRAINED, joined(measured), build_rates(tensor, {}), tensor)
    assert waits[kind] == pytest.approx(0.02)
    corrected = build_rates(tensor, waits).share_cores(2, 2)
    assert estimate_call(TRAINED, load, mesh, corrected).seconds == pytest.approx(measured)


def test_only_messages_of_measured_computation_take_time_besides() -> None:
    assert set(compute_waits(TRAINED, joined(1.0), build_rates(1, {}), 1)) == {"shards"}
    assert set(compute_waits(TRAINED, joined(1.0), build_rates(2, {}), 2)) == {"tensor", "decode"}
    assert compute_waits(TRAINED, {}, build_rates(1, {}), 1) == {}


def test_noise_makes_no_message_shorter() -> None:
    waits = compute_waits(TRAINED, joined(1e-6), build_rates(2, {}), 2)
    assert set(waits.values()) == {0.0}


def test_decode_steps_have_their_own_time() -> None:
    mesh = Mesh(Layout(tensor=2), (0, 1))
    load = replace(LOAD, method="generate")
    plain = estimate_call(TRAINED, load, mesh, build_rates(2, {}).share_cores(2, 2))
    corrected = build_rates(2, {"decode": 0.001}).share_cores(2, 2)
    slow = estimate_call(TRAINED, load, mesh, corrected)
    # Eight sums in each of 63 steps, and three exchanges; the prompts' sums are as before.
    assert slow.seconds - plain.seconds == pytest.approx(63 * 11 * 0.001, rel=1e-9)
