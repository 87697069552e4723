"""The best checkpoint of a run and its early end, also of runs that are killed and go on."""

from __future__ import annotations

import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_checkpoints_recovery_points import Camera, lines
from tests.runtime.test_hosts import hosts
from tests.runtime.toy import Toy, ToyTrain, timeless
from weft.errors import ConfigError
from weft.experiment import Control
from weft.interfaces.base import MFCResult
from weft.observe.best import BestRecord
from weft.runtime.best import BestTracker
from weft.runtime.directory import RunDirectory

# The toy's loss on validation rows falls up to step 4, and rises from then on.
CONTROL = {
    "eval_freq_steps": 1,
    "save_best": "eval/loss",
    "early_stop_patience": 3,
    "save_freq_steps": 3,
    "save_total_limit": 1,
    "recover_freq_steps": 2,
}


def tracker(folder: Path, host: Any = None, **options: Any) -> BestTracker:
    control = Control("e", "t", save_best=options.pop("save_best", "eval/loss"), **options)
    made = BestTracker(control, folder, ["actor"], host)
    made.open(None)
    return made


def compare(made: BestTracker, values: list[float | None]) -> list[bool]:
    """Compare values of steps 1, 2, ... until the run stops."""
    found = []
    for step, value in enumerate(values, 1):
        found.append(made.compare(step, {"eval/loss": value}, is_due=True))
        if found[-1]:
            made.record_save(step, is_best=True, is_regular=False)
        if made.has_stalled:
            break
    return found


def list_steps(path: Path) -> list[int]:
    return RunDirectory(path).list_saved_steps("actor")


def test_lower_losses_and_higher_rewards_are_better(tmp_path):
    assert compare(tracker(tmp_path), [3.0, 2.0, 2.0, 2.5, 1.0]) == [True, True, False, False, True]
    upwards = tracker(tmp_path, save_best_mode="max")
    assert compare(upwards, [3.0, 2.0, 3.5]) == [True, False, True]


def test_values_that_are_not_finite_are_never_the_best(tmp_path):
    made = tracker(tmp_path, early_stop_patience=2)
    assert compare(made, [math.nan, 2.0, None, math.inf]) == [False, True, False, False]
    assert made.has_stalled
    nothing = tracker(tmp_path, early_stop_patience=2)
    assert compare(nothing, [math.nan, -math.inf, 1.0]) == [False, False]
    assert "eval/loss was not a finite number in the last 2" in str(nothing.explain_end(2))
    assert nothing.describe("run") == ["best:   none, because eval/loss was never a finite number"]
    assert BestRecord.read(tmp_path.parent) is None


def test_small_improvements_are_saved_and_count_once_their_sum_is_large_enough(tmp_path):
    made = tracker(tmp_path, early_stop_patience=3, early_stop_min_delta=0.25)
    # 3.0 -> 2.7 is one improvement by more than 0.25; the last three stay within 0.25 of 2.7.
    falling = [3.0, 2.9, 2.8, 2.7, 2.6, 2.55, 2.5, 2.0]
    assert compare(made, falling) == [True] * 7
    assert made.explain_end(7) == (
        "stopped early after step 7: eval/loss has not improved on 2.7 by more than 0.25 in the "
        "last 3 comparisons (early_stop_patience=3)"
    )


def test_a_step_in_which_the_node_did_not_run_is_not_compared(tmp_path):
    made = tracker(tmp_path, save_best="train/loss", early_stop_patience=1)
    assert not made.compare(1, {"gen/length": 3.0}, is_due=True) and not made.has_stalled
    assert not made.compare(2, {"train/loss": 3.0}, is_due=False)
    assert made.compare(3, {"train/loss": 3.0}, is_due=True)
    with pytest.raises(ConfigError, match=r"save_best=train/los: .* did you mean train/loss\?"):
        tracker(tmp_path, save_best="train/los", save_best_mode="min").compare(
            1, {"train/loss": 3.0}, is_due=False
        )


def test_all_hosts_compare_the_value_of_the_first(tmp_path):
    _, group = hosts(2)
    own = [[3.0, 2.0, 2.5], [3.0, 3.5, 1.0]]

    def run(index: int) -> tuple[list[bool], Any]:
        made = tracker(tmp_path / str(index), group[index])
        return compare(made, own[index]), made.record_point()

    with ThreadPoolExecutor() as pool:
        first, second = pool.map(run, range(2))
    assert first == second and first[0] == [True, True, False]


def test_all_hosts_restore_what_the_first_finds(tmp_path):
    """Only the first host has the checkpoint of the saved state."""
    _, group = hosts(2)
    (tmp_path / "0" / "actor" / "step2").mkdir(parents=True)
    made = [tracker(tmp_path / str(index), group[index]) for index in range(2)]
    before = tracker(tmp_path / "before")
    compare(before, [3.0, 2.0])
    saved = before.record_point()
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(lambda each: each.open(saved), made)) == [None, None]
    assert [each.protected_steps for each in made] == [{2}, {2}]


