"""Stacks of Open-Assistant's sections: which value takes precedence, and where it came from.

The sections are in weft's keys and in Open-Assistant's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.cli import overrides
from weft.cli.sections import READY, SectionLibrary, _read_shipped
from weft.cli.stack import SectionStack, guess_quickstart, read_stack
from weft.errors import ConfigError
from weft.experiments import DPOConfig, GRPOConfig, PPOConfig, RWConfig, SFTConfig
from weft.experiments.common import RunConfig
from weft.options import to_plain

# Every section of Open-Assistant's files, and the names that only its guide has.
NAMES = """
defaults use_system_tag webgpt_dataset_only per_digit_tokens math pretrain oasst_only reference-data oasst_export_eu
oasst_export_latin_cyrillic oasst-top1 sft-8-datasets sft-8.1-datasets falcon-7b llama-7b llama-13b llama-30b
llama-13b-pretrain llama-30b-pretrain llama-30b-sft-6 llama-30b-sft-8 lora-llama-13b lora-llama-30b lora-llama-65b
pythia-70m-deduped pythia-1B pythia-6.9B pythia-12B pythia-12b-pretrain reference-pythia-12b pythia-12b-sft-8 gpt-neox
galactica-125m gpt-jt cerebras_13B cerebras_6.7B codegen debug rope_scaling_test falcon_7b_ntk_test
llama2_13b_orcacode2_8k defaults_rm oasst-rm-1-pythia-6.9b oasst-rm-1-pythia-2.8b oasst-rm-1-pythia-1.4b defaults_rlhf
oasst_export_latin_cyrillic_rlhf pythia_rlhf llama_rlhf debug_rlhf oasst-rm-1-pythia-1b pythia-1b ppo_config
"""
THEIRS = NAMES.split()
SHIPPED = tuple(_read_shipped())  # read once for all tests
CONFIGS = """\
low:
  learning_rate: 1e-5
  gradient_accumulation_steps: 32
  per_device_train_batch_size: 2
  warmup_steps: 600
  save_strategy: steps
  save_steps: 1000
  datasets: [webgpt, squad_v2]
  datasets_extra: []
high:
  learning_rate: 8e-6
  per_device_train_batch_size: 4
  save_strategy: epoch
  datasets:
    - alpaca: {fraction: 0.5, val_split: 0.1}
math:
  datasets_extra: [minimath]
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
    monkeypatch.setattr("weft.cli.sections._read_shipped", lambda: SHIPPED)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # wandb is not installed
    return tmp_path


def stack(*names: str, base: RunConfig | None = None, words: tuple[str, ...] = ()) -> SectionStack:
    return read_stack(
        names, SectionLibrary.from_folders(), base or SFTConfig(), overrides.parse(words)
    )


def values(
    *names: str, base: RunConfig | None = None, words: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        each.name: to_plain(each.value) for each in stack(*names, base=base, words=words).overrides
    }


def test_later_sections_and_the_command_line_go_over_earlier_ones() -> None:
    assert values("low")["model.optimizer.lr"] == 1e-5
    assert values("low", "high")["model.optimizer.lr"] == 8e-6
    assert values("high", "low")["model.optimizer.lr"] == 1e-5
    assert values("low", "high", words=("learning_rate=2e-6",))["model.optimizer.lr"] == 2e-6
    assert values("low", "high", words=("model.optimizer.lr=2e-6",))["model.optimizer.lr"] == 2e-6


def test_the_two_spellings_of_an_option_in_two_sections() -> None:
    assert values("low", "ours")["model.optimizer.lr"] == 3e-6
    assert values("ours", "low")["model.optimizer.lr"] == 1e-5
    with pytest.raises(
        ConfigError,
        match=r"configs/a.yaml:31: model.optimizer.lr and learning_rate .* are the same option",
    ):
        stack("both")


def test_their_lists_are_replaced_and_the_extra_ones_added() -> None:
    assert [each["named"] for each in values("low")["dataset.sources"]] == ["webgpt", "squad_v2"]
    assert values("low", "high", "math")["dataset.sources"] == [
        {"named": "alpaca", "fraction": 0.5, "valid_split": 0.1},
        {"named": "minimath"},
    ]


def test_our_groups_are_merged_deeply() -> None:
    made = values("ours", "deeper")
    assert (
        made["model.lora.r"] == 8
        and made["model.lora.alpha"] == 4
        and made["dataset.max_seqlen"] == 99
    )


def test_batches_multiply_over_sections_and_devices() -> None:
    assert values("low")["dataset.train_bs_n_seqs"] == 64
    assert values("low", "high")["dataset.train_bs_n_seqs"] == 128
    assert (
        values("low", words=("gradient_accumulation_steps=1", "model.layout=d4"))[
            "dataset.train_bs_n_seqs"
        ]
        == 8
    )
    assert values("low", words=("dataset.train_bs_n_seqs=5",))["dataset.train_bs_n_seqs"] == 5


