"""Candidates for completion: commands, options level by level, values, sections, runs and files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.runs import write_run
from weft.cli.completion import find_candidates
from weft.cli.main import COMMANDS
from weft.registry import datasets


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs", "first/sft")
    write_run(tmp_path / "runs", "second/ppo")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sft.jsonl").write_text("{}\n")
    return tmp_path


def words(*given: str) -> list[str]:
    *before, current = given
    return [word for word, _ in find_candidates(before, current)]


def test_commands_and_quickstarts(folder):
    assert words("") == list(COMMANDS)
    assert words("qu") == ["quickstart"] and words("--v") == ["--version"]
    assert words("quickstart", "on") == ["online_dpo"]
    assert words("bogus", "") == []


def test_options_open_by_their_dots(folder):
    assert words("quickstart", "ppo", "act") == [
        "actor.",
        "actor_gen.",
        "actor_train.",
        "actor_inf.",
    ]
    assert "actor.optimizer.lr=" in words("quickstart", "ppo", "actor.opt"), (
        "a group that stands alone is opened"
    )
    assert words("quickstart", "ppo", "ppo.gen.top_") == ["ppo.gen.top_p=", "ppo.gen.top_k="]
    assert words("quickstart", "ppo", "seed=3", "se") == words("quickstart", "ppo", "search."), (
        "no seed twice"
    )
    assert dict(find_candidates(["quickstart", "sft"], "max_st"))["max_steps="].startswith(
        "number of steps"
    )


def test_words_of_a_planned_run_are_those_of_quickstart(folder):
    (folder / "plan.yaml").write_text("weft_plan: 1\n")
    for command in ("search", "run", "cost"):
        assert words("plan", command, "on") == ["online_dpo"]
        assert words("plan", command, "sft", "model.dtype=b") == ["model.dtype=bfloat16"]
    assert words("plan", "search", "sft", "--out") == ["--output"]
    assert words("plan", "search", "sft", "--output", "pl") == ["plan.yaml"]
    assert words("plan", "run", "sft", "allocation_mode=pl") == ["allocation_mode=plan.yaml"]
    assert words("quickstart", "sft", "allocation_mode=s") == ["allocation_mode=search"]
    assert "run" in words("plan", "")


def test_values(folder):
    assert words("quickstart", "sft", "model.dtype=b") == ["model.dtype=bfloat16"]
    assert words("quickstart", "sft", "tf32=") == ["tf32=true", "tf32=false"]
    assert "reward=gsm8k" in words("quickstart", "grpo", "reward=")
    shipped = datasets.list_shipped()  # other tests register types of their own
    types = words("quickstart", "sft", "dataset.type=pr")
    assert [word for word in types if word.partition("=")[2] in shipped] == [
        "dataset.type=preference",
        "dataset.type=prompt",
        "dataset.type=prompt_answer",
    ]
    assert "model.tokenizer.chat_template=chatml" in words(
        "quickstart", "sft", "model.tokenizer.chat_template=c"
    )
    assert words("quickstart", "sft", "model.path=ru") == [
        "model.path=runs/first/sft",
        "model.path=runs/second/ppo",
    ]
    assert words("quickstart", "sft", "dataset.path=data/s") == ["dataset.path=data/sft.jsonl"]
    assert (
        words("quickstart", "sft", "seed=") == [] and words("quickstart", "sft", "nothing=") == []
    )


def test_flags_and_their_values(folder):
    assert {"--config", "--configs", "--config-dir"} <= set(words("quickstart", "sft", "--co"))
    assert words("quickstart", "sft", "--cfg", "") == ["job"]
    assert words("quickstart", "ppo", "--help", "ppo") == ["ppo", "ppo.gen"]
    assert "grpo-gsm8k-qwen3-8b" in words("quickstart", "sft", "--configs", "grpo")
    assert words("quickstart", "--config", "da") == ["data/"]


def test_other_commands_by_their_own_help(folder):
    assert words("data", "ins") == ["inspect"] and "--tokenizer" in words("data", "inspect", "--t")
    assert words("config", "") == ["ls", "show", "cp", "validate"]
    assert words("data", "trees", "") == ["stats", "filter", "split", "flatten", "build"]
    assert words("launch", "") == ["tpu"] and words("launch", "tpu", "cr") == ["create"]
    assert words("launch", "tpu", "stop", "--n") == ["--name", "--now"]
    assert words("launch", "tpu", "start", "--", "quickstart", "sf") == ["sft"]
    assert words("launch", "tpu", "run", "--w") == ["--worker"]
    assert words("launch", "tpu", "run", "--", "") == ["weft"]
    assert words("launch", "tpu", "run", "--", "weft", "quickstart", "sf") == ["sft"]
    assert words("launch", "tpu", "run", "--", "python", "") == []
    assert "grpo-gsm8k-qwen3-8b" in words("config", "show", "grpo")
    assert words("ls", "--so") == ["--sort"] and words("completion", "z") == ["zsh"]


def test_runs(folder):
    assert words("show", "runs/f") == ["runs/first/sft"] and words("show", "lat") == ["latest"]
    assert words("rm", "runs/first/sft", "runs/s") == ["runs/second/ppo"]
    assert words("chat", "runs/first/sft/ch") == ["runs/first/sft/checkpoints/"]
    assert words("stop", "-e", "") == ["first", "second"] and words(
        "stop", "-e", "second", "-f", ""
    ) == ["ppo"]


MINE = """
from dataclasses import dataclass
{heavy}
from weft import register_quickstart
from weft.experiments import SFTConfig
from weft.options import option

@register_quickstart("{name}")
@dataclass
class Mine(SFTConfig):
    speed: int = option(1, "how fast")
"""


def test_user_code_is_imported_only_if_it_is_cheap(folder):
    (folder / "light.py").write_text(MINE.format(name="test-light", heavy=""))
    (folder / "heavy.py").write_text(MINE.format(name="test-heavy", heavy="import torch"))
    given = ["quickstart", "--import", "light.py", "--import", "heavy.py"]
    assert words(*given, "test-") == ["test-heavy", "test-light"]
    assert words(*given, "test-light", "spe") == ["speed="]
    assert words(*given, "test-heavy", "spe") == []


def test_it_loads_no_framework(folder):
    code = (
        "import sys\nfrom weft.cli.main import main\n"
        "for w in ([''], ['quickstart', 'ppo', 'a'], ['eval', 'rm', '--'], ['chat', '--'], ['rm', "
        "''], ['stop', '-e', '']):\n"
        "    main(['completion', 'words', '--', *w])\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.stderr.strip().splitlines()[-1] == "[]", done.stderr
    assert "quickstart\ttrain" in done.stdout and "runs/first/sft\ta run" in done.stdout
