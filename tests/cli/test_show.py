"""`weft show`: the page of a run, its JSON and its configuration."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.cli.runs import write_run
from weft.cli.show import main
from weft.errors import ConfigError


def test_a_page_about_a_run(tmp_path, capsys):
    run = write_run(tmp_path, "e/t", status="stopped")
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run}: sft, stopped, 4/8 steps, ")
    assert "weft quickstart sft 'launch.env.HF_TOKEN=***'" in out
    assert "a-host" in out and "torch 2.13" in out and "abc123 with changes" in out
    assert "max_steps=8" in out and "model.path=data/model" in out and "seed" not in out, (
        "only what is not the default"
    )
    assert "step2, step4" in out and "train/loss" in out and "0.25" in out
    assert "hf_123" not in out and "HF_TOKEN=***" in out


def test_the_best_checkpoint_is_named(tmp_path, capsys):
    run = write_run(tmp_path, "e/t")
    record = {"step": 2, "metric": "eval/loss", "value": 1.5, "mode": "min"}
    (run / "checkpoints" / "best.json").write_text(json.dumps(record))
    main([str(run)])
    assert f"step 2, eval/loss 1.5  {run}@best" in capsys.readouterr().out
    main([str(run), "--json"])
    best = json.loads(capsys.readouterr().out)["best"]
    assert best == {"step": 2, "metric": "eval/loss", "value": 1.5}


def test_the_whole_configuration_is_yaml_without_secrets(tmp_path, capsys):
    run = write_run(tmp_path, "e/t")
    main([str(run), "--config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["seed"] == 1 and config["launch"]["env"] == {"HF_TOKEN": "***"}


def test_json(tmp_path, capsys):
    run = write_run(tmp_path, "e/t")
    main([str(run), "--json"])
    known = json.loads(capsys.readouterr().out)
    assert known["status"] == "finished" and known["changed_options"]["max_steps"] == [8, None]
    assert known["starts"][0]["host"] == "a-host"


def test_names_of_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", "first/old", age=100.0)
    write_run(tmp_path / "runs", "first/ppo")
    for word in ("runs/first/ppo", "first/ppo", "latest"):
        main([word])
        assert "runs/first/ppo: sft" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"did you mean .*first/ppo"):
        main(["first/pop"])
    with pytest.raises(
        ConfigError, match=r"^first/poo: there is no such run; did you mean runs/first/ppo\?$"
    ):
        main(["first/poo"])
    for word in ("nope", "runs/nope", "runs/x/y"):
        with pytest.raises(
            ConfigError,
            match=rf"^{word}: there is no such run; weft ls lists the runs$",
        ):
            main([word])
    with pytest.raises(ConfigError, match="contains runs"):
        main(["runs/first"])


def test_files_that_are_missing_leave_their_part_out(tmp_path, capsys):
    run = write_run(tmp_path, "e/t")
    for name in ("run.json", "metrics.jsonl", "config.yaml"):
        (run / name).unlink()
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run}: a run, finished, 4/4 steps")