def test_what_saves_is_decided_by_the_last_strategy() -> None:
    assert values("low")["save_freq_steps"] == 1000
    made = values("low", "high")
    assert made["save_freq_epochs"] == 1 and "save_freq_steps" not in made


def test_an_option_that_excludes_an_earlier_one_takes_its_place() -> None:
    made = values("low", "tokens")
    assert made["dataset.train_tokens_per_batch"] == 4096 and "dataset.train_bs_n_seqs" not in made
    assert (
        made["model.optimizer.warmup_steps_proportion"] == 0.1
        and "model.optimizer.warmup_steps" not in made
    )


def test_a_key_can_be_taken_out_and_a_group_changed_on_the_command_line() -> None:
    assert "model.optimizer.warmup_steps" not in values("low", words=("~warmup_steps",))
    made = values(
        "pythia_rlhf",
        base=PPOConfig(),
        words=("triton_host_rm=null", "rank_config.model_name=mine"),
    )
    assert made["rew.path"] == "mine" and made["rew.pooling"] == "last" and "rew.url" not in made


def test_a_key_of_a_group_and_an_option_beside_it_on_the_command_line() -> None:
    words = ("rank_config.model_name=mine", "rew.dtype=float32", "triton_host_rm=null")
    made = stack("pythia_rlhf", base=PPOConfig(), words=words)
    found = {each.name: to_plain(each.value) for each in made.overrides}
    assert (
        found["rew.path"] == "mine"
        and found["rew.dtype"] == "float32"
        and found["rew.pooling"] == "last"
    )
    assert str(made.origins["rew.path"][1]) == "command line"
    pooling = (
        SectionLibrary.from_folders().get("pythia_rlhf").find_location("rank_config", "pooling")
    )
    assert str(made.origins["rew.pooling"][1]) == f"pythia_rlhf, {pooling}"
    with pytest.raises(
        ConfigError, match=r"rew.path and rank_config.model_name .* are the same option"
    ):
        stack("pythia_rlhf", base=PPOConfig(), words=(*words, "rew.path=other"))


def test_a_parameter_of_an_entry_on_the_command_line() -> None:
    words = ("datasets.oasst_export.input_file_path=trees.jsonl", "datasets.alpaca.size=7")
    sources = values("reference-data", words=words)["dataset.sources"]
    assert sources[0]["path"] == "trees.jsonl" and sources[0]["valid_split"] == 0.05
    assert sources[1] == {"named": "alpaca", "size": 7}
    with pytest.raises(ConfigError, match=r"no entry 'alpacca'; did you mean datasets.alpaca\?"):
        stack("reference-data", words=("datasets.alpacca.size=7",))


def test_unknown_keys_are_named_with_file_line_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        stack("wrong")
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "configs/a.yaml:33: section 'wrong': unknown key 'learning_rat'; did you mean learning_rate"
    )
    assert second.startswith(
        "configs/a.yaml:34: section 'wrong': unknown key 'model.lora.ranks'; did you mean "
        "model.lora"
    )


