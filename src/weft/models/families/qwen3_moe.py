"""Qwen 3 mixtures of experts (Yang et al. 2025), such as Qwen3-30B-A3B.

They are like the dense models, but have experts in some or all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.errors import CheckpointError
from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.keymap import Key
from weft.models.network.config import Experts, TransformerConfig
from weft.registry import register_hf_family


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = common.llama_fields(read)
    layers = fields["num_layers"]
    bias = read("attention_bias", False)
    if read("use_sliding_window", False):
        window = read("sliding_window", 4096)
    else:
        window = None
    step = read("decoder_sparse_step", 1)
    dense_layers = set(read("mlp_only_layers", []))
    has_experts = tuple(
        layer not in dense_layers and (layer + 1) % step == 0 for layer in range(layers)
    )
    if not any(has_experts):
        raise CheckpointError("leaves no layer with experts; such a model is of type qwen3")
    default_num = read("num_local_experts", 0)  # other spelling of `num_experts`
    experts = Experts(
        num=read("num_experts", default_num) or read.need("num_experts"),
        top_k=read("num_experts_per_tok", 8),
        intermediate_size=read.need("moe_intermediate_size"),
        normalize=read("norm_topk_prob", False),
        layers=() if all(has_experts) else has_experts,
    )
    fields |= {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "experts": experts}
    fields["windows"] = common.layer_windows(read, layers, window, [True] * layers)
    return TransformerConfig(**fields, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    experts = config.experts
    assert experts is not None
    return common.llama_values(config) | {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": bool(config.windows),
        "sliding_window": common.one_window(config),
        "num_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            layer for layer in range(config.num_layers) if not config.has_experts(layer)
        ],
    }


def build_keys(config: TransformerConfig) -> tuple[Key, ...]:
    """Return the checkpoint location of every parameter."""
    experts = config.experts
    assert experts is not None
    mlp = f"{common.BLOCK}.mlp"
    hf_mlp = f"{common.HF_BLOCK}.mlp"
    expert_keys = (
        *common.linear(f"{mlp}.router", f"{hf_mlp}.gate"),
        *(
            Key(
                f"{mlp}.experts.{name}.weight",
                f"{hf_mlp}.experts.{{e}}.{name}_proj.weight",
                experts=experts.num,
            )
            for name in ("gate", "up", "down")
        ),
    )
    dense_keys = common.llama_mlp(replace(config, mlp_bias=False))
    mlp_keys: list[Key] = []
    for layer in range(config.num_layers):
        keys = expert_keys if config.has_experts(layer) else dense_keys
        mlp_keys += [key.bind_layer(layer) for key in keys]
    return (
        *common.llama_ends(config),
        *common.llama_attention(config),
        *common.llama_norms(config),
        *mlp_keys,
    )


FAMILY = Family(
    name="qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=build_keys,
    tiny=common.TINY_LLAMA
    | {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "head_dim": 8,
    },
)
register_hf_family(FAMILY)
