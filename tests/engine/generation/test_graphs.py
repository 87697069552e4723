"""Captured decode steps: sizes, filling up, the copy into the fixed buffer, and when captures are
dropped. No device is needed: a capture is stood in for by a function that, as a graph does, reads
one buffer and writes another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bounds import assert_within, product_bound
from weft.engine.generation import graphs as graphs_module
from weft.engine.generation.graphs import (
    COARSE_GRAPH_SIZES,
    GRAPH_SIZES,
    DecodeGraphs,
    build_cuda_capture,
    find_graph_size,
)

CPU = torch.device("cpu")


def run(step: Tensor) -> Tensor:
    """Each row's result depends on that row alone."""
    return step.double().cumsum(1)


class Recorder:
    """A capture that counts; its graphs write into one tensor each, again and again."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(
        self, function: Callable[[Tensor], Tensor], inputs: Tensor
    ) -> tuple[Callable[[], object], Tensor]:
        self.sizes.append(len(inputs))
        output = torch.empty_like(function(inputs))
        return (lambda: output.copy_(function(inputs))), output


def step(rows: int, columns: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, (rows, columns)).astype(np.int32)


def test_sizes() -> None:
    assert [find_graph_size(n, GRAPH_SIZES) for n in (1, 3, 8, 9, 17, 24, 256, 257)] == [
        1,
        4,
        8,
        16,
        24,
        24,
        256,
        384,
    ]
    assert [find_graph_size(n, COARSE_GRAPH_SIZES) for n in (1, 3, 17, 200)] == [1, 4, 32, 256]


def test_steps_of_one_size_share_a_graph_and_read_their_own_numbers() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs({"r": run}, CPU, recorder, after=0)
    for seed, rows in enumerate((13, 16, 9, 13, 2, 1, 2)):
        numbers = step(rows, seed=seed)
        assert torch.equal(graphs("r", numbers, form=0), run(torch.from_numpy(numbers)))
    assert recorder.sizes == [16, 2, 1] and len(graphs) == 3


def test_a_ragged_run_is_replayed_from_its_first_step() -> None:
    """512 completions of 1 to 512 tokens: every step finds a graph with room.

    Further runs over the same memory capture each size once at most.
    """
    recorder = Recorder()
    graphs = DecodeGraphs({"r": run}, CPU, recorder)
    for rows in range(511, 0, -1):
        assert len(graphs("r", step(rows), form=0, expected=512)) == rows
    assert graphs.counts["eager"] == 0 and graphs.counts["replayed"] == 511
    assert recorder.sizes == [512, 384, 256, 192, 128, 96], "sizes that more than 16 steps want"
    for _ in range(2):
        for rows in range(511, 0, -1):
            graphs("r", step(rows), form=0, expected=512)
    assert (
        len(set(recorder.sizes))
        == len(recorder.sizes)
        == graphs.counts["captured"]
        < len(GRAPH_SIZES)
    )
    assert graphs.counts["eager"] == 0


def test_a_size_is_captured_once_it_is_worth_it() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs({"r": run}, CPU, recorder, after=2)
    for rows in (8, 4, 3, 8, 4, 4, 8):
        numbers = step(rows)
        assert torch.equal(graphs("r", numbers, form=0), run(torch.from_numpy(numbers)))
    assert recorder.sizes == [8, 4] and graphs.counts == {"captured": 2, "replayed": 7}


def test_rows_left_over_from_a_larger_step_are_cleared() -> None:
    seen: list[Tensor] = []

    def spy(numbers: Tensor) -> Tensor:
        seen.append(numbers.clone())
        return run(numbers)

    graphs = DecodeGraphs({"r": spy}, CPU, Recorder(), after=0)
    graphs("r", step(16), form=0)
    graphs("r", step(10), form=0)
    assert not seen[-1][10:].any() and seen[-1][:10].all()


def test_the_input_of_the_step_before_stays_until_the_next_but_one() -> None:
    """The device may copy it late, since a step can be launched while another one runs."""
    graphs = DecodeGraphs({"r": run}, CPU, Recorder(), after=0)
    numbers = [step(4, seed=seed) for seed in range(3)]
    for each in numbers:
        graphs("r", each, form=0)
    hosts = graphs._graphs["r", 4].host_inputs
    stored = [next(hosts).numpy(), next(hosts).numpy()]
    assert np.array_equal(stored, numbers[1:])


def test_runs_before_a_capture_leave_the_state_as_it_was() -> None:
    """A step that counts itself counts once, although its capture runs it, too."""
    state = torch.zeros(1, dtype=torch.float64)

    def count(numbers: Tensor) -> Tensor:
        state.add_(1.0)
        return numbers + state

    graphs = DecodeGraphs({"r": count}, CPU, Recorder(), after=0, state=state)
    for number, rows in enumerate((4, 4, 2), 1):
        assert torch.equal(graphs("r", step(rows), form=0), torch.from_numpy(step(rows)) + number)


def test_captures_are_dropped_when_memory_moves() -> None:
    recorder = Recorder()
    graphs = DecodeGraphs({"r": run}, CPU, recorder, after=0)
    graphs("r", step(4), form=(16, 64))
    graphs("r", step(4), form=(16, 64))
    graphs("r", step(4), form=(16, 128))
    graphs.drop()
    graphs("r", step(4), form=(16, 128))
    assert recorder.sizes == [4, 4, 4]
    wider = step(4, columns=9)
    assert torch.equal(graphs("r", wider, form=(32, 128)), run(torch.from_numpy(wider)))
    assert recorder.sizes == [4, 4, 4, 4]


def test_graphs_are_dropped_once_their_last_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step may still run, since it may be ahead of what the host has read."""
    graphs = DecodeGraphs({"r": run}, CPU, Recorder(), after=0)
    left: list[int] = []
    monkeypatch.setattr(graphs_module, "wait", lambda _: left.append(len(graphs)))
    graphs("r", step(4), form=0)
    graphs("r", step(4), form=1)
    graphs.drop()
    assert left == [1, 1]


