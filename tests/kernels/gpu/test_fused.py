"""The fused kernels compute what torch's separate ones do: in Triton's interpreter, which needs no
GPU, and on a GPU where there is one.

A process has Triton either interpreted or compiled, so the checks run in a process of their own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bounds import assert_within, gamma, rms_norm_bounds, unit
from weft.errors import ConfigError
from weft.kernels import fused

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
examples = settings(max_examples=15)
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function of this module in a process in which Triton interprets its kernels."""
    context = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        ProcessPoolExecutor(1, mp_context=context, initializer=round_bfloat16) as pool,
    ):
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def round_bfloat16() -> None:
    """Have Triton's interpreter round to bfloat16 as a GPU does; it would cut digits off."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (float32, bfloat16):
            return convert(values, source, target, mode)
        return torch.from_numpy(np.array(values)).bfloat16().view(torch.int16).numpy()

    interpreter._convert_float = rounded


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


# -- switches


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], frozenset[str]]]:
    """Sets WEFT_GPU_KERNELS; the names of the kernels that are then on."""

    def set_to(text: str) -> frozenset[str]:
        monkeypatch.setenv(fused.VARIABLE, text)
        fused.read_switches.cache_clear()
        return fused.read_switches()

    yield set_to
    fused.read_switches.cache_clear()


def test_kernels_are_switched_on_by_name(switch: Callable[[str], frozenset[str]]) -> None:
    assert switch("") == frozenset()
    assert switch(" Store ,") == {"store"}
    assert switch("all") == set(fused.KERNELS)


def test_an_unknown_name_is_refused(switch: Callable[[str], frozenset[str]]) -> None:
    with pytest.raises(ConfigError) as refused:
        switch("store,stores")
    message = str(refused.value)
    assert message.startswith("WEFT_GPU_KERNELS=store,stores: there is no kernel named stores;")
    assert all(name in message for name in fused.KERNELS) and "\n" not in message


def test_a_cpu_is_not_served(switch: Callable[[str], frozenset[str]]) -> None:
    switch("all")
    with torch.no_grad():
        assert not fused.serves("store", torch.zeros(2))


@pytest.mark.parametrize("name", fused.KERNELS)
def test_tensors_of_the_device_are_served_without_gradients(
    name: str, switch: Callable[[str], frozenset[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused.flex, "can_compile", lambda: True)
    device = torch.device("cuda")
    half, whole = (
        SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(3, 8))
        for dtype in (torch.bfloat16, torch.float32)
    )
    switch(name)
    with torch.no_grad():
        assert fused.serves(name, half, half) and fused.serves(name, whole)  # type: ignore[arg-type]
        assert not fused.serves(name, half, whole)  # type: ignore[arg-type]
        other = fused.KERNELS[fused.KERNELS.index(name) - 1]
        assert not fused.serves(other, half)  # type: ignore[arg-type]
        if name == "add_norm":
            assert fused.serves_add_norm(half, half)  # type: ignore[arg-type]
            half.shape = (3, fused.MAX_WIDTH + 1)
            assert not fused.serves_add_norm(half, half)  # type: ignore[arg-type]
    assert not fused.serves(name, half)  # type: ignore[arg-type]


# -- a sum and its norm


def check_add_norm(
    device: str, rows: int, width: int, dtype: torch.dtype, offset: float, eps: float = 1e-5
) -> None:
    """The sum has torch's bits. The norm is that of the sum within the roundings of its statistics,
    and is rounded once to the dtype.
    """
    x, delta = (normal(rows, width, seed=seed, dtype=dtype) for seed in (1, 2))
    weight = normal(width, seed=3, dtype=dtype)
    inputs = (each.to(device) for each in (x, delta, weight))
    with torch.no_grad():
        total, normed = (each.cpu() for each in fused.add_rms_norm(*inputs, eps, offset))
    assert total.dtype == normed.dtype == dtype and torch.equal(total, x + delta)
    wide = total.double()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    exact = wide * inverse * (weight.double() + offset)
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    bound = rms_norm_bounds(wide, weight, eps, offset, torch.ones_like(wide), statistics)[1]
    # Values below the least normal number round to multiples of the least number above 0.
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert_within(normed, exact, bound + unit(dtype) * (exact.abs() + bound) + least / 2)


def check_wide_norms(device: str) -> None:
    for width in (257, 4096, 5120, fused.MAX_WIDTH):
        check_add_norm(device, 3, width, torch.bfloat16, 0.0)
        check_add_norm(device, 3, width, torch.float32, 1.0)


@needs_triton
@examples
@given(
    st.integers(1, 4),
    st.integers(1, 70),
    DTYPES,
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([1e-6, 0.1]),
)
def test_a_sum_and_its_norm_are_those_of_torch(
    run: Run, rows: int, width: int, dtype: torch.dtype, offset: float, eps: float
) -> None:
    run(check_add_norm, "cpu", rows, width, dtype, offset, eps)


@needs_triton
def test_rows_as_wide_as_those_of_networks_are_normed(run: Run) -> None:
    run(check_wide_norms, "cpu")


@needs_cuda
def test_a_sum_and_its_norm_are_computed_on_the_device() -> None:
    check_wide_norms("cuda")
    for dtype in fused.DTYPES:
        check_add_norm("cuda", 300, 2048, dtype, 1.0)


# -- the draw of tokens


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    x = normal(rows, vocab, seed=seed, dtype=torch.float64)
    match kind:
        case "rising":  # each id is the largest so far
            x = x.abs().cumsum(-1) * (60.0 / vocab)
        case "falling":
            x = x.abs().cumsum(-1) * (-60.0 / vocab)
        case "wide":
            x = 40.0 * x
        case "banned":  # most ids, long runs of them among these
            x[x > x.sort(-1).values[:, vocab // 8 : vocab // 8 + 1]] = -torch.inf
            x[:, : vocab // 3] = -torch.inf
            x[:, -1] = 0.0
        case "equal":
            x = x.round().clamp(max=1.0)
    return x.to(dtype)


def check_draws(
    device: str, kind: str, vocab: int, dtype: torch.dtype, seed: int, uniforms: list[float]
) -> None:
    """Each row's token is the inverse of its distribution function at its number, unless a boundary
    is as near as the kernel's roundings.
    """
    logits = make_logits(kind, len(uniforms), vocab, dtype, seed)
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    some = torch.tensor([1.0, 0.7, 0.0, 1.3], dtype=torch.float64)
    temperatures = some.repeat(len(uniforms))[: len(uniforms)]
    columns = torch.stack([numbers, temperatures], 1).to(device)  # as in a decode step
    padded = torch.zeros(len(uniforms), vocab + 3, dtype=dtype)
    padded[:, :vocab] = logits
    for greedy in (False, True):
        with torch.no_grad():
            tokens, logprobs = fused.draw(
                padded.to(device)[:, :vocab], columns[:, 0], None if greedy else columns[:, 1]
            )
        scores = logits.to(torch.promote_types(dtype, torch.float32))
        if greedy:
            assert torch.equal(tokens.cpu(), scores.argmax(-1))
        else:
            scores = scores / temperatures.where(temperatures > 0, 1.0).to(scores.dtype)[:, None]
        check_drawn(scores, None if greedy else numbers, tokens.cpu(), logprobs.cpu())


def check_drawn(scores: Tensor, uniforms: Tensor | None, tokens: Tensor, logprobs: Tensor) -> None:
    """A weight is a product of exponentials of differences d, one for each larger score that its
    lane meets, and one for the row's largest: the d add up to the distance to that. Each is right
    within 4 u, its d within u d, and so is the exponent in units of log 2. A cumulative weight loses
    at most what the mean weight does, and so does the total.
    """
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    u, z, vocab = unit(scores.dtype), scores.double(), scores.shape[1]
    steps = -(-vocab // (fused.DRAW_SEGMENTS * fused.DRAW_LANES))
    p, top, lse = z.softmax(-1), z.amax(-1), z.logsumexp(-1)
    below = torch.where(z > -torch.inf, top[:, None] - z, 0.0)
    lost = (p * u * (2 * below + 4 * (steps + 1))).sum(-1) + gamma(vocab + 64, torch.float64)
    picked, first = tokens[:, None], scores.gather(1, tokens[:, None])[:, 0].double()
    assert bool((p.gather(1, picked) > 0).all()), "an id without weight"
    if uniforms is not None:
        ends = p.cumsum(-1)
        after = ends.gather(1, picked)[:, 0]
        before = after - p.gather(1, picked)[:, 0]
        assert bool((uniforms >= before - 2 * lost).all()), (uniforms, before, tokens)
        assert bool((uniforms < after + 2 * lost).all()), (uniforms, after, tokens)
    size = (top - first) + 4 * (lse - top) + (first - lse).abs() + 6
    rounded = unit(torch.float32) * (first - lse).abs()
    assert_within(logprobs, first - lse, 1.01 * (lost + u * size + rounded))


KINDS = ["normal", "rising", "falling", "wide", "banned", "equal"]
UNIFORMS = st.floats(0.0, 1.0, exclude_max=True)


@needs_triton
@examples
@given(
    st.sampled_from(KINDS),
    st.integers(1, 9000),
    DTYPES,
    st.integers(0, 99),
    st.lists(UNIFORMS, min_size=1, max_size=2),
)
def test_tokens_are_drawn_as_by_the_inverse_of_the_distribution_function(
    run: Run, kind: str, vocab: int, dtype: torch.dtype, seed: int, uniforms: list[float]
) -> None:
    run(check_draws, "cpu", kind, vocab, dtype, seed, uniforms)


def check_not_finite(device: str) -> None:
    """Weights that have diverged show in the log-prob, whichever token is drawn."""
    logits = torch.zeros(6, 300)
    for row, (place, value) in enumerate(
        [(0, torch.nan), (131, torch.nan), (299, torch.nan), (7, torch.inf), (299, torch.inf)]
    ):
        logits[row, place] = value
    uniforms = torch.linspace(0.0, 0.9, 6, dtype=torch.float64, device=device)
    for temperatures in (None, torch.ones_like(uniforms)):
        with torch.no_grad():
            tokens, logprobs = fused.draw(logits.to(device), uniforms, temperatures)
        assert logprobs.isnan().tolist() == [True] * 5 + [False]
        assert bool(((tokens >= 0) & (tokens < 300)).all())


@needs_triton
def test_logits_that_are_not_finite_show_in_the_log_prob(run: Run) -> None:
    run(check_not_finite, "cpu")


VOCABULARIES = [257, 32_000, 128_256, 151_936]


@needs_triton
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabularies_of_networks_are_drawn_from(run: Run, vocab: int) -> None:
    for kind in ("rising", "equal"):
        run(check_draws, "cpu", kind, vocab, torch.float32, 1, [0.1, 0.999])


@needs_cuda
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_drawn_on_the_device(vocab: int) -> None:
    check_not_finite("cuda")
    uniforms = torch.rand(40, generator=torch.Generator().manual_seed(2)).tolist()
    for kind in KINDS:
        for dtype in fused.DTYPES:
            check_draws("cuda", kind, vocab, dtype, 3, uniforms)


# -- the two writes to the cache


def check_store(
    device: str, tokens: int, heads: int, dim: int, dtype: torch.dtype, whole: bool
) -> None:
    """Keys and values are views of one tensor, as after a rotation; if `whole`, keys are a tensor,
    else values are copied.
    """
    size = tokens + 3
    rows = normal(tokens, 5 * heads, dim, dtype=dtype).to(device)
    _, k, v = rows.split([3 * heads, heads, heads], dim=1)
    if whole:
        k = k.contiguous()
    else:
        v = v.transpose(1, 2).contiguous().transpose(1, 2)
    indices = torch.randperm(size, generator=torch.Generator().manual_seed(1))[:tokens].to(device)
    cache = normal(2, size, heads, dim, seed=1, dtype=dtype).to(device)
    expected = cache.clone()
    expected[0].index_copy_(0, indices, k)
    expected[1].index_copy_(0, indices, v)
    fused.store(k, v, cache[0], cache[1], indices)
    assert torch.equal(cache, expected), (tokens, heads, dim, dtype, whole)


def check_wide_stores(device: str) -> None:
    for heads, dim in ((8, 128), (9, 128), (32, 128), (1, 1)):  # a block, and some more
        check_store(device, 5, heads, dim, torch.bfloat16, False)


@needs_triton
@examples
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), DTYPES, st.booleans())
def test_the_cache_is_written_as_by_two_index_copies(
    run: Run, tokens: int, heads: int, dim: int, dtype: torch.dtype, whole: bool
) -> None:
    run(check_store, "cpu", tokens, heads, dim, dtype, whole)


@needs_triton
def test_keys_of_several_blocks_are_written(run: Run) -> None:
    run(check_wide_stores, "cpu")


@needs_cuda
def test_the_cache_is_written_on_the_device() -> None:
    check_wide_stores("cuda")
    check_store("cuda", 300, 8, 128, torch.float32, True)
