"""The packed decoder. One class covers the families; `TransformerConfig` says what each does.

    Transformer(config, head: "lm" | "value" | "score", pooling: "last" | "mean" = "last")
    network(x: Packed, want: frozenset[Output], temperature=1.0, support=None) -> {output: float32 array}
        [N] logprobs and entropy (lm), [N] values (value), [S] scores (score)
    network.hidden(x) -> [T, hidden] after the last norm;  network.next_token_logits(hidden_rows [R, hidden]) -> [R, V] float32
    Transformer.empty(config, head, device=, dtype=) makes it without filling the weights
    network.checkpointing = True recomputes each block in the backward pass

Parameters: `embed.weight`, `positions.weight`, `embed_in.weight`, `embed_out.weight`, `blocks.{i}.attention.{q,k,v,o}.{weight,
bias}`, `blocks.{i}.attention.{q_norm,k_norm}.weight`, `blocks.{i}.mlp.{gate,up,down}.{weight,bias}`, `blocks.{i}.mlp.router.
weight`, `blocks.{i}.mlp.experts.{gate,up,down}.weight` [experts, out, in], `blocks.{i}.{norm1,norm2}.{weight,bias}` (before
attention and MLP), `blocks.{i}.{norm1_post,norm2_post}.weight` (after them), `norm.{weight,bias}`, `head.{weight,bias}` (absent
where tied: the embedding's matrix serves), `score.weight` [1, hidden] (value and score heads, in place of `head`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft.algorithms.base import Output
from weft.errors import ConfigError
from weft.models import heads, rope
from weft.models.activations import activate
from weft.models.attention import Scores, attend
from weft.models.config import TransformerConfig
from weft.models.moe import MoE
from weft.models.packed import AttentionContext, Packed

Head = Literal["lm", "value", "score"]
Pooling = Literal["last", "mean"]
OUTPUTS: dict[str, frozenset[Output]] = {
    "lm": frozenset({"logprobs", "entropy"}),
    "value": frozenset({"values"}),
    "score": frozenset({"scores"}),
}
Rotation = tuple[Tensor, Tensor] | None


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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        assert self.weight is not None
        if self.kind == "rms":
            return self.weight * normed.to(x.dtype)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)  # gemma rounds after scaling


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        hidden, inner, shared = (
            config.hidden_size,
            config.num_heads * self.head_dim,
            config.num_kv_heads * self.head_dim,
        )
        self.q = nn.Linear(hidden, inner, bias=config.qkv_bias)
        self.k = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.v = nn.Linear(hidden, shared, bias=config.qkv_bias)
        self.o = nn.Linear(inner, hidden, bias=config.o_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm is not None:
            self.q_norm = Norm(config, self.head_dim if config.qk_norm == "head" else inner)
            self.k_norm = Norm(config, self.head_dim if config.qk_norm == "head" else shared)
        scale = config.scale / (layer + 1) if config.layer_scaled_attention else config.scale
        self.scores = Scores(scale, config.window(layer), config.attention_softcap)

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, self.v(x)))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rope.rotate(q, *rotation), rope.rotate(k, *rotation)
        return self.o(attend(q, k, v, context, self.scores, self.layer).flatten(1))


class MLP(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = config.activation
        self.gate = nn.Linear(hidden, inner, bias=bias) if config.gated else None
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.up(x), self.activation))
        return self.down(activate(self.gate(x), self.activation) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.placement, self.parallel = config.placement, config.parallel_residual
        self.attention = Attention(config, layer)
        self.mlp = MoE(config) if config.has_experts(layer) else MLP(config)
        if config.placement != "post":
            self.norm1, self.norm2 = Norm(config), Norm(config)
        if config.placement in ("post", "both"):
            self.norm1_post, self.norm2_post = Norm(config), Norm(config)

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        if self.parallel:
            return x + self.attention(self.norm1(x), rotation, context) + self.mlp(self.norm2(x))
        match self.placement:
            case "pre":
                x = x + self.attention(self.norm1(x), rotation, context)
                return x + self.mlp(self.norm2(x))
            case "post":
                x = x + self.norm1_post(self.attention(x, rotation, context))
                return x + self.norm2_post(self.mlp(x))
            case "both":
                x = x + self.norm1_post(self.attention(self.norm1(x), rotation, context))
                return x + self.norm2_post(self.mlp(self.norm2(x)))
            case "after":
                x = self.norm1(x + self.attention(x, rotation, context))
                return self.norm2(x + self.mlp(x))


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig, head: Head = "lm", pooling: Pooling = "last") -> None:
        super().__init__()
        self.config, self.kind, self.pooling = config, head, pooling
        self.checkpointing = False
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

    def hidden(self, x: Packed) -> Tensor:
        """Hidden states [T, width] after the last norm, as the head reads them."""
        config = self.config
        states = self.embed(x.tokens)
        if config.embed_scale is not None:
            states = states * torch.tensor(config.embed_scale, dtype=states.dtype, device=states.device)
        width = config.embed_dim or config.hidden_size
        if width != config.hidden_size:
            states = self.embed_in(states)
        if config.learned_positions is not None:
            states = states + self.positions(x.positions + config.position_offset)
        rotation = None
        if config.rope is not None:
            rotation = rope.rotation(config.rope, x.positions, x.attention.token_lengths, states.dtype)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                states = checkpoint(block, states, rotation, x.attention, use_reentrant=False)
            else:
                states = block(states, rotation, x.attention)
        if config.final_norm:
            states = self.norm(states)
        return self.embed_out(states) if width != config.hidden_size else states

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
        """`want` of [N] logprobs and entropy, [N] values, [S] scores. Raises `ConfigError` for what the head lacks."""
        if not want <= OUTPUTS[self.kind]:
            lacking, given = ", ".join(sorted(want - OUTPUTS[self.kind])), ", ".join(sorted(OUTPUTS[self.kind]))
            raise ConfigError(f"a network with a {self.kind} head gives {given}, not {lacking}")
        states = self.hidden(x)
        if self.kind == "value":
            return {"values": heads.row_values(states[x.rows], self.score.weight)}
        if self.kind == "score":
            lengths = x.attention.dense.lengths
            return {"scores": heads.sequence_scores(states, self.score.weight, lengths, self.pooling)}
        logprobs, entropy = heads.token_logprobs(
            states[x.rows], x.labels, self.projection,
            temperature=temperature, support=support, entropy="entropy" in want,
        )  # fmt: skip
        outputs: dict[Output, Tensor] = {"logprobs": logprobs}
        if entropy is not None:
            outputs["entropy"] = entropy
        return {name: outputs[name] for name in outputs if name in want}
