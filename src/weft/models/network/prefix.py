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
        own = torch.cat([self.k, self.v], dim=1).unflatten(1, (-1, self.head_dim)).to(heads.dtype)
        return nn.functional.pad(own, (0, 0, heads.shape[1] - own.shape[1], 0))

    def wrap(
        self, attend: Attend, placed: PlacedPrefix, heads: Tensor, dropout: TokenDropout | None
    ) -> Tensor:
        """Return attention outputs [T, width] in which all tokens attend to the prefix too.

        `attend` is the attention of the layer, and `heads` are the layer's queries, keys and values
        [T, heads + 2 kv_heads, head_dim].
        """
        dropout = None if dropout is None else placed.select_dropout(dropout)
        wide = placed.insert_into(heads, self)
        return placed.remove_from(attend(wide, placed.rotation, placed.attention, dropout))


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
        pack_places: For each token of the original pack, its index in the longer pack, int64 [T].
        owner: For each token of the longer pack, its index in the original pack, int64 [all]. A
            prefix token has the index of the first token after the prefix.
        num_copies: Number of inserted prefixes.
    """

    attention: AttentionContext
    rotation: Rotation | None
    order: (
        Tensor  # int64 [all]: index of each token in (tokens of the pack, tokens of all prefixes)
    )
    pack_places: Tensor  # int64 [T]: index of each of the pack's tokens in the result
    owner: Tensor  # int64 [all]: a token of the pack in the same sequence
    num_copies: int  # number of inserted prefixes

    def insert_into(self, heads: Tensor, prefix: PrefixKeysValues) -> Tensor:
        """Return `heads` with the prefix inserted before each sequence.

        `heads` has the shape [T, heads + 2 kv_heads, dim]. In the result, T is replaced by the
        number of tokens including the inserted ones.
        """
        rows = prefix.build_heads(heads)
        copies = rows.expand(self.num_copies, *rows.shape).flatten(0, 1)
        return torch.cat([heads, copies]).index_select(0, self.order)

    def remove_from(self, mixed: Tensor) -> Tensor:
        """Return the attention outputs without those of the inserted prefix tokens.

        `mixed` [all, width] has the outputs of all tokens. The result is [T, width].
        """
        return mixed.index_select(0, self.pack_places)

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
        places: For each placeholder, the index of the prefix token that replaces it, int64 [n].
    """

    attention: AttentionContext
    rotation: Rotation | None
    tokens: Tensor
    places: Tensor

    def insert_into(self, heads: Tensor, prefix: PrefixKeysValues) -> Tensor:
        """Return `heads` with the placeholder tokens replaced by the tokens of the prefix.

        `heads` contains the queries, keys and values of the T tokens of the pass, in this order,
        with shape [T, query_heads + 2 kv_heads, dim].
        """
        return heads.index_copy(0, self.tokens, prefix.build_heads(heads)[self.places])

    def remove_from(self, mixed: Tensor) -> Tensor:
        """Return the attention outputs unchanged.

        The prefix takes the place of placeholder tokens that are in the pack already, so it has
        added no rows that would have to be removed.
        """
        return mixed

    def select_dropout(self, dropout: TokenDropout) -> TokenDropout:
        """Return the dropout unchanged.

        The prefix takes the place of placeholder tokens that are in the pack already, so the pack
        has no additional tokens that would need dropout keys.
        """
        return dropout


PlacedPrefix = InsertedPrefix | OverwrittenPrefix


def place_prefix(
    context: AttentionContext, rotation: Rotation | None, positions: Tensor, count: int
) -> PlacedPrefix | None:
    """Return the placement of a prefix of `count` tokens in a pass, or None if the pass has none.

    `context`, `rotation` and `positions` are those of the pass without the prefix.
    """
    if isinstance(context, Cached | Paged):
        return _overwrite_prefix(context, rotation, positions, count)
    assert isinstance(context, Dense | Prefixed), "the whole tokens of all sequences"
    return _insert_prefix(context, rotation, len(positions), count)


def _insert_prefix(
    context: Dense | Prefixed, rotation: Rotation | None, num_tokens: int, count: int
) -> InsertedPrefix:
    """Return the pack with a prefix of `count` tokens before each of its sequences.

    The given context and rotation are those of the pack without prefixes, which has `num_tokens`
    tokens. If several sequences share their first tokens, the prefix is inserted only once, before
    the shared tokens.
    """
    dense = context.dense
    bounds = dense.cu_seqlens.long()
    device = dense.cu_seqlens.device
    begins = torch.ones(dense.num_sequences, dtype=torch.int64, device=device)
    if isinstance(context, Prefixed):
        begins -= torch.tensor(
            [_is_continuation(context.continuations, start) for start in dense.starts[:-1]],
            device=device,
        ).long()
    before = begins.cumsum(0)  # prefixes up to each segment's first token
    # Find the new index of each token of the pack.
    pack_places = torch.arange(num_tokens, device=device)
    pack_places = pack_places + count * before.repeat_interleave(
        bounds.diff(), output_size=num_tokens
    )
    # Find the indices of the prefixes' tokens: before the first token of each sequence.
    if isinstance(context, Dense):
        first = bounds[:-1]
    else:
        first = bounds[:-1][begins.nonzero().flatten()]
    copies = len(first)
    added = (
        first[:, None]
        + count * torch.arange(copies, device=device)[:, None]
        + torch.arange(count, device=device)
    )
    # Invert both, and assign every token to a sequence.
    order = torch.empty(num_tokens + copies * count, dtype=torch.int64, device=device)
    order[pack_places] = torch.arange(num_tokens, device=device)
    order[added.flatten()] = torch.arange(num_tokens, len(order), device=device)
    owner = order.index_copy(0, added.flatten(), first.repeat_interleave(count)).clamp_max(
        num_tokens - 1
    )
    # Build the attention context of the longer pack.
    bounds = torch.cat([bounds[:1], bounds[1:] + count * before]).to(dense.cu_seqlens.dtype)
    wide: AttentionContext = Dense(bounds, dense.max_len + count, len(order))
    if isinstance(context, Prefixed):
        wide = _build_prefixed(context, wide.dense, pack_places, count)
    return InsertedPrefix(
        wide, _reorder_rotation(rotation, order), order, pack_places, owner, copies
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


def _is_continuation(joins: tuple[PrefixContinuation, ...], start: int) -> bool:
    return any(join.continuation[0] <= start < join.continuation[1] for join in joins)


def _build_prefixed(context: Prefixed, dense: Dense, pack_places: Tensor, count: int) -> Prefixed:
    places = pack_places.tolist()
    joins = tuple(
        PrefixContinuation(
            (places[join.prefix[0]] - count, places[join.prefix[1] - 1] + 1),
            (places[join.continuation[0]], places[join.continuation[1] - 1] + 1),
        )
        for join in context.continuations
    )
    return Prefixed(dense, joins, pack_places[context.last_tokens])


def _reorder_rotation(rotation: Rotation | None, order: Tensor) -> Rotation | None:
    """Return the rotation (cos, sin) of a pack with inserted prefix tokens.

    `rotation` is that of the original pack; if it is None, None is returned. For each token of the
    new pack, `order` has the token's index in the original pack. Prefix tokens have indices beyond
    the end of the original pack, and are not rotated.
    """
    if rotation is None:
        return None
    cos, sin = rotation
    rows = order.clamp_max(len(cos))
    return torch.cat([cos, torch.ones_like(cos[:1])])[rows], torch.cat(
        [sin, torch.zeros_like(sin[:1])]
    )[rows]
