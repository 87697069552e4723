"""GPT-2 (Radford et al. 2019), with layer norms, learned positions, and biases in all layers.

Checkpoints store matrices as [in, out].
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family, to_hf_activation
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_gpt2_fields(read: ConfigReader, act: str) -> dict[str, Any]:
    """Return the configuration fields that GPT-2 and StarCoder have in common.

    `act` is the name of the activation function if config.json does not name one.
    """
    read.refuse("add_cross_attention", "there is no encoder to attend to")
    hidden = read.need("n_embd")
    heads = read.need("n_head")
    positions = read("n_positions", 1024)
    return {
        "family": read.family,
        "vocab_size": read.need("vocab_size"),
        "hidden_size": hidden,
        "num_layers": read.need("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": read("n_inner", 4 * hidden),
        "max_positions": positions,
        "learned_positions": positions,
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": read("layer_norm_epsilon", 1e-5),
        "activation": read.activation("activation_function", act),
        "gated": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "attention_scale": None if read("scale_attn_weights", True) else 1.0,
        "tied": read("tie_word_embeddings", True),
        "initializer_range": read("initializer_range", 0.02),
        "embed_dropout": read("embd_pdrop", 0.1),
        "hidden_dropout": read("resid_pdrop", 0.1),
        "attention_dropout": read("attn_pdrop", 0.1),
    }


def write_gpt2_values(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values that GPT-2 and StarCoder have in common."""
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_positions,
        "layer_norm_epsilon": config.norm_eps,
        "scale_attn_weights": config.attention_scale is None,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.initializer_range,
        "embd_pdrop": config.embed_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


def build_gpt2_end_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint locations of the embeddings, the last norm and the output layer."""
    keys = (
        common.tensor("embed.weight", "transformer.wte.weight", "embedding"),
        common.tensor("positions.weight", "transformer.wpe.weight", "embedding"),
        *common.norm("norm", "transformer.ln_f", config, "head"),
    )
    if config.tied:
        return keys
    return (*keys, *common.linear("head", "lm_head", part="head"))


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = read_gpt2_fields(read, "gelu_new")
    by_layer = read("scale_attn_by_inverse_layer_idx", False)
    return TransformerConfig(**fields, layer_scaled_attention=by_layer, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return write_gpt2_values(config) | {
        "scale_attn_by_inverse_layer_idx": config.layer_scaled_attention,
        "activation_function": to_hf_activation(config, tanh="gelu_new"),
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    block = common.BLOCK
    hf_block = "transformer.h.{i}"
    qkv = tuple(f"{block}.attention.{letter}" for letter in "qkv")
    return (
        *build_gpt2_end_keys(config),
        *common.norm(f"{block}.norm1", f"{hf_block}.ln_1", config),
        *common.fused(
            qkv, f"{hf_block}.attn.c_attn", (config.hidden_size,) * 3, bias=True, transpose=True
        ),
        *common.linear(
            f"{block}.attention.o", f"{hf_block}.attn.c_proj", bias=True, transpose=True
        ),
        *common.norm(f"{block}.norm2", f"{hf_block}.ln_2", config),
        *common.linear(f"{block}.mlp.up", f"{hf_block}.mlp.c_fc", bias=True, transpose=True),
        *common.linear(f"{block}.mlp.down", f"{hf_block}.mlp.c_proj", bias=True, transpose=True),
    )


TINY = {
    "vocab_size": 131,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY = Family(
    name="gpt2",
    causal_lm="GPT2LMHeadModel",
    classifier="GPT2ForSequenceClassification",
    prefix="transformer.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=TINY,
    buffers=(".attn.bias", ".attn.masked_bias"),
)
register_hf_family(FAMILY)
