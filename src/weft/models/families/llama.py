"""Llama 1, 2, 3, 3.1 and 3.2, CodeLlama, and similar models.

See Touvron et al. 2023 and Grattafiori et al. 2024.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = common.llama_fields(read)
    bias = read("attention_bias", False)
    fields |= {"qkv_bias": bias, "o_bias": bias, "mlp_bias": read("mlp_bias", False)}
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return common.llama_values(config) | {
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="llama",
    causal_lm="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=common.llama_keys,
    tiny=common.TINY_LLAMA,
)
register_hf_family(FAMILY)
