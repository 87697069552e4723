"""OPT (Zhang et al. 2022) and Galactica (Taylor et al. 2022), with learned positions.

Position 0 is row 2 of the position table. OPT-350m has embeddings that are narrower than its hidden
states.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family, to_hf_activation
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family

OFFSET = 2  # rows of the position table before position 0


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    hidden = read.need("hidden_size")
    heads = read.need("num_attention_heads")
    positions = read("max_position_embeddings", 2048)
    embed_dim = read("word_embed_proj_dim", hidden)
    norm_first = read("do_layer_norm_before", True)
    bias = read("enable_bias", True)
    affine = read("layer_norm_elementwise_affine", True)
    read.refuse("layerdrop", "layers are never skipped here", unless=0.0)
    return TransformerConfig(
        family=read.family,
        vocab_size=read.need("vocab_size"),
        hidden_size=hidden,
        num_layers=read.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=read.need("ffn_dim"),
        max_positions=positions,
        learned_positions=positions + OFFSET,
        position_offset=OFFSET,
        norm="layer",
        norm_weight=affine,
        norm_bias=affine,
        norm_eps=1e-5,
        placement="pre" if norm_first else "after",
        final_norm=norm_first and not read("_remove_final_layer_norm", False),
        activation=read.activation("activation_function", "relu"),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        embed_dim=None if embed_dim == hidden else embed_dim,
        tied=read("tie_word_embeddings", True),
        initializer_range=read("init_std", 0.02),
        hidden_dropout=read("dropout", 0.1),
        attention_dropout=read("attention_dropout", 0.0),
        extra=read.extra(),
    )


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    norm_first = config.placement == "pre"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "word_embed_proj_dim": config.embed_dim or config.hidden_size,
        "do_layer_norm_before": norm_first,
        "_remove_final_layer_norm": norm_first and not config.final_norm,
        "enable_bias": config.qkv_bias,
        "layer_norm_elementwise_affine": config.norm_weight,
        "activation_function": to_hf_activation(config),
        "tie_word_embeddings": config.tied,
        "init_std": config.initializer_range,
        "dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "layerdrop": 0.0,
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    block = common.BLOCK
    hf_block = "model.decoder.layers.{i}"
    bias = config.qkv_bias
    keys: tuple[Key, ...] = (
        common.tensor("embed.weight", "model.decoder.embed_tokens.weight", "embedding"),
        common.tensor("positions.weight", "model.decoder.embed_positions.weight", "embedding"),
    )
    if config.embed_dim is not None:
        keys += common.linear("embed_in", "model.decoder.project_in", part="embedding")
        keys += common.linear("embed_out", "model.decoder.project_out", part="head")
    if config.final_norm:
        keys += common.norm("norm", "model.decoder.final_layer_norm", config, "head")
    if not config.tied:
        keys += common.linear("head", "lm_head", part="head")
    for letter, hf_name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items():
        keys += common.linear(
            f"{block}.attention.{letter}", f"{hf_block}.self_attn.{hf_name}", bias=bias
        )
    return (
        *keys,
        *common.norm(f"{block}.norm1", f"{hf_block}.self_attn_layer_norm", config),
        *common.linear(f"{block}.mlp.up", f"{hf_block}.fc1", bias=bias),
        *common.linear(f"{block}.mlp.down", f"{hf_block}.fc2", bias=bias),
        *common.norm(f"{block}.norm2", f"{hf_block}.final_layer_norm", config),
    )


FAMILY = Family(
    name="opt",
    causal_lm="OPTForCausalLM",
    classifier="OPTForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny={
        "vocab_size": 131,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 56,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
)
register_hf_family(FAMILY)
