"""What `quantize` does not go with is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.engine.spec import LoRASpec, ModelSpec
from weft.engine.spec_checks import check_quantize
from weft.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": LoRASpec()}, "cannot be trained; train adapters"),
        ({"compile": True}, "compile=true exclude each other"),
        ({"offload": True}, "offload=true exclude each other"),
        ({"backend": "hf"}, "backend=hf exclude each other"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], said: str) -> None:
    spec = ModelSpec(path="m", trained=True, quantize="8bit", lora=LoRASpec(r=4))
    with pytest.raises(ConfigError, match=said):
        check_quantize(replace(spec, **changes))


def test_the_role_and_the_library_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(path="m", trained=True, quantize="4bit")
    with pytest.raises(ConfigError, match=r"actor\.quantize=4bit: .*actor\.lora\.r=16"):
        check_quantize(spec, "actor")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'bitsandbytes' is not installed"):
        check_quantize(replace(spec, lora=LoRASpec(r=4)), "actor")
    check_quantize(replace(spec, lora=LoRASpec(r=4), quantize="8bit"), "actor")
