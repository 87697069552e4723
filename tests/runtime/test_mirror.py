"""Runs in buckets: the lock, and a bucket that is usable after a kill at any operation."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import object_store
from tests.object_store import ObjectStore
from weft.errors import ConfigError, RunError
from weft.runtime import directory, mirror
from weft.runtime.checkpoints import RecoveryPointStore, find_damage
from weft.runtime.mirror import (
    RunMirror,
    compute_state,
    find_unit,
    get_manifest,
    is_mirrored,
    plan_uploads,
)
from weft.storage.bucket_lock import LOCK, BucketLock
from weft.storage.buckets import BucketFolder
from weft.storage.copies import MANIFEST

URL = "objects://b/runs/e/t"
STEPS = 5


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "objects" / "b").mkdir(parents=True)
    monkeypatch.setenv(object_store.ROOT, str(tmp_path / "objects"))
    monkeypatch.setattr(mirror, "FIRST_PAUSE_SECONDS", 0.0)
    object_store.register()
    return tmp_path


@pytest.fixture
def notes() -> list[str]:
    return []


def open_mirror(folder: Path, note: Callable[[str], None] = print) -> RunMirror:
    result = RunMirror.open(URL, folder, note)
    result.start()
    return result


def list_bucket() -> set[str]:
    return set(BucketFolder.open(URL).list_files())


def fill_point(folder: Path, step: int) -> None:
    for name in "xyz":
        (folder / name).write_text(f"{name}{step}" * 9)
    (folder / "empty" / "folder").mkdir(parents=True)


def continue_run(folder: Path, run_mirror: RunMirror, *, until: int = STEPS) -> None:
    """A run of `until` steps that writes metrics, checkpoints and recovery points, as a session does
    and in its order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    points = RecoveryPointStore(folder / "recover")
    points.remove_partial()
    point = points.find_newest(print)
    begin = 0 if point is None else point.step
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:begin] if metrics.exists() else []
    assert len(lines) == begin, "the bucket's metrics are at least as new as its recovery point"
    metrics.write_text("".join(f"{line}\n" for line in lines))
    directory.write_text(folder / "status.json", '{"status": "running"}')
    for step in range(begin + 1, until + 1):
        with metrics.open("a") as file:
            file.write(f"step {step}\n")
        run_mirror.check()
        run_mirror.wait()
        if step % 2:
            directory.write_directory(
                folder / "checkpoints" / "actor" / f"step{step}",
                lambda d, step=step: [(d / n).write_text(f"{n} {step}") for n in "ab"],
            )
            run_mirror.request()
            run_mirror.wait()
        points.write(step, lambda d, step=step: fill_point(d, step))  # type: ignore[misc]
        run_mirror.request()
        for old in range(1, step - 1):
            directory.remove(folder / "checkpoints" / "actor" / f"step{old}")
    directory.write_text(folder / "status.json", '{"status": "finished"}')


def check_end(folder: Path) -> None:
    """The bucket has all that the finished run has, and no more than whole checkpoints and points
    of an earlier process.
    """
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    listed = list_bucket() - {LOCK}
    assert {name for name in names if is_mirrored(name)} <= listed
    units = {find_unit(name) for name in listed - names}
    assert all(unit is not None and get_manifest(unit) in listed for unit in units)
    assert sum(name.startswith("recover/") and name.endswith(".json") for name in listed) <= 3
    bucket = BucketFolder.open(URL)
    assert bucket.read("metrics.jsonl").decode().split("\n") == [
        *(f"step {step}" for step in range(1, STEPS + 1)),
        "",
    ]
    assert json.loads(bucket.read("status.json")) == {"status": "finished"}
    assert bucket.read(f"checkpoints/actor/step{STEPS}/a") == f"a {STEPS}".encode()
    assert f"recover/step{STEPS}.json" in listed


def test_a_run_is_in_the_bucket_and_goes_on_from_an_empty_disk(store: Path) -> None:
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror, until=3)
    run_mirror.close()
    assert LOCK not in list_bucket()
    run_mirror = open_mirror(store / "two")
    here = {
        p.relative_to(store / "two").as_posix() for p in (store / "two").rglob("*") if p.is_file()
    }
    points = {"recover/step3.json", *(f"recover/step3/{n}" for n in "xyz")}
    assert (store / "two" / "recover/step3/empty/folder").is_dir()
    manifests = {f"checkpoints/actor/step{step}/{MANIFEST}" for step in (3,)}
    assert here == {"metrics.jsonl", "status.json"} | points | manifests
    continue_run(store / "two", run_mirror)
    run_mirror.close()
    check_end(store / "two")


