"""Command lines of EasyLM's scripts: how they are read, and what is wrong with them."""

from __future__ import annotations

import re

import pytest

from weft.compat.easylm.arguments import TranslatedCommand, format_value, parse_flags
from weft.errors import ConfigError
from weft.options import to_plain


def test_forms_of_flags() -> None:
    words = ["--seed", "7", "--log_all_worker", "--nouse_ipo", "--dpo_beta=0.5", "--tokenizer=a=b"]
    given = parse_flags("llama_train_dpo", words)
    assert given.values == {
        "seed": 7,
        "log_all_worker": True,
        "use_ipo": False,
        "dpo_beta": 0.5,
        "tokenizer": "a=b",
    }
    assert given.get("seed") == 7 and given.get("log_freq") == 50 and given.get("dtype") == "fp32"
    assert parse_flags("llama_train_ppo", []).get("dtype") == "bf16"


def test_an_empty_value_unsets_a_flag() -> None:
    given = parse_flags("llama_train", ["--seed=7", "--seed=", "--dtype="])
    assert given.values == {} and given.get("seed") == 42
    prefix = "train_dataset.hf_prompt_dataset.reward_prefix_tokens"
    assert parse_flags("llama_train_ppo", [f"--{prefix}="]).get(prefix) == ""


def test_options_and_flags_of_weft_are_passed_on() -> None:
    words = ["--seed=1", "max_steps=3", "--dry-run", "--cfg", "job", "--import=a.py", "-v"]
    assert parse_flags("llama_train", words).passed == (
        "max_steps=3",
        "--dry-run",
        "--cfg",
        "job",
        "--import=a.py",
        "-v",
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--laod_checkpoint=x",
            "unknown flag '--laod_checkpoint'; did you mean --load_checkpoint?",
        ),
        ("--kl_coef=0.1", "unknown flag '--kl_coef'; it is a flag of llama_train_ppo"),
        ("--optimizer.adamw.lr=1", "did you mean --optimizer.adamw_optimizer.lr"),
        ("--zzzz=1", "unknown flag '--zzzz'; weft easylm llama_train --help lists the flags"),
        ("checkpoint", "unknown flag 'checkpoint'; flags are written --flag=value"),
        ("--seed", "--seed: needs a value; write --seed=VALUE"),
        ("--seed=one", "--seed=one: must be a whole number"),
        ("--optimizer.adamw_optimizer.lr=fast", "lr=fast: must be a number"),
        ("--log_all_worker=maybe", "--log_all_worker=maybe: must be true or false"),
    ],
)
def test_what_is_wrong_is_said(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_flags("llama_train", words.split())


@pytest.mark.parametrize(
    ("name", "word", "rule"),
    [
        ("llama_train_ppo", "--forward_mini_batch_size=0", "must be at least 1"),
        ("llama_train_ppo", "--forward_mini_batch_size=-8", "must be at least 1"),
        ("llama_train_ppo", "--rollouts_per_prompt=0", "must be at least 1 and at most 65536"),
        ("llama_train_ppo", "--gamma=1.5", "must be at least 0 and at most 1"),
        ("llama_train_ppo", "--cliprange_value=0", "must be above 0"),
        ("llama_train_ppo", "--temperature=inf", "must be a finite number"),
        ("llama_train_ppo", "--max_steps_per_epoch=-1", "must be at least 0"),
        ("llama_train_online_dpo", "--beta=0", "must be above 0"),
        ("llama_train_dpo", "--dpo_label_smoothing=0.5", "must be at least 0 and below 0.5"),
        ("llama_train", "--log_freq=-7", "must be at least 1"),
        ("llama_train", "--save_model_freq=-5", "must be at least 0"),
        ("llama_train", "--total_steps=-1", "must be at least 0"),
        ("llama_train", "--llama.vocab_size=0", "must be above 0"),
        ("llama_train", "--optimizer.adamw_optimizer.lr=nan", "must be a finite number"),
        ("llama_train", "--train_dataset.json_torch_dataset.batch_size=0", "must be at least 1"),
        ("llama_train", "--train_dataset.json_torch_dataset.seq_length=0", "must be at least 2"),
        ("llama_train", "--eval_dataset.json_torch_dataset.batch_size=0", "must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_the_flag(name: str, word: str, rule: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_flags(name, [word])
    assert str(told.value) == f"{word}: {rule}"


def test_values_are_written_in_hydras_grammar() -> None:
    from weft.cli import overrides

    texts = [
        "params::a b",
        "<|user|>\n",
        "it's \\n",
        "\\'",
        "a\\",
        "1,-1,8",
        "a/b.jsonl",
        "7b",
        "null",
        "True",
    ]
    values = [None, True, 1e-06, -10.0, *texts]
    for value in values:
        (parsed,) = overrides.parse([f"x={format_value(value)}"])
        read = to_plain(parsed.value)
        assert read == value and type(read) is type(value), value
    source = [{"path": "a b", "split": "train[:10%]", "size": 3}]
    assert to_plain(overrides.parse([f"x={format_value(source)}"])[0].value) == source


def test_words_of_the_command() -> None:
    done = TranslatedCommand("sft", {"seed": 1, "model.path": "m"}, passed=("--dry-run",))
    assert done.format_words() == ["quickstart", "sft", "seed=1", "model.path=m", "--dry-run"]
