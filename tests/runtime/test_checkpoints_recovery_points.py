"""A run may be killed anywhere: what then lies on the disk always leads to the very same metrics
and weights.

Instead of killing, the run's directory is copied at every moment at which something on the disk
changes. Each copy is what a kill at that moment would have left; a run that goes on from it must
end as the one that was never stopped.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from tests.runtime.toy import Toy, timeless
from weft.errors import CheckpointError, ConfigError
from weft.observe.jsonl import StepFile
from weft.runtime import commands, directory
from weft.runtime.checkpoints import RecoveryPointStore

CONTROL = {
    "save_freq_steps": 2,
    "eval_freq_steps": 3,
    "recover_freq_steps": 1,
    "save_total_limit": 2,
}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


class Camera:
    """Copies a run's directory whenever a file or directory of it is flushed, renamed or appended
    to.
    """

    def __init__(self, run: Path, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.album, self.count = run, album, 0
        for owner, name in (
            (directory, "sync"),
            (directory, "rename"),
            (directory, "remove"),
            (StepFile, "append"),
        ):
            monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, change):
        def watched(*args):
            self.shoot()
            try:
                return change(*args)
            finally:
                self.shoot()

        return watched

    def shoot(self) -> None:
        if self.run.is_dir():
            shutil.copytree(
                self.run, self.album / str(self.count) / "toy" / "run", dirs_exist_ok=True
            )
            self.count += 1


VARIANTS = {
    "plain": {},
    "filter and staleness": {"num_ids": 40, "drop": 0.4, "staleness": 1, "ema": None},
    "cache": {"cache": True},
}


@pytest.mark.default_cases("plain")
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_kill_at_any_moment_changes_nothing(tmp_path, monkeypatch, variant):
    goes_on_from_every_picture(tmp_path, monkeypatch, variant, pictures=5)


@pytest.mark.slow_cases("filter and staleness")
@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_kill_at_very_many_moments_changes_nothing(tmp_path, monkeypatch, variant):
    goes_on_from_every_picture(tmp_path, monkeypatch, variant, pictures=30)


def goes_on_from_every_picture(tmp_path, monkeypatch, variant, pictures: int) -> None:
    # pictures show what is there, flushed or not
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    whole = Toy(tmp_path / "whole", control=CONTROL, **variant)
    with monkeypatch.context() as patch:
        camera = Camera(whole.path, tmp_path / "album", patch)
        whole.run()
    expected, weights = timeless(lines(whole.path)), whole.weights()
    assert camera.count > 200 and len(expected) > 5
    chosen = random.Random(1).sample(range(camera.count), pictures)
    for number in sorted(chosen):
        toy = Toy(tmp_path / "album" / str(number), control=CONTROL, **variant)
        if (toy.path / "status.json").is_file() and '"finished"' in (
            toy.path / "status.json"
        ).read_text():
            continue
        leave_torn_line(toy.path)
        toy.run()
        forget(expected, lines(toy.path), variant)
        assert toy.weights() == weights
        left = sorted(p.name for p in toy.path.rglob("*.tmp")) + sorted(
            p.name for p in toy.path.rglob("*.old")
        )
        assert left == []
        samples = [
            json.loads(line) for line in (toy.path / "samples.jsonl").read_text().splitlines()
        ]
        assert len(samples) == len({(row["step"], row["id"]) for row in samples})


def forget(expected: list[dict], found: list[dict], variant: dict) -> None:
    """Equal, apart from how much of a call came from the cache: a restart finds more there."""
    drop = {"rew/cached_fraction", "rew/mean"} if variant.get("cache") else set()
    strip = [
        [{k: v for k, v in line.items() if k not in drop} for line in run]
        for run in (expected, timeless(found))
    ]
    assert strip[0] == strip[1]


def leave_torn_line(path: Path) -> None:
    """A kill in the middle of a write."""
    if (path / "metrics.jsonl").is_file():
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99, "tra')


def stopped(root: Path, monkeypatch: pytest.MonkeyPatch, steps: int = 5) -> Toy:
    """A run that was killed after `steps` steps."""
    toy = Toy(root, control=CONTROL)
    session = toy.session()
    session.open(resumes=False)
    for _ in range(steps):
        session._finish_step(session._master.step())
    return toy


def test_a_damaged_cut_gives_way_to_the_one_before(tmp_path, monkeypatch):
    whole = Toy(tmp_path / "whole", control=CONTROL)
    whole.run()
    toy = stopped(tmp_path / "damaged", monkeypatch)
    (toy.path / "recover" / "step5" / "master.bin").write_bytes(b"\0")
    toy.run()
    assert (
        timeless(lines(toy.path)) == timeless(lines(whole.path))
        and toy.weights() == whole.weights()
    )
    assert "the recovery point at step 5 is damaged" in (toy.path / "log.txt").read_text()


@pytest.mark.parametrize("whole", [True, False])
def test_cuts_beyond_the_one_that_is_taken_up_are_gone(tmp_path, monkeypatch, whole):
    """Otherwise a kill before the next cut would take the run back to steps that it has left."""
    points = RecoveryPointStore(stopped(tmp_path, monkeypatch).path / "recover")
    *beyond, kept = [*points.list_points(), *([] if whole else [None])]
    for point in beyond:
        (point.directory / "master.bin").write_bytes(b"\0")
    session = Toy(tmp_path, control=CONTROL).session()
    session.open(resumes=True)
    assert session.step == (kept.step if kept else 0)
    assert points.list_points() == ([kept] if kept else [])
    session.close("stopped")


def test_without_any_whole_cut_the_run_begins_anew_unless_resume_is_demanded(tmp_path, monkeypatch):
    toy = stopped(tmp_path, monkeypatch)
    shutil.rmtree(toy.path / "recover")
    before = (toy.path / "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="contains no intact recovery point"):
        Toy(tmp_path, control=CONTROL | {"recover_mode": "resume"}).run()
    assert (toy.path / "metrics.jsonl").read_text() == before, "nothing is touched"
    toy.run()
    assert [line["step"] for line in lines(toy.path)] == list(range(1, 11))
    assert (
        "the run stopped before its first recovery point; starting again"
        in (toy.path / "log.txt").read_text()
    )


def test_another_number_of_threads_is_taken_over_and_another_torch_is_told(tmp_path, monkeypatch):
    toy = stopped(tmp_path, monkeypatch)
    real, asked, before = commands.describe_numerics, [], torch.get_num_threads()
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(
        commands, "describe_numerics", lambda device: real(device) | {"torch": "9.9"}
    )
    toy.run()
    assert asked == [before], "as many as the recovery point was computed with"
    log = (toy.path / "log.txt").read_text()
    assert "then, 9.9 now" in log and "7 now: the run continues" in log


def test_an_equal_number_of_threads_is_left_alone(tmp_path, monkeypatch):
    toy = stopped(tmp_path, monkeypatch)
    monkeypatch.setattr(
        torch, "set_num_threads", lambda count: pytest.fail(f"{count} threads were set")
    )
    toy.run()


def test_resume_from_another_run_takes_up_its_state(tmp_path, monkeypatch):
    whole = Toy(tmp_path / "whole", control=CONTROL)
    whole.run()
    first = stopped(tmp_path / "first", monkeypatch)
    again = Toy(
        tmp_path / "second",
        control=CONTROL | {"resume_from": str(first.path / "recover" / "step4")},
    )
    again.run()
    assert (
        timeless(lines(again.path)) == timeless(lines(whole.path))[4:]
        and again.weights() == whole.weights()
    )


def test_a_cut_of_another_graph_is_refused(tmp_path, monkeypatch):
    first = stopped(tmp_path / "first", monkeypatch)
    other = Toy(tmp_path / "second", ema=None, control=CONTROL | {"resume_from": str(first.path)})
    other.run()  # fewer roles to restore is no harm
    shutil.rmtree(first.path / "recover" / "step5" / "workers" / "engines" / "ref")
    (first.path / "recover" / "step5.json").unlink()
    shutil.rmtree(first.path / "recover" / "step4" / "workers" / "engines" / "ref")
    manifest = first.path / "recover" / "step4.json"
    found = json.loads(manifest.read_text())
    found["files"] = directory.compute_checksums(first.path / "recover" / "step4")
    manifest.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="no state of role 'ref'"):
        Toy(tmp_path / "third", control=CONTROL | {"resume_from": str(first.path)}).run()
