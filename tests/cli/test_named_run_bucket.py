"""Commands that look at runs in a bucket, and the one that removes a lock."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from tests.cli.runs import write_run
from weft.cli.main import main
from weft.cli.named_run import with_names
from weft.experiments import SFTConfig
from weft.runtime.bucket_lock import BucketLock, LockOwner
from weft.runtime.directory import LOCK
from weft.storage.buckets import BucketFolder
from weft.storage.copies import CACHE_VARIABLE

ROOT = "memory://b/runs"


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BucketFolder:
    """A bucket with two runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    fsspec.filesystem("memory").store.clear()
    folder = BucketFolder.open(ROOT)
    for name in ("e/one", "e/two"):
        write_run(tmp_path / "local", name)
    for file in (tmp_path / "local").rglob("*"):
        if file.is_file():
            folder.write(file.relative_to(tmp_path / "local").as_posix(), file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", ROOT], ["e/one", "e/two"]),
        (["show", f"{ROOT}/e/one"], ["e/one"]),
        (["show", "e/one", "--fileroot", ROOT], ["e/one"]),
        (["show", "latest", "--fileroot", ROOT], ["e/"]),
        (["report", f"{ROOT}/e/one", "-o", "page.html"], ["page.html"]),
        (["report", "e/one", "e/two", "--fileroot", ROOT, "-o", "page.html"], ["page.html"]),
        (["logs", f"{ROOT}/e/one"], ["e/one"]),
        (["logs", "-e", "e", "-f", "one", "--fileroot", ROOT], ["e/one"]),
    ],
    ids=lambda words: "-".join(words),
)
def test_commands_read_runs_in_a_bucket(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str], bucket: BucketFolder
) -> None:
    bucket.write("e/one/log.txt", b"2026-01-01 00:00:00 writing\n")
    before = bucket.list_files()
    assert main(words) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert all(text in printed for text in said), printed
    assert bucket.list_files() == before, "nothing is written there"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "memory://b/none"], "there is no such folder in the bucket"),
        (["show", f"{ROOT}/e/three"], "there is no such folder in the bucket"),
        (["show", f"{ROOT}/e"], "contains runs"),
        (["logs", f"{ROOT}/e/one", "--follow"], "logs --follow: works with runs of this machine"),
        (["stop", f"{ROOT}/e/one"], "is a URL"),
        (["rm", f"{ROOT}/e/one", "--yes"], "removes runs of this machine"),
        (["rm", "e/one", "--fileroot", ROOT, "--yes"], f"{ROOT}/e/one: is a URL"),
        (["rm", "local/e/one", "--lock"], "is for runs in buckets"),
    ],
    ids=lambda words: "-".join(words),
)
def test_what_does_not_work_with_buckets(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], bucket: BucketFolder
) -> None:
    before = bucket.list_files()
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert bucket.list_files() == before


def test_a_lock_is_removed_by_hand(
    capsys: pytest.CaptureFixture[str], bucket: BucketFolder
) -> None:
    run = BucketFolder.open(f"{ROOT}/e/one")
    words = ["rm", "e/one", "--fileroot", ROOT, "--lock", "--yes"]
    assert main(words) == 0 and "has no lock" in capsys.readouterr().out
    owner = LockOwner("1", 7, "", "another", "elsewhere", 0.0)
    run.write(LOCK, json.dumps(vars(owner)).encode())
    assert main(words) == 0
    assert f"{ROOT}/e/one is locked by process 7 on elsewhere" in capsys.readouterr().out
    assert LOCK not in run.list_files() and "config.yaml" in run.list_files()
    lock = BucketLock(run)
    lock.take()
    assert main(words) == 2, "this process runs"
    assert "still runs here" in capsys.readouterr().err
    lock.release()


def test_trials_are_numbered_in_the_bucket(bucket: BucketFolder) -> None:
    config = SFTConfig(fileroot=ROOT, recover_mode="disabled")
    named, note = with_names(config, "sft")
    assert (named.experiment_name, named.trial_name) == ("sft", "1")
    assert note == f"this run is {ROOT}/sft/1"
    bucket.write("sft/4/metrics.jsonl", b"")
    assert with_names(config, "sft")[0].trial_name == "5"
