"""Tensor parallelism: the ranks of a group split the heads, the MLPs' width and the vocabulary.

    narrow = Transformer(config.narrow_to_rank(t, rank))  # its weights: `compute_tensor_slice`
    join(narrow, config, group, shares_rows=True)
    narrow(packed, want)                            # every rank gets the whole network's outputs
    # after the backward passes of a step:
    sum_gradients(find_canonical_parameters(narrow), config, group, device, shares_rows=True)

Every rank passes the whole hidden states to its part of attention and MLP, and the results are
summed over the ranks. In the backward pass, the gradients of the hidden states are summed (Shoeybi
et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3). With sequence parallelism (`shares_rows`;
Korthikanti et al. 2022, "Reducing activation recomputation", arXiv:2205.05198, section 4.2.2), the
ranks also split the rows between attention and MLP: rows are gathered before each of the two, and
their result is summed and scattered. The communication volume is the same, because an all-reduce is
a reduce-scatter followed by an all-gather. Generation uses whole hidden states.
`weft.topology.compute_tensor_slice` defines how weights are split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.models.network import lora
from weft.models.network.block import Block
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import Linear
from weft.models.network.moe import ExpertStack, MoE
from weft.models.network.parameters import StoredParameter
from weft.models.network.shared_rows import SharedRows
from weft.models.network.transformer import Transformer
from weft.parallel.collectives import (
    RowAssignment,
    gather_from_ranks,
    sum_backward,
    sum_both_ways,
    sum_forward,
    sum_over_ranks,
)
from weft.parallel.vocabulary import GroupVocabularySplit
from weft.topology import compute_heads, compute_vocabulary

# Parameters that every rank holds whole but uses only for its own heads or width, so each rank has
# only a part of their gradient.
PARTIAL = (
    r"blocks\.\d+\.(attention\.([qkv]\.lora_a|o\.lora_b|[qk]_norm\.weight)"
    r"|mlp\.(router\.weight|.*(gate|up)\.lora_a|.*down\.lora_b))"
)
# Parameters used between attention and MLP. With sequence parallelism, each rank has only a part of
# these gradients too.
BETWEEN = (
    r"(positions|embed_in|embed_out|score)\.weight|norm\.(weight|bias)"
    r"|blocks\.\d+\.(norm[12](_post)?\.(weight|bias)|(attention\.o|mlp\.down)\.bias)"
)
# Parameters of key and value heads, which several ranks hold if there are fewer heads than ranks.
# COPIED_NORM adds the norm over all keys.
COPIED = r"blocks\.\d+\.attention\.([kv]\.(weight|bias|lora_b)|prefix\.[kv])"
COPIED_NORM = rf"{COPIED}|blocks\.\d+\.attention\.k_norm\.weight"


def join(
    network: Transformer, config: TransformerConfig, group: ProcessGroup, *, shares_rows: bool
) -> None:
    """Connect this rank's part of a network to the parts of the other ranks of `group`.

    `config` is the configuration of the whole network. With `shares_rows`, the network uses
    sequence parallelism: outside of attention and MLP, each rank has the hidden states of only some
    tokens.
    """
    rank = group.rank()
    size = group.size()
    leaves = partial(sum_forward, group=group)
    first = compute_vocabulary(config.vocab_size, size, rank).start
    for block in network.blocks:
        assert isinstance(block, Block)
        _join_block(block, config, group)
    if network.is_first_stage:
        network.embed.first, network.embed.reduce = first, leaves
    network.vocab_size = config.vocab_size
    if network.is_last_stage and network.kind == "lm":
        network.head.split = GroupVocabularySplit(first, config.vocab_size, group)
        network.enter = partial(sum_backward, group=group)
    network.sharing = ConsecutiveRowSharing(group) if shares_rows else None


@dataclass(frozen=True)
class ConsecutiveRowSharing:
    """Split of the tokens for sequence parallelism: each rank gets a run of consecutive tokens.

    Implements the protocol `RowSharing` (see `weft.models.network.shared_rows`).
    """

    group: ProcessGroup

    def __call__(self, tokens: Tensor, rows: Tensor | None) -> SharedRows:
        every = RowAssignment.from_equal_runs(len(tokens), self.group, tokens.device)
        if rows is None:
            return SharedRows(every, every, torch.arange(len(every.own_rows), device=tokens.device))
        wanted = every.select(rows)
        return SharedRows(every, wanted, every.local_indices[rows[wanted.own_rows]])

    def count(self, length: int) -> int:
        most = -(-length // self.group.size())
        return min(max(length - self.group.rank() * most, 0), most)


def _join_block(block: Block, config: TransformerConfig, group: ProcessGroup) -> None:
    leaves = partial(sum_forward, group=group)
    block.enter = partial(sum_backward, group=group)
    block.attention.o.reduce = leaves
    heads = compute_heads(config, group.size(), group.rank())
    block.attention.first_head = block.attention.layer * config.num_heads + heads.start
    _set_first_channel(block.attention.o, heads.start * config.head_dim)
    if isinstance(block.mlp, MoE):
        block.mlp.reduce = leaves
        down = block.mlp.experts["down"]
        if isinstance(down, ExpertStack) and down.adapter is not None:
            down.adapter.channel = group.rank() * down.weight.shape[-1]
    else:
        block.mlp.down.reduce = leaves
        _set_first_channel(block.mlp.down, group.rank() * block.mlp.down.weight.shape[1])
    if config.qk_norm == "full":
        copies = max(1, group.size() // config.num_kv_heads)
        block.attention.q_norm.split_over_ranks(
            config.num_heads * config.head_dim, partial(sum_both_ways, group=group)
        )
        block.attention.k_norm.split_over_ranks(
            config.num_kv_heads * config.head_dim,
            lambda squares: sum_both_ways(squares / copies, group),
        )


def _set_first_channel(layer: Linear, channel: int) -> None:
    """Store the index of this rank's first input feature in the layer's adapters.

    `channel` is the index within the whole layer. It determines the random numbers of adapter
    dropout.
    """
    for adapter in lora.list_adapters(layer):
        adapter.channel = channel


def sum_gradients(
    stored: Mapping[str, StoredParameter],
    config: TransformerConfig,
    group: ProcessGroup,
    device: torch.device,
    *,
    shares_rows: bool,
) -> None:
    """Sum the partial gradients that the ranks have computed for replicated parameters.

    For example, all ranks have the norm of the query heads, but each rank applies it only to its
    own heads. With `shares_rows` (sequence parallelism), the parameters used outside of attention
    and MLP are included, because each rank applies them only to its own tokens. The gradients of
    key and value heads are summed only over the ranks that hold the same head.

    `stored` maps canonical names to parameters. `device` is the device over which the group
    communicates; the gradients may be on another device. All ranks of `group` must call this.
    """
    # Sum the gradients of parameters that all ranks use in part.
    parts = _find_partial(stored, config)
    if shares_rows:
        for name, part in stored.items():
            if re.fullmatch(BETWEEN, name):
                parts.append(part)
    gradients = [grad for part in parts if (grad := part.grad) is not None]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
        sum_over_ranks(flat, group)
        put_back(flat, gradients)
    # Sum those of key and value heads over the ranks that hold the same head.
    copies = group.size() // config.num_kv_heads
    if copies > 1:
        _sum_copies(
            stored, COPIED if config.qk_norm != "full" else COPIED_NORM, group, copies, device
        )


def _find_partial(
    stored: Mapping[str, StoredParameter], config: TransformerConfig
) -> list[StoredParameter]:
    by_head = config.qk_norm != "full"
    result: list[StoredParameter] = []
    for name, part in stored.items():
        if re.fullmatch(PARTIAL, name) and (by_head or "_norm" not in name):
            result.append(part)
    return result


def _sum_copies(
    stored: Mapping[str, StoredParameter],
    pattern: str,
    group: ProcessGroup,
    copies: int,
    device: torch.device,
) -> None:
    """Sum the gradients of key and value heads over the ranks that hold the same head.

    Each head is held by `copies` consecutive ranks. `pattern` matches the names of the parameters.
    """
    held = []
    for name, part in stored.items():
        if re.fullmatch(pattern, name):
            held.append(part.grad)
    gradients = [gradient for gradient in held if gradient is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
    every = gather_from_ranks(flat, group)
    first = group.rank() // copies * copies
    put_back(every[first : first + copies].sum(0), gradients)


def put_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Copy the values in `flat`, a concatenation of flattened gradients, back to `gradients`."""
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, values in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(values.view_as(gradient))
