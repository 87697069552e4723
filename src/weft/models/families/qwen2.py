"""Qwen 2 and 2.5 (Yang et al. 2024), which are like Llama with biases on q, k and v.

Upper layers can have a sliding window.
"""

from __future__ import annotations

from typing import Any

from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.network.config import TransformerConfig
from weft.registry import register_hf_family


def read_upper_windows(read: ConfigReader, layers: int) -> tuple[int | None, ...]:
    """Return the attention window of each layer, or an empty tuple if no layer has a window.

    If `use_sliding_window` is set, the layers from index `max_window_layers` on have a window,
    unless `layer_types` specifies other layers.
    """
    if read("use_sliding_window", False):
        window = read("sliding_window", 4096)
    else:
        window = None
    first = read("max_window_layers", None)  # 0 is valid: all layers have a window
    if first is None:
        first = 28
    return common.layer_windows(read, layers, window, [layer >= first for layer in range(layers)])


def write_window_values(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values of the sliding windows."""
    window = common.one_window(config)
    layers = (layer for layer, size in enumerate(config.windows) if size is not None)
    first = next(layers, config.num_layers)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,
        "layer_types": common.layer_types(config),
    }


def read_config(read: ConfigReader) -> TransformerConfig:
    """Return the decoder configuration for the config.json values in `read`."""
    fields = common.llama_fields(read)
    fields["windows"] = read_upper_windows(read, fields["num_layers"])
    return TransformerConfig(**fields, qkv_bias=True, extra=read.extra())


def write_config(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json values for this configuration."""
    return common.llama_values(config) | write_window_values(config)


FAMILY = Family(
    name="qwen2",
    causal_lm="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    prefix="model.",
    read_config=read_config,
    write_config=write_config,
    keys=common.llama_keys,
    tiny=common.TINY_LLAMA
    | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
)
register_hf_family(FAMILY)
