"""Sampling far ahead of training on a device of its own: nothing waits without need, and the
weights are those decided on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.runtime.test_session import lines
from tests.runtime.toy import Toy, ToyGenerate, ToyTrain
from tests.runtime.toy import timeless as without_clocks
from weft.graph.mfc import ParamSync
from weft.runtime.commands import MoveParameters, SaveParameters
from weft.runtime.roles import find_separate_copies

BATCHES = 8  # of an epoch; the last one is short, so it is not sampled ahead
SECONDS = 300.0  # until a call that waits gives up, and the test with it


def toy(root: Any, staleness: int, **more: Any) -> Toy:
    return Toy(root, staleness=staleness, device_mesh="1", **{"num_ids": 30} | more)


def timeless(toy: Toy) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if "num_bytes_moved" not in key}
        for line in without_clocks(lines(toy.path))
    ]


@dataclass
class Stage:
    """Calls that are over, by name and number, and what each may wait for before it goes on."""

    before: Callable[[str, int], tuple[str, int] | None]
    # the version of the weights that it used
    over: dict[tuple[str, int], int] = field(default_factory=dict)
    change: threading.Condition = field(default_factory=threading.Condition)

    def play(self, monkeypatch: pytest.MonkeyPatch) -> Stage:
        for name, cls, method in (
            ("gen", ToyGenerate, "generate"),
            ("train", ToyTrain, "train_step"),
        ):
            monkeypatch.setattr(cls, method, self._held(name, getattr(cls, method)))
        return self

    def _held(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(interface, model, batch):
            call, version = (name, model.step), model.engine.version
            wanted = self.before(*call)
            with self.change:
                assert self.change.wait_for(
                    lambda: wanted is None or wanted in self.over, SECONDS
                ), f"{call} has begun and is held until {wanted} is over, which does not come"
            result = method(interface, model, batch)
            with self.change:
                self.over[call] = version
                self.change.notify_all()
            return result

        return call

    def versions(self, name: str) -> list[int]:
        return [
            version
            for (_, version) in sorted(
                (step, v) for (each, step), v in self.over.items() if each == name
            )
        ]


def wanted_versions(staleness: int) -> list[int]:
    epoch = [max(0, number - staleness) for number in range(BATCHES - 1)] + [BATCHES - 1]
    return epoch + [BATCHES + version for version in epoch]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many versions the device that trains keeps, after each command that may change that."""
    found = [0]
    for command in (SaveParameters, MoveParameters):

        def counting(self, process, number, run=command.run):
            done = run(self, process, number)
            if process.rank == 0:
                found.append(len(process.saved_weights))
            return done

        monkeypatch.setattr(command, "run", counting)
    return found


@pytest.mark.parametrize("staleness", [2, 3, 5])
def test_training_begins_while_the_next_batch_is_still_sampled(tmp_path, monkeypatch, staleness):
    """Each sampling goes on until the batch before its own is trained: later ones of the same
    version have not begun then.
    """
    held = lambda name, step: ("train", step - 1) if name == "gen" and step % BATCHES else None  # noqa: E731
    kept = counted(monkeypatch)
    stage = Stage(held).play(monkeypatch)
    apart = toy(tmp_path / "apart", staleness, ema=None)
    apart.run()
    assert stage.versions("gen") == wanted_versions(staleness) and stage.versions("train") == list(
        range(2 * BATCHES)
    )
    assert max(kept) == {2: 1, 3: 2, 5: 1}[staleness] and kept[-1] == 0
    monkeypatch.undo()
    here = Toy(tmp_path / "here", staleness=staleness, ema=None, num_ids=30)
    here.run()
    assert timeless(apart) == timeless(here) and apart.weights() == here.weights()


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_sampling_runs_ahead_as_far_as_its_weights_may_be_old(tmp_path, monkeypatch, staleness):
    """Each training goes on until the sampling that may lag behind it by that much is over."""

    def held(name: str, step: int) -> tuple[str, int] | None:
        ahead = step + staleness
        return (
            ("gen", ahead)
            if name == "train" and ahead % BATCHES < BATCHES - 1 and ahead < BATCHES - 1
            else None
        )

    stage = Stage(held).play(monkeypatch)
    toy(tmp_path, staleness).run()
    assert stage.versions("gen") == wanted_versions(staleness)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_no_number_depends_on_time_nor_on_devices(tmp_path, monkeypatch, drop):
    here = Toy(tmp_path / "here", staleness=3, drop=drop, num_ids=40)
    here.run()
    for seed in range(3):
        draw = random.Random(seed)
        with monkeypatch.context() as patch:
            for cls, method in ((ToyGenerate, "generate"), (ToyTrain, "train_step")):
                plain = getattr(cls, method)

                def slow(self, model, batch, plain=plain, draw=draw):
                    time.sleep(draw.random() * 0.03)
                    return plain(self, model, batch)

                patch.setattr(cls, method, slow)
            apart = toy(tmp_path / str(seed), 3, drop=drop, num_ids=40)
            apart.run()
        assert timeless(apart) == timeless(here) and apart.weights() == here.weights()


