"""What need not wait does not: host functions and calls that need nothing of each other, and the
next batch during a step.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.runtime.test_session import lines
from tests.runtime.toy import Toy, ToyGenerate, ToyInfer, ToyLoader, ToyTrain, one_each
from weft import register_function, register_interface
from weft.errors import DataError
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction
from weft.host.base import StatelessHostFunction
from weft.runtime.node_runner import PrefetchingLoader

SECONDS = 300.0  # until a thread that waits for another one gives up, and the test with it


@pytest.mark.parametrize("host_first", [True, False])
def test_a_host_function_and_a_call_run_at_the_same_time(tmp_path, monkeypatch, host_first):
    """Each waits for the other to have begun, so neither of them could run first."""
    meeting = threading.Barrier(2, timeout=SECONDS)
    infer = ToyInfer.inference

    @register_function(f"toy_slow_reward_{host_first}")
    def toy_slow_reward(batch, context):
        meeting.wait()
        return one_each(batch.ids, "ref", [0.0] * batch.num_ids)

    def meet(self, model, batch):
        meeting.wait()
        return infer(self, model, batch)

    monkeypatch.setattr(ToyInfer, "inference", meet)
    experiment = Toy.experiment

    def changed(self):
        made = experiment(self)
        nodes = [node for node in made.graph.nodes if node.name not in ("filter", "ref_inf")]
        reward = HostFunction(
            "reward", f"toy_slow_reward_{host_first}", self.size, ["completion"], ["ref"]
        )
        return replace(
            made,
            graph=DataflowGraph(
                [reward, *nodes] if host_first else [*nodes, reward], ["prompt"], []
            ),
        )

    monkeypatch.setattr(Toy, "experiment", changed)
    toy = Toy(tmp_path, ema=None, control={"max_steps": 3})
    toy.run()
    spans: dict[str, list[tuple[float, float]]] = {"reward": [], "rew": []}
    for event in json.loads((toy.path / "timeline.json").read_text()):
        if event["ph"] == "X" and event["name"] in spans:
            spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(spans["rew"]) == len(spans["reward"]) == 3
    for (begun, over), (other_begun, other_over) in zip(spans["rew"], spans["reward"], strict=True):
        assert max(begun, other_begun) < min(over, other_over), "the two overlap on the timeline"


def test_the_next_batch_is_made_while_the_device_works(tmp_path, monkeypatch):
    """Each step trains only once the rows of the next one are there."""
    made = threading.Semaphore(0)
    next_batch, train = ToyLoader.next_batch, ToyTrain.train_step

    def count(self):
        batch = next_batch(self)
        made.release()
        return batch

    def wait(self, model, minibatches):
        for _ in range(2 if model.step == 0 else 1):  # its own rows too, at first
            assert made.acquire(timeout=SECONDS), "nobody makes the next batch"
        return train(self, model, minibatches)

    monkeypatch.setattr(ToyLoader, "next_batch", count)
    monkeypatch.setattr(ToyTrain, "train_step", wait)
    toy = Toy(tmp_path, control={"max_steps": 4})
    toy.run()
    assert len(lines(toy.path)) == 4


class ToyReward(StatelessHostFunction):
    """Remembers what it was told before the whole batch came."""

    begins_with = ("answer",)

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def begin(self, batch, context) -> None:
        self.begun |= {
            id: float(c.sum()) for id, c in zip(batch.ids, batch.sequences("answer"), strict=True)
        }
        if BROKEN:
            raise DataError("no reward begins")
        BEGUN.set()

    def __call__(self, batch, context):
        known = [self.begun.pop(id) for id in batch.ids[:1]]
        assert known == [float(batch.sequences("answer")[0].sum())] and not self.begun
        return one_each(batch.ids, "ref", [0.0] * batch.num_ids)


BEGUN, BROKEN = threading.Event(), list[str]()


class ToyAnnounce(ToyGenerate):
    """Ends once a host function has begun with its first id."""

    def generate(self, model, batch):
        result = super().generate(model, batch)
        BEGUN.clear()
        model.announce(result.outputs.select(ids=batch.ids[:1]))
        assert BROKEN or BEGUN.wait(SECONDS), "nobody begins"
        return result


@pytest.mark.parametrize("broken", [False, True])
def test_a_host_function_begins_with_ids_of_a_call_that_goes_on(tmp_path, monkeypatch, broken):
    """Two of them, under the names that the nodes have for their keys; an error names the node,
    whichever of both met it.
    """
    register_function(f"toy_reward_{broken}")(ToyReward)
    register_interface(f"toy_announce_{broken}")(ToyAnnounce)
    monkeypatch.setattr("tests.runtime.test_master_overlap.BROKEN", ["yes"] * broken)
    experiment = Toy.experiment

    def changed(self):
        made = experiment(self)
        nodes = [node for node in made.graph.nodes if node.name not in ("filter", "ref_inf")]
        nodes[0] = replace(nodes[0], interface=f"toy_announce_{broken}")
        reward = HostFunction(
            "reward",
            f"toy_reward_{broken}",
            self.size,
            ["answer"],
            ["ref"],
            input_key_remap={"answer": "completion"},
        )
        other = replace(
            reward, name="other", output_keys=["ref"], output_key_remap={"ref": "unread"}
        )
        return replace(made, graph=DataflowGraph([*nodes, reward, other], ["prompt"], []))

    monkeypatch.setattr(Toy, "experiment", changed)
    toy = Toy(tmp_path, ema=None, control={"max_steps": 3})
    if broken:
        with pytest.raises(DataError, match="no reward begins") as error:
            toy.run()
        assert re.match("in node '(reward|other)'", error.value.__notes__[0])
    else:
        toy.run()
        assert len(lines(toy.path)) == 3


def read(loader: Any, count: int) -> list[tuple[str, ...]]:
    return [loader.next_batch().ids for _ in range(count)]


@pytest.mark.parametrize("at", range(11))
def test_a_position_is_that_of_what_was_given_out(at):
    plain, ahead = ToyLoader(18), PrefetchingLoader(ToyLoader(18), 2)
    assert read(plain, at) == read(ahead, at)
    assert ahead.state_dict() == plain.state_dict() and ahead.epoch_done == plain.epoch_done
    other = PrefetchingLoader(ToyLoader(18), 2)
    read(other, 3)
    other.load_state_dict(json.loads(json.dumps(ahead.state_dict())))
    assert other.epoch_done == plain.epoch_done
    rest = 10 - at
    assert read(other, rest) == read(ahead, rest) == read(plain, rest)


def test_nothing_is_made_after_the_last_epoch():
    loader = ToyLoader(8)
    read(PrefetchingLoader(loader, 1), 2)
    assert (loader.epoch, loader.at) == (1, 0)


def test_an_error_of_the_loader_is_raised_where_the_batch_is_asked_for(monkeypatch):
    next_batch = ToyLoader.next_batch

    def broken(self):
        if self.at == 4:
            raise DataError("row 5 is broken")
        return next_batch(self)

    monkeypatch.setattr(ToyLoader, "next_batch", broken)
    loader = PrefetchingLoader(ToyLoader(18), 2)
    assert len(loader.next_batch().ids) == 4
    with pytest.raises(DataError, match="row 5"):
        loader.next_batch()
