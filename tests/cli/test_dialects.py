"""weft without `weft.compat`: everything else is imported and works, and what needs a dialect says so.

`make test-without-compat` runs the remaining tests without the package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layers import SRC, imports_of, modules
from weft.cli.dialects import DIALECTS

BLOCKED = "import sys; sys.modules['weft.compat'] = None\n"
OPTIONAL = [
    "ray",
    "wandb",
    "trackio",
    "tensorboard",
    "jax",
    "grpc",
    "uvicorn",
    "tritonclient",
    "google",
]
IMPORT_ALL = """
import importlib
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in {optional!r}:
            raise
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.mark.slow
def test_every_other_module_is_imported_without_the_package(tmp_path: Path) -> None:
    others = [name for name in modules() if not name.startswith("weft.compat")]
    assert len(others) > 300
    done = run(IMPORT_ALL.format(modules=others, optional=OPTIONAL), tmp_path)
    assert done.returncode == 0, done.stderr


def test_only_the_table_names_the_package() -> None:
    for name, path in modules().items():
        if name.startswith("weft.compat") or name == "weft.cli.dialects":
            continue
        assert "weft.compat" not in path.read_text(), name
        for _, target in imports_of(name, path):
            assert not target.startswith("weft.compat"), name


def test_the_table_names_modules_that_are_there() -> None:
    for module, what in DIALECTS.values():
        path = SRC / Path(*module.split(".")).with_suffix(".py")
        assert what and (path.is_file() or not (SRC / "weft" / "compat").exists())


@pytest.mark.default_cases("words0", "words1", "words2", "words3", "words4")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["quickstart", "sft", "model.path=m", "--deepspeed"],
            "DeepSpeed's configuration files: this installation of weft lacks the package weft.compat",
        ),
        (
            ["quickstart", "sft", "--configs", "theirs"],
            "configs/a.yaml:1: section 'theirs': unknown key 'loss_fn'",
        ),
        (
            ["config", "validate", "configs/a.yaml"],
            "Open-Assistant's config sections: this installation of weft lacks the package",
        ),
        (
            ["convert", "triton", "m", "--triton_mode", "rm"],
            "model stores for NVIDIA Triton: this installation of weft lacks the package",
        ),
        (
            ["chat", "configs", "--format", "v2"],
            "the command lines of other programs' scripts: this installation of weft lacks the package",
        ),
        (
            ["data", "counts", "--datasets", "gsm8k", "datasets.gsm8k.fraction=0.5"],
            "Open-Assistant's config sections: this installation of weft lacks the package",
        ),
    ],
)
def test_a_dialect_that_is_not_there_is_one_message(
    words: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("theirs: {loss_fn: CrossEntropyLoss}\n")
    done = run(f"from weft.cli.main import main; sys.exit(main({words!r}))", tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_script_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    code = "from weft.scripts.transform_to_pipe_ckpt import main; sys.exit(main(['--help']))"
    done = run(code, tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: the command lines of other")


HELPS = """
from contextlib import suppress
from weft.cli.main import main
from weft.cli.sections import list_example_sections
for command in ("", "quickstart", "quickstart sft", "chat", "convert", "config", "data", "data counts", "eval"):
    with suppress(SystemExit):
        main([*command.split(), "--help", *["all"] * command.endswith("sft")])
sys.exit(main(["config", "show", *list_example_sections(), "learning_rate=2e-6"]))
"""


def test_help_promises_no_dialect_that_is_not_there(tmp_path: Path) -> None:
    done = run(HELPS, tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert (
        "weft config cp sft-tldr-pythia-1b configs/mine.yaml" in said and "--print-script" in said
    )
    for word in ("oasst_export_eu", " pythia-1b", "--deepspeed", "triton  ", "v2.5"):
        assert word not in said, word


def test_what_needs_no_dialect_works(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text("ours: {learning_rate: 1e-5, model.path: m}\n")
    words = ["quickstart", "sft", "--configs", "ours", "max_length=99", "--cfg", "job"]
    names = "experiment_name=e", "trial_name=t"
    done = run(f"from weft.cli.main import main; sys.exit(main({[*words, *names]!r}))", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lr: 1.0e-05" in done.stdout and "max_seqlen: 99" in done.stdout
