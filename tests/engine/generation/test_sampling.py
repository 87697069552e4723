"""Sampling against a plain one-row reference, and what holds for every distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bounds import assert_within, gamma, softmax_bound, unit
from weft.engine.generation.sampling import (
    TokenBan,
    find_top_logprobs,
    invert_cdf,
    list_supports,
    restricts_vocabulary,
    sample,
    select_support,
)
from weft.engine.spec import GenerationSpec
from weft.models.network.output_projection import OutputProjection
from weft.models.network.packed import SamplingSupport
from weft.models.network.token_outputs import compute_token_outputs

LIMITS = [
    GenerationSpec(),
    GenerationSpec(temperature=0.7),
    GenerationSpec(top_k=5),
    GenerationSpec(top_p=0.6),
    GenerationSpec(min_p=0.2),
    GenerationSpec(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
]


def reference(
    logits: np.ndarray, uniform: float, spec: GenerationSpec
) -> tuple[int, float, list[int]]:
    """(token, log-prob, kept ids) of one row, one id at a time."""
    scores = logits.astype(np.float64) / spec.temperature
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if spec.top_k:
        order = order[: spec.top_k]
    probs = np.exp(scores[order] - scores.max())
    probs /= probs.sum()
    if spec.top_p < 1.0:
        mass, count = 0.0, 0
        while mass < spec.top_p and count < len(order):
            mass += probs[count]
            count += 1
        order, probs = order[:count], probs[:count]
    count = sum(p >= spec.min_p * probs[0] for p in probs)
    kept = sorted(order[:count])
    weights = np.exp(scores[kept] - scores.max())
    running, token = 0.0, kept[-1]
    for i, weight in zip(kept, weights, strict=True):
        running += weight
        if running > uniform * weights.sum():
            token = i
            break
    return token, math.log(weights[kept.index(token)] / weights.sum()), kept


def bound(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The most that each row's log-probs [R] lose in float32, its logits' division among it."""
    scores = logits.double() / temperature
    return softmax_bound(scores, unit(torch.float32) * scores.abs())[:, 0]


def test_the_likeliest_ids_are_those_of_a_softmax_by_hand() -> None:
    """Odds 8 : 4 : 2 : 1 : 1 of ids 2, 0, 4, 1, 3."""
    logits = torch.tensor([[4.0, 1.0, 8.0, 1.0, 2.0]], dtype=torch.float64).log()

    def told(**options: object) -> list[tuple[int, float]]:
        ids, logprobs = find_top_logprobs(logits, GenerationSpec(top_logprobs=3, **options))  # type: ignore[arg-type]
        return [
            (id, round(math.exp(x), 5))
            for id, x in zip(ids[0].tolist(), logprobs[0].tolist(), strict=True)
        ]

    assert told() == [(2, 0.5), (0, 0.25), (4, 0.125)] == told(greedy=True, temperature=0.5)
    assert told(temperature=0.5) == [
        (2, round(64 / 86, 5)),
        (0, round(16 / 86, 5)),
        (4, round(4 / 86, 5)),
    ]
    assert (
        told(top_k=2)[:2] == [(2, round(2 / 3, 5)), (0, round(1 / 3, 5))]
        and told(top_k=2)[2][1] == 0.0
    )
    assert told(top_p=0.6)[:2] == told(top_k=2)[:2] == told(min_p=0.4)[:2]
    ids, logprobs = find_top_logprobs(
        logits, GenerationSpec(top_logprobs=9), TokenBan(torch.tensor([True]), torch.tensor([2]))
    )
    # as draws have it
    assert ids[0, :2].tolist() == [0, 4]
    # the log-prob is rounded once, to float32
    assert_within(logprobs[0, 0], torch.tensor(math.log(0.25)).double(), gamma(1) * math.log(4))
    assert ids.shape == (1, 5) and logprobs[0, 4] == -math.inf


