"""Outputs of several ids a row against the formulas written out: log-probs of K ids and of any
other, and their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.bounds import assert_within, gamma, product_bound, softmax_bound, unit
from tests.models.common import sequences, tiny
from tests.models.network.test_token_outputs import H, N, V, close, inputs, support
from tests.roundings import assert_computed
from weft.algorithms.base import Output
from weft.models.network import output_projection
from weft.models.network.event_outputs import compute_given_outputs, compute_top_outputs
from weft.models.network.output_projection import OutputProjection
from weft.models.network.packed import RowGradient, TopIds, pack
from weft.models.network.token_outputs import compute_outputs, compute_token_outputs

K = 4


def some_ids(count: int = K, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(V, generator=generator)[:count] for _ in range(N)]).int()


def naive_logits(hidden: Tensor, projection: OutputProjection, temperature: float) -> Tensor:
    logits = hidden @ projection.weight.T + (0 if projection.bias is None else projection.bias)
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    return logits / temperature


def naive(logits: Tensor, ids: Tensor) -> Tensor:
    """[N, K + 1], from all probabilities."""
    p = logits.softmax(-1)
    own = p.gather(1, ids.long())
    others = p.scatter(1, ids.long(), 0.0).sum(-1, keepdim=True)
    return torch.cat([own, others], dim=1).log()


class Exactly:
    """The formulas in float64 from float32 or float64 inputs, and the largest error that their
    arithmetic in `dtype` may make.

    Bounds are first-order in u; the terms in u^2 are below the slack that `gamma(K + 8)` leaves for
    K + 4 roundings.
    """

    def __init__(
        self,
        hidden: Tensor,
        projection: OutputProjection,
        temperature: float,
        ids: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.dtype, self.ids, self.labels, self.temperature = dtype, ids.long(), labels, temperature
        self.hidden, self.weight = hidden.detach().double(), projection.weight.detach().double()
        bias = (
            torch.zeros(V).double()
            if projection.bias is None
            else projection.bias.detach().double()
        )
        logits = self.hidden @ self.weight.T + bias
        # H products and the bias are added up; dividing by the temperature or the cap rounds once
        # or twice more.
        error = gamma(H + 3, dtype) * (self.hidden.abs() @ self.weight.abs().T + bias.abs())
        self.slope, slope_error = torch.ones_like(logits), torch.zeros_like(logits)
        if (cap := projection.softcap) is not None:
            bent = torch.tanh(logits / cap)
            # tanh moves by no more than its argument, is right within 2 u and is multiplied once.
            bent_error = error / cap + 4 * unit(dtype)
            # The slope is 1 - tanh^2: it moves by 2 |tanh| times the error of tanh, and its own
            # operations round at 1 or less.
            self.slope, slope_error = (
                1 - bent.square(),
                2 * bent.abs() * bent_error + 3 * unit(dtype),
            )
            logits, error = cap * bent, cap * bent_error
        self.slope_error, self.logits = slope_error, logits / temperature
        # [N, 1]
        self.lost = softmax_bound(
            self.logits, error / temperature + unit(dtype) * self.logits.abs(), dtype
        )
        logp = self.logits.log_softmax(-1)
        self.values = {
            "given_logprobs": naive(self.logits, ids),
            "logprobs": logp.gather(1, labels[:, None])[:, 0],
        }
        self.p = logp.exp()

    def gradients(self, by_event: Tensor, by_square: float) -> list[tuple[Tensor, Tensor]]:
        """Of sum(by_event * given) + by_square * sum(logprobs^2) by hidden, weight and bias: each
        exact, with its bound.

        By a logit it is d = sum over events of g (own share - p). Each term's factors, g of the
        label among them, are wrong by at most twice `lost` relatively (of g 2 |by_square|
        (|logprob| + 1) counts as the size), and K + 4 roundings join them.
        """
        rest = self.p.scatter(1, self.ids, 0.0)
        share = (
            torch.zeros(N, K + 1, V)
            .double()
            .scatter(2, torch.cat([self.ids, self.ids[:, :1]], 1)[..., None], 1.0)
        )
        share[:, -1] = rest / rest.sum(-1, keepdim=True)
        label = torch.nn.functional.one_hot(self.labels, V).double()[:, None]
        own, by = torch.cat([share, label], 1), by_event.double()
        logprob = self.values["logprobs"][:, None]
        g = torch.cat([by, 2 * by_square * logprob], 1)[..., None]  # [N, K + 2, 1]
        size = torch.cat([by.abs(), 2 * abs(by_square) * (logprob.abs() + 1)], 1)[..., None]
        d = (g * (own - self.p[:, None])).sum(1)
        d_error = (size * (own + self.p[:, None])).sum(1) * (
            2 * self.lost + gamma(K + 8, self.dtype)
        )
        d_error = d_error * self.slope + d.abs() * self.slope_error
        d, d_error = d * self.slope / self.temperature, d_error / self.temperature
        sums = (
            (d, d_error, self.weight),
            (d.T, d_error.T, self.hidden),
            (d.T, d_error.T, torch.ones(N).double()),
        )
        return [
            (left @ right, product_bound(left, right, self.dtype, 3) + e @ right.abs())
            for left, e, right in sums
        ]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # weft's kernels, torch's
def test_given_logprobs_and_gradients_are_the_formula(
    chunk: int, with_bias: bool, softcap: float | None, temperature: float, dtype: torch.dtype
) -> None:
    hidden, weight, bias, labels = inputs(dtype)
    projection, ids = OutputProjection(weight, bias if with_bias else None, softcap), some_ids()
    ours = compute_given_outputs(
        hidden, labels, ids, projection, temperature=temperature, labelled=True, chunk=chunk
    )
    exact = Exactly(hidden, projection, temperature, ids, labels, dtype)
    for name, value in exact.values.items():
        assert ours[name].dtype == dtype
        assert_within(ours[name], value, exact.lost if value.ndim == 2 else exact.lost[:, 0], name)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    by_event = torch.randn(N, K + 1, generator=torch.Generator().manual_seed(2), dtype=dtype)
    for by_given, by_label in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        loss = (by_given * by_event * ours["given_logprobs"]).sum() + by_label * ours[
            "logprobs"
        ].square().sum()
        made = torch.autograd.grad(loss, leaves, retain_graph=True)
        for value, (right, bound) in zip(
            made, exact.gradients(by_given * by_event, by_label), strict=False
        ):
            assert_within(value, right, bound)


def test_gradcheck() -> None:
    hidden, weight, bias, labels = inputs()
    ids = some_ids()

    def both(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = compute_given_outputs(
            h, labels, ids, OutputProjection(w, b, 2.0), temperature=0.8, labelled=True, chunk=2
        )
        return out["given_logprobs"], out["logprobs"]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_ids_leave_nothing_over(dtype: torch.dtype) -> None:
    hidden, weight, _, labels = inputs(dtype)
    ids, projection = some_ids(V), OutputProjection(weight)
    out = compute_given_outputs(hidden, labels, ids, projection)["given_logprobs"]
    assert (out[:, -1] == -math.inf).all()
    target = torch.randn(N, V, generator=torch.Generator().manual_seed(3), dtype=dtype)
    ours = torch.autograd.grad((target * out[:, :-1]).sum(), [hidden, weight])
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]

    def exact() -> tuple[Tensor, ...]:
        found = (wide[0] @ wide[1].T).log_softmax(-1).gather(1, ids.long())
        return found, *torch.autograd.grad((target * found).sum(), wide)

    assert_computed([out[:, :-1], *ours], exact, dtype, draws=4)


def test_what_is_left_over_keeps_its_digits() -> None:
    """In float32, where the given ids hold all but e^-60: 1 less their sum would be 0."""
    logits = torch.full((1, V), -60.0).index_fill(1, torch.tensor([0]), 5.0)
    hidden = torch.eye(V)[:1].requires_grad_()
    weight = torch.zeros(V, V).index_copy(1, torch.tensor([0]), logits.T)
    ids = torch.tensor([[0, 1]])
    out = compute_given_outputs(hidden, torch.tensor([0]), ids, OutputProjection(weight))[
        "given_logprobs"
    ]
    exact = math.log(9.0) - 65.0
    # the logits are exact: each is one number, times one
    assert_within(
        out[0],
        torch.tensor([0.0, -65.0, exact]).double(),
        softmax_bound(logits, torch.zeros_like(logits).double())[0],
    )
    # d log(rest) / d hidden = W^T (q - p), and q is uniform over the nine others
    out[0, 2].backward()
    assert hidden.grad is not None
    # q = exp(-60 - lse) of an lse of -60 + log 9, rounded by u |lse|, which is then q's relative
    # error: of what sums to 60. The difference, exp (within 4 u), lse's own sum of nine and the sum
    # of eleven products round too, at 65 at most.
    bound = 60 * unit(torch.float32) * (60 - math.log(9.0)) + 65 * gamma(1 + 4 + 9 + V)
    assert_within(hidden.grad[0, 0], torch.tensor(-65.0), bound)


@pytest.mark.parametrize("below", [None, 6])
@pytest.mark.parametrize("count", [1, K, V + 5])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_ids_with_their_logprobs(
    count: int, below: int | None, chunk: int, dtype: torch.dtype
) -> None:
    hidden, weight, bias, labels = inputs(dtype)
    projection = OutputProjection(weight, bias, 1.5)
    out = compute_top_outputs(
        hidden, projection, TopIds(count, below), temperature=0.7, chunk=chunk
    )
    logits = naive_logits(hidden, projection, 0.7)
    kept = min(count, V if below is None else below)
    wanted = logits[:, :below].topk(kept).indices
    assert out["top_ids"].dtype == torch.int32 and out["top_ids"].tolist() == wanted.tolist()
    exact = Exactly(hidden, projection, 0.7, wanted, labels, dtype)
    assert (out["top_logprobs"][:, -1] == -math.inf).all() == (kept == V)
    told = slice(kept if kept == V else kept + 1)  # all ids together leave nothing over
    assert_within(out["top_logprobs"][:, told], exact.values["given_logprobs"][:, told], exact.lost)
    assert not out["top_logprobs"].requires_grad
    given = compute_given_outputs(
        hidden, labels, out["top_ids"], projection, temperature=0.7, chunk=chunk
    )["given_logprobs"]
    assert torch.equal(given, out["top_logprobs"]), (
        "a student that is its teacher is not apart from it"
    )


def test_half_precision_is_normalised_in_float32() -> None:
    hidden, weight, _, labels = inputs(torch.bfloat16)
    out = compute_given_outputs(hidden, labels, some_ids(), OutputProjection(weight))[
        "given_logprobs"
    ]
    assert out.dtype == torch.float32
    # nor are the logits rounded
    exact = Exactly(hidden, OutputProjection(weight), 1.0, some_ids(), labels, torch.float32)
    assert_within(out, exact.values["given_logprobs"], exact.lost)
    out.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_the_logits_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    project = OutputProjection.compute_columns

    def watch(self: OutputProjection, hidden: Tensor) -> Tensor:
        logits = project(self, hidden)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(OutputProjection, "compute_columns", watch)
    monkeypatch.setattr(output_projection, "CHUNK_CELLS", {"cpu": 2 * V})
    monkeypatch.setattr(output_projection, "MIN_CHUNK_ROWS", 1)
    hidden, weight, _, labels = inputs()
    compute_given_outputs(hidden, labels, some_ids(), OutputProjection(weight))[
        "given_logprobs"
    ].sum().backward()
    compute_top_outputs(hidden, OutputProjection(weight), TopIds(2))
    assert max(sizes) == 2 * V and len(sizes) == 3 * 4


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_known_by_row_spares_the_logits(
    softcap: float | None,
    temperature: float,
    labelled: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, labels = inputs(dtype)
    scale = torch.linspace(-0.5, 2.0, N, dtype=dtype)
    calls = []
    project = OutputProjection.compute_columns
    monkeypatch.setattr(
        OutputProjection,
        "compute_columns",
        lambda self, h: calls.append(1) or project(self, h),
    )

    def loss(out: Mapping[Output, Tensor]) -> Tensor:
        """Each row's gradient depends on its own outputs."""
        value = (scale[:, None] * out["given_logprobs"].exp()).square().sum()
        return value + (scale * out["logprobs"].square()).sum() if labelled else value

    def known(out: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
        with torch.enable_grad():
            free = {key: value.detach().requires_grad_() for key, value in out.items()}
            made = torch.autograd.grad(loss(free), list(free.values()), allow_unused=True)
        found = {key: by for key, by in zip(free, made, strict=True) if by is not None}
        return {"logprobs": torch.zeros_like(out["logprobs"]), **found}

    def gradients(
        gradient: RowGradient | None, leaves: tuple[Tensor, ...] = (hidden, weight, bias)
    ) -> tuple[Tensor, ...]:
        h, w, b = leaves
        out = compute_given_outputs(
            h,
            labels,
            some_ids(),
            OutputProjection(w, b, softcap),
            temperature=temperature,
            labelled=labelled,
            chunk=3,
            gradient=gradient,
        )
        return torch.autograd.grad(loss(out), leaves)

    plain = gradients(None)
    assert len(calls) == 6
    spared = gradients(known)
    assert len(calls) == 9
    wrong: RowGradient = lambda out: {"given_logprobs": torch.ones_like(out["given_logprobs"])}  # noqa: E731  costs time alone
    computed_again = gradients(wrong)
    wide = tuple(x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    # each of three times
    assert_computed(
        [*plain, *spared, *computed_again], lambda: 3 * gradients(None, wide), dtype, draws=4
    )


# an output matrix of its own; a tied one with a soft cap
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_network_gives_all_outputs_together(family: str) -> None:
    """Outputs of labels, of given ids and of the entropy: values, and gradients that add up, also
    in a tied matrix.
    """
    network = tiny(family).double()  # both sides rotate the same rows: the same bits
    packed = pack(sequences([4, 6]))
    generator = torch.Generator().manual_seed(4)
    size = network.config.vocab_size
    ids = torch.stack([torch.randperm(size, generator=generator)[:3] for _ in packed.rows])
    want: frozenset[Output] = frozenset({"given_logprobs", "logprobs", "entropy"})
    ours = network(replace(packed, ids=ids), want, 0.9)
    logits = network.next_token_logits(network.compute_hidden(packed)[packed.rows]) / 0.9
    logp = logits.log_softmax(-1)
    theirs = {
        "given_logprobs": naive(logits, ids),
        "logprobs": logp.gather(1, packed.labels[:, None])[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
    }
    assert set(ours) == want
    for name, value in theirs.items():
        close(ours[name], value)
    leaves = list(network.parameters())
    made = [
        torch.autograd.grad(sum(v.square().sum() for v in out.values()), leaves)
        for out in (ours, theirs)
    ]
    for one, other in zip(*made, strict=True):
        close(one, other)
    top = network(replace(packed, ids=TopIds(2)), frozenset({"top_ids"}))
    assert set(top) == {"top_ids"} and top["top_ids"].shape == (len(packed.rows), 2)


def test_a_gradient_by_row_is_not_asked_for_where_outputs_come_one_by_one() -> None:
    """It is a function of all of them, and an accelerator does not check what it says."""
    network, packed = tiny(), pack(sequences([4, 6]))
    asked: list[frozenset[Output]] = []

    def gradient(out: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
        asked.append(frozenset(out))
        return {key: torch.ones_like(value) for key, value in out.items()}

    given = replace(
        packed, ids=torch.zeros(len(packed.rows), 1, dtype=torch.int32), row_gradient=gradient
    )
    network(given, frozenset({"given_logprobs", "entropy"}))
    assert not asked
    network(given, frozenset({"given_logprobs", "logprobs"}))
    assert asked == [{"given_logprobs", "logprobs"}]


def test_several_ids_are_of_the_whole_vocabulary_whatever_was_sampled() -> None:
    hidden, weight, _, labels = inputs()
    packed = replace(pack([torch.arange(3)]), labels=labels, ids=some_ids())
    want: frozenset[Output] = frozenset({"given_logprobs", "logprobs"})
    kept = support(labels)
    limited = compute_outputs(hidden, packed, OutputProjection(weight), want, 1.0, kept)
    close(limited["given_logprobs"], naive(hidden @ weight.T, some_ids()))
    plain = compute_token_outputs(
        hidden, labels, OutputProjection(weight), frozenset({"logprobs"}), support=kept
    )
    assert torch.equal(limited["logprobs"], plain["logprobs"])