def test_the_best_checkpoint_is_kept_and_the_run_ends_early(tmp_path):
    toy = Toy(tmp_path, control=CONTROL)
    toy.run()
    rows = lines(toy.path)
    losses = [row["eval/loss"] for row in rows]
    assert [row["step"] for row in rows] == list(range(8)), "4 is the best, and 3 more follow"
    best = min(range(len(losses)), key=losses.__getitem__)
    assert BestRecord.read(toy.path) == BestRecord(best, "eval/loss", losses[best])
    assert (best, list_steps(toy.path)) == (4, [4, 7]), "the best and the last one"
    assert RunDirectory(toy.path).read_status() == "finished"
    log = (toy.path / "log.txt").read_text()
    assert "stopped early after step 7: eval/loss has not improved on 4.289 in the last 3" in log
    assert f"{toy.path}@best is step 4, eval/loss 4.289 (before step 1: 6)" in log
    with pytest.raises(ConfigError, match="contains a finished run"):
        Toy(tmp_path, control=CONTROL).run()


def test_checkpoints_that_were_the_best_go_and_regular_ones_stay(tmp_path):
    """Without a limit, and with recovery points that still need the one before."""
    control = {"eval_freq_steps": 1, "save_best": "eval/loss", "save_milestone_freq_steps": 2}
    toy = Toy(tmp_path, control=control | {"max_steps": 6})
    toy.run()
    assert list_steps(toy.path) == [2, 4, 6], "milestones; 4 is the best"
    other = Toy(tmp_path / "other", control=CONTROL | {"early_stop_patience": None})
    session = other.session()
    session.open(resumes=False)
    for _ in range(4):
        session._finish_step(session._master.step())
    assert list_steps(other.path) == [3, 4], "3 is the best of the recovery point before"
    session.close("stopped")


def test_a_saved_last_step_that_turns_out_the_best_is_recorded(tmp_path):
    """Filters can end a run after a step that was saved, and not evaluated."""
    toy = Toy(tmp_path, control=CONTROL | {"eval_freq_steps": 2, "save_freq_steps": 1})
    session = toy.session()
    session.open(resumes=False)
    for _ in range(3):
        session._finish_step(session._master.step())
    assert BestRecord.read(toy.path).step == 2
    session._finish_run()
    session.close("stopped")
    assert BestRecord.read(toy.path).step == 3 and list_steps(toy.path) == [3]
    again = toy.session()
    again.open(resumes=True)
    again.close("stopped")
    assert BestRecord.read(toy.path).step == 3, "the recovery point has it too"


def test_a_run_that_stalls_at_its_planned_end_has_not_stopped_early(tmp_path):
    toy = Toy(tmp_path, control=CONTROL | {"max_steps": 7})
    toy.run()
    assert "stopped early" not in (toy.path / "log.txt").read_text()


def test_the_evaluation_before_the_first_step_is_step_0(tmp_path):
    toy = Toy(tmp_path / "on", control={"eval_at_start": True, "eval_freq_steps": 4})
    toy.run()
    first, *others = lines(toy.path)
    # The weights are 0 then, and the rows are 0 to 4: the mean of their squares is 6.
    assert first.pop("peak_memory_gb") > 0
    assert first == {
        "step": 0,
        "epoch": 0.0,
        "eval/held/loss": 6.0,
        "eval/loss": 6.0,
        "eval/num_rows": 5.0,
    }
    assert [row["step"] for row in others if "eval/loss" in row] == [4, 8, 10]
    assert "step  0/10  epoch 0.00  eval loss 6" in (toy.path / "log.txt").read_text()
    off = Toy(tmp_path / "off", control={"eval_freq_steps": 4})
    off.run()
    assert timeless(lines(off.path)) == timeless(others), "it changes nothing"


def test_a_start_that_is_the_best_is_told(tmp_path, monkeypatch):
    def evaluate(self, model, batch):
        return MFCResult(metrics={"loss": float(model.step)})

    monkeypatch.setattr(ToyTrain, "evaluate", evaluate)
    toy = Toy(tmp_path, control={"eval_freq_steps": 1, "save_best": "eval/loss", "max_steps": 2})
    toy.run()
    log = (toy.path / "log.txt").read_text()
    assert "@best is step 1, eval/loss 1 (before step 1: 0); no checkpoint is better" in log


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"save_best": "eval/lozz"}, []),
        ({"save_best": "train/lozz"}, [0]),
        ({"save_best": "eval/lozz", "eval_at_start": False}, [1]),
    ],
    ids=["before step 1", "step 1", "first evaluation"],
)
def test_a_misspelled_metric_ends_the_run_at_once(tmp_path, options, steps):
    toy = Toy(tmp_path, control={"eval_freq_steps": 2, "save_best_mode": "min", **options})
    with pytest.raises(ConfigError, match=r"the run does not have this metric; .*it has .*/loss"):
        toy.run()
    file = toy.path / "metrics.jsonl"
    assert [row["step"] for row in lines(toy.path)] == steps if steps else not file.exists()