@pytest.mark.parametrize("spec", LIMITS)
@pytest.mark.parametrize("vocab", [3, 128, 1500])
def test_draws_are_those_of_the_reference(spec: GenerationSpec, vocab: int) -> None:
    torch.manual_seed(vocab)
    logits, uniforms = torch.randn(12, vocab) * 2, torch.rand(12, dtype=torch.float64)
    drawn = sample(logits, uniforms, spec)
    expected = [
        reference(row.numpy(), float(u), spec) for row, u in zip(logits, uniforms, strict=True)
    ]
    assert drawn.tokens.tolist() == [token for token, _, _ in expected]
    assert_within(
        drawn.logprobs,
        torch.tensor([logprob for _, logprob, _ in expected]).double(),
        torch.cat(
            [
                bound(row[None, kept], spec.temperature)
                for row, (_, _, kept) in zip(logits, expected, strict=True)
            ]
        ),
    )
    assert drawn.logprobs.dtype == torch.float32
    if restricts_vocabulary(spec, vocab):
        assert drawn.support_mask is not None
        assert list_supports(drawn.support_mask) == [kept for _, _, kept in expected]
    else:
        assert drawn.support_mask is None


def test_a_flat_distribution_wider_than_the_head_is_ranked_whole() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, 4000:] = 5.0
    kept = select_support(logits.double(), GenerationSpec(top_p=0.49999))
    assert list_supports(kept)[0] == list(range(2500)), "of equal scores the lower ids stay"
    assert min(list_supports(kept)[1]) == 4000


def test_ties_at_the_edge_keep_the_lower_ids() -> None:
    kept = select_support(
        torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]], dtype=torch.float64), GenerationSpec(top_k=3)
    )
    assert list_supports(kept) == [[0, 1, 2]]


def test_the_likeliest_id_always_stays() -> None:
    for spec in (GenerationSpec(top_p=0.0), GenerationSpec(min_p=1.0), GenerationSpec(top_k=1)):
        assert list_supports(select_support(torch.randn(4, 50).double(), spec)) != [[]] * 4


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-300, 1e-12, 1.0, 3.0]), min_size=1, max_size=400),
    uniform=st.floats(0.0, 1.0, exclude_max=True),
)
def test_an_id_without_weight_is_never_drawn(weights: list[float], uniform: float) -> None:
    row = torch.tensor([weights], dtype=torch.float64)
    if not any(weights):
        return
    token = invert_cdf(row, torch.tensor([uniform], dtype=torch.float64))
    assert 0 <= int(token) < len(weights)
    assert weights[int(token)] > 0


def test_the_largest_uniform_draws_the_last_id_that_has_weight() -> None:
    weights = torch.zeros(1, 300, dtype=torch.float64)
    weights[0, 10:140] = 0.1
    token = invert_cdf(weights, torch.tensor([1.0 - 2.0**-24], dtype=torch.float64))
    assert int(token) == 139
    assert int(invert_cdf(weights, torch.zeros(1, dtype=torch.float64))) == 10


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniforms = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = sample(logits.expand(4000, 4), uniforms, GenerationSpec(temperature=0.5)).tokens
    expected = (logits[0].double() / 0.5).softmax(-1)
    # Among numbers 1 / 4000 apart an interval holds no more than one more or less than its share;
    # its two ends are sums of shares that are wrong themselves.
    assert_within(
        tokens.bincount(minlength=4).double() / 4000, expected, 1 / 4000 + 2 * bound(logits, 0.5)
    )


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.randn(5, 64)
    drawn = sample(logits, torch.rand(5), GenerationSpec(greedy=True, temperature=0.3, top_p=0.2))
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    assert_within(drawn.logprobs, logits.double().log_softmax(-1).amax(-1), bound(logits))
    assert drawn.support_mask is None