def test_a_capture_that_fails_is_told_once_and_steps_go_on() -> None:
    tries = 0

    def fails(*_: object) -> tuple[Callable[[], object], Tensor]:
        nonlocal tries
        tries += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    graphs = DecodeGraphs({"r": run}, CPU, fails, after=0)
    numbers = step(3)
    with pytest.warns(
        RuntimeWarning, match="without CUDA graphs.*not permitted when stream is capturing"
    ):
        assert torch.equal(graphs("r", numbers, form=0), run(torch.from_numpy(numbers)))
    assert torch.equal(graphs("r", numbers, form=0), run(torch.from_numpy(numbers)))
    assert (
        tries == 1
        and len(graphs) == 0
        and graphs.note is not None
        and "more lines" not in graphs.note
    )


def test_without_a_capture_steps_are_filled_up_all_the_same() -> None:
    sizes: list[int] = []

    def spy(numbers: Tensor) -> Tensor:
        sizes.append(len(numbers))
        return run(numbers)

    graphs = DecodeGraphs({"r": spy}, CPU, None)
    numbers = step(11)
    assert torch.equal(graphs("r", numbers, form=0), run(torch.from_numpy(numbers)))
    assert sizes == [16]


class Device:
    """What torch.cuda says and does, as far as a capture asks; notes the current device at each
    call. Stands in for its contexts, streams and graphs, too.
    """

    def __init__(self) -> None:
        self.current, self.asked, self.replay = 0, list[tuple[str, int]](), lambda: None

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*_: object, **__: object) -> Device:
            self.asked.append((name, self.current))
            return self

        return call

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    @contextmanager
    def device(self, which: torch.device) -> Iterator[None]:
        before, self.current = self.current, which.index
        yield
        self.current = before


def test_a_capture_is_of_the_device_that_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device is the thread's, 0 at first."""
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    capture = build_cuda_capture(torch.device("cuda", 1))
    _, output = capture(run, torch.ones(2, 3))
    assert torch.equal(output, run(torch.ones(2, 3)))
    asked = [(name, at) for name, at in device.asked if name != "graph_pool_handle"]
    assert {name for name, _ in asked} >= {
        "current_stream",
        "Stream",
        "stream",
        "CUDAGraph",
        "graph",
        "set_stream",
    }
    assert all(at == 1 for _, at in asked) and device.current == 0


def test_a_run_that_fails_before_a_capture_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have begun to change the state, which is restored on the usual stream."""
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)

    def fail(_: Tensor) -> Tensor:
        device.asked.append(("run", 1))
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        build_cuda_capture(torch.device("cuda", 1))(fail, torch.ones(2, 3))
    assert device.asked[-2:] == [("run", 1), ("wait_stream", 1)]


class Graph:
    """Alive as long as somebody holds its `replay`."""

    def replay(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class Pooled:
    """torch.cuda as 2.11 treats memory pools: one that had graphs takes another only while one of
    them is alive.
    """

    def __init__(self) -> None:
        self.pools: list[list[weakref.ref[object]]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        return lambda *_, **__: Device()

    def graph_pool_handle(self) -> int:
        self.pools.append([])
        return len(self.pools) - 1

    def CUDAGraph(self) -> Graph:
        return Graph()

    def graph(self, graph: Graph, *, pool: int, **_: object) -> Graph:
        assert pool == len(self.pools) - 1, "pools that were left are left for good"
        graphs = self.pools[pool]
        if graphs and all(each() is None for each in graphs):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        graphs.append(weakref.ref(graph))
        return graph


def test_graphs_of_three_forms_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each form's first capture comes once no graph of the form before is alive."""
    cuda = Pooled()
    monkeypatch.setattr(torch, "cuda", cuda)
    graphs = DecodeGraphs({"r": run}, CPU, build_cuda_capture(CPU), after=0)
    for form in range(3):
        for rows in (13, 2, 13):
            graphs("r", step(rows), form=form)
        assert len(graphs) == 2
    assert graphs.note is None and graphs.counts == {"captured": 6, "replayed": 9}
    assert [len(graphs) for graphs in cuda.pools] == [2, 2, 2], "graphs of one form share a pool"


def assert_product(made: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    assert_within(made, left.double() @ right.double(), product_bound(left, right))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_of_three_forms_on_the_device() -> None:
    device, weight = torch.device("cuda", 0), torch.randn(5, 7, device="cuda")
    graphs = DecodeGraphs(
        {"r": lambda numbers: numbers.float() @ weight}, device, build_cuda_capture(device), after=0
    )
    with torch.no_grad():
        for form in range(3):
            for rows in (3, 13):
                numbers = step(rows, seed=form)
                out = graphs("r", numbers, form=form)
                assert_product(out, torch.from_numpy(numbers).cuda(), weight)
    assert graphs.note is None and graphs.counts == {"captured": 6, "replayed": 6}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_on_the_device() -> None:
    weight = torch.randn(5, 7, device="cuda")
    graphs = DecodeGraphs(
        {"r": lambda numbers: numbers.float() @ weight},
        torch.device("cuda", 0),
        build_cuda_capture(torch.device("cuda", 0)),
        after=0,
    )
    with torch.no_grad():
        for seed in range(4):
            numbers = step(13, seed=seed)
            out = graphs("r", numbers, form=0)
            assert_product(out, torch.from_numpy(numbers).cuda(), weight)
    assert len(graphs) == 1 and graphs.note is None
