"""`weft easylm`: help, the run that a command starts, conversions before it, and bad input."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tiny import make_llama, write_jsonl
from weft.cli import dialects
from weft.cli.main import COMMANDS, format_usage, main
from weft.compat.easylm import commands, meshes
from weft.compat.easylm.arguments import TranslatedCommand
from weft.compat.easylm.commands import choose_folder, format_help
from weft.compat.easylm.flags import CONVERTERS, TRAINING

ROWS = [{"messages": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "4"}]}]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meshes, "count_devices", lambda backend, environment: None)
    return tmp_path


def words_of_sft(here: Path, checkpoint: str) -> list[str]:
    write_jsonl(here / "rows.jsonl", ROWS * 4)
    return [
        "easylm",
        "llama_train",
        "--backend=torch",
        "--mesh_dim=1,1,1",
        f"--load_checkpoint={checkpoint}",
        "--train_dataset.type=tulu_json_torch",
        "--train_dataset.json_torch_dataset.path=rows.jsonl",
        "--train_dataset.json_torch_dataset.seq_length=64",
    ]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """A module of the package that holds only these members."""
    module = ModuleType(f"weft.compat.easylm.{name}")
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, module.__name__, module)


# -- help


def test_the_command_is_one_of_weft(capsys: pytest.CaptureFixture[str]) -> None:
    assert "easylm" in COMMANDS and "other programs\n  easylm" in format_usage()
    assert main(["easylm"]) == 2 and main(["easylm", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*TRAINING, *CONVERTERS))


@pytest.mark.parametrize("name", TRAINING)
def test_help_lists_flags_defaults_and_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["easylm", name, "--help"]) == 0 and main(["easylm", name]) == 2
    text = capsys.readouterr().out
    lines = format_help(name).splitlines()
    for flag in TRAINING[name].flags:
        assert sum(line.startswith(f"  --{flag}=") for line in lines) == 1
    assert f"  --mesh_dim=1,-1,1\n      {TRAINING[name].model}.layout" in text


def test_without_the_package_weft_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dialects, "find", lambda name: None)
    assert main(["easylm", "llama_train"]) == 2
    assert "EasyLM's commands and files: this installation of weft lacks" in capsys.readouterr().err
    assert dialects.list_commands() == {}


# -- runs


def test_a_plan_of_a_hugging_face_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_llama(here / "m")
    words = words_of_sft(here, "m")
    assert main([*words, "--dry-run", "max_tokens_per_microbatch=128"]) == 0
    out = capsys.readouterr().out
    command, _, plan = out.partition("\n")
    assert command.startswith("$ weft quickstart sft seed=42 ") and "model.path=m" in command
    assert command.endswith("model.backend=torch --dry-run max_tokens_per_microbatch=128")
    assert "epoch" in plan and not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--laod_checkpoint=m"],
            "unknown flag '--laod_checkpoint'; did you mean --load_checkpoint?",
        ),
        (["--mesh_dim=1,2"], "--mesh_dim=1,2: must be dp,fsdp,mp such as 1,-1,8"),
        (["--load_checkpoint=params::f", "--load_llama_config=8b32"], "load_llama_config=8b32"),
    ],
)
def test_bad_input_ends_with_2_and_writes_nothing(
    words: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words_of_sft(here, "m")
    assert main([*given, *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "$ weft" not in captured.out
    assert sorted(path.name for path in here.iterdir()) == ["rows.jsonl"]
    assert main(["easylm", "llama_trian"]) == 2
    assert "did you mean llama_train" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(meshes, "count_devices", lambda backend, environment: 8)
    words = [*words_of_sft(here, "m"), "--backend=jax", "--mesh_dim=1,64,4"]
    assert main(words) == 2
    assert "must be the number of devices, 8; write 1,8,1" in capsys.readouterr().err


def test_without_jax_the_extra_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.engine.backends import jax

    make_llama(here / "m")
    monkeypatch.setattr(jax, "find_spec", lambda name: None)
    assert main([*words_of_sft(here, "m"), "--backend=jax", "--mesh_dim=1,8,1"]) == 2
    assert re.search(r"'jax' is not installed; run: .*\[jax\]", capsys.readouterr().err)
    assert not (here / "runs").exists()


# -- conversions


def test_a_stream_is_converted_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_llama(here / "m")
    calls = []

    def locate_model(*values: Any, **more: Any) -> Path:
        return Path(values[4]) / "debug"

    def prepare_model(*values: Any, **more: Any) -> Path:
        calls.append((*values[:4], more))
        return Path(shutil.copytree(here / "m", values[4] / "debug"))

    stand_in(monkeypatch, "checkpoints", locate_model=locate_model, prepare_model=prepare_model)
    started: list[list[str]] = []

    def start(words: list[str], supervise: bool) -> int:
        started.append(words)
        return 0

    from weft.cli import quickstart

    monkeypatch.setattr(quickstart, "main", start)
    update = "--update_llama_config={'max_sequence_length': 64}"
    words = [*words_of_sft(here, "params::stream"), "--load_llama_config=debug", update]
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "params::stream: is converted when the run starts" in out
    assert "model.path=runs/converted/debug" in out
    assert not calls and not started and not (here / "runs").exists()
    assert main(words) == main(words) == main([*words, "--dry-run"]) == 0
    expected = ("params::stream", "debug", "{'max_sequence_length': 64}", None)
    assert calls == [(*expected, {"is_reward_model": False})]
    assert len(started) == 3 and "model.path=runs/converted/debug" in started[0]


def test_models_of_runs_in_a_bucket_are_converted_on_this_machine() -> None:
    bucket = TranslatedCommand("sft", {"fileroot": "gs://bucket/out"})
    assert choose_folder(bucket) == Path.home() / ".cache" / "weft" / "converted"
    assert choose_folder(TranslatedCommand("sft", {"fileroot": "out"})) == Path("out/converted")


@pytest.mark.parametrize("name", CONVERTERS)
def test_converters_are_found_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[list[str]] = []

    def convert(words: list[str]) -> int:
        done.append(words)
        return 3

    table: dict[str, Callable[[list[str]], int]] = {name: convert}
    stand_in(monkeypatch, "conversions", COMMANDS=table)
    assert commands.main([name, "--load_checkpoint=params::x"]) == 3
    assert done == [["--load_checkpoint=params::x"]]


# -- other names of the commands


@pytest.mark.parametrize("name", [*TRAINING, *CONVERTERS])
def test_every_script_is_among_the_examples(
    name: str, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "scripts" if name in ("convert_checkpoint", "diff_checkpoint") else "models/llama"
    file = repo / "examples" / "easylm" / "EasyLM" / folder / f"{name}.py"
    assert len(file.read_text().splitlines()) <= 10
    started: list[list[str]] = []
    monkeypatch.setattr("weft.apps.easylm.weft", lambda: started.append(sys.argv[1:]) or 0)
    monkeypatch.setattr(sys, "argv", [str(file), "--flag=1"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0 and started == [["easylm", name, "--flag=1"]]


@pytest.mark.slow  # two processes
def test_modules_run_by_name(repo: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(repo / "src")}
    for module, folder in (
        (["EasyLM.models.llama.llama_train"], repo / "examples" / "easylm"),
        (["weft.apps.easylm", "llama_train"], repo),
    ):
        command = [sys.executable, "-m", *module, "--laod_checkpoint=x"]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "did you mean --load_checkpoint?" in done.stderr
