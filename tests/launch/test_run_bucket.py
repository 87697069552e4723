"""Real runs whose models, data and folder are in a bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import object_store
from tests.launch.cases import options, prepare, sft
from tests.launch.test_run_restart import timeless
from weft.errors import CheckpointError, ConfigError, DataError, RunError
from weft.experiments import SFTConfig
from weft.launch import dry_run, run
from weft.runtime import directory
from weft.storage.buckets import BucketFolder
from weft.storage.copies import CACHE_VARIABLE, MANIFEST, find_url

RUNS = "objects://b/runs"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def root(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model and the data, on this machine and in a bucket."""
    monkeypatch.setenv(object_store.ROOT, str(tmp_path / "objects"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "objects" / "b").mkdir(parents=True)
    object_store.register()
    bucket = BucketFolder.open("objects://b")
    for file in [*(material / "model").iterdir(), *material.glob("*.jsonl")]:
        bucket.upload(file, file.relative_to(material).as_posix())
    return material


def build(root: Path, **more: Any) -> SFTConfig:
    config = SFTConfig(**options(root, RUNS, **{"total_train_epochs": 1, **more}))
    config.model.path, config.model.optimizer.lr = "objects://b/model", 1e-3
    config.dataset.train_path, config.dataset.train_bs_n_seqs = "objects://b/sft.jsonl", 6
    return config


def read_checkpoints(bucket: BucketFolder) -> dict[str, bytes]:
    return {
        name: bucket.read(name)
        for name in bucket.list_files()
        if name.startswith("checkpoints/") and not name.endswith(MANIFEST)
    }


def test_a_run_goes_on_in_its_bucket_on_another_machine(root: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = run(build(root, fileroot=str(tmp_path / "whole"))).directory
    with pytest.raises(RunError) as stopped:
        stop_after(build(root), 2)
    assert "stopped by the test" in str(stopped.value)
    bucket = BucketFolder.open(f"{RUNS}/e/t")
    assert "recover/step2.json" in bucket.list_files() and directory.LOCK not in bucket.list_files()
    shutil.rmtree(tmp_path / "cache")
    model = BucketFolder.open("objects://b/model")
    config = model.read("config.json")
    model.write("config.json", config + b"\n")
    with pytest.raises(ConfigError, match=rf"^objects://b/model: has changed since .*{RUNS}/e/t"):
        run(build(root))
    assert directory.LOCK not in bucket.list_files()
    model.write("config.json", config)
    result = run(build(root))
    assert timeless(result.directory / "metrics.jsonl") == timeless(expected / "metrics.jsonl")
    steps = [json.loads(line)["step"] for line in bucket.read("metrics.jsonl").splitlines()]
    assert steps == [1, 2, 3, 4]
    weights = {
        path.relative_to(expected).as_posix(): path.read_bytes()
        for path in (expected / "checkpoints").rglob("*")
        if path.is_file()
    }
    assert read_checkpoints(bucket) == weights
    assert json.loads(bucket.read("status.json"))["status"] == "finished"
    stored = yaml.safe_load(bucket.read("config.yaml"))
    assert stored["model"]["path"] == "objects://b/model"
    assert stored["dataset"]["train_path"] == "objects://b/sft.jsonl"
    with pytest.raises(ConfigError, match=rf"^{RUNS}/e/t contains a finished run"):
        run(build(root))
    assert directory.LOCK not in bucket.list_files()
    # The checkpoint is a model by its URL, also for a plan, which copies no weights.
    after = build(root, trial_name="after")
    after.model.path = f"{RUNS}/e/t"
    assert any("39.1k parameters" in line for line in dry_run(after))
    copies = list((tmp_path / "cache" / "copies").rglob("step4@*"))
    assert [find_url(copy) for copy in copies] == [f"{RUNS}/e/t/checkpoints/model/step4"]
    assert not (copies[0] / "model.safetensors").exists()
    assert not any(
        name.startswith("runs/e/after") for name in BucketFolder.open("objects://b").list_files()
    )


def test_a_stream_goes_on_at_the_same_row(root: Path, tmp_path: Path) -> None:
    def build_stream(**more: Any) -> SFTConfig:
        config = build(root, **more)
        config.dataset.type = "stream"
        config.dataset.args = {"form": "prompt_answer", "batch": 6, "steps": 5}
        return config

    expected = run(build_stream(fileroot=str(tmp_path / "whole"))).directory
    with pytest.raises(RunError, match="stopped by the test"):
        stop_after(build_stream(), 2)
    shutil.rmtree(tmp_path / "cache")
    found = run(build_stream()).directory
    assert timeless(found / "metrics.jsonl") == timeless(expected / "metrics.jsonl")
    assert len(timeless(found / "metrics.jsonl")) == 5


def stop_after(config: SFTConfig, step: int) -> None:
    """Run until the recovery point of `step` is written, and fail then."""
    from weft.runtime.session import Session

    write_point = Session._write_point

    def write_and_stop(self: Session) -> None:
        write_point(self)
        if self.step == step:
            raise RunError("stopped by the test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "_write_point", write_and_stop)
        run(config)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"model": "objects://b/none"},
            CheckpointError,
            "model.path='objects://b/none': there is no",
        ),
        ({"model": "objects://none/m"}, CheckpointError, "no such bucket or file|there is no such"),
        (
            {"data": "objects://b/none.jsonl"},
            ConfigError,
            "dataset.train_path='objects://b/none.jsonl'",
        ),
        ({"fileroot": "objects://none/runs"}, ConfigError, "fileroot: objects://none/runs/e/t: "),
        ({"fileroot": "gs3://b/runs"}, ConfigError, "fsspec does not know: gs3://"),
        ({"n_nodes": 2, "mode": "ray"}, ConfigError, "n_nodes=2, the processes of all machines"),
        ({"mode": "slurm"}, ConfigError, "mode=slurm"),
        (
            {"eval_prompts": "objects://b/none.txt"},
            ConfigError,
            "eval_prompts=.?objects://b/none.txt",
        ),
    ],
)
def test_a_bucket_that_cannot_be_read(
    change: dict[str, Any], kind: type[Exception], words: str, root: Path
) -> None:
    before = set(BucketFolder.open("objects://b").list_files())
    model, data = change.pop("model", None), change.pop("data", None)
    config = build(root, **change)
    config.model.path = model or config.model.path
    config.dataset.train_path = data or config.dataset.train_path
    with pytest.raises((kind, DataError), match=words) as said:
        run(config)
    assert "\n" not in str(said.value)
    assert set(BucketFolder.open("objects://b").list_files()) == before, "nothing is written"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_that_is_killed_with_its_disk_ends_the_same(
    seed: int, root: Path, tmp_path: Path
) -> None:
    expected = run(sft(root, str(tmp_path / "whole"))).directory
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        object_store.SECONDS: str(0.004 * seed),
        CACHE_VARIABLE: str(tmp_path / "cache"),
    }
    words = [sys.executable, "-m", "tests.launch.killer", str(root), "sft", RUNS, "12", str(seed)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 2, "the run was over before it was killed"
    bucket = BucketFolder.open(f"{RUNS}/e/t")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(bucket.read("metrics.jsonl"))
    assert timeless(metrics) == timeless(expected / "metrics.jsonl")
    assert bucket.read("samples.jsonl") == (expected / "samples.jsonl").read_bytes()
    weights = {
        path.relative_to(expected).as_posix(): path.read_bytes()
        for path in (expected / "checkpoints").rglob("*")
        if path.is_file()
    }
    assert read_checkpoints(bucket) == weights
