"""How much generation runs at once on a device, where the caller does not say."""

from __future__ import annotations

import torch

from weft.engine.device import GIGABYTE, free_bytes, memory_bytes
from weft.engine.generation.scheduler import Budget
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig
from weft.models.network.rope import CHANGING

KV_SHARE = 0.25  # of the device's memory that keys and values may take
FREE_SHARE = 0.9  # of what is free on a GPU: logits, and what is captured, take some too
SEQUENCES = {"cpu": 128}  # rows of a decode step; more gain little on a CPU
DEFAULT_SEQUENCES = 512  # a step of a GPU reads the weights once, however many rows it has
# prompt tokens of a step; more gain nothing on a CPU, and what runs waits for them
PREFILL = {"cpu": 2048}
DEFAULT_PREFILL = 8192


def default_budget(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    kv_cache_gb: float | None = None,
    kept: int = 0,
) -> Budget:
    """Keys and values in what `kv_bytes` leaves them."""
    return Budget(
        max_sequences=SEQUENCES.get(device.type, DEFAULT_SEQUENCES),
        max_tokens=max(1, kv_bytes(device, kv_cache_gb, kept) // token_bytes(config, dtype)),
        max_prefill_tokens=PREFILL.get(device.type, DEFAULT_PREFILL),
        divides=config.rope is None or config.rope.scaling not in CHANGING,
    )


def token_bytes(config: TransformerConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def kv_bytes(device: torch.device, kv_cache_gb: float | None, kept: int = 0) -> int:
    """Bytes that keys and values may take: as many as the user says, else a quarter of the memory
    that this process may use on the device, on a GPU no more than nearly all of what is free.
    `kept` bytes are theirs already. Raises `ConfigError` where what the user says is not there.
    """
    if kv_cache_gb is None:
        share = int(KV_SHARE * memory_bytes(device))
        if device.type != "cuda":
            return share
        return min(share, int(FREE_SHARE * free_bytes(device)) + kept)
    asked = int(kv_cache_gb * GIGABYTE)
    if device.type == "cuda" and asked > (there := free_bytes(device) + kept):
        raise ConfigError(
            f"gen.kv_cache_gb={kv_cache_gb:g}: {there / GIGABYTE:.1f} GiB are free on {device}; "
            f"lower it, or leave it out"
        )
    return asked
