"""Prefix tuning without reparametrization (Li and Liang 2021, arXiv:2101.00190).

Every layer has trained keys and values for `TransformerConfig.prefix_tokens` tokens, to which every
token of every sequence attends. The prefix has the positions before the first token of each
sequence.

    with lora.disable_adapters(network): ...    # without the prefix

A layer's prefix wraps its attention (`PrefixKeysValues.wrap`). In a pack of whole sequences, it is
inserted before every sequence, and removed afterwards (`InsertedPrefix`). If keys and values are
cached, a sequence begins with placeholder tokens, and their keys and values are replaced by those
of the prefix (`OverwrittenPrefix`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.models.attention.contexts import AttentionContext, Dense, PrefixContinuation, Prefixed
from weft.models.kv.pages import Paged
from weft.models.kv.slots import Cached
from weft.models.network.dropout import TokenDropout

Rotation = tuple[Tensor, Tensor]  # cos and sin, [T, 1, half]
# Attention of a layer: (heads, rotation, context, dropout) -> outputs [T, heads x head_dim]
Attend = Callable[[Tensor, Rotation | None, AttentionContext, TokenDropout | None], Tensor]


class PrefixKeysValues(nn.Module):
    """Trained prefix of one layer: keys `k` and values `v`, each [tokens, kv_heads x head_dim].

    The keys are used without rotation.
    """

    def __init__(self, tokens: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.active = True
        self.k = nn.Parameter(torch.empty(tokens, kv_heads * head_dim))
        self.v = nn.Parameter(torch.empty(tokens, kv_heads * head_dim))

    def build_heads(self, heads: Tensor) -> Tensor:
        """Return the prefix in the layout of `heads`, [tokens, heads + 2 kv_heads, head_dim].

        The queries are zeros, because their attention outputs are not used.
        """
        prefix_kv = (
            torch.cat([self.k, self.v], dim=1).unflatten(1, (-1, self.head_dim)).to(heads.dtype)
        )
        return nn.functional.pad(prefix_kv, (0, 0, heads.shape[1] - prefix_kv.shape[1], 0))

    def wrap(
        self, attend: Attend, placed: PlacedPrefix, heads: Tensor, dropout: TokenDropout | None
    ) -> Tensor:
        """Return attention outputs [T, width] in which all tokens attend to the prefix too.

        `attend` is the attention of the layer, and `heads` are the layer's queries, keys and values
        [T, heads + 2 kv_heads, head_dim].
        """
        dropout = None if dropout is None else placed.select_dropout(dropout)
        all_heads = placed.insert_into(heads, self)
        return placed.remove_from(attend(all_heads, placed.rotation, placed.attention, dropout))


@dataclass(frozen=True)
class InsertedPrefix:
    """Pack in which the trained prefix is inserted before each sequence.

    Only attention uses this longer pack. In shapes, `all` is the number of its tokens, and T is the
    number of tokens of the original pack.

    Attributes:
        attention: Attention context of the longer pack.
        rotation: Tensors (cos, sin) for the longer pack; prefix tokens are not rotated.
        order: For each token of the longer pack, its index in the concatenation of the original
            pack and all inserted prefixes, int64 [all].
        token_indices: For each token of the original pack, its index in the longer pack, int64 [T].
        owner: For each token of the longer pack, its index in the original pack, int64 [all]. A
            prefix token has the index of the first token after the prefix.
        num_copies: Number of inserted prefixes.
    """

    attention: AttentionContext
    rotation: Rotation | None
    order: Tensor
    token_indices: Tensor
    owner: Tensor
    num_copies: int

    def insert_into(self, heads: Tensor, prefix: PrefixKeysValues) -> Tensor:
        """Return `heads` with the prefix inserted before each sequence.

        `heads` has the shape [T, heads + 2 kv_heads, dim]. In the result, T is replaced by the
        number of tokens including the inserted ones.
        """
        rows = prefix.build_heads(heads)
        copies = rows.expand(self.num_copies, *rows.shape).flatten(0, 1)
        return torch.cat([heads, copies]).index_select(0, self.order)

    def remove_from(self, outputs: Tensor) -> Tensor:
        """Return the attention outputs without those of the inserted prefix tokens.

        `outputs` [all, width] has the outputs of all tokens. The result is [T, width].
        """
        return outputs.index_select(0, self.token_indices)

    def select_dropout(self, dropout: TokenDropout) -> TokenDropout:
        """Return the `TokenDropout` of the pack with the inserted prefixes.

        Each prefix token gets the dropout key and the position of the token that follows its
        prefix.
        """
        return dropout.select(self.owner)


@dataclass(frozen=True)
class OverwrittenPrefix:
    """Placement of the trained prefix in a pass over cached sequences.

    Each sequence begins with placeholder tokens. Their keys and values are replaced by those of the
    prefix, whose keys are not rotated.

    Attributes:
        attention: Attention context of the pass.
        rotation: Tensors (cos, sin) of the pass, with cos = 1 and sin = 0 for the placeholders;
            None without rotation.
        tokens: Indices of the placeholders among the tokens of the pass, int64 [n].
        prefix_indices: For each placeholder, the index of the prefix token that replaces it, int64
            [n].
    """

    attention: AttentionContext
    rotation: Rotation | None
    tokens: Tensor
    prefix_indices: Tensor

    def insert_into(self, heads: Tensor, prefix: PrefixKeysValues) -> Tensor:
        """Return `heads` with the placeholder tokens replaced by the tokens of the prefix.

        `heads` contains the queries, keys and values of the T tokens of the pass, in this order,
        with shape [T, query_heads + 2 kv_heads, dim].
        """
        return heads.index_copy(0, self.tokens, prefix.build_heads(heads)[self.prefix_indices])

    def remove_from(self, outputs: Tensor) -> Tensor:
        """Return the attention outputs unchanged, because no rows were inserted."""
        return outputs

    def select_dropout(self, dropout: TokenDropout) -> TokenDropout:
        """Return the dropout unchanged, because no tokens were inserted."""
        return dropout


PlacedPrefix = InsertedPrefix | OverwrittenPrefix


def place_prefix(
    context: AttentionContext, rotation: Rotation | None, positions: Tensor, count: int
) -> PlacedPrefix | None:
    """Return the placement of a prefix of `count` tokens in a pass.

    `context`, `rotation` and `positions` are those of the pass without the prefix. Returns None if
    no token of the pass is a prefix token, for example in a decode step.
    """
    if isinstance(context, Cached | Paged):
        return _overwrite_prefix(context, rotation, positions, count)
    assert isinstance(context, Dense | Prefixed), "a prefix needs whole sequences"
    return _insert_prefix(context, rotation, len(positions), count)


def _insert_prefix(
    context: Dense | Prefixed, rotation: Rotation | None, num_tokens: int, count: int
) -> InsertedPrefix:
    """Return the pack with a prefix of `count` tokens before each of its sequences.

    `context` and `rotation` are those of the pack without prefixes, which has `num_tokens` tokens.
    If several sequences share their first tokens, the prefix is inserted only once, before the
    shared tokens.
    """
    dense = context.dense
    bounds = dense.cu_seqlens.long()
    device = dense.cu_seqlens.device
    has_prefix = torch.ones(dense.num_sequences, dtype=torch.int64, device=device)
    if isinstance(context, Prefixed):
        has_prefix -= torch.tensor(
            [_is_continuation(context.continuations, start) for start in dense.starts[:-1]],
            device=device,
        ).long()
    num_inserted = has_prefix.cumsum(0)  # prefixes inserted before each segment's first token
    # Compute the new index of each token of the pack.
    token_indices = torch.arange(num_tokens, device=device)
    token_indices = token_indices + count * num_inserted.repeat_interleave(
        bounds.diff(), output_size=num_tokens
    )
    # Compute the new indices of the prefixes' tokens: before the first token of each sequence.
    if isinstance(context, Dense):
        first_tokens = bounds[:-1]
    else:
        first_tokens = bounds[:-1][has_prefix.nonzero().flatten()]
    num_copies = len(first_tokens)
    prefix_indices = (
        first_tokens[:, None]
        + count * torch.arange(num_copies, device=device)[:, None]
        + torch.arange(count, device=device)
    )
    # Invert both mappings, and find the owner of every token of the longer pack.
    order = torch.empty(num_tokens + num_copies * count, dtype=torch.int64, device=device)
    order[token_indices] = torch.arange(num_tokens, device=device)
    order[prefix_indices.flatten()] = torch.arange(num_tokens, len(order), device=device)
    prefix_owners = first_tokens.repeat_interleave(count)
    owner = order.index_copy(0, prefix_indices.flatten(), prefix_owners).clamp_max(num_tokens - 1)
    # Build the attention context of the longer pack.
    bounds = torch.cat([bounds[:1], bounds[1:] + count * num_inserted]).to(dense.cu_seqlens.dtype)
    attention: AttentionContext = Dense(bounds, dense.max_len + count, len(order))
    if isinstance(context, Prefixed):
        attention = _build_prefixed(context, attention.dense, token_indices, count)
    return InsertedPrefix(
        attention, _reorder_rotation(rotation, order), order, token_indices, owner, num_copies
    )


def _overwrite_prefix(
    context: Cached | Paged, rotation: Rotation | None, positions: Tensor, count: int
) -> OverwrittenPrefix | None:
    """Return the placement of a prefix of `count` tokens in a pass over cached sequences.

    Every sequence begins with `count` placeholder tokens, which the prefix replaces. `positions`
    are the positions of the new tokens in their sequences, so the placeholders of this pass are the
    new tokens at positions below `count`. Returns None if the host can tell that this pass has no
    placeholders, for example in a decode step.
    """
    if isinstance(context, Paged):
        if context.is_decode_step:
            return None
    elif not context.has_prefix_tokens(count):
        return None
    tokens = (positions < count).nonzero().flatten()
    if rotation is not None:
        cos, sin = rotation
        rotation = cos.index_fill(0, tokens, 1.0), sin.index_fill(0, tokens, 0.0)
    return OverwrittenPrefix(context, rotation, tokens, positions[tokens])


def freeze_all_but_prefix(network: nn.Module) -> None:
    """Freeze all parameters except the prefix and a value or score head."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(is_prefix(name) or name == "score.weight")


