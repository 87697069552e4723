"""Measurements of messages between two processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.common import tiny_config
from tests.ranks import Ranks
from weft.engine import measure, measure_links
from weft.engine.measure import MeasuredNetwork
from weft.errors import RunError

NETWORK = MeasuredNetwork(tiny_config("llama"), torch.device("cpu"), "float32", layers=1)


def measure_here() -> dict[str, Any]:
    """What each of two ranks measures, with few and small messages."""
    measure_links.SIZES = (64, 128)
    measure_links.REPEATS = 1
    measure_links.CONTENTION_TOKENS = 8
    measure.REPEAT_SECONDS = 0.0
    engine = NETWORK.build_engine(trained=True)
    return measure_links.measure_with_other(engine, NETWORK.device)


def test_two_processes_measure_all_messages(ranks: Ranks) -> None:
    for found in ranks.run(measure_here):
        assert set(found) == {"sum", "gather", "scatter", "send", "contention"}
        assert found["contention"] >= 1.0
        for name in ("sum", "gather", "scatter", "send"):
            sizes, seconds = found[name]
            assert sizes == [64, 128] and min(seconds) > 0


def measure_disturbed(disturbed: int) -> float:
    """Return the contention where other work doubles a pass of each rank, the `disturbed`-th one."""
    seconds = [1.0] * 6
    seconds[disturbed] = 2.0
    passes = iter(seconds)
    measure_links.measure_pass = lambda engine, batch, trains: {"blocks": next(passes)}
    engine = NETWORK.build_engine(trained=True)
    return measure_links._measure_contention(engine, NETWORK.device)


@pytest.mark.parametrize("disturbed", range(6))
def test_a_disturbed_pass_does_not_count(disturbed: int, ranks: Ranks) -> None:
    """Passes alone and together take turns."""
    assert ranks.run(measure_disturbed, disturbed) == [1.0, 1.0]


@pytest.mark.slow  # two processes import torch anew
def test_processes_are_started_and_ended() -> None:
    found = measure_links.measure_links(NETWORK, 1, lambda text: None)
    assert found is not None and found["startup_seconds"] > 0.1


class Pipe:
    """A pipe on which a process has sent `sent`, or nothing."""

    def __init__(self, *sent: Any) -> None:
        self.sent = list(sent)

    def poll(self, seconds: float) -> bool:
        return bool(self.sent)

    def recv(self) -> Any:
        found = self.sent.pop()
        if found is EOFError:
            raise EOFError
        return found


@pytest.mark.parametrize(
    ("pipe", "said"),
    [
        (Pipe(), "gave no answer in 300 s"),
        (Pipe(EOFError), "ended early"),
        (Pipe((False, "a traceback")), "failed:\na traceback"),
    ],
)
def test_a_process_that_fails_is_reported(pipe: Any, said: str) -> None:
    with pytest.raises(RunError, match=said):
        measure_links._receive(pipe)
