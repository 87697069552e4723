"""GPT-BigCode (SantaCoder and StarCoder; Li et al. 2023), like GPT-2 with one key-value head."""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family, to_hf_activation
from weft.models.families.gpt2 import TINY, build_gpt2_end_keys, read_gpt2_fields, write_gpt2_values
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = read_gpt2_fields(read, "gelu_pytorch_tanh")
    if read("multi_query", True):
        fields["num_kv_heads"] = 1
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return write_gpt2_values(config) | {
        "multi_query": config.num_kv_heads == 1,
        "activation_function": to_hf_activation(config),
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter.

    With one key-value head, the rows of q, k and v are stored one after the other. With as many
    key-value heads as query heads, the rows of q, k and v alternate head by head.
    """
    block = common.BLOCK
    hf_block = "transformer.h.{i}"
    head_dim = config.head_dim
    qkv = tuple(f"{block}.attention.{letter}" for letter in "qkv")
    is_multi_query = config.num_kv_heads == 1
    sizes = (
        (config.hidden_size, head_dim, head_dim)
        if is_multi_query
        else (head_dim, head_dim, head_dim)
    )
    blocks = 1 if is_multi_query else config.num_heads
    return (
        *build_gpt2_end_keys(config),
        *common.norm(f"{block}.norm1", f"{hf_block}.ln_1", config),
        *common.fused(qkv, f"{hf_block}.attn.c_attn", sizes, blocks=blocks, bias=True),
        *common.linear(f"{block}.attention.o", f"{hf_block}.attn.c_proj", bias=True),
        *common.norm(f"{block}.norm2", f"{hf_block}.ln_2", config),
        *common.linear(f"{block}.mlp.up", f"{hf_block}.mlp.c_fc", bias=True),
        *common.linear(f"{block}.mlp.down", f"{hf_block}.mlp.c_proj", bias=True),
    )


FAMILY = Family(
    name="gpt_bigcode",
    causal_lm="GPTBigCodeForCausalLM",
    classifier="GPTBigCodeForSequenceClassification",
    prefix="transformer.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=TINY,
    buffers=("transformer.bias", ".attn.bias", ".attn.masked_bias"),
)
register_hf_family(FAMILY)
