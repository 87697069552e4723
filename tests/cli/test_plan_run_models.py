"""`weft plan run`, `cost` and `memory` of real models' config.json files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main

pytestmark = pytest.mark.slow

# Published numbers of parameters
PARAMETERS = {
    "opt-125m": 125_239_296,
    "qwen3-0.6b": 596_049_920,
    "gpt2-large": 774_030_080,
    "tinyllama-1.1b-chat": 1_100_048_384,
    "llama3.2-1b-instruct": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
    "mistral-7b-instruct-v0.3": 7_248_023_552,
    "qwen2.5-7b-instruct": 7_615_616_512,
    "llama3.1-8b": 8_030_261_248,
    "gemma2-9b-it": 9_241_705_984,
    "llama2-13b": 13_015_864_320,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}
EXPERTS = ("qwen3-30b-a3b", "mixtral-8x7b")
TOKENS = 32 * 1024
PEAK = 989e12  # FLOP/s of an H100
GROWTH = 1.5  # a model that is larger by this factor takes longer
WORDS = ("model.dtype=bfloat16", "dataset.max_seqlen=1024", "search.gpu=H100")


@pytest.fixture(scope="module")
def forecasts(data_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the forecast of each model."""
    from contextlib import redirect_stdout
    from io import StringIO

    found = {}
    for name in PARAMETERS:
        page = StringIO()
        model = f"model.path={data_dir / 'hf_configs' / name}"
        with redirect_stdout(page):
            assert main(["plan", "run", "sft", model, *WORDS, "--json", "--no-options"]) == 0
        found[name] = json.loads(page.getvalue())
    return found


@pytest.mark.parametrize("name", PARAMETERS)
def test_times_and_bytes_follow_from_the_parameters(
    forecasts: dict[str, dict[str, Any]], name: str
) -> None:
    """A token takes 6 FLOPs per parameter that processes it, training 18 bytes per parameter."""
    found = forecasts[name]
    held = 18 * PARAMETERS[name] / 2**30
    assert held <= found["memory_gb"]
    if PARAMETERS[name] > 1e9:
        assert found["memory_gb"] <= held + 200
        assert found["fits"] == (found["memory_gb"] <= 77.6)
    flops = 6 * PARAMETERS[name] * TOKENS
    if name not in EXPERTS and PARAMETERS[name] > 5e9:
        assert 0.9 * flops / PEAK <= found["step_seconds"] <= 4 * flops / PEAK
    if name in EXPERTS:
        assert found["step_seconds"] <= flops / PEAK, "experts that a token does not use count"


def test_time_and_memory_grow_with_the_model(forecasts: dict[str, dict[str, Any]]) -> None:
    dense = [name for name in PARAMETERS if name not in EXPERTS]
    for small in dense:
        for large in dense:
            if PARAMETERS[large] > GROWTH * PARAMETERS[small]:
                for key in ("step_seconds", "memory_gb"):
                    assert forecasts[large][key] > forecasts[small][key], (small, large, key)


def test_no_command_crashes_on_a_real_config(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {}
    for path in sorted((data_dir / "hf_configs").iterdir()):
        algorithm = "rw" if path.name.endswith("seqcls") else "sft"
        words = [algorithm, f"model.path={path}", "dataset.max_seqlen=256"]
        gpus = ("--price", "H100=2.5", "--devices", "1,2", "--steps", "1000")
        for command in (
            ["run", *words, "search.gpu=H100", "--no-options"],
            ["cost", *words, *gpus],
            ["memory", str(path), "--tokens", "4096"],
        ):
            code = main(["plan", *command])
            page = capsys.readouterr()
            if code == 0 and command[0] == "memory" and path.name in PARAMETERS:
                assert f"{PARAMETERS[path.name]:,} parameters" in page.out
            if code:
                assert code == 2 and page.err.startswith("error: "), page.err
                refused.setdefault(path.name, page.err)
    assert list(refused) == ["gpt2"] and "unquantized" in refused["gpt2"]
