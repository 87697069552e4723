"""`weft easylm`: help, the run that a command starts, conversions before it, and bad input."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import fsspec
import pytest

from tests.compat.easylm.common import TINY, arrays_of, write_stream
from tests.tiny import make_llama, make_tokenizer, write_jsonl
from weft.cli import dialects
from weft.cli.main import COMMANDS, format_usage, main
from weft.compat.easylm import commands, meshes
from weft.compat.easylm.arguments import TranslatedCommand
from weft.compat.easylm.commands import choose_folder, format_help
from weft.compat.easylm.flags import CONVERTERS, TRAINING
from weft.storage.copies import CACHE_VARIABLE

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
    """Return a module of the package that has only these members."""
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
    monkeypatch.setattr(dialects, "find_spec", lambda name: None)
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


SIZE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def stream(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return arguments of a run from a stream, with an empty folder for temporary files."""
    make_tokenizer(here / "tokenizer", chat=False)
    config = replace(TINY, vocab_size=320)
    write_stream(here / "streaming_params_7", arrays_of(config))
    (here / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "temporary"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    return [
        *words_of_sft(here, "params::streaming_params_7"),
        "--load_llama_config=debug",
        f"--update_llama_config={SIZE}",
        "--tokenizer=tokenizer",
        "--train_dataset.json_torch_dataset.batch_size=4",
        "--total_steps=1",
    ]


def check_unwritten(here: Path) -> None:
    """Assert that neither a run nor a converted model, nor a part of one, was left."""
    assert not (here / "runs").exists() and not (here / "bk").exists()
    assert not list((here / "cache").rglob("*@*")) and not list((here / "temporary").iterdir())


def test_a_stream_is_converted_once(
    here: Path, stream: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = "--logger.experiment_id=t"
    assert main([*stream, name]) == 0
    assert "converting params::streaming_params_7" in capsys.readouterr().err
    (weights,) = here.glob("runs/converted/streaming_params_7@*/model.safetensors")
    written = weights.stat()
    assert written.st_size > 10_000 and not list((here / "temporary").iterdir())
    # The same run after the files were copied again and the folder of runs was moved.
    for file in (here / "tokenizer" / "tokenizer.json", here / "streaming_params_7"):
        os.utime(file, ns=(0, 0))
    assert main([*stream, name]) == 2
    assert "contains a finished run of this configuration" in capsys.readouterr().err
    assert weights.stat() == written
    (here / "runs").rename(here / "moved")
    assert main([*stream, name, f"--logger.output_dir={here}/moved"]) == 2
    assert "contains a finished run of this configuration" in capsys.readouterr().err


@pytest.mark.slow  # two runs
def test_a_run_in_a_bucket_is_the_same_on_another_machine(
    here: Path,
    stream: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/bk/ckpt/streaming_params_7", (here / "streaming_params_7").read_bytes())
    words = [
        *stream,
        "--load_checkpoint=params::memory://bk/ckpt",
        "--logger.output_dir=memory://bk/out/",
        "--logger.experiment_id=t",
    ]
    monkeypatch.setenv(CACHE_VARIABLE, str(here / "a"))
    assert main(words) == 0
    assert list(here.glob("a/converted/streaming_params_7@*/model.safetensors"))
    config = memory.cat("/bk/out/sft/t/config.yaml").decode()
    assert "path: converted/streaming_params_7@" in config and str(here) not in config
    # Another machine, whose run is refused before it converts anything.
    capsys.readouterr()
    monkeypatch.setenv(CACHE_VARIABLE, str(here / "b"))
    assert main(words) == 2
    assert "contains a finished run of this configuration" in capsys.readouterr().err
    assert not (here / "b" / "converted").exists()
    # A stopped run continues there.
    status = json.loads(memory.cat("/bk/out/sft/t/status.json"))
    memory.pipe("/bk/out/sft/t/status.json", json.dumps({**status, "status": "stopped"}).encode())
    assert main(words) == 0
    assert "finished after step 1 of 1" in capsys.readouterr().out


MISSING = "--train_dataset.json_torch_dataset.path=none.jsonl"
UNUSABLE = [
    ([MISSING], "dataset.train_path='none.jsonl': there is no such file"),
    (["no_such=1"], "unknown option 'no_such'"),
    (["--load_checkpoint=params::cut"], "params::cut: at byte .* the file is damaged"),
    (["--update_llama_config={'hidden_size': 64}"], "unlike a model of this size"),
    (
        ["--logger.output_dir=foo://bk/out"],
        "foo://bk/out.* is a URL of a kind that fsspec does not know",
    ),
    (["model.optimizer.lrr=1"], "model.optimizer.lrr"),
]


@pytest.mark.parametrize("plan", [[], ["--dry-run"], ["--cfg", "job"], ["--print-script"]])
@pytest.mark.parametrize(("words", "message"), UNUSABLE)
def test_nothing_is_converted_for_bad_input(
    words: list[str],
    message: str,
    plan: list[str],
    here: Path,
    stream: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "cut").write_bytes((here / "streaming_params_7").read_bytes()[:4000])
    mode = ["mode=slurm"] if plan == ["--print-script"] else []
    assert main([*stream, *words, *plan, *mode]) == 2
    assert re.search(message, capsys.readouterr().err)
    check_unwritten(here)


@pytest.mark.slow  # imports jax
def test_nothing_is_converted_for_devices_and_packages_that_are_missing(
    here: Path,
    stream: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from weft.engine.backends import jax

    assert main([*stream, "--backend=jax", "--mesh_dim=1,1,1", "device=tpu"]) == 2
    assert re.search("error: device=tpu: jax has no|is not installed", capsys.readouterr().err)
    monkeypatch.setattr(jax, "find_spec", lambda name: None)
    assert main([*stream, "--backend=jax", "--mesh_dim=1,1,1"]) == 2
    assert "'jax' is not installed" in capsys.readouterr().err
    # A plan needs only the model's configuration.
    assert main([*stream, "--backend=jax", "--mesh_dim=1,1,1", "device=tpu", "--dry-run"]) == 0
    check_unwritten(here)


def test_plans_name_the_model_that_the_run_will_have(
    here: Path, stream: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*stream, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    (name,) = set(re.findall(r"streaming_params_7@[0-9a-f]{12}", plan))
    assert f"model: runs/converted/{name}, learning rate" in plan and "1 step" in plan
    assert main([*stream, "--cfg", "job"]) == 0
    assert f"\n  path: runs/converted/{name}\n" in capsys.readouterr().out
    assert main([*stream, "--print-script", "mode=slurm"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH" in script and f"model.path=runs/converted/{name}" in script
    assert str(here / "temporary") not in plan + script
    check_unwritten(here)


def test_models_of_runs_in_a_bucket_are_converted_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = TranslatedCommand("sft", {"fileroot": "gs://bucket/out"})
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert choose_folder(bucket) == Path("/x/weft/buckets/converted")
    monkeypatch.setenv(CACHE_VARIABLE, "/y")
    assert choose_folder(bucket) == Path("/y/converted")
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