def test_a_metric_of_a_step_is_compared_where_nothing_is_evaluated(tmp_path):
    control = {"eval_freq_steps": 2, "save_best": "train/loss", "eval_at_start": False}
    toy = Toy(tmp_path, control=control)
    toy.run()
    compared = {row["step"]: row["train/loss"] for row in lines(toy.path) if row["step"] % 2 == 0}
    record = BestRecord.read(toy.path)
    assert record.step == min(compared, key=compared.__getitem__)
    assert record.value == compared[record.step]


def goes_on_from_pictures(tmp_path, monkeypatch, moments: list[float]) -> None:
    """`moments` are kills, as fractions of all changes that the run makes on the disk."""
    # pictures show what is there, flushed or not
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = Toy(tmp_path / "whole", control=CONTROL)
    with monkeypatch.context() as patch:
        camera = Camera(whole.path, tmp_path / "album", patch)
        whole.run()
    checkpoints = list_steps(whole.path)
    record = (whole.path / "checkpoints" / "best.json").read_text()
    for number in [int(moment * camera.count) for moment in moments]:
        toy = Toy(tmp_path / "album" / str(number), control=CONTROL)
        if RunDirectory(toy.path).read_status() == "finished":
            continue
        toy.run()
        assert timeless(lines(toy.path)) == timeless(lines(whole.path))
        assert toy.weights() == whole.weights()
        assert list_steps(toy.path) == checkpoints
        assert (toy.path / "checkpoints" / "best.json").read_text() == record
        assert "stopped early after step 7" in (toy.path / "log.txt").read_text()


def test_a_kill_changes_neither_the_best_nor_the_end(tmp_path):
    """Killed after step 6: the best is 4, two of three comparisons have passed since then."""
    whole = Toy(tmp_path / "whole", control=CONTROL)
    whole.run()
    killed = Toy(tmp_path / "killed", control=CONTROL)
    session = killed.session()
    session.open(resumes=False)
    session._evaluate_start()
    for _ in range(6):
        session._finish_step(session._master.step())
    killed.run()
    assert timeless(lines(killed.path)) == timeless(lines(whole.path))
    assert BestRecord.read(killed.path) == BestRecord.read(whole.path)
    assert list_steps(killed.path) == list_steps(whole.path) == [4, 7]


@pytest.mark.exhaustive
def test_a_kill_at_many_moments_changes_neither_the_best_nor_the_end(tmp_path, monkeypatch):
    goes_on_from_pictures(tmp_path, monkeypatch, [n / 40 for n in range(1, 40)])


@pytest.mark.slow
def test_several_devices_find_the_same_best(tmp_path):
    one = Toy(tmp_path / "one", control=CONTROL)
    one.run()
    two = Toy(tmp_path / "two", control=CONTROL, device_mesh="1")
    two.run()
    assert BestRecord.read(two.path) == BestRecord.read(one.path)
    assert list_steps(two.path) == list_steps(one.path)


@pytest.mark.slow
def test_another_directory_and_another_metric_begin_anew(tmp_path):
    first = Toy(tmp_path / "first", control=CONTROL)
    first.run()
    point = str(first.path / "recover" / "step7")
    longer = CONTROL | {"resume_from": point, "early_stop_patience": 1}
    again = Toy(tmp_path / "again", control=longer)
    again.run()
    log = (again.path / "log.txt").read_text()
    assert "of step 4, is not in this run's directory; compared from here on" in log
    assert BestRecord.read(again.path).step == 8, "the first one that is compared"
    other = CONTROL | {"resume_from": point, "save_best": "eval/held/loss"}
    Toy(tmp_path / "other", control=other).run()
    log = (Toy(tmp_path / "other").path / "log.txt").read_text()
    assert "compared from here on; before, eval/loss was" in log


@pytest.mark.slow
def test_more_patience_continues_a_run_that_ended_early(tmp_path):
    first = Toy(tmp_path, control=CONTROL)
    first.run()
    more = CONTROL | {"resume_from": str(first.path), "early_stop_patience": 5}
    again = Toy(tmp_path, control=more)
    again.run()
    assert [row["step"] for row in lines(again.path)] == list(range(10)), "two more comparisons"
    assert BestRecord.read(again.path).step == 4 and list_steps(again.path) == [4, 9]


def test_a_point_of_an_earlier_version_begins_anew(tmp_path):
    made = tracker(tmp_path)
    compare(made, [1.0])
    assert made.open(None) is None
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1


def test_a_run_without_the_option_removes_the_record(tmp_path):
    compare(tracker(tmp_path), [1.0])
    assert (tmp_path / "best.json").is_file()
    made = tracker(tmp_path, save_best=None)
    assert not made.compare(1, {"eval/loss": 1.0}, is_due=True)
    assert made.record_point() is None and made.describe("run") == []
    assert not (tmp_path / "best.json").exists()
