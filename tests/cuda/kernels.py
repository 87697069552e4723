"""What the kernels of a GPU compute, as they are documented, on the stand-in device.

Each counts its calls in `CALLS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.cuda.device import uncounted
from tests.kernels.gpu.varlen_contract import varlen_attn
from weft.engine.generation import caches, graphs, sampling
from weft.kernels import compiling, flash, flex, formulas, fused

CALLS: Counter[str] = Counter()


def install(*, reads_pages: bool) -> None:
    """Have weft use them; with `can_read_pages` flash attention as torch 2.12 and later have it, else
    as 2.11 has it.
    """
    flash.load_kernel = lambda: _flash  # type: ignore[assignment]
    flash.find_features = lambda: flash.FlashFeatures(reads_pages, reads_pages)  # type: ignore[assignment]
    flex.can_compile = lambda: True  # type: ignore[assignment]
    flex._compile = lambda: _flex  # type: ignore[assignment]
    compiling.compile_dynamic = _counted  # type: ignore[assignment]
    fused.store = _store  # type: ignore[assignment]
    fused.add_rms_norm = _add_rms_norm  # type: ignore[assignment]
    fused.draw = _draw  # type: ignore[assignment]
    torch.nn.functional.rms_norm = _rms_norm
    caches.build_cuda_capture = graphs.build_cuda_capture = lambda _: _capture
    torch.nn.functional.scaled_dot_product_attention = _rectangles  # type: ignore[assignment]


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of a compiled function its formula."""

    def compute(*given: Any) -> Any:
        CALLS[f"compiled {function.__name__}"] += 1
        with uncounted():
            return function(*given)

    return compute


def _rms_norm(*given: Any) -> Tensor:
    """One kernel on a GPU, and several operations on a CPU."""
    CALLS["rms_norm"] += 1
    with uncounted():
        return torch.rms_norm(*given)


def _add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    CALLS["add_norm"] += 1
    _computes_on(x)
    with uncounted():
        total = x + delta
        if offset:
            return total, formulas.rms_norm(total, weight, eps, offset)[0]
        return total, torch.rms_norm(total, weight.shape, weight, eps)


def _draw(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    CALLS["draw"] += 1
    _computes_on(logits)
    with uncounted(), patch.object(fused, "serves", lambda *_: False):
        drawn = sampling.sample_rows(logits, uniforms, temperatures)
    return drawn.tokens, drawn.logprobs


def _store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, indices: Tensor) -> None:
    CALLS["store"] += 1
    _computes_on(k)
    with uncounted():
        keys.index_copy_(0, indices, k)
        values.index_copy_(0, indices, v)


def _flash(query: Tensor, *rest: Any, **named: Any) -> Tensor:
    CALLS["flash"] += 1
    assert query.dtype in flash.DTYPES and query.device.type == "cuda"
    _computes_on(query)
    with uncounted():
        return varlen_attn(query, *rest, **named)


def _computes_on(given: Tensor) -> None:
    """A kernel runs on the thread's device, wherever the tensors lie that it is given."""
    here = torch.cuda.current_device()
    assert given.device.index == here, (
        f"a kernel on device {here} is given tensors of {given.device}"
    )


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    score_mod: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Keys count that the mask's function admits in a block that the mask lists."""
    CALLS["flex"] += 1
    _computes_on(q)
    with uncounted():
        return _attended(q, k, v, block_mask, scale, enable_gqa, score_mod)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
    score_mod: Callable[..., Tensor] | None,
) -> Tensor:
    (batch, heads, length, _), device = q.shape, q.device
    assert enable_gqa or heads == k.shape[1]
    # Most pages of a pool are listed by no row: their keys are left out, for they would take most
    # of the time.
    listed = _listed(block_mask, length, k.shape[2])
    kept = listed.flatten(0, 2).any(0).nonzero()[:, 0]
    listed, kept = listed[..., kept].to(device), kept.to(device)
    k, v = (
        x[:, :, kept].repeat_interleave(heads // k.shape[1], 1).expand(batch, -1, -1, -1).float()
        for x in (k, v)
    )
    batches, head, query = (
        torch.arange(n, device=device).view([-1 if i == at else 1 for i in range(4)])
        for at, n in enumerate((batch, heads, length))
    )
    index = [batches, head, query, kept.view(1, 1, 1, -1)]
    scores = q.float() @ k.transpose(2, 3) * scale
    if score_mod is not None:
        scores = score_mod(scores, *index)
    seen = block_mask.mask_mod(*index) & listed
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).to(q.dtype)


def _listed(mask: BlockMask, length: int, keys: int) -> Tensor:
    """bool [B, 1, length, keys], on the host."""
    by_query, by_key = mask.BLOCK_SIZE
    blocks = torch.zeros(
        len(mask.kv_num_blocks), -(-length // by_query), -(-keys // by_key), dtype=torch.bool
    )
    for counts, order in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        if counts is None or order is None:
            continue
        for batch, rows in enumerate(counts[:, 0].tolist()):
            for row, count in enumerate(rows):
                blocks[batch, row, order[batch, 0, row, :count].tolist()] = True
    return blocks.repeat_interleave(by_query, 1)[:, None, :length].repeat_interleave(by_key, 3)[
        ..., :keys
    ]


def _capture(
    run: Callable[[Tensor], Tensor], inputs: Tensor
) -> tuple[Callable[[], object], Tensor]:
    """A replay reads the memory that the capture read, so all of it must be there still."""
    CALLS["captures"] += 1
    _computes_on(inputs)
    output, known = torch.empty_like(run(inputs)), _addresses(run)

    def replay() -> None:
        _computes_on(inputs)
        assert _addresses(run) == known, (
            "weights or pages lie elsewhere than when the graph was captured"
        )
        output.copy_(run(inputs))

    return replay, output


def _addresses(run: Any) -> list[int]:
    owner = getattr(getattr(run, "func", run), "__self__", None)
    if not isinstance(owner, caches.PageCaches):
        return []
    weights: list[Tensor] = list(owner._network.parameters())
    return [x.data_ptr() for x in (*owner._pool.keys, *owner._pool.values, *weights)]


def _rectangles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention, which asks the device which of its kernels fits."""
    group = query.shape[1] // key.shape[1]
    assert (enable_gqa or group == 1) and dropout_p == 0.0
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    return scores.softmax(-1).to(value.dtype) @ value