def find_newest_point(bucket: BucketFolder) -> int:
    """Return the step of the newest whole recovery point in a bucket, or 0."""
    listing = bucket.list_files()
    newest = 0
    for name in listing:
        if not (name.startswith("recover/") and name.endswith(".json")):
            continue
        manifest = json.loads(bucket.read(name))
        for file, checksum in manifest["files"].items():
            contents = bucket.read(f"{name.removesuffix('.json')}/{file}")
            assert hashlib.blake2b(contents, digest_size=16).hexdigest() == checksum, name
        newest = max(newest, manifest["step"])
    return newest


def test_the_bucket_is_usable_after_every_operation(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has a manifest is whole, and metrics are at least as new as recovery points."""
    bucket = BucketFolder.open(URL)
    steps = [0]

    limits: list[int] = []

    def check(path: str) -> None:
        step = find_newest_point(bucket)
        assert step >= steps[-1], "a recovery point is lost"
        if step:
            assert len(bucket.read("metrics.jsonl").splitlines()) >= step
        if path.endswith("status.json") and b"finished" in bucket.read("status.json"):
            assert step == limits[-1], "the status is written last"
        for name in bucket.list_files():
            if name.endswith(MANIFEST):
                files = json.loads(bucket.read(name))["files"]
                assert {f"{name.rpartition('/')[0]}/{file}" for file in files} <= set(
                    bucket.list_files()
                )
        steps.append(step)

    for name in ("_write", "rm_file"):
        operation = getattr(ObjectStore, name)

        def operate(self, path, *args, operation=operation, **more):  # type: ignore[no-untyped-def]
            operation(self, path, *args, **more)
            check(path)

        monkeypatch.setattr(ObjectStore, name, operate)
    for until in (3, STEPS):
        limits.append(until)
        run_mirror = open_mirror(store / f"until{until}")
        continue_run(store / f"until{until}", run_mirror, until=until)
        run_mirror.close()
    assert steps[-1] == STEPS and len(steps) > 50


def count_operations(monkeypatch: pytest.MonkeyPatch, last: int) -> list[str]:
    """Let every operation that changes the bucket fail after `last` ones; return those that did not."""
    done: list[str] = []
    for name in ("_write", "rm_file"):
        operation = getattr(ObjectStore, name)

        def count(self, path, *args, operation=operation, name=name, **more):  # type: ignore[no-untyped-def]
            if len(done) >= last:
                raise OSError("the process is dead")
            operation(self, path, *args, **more)
            done.append(f"{name} {path}")

        monkeypatch.setattr(ObjectStore, name, count)
    return done


def run_until(folder: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> int:
    """Run until the process "dies" after `last` changes of the bucket; return the number of them."""
    with monkeypatch.context() as patch:
        patch.setattr(mirror, "ATTEMPTS", 1)
        done = count_operations(patch, last)
        try:
            run_mirror = open_mirror(folder)
            continue_run(folder, run_mirror)
            run_mirror.close()
        except (RunError, ConfigError):
            pass
        return len(done)


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_after_any_operation_leaves_a_usable_bucket(
    store: Path, monkeypatch: pytest.MonkeyPatch, stride: int
) -> None:
    whole = run_until(store / "whole", monkeypatch, 1 << 30)
    check_end(store / "whole")
    assert whole > 50
    newest = 0
    for last in range(0, whole, stride):
        shutil.rmtree(store / "objects" / "b")
        (store / "objects" / "b").mkdir()
        run_until(store / f"killed{last}", monkeypatch, last)
        # How many operations a step takes depends on when uploads begin, so runs that die later
        # can have come less far: what counts is what this one has left.
        left = find_newest_point(BucketFolder.open(URL))
        BucketLock(BucketFolder.open(URL)).discard()  # the owner, this process, lives
        folder = store / f"next{last}"
        run_mirror = open_mirror(folder)
        point = RecoveryPointStore(folder / "recover").find_newest(print)
        if point is not None:
            assert find_damage(point) is None
        assert (0 if point is None else point.step) == left, "the newest whole point is taken up"
        newest = max(newest, left)
        continue_run(folder, run_mirror)
        run_mirror.close()
        check_end(folder)
    assert newest >= STEPS - 1


def test_a_damaged_point_is_not_used(store: Path, notes: list[str]) -> None:
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror, until=3)
    run_mirror.close()
    BucketFolder.open(URL).write("recover/step3/y", b"damaged")
    run_mirror = open_mirror(store / "two", notes.append)
    assert [p.step for p in RecoveryPointStore(store / "two" / "recover").list_points()] == [2]
    assert notes == [f"{URL}/recover/step3 is damaged; using the recovery point before"]
    continue_run(store / "two", run_mirror)
    run_mirror.close()
    check_end(store / "two")


def test_the_bucket_decides_and_not_the_working_copy(store: Path) -> None:
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror, until=2)
    run_mirror.close()
    points = RecoveryPointStore(store / "one" / "recover")
    points.write(4, lambda d: [(d / "x").write_text("never uploaded")])
    (store / "one" / "metrics.jsonl").write_text("step 1\nstep 2\nstep 3\nstep 4\n")
    (store / "one" / "extra.txt").write_text("x")
    run_mirror = open_mirror(store / "one")
    assert [point.step for point in points.list_points()] == [2]
    assert (store / "one" / "metrics.jsonl").read_text() == "step 1\nstep 2\n"
    assert not (store / "one" / "extra.txt").exists()
    assert (store / "one" / "checkpoints/actor/step1/a").exists(), "not copied twice"
    continue_run(store / "one", run_mirror)
    run_mirror.close()
    check_end(store / "one")


def test_an_error_of_the_store_ends_the_run_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror, until=2)
    run_mirror.wait()
    monkeypatch.setenv(object_store.FAILS_FROM, "0")
    with pytest.raises(RunError, match=rf"^{URL} cannot be written: .*the store is on fire"):
        continue_run(store / "one", run_mirror)
    with pytest.raises(RunError, match="on fire"):
        run_mirror.close()
    monkeypatch.delenv(object_store.FAILS_FROM)
    assert LOCK not in list_bucket()
    run_mirror = open_mirror(store / "two")
    continue_run(store / "two", run_mirror)
    run_mirror.close()
    check_end(store / "two")


def test_a_short_failure_is_tried_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ObjectStore._write
    failures = iter([True, False, True, True, False])

    def fail_sometimes(self: ObjectStore, path: str, contents: bytes, *, only_new: bool) -> None:
        if not only_new and next(failures, False):
            raise OSError("try again")
        write(self, path, contents, only_new=only_new)

    monkeypatch.setattr(ObjectStore, "_write", fail_sometimes)
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror)
    run_mirror.close()
    check_end(store / "one")


def test_one_process_at_a_time(store: Path) -> None:
    run_mirror = open_mirror(store / "one")
    before = list_bucket()
    with pytest.raises(ConfigError) as said:
        open_mirror(store / "two")
    assert f"process {os.getpid()} on " in str(said.value)
    assert f"weft rm {URL} --lock" in str(said.value)
    assert list_bucket() == before and not (store / "two").exists()
    run_mirror.close()
    open_mirror(store / "two").close()
    assert list_bucket() == set()


def test_a_process_that_lost_its_lock_writes_nothing_more(store: Path) -> None:
    run_mirror = open_mirror(store / "one")
    continue_run(store / "one", run_mirror, until=2)
    run_mirror.wait()
    BucketLock(BucketFolder.open(URL)).discard()
    other = BucketLock(BucketFolder.open(URL))
    other.take()
    before = list_bucket()
    with pytest.raises(RunError, match="taken by another process"):
        continue_run(store / "one", run_mirror)
    with pytest.raises(RunError, match="taken by another process"):
        run_mirror.close()
    assert list_bucket() == before
    other.check()


def test_a_bucket_that_does_not_exist(store: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fileroot: objects://none/e/t: "):
        RunMirror.open("objects://none/e/t", store / "one", print)
    assert not (store / "one").exists()


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("recover/step2/rank0/x.bin", "recover/step2"),
        ("recover/step2.json", "recover/step2"),
        ("checkpoints/actor/step4/a", "checkpoints/actor/step4"),
        ("checkpoints/actor/step4/adapter/a", "checkpoints/actor/step4"),
        ("checkpoints/milestones.json", None),
        ("metrics.jsonl", None),
        ("logs/worker-0.txt", None),
    ],
)
def test_files_belong_to_units(name: str, unit: str | None) -> None:
    assert find_unit(name) == unit


def test_plans_leave_out_what_is_being_written() -> None:
    local = {
        "recover/step2/x": (1, 1),
        "recover/step2.json": (1, 1),
        "recover/step4/x": (1, 1),  # its manifest comes later
        "checkpoints/actor/step2/a": (5, 5),
        "metrics.jsonl": (9, 9),
        "cache/values.bin": (mirror.LARGE_BYTES, 1),
    }
    local["config.yaml"] = (2, 2)
    plan = plan_uploads(local, {"old.txt": (1, 1)}, {"recover/step1": frozenset()}, whole=False)
    assert plan.small == ["config.yaml", "metrics.jsonl"], "what makes a folder a run goes first"
    del local["config.yaml"]
    assert plan.units == {
        "recover/step2": ["recover/step2/x"],
        "checkpoints/actor/step2": ["checkpoints/actor/step2/a"],
    }
    assert (plan.lost_units, plan.removed) == (["recover/step1"], ["old.txt"])
    known = {unit: compute_state(unit, local) for unit in plan.units}
    plan = plan_uploads(local, {"metrics.jsonl": (9, 9)}, known, whole=True)
    assert (plan.small, plan.units) == (["cache/values.bin"], {})
    local["checkpoints/actor/step2/a"] = (5, 6)
    assert list(plan_uploads(local, {}, known, whole=True).units) == ["checkpoints/actor/step2"]
    assert get_manifest("recover/step2") == "recover/step2.json"


def test_the_status_is_not_newer_than_the_other_files(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends while its files are uploaded counts as finished after the next upload only."""
    folder = store / "one"
    run_mirror = RunMirror.open(URL, folder, print)
    directory.write_text(folder / "status.json", "running")
    list_files = mirror.list_local_files

    def list_and_end_run(path: Path) -> dict[str, tuple[int, int]]:
        files = list_files(path)
        (folder / "samples.jsonl").write_text("the last line")
        directory.write_text(folder / "status.json", "finished")
        return files

    monkeypatch.setattr(mirror, "list_local_files", list_and_end_run)
    bucket = BucketFolder.open(URL)
    for status in ("running", "finished"):
        run_mirror._synchronize(whole=True)
        assert bucket.read("status.json").decode() == status
        assert (bucket.list_files().keys() >= {"samples.jsonl"}) == (status == "finished")
    run_mirror.release()


def test_the_record_of_the_best_checkpoint_follows_the_checkpoint(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = store / "one"
    run_mirror = RunMirror.open(URL, folder, print)
    for name in ("checkpoints/best.json", "checkpoints/actor/step2/a", "metrics.jsonl"):
        directory.write_text(folder / name, "text")
    names = []
    upload = BucketFolder.upload
    write = BucketFolder.write

    def upload_and_list(self: BucketFolder, path: Path, name: str) -> None:
        names.append(name)
        upload(self, path, name)

    def write_and_list(self: BucketFolder, name: str, contents: bytes) -> None:
        names.append(name)
        write(self, name, contents)

    monkeypatch.setattr(BucketFolder, "upload", upload_and_list)
    monkeypatch.setattr(BucketFolder, "write", write_and_list)
    run_mirror._synchronize(whole=True)
    assert [name for name in names if name != "metrics.jsonl"][-3:] == [
        "checkpoints/actor/step2/a",
        f"checkpoints/actor/step2/{MANIFEST}",
        "checkpoints/best.json",
    ]
    run_mirror.release()


def test_a_checkpoint_that_is_being_removed_is_not_uploaded_again() -> None:
    local = {f"checkpoints/a/step2/{name}": (1, 1) for name in "xyz"}
    known = {"checkpoints/a/step2": compute_state("checkpoints/a/step2", local)}
    del local["checkpoints/a/step2/y"]
    assert plan_uploads(local, {}, known, whole=True).units == {}
