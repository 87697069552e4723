"""Commands that show runs in a bucket or remove their locks."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pytest

from tests.cli.runs import write_run
from weft.cli.main import main
from weft.cli.named_run import with_names
from weft.experiments import SFTConfig
from weft.storage.bucket_lock import LOCK, BucketLock, LockOwner
from weft.storage.buckets import BucketFolder
from weft.storage.copies import CACHE_VARIABLE, MANIFEST

ROOT = "memory://b/runs"


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BucketFolder:
    """Return a bucket with two runs."""
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


@pytest.mark.parametrize("words", [[f"{ROOT}/e/one"], ["e/one", "--fileroot", ROOT]])
def test_show_names_the_checkpoint_in_the_bucket_with_its_size(
    words: list[str], capsys: pytest.CaptureFixture[str], bucket: BucketFolder
) -> None:
    for step in (2, 4):
        bucket.write(f"e/one/checkpoints/model/step{step}/{MANIFEST}", b"{}")
    bucket.write("e/one/checkpoints/model/step4/weights", b"w" * 3_000_000)
    total = sum(stamp.size for stamp in BucketFolder.open(f"{ROOT}/e/one").list_files().values())
    assert 3_000_000 < total < 3_020_000
    assert main(["show", *words]) == 0
    printed = capsys.readouterr().out
    first, *_ = printed.splitlines()
    assert first.startswith(f"{ROOT}/e/one: sft, ") and f" {total / 1e6:.3g} MB, " in first
    (line,) = [line for line in printed.splitlines() if "step2, step4" in line]
    assert line.endswith(f"step2, step4 (3 MB each)  {ROOT}/e/one/checkpoints/model/step4")
    assert main(["show", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == f"{ROOT}/e/one"


def test_ls_counts_the_files_in_the_bucket(
    capsys: pytest.CaptureFixture[str], bucket: BucketFolder
) -> None:
    bucket.write("e/one/checkpoints/model/step4/weights", b"w" * 3_000_000)
    sizes = {}
    for name in ("e/one", "e/two"):
        files = BucketFolder.open(f"{ROOT}/{name}").list_files()
        sizes[f"{ROOT}/{name}"] = sum(stamp.size for stamp in files.values())
    assert main(["ls", ROOT, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["path"]: row["num_bytes"] for row in rows} == sizes
    assert main(["ls", ROOT, "--sort", "size"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("e/one") < printed.index("e/two") and "3.01 MB" in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ls", "memory://b/none"], "there is no such folder in the bucket"),
        (["show", f"{ROOT}/e/three"], "there is no such folder in the bucket"),
        (["show", f"{ROOT}/e"], f"contains runs: {ROOT}/e/one, {ROOT}/e/two;"),
        (["logs", f"{ROOT}/e/one", "--follow"], "logs --follow: works with runs of this machine"),
        (["stop", f"{ROOT}/e/one"], "is a URL"),
        (["rm", f"{ROOT}/e/one", "--yes"], "removes runs of this machine"),
        (["rm", "e/one", "--fileroot", ROOT, "--yes"], f"{ROOT}/e/one: is a URL"),
        (["rm", "local/e/one", "--lock"], "is for runs in buckets"),
    ],
    ids=lambda words: "-".join(words),
)
def test_commands_for_local_runs_refuse_buckets(
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
