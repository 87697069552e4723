"""List of runs: the files that are read, and missing or damaged files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml

from weft.observe import run_list
from weft.observe.run_list import list_runs


def write_run(
    folder: Path,
    *,
    status: str = "finished",
    step: int = 4,
    age: float = 0.0,
    **lines: float | None,
) -> Path:
    """Write a run as the runtime does, last changed `age` seconds ago."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "experiment_name: e\nmax_steps: 8\nmodel:\n  path: m\nppo:\n  kl_ctl: 0.1\n"
    )
    (folder / "status.json").write_text(json.dumps({"status": status, "step": step, "time": 0.0}))
    rows = [{"step": n, "actor_train/loss": 1.0 / n} | lines for n in range(1, step + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in folder.iterdir():
        os.utime(file, (time.time() - age,) * 2)
    return folder


def test_a_run_is_summed_up_from_its_files(tmp_path):
    run = write_run(tmp_path / "e" / "t", step=4, **{"rew_inf/reward": 0.5})
    (found,) = list_runs(tmp_path)
    assert (found.path, found.experiment, found.trial) == (run, "e", "t")
    assert (found.algorithm, found.status, found.step, found.total_steps) == (
        "ppo",
        "finished",
        4,
        4,
    )
    assert (found.metric, found.value) == ("rew_inf/reward", 0.5)
    assert found.num_bytes == sum(p.stat().st_size for p in run.iterdir())
    assert found.changed == pytest.approx(time.time(), abs=60)


def test_newest_first_and_only_runs_are_listed(tmp_path):
    write_run(tmp_path / "e" / "old", age=100.0)
    write_run(tmp_path / "e" / "new")
    write_run(tmp_path / "other" / "middle", age=50.0)
    (tmp_path / "e" / "notes").mkdir()
    (tmp_path / "e" / "link").symlink_to(tmp_path / "e" / "old")
    write_run(tmp_path / "e" / "new" / "deeper" / "inside")
    assert [run.trial for run in list_runs(tmp_path)] == ["new", "middle", "old"]
    assert [run.trial for run in list_runs(tmp_path / "e")] == ["new", "old"]
    assert [(run.experiment, run.trial) for run in list_runs(tmp_path / "e" / "old")] == [
        ("e", "old")
    ]
    assert list_runs(tmp_path / "nowhere") == []


def test_values_of_missing_and_damaged_files_are_unknown(tmp_path):
    torn = write_run(tmp_path / "e" / "torn", status="running", step=2)
    (torn / "status.json").write_text('{"status": "runn')
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "actor_tr')
    bare = tmp_path / "e" / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_bytes(b"\xff\xfe not yaml: [")
    (bare / "run.json").write_text("[1, 2")
    runs = {run.trial: run for run in list_runs(tmp_path)}
    assert (runs["torn"].status, runs["torn"].step, runs["torn"].total_steps) == (
        "unfinished",
        2,
        8,
    )
    assert (runs["torn"].metric, runs["torn"].value) == ("actor_train/loss", 0.5)
    assert (runs["bare"].status, runs["bare"].step, runs["bare"].metric) == (
        "unfinished",
        None,
        None,
    )
    assert runs["bare"].algorithm is None and runs["bare"].total_steps is None


def test_a_value_that_is_not_finite_is_unknown(tmp_path):
    write_run(tmp_path / "e" / "t", **{"actor_train/loss": None})
    assert (list_runs(tmp_path)[0].metric, list_runs(tmp_path)[0].value) == (
        "actor_train/loss",
        None,
    )


def test_a_run_without_a_process_is_unfinished(tmp_path):
    write_run(tmp_path / "e" / "fresh", status="running")
    write_run(tmp_path / "e" / "quiet", status="running", age=3600.0)
    assert {run.trial: run.status for run in list_runs(tmp_path)} == {
        "fresh": "running",
        "quiet": "unfinished",
    }
    assert {
        run.status for run in list_runs(tmp_path, is_alive=lambda path: path.name == "quiet")
    } == {
        "running",
        "unfinished",
    }
    assert (
        next(run for run in list_runs(tmp_path, is_alive=lambda path: False)).status == "unfinished"
    )


def test_the_record_of_a_run_has_its_algorithm_and_steps(tmp_path):
    run = write_run(tmp_path / "e" / "t", status="stopped")
    (run / "run.json").write_text(json.dumps({"algorithm": "my-ppo", "total_steps": 20}))
    assert (list_runs(tmp_path)[0].algorithm, list_runs(tmp_path)[0].total_steps) == ("my-ppo", 20)


def test_only_the_end_of_a_long_file_is_read(tmp_path, monkeypatch):
    write_run(tmp_path / "e" / "t", step=500)
    monkeypatch.setattr(run_list, "TAIL_BYTES", 400)
    assert len(run_list.read_last_lines(tmp_path / "e" / "t" / "metrics.jsonl")) < 20
    assert list_runs(tmp_path)[0].step == 500


def test_hard_links_count_once_and_symbolic_links_are_not_followed(tmp_path):
    run = write_run(tmp_path / "e" / "t")
    before = list_runs(tmp_path)[0].num_bytes
    (tmp_path / "big").write_bytes(b"x" * 100_000)
    (run / "outside").symlink_to(tmp_path / "big")
    os.link(run / "metrics.jsonl", run / "again.jsonl")
    assert list_runs(tmp_path)[0].num_bytes < before + 1000


@pytest.mark.parametrize(
    ("algorithm", "metric"),
    [
        ("rw", "eval/accuracy"),
        ("dpo", "eval/rewards/accuracies"),
        ("sft", "eval/loss"),
        ("ppo", "eval/loss"),
    ],
)
def test_validation_metrics_and_accuracies_of_scoring_models_are_shown(
    algorithm: str, metric: str, tmp_path: Path
) -> None:
    lines = {"train/accuracy": 0.7, "actor_train/rewards/accuracies": 0.6}
    lines |= {f"eval/{name}": 0.1 for name in ("loss", "accuracy", "rewards/accuracies")}
    run = write_run(tmp_path / "e" / "t", **lines)
    (run / "run.json").write_text(json.dumps({"algorithm": algorithm}))
    (found,) = list_runs(tmp_path)
    assert (found.metric, found.value) == (metric, 0.1)


def test_a_noisy_metric_is_the_mean_of_its_last_steps_and_validation_its_last_value(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "e" / "t")
    rows = [{"step": n, "r/reward": 0.5 + 0.1 * (-1) ** n} for n in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list_runs(tmp_path)[0].value == pytest.approx(0.5 + 0.1 / 5), (
        "of steps 16 to 20, not 0.6"
    )
    rows[9] |= {"eval/reward": 0.3}
    rows[14] |= {"eval/reward": 0.56}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (list_runs(tmp_path)[0].metric, list_runs(tmp_path)[0].value) == ("eval/reward", 0.56)


def test_options_are_read_without_a_yaml_parser(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    values = {
        "seed": 1,
        "grpo": {
            "kl_coef": 1e-6,
            "gen": {"max_new_tokens": 64, "stop": ["a: 1"]},
            "loss_type": "dapo",
        },
        "actor": {"optimizer": {"lr": 3e-5}, "path": None, "compile": True},
        "reward": "gsm8k",
    }
    config.write_text(yaml.safe_dump(values, sort_keys=False))
    found = run_list._read_scalars(config)
    assert found["grpo"]["kl_coef"] == 1e-6 and found["grpo"]["gen"]["max_new_tokens"] == 64
    assert found["grpo"]["loss_type"] == "dapo" and found["actor"]["optimizer"]["lr"] == 3e-5
    assert (
        found["actor"]["path"] is None
        and found["actor"]["compile"] is True
        and found["reward"] == "gsm8k"
    )
    assert run_list._read_scalars(tmp_path / "nowhere") == {}
