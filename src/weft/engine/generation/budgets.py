"""Default limits of generation on a device."""

from __future__ import annotations

import torch

from weft.engine.device import GIGABYTE, free_bytes, read_memory_bytes
from weft.engine.generation.scheduler import GenerationBudget
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig
from weft.models.network.rope import LENGTH_DEPENDENT_SCALINGS

KV_SHARE = 0.25  # maximum share of the device's memory for the KV cache
FREE_SHARE = 0.9  # maximum share of a GPU's free memory; logits and graphs take the rest
MAX_SEQUENCES = {"cpu": 128}  # rows of a decode step; more gain little on a CPU
DEFAULT_MAX_SEQUENCES = 512  # a GPU's step reads the weights once for all rows
# prompt tokens of a step; more gain nothing on a CPU, and running sequences wait for them
PREFILL_TOKENS = {"cpu": 2048}
DEFAULT_PREFILL_TOKENS = 8192


def choose_default_budget(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_gb: float | None = None,
    cache_bytes: int = 0,
) -> GenerationBudget:
    """Return the default limits of generation on a device.

    The limit of the KV cache is the result of `compute_kv_bytes`. `cache_bytes` is the current size
    of the cache in bytes.
    """
    return GenerationBudget(
        max_sequences=MAX_SEQUENCES.get(device.type, DEFAULT_MAX_SEQUENCES),
        max_tokens=max(
            1,
            compute_kv_bytes(device, kv_cache_gb, cache_bytes)
            // compute_token_bytes(config, dtype),
        ),
        max_prefill_tokens=PREFILL_TOKENS.get(device.type, DEFAULT_PREFILL_TOKENS),
        splits_prompts=config.rope is None or config.rope.scaling not in LENGTH_DEPENDENT_SCALINGS,
    )


def compute_token_bytes(config: TransformerConfig, dtype: torch.dtype) -> int:
    """Return the size in bytes of one token's keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def compute_kv_bytes(device: torch.device, kv_cache_gb: float | None, cache_bytes: int = 0) -> int:
    """Return the maximum size of the KV cache in bytes.

    This is `kv_cache_gb` if the user sets it. Otherwise it is a quarter of the memory that this
    process can use on the device, and on a GPU at most nine tenths of the free memory. The memory
    that the KV cache already occupies, `cache_bytes`, counts as free.

    Raises `ConfigError` if `kv_cache_gb` exceeds the free memory.
    """
    if kv_cache_gb is None:
        share = int(KV_SHARE * read_memory_bytes(device))
        if device.type != "cuda":
            return share
        return min(share, int(FREE_SHARE * free_bytes(device)) + cache_bytes)
    requested_bytes = int(kv_cache_gb * GIGABYTE)
    if device.type == "cuda" and requested_bytes > (there := free_bytes(device) + cache_bytes):
        raise ConfigError(
            f"gen.kv_cache_gb={kv_cache_gb:g}: {there / GIGABYTE:.1f} GiB are free on {device}; "
            f"lower it, or leave it out"
        )
    return requested_bytes
