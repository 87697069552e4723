"""The plan of the GPU run: order, limits, what runs together, and what the second command does.

No torch, no GPU.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import gpu_plan
from benchmarks.gpu_plan import EVERY, FIRST, SECOND

ROOT = Path(__file__).resolve().parents[2]


def test_the_first_command_tells_whether_it_is_correct_before_how_fast_it_is() -> None:
    assert FIRST == (
        "limits",
        "probe",
        "algorithms",
        "agreement",
        "sft",
        "decode",
        "grpo",
        "lora",
        "tests",
    )
    assert SECOND == ("decode_profile", "sft_profile", "ragged", "jax", "plan_profile")


def test_the_limits_fit_into_the_minutes() -> None:
    """With what the program itself needs: a start, which imports torch, and the margin at the end."""
    start = 15
    assert gpu_plan.seconds(FIRST) + start + gpu_plan.MARGIN < 8 * 60
    assert gpu_plan.seconds(SECOND) + start + gpu_plan.MARGIN < 4 * 60
    assert all(EVERY[name].limit > gpu_plan.LEAST for name in (*FIRST, *SECOND))


def test_only_sections_that_measure_nothing_run_at_the_same_time() -> None:
    turns = [[section.name for section in turn] for turn in gpu_plan.turns(FIRST)]
    assert turns == [
        ["limits"],
        ["probe", "algorithms", "agreement"],
        ["sft"],
        ["decode"],
        ["grpo"],
        ["lora"],
        ["tests"],
    ]
    for turn in gpu_plan.turns((*FIRST, *SECOND)):
        assert len(turn) == 1 or not any(section.measures for section in turn)
    assert gpu_plan.seconds(["probe", "algorithms"]) == max(
        EVERY["probe"].limit, EVERY["algorithms"].limit
    )


def test_a_section_may_use_what_others_left_and_nothing_that_others_need() -> None:
    sft, rest = EVERY["sft"], ["decode", "grpo"]
    needed = sft.limit + gpu_plan.seconds(rest)
    assert gpu_plan.allowance(sft, needed, rest) == sft.limit
    assert gpu_plan.allowance(sft, needed + 30.0, rest) == sft.limit + 30
    assert gpu_plan.allowance(sft, needed - 30.0, rest) == sft.limit, (
        "the last sections are those that have to wait"
    )
    assert gpu_plan.allowance(sft, 20.0, rest) == 20.0


@pytest.mark.parametrize("slow", [(), ("agreement",), FIRST])
def test_the_run_ends_in_time_however_long_sections_take(slow: tuple[str, ...]) -> None:
    """Sections take ten seconds, or with `slow` all that they may."""
    left, names, begun = 8 * 60.0 - gpu_plan.MARGIN - 15, list(FIRST), []
    for turn in gpu_plan.turns(FIRST):
        names = names[len(turn) :]
        if left < gpu_plan.LEAST:
            continue
        allowed = [gpu_plan.allowance(section, left, names) for section in turn]
        begun += [section.name for section in turn]
        left -= max(
            most if section.name in slow else 10.0
            for section, most in zip(turn, allowed, strict=True)
        )
        assert left >= 0.0
    assert begun == list(FIRST)


def test_the_second_command_does_what_the_first_left_out() -> None:
    first = {
        "ran": ["limits", "probe", "algorithms", "agreement", "sft", "decode"],
        "why": {"decode": "did not end"},
    }
    assert gpu_plan.second(first) == [*SECOND, "decode", "grpo", "lora", "tests"]
    assert gpu_plan.second({"ran": list(FIRST), "why": {}}) == list(SECOND)
    assert gpu_plan.second({}) == [*SECOND, *FIRST]


def test_the_slowest_step_of_sft_is_the_one_with_the_lowest_mfu() -> None:
    values = {
        "sft: MFU": 0.5,
        "sft, mixed lengths: MFU": 0.4,
        "sft: MFU by the data sheet": 0.1,
        "adapters: MFU": 0.2,
    }
    assert (
        gpu_plan.slowest([{"what": what, "value": value} for what, value in values.items()])
        == "sft, mixed lengths"
    )
    assert gpu_plan.slowest([]) is None


def test_the_readme_has_the_limits() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text().split("| command | sections")[1]
    found: list[tuple[str, int]] = []
    for row in table.split("\n\n")[0].splitlines()[2:]:
        _, _, sections, seconds, _ = row.split("|")
        names = [name for name in re.findall(r"`(\w+)`", sections) if name in EVERY]
        if names:
            found += zip(names, map(int, seconds.split(",")), strict=True)
    assert found == [(name, EVERY[name].limit) for name in (*FIRST, *SECOND)]


def test_every_section_of_the_plan_can_run() -> None:
    from benchmarks.gpu_sections import RUNS

    assert set(RUNS) == set(EVERY)


def test_every_test_that_needs_a_gpu_is_run_there() -> None:
    """Tests that are skipped without a CUDA device are among the files and names of the section
    `tests`.
    """
    from benchmarks.gpu_sections import DEVICE_TESTS, ON_THE_DEVICE

    words, found = ON_THE_DEVICE.split(" or "), []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "needs a CUDA device" not in source or path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(source)):
            marks = [ast.unparse(mark) for mark in getattr(node, "decorator_list", ())]
            if any(mark == "needs_cuda" or "needs a CUDA device" in mark for mark in marks):
                assert isinstance(node, ast.FunctionDef)
                assert str(path.relative_to(ROOT)) in DEVICE_TESTS, path
                assert any(word in node.name for word in words), node.name
                found.append(node.name)
    assert len(found) >= 7


def test_sizes_of_decoding_come_from_what_fits() -> None:
    from benchmarks.gpu_decode import those_that_fit

    assert those_that_fit((64, 8, 1, 256, 512), 600) == [64, 8, 1, 256, 512]
    assert those_that_fit((64, 8, 1, 256, 512), 422) == [64, 8, 1, 256, 384]
    assert those_that_fit((64, 8, 1, 256, 512), 300) == [64, 8, 1, 256], "256 is there already"
    assert those_that_fit((64, 8, 1), 5) == [1]