def test_a_value_that_is_refused_is_named_with_file_and_line(here: Path) -> None:
    (here / "configs" / "b.yaml").write_text(
        "bad:\n  dtype: int3\n  datasets:\n    - webgpt\n    - alpaca: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        stack("bad")
    assert sorted(str(caught.value).splitlines()) == [
        "configs/b.yaml:2: section 'bad': dtype=int3: must be one of fp16, float16, bf16, "
        "bfloat16, fp32, float32",
        "configs/b.yaml:5: section 'bad': datasets[1]: alpaca: 3 is not a parameter; an entry is '- "
        "name' or '- name:' with its "
        "parameters (fraction, size, val_split, ...) indented below it",
    ]


def test_a_wrong_type_is_told_where_it_is(here: Path) -> None:
    made = stack("low", "high")
    error = made.add_origin(ConfigError("model.optimizer.lr='x': must be a number"))
    assert (
        str(error)
        == "model.optimizer.lr='x': must be a number (high, configs/a.yaml:11, learning_rate)"
    )


def test_the_lines_say_where_each_value_came_from() -> None:
    lines = [
        " ".join(line.split()) for line in stack("low", "high", words=("seed=4",)).format_lines()
    ]
    assert lines[0] == "settings: low high"
    assert "model.optimizer.lr = 8e-06 # high, configs/a.yaml:11, learning_rate" in lines
    assert "seed = 4 # command line" in lines


def test_a_run_is_named_after_its_quickstart_and_sections() -> None:
    made = values("defaults", "oasst_export_eu", "pythia-1b")
    assert (made["experiment_name"], made["trial_name"]) == (
        "sft",
        "defaults-oasst-export-eu-pythia-1b",
    )
    assert values("low", words=("trial_name=t",))["trial_name"] == "t"


def test_the_rl_trainer_reads_trlx_beside_its_sections() -> None:
    made = stack(
        "defaults",
        "defaults_rlhf",
        "pythia_rlhf",
        "oasst_export_latin_cyrillic_rlhf",
        base=PPOConfig(),
    )
    found = {each.name: each.value for each in made.overrides}
    assert (
        made.names[0] == "ppo_config"
        and found["ppo.kl_ctl"] == 0.1
        and found["ppo.eps_clip"] == 0.4
    )
    assert found["actor.optimizer.lr"] == 1e-6 and found["dataset.train_bs_n_seqs"] == 16
    assert any(
        note.startswith("learning_rate, ") and "RL does not read it" in note for note in made.notes
    )
    assert (
        values("pythia_rlhf", base=PPOConfig(), words=("learning_rate=1e-7",))["actor.optimizer.lr"]
        == 1e-7
    )


@pytest.mark.parametrize(
    "words",
    [
        (
            "trlx.method.ppo_epochs=1",
            "trlx.method.gen_kwargs.top_p=0.9",
            "trlx.optimizer.kwargs.lr=1e-4",
        ),
        ("method.ppo_epochs=1", "method.gen_kwargs={top_p: 0.9}", "optimizer.kwargs.lr=1e-4"),
        ("ppo_epochs=1", "gen_kwargs.top_p=0.9", "lr=1e-4"),
        ("~method.gen_kwargs.top_p", "ppo_epochs=1", "top_p=0.9", "lr=1e-4"),
    ],
)
def test_keys_of_trlx_on_the_command_line_go_without_their_prefix(words: tuple[str, ...]) -> None:
    """They count where the sections' own do: a round's passes decide how many rounds total_steps
    are.
    """
    made = values(
        "defaults_rlhf", "pythia_rlhf", base=PPOConfig(), words=("triton_host_sft=null", *words)
    )
    assert (made["ppo.ppo_epochs"], made["ppo.gen.top_p"], made["actor.optimizer.lr"]) == (
        1,
        0.9,
        1e-4,
    )
    assert made["max_steps"] == 625 and "trlx.method.gen_kwargs.top_p" not in made
    before = values(
        "defaults_rlhf", "pythia_rlhf", base=PPOConfig(), words=("triton_host_sft=null", words[0])
    )
    assert before["max_steps"] == (157 if words[0].startswith("~") else 625)
    assert ("ppo.gen.top_p" in before) != words[0].startswith("~")


@pytest.mark.parametrize(
    ("word", "wrong"),
    [
        ("name=x", "name: write optimizer.name or scheduler.name or method.name"),
        (
            "method.gen_kwargs.topp=0.9",
            "unknown key 'method.gen_kwargs.topp'; did you mean method.gen_kwargs.top_p",
        ),
        ("ppo_epoch=3", "unknown key 'ppo_epoch'; did you mean ppo.ppo_epochs"),
        ("vf_coef=0.5", r"command line: method.vf_coef=0.5: the critic .* write 1"),
    ],
)
def test_keys_that_trlx_lacks_are_refused_with_those_that_work(word: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        values("defaults_rlhf", "pythia_rlhf", base=PPOConfig(), words=(word,))


@pytest.mark.parametrize(
    "named", [section.name for contents in SHIPPED for section in contents.sections]
)
def test_every_shipped_section_is_understood(named: str) -> None:
    """Defect 1: keys that one section needs and another lacks.

    Here, every section also works on top of weft's defaults alone.
    """
    section = SectionLibrary.from_folders().get(named)
    quickstart = guess_quickstart([section])
    base = {
        "sft": SFTConfig,
        "rw": RWConfig,
        "ppo": PPOConfig,
        "dpo": DPOConfig,
        "grpo": GRPOConfig,
    }[quickstart]()
    before = {"sft": "defaults", "rw": "defaults_rm", "ppo": "defaults_rlhf"}.get(quickstart, "")
    recipe = section.file.startswith(f"weft:{READY}/")  # a section that specifies a whole run
    for names in ([named],) if recipe or not before else ([named], [before, named]):
        assert stack(*names, base=base).overrides


def test_the_reward_models_section_of_the_guide() -> None:
    made = values("defaults_rm", "oasst-rm-1-pythia-1b", base=RWConfig())
    assert made["model.path"] == "EleutherAI/pythia-1b-deduped" and made["rw.score_l2"] == 0.001
    assert made["model.optimizer.lr"] == 8e-6 and made["total_train_epochs"] == 2


def test_what_sections_are_meant_for() -> None:
    library = SectionLibrary.from_folders()
    for name, quickstart in (
        ("defaults", "sft"),
        ("defaults_rm", "rw"),
        ("ppo_config", "ppo"),
        ("pythia_rlhf", "ppo"),
        ("rw-ultrafeedback-qwen3-0.6b", "rw"),
        ("grpo-gsm8k-qwen3-8b", "grpo"),
    ):
        assert guess_quickstart([library.get(name)]) == quickstart


def test_every_section_of_theirs_is_shipped(here: Path) -> None:
    library = SectionLibrary.from_folders()
    assert set(THEIRS) <= {section.name for section in library.iterate_sections()}
    assert library.get("pythia-1B").values["learning_rate"] == 8e-6
    assert library.get("ppo_config").foreign and library.get("defaults").find_location(
        "dtype"
    ).startswith("weft:sft_data.yaml:")
