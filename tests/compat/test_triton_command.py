"""`weft convert triton` with a model, and with sections of settings that name one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.evaluation.test_answers_rewards import make_scorer
from weft.cli.main import main


def test_one_of_model_and_sections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "triton", "--triton_mode", "rm"]) == 2
    assert (
        main(["convert", "triton", "model", "store", "--configs", "mine", "--triton-mode", "rm"])
        == 2
    )
    assert capsys.readouterr().err.count("name a MODEL, or --configs") == 2
    assert not list(tmp_path.iterdir())


def test_a_store_is_a_local_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["convert", "triton", "a", "gs://OUT/x.jsonl", "--triton_mode", "rm"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "gs://OUT/x.jsonl" in said and "is a URL" in said, said
    assert not list(tmp_path.iterdir())


def test_a_stack_of_sections_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_scorer(tmp_path / "rm")
    (tmp_path / "configs").mkdir()
    section = {"mine": {"rank_config": {"is_reward_model": True, "model_name": str(model)}}}
    (tmp_path / "configs" / "own.yaml").write_text(yaml.safe_dump(section))
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            ["convert", "triton", "store", "--configs", "defaults_rlhf,mine", "--triton_mode", "rm"]
        )
        == 0
    )
    assert (tmp_path / "store" / "rm" / "config.pbtxt").is_file()
    assert (
        main(["convert", "triton", "--configs", "defaults_rlhf", "mine", "--triton_mode", "rm"])
        == 0
    )
    assert (tmp_path / ".triton_models" / "model_store_rm" / "rm" / "config.pbtxt").is_file()
