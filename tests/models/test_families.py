"""Every shipped family against `transformers`: logits, log-probs, gradients, scores, files both ways."""

from __future__ import annotations

import pytest

from weft.registry import families
from weft.testing.families import check_family

SHIPPED = [
    "gemma", "gemma2", "gpt2", "gpt_bigcode", "gpt_neox", "llama", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen2",
    "qwen3", "qwen3_moe",
]  # fmt: skip


def test_all_families_are_shipped() -> None:
    assert set(SHIPPED) <= set(families.shipped())


@pytest.mark.parametrize("name", SHIPPED)
def test_family(name: str) -> None:
    check_family(families.get(name))
