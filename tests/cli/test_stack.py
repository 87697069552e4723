"""Stacks of sections in weft's own options: what goes over what, and where each value came from.

Open-Assistant's keys are tested in tests/compat/open_assistant/test_sections.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft import registry
from weft.cli import overrides
from weft.cli.sections import READY, SectionLibrary, find_shipped_file
from weft.cli.stack import SectionStack, guess_quickstart, read_stack
from weft.errors import ConfigError
from weft.experiments import SFTConfig
from weft.experiments.common import RunConfig
from weft.options import to_plain

CONFIGS = """\
low:
  learning_rate: 1e-5
  gradient_accumulation_steps: 32
  per_device_train_batch_size: 2
  model.optimizer.warmup_steps: 600
high:
  learning_rate: 8e-6
  per_device_train_batch_size: 4
ours:
  model:
    path: M
    lora: {r: 8}
  dataset.max_seqlen: 99
  model.optimizer.lr: 3e-6
deeper:
  model: {lora: {alpha: 4}}
tokens:
  dataset: {train_tokens_per_batch: 4096}
  model.optimizer.warmup_steps_proportion: 0.1
both:
  learning_rate: 1e-5
  model.optimizer.lr: 2e-5
wrong:
  learning_rat: 1e-5
  model: {lora: {ranks: 8}}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "a.yaml").write_text(CONFIGS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stack(*names: str, base: RunConfig | None = None, words: tuple[str, ...] = ()) -> SectionStack:
    return read_stack(
        names, SectionLibrary.from_folders(), base or SFTConfig(), overrides.parse(words)
    )


def values(*names: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
    return {each.name: to_plain(each.value) for each in stack(*names, words=words).overrides}


def test_later_sections_and_the_command_line_go_over_earlier_ones() -> None:
    assert values("low")["model.optimizer.lr"] == 1e-5
    assert values("low", "high")["model.optimizer.lr"] == 8e-6
    assert values("high", "low")["model.optimizer.lr"] == 1e-5
    assert values("low", "high", words=("learning_rate=2e-6",))["model.optimizer.lr"] == 2e-6
    assert values("low", "high", words=("model.optimizer.lr=2e-6",))["model.optimizer.lr"] == 2e-6


def test_the_two_spellings_of_an_option_in_two_sections() -> None:
    assert values("low", "ours")["model.optimizer.lr"] == 3e-6
    assert values("ours", "low")["model.optimizer.lr"] == 1e-5
    with pytest.raises(ConfigError, match="are the same option"):
        stack("both")


def test_groups_are_merged_deeply() -> None:
    made = values("ours", "deeper")
    assert (made["model.lora.r"], made["model.lora.alpha"], made["dataset.max_seqlen"]) == (
        8,
        4,
        99,
    )


def test_batches_multiply_over_sections_and_devices() -> None:
    assert values("low")["dataset.train_bs_n_seqs"] == 64
    assert values("low", "high")["dataset.train_bs_n_seqs"] == 128
    words = ("gradient_accumulation_steps=1", "model.layout=d4")
    assert values("low", words=words)["dataset.train_bs_n_seqs"] == 8
    assert values("low", words=("dataset.train_bs_n_seqs=5",))["dataset.train_bs_n_seqs"] == 5


def test_an_option_that_excludes_an_earlier_one_takes_its_place() -> None:
    made = values("low", "tokens")
    assert made["dataset.train_tokens_per_batch"] == 4096 and "dataset.train_bs_n_seqs" not in made
    assert made["model.optimizer.warmup_steps_proportion"] == 0.1
    assert "model.optimizer.warmup_steps" not in made


def test_an_option_can_be_taken_out_on_the_command_line() -> None:
    (removed,) = (
        each
        for each in stack("low", words=("~model.optimizer.warmup_steps",)).overrides
        if each.name == "model.optimizer.warmup_steps"
    )
    assert removed.removed


def test_unknown_keys_are_named_with_file_line_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        stack("wrong")
    first, second = str(caught.value).splitlines()[:2]
    where = "configs/a.yaml:{}: section 'wrong': unknown key '{}'; did you mean {}"
    assert first.startswith(where.format(24, "learning_rat", "learning_rate"))
    assert second.startswith(where.format(25, "model.lora.ranks", "model.lora"))
    with pytest.raises(ConfigError, match="unknown key 'learning_rat'; did you mean learning_rate"):
        stack("low", words=("learning_rat=1",))


def test_a_wrong_type_is_reported_with_its_place() -> None:
    error = stack("low", "ours").add_origin(ConfigError("model.optimizer.lr='x': must be a number"))
    assert str(error) == "model.optimizer.lr='x': must be a number (ours, configs/a.yaml:14)"


def test_lines_have_the_origin_of_each_value() -> None:
    made = stack("low", "ours", words=("seed=4",)).format_lines()
    lines = [" ".join(line.split()) for line in made]
    assert lines[0] == "settings: low ours"
    assert "model.optimizer.lr = 3e-06 # ours, configs/a.yaml:14" in lines
    assert "model.lora.r = 8 # ours, configs/a.yaml:12" in lines
    assert "seed = 4 # command line" in lines
    assert "trial_name = low-ours # the names of the sections" in lines


def test_a_run_is_named_after_its_quickstart_and_sections() -> None:
    made = values("ours", "deeper")
    assert (made["experiment_name"], made["trial_name"]) == ("sft", "ours-deeper")
    assert values("ours", words=("trial_name=t",))["trial_name"] == "t"


@pytest.mark.default_cases(
    "dpo-lora", "grpo-gsm8k-qwen3-0.6b", "ppo-tldr", "rw-ultrafeedback-qwen3", "sft-tulu3-llama3.2"
)
@pytest.mark.parametrize(
    "named", sorted(path.stem for path in find_shipped_file(f"weft:{READY}").glob("*.yaml"))
)
def test_every_recipe_is_complete(named: str) -> None:
    quickstart = guess_quickstart([SectionLibrary.from_folders().get(named)])
    assert quickstart == named.split("-")[0]
    assert stack(named, base=registry.quickstarts.get(quickstart)()).overrides


def test_the_quickstart_is_guessed_from_sections(here: Path) -> None:
    (here / "configs" / "b.yaml").write_text("p: {ppo.kl_ctl: 0.1}\ng: {grpo: {group_size: 2}}\n")
    library = SectionLibrary.from_folders()
    assert guess_quickstart([library.get("low")]) == "sft"
    assert guess_quickstart([library.get("low"), library.get("g")]) == "grpo"
