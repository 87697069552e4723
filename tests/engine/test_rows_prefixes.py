"""A prefix that several sequences go on from is computed once: outputs and gradients are those of
the repeated prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds import Float64Throughout
from tests.engine.common import EXACT, batch_of
from tests.engine.prefixes import CONFIG, Groups, network_of, templated
from weft.data.sample import SequenceSample
from weft.engine import rows
from weft.engine.rows import PackLayout, pack
from weft.models.attention.contexts import Prefixed
from weft.models.network.config import Rope
from weft.models.network.transformer import Transformer

CPU = torch.device("cpu")
SHARING: dict[str, Callable[[PackLayout, SequenceSample], PackLayout]] = {
    "nothing": lambda places, batch: places,
    "by id": lambda places, batch: places.share_by_id(),
    "by prefix": PackLayout.share_by_prefix,
}
groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def _join_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MIN_PROMPT", 1)


def outputs_of(
    network: Transformer, batch: SequenceSample, want: str, share: str
) -> tuple[torch.Tensor, list[Any]]:
    """(the output, the gradient of a weighted sum of it by every parameter)."""
    places = PackLayout.from_sample(batch)
    places = SHARING[share](places, batch)
    packed = pack(batch, places, CPU, extra=1 if want == "values" else 0)
    if share != "nothing":
        assert isinstance(packed.attention, Prefixed) == bool(places.list_joins())
    network.zero_grad()
    out = network(packed, frozenset({want}))[want]
    exists = (
        torch.ones(len(out))
        if want == "scores"
        else torch.from_numpy(places.index_rows(int(want == "values"))[1])
    )
    weights = torch.linspace(-1, 1, len(out)) * exists
    (out * weights).sum().backward()
    return (out * exists).detach(), [
        None if p.grad is None else p.grad.clone() for p in network.parameters()
    ]


def check(network: Transformer, batch: SequenceSample, want: str, share: str = "by id") -> None:
    with Float64Throughout():
        repeated, their_gradients = outputs_of(network, batch, want, share="nothing")
        shared, gradients = outputs_of(network, batch, want, share)
    torch.testing.assert_close(shared, repeated, **EXACT)
    for ours, theirs in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@settings(max_examples=40, deadline=None)
@given(groups)
def test_logprobs_and_gradients_are_those_of_repeated_prompts(sizes: Groups) -> None:
    check(network_of(CONFIG), batch_of(sizes), "logprobs")


@settings(max_examples=40, deadline=None)
@given(groups, st.lists(st.integers(0, 1), min_size=4, max_size=4))
def test_what_different_ids_begin_with_is_computed_once(
    sizes: Groups, templates: list[int]
) -> None:
    batch = templated(sizes, templates)
    check(network_of(CONFIG), batch, "logprobs", "by prefix")
    check(network_of(CONFIG, "score"), batch, "scores", "by prefix")


@settings(max_examples=15, deadline=None)
@given(groups)
def test_values_and_scores_too(sizes: Groups) -> None:
    check(network_of(CONFIG, "value"), batch_of(sizes), "values")
    check(network_of(CONFIG, "score"), batch_of(sizes), "scores")


def test_the_shared_pack_by_hand() -> None:
    lengths = {"prompt": [[2], [1]], "completion": [[3, 1], [2]]}
    data = {
        "prompt": torch.tensor([10, 11, 30]),
        "completion": torch.tensor([20, 21, 22, 25, 40, 41]),
    }
    batch = SequenceSample.from_groups(["a", "b"], lengths, data)
    places = PackLayout.from_sample(batch).share_by_id()
    packed = pack(batch, places, CPU)
    assert packed.tokens.tolist() == [10, 11, 20, 21, 22, 11, 25, 30, 40, 41]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 1, 2, 0, 1, 2]
    assert isinstance(packed.attention, Prefixed)
    assert packed.attention.dense.starts == [0, 1, 5, 7, 10]
    assert packed.attention.last_tokens.tolist() == [4, 6, 9]
    assert [(join.prefix, join.continuation) for join in packed.attention.continuations] == [
        ((0, 1), (1, 7))
    ]
    assert packed.rows.tolist() == [1, 2, 3, 5, 7, 8]
    assert packed.labels.tolist() == [20, 21, 22, 25, 40, 41]
    assert pack(batch, places, CPU, extra=1).rows.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (places.num_cross_pairs, places.segment_lengths.tolist()) == (
        4 * 1 + 2 * 1,
        [1, 4, 2, 3],
    )


def test_ids_that_begin_alike_stand_together_in_the_pack() -> None:
    """The first and the third begin with 1, 2, 3; the second comes after both."""
    lengths = {"prompt": [[4], [2], [5]], "completion": [[1], [2], [3]]}
    data = {
        "prompt": torch.tensor([1, 2, 3, 4, 9, 8, 1, 2, 3, 5, 6]),
        "completion": torch.tensor([20, 21, 22, 23, 24, 25]),
    }
    batch = SequenceSample.from_groups(["a", "b", "c"], lengths, data)
    places = PackLayout.from_sample(batch).share_by_prefix(batch)
    packed = pack(batch, places, CPU)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 20, 5, 6, 23, 24, 25, 9, 8, 21, 22]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert isinstance(packed.attention, Prefixed)
    assert packed.attention.dense.starts == [0, 3, 5, 10, 14]
    assert [(join.prefix, join.continuation) for join in packed.attention.continuations] == [
        ((0, 3), (3, 10))
    ]
    assert packed.attention.last_tokens.tolist() == [4, 13, 9]
    assert packed.rows.tolist() == [3, 11, 12, 6, 7, 8]
    assert packed.labels.tolist() == [20, 21, 22, 23, 24, 25]
    assert (places.num_saved_tokens, places.num_cross_pairs) == (3, (2 + 5) * 3)


def test_what_cannot_be_joined_is_repeated() -> None:
    assert network_of(CONFIG).can_share_prefixes(100)
    assert not network_of(replace(CONFIG, windows=(None, 64))).can_share_prefixes(100)
    assert network_of(replace(CONFIG, windows=(None, 64))).can_share_prefixes(64)
    assert not network_of(replace(CONFIG, attention_softcap=30.0)).can_share_prefixes(100)
    dynamic = Rope(dim=8, theta=10000.0, scaling="dynamic", values={"factor": 2.0, "original": 64})
    assert not network_of(replace(CONFIG, rope=dynamic)).can_share_prefixes(100)


def test_single_completions_and_short_prompts_are_packed_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows, "MIN_PROMPT", 16)
    batch = batch_of([(40, [5]), (15, [3, 4]), (0, [2, 2])])
    assert not PackLayout.from_sample(batch).share_by_id().prefix.any()
    pair = batch_of([(16, [3, 4])])
    for share in ("by id", "by prefix"):
        assert SHARING[share](PackLayout.from_sample(pair), pair).prefix.tolist() == [15, 15]
        assert not SHARING[share](PackLayout.from_sample(batch), batch).num_saved_tokens
    answers = SequenceSample.from_groups(
        ["a", "b"], {"completion": [[20], [20]]}, {"completion": torch.ones(40).long()}
    )
    assert not PackLayout.from_sample(answers).share_by_prefix(answers).num_saved_tokens
    long = PackLayout.from_sample(batch_of([(65, [3] * 5), (65, [3] * 4), (64, [3] * 9)]))
    assert long.share_by_id(least=65, spared=256).prefix.tolist() == [64] * 5 + [0] * 13
    np.testing.assert_array_equal(PackLayout.from_sample(batch).lengths, [45, 18, 19, 2, 2])
