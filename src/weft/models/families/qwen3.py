"""Qwen 3 dense models (Yang et al. 2025), which are similar to Llama.

Unlike in Llama, an RMS norm is applied to the query and key of each head.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.qwen2 import read_upper_windows, write_window_values
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    read("head_dim", 128)
    fields = common.llama_fields(read)
    bias = read("attention_bias", False)
    fields |= {
        "qkv_bias": bias,
        "o_bias": bias,
        "windows": read_upper_windows(read, fields["num_layers"]),
    }
    return TransformerConfig(**fields, qk_norm="head", extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return (
        common.llama_values(config)
        | write_window_values(config)
        | {"attention_bias": config.qkv_bias}
    )


FAMILY = Family(
    name="qwen3",
    causal_lm="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=common.llama_keys,
    tiny=common.TINY_LLAMA | {"head_dim": 12, "tie_word_embeddings": True},
)
register_hf_family(FAMILY)
