"""Everything that ranks must settle goes through the `Spread`: two ranks with half a minibatch each are one with all of it.

The ranks are threads, each with an engine of its own; what they exchange passes through a table. So the step, the checks before
it, evaluation and saving are shown to need the other ranks nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.common import Nll, batch_of, spec_of, tiny
from tests.engine.torch.test_engine_train import Broken, parameters
from weft.data.sample import SequenceSample
from weft.engine.backends import common
from weft.engine.spec import OptimizerSpec
from weft.engine.spread import OneDevice
from weft.engine.torch import engine as torch_engine
from weft.engine.torch.engine import TorchEngine
from weft.errors import RunError
from weft.registry import backends
from weft.topology import Layout

SGD = OptimizerSpec(type="sgd", lr=0.1, beta1=0.5, lr_scheduler_type="constant", max_grad_norm=0.5)
GROUPS = [(5, [4, 7, 1]), (2, [6]), (9, [3, 3]), (1, [12]), (0, [2])]
RANKS = 2
SECONDS = 60.0


class Table:
    """Where ranks put what they have and take what all have."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=SECONDS)
        self.slots: list[Any] = [None] * RANKS

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self.slots[rank] = own
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class Threads:
    """Implements `Spread` for data-parallel ranks that each hold all parameters."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.asked = table, rank, list[str]()

    def reduce_denominators(self, own: Mapping[str, float]) -> dict[str, float]:
        self.asked.append("denominators")
        return {key: sum(each[key] for each in self.table.exchange(self.rank, own)) for key in own}

    def num_microbatches(self, own: int) -> int:
        return max(self.table.exchange(self.rank, own))

    def run(self, parts: Sequence[SequenceSample], count: int, accumulate: Callable[[SequenceSample], None]) -> None:
        self.asked.append(f"{len(parts)} of {count}")
        for part in parts:
            accumulate(part)

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> None:
        all_ranks = self.table.exchange(self.rank, [gradient.clone() for gradient in gradients])
        for gradient, *parts in zip(gradients, *all_ranks, strict=True):
            gradient.copy_(sum(parts))

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def gather_values(self, own: Any) -> list[Any]:
        return self.table.exchange(self.rank, own)

    def gather_parameters(self, own: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.asked.append("parameters")
        return own


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "m")


@pytest.fixture
def ranks(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TorchEngine]:
    """Two engines of one layout, in float64, so that what differs is no rounding."""
    monkeypatch.setattr(common, "reading_dtype", lambda spec: torch.float64)
    table, made = Table(), list[TorchEngine]()
    for rank in range(RANKS):
        monkeypatch.setattr(torch_engine, "OneDevice", lambda rank=rank: Threads(table, rank))
        made.append(engine(path))
    monkeypatch.setattr(torch_engine, "OneDevice", OneDevice)
    return made


def engine(path: Path, **changes: Any) -> TorchEngine:
    return backends.get("torch")(spec_of(path, optimizer=SGD, **changes), Layout())


def together(ranks: Sequence[TorchEngine], work: Callable[[int, TorchEngine], Any]) -> list[Any]:
    """What each rank's work gives; they work at the same time."""
    with ThreadPoolExecutor(RANKS) as pool:
        jobs = [pool.submit(work, rank, each) for rank, each in enumerate(ranks)]
        return [job.result(SECONDS) for job in jobs]


def halves(seed: int) -> tuple[SequenceSample, list[SequenceSample]]:
    """A minibatch, and its parts by rank: one of three ids, one of two."""
    whole = batch_of(GROUPS, seed=seed)
    return whole, [whole.select(ids=whole.ids[:3]), whole.select(ids=whole.ids[3:])]


def test_two_ranks_train_as_one(path: Path, ranks: list[TorchEngine]) -> None:
    alone = engine(path)
    made = [halves(seed) for seed in range(3)]
    expected = alone.train([whole for whole, _ in made], Nll(), max_tokens=30)
    found = together(ranks, lambda r, e: e.train([parts[r] for _, parts in made], Nll(), max_tokens=30))
    for mine in found:
        for step, wanted in zip(mine, expected, strict=True):
            for name in ("loss", "nll", "worst", "grad_norm", "num_tokens", "learning_rate"):
                assert step.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-12), name
    for rank in ranks:
        for name, values in parameters(rank).items():
            torch.testing.assert_close(values, parameters(alone)[name], rtol=1e-12, atol=1e-14)
    asked = [rank._spread.asked[:2] for rank in ranks if isinstance(rank._spread, Threads)]
    assert asked == [["denominators", "3 of 3"], ["denominators", "1 of 3"]], "before the first forward pass"


def test_a_rank_with_nothing_trained_steps_with_the_others(path: Path, ranks: list[TorchEngine]) -> None:
    tokens = sum(sum(completions) for _, completions in GROUPS)
    batch = batch_of(GROUPS, loss_mask=[1.0] * (tokens - 14) + [0.0] * 14)
    parts = [batch.select(ids=batch.ids[:3]), batch.select(ids=batch.ids[3:])]
    alone = engine(path)
    [wanted] = alone.train([batch], Nll())
    for [step] in together(ranks, lambda r, e: e.train([parts[r]], Nll())):
        assert step.skipped is None
        assert step.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=1e-12)
    for rank in ranks:
        for name, values in parameters(rank).items():
            torch.testing.assert_close(values, parameters(alone)[name], rtol=1e-12, atol=1e-14)


def test_a_broken_loss_of_one_rank_stops_every_rank_and_a_veto_sees_all(ranks: list[TorchEngine]) -> None:
    _, parts = halves(0)

    def stopped(rank: int, engine: TorchEngine) -> str:
        with pytest.raises(RunError, match="samples: id4") as caught:
            engine.train([parts[rank]], Broken(bad="id4"), max_tokens=14)
        return str(caught.value)

    assert len(set(together(ranks, stopped))) == 1
    for rank in ranks:
        rank._optimizer.zero_grad()  # type: ignore[union-attr]
    seen: list[float] = []

    def veto(stats: Mapping[str, float]) -> str:
        seen.append(stats["nll"])
        return "no"

    together(ranks, lambda r, e: e.train([parts[r]], Nll(), veto=veto))
    assert len(seen) == 2 and seen[0] == seen[1]


def test_two_ranks_evaluate_as_one_and_save_what_they_gather(
    path: Path, ranks: list[TorchEngine], tmp_path: Path
) -> None:
    whole, parts = halves(1)
    expected = engine(path).evaluate(whole, Nll())
    for found in together(ranks, lambda r, e: e.evaluate(parts[r], Nll())):
        assert found == pytest.approx(expected, rel=1e-6)
    (tmp_path / "state").mkdir()
    ranks[0].save_state(tmp_path / "state")
    spread = ranks[0]._spread
    assert isinstance(spread, Threads) and spread.asked.count("parameters") == 2
