"""Block of the decoder: attention, an MLP or experts, and norms before, after or around these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from weft import kernels
from weft.kernels import AttentionSpec
from weft.models.attention.contexts import AttentionContext
from weft.models.attention.dispatch import attend_heads
from weft.models.kv.pages import Paged
from weft.models.kv.slots import Cached
from weft.models.network import dropout
from weft.models.network.aux_loss import MoEAuxLoss
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout, with_layer
from weft.models.network.linear import DownLinear, Linear
from weft.models.network.moe import MoE
from weft.models.network.prefix import InsertedPrefix, OverwrittenPrefix, PrefixKeysValues
from weft.models.network.shared_rows import RowShare, SharedRows, gather_inputs


@dataclass(frozen=True)
class BlockContext:
    """Inputs that all blocks of a pass share.

    Attributes:
        attention: Attention context of the pass.
        rotation: Tensors (cos, sin) of the tokens' rotary positions, or None without rotation.
        dropout: Keys and positions that seed each token's dropout, or None without dropout.
        aux_loss: Object that collects the load-balancing losses of layers with experts, or None.
        rows: Indices of the tokens for which the block returns its output, int64 [N]; None means
            all tokens. It is set only for the last block.
        shared: Division of the tokens among the ranks for the residual stream, or None if every
            rank has all tokens. Attention and MLP always process all tokens on every rank.
        prefix: Placement of the trained prefix in this pass, or None if there is none.
    """

    attention: AttentionContext
    rotation: tuple[Tensor, Tensor] | None
    dropout: TokenDropout | None
    aux_loss: MoEAuxLoss | None = None
    rows: Tensor | None = None
    shared: SharedRows | None = None
    # Places of the layers' prefix; None if the network has none, or this pass has no place for it.
    prefix: InsertedPrefix | OverwrittenPrefix | None = None

    def select_wanted(self, x: Tensor) -> Tensor:
        """Return the rows of x [T, ...] for the tokens in `rows`, or all rows if `rows` is None."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def select_residual(self, x: Tensor) -> Tensor:
        """Return the residual stream x at the tokens in `rows`, or at all tokens if `rows` is None.

        If the ranks divide the residual stream, x and the result contain only this rank's rows.
        """
        if self.shared is None or self.rows is None:
            return self.select_wanted(x)
        return x.index_select(0, self.shared.wanted_tokens)

    @property
    def input_share(self) -> RowShare | None:
        """This rank's share of the rows at the block's input; None if every rank has all rows."""
        return None if self.shared is None else self.shared.token_share

    @property
    def output_share(self) -> RowShare | None:
        """This rank's share of the rows at the block's output; None if every rank has all rows."""
        if self.shared is None or self.rows is None:
            return self.input_share
        return self.shared.wanted_share

    @property
    def is_cached(self) -> bool:
        """True if the keys and values of this pass are stored in a cache."""
        return isinstance(self.attention, Cached | Paged)

    @cached_property
    def output_dropout(self) -> TokenDropout | None:
        """Dropout for the tokens in the block's output: those in `rows`, or all if `rows` is None."""
        if self.dropout is None or self.rows is None:
            return self.dropout
        return self.dropout.select(self.rows)

    @cached_property
    def residual_dropout(self) -> TokenDropout | None:
        """Dropout for this rank's rows of the block's output."""
        late = self.output_dropout
        share = self.output_share
        return late if late is None or share is None else late.select(share.own_rows)


@dataclass(frozen=True)
class CompiledParts:
    """Compiled versions of `Block.compute_heads` and `Block.compute_output`.

    They have the same arguments as the originals.
    """

    compute_heads: Callable[..., Tensor]
    compute_output: Callable[..., Tensor]


