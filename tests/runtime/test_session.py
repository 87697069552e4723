"""Whole runs in a toy world: what a step is, what is written, and how a run fails, waits, filters
and caches.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.bounds import rounded
from tests.runtime.toy import (
    SIZE,
    Toy,
    ToyEngine,
    ToyGenerate,
    ToyInfer,
    ToyTokenizer,
    one_each,
    timeless,
)
from weft import register_function
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, Interrupted, RunError
from weft.graph.mfc import Call
from weft.runtime import directory, node_runner
from weft.runtime.checkpoints import CheckpointStore
from weft.runtime.directory import RunDirectory
from weft.topology import build_whole_slice


@register_function("toy_sleep")
def toy_sleep(model, seconds: float = 5.0) -> None:
    threading.Event().wait(seconds)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_what_every_node_measured(tmp_path):
    toy = Toy(tmp_path, control={"eval_freq_epochs": 1})
    done = lines(toy.run()._directory.path)
    assert [line["step"] for line in done] == list(range(1, 11)), (
        "18 ids, batch 4, 2 epochs: 5 steps an epoch"
    )
    assert [line["epoch"] for line in done][3:6] == pytest.approx([16 / 18, 1.0, 1 + 4 / 18])
    nodes = {"gen", "rew", "filter", "ref_inf", "advantages", "train"}
    assert {f"time/{node}" for node in nodes} <= done[0].keys()
    assert {"step_seconds", "peak_memory_gb", "train/loss", "rew/mean", "advantages/mean"} <= done[
        0
    ].keys()
    assert all(line["train/peak_bytes"] <= line["peak_memory_gb"] * 2**30 + 1 for line in done)
    assert not any("peak_bytes" in name for name in done[4] if name.startswith("eval/"))
    assert [i for i, line in enumerate(done) if "eval/held/loss" in line] == [4, 9]
    mean = mean_weight_after(toy, 5)
    # In float32: the weight, its difference from a row's number, twice in the square, the square, a
    # sum of five and the mean.
    expected = rounded(sum((i - mean) ** 2 for i in range(5)) / 5, 12, (4 + abs(mean)) ** 2)
    assert done[4]["eval/held/loss"] == done[4]["eval/loss"] == expected
    assert [line.get("eval/num_rows") for line in (done[3], done[4])] == [None, 5]
    first = json.loads((toy.path / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "id", "prompt", "completion", "score", "advantages"} <= first.keys()
    assert [p.name for p in (toy.path / "checkpoints" / "actor").iterdir()] == ["step10"], (
        "the last step is saved"
    )
    assert (
        RunDirectory(toy.path).read_status() == "finished" and (toy.path / "config.yaml").is_file()
    )


def mean_weight_after(toy: Toy, step: int) -> float:
    """Of a run that is the same and saves after `step` steps."""
    other = Toy(toy.root / "other", control={"save_freq_steps": step})
    other.run()
    weights = json.loads(
        (other.path / "checkpoints" / "actor" / f"step{step}" / "model.json").read_text()
    )
    return sum(weights) / len(weights)


def test_a_row_shows_its_prompt_without_the_tokenizers_bos(tmp_path, monkeypatch):
    def prompts(folder: str) -> list[str]:
        toy = Toy(tmp_path / folder)
        toy.run()
        return [
            json.loads(line)["prompt"]
            for line in (toy.path / "samples.jsonl").read_text().splitlines()
        ]

    shown = prompts("plain")
    first = shown[0].split()[0]
    monkeypatch.setattr(ToyTokenizer, "bos_id", int(first))
    assert prompts("bos") == [prompt.removeprefix(f"{first} ") for prompt in shown] != shown


def test_tensors_of_consumed_ids_are_let_go(tmp_path):
    session = Toy(tmp_path, drop=0.3, staleness=1).run()
    assert len(session._group._tensors._store) == 0 and len(session._master._descriptions) == 0
    assert not session._master._buffer.entries


def test_filters_are_refilled_and_every_training_batch_is_whole(tmp_path):
    toy = Toy(tmp_path, drop=0.5, num_ids=40)
    done = lines(toy.run()._directory.path)
    sizes = read_sizes(toy.path, "train")
    assert len(done) == len(sizes) < 20, "half of 80 ids are gone"
    assert set(sizes[:-1]) - {4} <= {1, 2, 3} and sizes.count(4) >= len(sizes) - 2, (
        "short only at the end of an epoch"
    )
    assert len(read_sizes(toy.path, "gen")) > len(done)


def read_sizes(path: Path, node: str) -> list[int]:
    events = json.loads((path / "timeline.json").read_text())
    return [e["args"]["ids"] for e in events if e["name"] == node and e["ph"] == "X"]


def test_hooks_run_and_offloaded_weights_come_back(tmp_path):
    session = Toy(tmp_path, control={"max_steps": 2}).run()
    engine = session._group._devices._process.worker.roles._get_own_engine("reward")
    assert engine.moves == ["hook 2.0", "off weights", "on weights", "hook 2.0", "off weights"]


def test_a_run_by_steps_takes_as_many_epochs_as_they_need(tmp_path):
    toy = Toy(tmp_path, control={"max_steps": 11})
    toy.run()
    rows = [json.loads(line) for line in (toy.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 12))
    assert rows[-1]["epoch"] > 2, "total_train_epochs is 2"


def test_a_run_by_steps_ends_where_filters_leave_no_row(tmp_path):
    with pytest.raises(RunError, match="the run made no step: filters dropped every id"):
        Toy(tmp_path, drop=1.0, control={"max_steps": 11}).run()


def test_the_moving_average_follows_after_each_training_step(tmp_path):
    session = Toy(tmp_path, ema=0.25, control={"max_steps": 1}).run()
    roles = session._group._devices._process.worker.roles
    assert roles.engine("ref").w.tolist() == pytest.approx(
        (0.25 * roles.engine("actor").w).tolist()
    )
    assert roles.engine("ref").version == 1


def test_a_sync_between_networks_of_two_shapes_is_refused_before_the_first_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        ToyEngine, "slices", lambda self: {"w": build_whole_slice((SIZE + self.spec.trained,))}
    )
    with pytest.raises(
        ConfigError, match=r"actor -> ref: parameters differ between the two roles \(w\)"
    ):
        Toy(tmp_path).session()


def test_outputs_of_a_frozen_role_are_computed_once(tmp_path):
    ToyInfer.calls = 0
    plain = Toy(tmp_path / "plain")
    plain.run()
    uncached = ToyInfer.calls
    ToyInfer.calls = 0
    toy = Toy(tmp_path / "cached", cache=True, ema=None)
    toy.run()
    folder = next((toy.path / "cache").iterdir())
    records = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    assert folder.name.startswith("rew-") and 0 < sum(map(len, records)) <= 36
    assert ToyInfer.calls <= uncached and lines(toy.path)[-1]["rew/cached_fraction"] >= 0.0
    Toy(tmp_path / "cached2", cache=True, ema=None).run()


def test_checkpoints_are_pruned_but_milestones_stay(tmp_path):
    control = {"save_freq_steps": 1, "save_total_limit": 2, "save_milestone_freq_steps": 4}
    toy = Toy(tmp_path, control=control)
    toy.run()
    kept = sorted(int(p.name[4:]) for p in (toy.path / "checkpoints" / "actor").iterdir())
    assert kept == [4, 8, 9, 10]
    assert sorted(p.name for p in toy.path.joinpath("recover").iterdir()) == [
        "step10",
        "step10.json",
        "step9",
        "step9.json",
    ]


def test_a_run_that_ends_before_it_prunes_prunes_when_it_goes_on(tmp_path, monkeypatch):
    toy = Toy(tmp_path, control={"save_freq_steps": 5, "save_total_limit": 1})

    def fail(self, *steps):
        raise RunError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "prune", fail)
        for _ in range(2):  # in the middle, and after the last step
            with pytest.raises(RunError, match="killed here"):
                toy.run()
    checkpoints = toy.path / "checkpoints" / "actor"
    assert sorted(each.name for each in checkpoints.iterdir()) == ["step10", "step5"]
    toy.run()
    assert [each.name for each in checkpoints.iterdir()] == ["step10"]


def test_an_error_names_node_role_and_ids(tmp_path):
    with pytest.raises(ValueError, match="out of luck") as caught:
        Toy(tmp_path, train_args={"fail_at": 1}).run()
    assert "node 'train' (role 'actor', 4 ids:" in caught.value.__notes__[0]
    assert RunDirectory(Toy(tmp_path).path).read_status() == "failed"
    assert "out of luck" in (Toy(tmp_path).path / "log.txt").read_text()


def with_node(toy: Toy, monkeypatch, name: str, **changes) -> None:
    experiment = Toy.experiment

    def changed(self):
        return experiment(self).with_mfc(name, **changes)

    monkeypatch.setattr(Toy, "experiment", changed)


def test_a_deadline_names_who_waited_for_whom(tmp_path, monkeypatch):
    toy = Toy(tmp_path)
    with_node(toy, monkeypatch, "gen", deadline_s=0.2, pre_hooks=[Call("toy_sleep")])
    with pytest.raises(RunError, match=r"node 'gen' \(role 'actor', 4 ids: .*deadline_s=0\.2"):
        toy.run()


def test_a_call_that_names_no_deadline_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr(node_runner, "DEFAULT_DEADLINE_SECONDS", 0.2)
    toy = Toy(tmp_path)
    with_node(toy, monkeypatch, "gen", pre_hooks=[Call("toy_sleep")])
    with pytest.raises(
        RunError,
        match=r"node 'gen' \(role 'actor', 4 ids: .* did not finish within 0\.2 seconds; set deadline_s",
    ):
        toy.run()


def test_a_host_function_has_a_deadline_too(tmp_path, monkeypatch):
    @register_function("toy_hang")
    def toy_hang(batch, context):
        threading.Event().wait(5)

    with_node(Toy(tmp_path), monkeypatch, "filter", function="toy_hang", args={}, deadline_s=0.2)
    with pytest.raises(
        RunError, match=r"node 'filter' \(host function 'toy_hang', 4 ids: .*deadline_s=0\.2"
    ):
        Toy(tmp_path).run()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda batch, context: None, "returned no outputs; its output keys are kept"),
        (
            lambda batch, context: batch.select(keys=["scores"]),
            "produced no kept; its outputs are scores",
        ),
    ],
)
def test_a_host_function_that_breaks_its_word_is_named(tmp_path, monkeypatch, function, words):
    name = f"toy_{abs(hash(words))}"
    register_function(name, function)
    with_node(Toy(tmp_path), monkeypatch, "filter", function=name, args={})
    with pytest.raises(RunError, match=f"node 'filter'.*{words}"):
        Toy(tmp_path).run()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_step_end_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path, monkeypatch, number, code
):
    whole = Toy(tmp_path / "whole")
    whole.run()
    toy = Toy(tmp_path / "stopped")
    generate = ToyGenerate.generate

    def with_signal(self, model, batch):
        if model.step == 3:
            os.kill(os.getpid(), number)
        return generate(self, model, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ToyGenerate, "generate", with_signal)
        with pytest.raises(
            Interrupted, match="after step 4; rerun the same command to resume from there"
        ) as caught:
            toy.run()
        assert caught.value.exit_code == code
        assert len(lines(toy.path)) == 4
    toy.run()
    assert timeless(lines(toy.path)) == timeless(lines(whole.path))
    assert toy.weights() == whole.weights()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    toy = Toy(tmp_path, control={"save_freq_steps": 2})
    real, calls = directory.sync_tree, []

    def full(directory: Path) -> None:
        calls.append(directory.name)
        if directory.name == "step4.tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(directory)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "sync_tree", full)
        with pytest.raises(
            RunError,
            match=r"step4 was not saved; what was saved before it is intact: the disk is full",
        ):
            toy.run()
    assert [p.name for p in (toy.path / "checkpoints" / "actor").iterdir()] == ["step2"]
    toy.run()
    assert len(lines(toy.path)) == 10


def test_a_run_that_loses_all_ids_says_so(tmp_path):
    with pytest.raises(RunError, match="filters dropped every id"):
        Toy(tmp_path, drop=1.1).run()


@register_function("toy_keep_early")
def toy_keep_early(batch, context) -> SequenceSample:
    """Everything at first, nothing from the third batch on."""
    kept = batch.ids if context.step < 2 else ()
    return one_each(kept, "kept", [1.0] * len(kept))


def test_a_run_whose_last_ids_are_filtered_away_is_evaluated_at_its_end(tmp_path, monkeypatch):
    """Nobody knew that step 2 was the last when its line was written."""
    toy = Toy(
        tmp_path,
        num_ids=16,
        control={"total_train_epochs": 1, "eval_freq_steps": 100, "recover_freq_steps": 1},
    )
    with_node(toy, monkeypatch, "filter", function="toy_keep_early", args={})
    done = lines(toy.run()._directory.path)
    assert [line["step"] for line in done] == [1, 2]
    assert ["eval/held/loss" in line for line in done] == [False, True]
    assert done[1]["eval/loss"] > 0 and done[1]["train/loss"] > 0, "what stood on the line stays"
    RunDirectory(toy.path).set_status(
        "running", 2
    )  # as if killed after the last recovery point: it ends with the same lines
    assert timeless(lines(toy.run()._directory.path)) == timeless(done)
