"""Measurements of a network's parts: what is measured, and that the parts are whole calls."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.models.common import tiny_config
from weft.engine import measure
from weft.engine.measure import MeasuredNetwork, build_batch, list_packs, measure_pass

NETWORK = MeasuredNetwork(tiny_config("llama"), torch.device("cpu"), "float32", layers=2)


def quiet(text: str) -> None:
    pass


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure small packs, once each."""
    monkeypatch.setattr(measure, "MIN_REPEATS", 1)
    monkeypatch.setattr(measure, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(measure, "SEQUENCE", 8)
    monkeypatch.setattr(measure, "LENGTHS", (16, 1000))
    monkeypatch.setattr(measure, "BATCHES", (1, 4))
    monkeypatch.setattr(measure, "CONTEXTS", (4, 8))
    monkeypatch.setattr(measure, "DECODE_STEPS", 2)


def test_packs_grow_and_then_their_sequences() -> None:
    assert list_packs(40) == [(8, 8), (32, 8), (32, 16)]
    assert list_packs(8) == [(8, 8)]


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("score", {"begin", "blocks", "head"}),
        ("full", {"blocks_backward", "embedding_backward", "update", "begin", "blocks", "head"}),
        (
            "adapters",
            {"blocks_backward", "embedding_backward", "update", "begin", "blocks", "head"},
        ),
    ],
)
def test_passes_have_a_time_for_each_part(kind: str, parts: set[str]) -> None:
    found = measure.measure_passes(NETWORK, kind, 32, quiet)
    assert set(found) == {"tokens", "lengths", "trained", *parts}
    assert found["tokens"] == [8, 32, 32] and found["lengths"] == [8, 8, 16]
    for name in parts - {"embedding_backward"}:
        assert len(found[name]) == 3 and min(found[name]) > 0, name
    if kind == "adapters":  # the frozen embedding has no gradient
        assert found["embedding_backward"] == [0.0] * 3


def test_what_is_trained_is_counted() -> None:
    trained = {
        kind: measure.measure_passes(NETWORK, kind, 8, quiet)["trained"]
        for kind in ("score", "full", "adapters")
    }
    whole = sum(p.numel() for p in NETWORK.build_engine(trained=True)._network.parameters())
    assert trained["score"] == 0 and trained["full"] == whole > trained["adapters"] > 0


@pytest.mark.parametrize("trains", [True, False])
def test_parts_add_up_to_the_call(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is one second later: as many seconds pass as there are parts."""
    seconds = iter(range(10**6))
    engine = NETWORK.build_engine(trained=trains)
    call = engine.train if trains else engine.forward
    monkeypatch.setattr(measure.PassMarks, "mark", _mark_by_count(seconds))
    parts = measure_pass(engine, build_batch([6, 4], 50), trains=trains)
    assert call is not None
    assert parts == dict.fromkeys(parts, 1.0)
    assert len(parts) == (6 if trains else 3)


def _mark_by_count(seconds: Any) -> Any:
    def mark(marks: measure.PassMarks, name: str) -> None:
        marks.reached[name] = float(next(seconds))

    return mark


def test_hooks_are_removed() -> None:
    engine = NETWORK.build_engine(trained=False)
    measure_pass(engine, build_batch([4], 50), trains=False)
    for block in engine._built.blocks:
        assert not block._forward_hooks and not block._forward_pre_hooks


def test_a_part_of_tensor_ranks_is_narrower() -> None:
    half = MeasuredNetwork(NETWORK.config, NETWORK.device, "float32", tensor=2, layers=1)
    assert half.build_engine(trained=False)._network.config.num_heads == (
        NETWORK.config.num_heads // 2
    )


@pytest.mark.parametrize("kind", ["plain", "modules", "adapters"])
def test_decoding_has_a_time_for_each_size(kind: str) -> None:
    found = measure.measure_decoding(NETWORK, kind, quiet)
    assert found["batches"] == [1, 1, 4, 4] and found["contexts"] == [5, 9, 5, 9]
    for name in ("block", "rest", "prefill_block", "prefill_rest"):
        assert len(found[name]) == 4 and min(found[name]) >= 0.0
    for block, rest in zip(found["block"], found["rest"], strict=True):
        assert block + rest > 0


def test_a_slow_measurement_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MIN_REPEATS", 3)
    assert len(measure.repeat(lambda: {})) >= 3
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    assert len(measure.repeat(lambda: {})) == 1


def test_a_network_of_experts_can_be_shortened() -> None:
    config = tiny_config("qwen3_moe")
    short = measure.shorten(config, 1)
    assert short.num_layers == 1 and len(short.windows) <= 1
    engine = MeasuredNetwork(config, NETWORK.device, "float32", layers=1).build_engine(trained=True)
    assert measure_pass(engine, build_batch([4], 50), trains=True)["blocks"] > 0


def test_copies_to_the_host_have_times_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "HOST_COPIES", (64, 128))
    found = measure.measure_host_copies(NETWORK.device)
    assert set(found) == {"out", "back"} and found["out"][0] == [64.0, 128.0]
