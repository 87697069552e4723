"""What a prefix does not go together with is refused before the start, by name."""

from __future__ import annotations

from typing import Any

import pytest

from weft.data.spec import TokenizerSpec
from weft.engine.spec import LoRASpec, ModelSpec, PrefixSpec
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoRASpec(r=4)}, "prefix.num_tokens=3 and lora.r=4 exclude each other"),
        ({"freeze_layers": 1}, "prefix.num_tokens=3 excludes freeze_layers and train_last_layers"),
        ({"backend": "hf"}, "prefix.num_tokens=3: backend=hf runs the module as it is"),
        (
            {"init_from_scratch": True},
            "init_from_scratch=true: a prefix is saved without the weights",
        ),
        ({"tokenizer": TokenizerSpec(add_tokens=["<x>"])}, "tokenizer.add_tokens=.*take lora.r"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling=.*take lora.r"),
    ],
)
def test_what_excludes_a_prefix(changes: dict[str, Any], message: str) -> None:
    ModelSpec(**changes)
    with pytest.raises(ConfigError, match=message):
        ModelSpec(prefix=PrefixSpec(num_tokens=3), **changes)


def test_a_prefix_is_an_adapter_of_what_is_trained() -> None:
    spec = ModelSpec(prefix=PrefixSpec(num_tokens=3), trained=True)
    assert spec.has_adapters and spec.mirror().has_adapters
    assert not ModelSpec(prefix=PrefixSpec(num_tokens=3)).has_adapters
