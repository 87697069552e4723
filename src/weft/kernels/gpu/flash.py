"""Flash attention over packed sequences on CUDA: `torch.nn.attention.varlen`, in bfloat16 and
float16.

Which parameters the installed torch has is read once, from the function itself: torch 2.11 has
neither grouped heads nor block tables, 2.12 and later have both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from weft.kernels.types import AttentionSpec, VarlenLengths

DTYPES = (torch.bfloat16, torch.float16)
MOST_DIM = 256  # of a head; the kernels also want a multiple of 8
LEAST_CAPABILITY = (8, 0)  # Ampere
HOPPER = 9  # what version 3 is made for
THIRD = "FA3"
PACKAGE = "flash_attn_interface"  # its name in torch, and where it comes from


@dataclass(frozen=True)
class Abilities:
    """What this torch's `varlen_attn` takes."""

    grouped_heads: bool  # fewer key-value heads than query heads
    block_table: bool  # keys in pages, without an automatic number of splits

    @classmethod
    def of(cls, function: Any) -> Abilities:
        names = inspect.signature(function).parameters
        paged = {"block_table", "seqused_k", "num_splits"} <= set(names)
        return cls("enable_gqa" in names, paged)


@functools.cache
def kernel() -> Callable[..., Any]:
    """`varlen_attn`; imported where it is called, because with it comes torch's compiler, which
    takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def abilities() -> Abilities:
    return Abilities.of(kernel())


def choose(device: torch.device, asked: str) -> str | None:
    """Have the flash attention of this process be of the version that is `asked` for: "fa2",
    torch's own; "fa3" (Shah et al. 2024, arXiv:2407.08608), whose package torch puts in its place;
    "auto", 3 where the device is a Hopper and the package is there.

    torch knows one at a time, for all its devices. What a user should know about the choice, if
    anything. Raises `RuntimeError` where 3 cannot be had.
    """
    if asked == "fa2":
        if active() == THIRD:
            torch.nn.attention.restore_flash_attention_impl()
        return None
    fits = device.type == "cuda" and torch.version.hip is None and _capability(device)[0] == HOPPER
    if fits:
        obstacle = _activate()
    else:
        obstacle = f"{device} is no GPU of compute capability {HOPPER}.x"
    if asked == "fa3" and obstacle is not None:
        raise RuntimeError(obstacle)
    if not fits:
        return None
    if obstacle is None:
        return f"flash attention 3 of {PACKAGE}"
    return f"flash attention is torch's own, version 2: {obstacle}"


def active() -> str | None:
    """What has taken the place of torch's own kernels."""
    current: str | None = getattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: None
    )()
    return current


def version() -> int:
    """Of the flash attention that this process computes with."""
    return 3 if active() == THIRD else 2


def _activate() -> str | None:
    """Put version 3 in place, unless something is there already; why that cannot be, if so."""
    other = active()
    if other is not None:
        return None if other == THIRD else f"{other} is in its place already"
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        return f"torch {torch.__version__} has no place for another"
    try:
        activate(THIRD)
    except ModuleNotFoundError:
        return f"{PACKAGE}, the package of version 3, is not installed"
    except (ImportError, RuntimeError, ValueError) as refused:
        return f"torch does not take version 3 ({str(refused).splitlines()[0]})"
    return None


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernels take such queries."""
    fits = dtype in DTYPES and head_dim % 8 == 0 and head_dim <= MOST_DIM
    return fits and device.type == "cuda" and _has_kernels(device.index or 0)


@functools.cache
def _has_kernels(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= LEAST_CAPABILITY


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def packed(q: Tensor, k: Tensor, v: Tensor, at: VarlenLengths, spec: AttentionSpec) -> Tensor:
    """Causal attention: q [T, heads, dim], k and v [U, kv_heads, dim] -> [T, heads, dim], with
    gradients.
    """
    grouped: dict[str, Any] = {}
    group = q.shape[1] // k.shape[1]
    if group > 1 and abilities().grouped_heads:
        grouped["enable_gqa"] = True
    elif group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    return kernel()(
        _in_rows(q),
        _in_rows(k),
        _in_rows(v),
        at.queries,
        at.keys,
        at.most_queries,
        at.most_keys,
        scale=spec.scale,
        window_size=_reach(spec.window),
        **grouped,
    )


def paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, spec: AttentionSpec
) -> Tensor:
    """One new token a row over its pages: q [R, heads, dim], keys and values [pages, page,
    kv_heads, dim] -> [R, heads, dim].

    `table` int32 [R, W] holds the rows' pages in order, `used` int32 [R] their tokens, the new ones
    included. A row's one query is its last token, so without a window nothing has to be kept from
    it: said as no window at all, the kernel computes the query heads of a key head together and
    reads its keys once. Only where `abilities().block_table`.

    The keys are never split among thread blocks: some builds of torch leave rows unwritten then
    (pytorch issue 194167), and unsplit rows do not depend on their company.
    `test_automatic_splits_write_every_row` says which builds of torch are right.
    """
    rows = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32)
    most = table.shape[1] * keys.shape[1]
    bounds = None if active() == THIRD else rows * most  # version 3 takes them from the table alone
    grouped = q.shape[1] != keys.shape[2]
    reach = (-1, -1) if spec.window is None else _reach(spec.window)
    return kernel()(
        q.contiguous(),
        keys,
        values,
        rows,
        bounds,
        1,
        most,
        scale=spec.scale,
        window_size=reach,
        enable_gqa=grouped,
        seqused_k=used,
        block_table=table,
        num_splits=1,
    )


def _in_rows(x: Tensor) -> Tensor:
    """As the kernels read it: each head's numbers side by side, whatever lies between the heads."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _reach(window: int | None) -> tuple[int, int]:
    """How far a query sees to the left, itself not counted, and to the right."""
    return (-1, 0) if window is None else (window - 1, 0)
