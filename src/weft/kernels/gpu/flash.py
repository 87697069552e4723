"""Flash attention over packed sequences on CUDA, in bfloat16 and float16.

The kernels are called through `torch.nn.attention.varlen.varlen_attn`. Its signature is read once,
to find out which parameters the installed version of torch supports: torch 2.11 supports neither
grouped heads nor block tables, and later versions support both.
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
MAX_DIM = 256  # largest head size; it must also be a multiple of 8
MIN_CAPABILITY = (8, 0)  # Ampere
HOPPER_MAJOR = 9  # major compute capability that version 3 requires
FA3_NAME = "FA3"  # torch's name of version 3
FA3_PACKAGE = "flash_attn_interface"  # package of version 3


@dataclass(frozen=True)
class FlashFeatures:
    """Optional features of the `varlen_attn` function in the installed torch."""

    grouped_heads: bool  # supports fewer key-value heads than query heads
    block_table: bool  # supports paged keys and values, with a fixed number of splits

    @classmethod
    def from_function(cls, function: Any) -> FlashFeatures:
        """Return the features that the signature of `function` supports."""
        names = inspect.signature(function).parameters
        paged = {"block_table", "seqused_k", "num_splits"} <= set(names)
        return cls("enable_gqa" in names, paged)


@functools.cache
def load_kernel() -> Callable[..., Any]:
    """Import and return torch's function `varlen_attn`.

    The function is imported only at the first call, because the import also loads torch's compiler,
    which takes seconds.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def find_features() -> FlashFeatures:
    """Return the features of the installed torch."""
    return FlashFeatures.from_function(load_kernel())


def choose(device: torch.device, version: str) -> str | None:
    """Select this process's version of flash attention, and return a note about it for the user.

    `version` is "fa2", "fa3" or "auto". "fa2" is torch's own implementation. "fa3" is version 3
    (Shah et al. 2024, arXiv:2407.08608), whose package replaces torch's kernels. "auto" is version
    3 if the device is a Hopper GPU and the package is installed, else version 2. torch uses one
    version at a time for all devices. Returns None for "fa2", and for "auto" on a device that is
    not a Hopper GPU. Raises `RuntimeError` if "fa3" is not available.
    """
    if version == "fa2":
        if find_active_implementation() == FA3_NAME:
            torch.nn.attention.restore_flash_attention_impl()
        return None
    is_hopper = (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device)[0] == HOPPER_MAJOR
    )
    if is_hopper:
        obstacle = _activate()
    else:
        obstacle = f"{device} is not a GPU of compute capability {HOPPER_MAJOR}.x"
    if version == "fa3" and obstacle is not None:
        raise RuntimeError(obstacle)
    if not is_hopper:
        return None
    if obstacle is None:
        return f"flash attention 3 of {FA3_PACKAGE}"
    return f"flash attention is torch's own, version 2: {obstacle}"


def find_active_implementation() -> str | None:
    """Return the name of the implementation that replaces torch's own; None if torch's own is used."""
    current: str | None = getattr(
        torch.nn.attention, "current_flash_attention_impl", lambda: None
    )()
    return current


def find_version() -> int:
    """Return the version of flash attention that this process uses."""
    return 3 if find_active_implementation() == FA3_NAME else 2


def _activate() -> str | None:
    """Activate version 3 of flash attention, unless torch's own version is already replaced.

    Returns None, or the reason why version 3 cannot be activated.
    """
    active = find_active_implementation()
    if active is not None:
        return None if active == FA3_NAME else f"{active} is already active"
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        return f"torch {torch.__version__} cannot use another version"
    try:
        activate(FA3_NAME)
    except ModuleNotFoundError:
        return f"{FA3_PACKAGE}, the package of version 3, is not installed"
    except (ImportError, RuntimeError, ValueError) as error:
        return f"torch rejects version 3 ({str(error).splitlines()[0]})"
    return None


def serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the flash kernels support this dtype and head size on the device."""
    is_supported = dtype in DTYPES and head_dim % 8 == 0 and head_dim <= MAX_DIM
    return is_supported and device.type == "cuda" and _has_kernels(device.index or 0)


@functools.cache
def _has_kernels(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= MIN_CAPABILITY


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: VarlenLengths, spec: AttentionSpec
) -> Tensor:
    """Return causal attention over packed sequences, [T, heads, dim].

    q is [T, heads, dim]; k and v are [U, kv_heads, dim]. `lengths` assigns queries and keys to
    sequences. The result is differentiable.
    """
    options: dict[str, Any] = {}
    group = q.shape[1] // k.shape[1]
    if group > 1 and find_features().grouped_heads:
        options["enable_gqa"] = True
    elif group > 1:
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
    return load_kernel()(
        _make_rows_contiguous(q),
        _make_rows_contiguous(k),
        _make_rows_contiguous(v),
        lengths.queries,
        lengths.keys,
        lengths.most_queries,
        lengths.most_keys,
        scale=spec.scale,
        window_size=_compute_window_size(spec.window),
        **options,
    )


def attend_paged(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return attention of each row's new token over the tokens of the row, [R, heads, dim].

    q is [R, heads, dim]; keys and values are [pages, page, kv_heads, dim]. `table`, int32 [R, W],
    has the page indices of each row in order. `used`, int32 [R], has the number of tokens of each
    row, including the new one. Call this only if `find_features().block_table` is True.

    The new token is the last one of its row, so no causal mask is needed. The kernel can therefore
    process all query heads of a key head together, and reads the keys only once.

    The keys of a row are never split among thread blocks (`num_splits=1`). With splitting, the
    result of a row depends on the other rows of the batch, and some builds of torch leave rows
    unwritten (pytorch issue 194167). `test_automatic_splits_write_every_row` shows which builds of
    torch are correct.
    """
    query_bounds = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32)
    max_keys = table.shape[1] * keys.shape[1]
    # Version 3 finds the keys by the table alone.
    uses_bounds = find_active_implementation() != FA3_NAME
    key_bounds = query_bounds * max_keys if uses_bounds else None
    has_groups = q.shape[1] != keys.shape[2]
    window_size = (-1, -1) if spec.window is None else _compute_window_size(spec.window)
    return load_kernel()(
        q.contiguous(),
        keys,
        values,
        query_bounds,
        key_bounds,
        1,  # queries per row
        max_keys,
        scale=spec.scale,
        window_size=window_size,
        enable_gqa=has_groups,
        seqused_k=used,
        block_table=table,
        num_splits=1,
    )


def _make_rows_contiguous(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, as the kernels require.

    The strides of the other dimensions can be arbitrary.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _compute_window_size(window: int | None) -> tuple[int, int]:
    """Return the window of a query as (number of keys before it, number of keys after it).

    The query also attends to its own key. The number -1 means that there is no limit.
    """
    return (-1, 0) if window is None else (window - 1, 0)
