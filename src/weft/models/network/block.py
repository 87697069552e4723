"""Block of the decoder: attention, and an MLP or experts, each with norms before or after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft import kernels
from weft.kernels import AttentionSpec
from weft.models.attention.contexts import AttentionContext
from weft.models.attention.dispatch import attend_heads
from weft.models.kv.pages import Paged
from weft.models.kv.slots import Cached
from weft.models.network import dropout
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout
from weft.models.network.fused_sums import PendingSum
from weft.models.network.linear import DownLinear, Linear
from weft.models.network.moe import MoE, MoEAuxLoss
from weft.models.network.packed import Packed
from weft.models.network.prefix import PlacedPrefix, PrefixKeysValues


@dataclass(frozen=True)
class ResidualStream:
    """Rows of the residual stream that a block keeps.

    Attributes:
        rows: Indices of the kept rows among the rows of the block's input, int64 [N]; None means
            all rows.
        dropout: Dropout of the values added to the kept rows, or None without dropout.
    """

    rows: Tensor | None
    dropout: TokenDropout | None


@dataclass(frozen=True)
class BlockContext:
    """Inputs that all blocks of a pass share.

    Attributes:
        pack: Input of the pass.
        rotation: Tensors (cos, sin) of the tokens' rotary positions, or None without rotation.
        dropout: Keys and positions that seed each token's dropout, or None without dropout.
        rows: Indices of the tokens for which the block returns its output, int64 [N]; None means
            all tokens. It is set only for the last block.
        prefix: Placement of the trained prefix in this pass; None without a prefix, and in passes
            over cached sequences that contain the prefix already.
        stream: Rows and dropout of the residual stream; None for the rows `rows` and the dropout
            `mlp_dropout`.
        fuses_sums: True if blocks return a `PendingSum`, which the next norm computes.
    """

    pack: Packed
    rotation: tuple[Tensor, Tensor] | None
    dropout: TokenDropout | None
    rows: Tensor | None = None
    prefix: PlacedPrefix | None = None
    stream: ResidualStream | None = None
    fuses_sums: bool = False

    @property
    def is_cached(self) -> bool:
        """True if the keys and values of this pass are stored in a cache."""
        return isinstance(self.pack.attention, Cached | Paged)

    @property
    def mlp_rows(self) -> Tensor | None:
        """Indices of the tokens that the MLP processes, int64 [N]; None means all tokens.

        These are the tokens in `rows`, unless the load-balancing loss of experts needs all tokens.
        """
        return self.rows if self.pack.aux_loss is None else None

    @cached_property
    def mlp_dropout(self) -> TokenDropout | None:
        """Dropout for the tokens in `mlp_rows`."""
        if self.dropout is None or self.mlp_rows is None:
            return self.dropout
        return self.dropout.select(self.mlp_rows)


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
        self.offset = 0.0 if config.norm == "rms" else 1.0  # added to the weights of an RMS norm
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if config.norm_weight:
            self.weight = nn.Parameter(torch.empty(self.size))
        if config.norm_bias:
            self.bias = nn.Parameter(torch.empty(self.size))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        assert self.weight is not None
        return kernels.rms_norm(x, self.weight, self.eps, offset=self.offset)


def normalize(norm: Norm, states: Tensor | PendingSum) -> tuple[Tensor, Tensor]:
    """Return the hidden states and their norm, each [T, hidden]; a pending sum is computed."""
    if isinstance(states, PendingSum):
        return states.normalize(norm.weight, norm.eps, norm.offset)
    return states, norm(states)


class Attention(nn.Module):
    """Self-attention of one layer.

    `layer` is the index of the layer in the whole network. `first_head` is the index of the
    layer's first query head, counted over all layers; dropout masks depend on the indices of heads.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.first_head = layer * config.num_heads
        hidden = config.hidden_size
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.qkv = Linear(hidden, {"q": q_size, "k": kv_size, "v": kv_size}, bias=config.qkv_bias)
        self.o = Linear(q_size, {"o": hidden}, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm is not None:
            self.q_norm = Norm(config, self.head_dim if config.qk_norm == "head" else q_size)
            self.k_norm = Norm(config, self.head_dim if config.qk_norm == "head" else kv_size)
        if config.prefix_tokens:
            self.prefix: PrefixKeysValues | None = PrefixKeysValues(
                config.prefix_tokens, config.num_kv_heads, config.head_dim
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
        if self.qk_norm is not None:
            counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            q, k, v = heads.split(counts, dim=1)
            q = self._normalize(self.q_norm, q)
            k = self._normalize(self.k_norm, k)
            heads = torch.cat([q, k, v], dim=1)
        return heads

    def attend(self, heads: Tensor, context: BlockContext) -> Tensor:
        """Return the attention output [T, heads x head_dim], before the output projection `o`.

        `heads` is the result of `project_heads`.
        """
        dropout = context.dropout
        if dropout is not None:
            dropout = replace(dropout, first_head=self.first_head)
        if self.prefix is not None and context.prefix is not None:
            return self.prefix.wrap(self._attend, context.prefix, heads, dropout)
        return self._attend(heads, context.rotation, context.pack.attention, dropout)

    def _attend(
        self,
        heads: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        context: AttentionContext,
        dropout: TokenDropout | None,
    ) -> Tensor:
        return attend_heads(
            heads, self.num_kv_heads, rotation, context, self.spec, self.layer, dropout
        ).flatten(1)

    def _normalize(self, norm: nn.Module, heads: Tensor) -> Tensor:
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
        mlp_size = config.intermediate_size
        bias = config.mlp_bias
        gated = config.gated
        if gated:
            self.gate_up = Linear(hidden, {"gate": mlp_size, "up": mlp_size}, bias=bias)
        else:
            self.up = Linear(hidden, {"up": mlp_size}, bias=bias)
        self.down = DownLinear(
            mlp_size, hidden, bias=bias, gated=gated, activation=config.activation
        )

    def forward(self, x: Tensor, dropout: TokenDropout | None) -> Tensor:
        if self.down.gated:
            gate_up = self.gate_up(x, dropout)
        else:
            gate_up = self.up(x, dropout)
        y: Tensor = self.down(gate_up, dropout)
        return y


class Block(nn.Module):
    """Attention and MLP (or experts) of one layer, with norms and residual connections.

    `layer` is the index of the layer in the whole network.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = config.hidden_dropout
        self.placement = config.placement
        self.parallel = config.parallel_residual
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

    def forward(self, x: Tensor | PendingSum, context: BlockContext) -> Tensor | PendingSum:
        """Return the block's output [T, hidden], or [N, hidden] if the pass needs only some rows.

        Attention always covers the keys and values of all rows of x [T, hidden].
        """
        normed = None
        if isinstance(x, PendingSum):
            x, normed = normalize(self.norm1, x)
        # Choose the compiled or the original functions; compiled code takes the layer as a tensor.
        compute_heads = Block.compute_heads
        compute_output: Callable[..., Any] = Block.compute_output
        layer = cast("int | Tensor", self.layer)
        if self.compiled is not None and not context.is_cached:
            compute_heads = self.compiled.compute_heads
            compute_output = self.compiled.compute_output
            layer = torch.tensor(self.layer)
        # Set the layer of each dropout.
        stream = context.stream or ResidualStream(context.rows, context.mlp_dropout)
        input_dropout, adapter_dropout, residual_dropout = (
            None if each is None else replace(each, layer=layer)
            for each in (context.dropout, context.mlp_dropout, stream.dropout)
        )
        # Compute attention for all rows, and the output for the selected rows.
        attended = self.attention.attend(compute_heads(self, x, input_dropout, normed), context)
        del normed  # free it before the MLP is computed
        attended = _select(attended, context.mlp_rows)
        aux_loss = context.pack.aux_loss
        arguments = attended, adapter_dropout, residual_dropout, aux_loss, context.fuses_sums
        if aux_loss is None:
            return compute_output(self, _select(x, stream.rows), *arguments)
        return _select(compute_output(self, x, *arguments), stream.rows)

    def compute_heads(
        self, x: Tensor, input_dropout: TokenDropout | None, normed: Tensor | None = None
    ) -> Tensor:
        """Return queries, keys and values for x [T, hidden], as `Attention.project_heads` does.

        `input_dropout` is the dropout of the adapters' inputs, or None without dropout. `normed` is
        the result of `norm1`, or None if it is not computed yet.
        """
        if normed is None:
            has_norm = self.parallel or self.placement in ("pre", "both")
            normed = self.norm1(x) if has_norm else x
        return self.attention.project_heads(normed, input_dropout)

    def compute_output(
        self,
        x: Tensor,
        attended: Tensor,
        adapter_dropout: TokenDropout | None,
        residual_dropout: TokenDropout | None,
        aux_loss: MoEAuxLoss | None,
        fuses_sums: bool = False,
    ) -> Tensor | PendingSum:
        """Return the block's output [N, hidden].

        x [N, hidden] is the block's input, and `attended` is the result of `Attention.attend` for
        the same tokens. `adapter_dropout` is the dropout of the adapters in attention and MLP.
        `residual_dropout` is the dropout of the outputs of attention and MLP, before they are added
        to x. `fuses_sums` is described in `BlockContext`.
        """
        add: Callable[..., Any] = PendingSum if fuses_sums else torch.add
        attention_output = self.attention.o(attended, adapter_dropout)
        del attended  # free it before the MLP is computed
        attention_output = _drop(
            attention_output, residual_dropout, self.dropout, dropout.ATTENTION_OUT
        )
        mlp_arguments = (adapter_dropout, residual_dropout, aux_loss)
        if self.parallel:
            return add(x + attention_output, self._run_mlp(self.norm2(x), *mlp_arguments))
        match self.placement:
            case "pre":
                x, normed = normalize(self.norm2, add(x, attention_output))
                return add(x, self._run_mlp(normed, *mlp_arguments))
            case "post":
                x = x + self.norm1_post(attention_output)
                return x + self.norm2_post(self._run_mlp(x, *mlp_arguments))
            case "both":
                x, normed = normalize(self.norm2, add(x, self.norm1_post(attention_output)))
                return add(x, self.norm2_post(self._run_mlp(normed, *mlp_arguments)))
            case "after":
                x = self.norm1(x + attention_output)
                return self.norm2(x + self._run_mlp(x, *mlp_arguments))

    def _run_mlp(
        self,
        x: Tensor,
        adapter_dropout: TokenDropout | None,
        residual_dropout: TokenDropout | None,
        aux_loss: MoEAuxLoss | None,
    ) -> Tensor:
        """Return the output of the MLP or experts after dropout, [N, hidden]."""
        if isinstance(self.mlp, MoE):
            output = self.mlp(x, adapter_dropout, aux_loss)
        else:
            output = self.mlp(x, adapter_dropout)
        return _drop(output, residual_dropout, self.dropout, dropout.MLP_OUT)


def _select(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _drop(x: Tensor, token_dropout: TokenDropout | None, rate: float, place: int) -> Tensor:
    return x if token_dropout is None else token_dropout.drop_at(x, rate, place)
