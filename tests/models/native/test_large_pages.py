"""Matrices that every step reads come to lie in large pages, where the system has them."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.common import tiny
from weft.models.kv_cache import KVCache
from weft.models.native import forward, large_pages


def held_large(x: torch.Tensor) -> int:
    """Bytes in large pages of the mappings that `x` lies in."""
    found = 0
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in mapping.split()[0].split("-"))
        if start < x.data_ptr() + x.nbytes and x.data_ptr() < end:
            found += 1024 * sum(map(int, re.findall(r"^AnonHugePages: +(\d+) kB", mapping, re.MULTILINE)))
    return found


@pytest.fixture(autouse=True)
def nothing_asked_for() -> Iterator[None]:
    large_pages._collapse.cache_clear()
    yield
    large_pages._collapse.cache_clear()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_a_matrix_comes_to_lie_in_large_pages() -> None:
    own = mmap.mmap(-1, 40 * large_pages.SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own.madvise(mmap.MADV_NOHUGEPAGE)
    x = torch.frombuffer(own, dtype=torch.float32)
    torch.arange(len(x), out=x)
    assert held_large(x) == 0
    own.madvise(mmap.MADV_HUGEPAGE)
    if not large_pages.collapse(x):
        pytest.skip("this system makes no large pages when it is asked to")
    assert held_large(x) >= 39 * large_pages.SIZE
    assert torch.equal(x, torch.arange(len(x), dtype=torch.float32))


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(large_pages, "_collapse", lambda first, size: asked.append(size) or True)
    x = torch.ones(4 * large_pages.LEAST, dtype=torch.uint8)
    page = -x.data_ptr() % large_pages.SIZE  # where the first begins: tensors lie anywhere
    assert not large_pages.collapse(x[page : page + large_pages.LEAST - 1])
    assert not large_pages.collapse(x[page + 1 : page + 1 + large_pages.LEAST]) and not asked
    assert large_pages.collapse(x[page : page + large_pages.LEAST])
    assert large_pages.collapse(x[page + 1 : page + 1 + 2 * large_pages.LEAST])
    assert asked == [large_pages.LEAST, 2 * large_pages.LEAST - large_pages.SIZE]


def test_a_system_that_cannot_leaves_everything_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4 * large_pages.SIZE)
    monkeypatch.setattr(large_pages, "MADV_COLLAPSE", 12345)
    assert not large_pages.collapse(x) and bool((x == 1).all())
    large_pages._collapse.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not large_pages.collapse(x)


def test_each_memory_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, load = [], ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: asked.append(name) or load(name))
    x = torch.ones(4 * large_pages.SIZE)
    assert large_pages.collapse(x) == large_pages.collapse(x) and len(asked) == 1


@torch.no_grad()
def test_the_output_matrix_of_a_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(large_pages, "collapse", lambda x: asked.append(x) or False)
    network = tiny("llama")
    assert forward.prepared(network, KVCache(network.config, "cpu", torch.float32)) is not None
    assert len(asked) == 1 and asked[0] is network.projection.weight
