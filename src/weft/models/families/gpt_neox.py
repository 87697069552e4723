"""GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023), with a parallel residual.

Rotary positions are applied to only some dimensions of each head.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family, to_hf_activation
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    hidden = read.need("hidden_size")
    heads = read.need("num_attention_heads")
    positions = read("max_position_embeddings", 2048)
    bias = read("attention_bias", True)
    rotary_share = read("rotary_pct", 0.25)
    theta = read("rotary_emb_base", 10000.0)
    return TransformerConfig(
        family=read.family,
        vocab_size=read.need("vocab_size"),
        hidden_size=hidden,
        num_layers=read.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=read.need("intermediate_size"),
        max_positions=positions,
        norm="layer",
        norm_bias=True,
        norm_eps=read("layer_norm_eps", 1e-5),
        activation=read.activation("hidden_act", "gelu"),
        gated=False,
        rope=common.read_rope(read, hidden // heads, positions, theta=theta, partial=rotary_share),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        parallel_residual=read("use_parallel_residual", True),
        tied=read("tie_word_embeddings", False),
        initializer_range=read("initializer_range", 0.02),
        embed_dropout=read("hidden_dropout", float(read("hidden_dropout_prob", 0.0))),
        hidden_dropout=read("hidden_dropout", float(read("hidden_dropout_prob", 0.0))),
        attention_dropout=read(
            "attention_dropout", float(read("attention_probs_dropout_prob", 0.0))
        ),
        extra=read.extra(),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    rope = config.rope
    assert rope is not None
    scaling = common.rope_values(config)["rope_scaling"]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": to_hf_activation(config, tanh="gelu_fast"),
        "rotary_pct": rope.dim / config.head_dim,
        "rotary_emb_base": rope.theta,
        "rope_scaling": scaling,
        "attention_bias": config.qkv_bias,
        "use_parallel_residual": config.parallel_residual,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.initializer_range,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    block = common.BLOCK
    hf_block = "gpt_neox.layers.{i}"
    qkv = tuple(f"{block}.attention.{letter}" for letter in "qkv")
    sizes = (config.head_dim,) * 3
    bias = config.qkv_bias
    ends = (
        common.tensor("embed.weight", "gpt_neox.embed_in.weight", "embedding"),
        *common.norm("norm", "gpt_neox.final_layer_norm", config, "head"),
    )
    return (
        *ends,
        *(() if config.tied else common.linear("head", "embed_out", part="head")),
        *common.norm(f"{block}.norm1", f"{hf_block}.input_layernorm", config),
        *common.fused(
            qkv, f"{hf_block}.attention.query_key_value", sizes, blocks=config.num_heads, bias=bias
        ),
        *common.linear(f"{block}.attention.o", f"{hf_block}.attention.dense", bias=bias),
        *common.norm(f"{block}.norm2", f"{hf_block}.post_attention_layernorm", config),
        *common.linear(f"{block}.mlp.up", f"{hf_block}.mlp.dense_h_to_4h", bias=True),
        *common.linear(f"{block}.mlp.down", f"{hf_block}.mlp.dense_4h_to_h", bias=True),
    )


FAMILY = Family(
    name="gpt_neox",
    causal_lm="GPTNeoXForCausalLM",
    classifier="GPTNeoXForSequenceClassification",
    prefix="gpt_neox.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny={
        "vocab_size": 131,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 56,
        "max_position_embeddings": 64,
        "rotary_pct": 0.25,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    buffers=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
register_hf_family(FAMILY)
