"""Configuration of the decoder, for all families.

The fields describe the computation of the decoder, independently of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from weft.kernels import Activation

Norm = Literal["rms", "rms_plus_one", "layer"]  # rms_plus_one scales by 1 + weight (gemma)
Placement = Literal["pre", "post", "both", "after"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021, "RoFormer"), which rotate dimension pairs (i, i + dim / 2).

    Only the first `dim` dimensions of each head are rotated. `theta` is the base of the
    frequencies. `scaling` is `none`, `linear`, `dynamic`, `yarn`, `longrope` or `llama3`, and
    `values` are the parameters of this scheme.
    """

    theta: float
    dim: int
    scaling: str = "none"
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """Mixture of experts that replaces the MLP; each token is sent to `top_k` of the `num` experts.

    No token is dropped. `intermediate_size` is the width of each expert. If `normalize` is True,
    the probabilities of the chosen experts are scaled so that their sum is 1. `layers[i]` is
    True if layer i has experts; if `layers` is empty, all layers have experts.
    """

    num: int
    top_k: int
    intermediate_size: int
    normalize: bool = True
    layers: tuple[bool, ...] = ()


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture of a decoder: its sizes, norms, attention, MLP or experts, and embeddings.

    Hidden states are [T, hidden_size], q is [T, num_heads, head_dim], and k and v are [T,
    num_kv_heads, head_dim].
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: Norm = "rms"
    norm_eps: float = 1e-6
    # pre: x + f(norm(x)); post: x + norm(f(x)); both: x + norm(f(norm(x))); after: norm(x + f(x))
    placement: Placement = "pre"
    final_norm: bool = True
    activation: Activation = "silu"
    gated: bool = True
    rope: Rope | None = None
    learned_positions: int | None = None  # rows of the position table, including the offset
    position_offset: int = 0  # rows of the position table before position 0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm_bias: bool = False
    norm_weight: bool = True
    qk_norm: Literal["head", "full"] | None = None
    attention_scale: float | None = None  # factor of q k^T; None: head_dim ** -0.5
    # q k^T is further divided by the layer's number, counted from 1
    layer_scaled_attention: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    # per layer: number of keys that a position sees, including itself; empty: no limits
    windows: tuple[int | None, ...] = ()
    embed_scale: float | None = None
    # width of the embeddings, which are projected to and from hidden_size; None: hidden_size
    embed_dim: int | None = None
    parallel_residual: bool = False
    tied: bool = False
    # trained tokens before each sequence, whose keys and values all its tokens see; set by prefix
    # tuning (`weft.models.network.prefix`)
    prefix_tokens: int = 0
    experts: Experts | None = None
    initializer_range: float = 0.02
    # dropout while training: of the embeddings, of the outputs of attention and MLP, and of the
    # attention weights
    embed_dropout: float = 0.0
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    # config.json keys that do not affect the decoder's results
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def scale(self) -> float:
        """Factor by which q k^T is multiplied in attention, without any scaling by layer.

        With `layer_scaled_attention`, each layer divides this factor by its index, counted from 1.
        """
        if self.attention_scale is not None:
            return self.attention_scale
        return self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        """Return the number of keys to which a token attends in this layer; None means no limit."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Return whether the layer has experts instead of an MLP."""
        return self.experts is not None and (not self.experts.layers or self.experts.layers[layer])

    @property
    def head_layers(self) -> float:
        """Cost per token of the output matrix, in units of the cost of one layer.

        To balance the stages of a pipeline, the last stage gets this many fewer layers than the
        others.
        """
        mlp_size = self.intermediate_size
        num_mlps = 1
        if self.experts is not None:
            mlp_size = self.experts.intermediate_size
            num_mlps = self.experts.top_k
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        mlp = num_mlps * mlp_size * (3 if self.gated else 2)
        return (
            self.vocab_size
            * (self.embed_dim or self.hidden_size)
            / (self.hidden_size * (attention + mlp))
        )

    @property
    def num_weights(self) -> int:
        """Number of elements of all matrices, without biases and norms."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        matrices = (3 if self.gated else 2) * self.hidden_size
        mlp = matrices * self.intermediate_size * self.num_layers
        if self.experts is not None:
            # Layers with experts have these instead of the MLP.
            if self.experts.layers:
                num_sparse_layers = sum(self.experts.layers)
            else:
                num_sparse_layers = self.num_layers
            mlp = mlp - matrices * self.intermediate_size * num_sparse_layers
            mlp += matrices * self.experts.intermediate_size * self.experts.num * num_sparse_layers
        embeddings = (
            self.vocab_size * (self.embed_dim or self.hidden_size) * (1 if self.tied else 2)
        )
        return (
            embeddings
            + (self.learned_positions or 0) * self.hidden_size
            + attention * self.num_layers
            + mlp
        )

    def with_dropout(self, rate: float) -> TransformerConfig:
        """Return a copy with `rate` as the dropout of embeddings, hidden states and attention."""
        return replace(self, embed_dropout=rate, hidden_dropout=rate, attention_dropout=rate)
