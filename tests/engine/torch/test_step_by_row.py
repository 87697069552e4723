"""Losses whose gradient belongs to a row alone: the head makes it at once, and it is that of a
second pass over the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.engine.common import Nll, batch_of, engine_of, tiny
from weft.algorithms.base import Loss
from weft.algorithms.grpo import GRPOLoss
from weft.algorithms.ppo import PPOActorLoss
from weft.algorithms.sft import SFTLoss
from weft.data.sample import SequenceSample
from weft.engine.spec import OptimizerSpec
from weft.engine.torch import step
from weft.errors import ConfigError, RunError
from weft.models.network import output_projection, token_outputs

GROUPS = [(4, [5, 3]), (2, [7]), (200, [1, 4, 6])]  # the last prompt is computed once
ROWS = sum(sum(lengths) for _, lengths in GROUPS)
SGD = OptimizerSpec(
    type="sgd", lr=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0
)
LOSSES: dict[str, Loss] = {
    "sft": SFTLoss(),
    "sft by sequence": SFTLoss(average="sequence"),
    "ppo": PPOActorLoss(),
    "ppo, entropy": PPOActorLoss(entropy_coef=0.3, dual_clip=3.0),
    "grpo": GRPOLoss(kl_coef=0.1, loss_type="grpo"),
    "dapo, entropy": GRPOLoss(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.2),
    "reinforce": GRPOLoss(surrogate="reinforce", loss_type="dr_grpo", max_completion_length=8),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("by_row"))


def batch() -> SequenceSample:
    random = np.random.default_rng(0)
    keys = {
        name: random.normal(size=ROWS).tolist()
        for name in ("advantages", "ref_logprobs", "logprobs")
    }
    return batch_of(GROUPS, **keys, loss_mask=(random.random(ROWS) > 0.3).astype(float).tolist())


def trained(
    path: Path, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], int]:
    """Parameters after a step, and how often logits were computed, two rows at a time."""
    calls: list[int] = []
    project = output_projection.project
    with monkeypatch.context() as patch:
        for module in (output_projection, token_outputs):
            patch.setattr(module, "project", lambda *given: calls.append(1) or project(*given))
        patch.setattr(output_projection, "count_chunk_rows", lambda *_: 2)
        engine = engine_of(path, optimizer=SGD)
        engine.train([batch()], loss, max_tokens=300)
    return {name: value.clone() for name, value in engine._network.state_dict().items()}, len(calls)


@pytest.mark.parametrize("name", LOSSES)
def test_the_step_is_that_of_a_second_pass(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = LOSSES[name]
    assert loss.by_row
    at_once, once = trained(path, loss, monkeypatch)
    monkeypatch.setattr(type(loss), "by_row", False)
    later, twice = trained(path, loss, monkeypatch)
    assert twice == 2 * once
    for key, value in at_once.items():
        assert torch.equal(value, later[key]), key


@dataclass(frozen=True)
class Certain(Nll):
    """Mean entropy of trained tokens: by row, and no function of the log-probs."""

    outputs: ClassVar = frozenset({"logprobs", "entropy"})
    by_row = True

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        return (out["entropy"] * batch.mask).sum() / total["tokens"], {}


@dataclass(frozen=True)
class Nothing(Certain):
    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        return (out["entropy"].detach() * batch.mask).sum() / total["tokens"], {}


def test_a_loss_of_the_entropy_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, _ = trained(path, Certain(), monkeypatch)
    monkeypatch.setattr(Certain, "by_row", False)
    later, _ = trained(path, Certain(), monkeypatch)
    assert all(torch.equal(value, later[key]) for key, value in at_once.items())


def test_a_loss_without_a_gradient(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_of(path)._network.state_dict()
    after, _ = trained(path, Nothing(), monkeypatch)
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_others_compute_their_logits_again() -> None:
    assert not GRPOLoss(importance_level="sequence", eps_clip=3e-4).by_row
    assert not Nll().by_row


@dataclass(frozen=True)
class Smoothed(Nll):
    """Says of itself that it is by row, and multiplies each log-prob by its neighbour's."""

    by_row = True

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        return (out["logprobs"] * torch.roll(out["logprobs"], 1) * batch.mask).sum() / total[
            "tokens"
        ], {}


def test_a_wrong_declaration_is_an_error_at_its_first_use(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device: an accelerator does not compare the gradients that were made with those that
    are due.
    """
    monkeypatch.setattr(token_outputs, "is_same_gradient", lambda one, other: True)
    with pytest.raises(
        ConfigError, match=r"loss 'Smoothed' declares by_row=True, but .* set by_row to False"
    ):
        engine_of(path, optimizer=SGD).train([batch()], Smoothed())


def test_the_declaration_is_checked_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Loss] = []
    check = step.is_row_separable
    monkeypatch.setattr(
        step,
        "is_row_separable",
        lambda loss, *given: (checked.append(loss), check(loss, *given)),
    )
    engine, losses = (
        engine_of(path, optimizer=SGD),
        (SFTLoss(), PPOActorLoss(entropy_coef=0.3), Nll()),
    )
    for loss in losses * 2:
        engine.train([batch()], loss)
    assert checked == list(losses[:2])


def test_rows_that_tell_nothing_do_not_count_as_a_check(path: Path) -> None:
    """One row alone, or no gradient at all; later rows show it."""
    one = batch_of([(4, [1])], loss_mask=[1.0])
    engine = engine_of(path, optimizer=SGD)
    engine.train([one], Smoothed())
    engine.train([batch_of(GROUPS, loss_mask=[0.0] * (ROWS - 1) + [1.0])], Smoothed())
    with pytest.raises(ConfigError, match="declares by_row=True"):
        engine.train([batch()], Smoothed())


@dataclass(frozen=True)
class Infinite(Nll):
    by_row = True

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        return (out["logprobs"] * torch.inf * batch.mask).sum() / total["tokens"], {}


def test_a_loss_that_is_not_finite_is_told_as_such(path: Path) -> None:
    with pytest.raises(RunError, match="loss is not finite"):
        engine_of(path, optimizer=SGD).train([batch()], Infinite())
