"""`weft config` with Open-Assistant's sections."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.test_completion_candidates import words as complete
from weft.cli.main import main


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ls_names_file_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "ls", "pythia-"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(
        line[:1] == ["pythia-1b"] and line[1].startswith("weft:sft_models.yaml:") for line in lines
    )
    assert main(["config", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    blank = lines.index("")
    assert lines[blank + 1].startswith("sections: ") and lines[blank + 2].startswith("ppo_config ")


def test_show_says_what_a_stack_comes_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "galactica-125m", "learning_rate=2e-6", "--for", "sft"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "weft quickstart sft --configs galactica-125m\nsettings: galactica-125m\n"
    )
    assert "model.optimizer.lr = 2e-06" in out and "model.path = facebook/galactica-125m" in out
    assert main(["config", "show", "galactica-126m"]) == 2
    assert "did you mean galactica-125m" in capsys.readouterr().err


def test_cp_copies_a_section_to_change(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "cp", "pythia-1b", "configs/mine.yaml"]) == 0
    assert (
        yaml.safe_load((here / "configs" / "mine.yaml").read_text())["pythia-1b"]["max_length"]
        == 520
    )
    assert main(["config", "cp", "pythia-1B", "configs/mine.yaml"]) == 2
    assert "mine.yaml exists" in capsys.readouterr().err
    (here / "configs" / "mine.yaml").write_text(
        (here / "configs" / "mine.yaml").read_text().replace("520", "99")
    )
    assert main(["config", "show", "pythia-1b"]) == 0
    assert "dataset.max_seqlen = 99" in capsys.readouterr().out


def test_cp_of_a_whole_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "cp", "ppo_config", "configs/ppo_config.yaml"]) == 0
    assert main(["config", "validate", "configs/ppo_config.yaml"]) == 0
    assert "configs/ppo_config.yaml:1: ppo_config is valid for ppo" in capsys.readouterr().out


def test_validate_takes_a_stack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["config", "validate", "defaults", "oasst_export_eu,pythia-1b", "learning_rate=2e-6"])
        == 0
    )
    assert capsys.readouterr().out == "defaults oasst_export_eu pythia-1b: valid for sft\n"
    assert main(["config", "validate", "defaults_rm", "oasst-rm-1-pythia-1b"]) == 0
    assert capsys.readouterr().out == "defaults_rm oasst-rm-1-pythia-1b: valid for rw\n"
    for words, wrong in (
        (["defaults", "pythia-1c"], "unknown section 'pythia-1c'; did you mean"),
        (
            ["defaults", "pythia-1b", "learning_rat=1"],
            "unknown key 'learning_rat'; did you mean learning_rate",
        ),
        (["learning_rate=1"], "learning_rate=1: overrides sections; name them before it"),
    ):
        assert main(["config", "validate", *words]) == 2 and wrong in capsys.readouterr().err


def test_validate_names_the_line_of_a_value(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.yaml").write_text("b:\n  dtype: int3\n")
    assert main(["config", "validate", "bad.yaml"]) == 2
    assert "bad.yaml:2: section 'b': dtype=int3: must be one of fp16" in capsys.readouterr().err


def test_sections_are_completed() -> None:
    assert "pythia-1b" in complete("quickstart", "sft", "--configs", "pyt")
    assert "pythia-1b" in complete("config", "show", "pythia-1")
