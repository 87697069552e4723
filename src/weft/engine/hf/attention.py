"""Replacement of the attention of a `transformers` decoder by weft's attention.

`register` adds weft's attention function `compute_packed_attention` to the `AttentionInterface` of
`transformers`. The function reads which tokens attend to which from an attribute of the attention
module that calls it. Nothing else in the decoder changes. Before use, a trial
(`weft.engine.hf.trial`) tests whether the decoder's results stay exact, because a decoder may also
mix tokens outside of attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.engine.hf.imported import AttentionInterface, AttentionMaskInterface
from weft.kernels import AttentionSpec
from weft.models.attention.contexts import AttentionContext, AttentionInputs
from weft.models.attention.dispatch import attend
from weft.models.network.dropout import TokenDropout

NAME = "weft_packed"
STATE = "weft_pass"  # attribute of an attention module
# arguments of attention functions that weft's attention doesn't support
UNKNOWN = ("s_aux", "position_bias")


class UnsupportedAttention(Exception):
    """Raised if a decoder's attention needs something that weft's attention does not compute."""


@dataclass(frozen=True)
class AttentionPass:
    """Data that an attention module needs about the current forward pass.

    `layer` is the index of the module among the attention modules, in call order.
    """

    context: AttentionContext
    dropout: TokenDropout | None
    layer: int


@dataclass
class AttentionRecorder:
    """Stand-in for an `AttentionPass` that records attention calls in the trial run of a decoder.

    `callers` are the attention modules in call order. For each module, `shapes` contains the
    numbers of query and key-value heads, and the sizes of key and value heads.
    """

    context: AttentionContext
    callers: list[nn.Module]
    shapes: list[tuple[int, int, int, int]]  # query heads, kv heads, key dim, value dim


def compute_packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute weft's attention with the signature of an attention function of `transformers`.

    `query` is `[1, heads, T, dim]`, `key` and `value` are `[1, kv_heads, T, dim]`, and the result
    is `[1, T, heads, dim]`.
    """
    state = vars(module).get(STATE)
    window = settings.get("sliding_window")
    if isinstance(state, AttentionRecorder):
        _record(state, module, (query, key, value), attention_mask, settings)
        state = AttentionPass(state.context, None, len(state.callers) - 1)
    assert isinstance(state, AttentionPass), "HFNetwork sets the pass before it calls the module"
    spec = AttentionSpec(
        scale=settings.get("scaling") or query.shape[-1] ** -0.5,
        window=window,
        softcap=settings.get("softcap"),
        dropout=settings.get("dropout") or 0.0,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    given = AttentionInputs(q, k, v, spec, state.layer, state.dropout)
    return attend(given, state.context)[None], None


def _record(
    recorder: AttentionRecorder,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    settings: Any,
) -> None:
    query, key, value = qkv
    for name in UNKNOWN:
        if settings.get(name) is not None:
            raise UnsupportedAttention(f"its attention has {name}")
    limit = None if mask is None else int(mask.flatten()[0])
    if limit is not None and limit != settings.get("sliding_window"):
        raise UnsupportedAttention("its attention mask is neither causal nor a sliding window")
    if module in recorder.callers:
        raise UnsupportedAttention("its attention runs several times a layer")
    recorder.callers.append(module)
    recorder.shapes.append((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))


def get_window_limit(
    *_: Any, local_size: int | None = None, device: Any = None, **__: Any
) -> Tensor | None:
    """Return the size of the attention window, or None if there is no window.

    `transformers` calls this function to build an attention mask. Weft's attention needs no mask,
    so the size is returned instead. `_record` checks that the attention function uses the same
    size.
    """
    if local_size is None:
        return None
    return torch.full((1, 1, 1, 1), float(local_size))


def register() -> None:
    """Register weft's attention in `transformers`; repeated calls change nothing."""
    AttentionInterface.register(NAME, compute_packed_attention)
    AttentionMaskInterface.register(NAME, get_window_limit)
