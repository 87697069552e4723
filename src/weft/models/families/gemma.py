"""Gemma (Mesnard et al. 2024), which is similar to Llama.

Unlike in Llama, embeddings are scaled by sqrt(hidden), and norms scale by 1 + weight.
"""

from __future__ import annotations

import math
from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_gemma_fields(read: ConfigReader, act: str) -> dict[str, Any]:
    """Return the configuration fields that Gemma 1 and Gemma 2 have in common.

    `act` is the key of the activation function in config.json.
    """
    fields = common.llama_fields(read, tied=True, act=(act, "gelu_pytorch_tanh"))
    bias = read("attention_bias", False)
    read.refuse("use_bidirectional_attention", "attention here is causal")
    return fields | {
        "head_dim": read("head_dim", 256),
        "rope": common.read_rope(read, read("head_dim", 256), fields["max_positions"]),
        "norm": "rms_plus_one",
        "embed_scale": math.sqrt(fields["hidden_size"]),
        "qkv_bias": bias,
        "o_bias": bias,
    }


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = read_gemma_fields(read, "hidden_act")
    # In configurations of the first release, "gelu" means the tanh form.
    if fields["activation"] == "gelu":
        fields["activation"] = "gelu_tanh"
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return common.llama_values(config) | {"attention_bias": config.qkv_bias}


FAMILY = Family(
    name="gemma",
    causal_lm="GemmaForCausalLM",
    classifier="GemmaForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=common.llama_keys,
    tiny=common.TINY_LLAMA
    | {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True, "hidden_act": "gelu"},
)
register_hf_family(FAMILY)