class Norm(nn.Module):
    """RMS norm (Zhang and Sennrich 2019) or layer norm (Ba et al. 2016).

    Statistics are computed in float32.
    """

    def __init__(self, config: TransformerConfig, size: int | None = None) -> None:
        super().__init__()
        self.size = size or config.hidden_size
        self.eps = config.norm_eps
        self.kind = config.norm
        if config.norm_weight:
            self.weight: nn.Parameter | None = nn.Parameter(torch.empty(self.size))
        else:
            self.weight = None
        if config.norm_bias:
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(self.size))
        else:
            self.bias = None
        self.whole = self.size
        self.reduce: Callable[[Tensor], Tensor] | None = None

    def split_over_ranks(self, whole: int, reduce: Callable[[Tensor], Tensor]) -> None:
        """Turn this norm into an RMS norm over `whole` elements that are split over the ranks.

        `reduce` sums a tensor over the ranks.
        """
        assert self.kind != "layer", "the statistics of a layer norm are not summed over ranks"
        self.whole = whole
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        if self.reduce is not None:
            return self._normalize_over_ranks(x, self.reduce)
        if self.kind == "layer":
            return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        assert self.weight is not None
        return kernels.rms_norm(x, self.weight, self.eps, offset=0.0 if self.kind == "rms" else 1.0)

    def _normalize_over_ranks(self, x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        assert self.weight is not None
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = reduce(wide.square().sum(-1, keepdim=True))
        normed = wide * torch.rsqrt(squares / self.whole + self.eps)
        return (normed * (self.weight + (0.0 if self.kind == "rms" else 1.0))).to(x.dtype)


class Attention(nn.Module):
    """Self-attention of one layer.

    `layer` is the index of the layer in the whole network. `first_head` is the index of the first
    query head of this rank, counted over all layers of the whole network. Dropout masks depend on
    the indices of the heads, so they are the same for any number of tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.first_head = layer * config.num_heads
        hidden = config.hidden_size
        inner = self.num_heads * self.head_dim
        shared = self.num_kv_heads * self.head_dim
        self.qkv = Linear(hidden, {"q": inner, "k": shared, "v": shared}, bias=config.qkv_bias)
        self.o = Linear(inner, {"o": hidden}, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm is not None:
            self.q_norm = Norm(config, self.head_dim if config.qk_norm == "head" else inner)
            self.k_norm = Norm(config, self.head_dim if config.qk_norm == "head" else shared)
        count = config.prefix_tokens
        if count:
            self.prefix: PrefixKeysValues | None = PrefixKeysValues(
                count, config.num_kv_heads, config.head_dim
            )
        else:
            self.prefix = None
        if config.layer_scaled_attention:
            scale = config.scale / (layer + 1)
        else:
            scale = config.scale
        window = config.window(layer)
        self.spec = AttentionSpec(scale, window, config.attention_softcap, config.attention_dropout)

    def project_heads(self, x: Tensor, dropout: TokenDropout | None) -> Tensor:
        """Return queries, keys and values before rotation, [T, heads + 2 kv_heads, head_dim].

        x is [T, hidden].
        """
        heads = self.qkv(x, dropout).unflatten(-1, (-1, self.head_dim))
        kv = self.num_kv_heads
        if self.qk_norm is not None:
            q, k, v = heads.split([self.num_heads, kv, kv], dim=1)
            heads = torch.cat(
                [self._normalize(self.q_norm, q), self._normalize(self.k_norm, k), v], dim=1
            )
        return heads

    def attend(self, heads: Tensor, at: BlockContext) -> Tensor:
        """Return the attention output [T, heads x head_dim], before the output projection `o`.

        `heads` is the result of `project_heads`.
        """
        if at.dropout is None:
            dropout = None
        else:
            dropout = replace(at.dropout, first_head=self.first_head)
        kv = self.num_kv_heads
        prefix = at.prefix
        if prefix is None or self.prefix is None:
            return attend_heads(
                heads, kv, at.rotation, at.attention, self.spec, self.layer, dropout
            ).flatten(1)
        heads = prefix.insert_into(heads, self.prefix)
        dropout = None if dropout is None else prefix.select_dropout(dropout)
        mixed = attend_heads(
            heads, kv, prefix.rotation, prefix.attention, self.spec, self.layer, dropout
        )
        return prefix.remove_from(mixed).flatten(1)

    def _normalize(self, norm: Norm, heads: Tensor) -> Tensor:
        """Normalize queries or keys [T, n, head_dim] with `norm`.

        The attribute `qk_norm` decides whether each head of a token is normalized separately, or
        all heads of the token together.
        """
        if self.qk_norm == "head":
            y: Tensor = norm(heads)
        else:
            y = norm(heads.flatten(1)).view_as(heads)
        return y


class MLP(nn.Module):
    """Feed-forward layer: down(activation(up(x))).

    With a gate, it is down(activation(gate(x)) * up(x)) (Shazeer 2020, "GLU variants").
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = config.intermediate_size
        bias = config.mlp_bias
        gated = config.gated
        if gated:
            self.gate_up = Linear(hidden, {"gate": inner, "up": inner}, bias=bias)
        else:
            self.up = Linear(hidden, {"up": inner}, bias=bias)
        self.down = DownLinear(inner, hidden, bias=bias, gated=gated, activation=config.activation)

    def forward(
        self, x: Tensor, dropout: TokenDropout | None, share: RowShare | None = None
    ) -> Tensor:
        if self.down.gated:
            gate_up = self.gate_up(x, dropout)
        else:
            gate_up = self.up(x, dropout)
        y: Tensor = self.down(gate_up, dropout, share)
        return y


class Block(nn.Module):
    """Attention and MLP (or experts) of one layer, with norms and residual connections.

    `layer` is the index of the layer in the whole network. With tensor parallelism, `enter` is the
    function that sums the gradients of the inputs of attention and MLP over the ranks. It is not
    used in passes with sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = config.hidden_dropout
        self.placement = config.placement
        self.parallel = config.parallel_residual
        self.enter: Callable[[Tensor], Tensor] | None = None
        # Used instead of `compute_heads` and `compute_output` in passes without cached keys.
        self.compiled: CompiledParts | None = None
        self.attention = Attention(config, layer)
        self.mlp = MoE(config) if config.has_experts(layer) else MLP(config)
        if config.placement != "post":
            self.norm1 = Norm(config)
            self.norm2 = Norm(config)
        if config.placement in ("post", "both"):
            self.norm1_post = Norm(config)
            self.norm2_post = Norm(config)

    def forward(self, x: Tensor, at: BlockContext) -> Tensor:
        """Return the block's output [T, hidden], or [N, hidden] if the pass needs only some rows.

        Attention always covers the keys and values of all rows of x [T, hidden].
        """
        into = Block.compute_heads
        out = Block.compute_output
        layer = cast("int | Tensor", self.layer)
        if self.compiled is not None and not at.is_cached:
            into = self.compiled.compute_heads
            out = self.compiled.compute_output
            layer = torch.tensor(self.layer)
        dropped, late, stream = (
            with_layer(each, layer) for each in (at.dropout, at.output_dropout, at.residual_dropout)
        )
        mixed = at.select_wanted(self.attention.attend(into(self, x, dropped, at.input_share), at))
        return out(self, at.select_residual(x), mixed, late, stream, at.output_share, at.aux_loss)

    def compute_heads(
        self, x: Tensor, dropped: TokenDropout | None, share: RowShare | None
    ) -> Tensor:
        """Return queries, keys and values for x [T, hidden], as `Attention.project_heads` does.

        `dropped` is the dropout of the adapters' inputs, or None without dropout. If the ranks
        divide the rows of the residual stream, x has only this rank's rows, and `share` gathers the
        others.
        """
        if self.parallel or self.placement in ("pre", "both"):
            normed = self.norm1(x)
        else:
            normed = x
        return self.attention.project_heads(gather_inputs(normed, share, self.enter), dropped)

    def compute_output(
        self,
        x: Tensor,
        mixed: Tensor,
        late: TokenDropout | None,
        stream: TokenDropout | None,
        share: RowShare | None,
        aux_loss: MoEAuxLoss | None,
    ) -> Tensor:
        """Return the block's output [N, hidden].

        x [N, hidden] is the block's input, and `mixed` is the result of `Attention.attend` for the
        same rows. `late` is the dropout of the adapters in attention and MLP. `stream` is the
        dropout of the outputs of attention and MLP, before they are added to x. `share` is this
        rank's share of the rows, or None if every rank has all rows.
        """
        attended = _drop(
            self.attention.o(mixed, late, share), stream, self.dropout, dropout.ATTENTION_OUT
        )
        del mixed
        feeding = FeedForwardArguments(late, stream, share, aux_loss)
        if self.parallel:
            return x + attended + self._feed(self.norm2(x), feeding)
        match self.placement:
            case "pre":
                x = x + attended
                return x + self._feed(self.norm2(x), feeding)
            case "post":
                x = x + self.norm1_post(attended)
                return x + self.norm2_post(self._feed(x, feeding))
            case "both":
                x = x + self.norm1_post(attended)
                return x + self.norm2_post(self._feed(self.norm2(x), feeding))
            case "after":
                x = self.norm1(x + attended)
                y: Tensor = self.norm2(x + self._feed(x, feeding))
                return y

    def _feed(self, x: Tensor, how: FeedForwardArguments) -> Tensor:
        x = gather_inputs(x, how.share, self.enter)
        if isinstance(self.mlp, MoE):
            fed = self.mlp(x, how.late, how.aux_loss, how.share)
        else:
            fed = self.mlp(x, how.late, how.share)
        return _drop(fed, how.stream, self.dropout, dropout.MLP_OUT)


@dataclass(frozen=True)
class FeedForwardArguments:
    """Arguments of an MLP or of experts, in addition to the hidden states.

    They have the same meaning as in `Block.compute_output`.
    """

    late: TokenDropout | None
    stream: TokenDropout | None
    share: RowShare | None
    aux_loss: MoEAuxLoss | None


def _drop(x: Tensor, how: TokenDropout | None, rate: float, place: int) -> Tensor:
    return x if how is None else how.drop_at(x, rate, place)
