"""Mistral 7B (Jiang et al. 2023), which is similar to Llama.

In early versions, every layer has a sliding window.
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
    layers = fields["num_layers"]
    read.refuse("layer_types", "a mistral model has one kind of layer")
    fields["windows"] = common.layer_windows(
        read, layers, read("sliding_window", None), [True] * layers
    )
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return common.llama_values(config) | {"sliding_window": common.one_window(config)}


FAMILY = Family(
    name="mistral",
    causal_lm="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=common.llama_keys,
    tiny=common.TINY_LLAMA | {"sliding_window": 7},
)
register_hf_family(FAMILY)
