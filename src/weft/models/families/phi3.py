"""Phi-3 and Phi-4-mini (Abdin et al. 2024), which are like Llama with LongRoPE.

Checkpoints store q, k and v as one tensor, and gate and up as another.
"""

from __future__ import annotations

from typing import Any

from weft.errors import CheckpointError
from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    scaling = read("rope_scaling", None) or read("rope_parameters", None)
    # "su" and "yarn" are older names of longrope.
    if scaling and (scaling.get("rope_type") or scaling.get("type")) in ("su", "yarn"):
        others = {key: value for key, value in scaling.items() if key not in ("rope_type", "type")}
        renamed = {**others, "rope_type": "longrope"}
        read = ConfigReader(read.family, {**read.raw, "rope_scaling": renamed})
    fields = common.llama_fields(read)
    if fields["rope"].scaling not in ("none", "longrope"):
        raise CheckpointError(
            f"rope_scaling of type {fields['rope'].scaling!r}: a phi3 model has longrope or none"
        )
    layers = fields["num_layers"]
    fields["windows"] = common.layer_windows(
        read, layers, read("sliding_window", None), [True] * layers
    )
    # `embd_pdrop` is not read, because neither the original code nor transformers uses it.
    return TransformerConfig(**fields, hidden_dropout=read("resid_pdrop", 0.0), extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    rope = config.rope
    assert rope is not None
    return common.llama_values(config) | {
        "sliding_window": common.one_window(config),
        "partial_rotary_factor": rope.dim / config.head_dim,
        "original_max_position_embeddings": rope.values.get("original", config.max_positions),
        "resid_pdrop": config.hidden_dropout,
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    block = common.BLOCK
    hf_block = common.HF_BLOCK
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    qkv = tuple(f"{block}.attention.{letter}" for letter in "qkv")
    mlp_size = config.intermediate_size
    return (
        *common.llama_ends(config),
        *common.fused(qkv, f"{hf_block}.self_attn.qkv_proj", (q_size, kv_size, kv_size)),
        *common.linear(f"{block}.attention.o", f"{hf_block}.self_attn.o_proj"),
        *common.fused(
            (f"{block}.mlp.gate", f"{block}.mlp.up"),
            f"{hf_block}.mlp.gate_up_proj",
            (mlp_size, mlp_size),
        ),
        *common.linear(f"{block}.mlp.down", f"{hf_block}.mlp.down_proj"),
        *common.llama_norms(config),
    )


FAMILY = Family(
    name="phi3",
    causal_lm="Phi3ForCausalLM",
    classifier="Phi3ForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=common.TINY_LLAMA
    | {
        "sliding_window": 9,
        "pad_token_id": 0,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
        "hidden_size": 64,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 4.0, 6.0, 8.0, 9.0],
        },
    },
)
register_hf_family(FAMILY)
