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
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels import fused

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
examples = settings(max_examples=20)
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a function of this module in a process in which Triton interprets its kernels."""
    context = multiprocessing.get_context("spawn")
    with (
        patch.dict(os.environ, {"TRITON_INTERPRET": "1"}),
        ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


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
