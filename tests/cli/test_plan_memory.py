"""`weft plan memory`: a model's config.json is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.cli import main as weft
from weft.cli.plan import SMALL_LLAMA
from weft.errors import ConfigError


def test_a_llama_of_a_billion_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**SMALL_LLAMA, "architectures": ["LlamaForCausalLM"]})
    )
    assert weft.main(["plan", "memory", str(tmp_path), "--tokens", "1000"]) == 0
    head, first, *others = capsys.readouterr().out.splitlines()
    assert "1,235,814,400 parameters, AdamW, bfloat16, 1,000 tokens" in head
    size = float(first.split("as set")[1].split("GiB")[0])
    # 18 bytes a parameter, and the pass
    assert 18 * 1.2358144e9 / 2**30 < size < 18 * 1.2358144e9 / 2**30 + 6
    assert (
        len(others) == 7
        and "optimizer.state_dtype=8bit" in others[1]
        and others[-1].endswith("fits 8 GPUs of 24 GB")
    )


def test_no_tokens(tmp_path: Path) -> None:
    from weft.cli.plan import main

    with pytest.raises(ConfigError, match="--tokens=0"):
        main(["plan", "memory", str(tmp_path), "--tokens", "0"][1:])
