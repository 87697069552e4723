"""How much keys and values may take: of a device's memory, of what is free of it, and of what the
user says.
"""

from __future__ import annotations

import pytest
import torch

from weft.engine.generation import caches
from weft.engine.generation.caches import choose_default_budget, compute_kv_bytes
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.options import validate

from .common import LLAMA

CPU, CUDA, GIB = torch.device("cpu"), torch.device("cuda", 0), 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which 30 are free."""
    monkeypatch.setattr(caches, "read_memory_bytes", lambda _: 80 * GIB)
    monkeypatch.setattr(caches, "free_bytes", lambda _: 30 * GIB)


def test_a_gpu_gives_a_quarter_but_no_more_than_is_free(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compute_kv_bytes(CUDA, None) == 20 * GIB
    monkeypatch.setattr(caches, "free_bytes", lambda _: 10 * GIB)
    assert compute_kv_bytes(CUDA, None) == 9 * GIB
    assert compute_kv_bytes(CUDA, None, cache_bytes=4 * GIB) == 13 * GIB, (
        "what is kept is theirs already"
    )


def test_what_the_user_says_holds_and_must_be_there(gpu: None) -> None:
    assert compute_kv_bytes(CUDA, 25.0) == 25 * GIB and compute_kv_bytes(CPU, 0.5) == GIB // 2
    with pytest.raises(
        ConfigError, match=r"gen.kv_cache_gb=31: 30.0 GiB are free on cuda:0; lower it"
    ):
        compute_kv_bytes(CUDA, 31.0)
    assert compute_kv_bytes(CUDA, 31.0, cache_bytes=GIB) == 31 * GIB
    per_token = 2 * LLAMA.num_layers * LLAMA.num_kv_heads * LLAMA.head_dim * 4
    assert (
        choose_default_budget(LLAMA, CPU, torch.float32, kv_cache_gb=1.0).max_tokens
        == GIB // per_token
    )


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gb=0.0: .*above 0"):
        validate(GenerationSpec(kv_cache_gb=0.0))
