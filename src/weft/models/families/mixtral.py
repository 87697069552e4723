"""Mixtral 8x7B and 8x22B (Jiang et al. 2024), which are like Mistral with a mixture of experts."""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.keymap import Key
from weft.models.network.config import Experts, TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = common.llama_fields(read, theta=1e6) | {"norm_eps": read("rms_norm_eps", 1e-5)}
    read.refuse("router_jitter_noise", "the router here adds no noise", unless=0.0)
    layers = fields["num_layers"]
    fields["windows"] = common.layer_windows(
        read, layers, read("sliding_window", None), [True] * layers
    )
    experts = Experts(
        read.need("num_local_experts"), read("num_experts_per_tok", 2), fields["intermediate_size"]
    )
    return TransformerConfig(**fields, experts=experts, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    assert config.experts is not None
    return common.llama_values(config) | {
        "sliding_window": common.one_window(config),
        "num_local_experts": config.experts.num,
        "num_experts_per_tok": config.experts.top_k,
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    assert config.experts is not None
    mlp = f"{common.BLOCK}.mlp"
    hf_mlp = f"{common.HF_BLOCK}.block_sparse_moe"
    hf_names = {"gate": "w1", "down": "w2", "up": "w3"}
    return (
        *common.llama_ends(config),
        *common.llama_attention(config),
        *common.llama_norms(config),
        *common.linear(f"{mlp}.router", f"{hf_mlp}.gate"),
        *(
            Key(
                f"{mlp}.experts.{name}.weight",
                f"{hf_mlp}.experts.{{e}}.{hf_name}.weight",
                experts=config.experts.num,
            )
            for name, hf_name in hf_names.items()
        ),
    )


FAMILY = Family(
    name="mixtral",
    causal_lm="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=common.TINY_LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
)
register_hf_family(FAMILY)