@pytest.mark.parametrize("greedy", [False, True])
def test_banned_ids_leave_the_draw_but_not_the_policy(greedy: bool) -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    banned = TokenBan(torch.tensor([True]), torch.tensor([0]))
    drawn = sample(logits, torch.tensor([0.0]), GenerationSpec(greedy=greedy), banned)
    assert int(drawn.tokens) == (2 if greedy else 1)
    exact = logits.double().log_softmax(-1)[0, drawn.tokens]
    assert_within(drawn.logprobs, exact, bound(logits))


def test_banned_ids_are_not_among_the_kept_ones() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    banned = TokenBan(torch.tensor([True]), torch.tensor([0]))
    drawn = sample(logits, torch.tensor([0.0]), GenerationSpec(top_k=2), banned)
    assert drawn.support_mask is not None
    assert list_supports(drawn.support_mask) == [[1, 2]]
    kept = torch.tensor([[1.0, 2.0]])
    assert_within(drawn.logprobs, kept.double().log_softmax(-1)[0, :1], bound(kept))


@pytest.mark.parametrize("spec", LIMITS)
def test_equal_logits_give_the_log_probs_of_training_to_the_last_bit(spec: GenerationSpec) -> None:
    torch.manual_seed(4)
    hidden, weight = torch.randn(20, 16), torch.randn(200, 16)
    projection = OutputProjection(weight)
    drawn = sample(projection.compute_logits(hidden), torch.rand(20, dtype=torch.float64), spec)
    support = None
    if drawn.support_mask is not None:
        ids = list_supports(drawn.support_mask)
        support = SamplingSupport(
            torch.tensor([id for row in ids for id in row]), torch.tensor([len(row) for row in ids])
        )
    want = frozenset({"logprobs"})
    trained = compute_token_outputs(
        hidden, drawn.tokens, projection, want, temperature=spec.temperature, support=support
    )
    assert torch.equal(drawn.logprobs, trained["logprobs"])


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, uniforms = torch.randn(33, 700), torch.rand(33, dtype=torch.float64)
    for spec in LIMITS:
        together = sample(logits, uniforms, spec)
        for row in (0, 17, 32):
            alone = sample(logits[row : row + 1], uniforms[row : row + 1], spec)
            assert int(alone.tokens) == int(together.tokens[row])
            # each is that close to the exact one
            lost = 2 * bound(logits[row : row + 1], spec.temperature)
            assert_within(alone.logprobs, together.logprobs[row : row + 1], lost)


@pytest.mark.parametrize("limit", [{"top_p": 0.99}, {"min_p": 0.1}, {"top_k": 40}])
def test_of_a_flat_position_the_likeliest_ids_are_recorded(limit: dict[str, float]) -> None:
    logits = torch.zeros(2, 50)
    logits[1, 20:23] = torch.tensor([1.0, 2.0, 3.0])
    spec = GenerationSpec(**limit, max_support=4, record_support=True)
    drawn = sample(logits, torch.tensor([0.9999, 0.9999]), spec)
    assert drawn.support_mask is not None
    kept = list_supports(drawn.support_mask)
    assert kept[0] == [0, 1, 2, 3] and set(kept[1]) >= {20, 21, 22} and len(kept[1]) <= 4
    assert int(drawn.tokens[0]) == 3 and int(drawn.tokens[1]) in kept[1]
    quarter = torch.full((1,), 0.25, dtype=torch.float64)
    assert_within(drawn.logprobs[:1], quarter.log(), bound(torch.zeros(1, 4)))
    assert (
        len(
            list_supports(
                sample(logits, torch.tensor([0.5, 0.5]), GenerationSpec(**limit)).support_mask
            )[0]
        )
        > 4
    )


def test_a_top_k_of_the_whole_vocabulary_is_no_limit() -> None:
    assert restricts_vocabulary(GenerationSpec(top_k=7), 8)
    assert not restricts_vocabulary(GenerationSpec(top_k=8), 8)
    assert not restricts_vocabulary(GenerationSpec(top_k=2, greedy=True), 8)
