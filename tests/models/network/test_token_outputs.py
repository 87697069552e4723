"""Log-probs, entropy, top-1, values and scores against the formulas written out, and their
gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within, product_bound, softmax_bound
from tests.models.common import sequences, tiny
from tests.roundings import assert_computed
from weft.algorithms.base import Output
from weft.errors import ConfigError
from weft.models.network import output_projection
from weft.models.network import token_outputs as by_token
from weft.models.network.output_projection import OutputProjection, count_chunk_rows
from weft.models.network.packed import RowGradient, SamplingSupport, pack
from weft.models.network.token_outputs import compute_token_outputs

N, H, V = 7, 5, 11
ALL = frozenset({"logprobs", "entropy", "top1"})
close = functools.partial(assert_close, rtol=1e-10, atol=1e-10)  # of float64


def inputs(
    dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*s, generator=generator, dtype=dtype).requires_grad_()
        for s in ((N, H), (V, H), (V,))
    )
    return hidden, weight, bias, torch.randint(0, V, (N,), generator=generator)


def support(labels: Tensor) -> SamplingSupport:
    """Rows of 3 kept ids with the label among them, and one row without a limit."""
    ids = [
        sorted({int(label), (int(label) + 3) % V, (int(label) + 7) % V}) for label in labels[:-1]
    ]
    return SamplingSupport(
        torch.tensor([i for row in ids for i in row]), torch.tensor([len(row) for row in ids] + [0])
    )


def naive(
    hidden: Tensor,
    labels: Tensor,
    projection: OutputProjection,
    temperature: float,
    kept: SamplingSupport | None,
) -> dict[str, Tensor]:
    logits = hidden @ projection.weight.T + (0 if projection.bias is None else projection.bias)
    if projection.softcap is not None:
        logits = projection.softcap * torch.tanh(logits / projection.softcap)
    logits = logits / temperature
    if kept is not None:
        rows = []
        for row, ids in zip(logits, kept.ids.split(kept.counts.tolist()), strict=True):
            outside = torch.ones(V, dtype=torch.bool)
            outside[ids] = False
            rows.append(row.masked_fill(outside, -math.inf) if len(ids) else row)
        logits = torch.stack(rows)
    logp = logits.log_softmax(-1)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp.masked_fill(p == 0, 0.0), 0.0).sum(-1)
    return {
        "logprobs": logp.gather(1, labels[:, None])[:, 0],
        "entropy": entropy,
        "top1": (logits.argmax(-1) == labels).to(logits.dtype),
    }


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("limited", [False, True])
def test_outputs_and_gradients_are_the_formula(
    chunk: int, with_bias: bool, softcap: float | None, temperature: float, limited: bool
) -> None:
    hidden, weight, bias, labels = inputs()
    projection = OutputProjection(weight, bias if with_bias else None, softcap)
    kept = support(labels) if limited else None
    ours = compute_token_outputs(
        hidden, labels, projection, ALL, temperature=temperature, support=kept, chunk=chunk
    )
    theirs = naive(hidden, labels, projection, temperature, kept)
    scale = torch.linspace(0.5, 2.0, N, dtype=torch.float64)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    for name in ALL:
        close(ours[name], theirs[name])
    for mix in ((1.0, 0.0), (0.0, 1.0), (0.3, -2.0)):
        objective = [
            (mix[0] * o["logprobs"] * scale + mix[1] * o["entropy"] * scale.flip(0)).sum()
            for o in (ours, theirs)
        ]
        gradients = [torch.autograd.grad(value, leaves, retain_graph=True) for value in objective]
        for one, other in zip(*gradients, strict=True):
            close(one, other)


def test_a_label_always_counts_as_kept() -> None:
    hidden, weight, _, labels = inputs()
    others = SamplingSupport((labels + 1) % V, torch.ones(N, dtype=torch.int64))
    both = SamplingSupport(
        torch.stack([labels, (labels + 1) % V], 1).flatten(), torch.full((N,), 2)
    )
    ours = compute_token_outputs(hidden, labels, OutputProjection(weight), ALL, support=others)
    close(ours, compute_token_outputs(hidden, labels, OutputProjection(weight), ALL, support=both))
    assert bool(ours["logprobs"].isfinite().all())


def test_gradcheck() -> None:
    hidden, weight, bias, labels = inputs()

    def both(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        out = compute_token_outputs(
            h,
            labels,
            OutputProjection(w, b, 2.0),
            ALL,
            temperature=0.8,
            support=support(labels),
            chunk=2,
        )
        return out["logprobs"], out["entropy"]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


def test_half_precision_is_normalised_in_float32() -> None:
    hidden, weight, _, labels = inputs(torch.bfloat16)
    out = compute_token_outputs(hidden, labels, OutputProjection(weight), frozenset({"logprobs"}))[
        "logprobs"
    ]
    logits = hidden.double() @ weight.double().T
    exact = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    assert out.dtype == torch.float32
    # of the logits, which are products in float32 of numbers in half precision
    lost = softmax_bound(logits, product_bound(hidden, weight.T))
    assert_within(out, exact, lost[:, 0])
    out.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_the_logits_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    project = by_token.project

    def watch(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal largest
        logits = project(hidden, weight, bias)
        largest = max(largest, logits.numel())
        return logits

    monkeypatch.setattr(by_token, "project", watch)
    monkeypatch.setattr(output_projection, "CHUNK_CELLS", {"cpu": 2 * V})
    monkeypatch.setattr(output_projection, "MIN_CHUNK_ROWS", 1)
    hidden, weight, _, labels = inputs()
    out = compute_token_outputs(hidden, labels, OutputProjection(weight), ALL)
    (out["logprobs"].sum() + out["entropy"].sum()).backward()
    assert largest == 2 * V


def test_chunks_of_a_large_vocabulary_have_rows_enough() -> None:
    cpu = torch.device("cpu")
    assert [count_chunk_rows(size, cpu) for size in (1 << 14, 1 << 15, 1 << 17)] == [
        1024,
        512,
        256,
    ]
    assert count_chunk_rows(1 << 17, torch.device("cuda")) == 1024


def test_only_what_is_wanted_comes() -> None:
    network = tiny()
    packed = pack(sequences([4, 6]))
    assert set(network(packed, frozenset({"entropy"}))) == {"entropy"}
    with pytest.raises(
        ConfigError,
        match=r"an? lm head gives entropy, given_logprobs, logprobs, top1, top_ids, top_logprobs, not scores",
    ):
        network(packed, frozenset({"scores"}))
    with pytest.raises(ConfigError, match="logprobs"):
        tiny(head="value")(packed, frozenset({"logprobs"}))


def test_values_and_scores() -> None:
    rows = sequences([4, 1, 6])
    packed = pack(rows)
    for pooling in ("last", "mean"):
        network = tiny(head="score", dtype=torch.float64)
        network.pooling = pooling
        hidden, weight = network.compute_hidden(packed), network.score.weight[0]
        per_token = (hidden @ weight).split([4, 1, 6])
        expected = torch.stack([s[-1] if pooling == "last" else s.mean() for s in per_token])
        close(network(packed, frozenset({"scores"}))["scores"], expected)
    network = tiny(head="value", dtype=torch.float64)
    expected = (network.compute_hidden(packed) @ network.score.weight[0])[packed.rows]
    close(network(packed, frozenset({"values"}))["values"], expected)


def test_the_sampler_sees_the_same_logits() -> None:
    network = tiny("gemma2", dtype=torch.float64)
    packed = pack(sequences([9]))
    logits = network.next_token_logits(network.compute_hidden(packed)[packed.rows])
    logp = (logits / 0.7).log_softmax(-1).gather(1, packed.labels[:, None])[:, 0]
    close(network(packed, frozenset({"logprobs"}), 0.7)["logprobs"], logp)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # weft's kernels, torch's
def test_a_gradient_known_by_row_spares_the_logits(
    softcap: float | None,
    temperature: float,
    with_entropy: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, bias, labels = inputs(dtype)
    scale = torch.linspace(-0.5, 2.0, N, dtype=dtype)
    calls = 0
    project = by_token.project

    def watch(*args: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return project(*args)

    monkeypatch.setattr(by_token, "project", watch)

    def loss(out: Mapping[Output, Tensor]) -> Tensor:
        """Each row's gradient depends on its own outputs."""
        value = (scale * out["logprobs"].exp()).sum()
        return value + (scale * out["entropy"].square()).sum() if with_entropy else value

    def known(out: Mapping[Output, Tensor]) -> dict[Output, Tensor]:
        with torch.enable_grad():
            free = {key: value.detach().requires_grad_() for key, value in out.items()}
            made = torch.autograd.grad(loss(free), list(free.values()), allow_unused=True)
        return {key: by for key, by in zip(free, made, strict=True) if by is not None}

    def gradients(
        gradient: RowGradient | None, leaves: tuple[Tensor, ...] = (hidden, weight, bias)
    ) -> tuple[Tensor, ...]:
        h, w, b = leaves
        out = compute_token_outputs(
            h,
            labels,
            OutputProjection(w, b, softcap),
            ALL,
            temperature=temperature,
            chunk=3,
            gradient=gradient,
        )
        return torch.autograd.grad(loss(out), leaves)

    plain = gradients(None)
    assert calls == 6
    spared = gradients(known)
    assert calls == 9
    wrong: RowGradient = lambda out: {"logprobs": 2 * scale}  # noqa: E731  costs time alone
    computed_again = gradients(wrong)
    wide = tuple(x.detach().double().requires_grad_() for x in (hidden, weight, bias))
    # each of three times
    assert_computed(
        [*plain, *spared, *computed_again], lambda: 3 * gradients(None, wide), dtype, draws=4
    )
