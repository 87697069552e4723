"""The packed decoder. One class covers the families; `TransformerConfig` says what each does.

    Transformer(config, head: "lm" | "value" | "score", pooling: "last" | "mean" = "last")
    network(x: Packed, want: frozenset[Output], temperature=1.0, support=None) -> {output: float32 array}
        [N] logprobs, entropy, top1 and those of several ids a row (lm), [N] values (value), [S] scores (score)
    network.hidden(x) -> [T, hidden] after the last norm, or [N, hidden] with hidden(x, rows)
    network.next_token_logits(hidden_rows [R, hidden]) -> [R, V] float32
    Transformer.empty(config, head, device=, dtype=) makes it without filling the weights
    network.checkpointing = n recomputes every n-th block in the backward pass; 0 none

Parameters: `embed.weight`, `positions.weight`, `embed_in.weight`, `embed_out.weight`, `blocks.{i}.attention.{q,k,v,o}.{weight,
bias}`, `blocks.{i}.attention.{q_norm,k_norm}.weight`, `blocks.{i}.mlp.{gate,up,down}.{weight,bias}`, `blocks.{i}.mlp.router.
weight`, `blocks.{i}.mlp.experts.{gate,up,down}.weight` [experts, out, in], `blocks.{i}.{norm1,norm2}.{weight,bias}` (before
attention and MLP), `blocks.{i}.{norm1_post,norm2_post}.weight` (after them), `norm.{weight,bias}`, `head.{weight,bias}` (absent
where tied: the embedding's matrix serves), `score.weight` [1, hidden] (value and score heads, in place of `head`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.algorithms.base import Output
from weft.errors import ConfigError
from weft.models import dropout, flex, heads, lm_head, rope
from weft.models.attention import Scores, attend_heads, who_sees
from weft.models.balance import Balance
from weft.models.config import TransformerConfig
from weft.models.dropout import TokenNoise
from weft.models.fused import activated, activated_linear, rms_norm
from weft.models.fused_linear import fused_linear
from weft.models.lora import Adapted
from weft.models.moe import MoE
from weft.models.native import attention, forward, library
from weft.models.native import block as native
from weft.models.packed import AttentionContext, Cached, Dense, Packed, Prefixed
from weft.models.products import linear
from weft.models.tied import Tied, look_up, may_tie

Head = Literal["lm", "value", "score"]
Pooling = Literal["last", "mean"]
OUTPUTS: dict[str, frozenset[Output]] = {
    "lm": frozenset({"logprobs", "entropy", "top1", "top_ids", "top_logprobs", "given_logprobs"}),
    "value": frozenset({"values"}),
    "score": frozenset({"scores"}),
}


@dataclass(frozen=True)
class Surroundings:
    """What every block of one pass reads: who attends to whom, the rotation of each token, the noise of dropout; and where
    experts tell how they are used. Of the last block the states of `rows`, int64 [N], may be all that is wanted."""

    context: AttentionContext
    rotation: tuple[Tensor, Tensor] | None
    noise: TokenNoise | None
    balance: Balance | None = None
    rows: Tensor | None = None

    @property
    def alone(self) -> bool:
        """Whether tokens of a pack attend to each other alone, and nothing is dropped."""
        return self.noise is None and isinstance(self.context, Dense | Prefixed)

    def wanted(self, x: Tensor) -> Tensor:
        """x [T, ...] at the tokens whose states are wanted."""
        return _at(x, self.rows)

    @cached_property
    def late_noise(self) -> TokenNoise | None:
        """The noise of the tokens whose states are wanted."""
        return self.noise if self.noise is None or self.rows is None else self.noise.select(self.rows)


def _at(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def apply(layer: nn.Linear | Adapted, x: Tensor, noise: TokenNoise | None) -> Tensor:
    """A linear layer, or one with an adapter, which may drop parts of its input."""
    return layer(x, noise) if isinstance(layer, Adapted) else linear(x, layer.weight, layer.bias)


def apply_all(layers: Sequence[nn.Linear | Adapted], x: Tensor, noise: TokenNoise | None) -> Tensor:
    """Layers that read the same input: what they make of it, side by side (with adapters too: functions of values that lie
    otherwise may round otherwise)."""
    plain = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(plain) == len(layers):
        return fused_linear(x, plain)
    return torch.cat([apply(layer, x, noise) for layer in layers], dim=-1)


class Norm(nn.Module):
    """RMS norm (Zhang and Sennrich 2019) or layer norm (Ba et al. 2016); statistics in float32."""

    def __init__(self, config: TransformerConfig, size: int | None = None) -> None:
        super().__init__()
        self.size, self.eps, self.kind = size or config.hidden_size, config.norm_eps, config.norm
        self.weight = nn.Parameter(torch.empty(self.size)) if config.norm_weight else None
        self.bias = nn.Parameter(torch.empty(self.size)) if config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return nn.functional.layer_norm(x, (self.size,), self.weight, self.bias, self.eps)
        assert self.weight is not None
        return rms_norm(x, self.weight, self.eps, offset=0.0 if self.kind == "rms" else 1.0)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        hidden, inner, shared = config.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q = nn.Linear(hidden, inner, bias=config.qkv_bias)
        self.k = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.v = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.o = nn.Linear(inner, hidden, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm is not None:
            self.q_norm = Norm(config, self.head_dim if config.qk_norm == "head" else inner)
            self.k_norm = Norm(config, self.head_dim if config.qk_norm == "head" else shared)
        scale = config.scale / (layer + 1) if config.layer_scaled_attention else config.scale
        self.scores = Scores(scale, config.window(layer), config.attention_softcap, config.attention_dropout)

    def forward(self, x: Tensor, at: Surroundings) -> Tensor:
        heads = apply_all((self.q, self.k, self.v), x, at.noise).unflatten(-1, (-1, self.head_dim))
        kv = self.num_kv_heads
        if self.qk_norm is not None:
            q, k, v = heads.split([self.num_heads, kv, kv], dim=1)
            heads = torch.cat([self._norm(self.q_norm, q), self._norm(self.k_norm, k), v], dim=1)
        mixed = attend_heads(heads, kv, at.rotation, at.context, self.scores, self.layer, at.noise).flatten(1)
        return apply(self.o, at.wanted(mixed), at.late_noise)

    def _norm(self, norm: Norm, heads: Tensor) -> Tensor:
        """[T, n, head_dim], each head by itself or all as one."""
        return norm(heads) if self.qk_norm == "head" else norm(heads.flatten(1)).view_as(heads)


class MLP(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate = nn.Linear(hidden, inner, bias=bias) if config.gated else None
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor, noise: TokenNoise | None) -> Tensor:
        gated = self.gate is not None
        joined = apply(self.up, x, noise) if self.gate is None else apply_all((self.gate, self.up), x, noise)
        if isinstance(self.down, nn.Linear):
            return activated_linear(joined, gated, self.down, self.activation)
        return apply(self.down, activated(joined, gated, self.activation), noise)


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.dropout = layer, config.hidden_dropout
        self.placement, self.parallel = config.placement, config.parallel_residual
        self.attention = Attention(config, layer)
        self.mlp = MoE(config) if config.has_experts(layer) else MLP(config)
        if config.placement != "post":
            self.norm1, self.norm2 = Norm(config), Norm(config)
        if config.placement in ("post", "both"):
            self.norm1_post, self.norm2_post = Norm(config), Norm(config)

    def forward(self, x: Tensor, at: Surroundings) -> Tensor:
        """x [T, hidden] -> [T, hidden], or [N, hidden] of the `rows` that are wanted: the others give their keys and values."""
        if self.parallel:
            own = at.wanted(x)
            return own + self._attend(self.norm1(x), at) + self._feed(self.norm2(own), at)
        match self.placement:
            case "pre":
                x = at.wanted(x) + self._attend(self.norm1(x), at)
                return x + self._feed(self.norm2(x), at)
            case "post":
                x = at.wanted(x) + self.norm1_post(self._attend(x, at))
                return x + self.norm2_post(self._feed(x, at))
            case "both":
                x = at.wanted(x) + self.norm1_post(self._attend(self.norm1(x), at))
                return x + self.norm2_post(self._feed(self.norm2(x), at))
            case "after":
                x = self.norm1(at.wanted(x) + self._attend(x, at))
                return self.norm2(x + self._feed(x, at))

    def _attend(self, x: Tensor, at: Surroundings) -> Tensor:
        return self._drop(self.attention(x, at), at, dropout.ATTENTION_OUT)

    def _feed(self, x: Tensor, at: Surroundings) -> Tensor:
        noise = at.late_noise
        fed = self.mlp(x, noise, at.balance) if isinstance(self.mlp, MoE) else self.mlp(x, noise)
        return self._drop(fed, at, dropout.MLP_OUT)

    def _drop(self, x: Tensor, at: Surroundings, place: int) -> Tensor:
        noise = at.late_noise
        return x if noise is None else noise.drop(x, self.dropout, dropout.site(self.layer, place))


def _by_kernels(block: nn.Module, x: Tensor, at: Surroundings) -> Tensor:
    """What the block makes of x, in one call."""
    assert isinstance(block, Block) and isinstance(at.context, Dense | Prefixed)
    return native.run(block, x, at.rotation, who_sees(at.context, block.attention.scores), at.rows)


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig, head: Head = "lm", pooling: Pooling = "last") -> None:
        super().__init__()
        self.config, self.kind, self.pooling = config, head, pooling
        self.checkpointing = 0
        self.padding: int | None = None  # a token at the end of a sequence that its score is read before
        width, hidden = config.embed_dim or config.hidden_size, config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        if config.learned_positions is not None:
            self.positions = nn.Embedding(config.learned_positions, hidden)
        if width != hidden:
            self.embed_in = nn.Linear(width, hidden, bias=False)
            self.embed_out = nn.Linear(hidden, width, bias=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        if config.final_norm:
            self.norm = Norm(config)
        if head != "lm":
            self.score = nn.Linear(width, 1, bias=False)
        elif not config.tied:
            self.head = nn.Linear(width, config.vocab_size, bias=config.head_bias)

    @classmethod
    def empty(
        cls, config: TransformerConfig, head: Head = "lm", pooling: Pooling = "last",
        *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    ) -> Transformer:  # fmt: skip
        """The network with memory for its weights and no values in it: nothing is drawn from a random generator."""
        with torch.device("meta"):
            network = cls(config, head, pooling)
        return network.to(dtype).to_empty(device=device)

    def hidden(self, x: Packed, rows: Tensor | None = None, tied: Tied | None = None) -> Tensor:
        """Hidden states [T, width] after the last norm, as the head reads them; or those of `rows`, int64 [N], alone.

        With `tied` a head goes on from them that leaves the gradient of the embedding's matrix there.
        """
        context = x.attention
        if isinstance(context, Cached) and (ready := forward.prepared(self, context.cache)):
            return forward.run(ready, x, context, rows)
        config = self.config
        states = self.embed(x.tokens) if tied is None else look_up(x.tokens, self.embed.weight, tied)
        if config.embed_scale is not None:
            states = states * torch.full((), config.embed_scale, dtype=states.dtype, device=states.device)
        width = config.embed_dim or config.hidden_size
        if width != config.hidden_size:
            states = self.embed_in(states)
        if config.learned_positions is not None:
            states = states + self.positions(x.positions + config.position_offset)
        noise = None if x.noise is None else TokenNoise.spread(x.noise, x.attention.dense.lengths, x.positions)
        if noise is not None:
            states = noise.drop(states, config.embed_dropout, dropout.EMBEDDING)
        at = Surroundings(x.attention, self._rotation(x, states.dtype), noise, x.balance)
        states = self._through(states, at, rows)
        if config.final_norm:
            states = self.norm(states)
        return self.embed_out(states) if width != config.hidden_size else states

    def _through(self, states: Tensor, at: Surroundings, rows: Tensor | None) -> Tensor:
        """Embeddings [T, hidden] through all blocks: [T, hidden], or [N, hidden] of `rows`."""
        # What others than `rows` do in the last block nobody sees but the balance of its experts.
        last = at if at.balance is not None else replace(at, rows=rows)
        compute = _by_kernels if at.alone and native.serves(self.config, self.blocks, states, rows) else Block.__call__
        for layer, block in enumerate(self.blocks, 1):
            around = last if layer == len(self.blocks) else at
            if self.checkpointing and layer % self.checkpointing == 0 and torch.is_grad_enabled():
                states = checkpoint(compute, block, states, around, use_reentrant=False, preserve_rng_state=False)
            else:
                states = compute(block, states, around)
        return states if last.rows is rows else _at(states, rows)

    def shares_prefixes(self, longest: int) -> bool:
        """Whether a prefix that several sequences go on from is computed once, where none has more than `longest` tokens.

        Not where a token's state depends on what comes after it in its sequence (rotations by length, mean pooling), nor where
        attention has a limit that the joined form lacks.
        """
        config = self.config
        whole = all(window is None or window >= longest for window in config.windows)
        by_length = config.rope is not None and config.rope.scaling in rope.CHANGING
        mean = self.kind == "score" and self.pooling == "mean"
        device = self.embed.weight.device
        if device.type == "cpu":
            attends = config.attention_softcap is None
        else:
            attends = flex.serves(device, config.head_dim)
        return whole and attends and not by_length and not mean

    @property
    def reads_pages(self) -> bool:
        """Keys and values may lie in pages (`weft.models.paged_cache`)."""
        return True

    @property
    def reads_only_written(self) -> bool:
        """Whether a step over a `weft.models.kv_cache.KVCache` reads the keys and values that a row sees, and no others."""
        fits = self.config.attention_softcap is None and self.config.head_dim <= attention.MOST_DIM
        return fits and library.serves(self.embed.weight)

    def _rotation(self, x: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        settings = self.config.rope
        if settings is None:
            return None
        # Only schemes that change with the length read it; to work it out the host waits for a GPU.
        changing = settings.scaling in rope.CHANGING
        lengths = x.attention.token_lengths if changing else x.positions
        return rope.rotation(settings, x.positions, lengths, dtype)

    @property
    def projection(self) -> heads.Projection:
        """The output layer of a network with an lm head."""
        softcap = self.config.final_softcap
        if self.config.tied:
            return heads.Projection(self.embed.weight, None, softcap)
        return heads.Projection(self.head.weight, self.head.bias, softcap)

    def next_token_logits(self, hidden_rows: Tensor) -> Tensor:
        """[R, hidden] -> [R, V] float32 before any temperature."""
        return self.projection.logits(hidden_rows)

    def forward(
        self, x: Packed, want: frozenset[Output], temperature: float = 1.0, support: heads.Support | None = None
    ) -> dict[Output, Tensor]:
        """`want` of [N] logprobs, entropy and top1, those of several ids a row (`weft.models.lm_head`), [N] values, [S] scores.
        Raises `ConfigError` for what the head lacks."""
        if not want <= OUTPUTS[self.kind]:
            lacking, given = ", ".join(sorted(want - OUTPUTS[self.kind])), ", ".join(sorted(OUTPUTS[self.kind]))
            raise ConfigError(f"a network with a {self.kind} head gives {given}, not {lacking}")
        if self.kind == "score" and self.pooling == "mean":
            return {"scores": heads.mean_scores(self.hidden(x), self.score.weight, x.attention)}
        tied = Tied() if self.kind == "lm" and self.config.tied and may_tie(self.embed.weight) else None
        states = self.hidden(x, heads.score_rows(x, self.padding) if self.kind == "score" else x.rows, tied)
        if self.kind != "lm":
            name: Output = "scores" if self.kind == "score" else "values"
            return {name: heads.row_values(states, self.score.weight)}
        return lm_head.outputs(states, x, replace(self.projection, tied=tied), want, temperature, support)
