"""`torch.nn.attention.varlen.varlen_attn` as documented, written out row by row: what weft's calls
may rely on.
"""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """query [T, H, D]; key and value [U, Hkv, D], or [pages, page, Hkv, D] with a table int32 [S,
    W]. The last query of a sequence stands at its last key; each sees `window_size[0]` keys to the
    left of its place and `window_size[1]` to the right (-1: all).
    """
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    heads = key.shape[-2]
    assert enable_gqa or query.shape[1] == heads
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    if block_table is not None:
        assert num_splits == 1 and block_table.dtype == torch.int32 and seqused_k is not None
        assert (
            seqused_k.dtype == torch.int32
            and block_table.is_contiguous()
            and cu_seq_k.shape == cu_seq_q.shape
        )
    outputs = []
    for row, (start, stop) in enumerate(
        zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)
    ):
        if block_table is None:
            span = slice(int(cu_seq_k[row]), int(cu_seq_k[row + 1]))
            k, v = key[span], value[span]
        else:
            assert seqused_k is not None
            used = int(seqused_k[row])
            k, v = (x[block_table[row].long()].flatten(0, 1)[:used] for x in (key, value))
        count, length = stop - start, len(k)
        assert count <= max_q and length <= max_k
        k, v = (x.repeat_interleave(query.shape[1] // heads, dim=1) for x in (k, v))
        places = torch.arange(length, device=query.device)
        own = places[length - count :, None]
        seen = torch.ones(count, length, dtype=torch.bool, device=query.device)
        if window_size[1] >= 0:
            seen &= places <= own + window_size[1]
        if window_size[0] >= 0:
            seen &= places >= own - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", query[start:stop], k) * scale
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)
