"""Settings that make a process keep freed memory; weft uses them only in processes it starts."""

from __future__ import annotations

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from weft.observe import memory

ROOT = Path(__file__).parents[2]
ASKS = """
import sys
asked = []
sys.addaudithook(lambda event, given: asked.append(given[1]) if event == "ctypes.dlsym" and given[1] == "mallopt" else None)
"""
SCRIPT = """
from pathlib import Path
import torch, weft
from tests.launch import cases
from weft.launch import run
folder = Path(sys.argv[1])
cases.prepare(folder)
for name in ("sft", "grpo"):
    run(cases.CASES[name](folder, name))
from weft.cli.main import main
assert main(["report", "nowhere"]) == 2
"""
COMMAND = """
sys.argv = ["weft", "report", "nowhere"]
from weft.cli.main import main
assert main() == 2
"""
FAULTS = """
import resource, torch
from weft.observe.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    alive = [torch.ones(size << 18) for size in (12, 30, 20, 25, 16) * 3]
    del alive
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
print(*(faults() for _ in range(5)))
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")


def printed(code: str, *words: str) -> str:
    """Return the output of another process."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, cwd=ROOT
    ).stdout


@pytest.mark.slow
@glibc
def test_freed_memory_is_reused_without_page_faults() -> None:
    """Allocate and free tensors of 309 MB five times; the last three times need no new memory.

    The second time may need some: the freed blocks are not always joined to blocks large enough.
    """
    first, _, *later = map(int, printed(FAULTS).split())
    assert len(later) == 3 and sum(later) < first / 4


@glibc
@pytest.mark.slow
def test_scripts_keep_their_allocator_settings(tmp_path: Path) -> None:
    assert printed(ASKS + SCRIPT + "print(asked)", str(tmp_path)).splitlines()[-1] == "[]"


@glibc
def test_the_command_line_sets_the_allocator() -> None:
    assert printed(ASKS + COMMAND + "print(len(asked))").splitlines()[-1] == "3"


def test_freed_device_memory_serves_other_sizes_unless_the_user_says_how_torch_allocates() -> None:
    from weft.observe.memory import build_segment_variables

    assert build_segment_variables({"HOME": "/"}) == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert build_segment_variables({name: "max_split_size_mb:64"}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone starts the measurement again")
def test_a_restarted_peak_is_that_of_a_part_and_the_total_peak_is_kept() -> None:
    size = 2**28
    with mmap.mmap(-1, size) as pages:
        for at in range(0, size, mmap.PAGESIZE):
            pages[at] = 1
        assert memory.restart_peak_memory()
    high = memory.measure_peak_memory_gb()
    assert memory.restart_peak_memory()
    assert memory.measure_recent_peak_gb() < high - 0.2
    assert memory.measure_peak_memory_gb() == pytest.approx(high, abs=0.01)


def test_the_peak_is_kept_if_it_cannot_be_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = memory.measure_peak_memory_gb()
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "absent" / "clear_refs")
    assert not memory.restart_peak_memory()
    assert memory.measure_peak_memory_gb() >= before