def is_prefix(name: str) -> bool:
    """Return whether the parameter with this canonical name belongs to a prefix."""
    return ".attention.prefix." in name


def list_prefixes(network: nn.Module) -> list[PrefixKeysValues]:
    """Return the prefixes of all local layers, or an empty list if the network has none."""
    prefixes: list[PrefixKeysValues] = []
    for module in network.modules():
        if isinstance(module, PrefixKeysValues):
            prefixes.append(module)
    return prefixes


def _is_continuation(continuations: tuple[PrefixContinuation, ...], start: int) -> bool:
    return any(each.continuation[0] <= start < each.continuation[1] for each in continuations)


def _build_prefixed(context: Prefixed, dense: Dense, token_indices: Tensor, count: int) -> Prefixed:
    """Return the context of the longer pack for a pack whose sequences share prefixes.

    `dense` has the segments of the longer pack, and `token_indices` are the new indices of the
    tokens. The `count` inserted tokens before a shared prefix become part of this prefix.
    """
    indices = token_indices.tolist()
    continuations = tuple(
        PrefixContinuation(
            (indices[each.prefix[0]] - count, indices[each.prefix[1] - 1] + 1),
            (indices[each.continuation[0]], indices[each.continuation[1] - 1] + 1),
        )
        for each in context.continuations
    )
    return Prefixed(dense, continuations, token_indices[context.last_tokens])


def _reorder_rotation(rotation: Rotation | None, order: Tensor) -> Rotation | None:
    """Return the rotation (cos, sin) of a pack with inserted prefix tokens.

    `rotation` is that of the original pack; if it is None, None is returned. For each token of the
    new pack, `order` has the token's index in the original pack. Prefix tokens have indices beyond
    the end of the original pack, and are not rotated.
    """
    if rotation is None:
        return None
    cos, sin = rotation
    rows = order.clamp_max(len(cos))  # one row for all prefix tokens, after those of the pack
    cos_rows = torch.cat([cos, torch.ones_like(cos[:1])])
    sin_rows = torch.cat([sin, torch.zeros_like(sin[:1])])
    return cos_rows[rows], sin_rows[rows]
