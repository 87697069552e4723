"""Memory that a CPU's process has freed is its own to use again."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from weft.engine.device import resolve_device
from weft.models.native.library import library

# A thread that comes after others may get the heap that one of them had in the C library.
FAULTS = """
import resource, threading, torch
from weft.engine.device import resolve_device
def in_threads(count, work):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    alive = [torch.ones(size << 18) for size in (12, 30, 20, 25, 16) * 3]
    del alive
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
together = threading.Barrier(8)
in_threads(8, lambda: (together.wait(), torch.ones(1 << 10), together.wait()))
resolve_device("cpu")
in_threads(1, lambda: print(min(faults() for _ in range(8))))
"""

# Small holes that the process brings along would hide what small things do: some thousands are filled first.
HOLES = """
import random, torch
from weft.engine.device import resolve_device
from weft.observe.memory import peak_memory_gb
resolve_device("cpu")
torch.set_num_threads(1)
kept = [torch.empty(size) for size in (0, 1, 10, 50, 100, 300, 1000) for _ in range(2000)]
draw, before, most = random.Random(0), peak_memory_gb(), 0
for _ in range(60):
    share, alive = draw.uniform(0.5, 1), []
    for _ in range(40):
        alive.append(torch.ones(int(share * draw.choice((1 << 18, 1 << 19, 1 << 20)))))
        kept.append(torch.empty(8))
    most = max(most, sum(tensor.nbytes for tensor in alive))
    del alive
print((peak_memory_gb() - before) * 2**30 / most)
"""

FORKS = """
import os, threading, torch
from weft.engine.device import resolve_device
resolve_device("cpu")
torch.set_num_threads(1)
ends = threading.Event()
def work():
    while not ends.is_set():
        torch.empty(1 << 20)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
well = 0
for _ in range(50):
    child = os.fork()
    if child == 0:
        torch.empty(1 << 20)
        os._exit(0)
    well += os.waitpid(child, 0)[1] == 0
print(well)
ends.set()
"""

LIMITED = """
import resource, torch
from weft.engine.device import resolve_device
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
resolve_device("cpu")
x = torch.ones(1 << 20)
print(int(x.sum()), x.data_ptr() % 64)
"""

LARGE_PAGES = """
import re, torch
from weft.engine.device import resolve_device
resolve_device("cpu")
x = torch.ones(1 << 24)
for mapping in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    start, end = (int(bound, 16) for bound in mapping.split()[0].split("-"))
    if start <= x.data_ptr() < end:
        print(start % (1 << 21), end % (1 << 21), "hg" in re.search("VmFlags:(.*)", mapping)[1].split())
"""
compiled = pytest.mark.skipif(not hasattr(library(), "weft_heap"), reason="the heap is compiled with the kernels")


def printed(code: str) -> str:
    """By a process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600).stdout


@compiled
def test_freed_memory_is_taken_again_without_a_fault_a_page() -> None:
    """Tensors of 309 MB, made and freed again and again, by a thread after others: in the end they lie where others lay."""
    assert int(printed(FAULTS)) < 100


@compiled
def test_small_things_that_stay_leave_no_holes_between_large_ones_that_go() -> None:
    """Of 40 tensors a step, 100 MB at most, and a small one beside each that stays: 3.2 times as much in torch's own blocks."""
    assert float(printed(HOLES)) < 1.1


@compiled
def test_no_tensor_lies_in_another_whichever_thread_makes_it() -> None:
    """Each is filled with its number and read before it goes, while three threads make and free tensors of many sizes."""
    resolve_device("cpu")
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw, alive = random.Random(seed), []
        for number in range(1500):
            alive.append((torch.full((int(2 ** draw.uniform(0, 18)),), number), number))
            if len(alive) > 30 or draw.random() < 0.4:
                tensor, its_own = alive.pop(draw.randrange(len(alive)))
                wrong.extend([its_own] * int((tensor != its_own).sum()))
        wrong.extend(number for tensor, number in alive if bool((tensor != number).any()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@compiled
def test_a_child_of_a_process_whose_threads_make_tensors_makes_its_own() -> None:
    assert int(printed(FORKS)) == 50


@compiled
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_tensors_lie_where_large_pages_are_asked_for_and_whole_ones_fit() -> None:
    assert printed(LARGE_PAGES) == "0 0 True\n"


@compiled
def test_where_addresses_are_limited_tensors_lie_elsewhere() -> None:
    assert printed(LIMITED) == f"{1 << 20} 0\n"


@compiled
def test_tensors_are_aligned_and_seen_by_the_profiler() -> None:
    resolve_device("cpu")
    sizes = [*range(300), *range(32_700, 32_900), 1 << 20]
    assert all(torch.empty(size, dtype=torch.uint8).data_ptr() % 64 == 0 for size in sizes)
    with torch.profiler.profile(profile_memory=True) as profile:
        torch.empty(1 << 20)
    assert any(event.self_cpu_memory_usage == 4 << 20 for event in profile.key_averages())


@compiled
def test_what_is_too_large_says_so() -> None:
    """More than addresses go, and more than the machine has, which the system refuses where it is not told to promise all."""
    resolve_device("cpu")
    sizes = [1 << 60]
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "1":
        sizes.append(1 << 42)
    for size in sizes:
        with pytest.raises(RuntimeError, match=f"not enough memory: you tried to allocate {size} bytes"):
            torch.empty(size, dtype=torch.uint8)
    assert int(torch.ones(1 << 20).sum()) == 1 << 20
