"""What a pass shares of the prefixes of a micro-batch, and what that counts as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.common import EXACT, batch_of, engine_of
from tests.engine.prefixes import CONFIG, network_of, templated
from tests.tiny import make_llama
from weft.algorithms.base import Output
from weft.algorithms.sft import SFTLoss
from weft.engine import rows
from weft.engine.device import TokenCost
from weft.engine.rows import PackLayout
from weft.engine.torch import prepare

CPU = torch.device("cpu")


def computed(
    network: Any, batch: Any, settings: prepare.PassSettings, device: torch.device
) -> tuple[PackLayout, Any]:
    """(the layout of the pack, the outputs of all its rows)."""
    made = prepare.prepare(network, batch, settings, device)
    given = made.given
    return made.layout, made.scatter_outputs(
        network(given.x, given.want, given.temperature, given.support)
    )


@pytest.fixture(autouse=True)
def _join_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_PROMPT", 1)


@pytest.mark.parametrize("key", ["logprobs", "ref_logprobs", "values"])
def test_what_another_pass_scored_is_shared_by_id_alone(key: str) -> None:
    batch = templated([(40, [5]), (40, [5])], [0, 0])
    assert (
        prepare.share_training_prefixes(
            PackLayout.from_sample(batch), batch.data, batch, CPU
        ).num_saved_tokens
        == 20
    )
    scored = batch.update(batch_of([(40, [5]), (40, [5])], **{key: [0.0] * 10}).select(keys=[key]))
    assert (
        prepare.share_training_prefixes(
            PackLayout.from_sample(scored), scored.data, scored, CPU
        ).num_saved_tokens
        == 0
    )


@pytest.mark.parametrize(
    ("device", "rest", "spared"),
    [("cpu", 948, 20), ("cpu", 949, 0), ("cuda", 28, 20), ("cuda", 29, 0)],
)
def test_what_ids_share_must_spare_some_of_all_tokens(device: str, rest: int, spared: int) -> None:
    """Of two ids that begin with 20 tokens a fiftieth, on an accelerator a quarter."""
    batch = templated([(21, [5]), (21, [5 + rest])], [0, 0])
    assert (
        prepare.share_training_prefixes(
            PackLayout.from_sample(batch), batch.data, batch, torch.device(device)
        ).num_saved_tokens
        == spared
    )


@pytest.mark.usefixtures("float64_throughout")
def test_a_training_pass_computes_once_what_ids_begin_with() -> None:
    network, batch = network_of(CONFIG), templated([(40, [5]), (30, [2, 4]), (40, [6])], [0, 1, 0])
    want: frozenset[Output] = frozenset({"logprobs"})
    apart, scored = computed(network, batch, prepare.PassSettings(want), CPU)
    once, trained = computed(network, batch, prepare.PassSettings(want, trained_only=True), CPU)
    assert apart.num_saved_tokens == 29 and once.num_saved_tokens == 20 + 29
    torch.testing.assert_close(trained["logprobs"], scored["logprobs"], **EXACT)


def test_sequences_that_drop_something_share_nothing() -> None:
    network, batch = network_of(CONFIG), templated([(40, [5]), (40, [6, 6])], [0, 0])
    settings = prepare.PassSettings(frozenset({"logprobs"}), trained_only=True)
    assert computed(network, batch, settings, CPU)[0].num_saved_tokens
    assert not computed(network, batch, replace(settings, dropout=(0, 0)), CPU)[0].num_saved_tokens


def test_operations_are_counted_as_they_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts of 40 tokens that share 20, with 5 and 6 tokens after them, all of which are
    trained.
    """
    counted = []
    training = TokenCost.count_training_flops

    def counting(
        self: TokenCost, lengths: Any, *, rows: float | None = None, across: float = 0.0
    ) -> float:
        counted.append((lengths.tolist(), rows, across))
        return training(self, lengths, rows=rows, across=across)

    monkeypatch.setattr(TokenCost, "count_training_flops", counting)
    engine_of(make_llama(tmp_path)).train([templated([(40, [5]), (40, [6])], [0, 0])], SFTLoss())
    assert counted == [([20, 25, 26], 11.0, (25 + 26) * 20)]
