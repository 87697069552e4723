"""OLMo 2 (OLMo team 2025), which is similar to Llama.

Unlike in Llama, norms are applied to the outputs of attention and MLP instead of the inputs, and
also to queries and keys, over all heads together.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = common.llama_fields(read) | {"norm_eps": read("rms_norm_eps", 1e-5)}
    bias = read("attention_bias", False)
    fields |= {"qkv_bias": bias, "o_bias": bias, "placement": "post", "qk_norm": "full"}
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return common.llama_values(config) | {"attention_bias": config.qkv_bias}


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    norms = {"norm1_post": "post_attention_layernorm", "norm2_post": "post_feedforward_layernorm"}
    return common.build_keys_with_norms(config, norms)


FAMILY = Family(
    name="olmo2",
    causal_lm="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=common.TINY_LLAMA,
)
register_hf_family(FAMILY)
