"""Directories that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from weft.errors import CheckpointError, RunError
from weft.runtime import directory
from weft.runtime.checkpoints import RecoveryPointStore, find_damage, find_named_point


def fill(text: str):
    return lambda d: (d / "a.txt").write_text(text)


def full_disk(*_args):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_directory_appears_whole_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "step1"
    directory.write_directory(target, fill("one"))
    directory.write_directory(target, fill("two"))
    assert (target / "a.txt").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["step1"]


@pytest.mark.parametrize("where", ["fill", "sync_tree", "first rename", "second rename"])
def test_where_writing_fails_the_old_directory_is_still_there(tmp_path, monkeypatch, where):
    target = tmp_path / "step1"
    directory.write_directory(target, fill("one"))
    renames = []

    def rename(source: Path, to: Path, real=directory.rename) -> None:
        renames.append(source)
        if where == "first rename" or (where == "second rename" and len(renames) == 2):
            raise KeyboardInterrupt
        real(source, to)

    if "rename" in where:
        monkeypatch.setattr(directory, "rename", rename)
    elif where == "sync_tree":
        monkeypatch.setattr(directory, "sync_tree", full_disk)
    with pytest.raises((RunError, KeyboardInterrupt)) as caught:
        directory.write_directory(target, full_disk if where == "fill" else fill("two"))
    if caught.type is RunError:
        assert "the disk is full" in str(
            caught.value
        ) and "what was saved before it is intact" in str(caught.value)
    monkeypatch.undo()
    directory.clean_up(tmp_path)
    assert (target / "a.txt").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["step1"]


def written_meanwhile(monkeypatch, times: int) -> None:
    """As if another process wrote into each directory just before it is removed, so many times."""
    real, left = os.rmdir, [times]

    def rmdir(*args, **kwargs) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        real(*args, **kwargs)

    monkeypatch.setattr(os, "rmdir", rmdir)


def test_what_another_process_still_writes_hides_no_error(tmp_path, monkeypatch):
    def die(_directory: Path) -> None:
        raise RuntimeError("device 1 died")

    monkeypatch.setattr(directory, "ENDING_SECONDS", 0.1)
    written_meanwhile(monkeypatch, times=1000)
    with pytest.raises(RuntimeError, match="device 1 died"):
        directory.write_directory(tmp_path / "step1", die)
    monkeypatch.undo()
    directory.clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_removed_although_another_process_still_writes_into_it(
    tmp_path, monkeypatch
):
    (tmp_path / "step1" / "workers").mkdir(parents=True)
    written_meanwhile(monkeypatch, times=3)
    directory.remove(tmp_path / "step1")
    assert not (tmp_path / "step1").exists()


def test_the_last_two_cuts_are_kept(tmp_path):
    points = RecoveryPointStore(tmp_path / "recover")
    for step in (1, 2, 5):
        points.write(step, fill(str(step)))
    assert [point.step for point in points.list_points()] == [5, 2]
    assert sorted(p.name for p in (tmp_path / "recover").iterdir()) == [
        "step2",
        "step2.json",
        "step5",
        "step5.json",
    ]


def test_a_damaged_cut_gives_way_to_the_one_before(tmp_path):
    points, notes = RecoveryPointStore(tmp_path), []
    for step in (1, 2):
        points.write(step, fill(str(step)))
    assert points.find_newest(notes.append).step == 2 and notes == []
    (tmp_path / "step2" / "a.txt").write_text("x")
    assert points.find_newest(notes.append).step == 1
    assert "step 2 is damaged (a.txt differs from what was written" in notes[0]
    (tmp_path / "step1" / "a.txt").unlink()
    assert points.find_newest(notes.append) is None
    (tmp_path / "step1.json").write_text("{")
    assert find_damage(points.list_points()[-1]) == "step1.json cannot be read"


def test_a_cut_without_its_manifest_never_was_one(tmp_path, monkeypatch):
    points = RecoveryPointStore(tmp_path)
    points.write(1, fill("1"))
    monkeypatch.setattr(directory, "write_text", full_disk)
    with pytest.raises(OSError):
        points.write(2, fill("2"))
    assert points.find_newest(print).step == 1
    points.remove_partial()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step1", "step1.json"]


def test_going_back_drops_the_cuts_beyond(tmp_path):
    points = RecoveryPointStore(tmp_path)
    for step in (1, 2):
        points.write(step, fill(str(step)))
    points.drop_after(1)
    assert [point.step for point in points.list_points()] == [1]


def test_resume_from_names_a_recovery_point_a_checkpoint_or_a_run(tmp_path):
    run = tmp_path / "run"
    points = RecoveryPointStore(run / "recover")
    with pytest.raises(CheckpointError, match="no such directory"):
        find_named_point(run / "x")
    for step in (1, 2):
        points.write(step, fill(str(step)))
    with pytest.raises(CheckpointError, match="model's path"):
        find_named_point(run)
    (run / "config.yaml").write_text("a: 1\n")
    (run / "checkpoints" / "actor" / "step1").mkdir(parents=True)
    (run / "checkpoints" / "actor" / "step9").mkdir(parents=True)
    assert find_named_point(run).step == 2
    assert find_named_point(run / "recover" / "step1").step == 1
    assert find_named_point(run / "checkpoints" / "actor" / "step1").step == 1
    with pytest.raises(CheckpointError, match="it has: step2, step1"):
        find_named_point(run / "checkpoints" / "actor" / "step9")
