"""Gemma 2 (Riviere et al. 2024), which is similar to Gemma.

Unlike in Gemma, there are norms before and after attention and MLP, logits are soft-capped, and
every other layer has a sliding window.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.gemma import read_gemma_fields
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = read_gemma_fields(read, "hidden_activation")
    layers = fields["num_layers"]
    has_window = [layer % 2 == 0 for layer in range(layers)]
    return TransformerConfig(
        **fields,
        placement="both",
        windows=common.layer_windows(read, layers, read("sliding_window", 4096), has_window),
        attention_scale=read("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_read_softcap(read, "attn_logit_softcapping", 50.0),
        final_softcap=_read_softcap(read, "final_logit_softcapping", 30.0),
        extra=read.extra(),
    )


def _read_softcap(read: ConfigReader, key: str, default: float) -> float | None:
    """Return the value of a soft cap: None if the key is null, `default` if the key is absent."""
    return read(key, None) if key in read.raw else read(key, default)


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    scalar = config.scale**-2
    # Write a whole number if only rounding errors differ from it.
    if abs(scalar - round(scalar)) < 1e-6 * scalar:
        scalar = round(scalar)
    return common.llama_values(config, act="hidden_activation") | {
        "attention_bias": config.qkv_bias,
        "sliding_window": common.one_window(config),
        "layer_types": common.layer_types(config),
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    norms = {
        "norm1": "input_layernorm",
        "norm1_post": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "norm2_post": "post_feedforward_layernorm",
    }
    return common.build_keys_with_norms(config, norms)


FAMILY = Family(
    name="gemma2",
    causal_lm="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=common.TINY_LLAMA
    | {
        "head_dim": 8,
        "tie_word_embeddings": True,
        "sliding_window": 6,
        "query_pre_attn_scalar": 10,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "num_hidden_layers": 4,
    },
)
register_hf_family(FAMILY)
