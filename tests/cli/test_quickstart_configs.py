"""`weft quickstart NAME --configs A B ...`: sections as a command line of their own, and whole runs
of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.tiny import make_llama, prompt_answer_rows, write_jsonl
from weft.cli.main import main
from weft.cli.quickstart import parse_command_line
from weft.errors import ConfigError

CONFIGS = """\
base:
  learning_rate: 1e-3
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  num_train_epochs: 1
  model.dtype: float32
  fileroot: saved_model
tiny:
  model: {path: m}
  progress: false
rows:
  dataset.train_path: sft.jsonl
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text(CONFIGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["--configs", "a", "b", "c", "seed=1"],
        ["--configs", "a,b", "c", "seed=1"],
        ["--configs=a,b,c", "seed=1"],
        ["seed=1", "--configs", "a", "--configs", "b", "c"],
        ["--configs", "a", "b", "c", "--seed=1"],
    ],
)
def test_the_names_are_those_up_to_the_next_flag_or_assignment(words: list[str]) -> None:
    sorted_words = parse_command_line(["sft", *words])
    assert (sorted_words.name, sorted_words.configs, sorted_words.assignments) == (
        "sft",
        ["a", "b", "c"],
        ["seed=1"],
    )


def test_names_are_needed() -> None:
    with pytest.raises(ConfigError, match="--configs: needs names of sections"):
        parse_command_line(["sft", "--configs", "seed=1"])


def job(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main(["quickstart", *words, "--cfg", "job"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def test_the_configuration_of_a_stack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "more").mkdir()
    (here / "more" / "x.yaml").write_text("x: {seed: 7}\n")
    made = job(
        capsys, "sft", "--configs", "base", "tiny", "x", "--config-dir", "more", "max_steps=3"
    )
    assert made["seed"] == 7 and made["max_steps"] == 3 and made["fileroot"] == "saved_model"
    assert made["dataset"]["train_bs_n_seqs"] == 4 and made["model"]["optimizer"]["lr"] == 1e-3  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--configs", "bases"],
            "unknown section 'bases'; did you mean base (configs/mine.yaml:1)",
        ),
        (
            ["--configs", "base", "learning_rat=3"],
            "unknown key 'learning_rat'; did you mean learning_rate",
        ),
        (
            ["--configs", "base", "learning_rate=x"],
            "model.optimizer.lr='x': must be a number, such as 0.1 or 1e-5 (command",
        ),
        (
            ["--config-dir", "configs"],
            "--config-dir: is a folder of sections, and none is named; add --configs NAME",
        ),
    ],
)
def test_all_problems_are_in_one_message(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "sft", *words, "--cfg", "job"]) == 2
    assert message in capsys.readouterr().err


def test_a_stack_runs_end_to_end(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama(here / "m")
    write_jsonl(here / "sft.jsonl", prompt_answer_rows(8))
    assert main(["quickstart", "sft", "--configs", "base", "rows", "tiny", "max_steps=2"]) == 0
    out = capsys.readouterr().out
    assert "settings: base rows tiny" in out and "model.optimizer.lr = 0.001" in out
    run = here / "saved_model" / "sft" / "base-rows-tiny"
    assert [
        json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["optimizer"]["lr"] == 1e-3
