"""Sampling that runs ahead of training: how old its weights are, that no number depends on time,
and restarts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_session import lines, read_sizes
from tests.runtime.toy import Toy, ToyGenerate, ToyInfer, ToyTrain, timeless

BATCHES = 5  # of an epoch; the last one is short


def ages(monkeypatch: pytest.MonkeyPatch, toy: Toy) -> tuple[list[int], list[int]]:
    """(versions of the weights that each sampling used, the versions that training found)."""
    used: dict[str, list[int]] = {"gen": [], "train": []}
    for name, cls, method in (("gen", ToyGenerate, "generate"), ("train", ToyTrain, "train_step")):
        monkeypatch.setattr(cls, method, noted(getattr(cls, method), used[name]))
    toy.run()
    return used["gen"], used["train"]


def noted(method: Callable[..., Any], versions: list[int]) -> Callable[..., Any]:
    def call(self, model, batch):
        versions.append(model.engine.version)
        return method(self, model, batch)

    return call


@pytest.mark.parametrize("staleness", [0, 1, 2, 7])
def test_weights_of_a_batch_are_as_old_as_they_may_be(tmp_path, monkeypatch, staleness):
    """A full batch of an epoch is sampled ahead; its short last one, and the first of the next, are
    not.
    """
    used, trained = ages(monkeypatch, Toy(tmp_path, staleness=staleness))
    assert trained == list(range(2 * BATCHES))
    epoch = [max(0, number - staleness) for number in range(BATCHES - 1)] + [BATCHES - 1]
    assert used == epoch + [BATCHES + version for version in epoch]


def test_nothing_is_sampled_for_steps_that_do_not_come(tmp_path, monkeypatch):
    used, trained = ages(monkeypatch, Toy(tmp_path, staleness=3, control={"max_steps": 3}))
    assert trained == [0, 1, 2] and used == [0, 0, 0]


def slowed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Calls and host functions take times of their own."""
    draw = random.Random(seed)
    for cls, method in (
        (ToyGenerate, "generate"),
        (ToyInfer, "inference"),
        (ToyTrain, "train_step"),
    ):
        plain = getattr(cls, method)

        def slow(self, model, batch, plain=plain):
            time.sleep(draw.random() * 0.02)
            return plain(self, model, batch)

        monkeypatch.setattr(cls, method, slow)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_no_number_depends_on_time(tmp_path, monkeypatch, drop):
    found = []
    for seed in range(2):
        with monkeypatch.context() as patch:
            slowed(patch, seed)
            toy = Toy(tmp_path / str(seed), staleness=1, drop=drop)
            toy.run()
            found.append((timeless(lines(toy.path)), toy.weights(), read_sizes(toy.path, "train")))
    assert found[0] == found[1]
    assert found[0][0] != timeless(run_lines(tmp_path / "sync", drop=drop)), (
        "older weights give other numbers"
    )


def run_lines(root: Path, **more: Any) -> list[dict[str, Any]]:
    toy = Toy(root, **more)
    toy.run()
    return lines(toy.path)


def test_every_line_has_the_sampling_of_its_own_batch(tmp_path):
    for line in run_lines(tmp_path, staleness=2):
        assert {"gen/response_length", "rew/mean", "train/loss", "advantages/mean"} <= line.keys()


class Halt(Exception):
    pass


@pytest.mark.default_cases("2-0.0", "4-0.3")
@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("at", [2, 4])
def test_a_run_that_goes_on_ends_as_one_that_never_stopped(tmp_path, monkeypatch, drop, at):
    """The recovery point holds what was sampled ahead.

    The whole run makes no points, so these change nothing either.
    """
    whole = Toy(tmp_path / "whole", staleness=2, drop=drop)
    whole.run()
    train = ToyTrain.train_step

    def halt(self, model, minibatches):
        if model.step == at:
            raise Halt
        return train(self, model, minibatches)

    toy = Toy(tmp_path / "halted", staleness=2, drop=drop, control={"recover_freq_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(ToyTrain, "train_step", halt)
        with pytest.raises(Halt):
            toy.run()
    toy.run()
    assert timeless(lines(toy.path)) == timeless(lines(whole.path))
    assert toy.weights() == whole.weights()


def test_evaluation_has_the_group_for_itself(tmp_path):
    often = run_lines(tmp_path / "often", staleness=2, control={"eval_freq_steps": 1})
    never = run_lines(tmp_path / "never", staleness=2, control={"eval_freq_steps": 100})
    assert all("eval/held/loss" in line for line in often)
    assert timeless(
        [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in often]
    ) == timeless([{k: v for k, v in line.items() if not k.startswith("eval/")} for line in never])


def test_a_call_that_samples_has_training_done_in_its_middle(tmp_path, monkeypatch):
    """In one process: what its batch's predecessor still lacks, then the training of that, and no
    other sampling.
    """
    generate, seen = ToyGenerate.generate, list[tuple[int, int]]()

    def wait(self, model, batch):
        version, end = model.engine.version, time.monotonic() + 300.0
        while model.step % BATCHES in (1, 2, 3) and model.engine.version == version:
            assert time.monotonic() < end, "nobody trains"
            if model.updates.are_waiting():
                model.updates.take(left=True)
        seen.append((version, model.engine.version))
        return generate(self, model, batch)

    monkeypatch.setattr(ToyGenerate, "generate", wait)
    toy = Toy(tmp_path, staleness=1, interruptible=True)
    toy.run()
    epoch = [(0, 0), (0, 1), (1, 2), (2, 3), (4, 4)]
    assert seen == epoch + [(BATCHES + before, BATCHES + after) for before, after in epoch]
    assert len(lines(toy.path)) == 2 * BATCHES and all(
        "gen/response_length" in line for line in lines(toy.path)
    )
