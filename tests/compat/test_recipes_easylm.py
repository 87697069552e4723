"""Sections with the values of EasyLM's guide: the same runs as its commands, and they build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compat.easylm import guide
from weft.cli.main import main
from weft.cli.quickstart import build_config
from weft.compat.easylm.arguments import parse_flags
from weft.compat.easylm.flags import TRAINING
from weft.compat.easylm.translation import translate
from weft.experiments.common import RunConfig
from weft.options import iterate_options

SECTIONS = {
    "tulu2-sft-7b": ("llama_train", guide.SFT),
    "tulu2-dpo-7b": ("llama_train_dpo", guide.DPO),
    "tulu-ppo-13b": ("llama_train_ppo", guide.PPO),
}
# Models, data and names, which the guide reads from a bucket, and forms of rows.
OWN = ("path", "sources", "train_path", "type", "imports", "fileroot", "num_workers")
NAMES = ["experiment_name=e", "trial_name=t"]


def read_options(words: list[str]) -> dict[str, Any]:
    config, _ = build_config([*words, *NAMES])
    assert isinstance(config, RunConfig)
    leaves = {leaf.name: leaf.default for leaf in iterate_options(config)}
    return {
        name: value
        for name, value in leaves.items()
        if name.rpartition(".")[2] not in OWN and not name.startswith("logger.")
    }


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_the_values_of_the_guides_command(section: str) -> None:
    script, words = SECTIONS[section]
    command = translate(parse_flags(script, words), backend="jax")
    for role in command.streams:
        command.options[f"{role}.path"] = "m"
    quickstart = command.quickstart
    assert read_options([quickstart, "--configs", section]) == read_options(
        command.format_words()[1:]
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_listed_and_shown(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "ls", section]) == 0
    assert "weft:tulu.yaml:" in capsys.readouterr().out
    assert main(["config", "show", section]) == 0
    quickstart = TRAINING[SECTIONS[section][0]].quickstart
    assert capsys.readouterr().out.startswith(f"weft quickstart {quickstart} --configs {section}\n")
