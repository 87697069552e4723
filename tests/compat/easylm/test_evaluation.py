"""EasyLM's script for evaluations, and the guide's other files in examples/easylm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.compat.easylm import guide
from tests.job_clients import StandInClients
from weft.cli.main import main
from weft.compat.easylm.arguments import parse_flags
from weft.compat.easylm.evaluation import translate
from weft.compat.easylm.translation import translate as translate_training
from weft.errors import ConfigError
from weft.launch.job_template import read_template

GUIDE = [
    "--workspace",
    "W",
    "--model_name",
    "M",
    "--location",
    "01A",
    "--num_gpus",
    "1",
    "--is_tuned",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture
def folder(repo: Path) -> Path:
    return repo / "examples" / "easylm"


def test_the_guide_s_flags_are_those_of_weft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert translate(GUIDE) == ["--system", "beaker", *GUIDE]
    clients = StandInClients(tmp_path / "clients", "beaker")
    monkeypatch.setenv("PATH", clients.path)
    assert main(["easylm", "submit_open_instruct_eval", *GUIDE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("$ weft eval submit --system beaker --workspace W --model_name M ")
    file = "eval-jobs/M/M.beaker.yaml"
    assert clients.calls == [["beaker", "experiment", "create", file, "--workspace", "W"]]


def test_other_flags_of_the_script(here: Path) -> None:
    words = ["--beaker_image", "us/i", "--beaker_subfolder", "step1", "--olmo"]
    words += ["--use_hf_tokenizer_template", "--experiments", "trutufulqa", "xstest", "gsm_cot"]
    assert translate([*GUIDE, *words, "--", "--limit", "5"]) == [
        *["--system", "beaker", *GUIDE[:6], "--image", "us/i", "--subfolder", "step1"],
        *["--tasks", "truthfulqa,xstest_judge,gsm_cot", *GUIDE[6:], "--", "--limit", "5"],
    ]
    hub = translate([*GUIDE[:2], "--model_name", "hf-opt", "--location", "facebook/opt-6.7b"])
    assert hub[-3:] == ["hf-opt", "--location", "hub:facebook/opt-6.7b"]
    (here / "beaker_configs").mkdir()
    (here / "beaker_configs" / "default_eval.yaml").write_text("")
    assert translate(GUIDE)[8:10] == ["--template", "beaker_configs/default_eval.yaml"]
    assert translate([*GUIDE, "--template", "x"]).count("--template") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model_name", "M"], "--workspace is missing"),
        ([*GUIDE, "--gsm_stop_at_double_newline"], "end their answers by their own rules"),
        (
            [*GUIDE, "--experiments", "gsm_ctt"],
            "unknown experiment 'gsm_ctt'; did you mean gsm_cot",
        ),
    ],
)
def test_flags_that_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        translate(words)


def test_the_example_s_template_is_weft_s(folder: Path) -> None:
    text = (folder / "beaker_configs" / "default_eval.yaml").read_text()
    assert text == read_template("beaker", None).text


def run_example(*words: str, tmp_path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an example with replacements of `weft` and `python3` that print their arguments."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("weft", "python3"):
        (programs / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "BUCKET": "G"}
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["convert_and_submit_tuned", "convert_and_submit_tuned.sh"])
def test_convert_and_submit(name: str, folder: Path, tmp_path: Path) -> None:
    program = f"./scripts/{name}"
    done = run_example(
        program, "G/x", "7b", "tulu", "o/w", "--print", tmp_path=tmp_path, cwd=folder
    )
    words = done.stdout.split("\n")[:-1]
    assert words[:4] == ["eval", "submit", "--system", "beaker"] and words[-1] == "--print"
    template = words[words.index("--template") + 1]
    assert (folder / template).samefile(folder / "beaker_configs" / "default_eval.yaml")
    given = dict(zip(words[2:12:2], words[3:12:2], strict=True))
    assert given == {
        "--system": "beaker",
        "--from-easylm": "G/x",
        "--model_size": "7b",
        "--model_name": "tulu",
        "--workspace": "o/w",
    }
    assert "--is_tuned" in words


def test_convert_and_submit_says_what_it_takes(folder: Path, tmp_path: Path) -> None:
    done = run_example(
        "./scripts/convert_and_submit_tuned", "a", "7b", tmp_path=tmp_path, cwd=folder
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "MODEL_PATH MODEL_SIZE MODEL_NAME WORKSPACE" in done.stderr


def test_the_guide_s_ppo_has_the_guide_s_flags(folder: Path, tmp_path: Path) -> None:
    done = run_example("./examples/ppo_13b_tpu.sh", "--dry-run", tmp_path=tmp_path, cwd=folder)
    module, *flags = done.stdout.split("\n")[1:-1]
    assert module == "EasyLM.models.llama.llama_train_ppo" and flags.pop() == "--dry-run"
    own = ("logger.entity", "logger.project", "logger.prefix", "logger.wandb_dir")

    def read(words: list[str]) -> dict[str, str]:
        pairs = (word.removeprefix("--").split("=", 1) for word in words)
        return {name: value for name, value in pairs if name not in own}

    assert read(flags) == read(guide.PPO)
    given = parse_flags("llama_train_ppo", flags)
    translated = translate_training(given, backend="torch", num_devices=256)
    assert translated.options["ppo.mini_batch_size"] == 64
    assert translated.options["dataset.train_bs_n_seqs"] == 512


def test_the_guide_s_command_as_typed(folder: Path, tmp_path: Path, repo: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repo / "src")}
    command = [sys.executable, "scripts/submit_open_instruct_eval.py", *GUIDE, "--print"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        "$ beaker experiment create eval-jobs/M/M.beaker.yaml --workspace W\n"
    )
    spec = done.stdout.split("eval-jobs/M/M.beaker.yaml\n", 1)[1].rpartition("$ ")[0]
    assert yaml.safe_load(spec)["tasks"][0]["datasets"][0]["source"] == {"beaker": "01A"}
