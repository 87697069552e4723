"""What weft does on a GPU, on a device that a CPU stands in for: no tensor is left on the other
side, and every kernel is asked for what it takes. Speed, rounding and the kernels themselves are
for a GPU to show (`benchmarks/gpu.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weft.kernels.gpu.fused import KERNELS

ROOT = Path(__file__).resolve().parents[2]
Program = Callable[..., dict[str, int]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """Runs a program of `program.py`; the calls of kernels it made."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this torch has a device's own code")
    home = Path(torch.__file__).parent
    if shutil.which("g++") is None or not (home / "include" / "ATen").is_dir():
        pytest.skip("the stand-in needs g++ and torch's headers")
    folder = tmp_path_factory.mktemp("stand-in")
    built = folder / "device.so"
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-O1",
            f"-I{home / 'include'}",
            "-o",
            built,
            Path(__file__).with_name("device.cpp"),
            f"-L{home / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
        ],
        check=True,
    )

    # The host keeps the memory that is freed, so that its pages are not cleared for every
    # operation.
    keeps = {f"MALLOC_{name}_": str(1 << 30) for name in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}
    environment = {**os.environ, **keeps, "WEFT_CUDA_STAND_IN": str(built), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.cuda.program"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as programs:
        assert programs.stdin is not None and programs.stdout is not None
        asked, answers = programs.stdin, programs.stdout

        def run(name: str, flash: str = "plain") -> dict[str, int]:
            work = folder / f"{name}-{flash}"
            work.mkdir()
            print(json.dumps([name, str(work), flash]), file=asked, flush=True)
            code = answers.readline().strip()
            assert code == "0", f"exit code {code}: {(work / 'output.txt').read_text()[-8000:]}"
            calls: dict[str, int] = json.loads((work / "calls.json").read_text())
            return calls

        yield run


@pytest.mark.slow
def test_tensors_of_two_devices_do_not_go_together(program: Program) -> None:
    assert program("mixed") == {}


@pytest.mark.slow
@pytest.mark.parametrize("flash", ["plain", pytest.param("pages", marks=pytest.mark.exhaustive)])
def test_the_benchmark_of_a_gpu_runs(program: Program, flash: str) -> None:
    """With flash attention as torch 2.11 has it, and as later ones do; FlexAttention computes
    shared prompts in both.
    """
    calls = program("gpu", flash)
    assert min(calls[kernel] for kernel in ("flash", "flex", "captures")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("flash", ["plain", "pages"])
def test_tests_that_ask_for_a_device_pass(program: Program, flash: str) -> None:
    """What they say of the device's own kernels is seen on one alone."""
    calls = program("marked", flash)
    assert min(calls[kernel] for kernel in ("flash", "flex", "captures")) > 0


@pytest.mark.slow
def test_what_leaves_the_device_comes_back_in_time(program: Program) -> None:
    """Copies on a side stream are done as late as its events allow."""
    assert program("offload")["flash"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("flash", [pytest.param("plain", marks=pytest.mark.slow), "pages"])
def test_algorithms_run(program: Program, flash: str) -> None:
    calls = program("algorithms", flash)
    assert calls["flash"] > 0 and ("flex" in calls) == (flash == "plain")


def test_a_training_step_waits_for_the_device_twice(program: Program) -> None:
    """For its numbers, which come by one copy, and for the clock; however many micro-batches,
    statistics or experts.
    """
    calls = program("waits")
    waits = {line: count for line, count in calls.items() if ": " in line}
    steps = ("sft", "sft in parts", "grpo", "experts")
    assert waits == {
        f"{step}: {line}": 1
        for step in steps
        for line in ("tolist in step.read_all", "synchronize in device.wait_for_device")
    }
    assert calls["added in sft"] == 0 and calls["added in sft in parts"] > 0, (
        "each later part adds to float32 masters"
    )


@pytest.mark.slow
@pytest.mark.parametrize("flash", ["plain", "pages"])
def test_the_second_device_computes_what_lies_there(program: Program, flash: str) -> None:
    """The current device is a thread's own; a kernel or a capture on another one than its tensors'
    gives garbage.
    """
    assert program("second", flash)["flash"] > 0


@pytest.mark.parametrize("flash", ["plain", "pages"])
def test_a_decode_step_waits_for_the_device_once(program: Program, flash: str) -> None:
    assert program("decode_waits", flash)["captures"] > 0


@pytest.mark.slow
def test_fused_kernels_change_no_token_and_save_the_launches_of_the_table(
    program: Program,
) -> None:
    calls = program("fused_kernels", "pages")
    page = (ROOT / "docs" / "kernels.md").read_text()
    table = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert [name for name, *_ in table] == list(KERNELS)
    for name, per_layer, elsewhere in table:
        assert calls[name] > 0
        assert calls[f"{name}: saved per layer"] == int(per_layer), name
        assert calls[f"{name}: saved elsewhere"] == int(elsewhere), name
    assert calls["all: saved per layer"] == sum(int(per_layer) for _, per_layer, _ in table)
    assert f"{calls['launches per layer']} per layer of a Llama" in page
    assert f"{calls['draw: saved elsewhere'] + 1} for the draw of the tokens" in page