def test_a_call_that_takes_newer_weights_begins_with_those_that_are_there(tmp_path, monkeypatch):
    """With weights up to 2 steps old: sampling ends once training of the batch before it has begun,
    and that ends once sampling of the next batch has begun, which gets the new weights in its
    middle.
    """
    generate, train, seen = ToyGenerate.generate, ToyTrain.train_step, dict[int, tuple[int, int]]()
    begun, trained = threading.Condition(), set[int]()

    def sample(self, model, batch):
        version, end = model.engine.version, time.monotonic() + SECONDS
        with begun:
            seen[model.step] = (version, version)
            begun.notify_all()
        while model.step >= 2 and model.engine.version < model.step - 1:
            assert time.monotonic() < end, f"no weights come in the middle of {model.step}"
            if model.updates.are_waiting():
                model.updates.take(left=True)
        seen[model.step] = (version, model.engine.version)
        with begun:
            before = model.step - 1
            assert begun.wait_for(lambda: before < 0 or before in trained, SECONDS), (
                f"training of {before} does not begin"
            )
        return generate(self, model, batch)

    def hold(self, model, minibatches):
        ahead = model.step + 2
        with begun:
            trained.add(model.step)
            begun.notify_all()
            assert begun.wait_for(lambda: ahead >= BATCHES - 1 or ahead in seen, SECONDS), (
                f"{ahead} does not begin"
            )
        return train(self, model, minibatches)

    monkeypatch.setattr(ToyGenerate, "generate", sample)
    monkeypatch.setattr(ToyTrain, "train_step", hold)
    toy(tmp_path, 2, interruptible=True, control={"max_steps": BATCHES - 1}).run()
    assert seen == {
        number: (max(0, number - 2), max(0, number - 1)) for number in range(BATCHES - 1)
    }


class Halt(Exception):
    pass


@pytest.mark.default_cases("4")
@pytest.mark.parametrize("at", [1, 4, 10])
def test_a_run_on_devices_that_goes_on_ends_as_one_that_never_stopped(tmp_path, monkeypatch, at):
    """The run that never stops makes no points: nothing waits in it for the ends of calls that are
    ahead.
    """
    whole = toy(tmp_path / "whole", 2)
    whole.run()
    train = ToyTrain.train_step

    def halt(self, model, minibatches):
        if model.step == at:
            raise Halt
        return train(self, model, minibatches)

    halted = toy(tmp_path / "halted", 2, control={"recover_freq_steps": 2})
    with monkeypatch.context() as patch:
        patch.setattr(ToyTrain, "train_step", halt)
        with pytest.raises(Exception, match="Halt"):
            halted.run()
    halted.run()
    assert timeless(halted) == timeless(whole) and halted.weights() == whole.weights()


def test_which_calls_have_a_lane_of_their_own(tmp_path):
    apart = toy(tmp_path, 2).experiment()
    assert list(find_separate_copies(apart)) == ["gen"]
    assert find_separate_copies(toy(tmp_path, 0).experiment()) == {}, (
        "weights that must be the newest"
    )
    assert find_separate_copies(Toy(tmp_path, staleness=2).experiment()) == {}, (
        "the devices of training"
    )
    syncs = [*apart.graph.syncs, ParamSync("ref", "actor", after="train")]
    written = replace(apart, graph=replace(apart.graph, syncs=syncs))
    assert find_separate_copies(written) == {}, "weights that others write to"
