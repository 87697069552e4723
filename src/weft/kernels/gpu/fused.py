"""Fused GPU kernels in Triton, each of which replaces several kernels of torch during inference.

A decode step is a captured CUDA graph of many small kernels, most of which take less time than the
gap before them. The kernels are off by default. The environment variable `WEFT_GPU_KERNELS` lists
the names of those to use, or is `all`; docs/kernels.md describes them. Callers first ask `serves`.

The kernels are in `weft.kernels.gpu.fused_triton`, which is imported when the first one is needed,
because torch for CPUs is installed without Triton.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.gpu import flex

VARIABLE = "WEFT_GPU_KERNELS"
KERNELS = ("add_norm", "draw", "store")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_WIDTH = 16384  # maximum elements of a row, which one program normalizes at once
ELEMENTS_PER_WARP = 512  # of a row that a program normalizes; a warp has 32 threads
MAX_WARPS = 16
DRAW_SEGMENTS = 128  # parts of the vocabulary whose weights are added separately
DRAW_LANES = 64  # sums of each part
STORE_BLOCK = 1024  # maximum elements of a token's keys that one program copies


@functools.cache
def read_switches() -> frozenset[str]:
    """Return the names of the kernels that the environment variable `WEFT_GPU_KERNELS` selects.

    The variable is a comma-separated list of names in `KERNELS`, or `all`. Without a value, no
    kernel is selected. Raises `ConfigError` for other names.
    """
    text = os.environ.get(VARIABLE, "")
    names = {name.strip().lower() for name in text.split(",") if name.strip()}
    unknown = sorted(names - {*KERNELS, "all"})
    if unknown:
        raise ConfigError(
            f"{VARIABLE}={text}: there is no kernel named {', '.join(unknown)}; write names of "
            f"{', '.join(KERNELS)}, separated by commas, or all; leave it unset for torch's kernels"
        )
    return frozenset(KERNELS if "all" in names else names)


def serves(name: str, *tensors: Tensor) -> bool:
    """Return whether the kernel `name` is switched on and supports these tensors.

    They must be on a GPU and have the same dtype, Triton must be able to compile kernels, and
    gradients must be disabled, because the kernels compute none.
    """
    if not tensors[0].is_cuda or name not in read_switches() or torch.is_grad_enabled():
        return False
    dtype = tensors[0].dtype
    have_one_dtype = all(x.is_cuda and x.dtype == dtype for x in tensors)
    return have_one_dtype and dtype in DTYPES and flex.can_compile()


def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> None:
    """Write k and v, each [T, heads, dim], to the rows `indices`, int64 [T], of keys and values.

    `keys` and `values` are contiguous, [N, heads, dim]. This is `index_copy_` of both, except that
    indices are not checked.
    """
    assert keys.is_contiguous() and values.is_contiguous()
    k = k.flatten(1)
    v = v.flatten(1)
    tokens, width = k.shape
    block = min(flex.round_to_power_of_two(width), STORE_BLOCK)
    _load_kernels().store[tokens, -(-width // block)](
        k, v, keys, values, indices, k.stride(0), v.stride(0), width, block
    )


def serves_add_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether `add_rms_norm` is switched on and supports rows like those of x."""
    return x.shape[-1] <= MAX_WIDTH and serves("add_norm", x, weight)


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the sum x + delta and its RMS norm, both with the shape and dtype of x [T, n].

    The sum is rounded to the dtype of x. Its norm is that of `weft.kernels.rms_norm`, with
    statistics in float32 or wider; it is rounded once, after scaling.
    """
    assert x.shape == delta.shape and x.dtype == delta.dtype
    x = x.contiguous()
    delta = delta.contiguous()
    total = torch.empty_like(x)
    normed = torch.empty_like(x)
    width = x.shape[-1]
    block = flex.round_to_power_of_two(width)
    sources = _load_kernels()
    sources.add_rms_norm[x.numel() // width,](
        x,
        delta,
        weight.contiguous(),
        total,
        normed,
        width,
        EPS=eps,
        OFFSET=offset,
        WIDE=sources.tl.float64 if x.dtype == torch.float64 else sources.tl.float32,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return total, normed


def draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one id per row of `logits` [R, V]; return ids int64 [R] and log-probs float32 [R].

    A row is drawn from the softmax of its logits divided by its temperature: the result is the
    first id whose cumulative weight exceeds `uniform * total`. `uniforms` are random numbers in
    [0, 1), and rows with temperature 0 are padding; both are float64 [R]. If `temperatures` is
    None, the result is the first id of the largest logit. Weights are float32 (float64 for float64
    logits), and their sums are float64. The log-prob of a row with a NaN or an infinite logit is
    NaN. The computation does not depend on the host.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    length = -(-vocab // (DRAW_SEGMENTS * DRAW_LANES)) * DRAW_LANES
    is_greedy = temperatures is None
    temperatures = uniforms if temperatures is None else temperatures
    sources = _load_kernels()
    sources.draw[rows,](
        logits,
        uniforms,
        temperatures,
        tokens,
        logprobs,
        logits.stride(0),
        uniforms.stride(0),
        temperatures.stride(0),
        vocab,
        GREEDY=is_greedy,
        WIDE=sources.tl.float64 if logits.dtype == torch.float64 else sources.tl.float32,
        SEGMENTS=DRAW_SEGMENTS,
        LANES=DRAW_LANES,
        LENGTH=length,
        BLOCK=flex.round_to_power_of_two(length),
        num_warps=MAX_WARPS,
    )
    return tokens, logprobs


@functools.cache
def _load_kernels() -> ModuleType:
    from weft.kernels.gpu import fused_triton

    return fused_triton
