"""The page of a GPU run, made of a recorded result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_page import page, verdict

RECORD = Path(__file__).with_name("gpu_record.json")


@pytest.fixture
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def test_the_page_of_a_recorded_run(record: dict[str, Any]) -> None:
    made = page(record)
    assert made == RECORD.with_suffix(".md").read_text(), (
        "write it again with: python -m tests.benchmarks.test_gpu_page"
    )


def test_it_says_what_was_measured_where(record: dict[str, Any]) -> None:
    made = page(record)
    assert made.startswith("# weft on NVIDIA H100 80GB HBM3\n") and "model H100" in made
    assert (
        record["command"] in made
        and record["commit"] in made
        and "torch 2.11.0" in made
        and "driver 580.0" in made
    )
    for fact in ("jax 0.11.2", "2026-11-30 12:00 UTC", "81559 MiB", "16 cores"):
        assert fact in made
    assert "tiny sizes" not in made and "trial on tiny sizes" in page({**record, "tiny": True})
    assert "FlexAttention over pages" in made, "the kernel stands with the figure"


def test_what_did_not_run_is_listed_with_the_reason(record: dict[str, Any]) -> None:
    absent = page(record).split("## What did not run")[1].split("\n## ")[0]
    assert "- tests: not started, no time was left" in absent
    assert "- the end of grpo: did not end within 60 s" in absent
    assert "- decode: 512 sequences" in absent
    del (
        record["not_started"]["tests"],
        record["why"]["grpo"],
        record["details"]["decode"]["left_out"],
    )
    assert "Everything ran." in page(record)


def test_bars_are_for_one_gpu_alone(record: dict[str, Any]) -> None:
    bar = {"what": "sft: MFU", "value": 0.4, "unit": "", "goal": ">= 0.5"}
    bound = {"what": "differ", "value": 0.4, "unit": "", "goal": "<= 0.15"}
    assert (
        verdict(bar, "H100") == "**missed**" and verdict({**bar, "value": 0.6}, "H100") == "reached"
    )
    for other in ("H200", "H100 PCIe", "A100", None):
        assert verdict(bar, other) == "", "another GPU is not judged by the H100's bar"
        assert verdict(bound, other) == "**missed**", "what is wrong is wrong everywhere"
    assert verdict({**bar, "goal": ""}, "H100") == ""
    record |= {"gpu": "H200", "device": "NVIDIA H200"}
    made = page(record)
    assert (
        "on H200 such a figure is given without a verdict" in made
        and "| >= 0.5 | **missed**" not in made
    )


def test_what_an_h200_shares_with_an_h100(record: dict[str, Any]) -> None:
    """The sentence on its page is right, and stands on no other GPU's page."""
    from weft.engine.device import find_peak_rates, parse_gpu_model

    assert parse_gpu_model("NVIDIA H200") == "H200"
    ours, theirs = find_peak_rates("NVIDIA H200"), find_peak_rates("NVIDIA H100 80GB HBM3")
    assert ours is not None and theirs is not None and ours.tflops == theirs.tflops == 989
    assert ours.gb_per_s == 4800 and round(ours.gb_per_s / theirs.gb_per_s, 2) == 1.43
    assert "1.43 times its memory bandwidth" in page({**record, "gpu": "H200"})
    for other in ("H100", "H200 NVL", "A100", None):
        assert "1.43" not in page({**record, "gpu": other})


def test_a_section_that_failed_says_why(record: dict[str, Any]) -> None:
    record["why"]["lora"] = "exit code 1, OutOfMemoryError: none left"
    made = page(record)
    assert "- **lora failed**: exit code 1, OutOfMemoryError: none left" in made


def test_a_bar_without_a_figure_is_not_measured(record: dict[str, Any]) -> None:
    bars = page(record).split("## The bars")[1].split("\n## ")[0]
    assert "| sft: MFU | >= 0.5 | 0.25 | **missed** |" in bars
    assert "| adapters of an 8B model: tokens | >= 12500 | not measured |  |" in bars


def test_the_page_of_the_second_command_holds_the_first_run_too(record: dict[str, Any]) -> None:
    second = {
        **record,
        "rows": [{"what": "ragged", "value": 1.0, "unit": "", "goal": "", "section": "ragged"}],
        "first": record,
        "details": {"ragged": {"section_s": 3.0}},
        "ran": ["ragged"],
        "why": {},
        "wrong": [],
        "not_started": {},
    }
    now, before = page(second).split("# The run before")
    assert "| ragged | 1 |" in now and "## sft" not in now and "| sft: MFU | 0.25 |" in before
    assert "| sft: MFU | >= 0.5 | 0.25 (the run before) | **missed** |" in now
    assert "| jax, sft: MFU | >= 0.4 | not measured |" in now
    second["rows"] = [{"what": "sft: MFU", "value": 0.75, "unit": "", "goal": ">= 0.5"}]
    assert "| sft: MFU | >= 0.5 | 0.75 | reached |" in page(second).split("# The run before")[0]
    second["first"] = {**record, "gpu": "H200"}
    second["rows"] = []
    now = page(second).split("# The run before")[0]
    assert "| sft: MFU | >= 0.5 | 0.25 (the run before) |  |" in now, "the GPU of that run counts"


if __name__ == "__main__":
    RECORD.with_suffix(".md").write_text(page(json.loads(RECORD.read_text())))
