"""The Master goes by events: what can begin does, and what is decided never depends on what
finishes first.
"""

from __future__ import annotations

import pickle
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtime.test_master_overlap import SECONDS
from tests.runtime.test_session import lines
from tests.runtime.toy import Toy, ToyInfer, call, one_each, timeless
from weft import register_function
from weft.engine.spec import ModelSpec
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, ParamSync
from weft.host.base import StatelessHostFunction
from weft.runtime.calls import (
    Event,
    OutputsAnnounced,
    TaskFailed,
    TaskFinished,
    TaskStarted,
)

SPENT = random.Random()  # how long host functions take
SLOW = [0.0]


class DelayedGroup:
    """A group whose events arrive late, those of different tasks in any order; `asked` is what it
    was asked for.
    """

    def __init__(self, group: Any, slow: float, seed: int) -> None:
        self._group, self._slow, self._random = group, slow, random.Random(seed)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.asked: list[tuple[Any, ...]] = []
        threading.Thread(target=self._pass_on, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def submit(self, mfc: str, step: int, parts: Any, **weights: Any) -> None:
        self.asked.append((mfc, step, [[meta.ids for meta in ranks] for ranks in parts]))
        self._group.submit(mfc, step, parts, **weights)

    def sync(self, s: ParamSync, step: int) -> None:
        self.asked.append((s.name, step))
        self._group.sync(s, step)

    def _pass_on(self) -> None:
        while True:
            event = self._group.events.get()
            late = self._slow * self._random.random() if isinstance(event, TaskFinished) else 0.0
            threading.Timer(late, self.events.put, [event]).start() if late else self.events.put(
                event
            )


@register_function("timing_length")
def timing_length(batch: Any, context: Any) -> Any:
    time.sleep(SLOW[0] * SPENT.random())
    return one_each(
        batch.ids, "length", [float(len(each)) for each in batch.sequences("completion")]
    )


@register_function("timing_filter")
def timing_filter(batch: Any, context: Any, modulus: int) -> Any:
    time.sleep(SLOW[0] * SPENT.random())
    kept = [id for id in batch.ids if int(id) % modulus]
    return one_each(kept, f"kept_{modulus}", [1.0] * len(kept))


def wide(toy: Toy, rounds: int) -> Any:
    """Small nodes beside each other, two filters that drop different ids, two roles that train, a
    reference that follows.
    """
    made = Toy.experiment(toy)
    nodes = [
        call(
            "gen",
            "actor",
            "toy_generate",
            "generate",
            2,
            input_keys=["prompt"],
            output_keys=["completion"],
        ),
        HostFunction("length", "timing_length", 1, ["completion"], ["length"]),
        call(
            "rew",
            "reward",
            "toy_infer",
            "inference",
            2,
            input_keys=["completion"],
            output_keys=["scores"],
        ),
        call(
            "ref_inf",
            "ref",
            "toy_infer",
            "inference",
            3,
            input_keys=["completion"],
            output_keys=["scores"],
            output_key_remap={"scores": "ref"},
        ),
        HostFunction(
            "third",
            "timing_filter",
            2,
            ["scores"],
            ["kept_3"],
            args={"modulus": 3},
            refill_rounds=rounds,
        ),
        HostFunction("seventh", "timing_filter", 1, ["length"], ["kept_7"], args={"modulus": 7}),
        call(
            "critic_inf",
            "critic",
            "toy_infer",
            "inference",
            1,
            input_keys=["completion", "scores"],
            output_keys=["scores"],
            output_key_remap={"scores": "values"},
        ),
        call(
            "second",
            "reward",
            "toy_infer",
            "inference",
            1,
            input_keys=["completion", "ref"],
            output_keys=["scores"],
            output_key_remap={"scores": "second"},
        ),
        HostFunction(
            "advantages",
            "toy_advantages",
            4,
            ["scores", "ref", "kept_3", "kept_7", "values"],
            ["advantages"],
        ),
        call("train", "actor", "toy_train", "train_step", 4, input_keys=["advantages"]),
        HostFunction(
            "extra",
            "timing_length",
            4,
            ["completion", "advantages"],
            ["length"],
            output_key_remap={"length": "extra"},
        ),
        call("critic_train", "critic", "toy_train", "train_step", 4, input_keys=["advantages"]),
    ]
    return replace(
        made,
        graph=DataflowGraph(nodes, ["prompt"], [ParamSync("actor", "ref", 0.25)]),
        roles={**made.roles, "critic": ModelSpec(backend="toy", trained=True)},
        saved_roles=["actor", "critic"],
        updates_per_firing={"train": 1, "critic_train": 1},
    )


def run(root: Path, rounds: int, slow: float, seed: int) -> tuple[Any, ...]:
    """(metrics, rows shown, checkpoints and recovery points byte for byte, what the group was asked
    for).
    """
    SLOW[0] = slow
    SPENT.seed(seed)
    toy = Toy(root, num_ids=26, control={"recover_freq_steps": 1, "save_freq_steps": 2})
    object.__setattr__(toy, "experiment", lambda: wide(toy, rounds))
    groups: list[DelayedGroup] = []

    def delayed(*args: Any) -> DelayedGroup:
        groups.append(DelayedGroup(REAL(*args), slow, seed))
        return groups[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runtime.toy.DeviceGroup", delayed)
        toy.run()
    points = sorted((toy.path / "recover").rglob("*.bin")) + sorted(
        (toy.path / "checkpoints").rglob("*.json")
    )
    files = {
        str(path.relative_to(toy.path)): path.read_bytes()
        for path in points
        if path.name != "master.bin"
    }
    asked = [each for each in groups[0].asked if not each[0].startswith("eval/")]
    return timeless(lines(toy.path)), (toy.path / "samples.jsonl").read_text(), files, asked


from weft.runtime.device_group import DeviceGroup as REAL  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_nothing_that_a_run_makes_depends_on_what_finishes_first(tmp_path, rounds):
    expected = run(tmp_path / "at once", rounds, 0.0, 0)
    assert len(expected[0]) >= 5 and len({each[0] for each in expected[3]}) == 8
    for seed in range(3):
        metrics, shown, files, asked = run(tmp_path / str(seed), rounds, 0.004, seed)
        assert asked == expected[3], "the group is asked for the same, in the same order"
        assert metrics == expected[0] and shown == expected[1]
        assert files == expected[2]


def with_nodes(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]) -> None:
    experiment = Toy.experiment

    def changed(self: Toy) -> Any:
        made = experiment(self)
        return replace(made, graph=DataflowGraph(change(list(made.graph.nodes)), ["prompt"], []))

    monkeypatch.setattr(Toy, "experiment", changed)


@pytest.mark.parametrize("reads", ["scores", "fast"])
def test_a_node_does_not_wait_for_others_than_it_reads_from(tmp_path, monkeypatch, reads):
    """`slow`, beside `rew` and `fast`, ends only once `ref_inf` has begun, which reads what one of
    these makes.
    """
    begun = threading.Semaphore(0)
    infer = ToyInfer.inference

    @register_function(f"timing_slow_{reads}")
    class Slow(StatelessHostFunction):
        keeps_all = True

        def __call__(self, batch, context):
            assert begun.acquire(timeout=SECONDS), (
                "ref_inf waits for a node that it does not read from"
            )
            return one_each(batch.ids, "slow", [0.0] * batch.num_ids)

    @register_function(f"timing_fast_{reads}")
    def fast(batch, context):
        return one_each(batch.ids, "fast", [0.0] * batch.num_ids)

    def count(self, model, batch):
        if model.role == "ref":
            begun.release()
        return infer(self, model, batch)

    def change(nodes):
        gen, rew, _, ref_inf, advantages, train = nodes
        ref_inf = replace(ref_inf, input_keys=["completion", reads])
        slow = HostFunction("slow", f"timing_slow_{reads}", 4, ["completion"], ["slow"])
        fast = HostFunction("fast", f"timing_fast_{reads}", 4, ["completion"], ["fast"])
        return [
            gen,
            slow,
            fast,
            rew,
            ref_inf,
            replace(advantages, input_keys=["scores", "ref", "slow"]),
            train,
        ]

    monkeypatch.setattr(ToyInfer, "inference", count)
    with_nodes(monkeypatch, change)
    toy = Toy(tmp_path, ema=None, control={"max_steps": 3})
    toy.run()
    assert len(lines(toy.path)) == 3


def test_a_call_begins_while_another_call_beside_it_goes_on(tmp_path, monkeypatch):
    """The end of `rew` is told once `ref_inf` was asked for, which reads what another call makes."""

    class Holding(DelayedGroup):
        def submit(self, mfc: str, step: int, parts: Any, **weights: Any) -> None:
            super().submit(mfc, step, parts, **weights)
            if mfc == "ref_inf":
                for event in held:
                    self.events.put(event)
                held.clear()

        def _pass_on(self) -> None:
            while True:
                event = self._group.events.get()
                if isinstance(event, TaskFinished) and event.task[0] == "rew":
                    held.append(event)
                else:
                    self.events.put(event)

    def change(nodes):
        gen, rew, _, ref_inf, advantages, train = nodes
        other = replace(rew, name="other", output_key_remap={"scores": "others"})
        return [
            gen,
            rew,
            other,
            replace(ref_inf, input_keys=["completion", "others"]),
            advantages,
            train,
        ]

    held: list[Event] = []
    with_nodes(monkeypatch, lambda nodes: [replace(n, deadline_s=SECONDS) for n in change(nodes)])
    monkeypatch.setattr("tests.runtime.toy.DeviceGroup", lambda *args: Holding(REAL(*args), 0.0, 0))
    toy = Toy(tmp_path, ema=None, control={"max_steps": 3})
    toy.run()
    assert len(lines(toy.path)) == 3


def test_a_deadline_counts_from_the_beginning_of_the_work(tmp_path, monkeypatch):
    """`ref_inf` waits in the group's queue behind `rew`, for longer than it may take. The time is
    that of a clock which only `rew` moves.
    """
    infer, clock = ToyInfer.inference, [0.0]
    monkeypatch.setattr(
        "weft.runtime.node_runner.time",
        SimpleNamespace(monotonic=lambda: clock[0], time=time.time, perf_counter=time.perf_counter),
    )

    def slow(self, model, batch):
        clock[0] += 2 * SECONDS if model.role == "reward" else 0.0
        return infer(self, model, batch)

    def change(nodes):
        gen, rew, _, ref_inf, advantages, train = nodes
        return [
            gen,
            rew,
            replace(ref_inf, input_keys=["completion"], deadline_s=SECONDS),
            advantages,
            train,
        ]

    monkeypatch.setattr(ToyInfer, "inference", slow)
    with_nodes(monkeypatch, change)
    toy = Toy(tmp_path, ema=None, control={"max_steps": 1})
    toy.run()
    assert len(lines(toy.path)) == 1


def test_a_group_tells_what_happens_as_data(tmp_path, monkeypatch):
    infer = ToyInfer.inference

    def announce(self, model, batch):
        result = infer(self, model, batch)
        if model.announce is not None:
            model.announce(result.outputs.select(ids=batch.ids[:1]))
        if "b" in batch.ids:
            raise ValueError("no")
        return result

    monkeypatch.setattr(ToyInfer, "inference", announce)
    group = Toy(tmp_path).session()._group
    group.announce_outputs("rew")
    for step, id in enumerate("ab"):
        meta = group.put(one_each([id], "completion", [1.0]))
        group.submit("rew", step, [[meta]])
    told = [group.events.get(timeout=SECONDS) for _ in range(6)]
    assert [type(event) for event in told] == [
        TaskStarted,
        OutputsAnnounced,
        TaskFinished,
        TaskStarted,
        OutputsAnnounced,
        TaskFailed,
    ]
    assert [event.task for event in told if not isinstance(event, OutputsAnnounced)] == [
        ("rew", 0)
    ] * 2 + [("rew", 1)] * 2
    for event in told[:3]:
        assert type(pickle.loads(pickle.dumps(event))) is type(event)
    assert told[1].call == "rew" and told[1].outputs.ids == ("a",) and not told[1].outputs.data
