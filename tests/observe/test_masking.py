"""What is masked in a command and a configuration, and what is not."""

from __future__ import annotations

import pytest

from weft.observe.masking import is_secret, masked, masked_words


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "launch.env.HF_TOKEN", "api_key", "apikey", "my-secret", "db.password", "key"]
)
def test_names_that_tell(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["model.tokenizer.eos_token", "tokenizer.add_bos_token", "dataset.args.prompt_key", "ppo.gen.max_new_tokens", "keys",
     "reward_by_token", "monkey", "tokenizer"],
)  # fmt: skip
def test_names_that_do_not(name):
    assert not is_secret(name)


def test_words_of_a_command():
    words = ["weft", "quickstart", "sft", "launch.env.HF_TOKEN=hf_123", "--api-key", "sk-1", "seed=3", "--token=abc",
             "launch.env={HF_TOKEN: hf_9, OMP_NUM_THREADS: 2}", "model.tokenizer.eos_token=</s>",
             "rew.url=http://me:pw@host:1/x"]  # fmt: skip
    assert masked_words(words) == [
        "weft", "quickstart", "sft", "launch.env.HF_TOKEN=***", "--api-key", "***", "seed=3", "--token=***",
        "launch.env={HF_TOKEN: ***, OMP_NUM_THREADS: 2}", "model.tokenizer.eos_token=</s>", "rew.url=http://***@host:1/x",
    ]  # fmt: skip


def test_a_configuration():
    config = {
        "launch": {"env": {"HF_TOKEN": "x", "A": "y"}},
        "tokenizer": {"eos_token": "</s>"},
        "list": [{"secret": 5}],
    }
    assert masked(config) == {
        "launch": {"env": {"HF_TOKEN": "***", "A": "y"}},
        "tokenizer": {"eos_token": "</s>"},
        "list": [{"secret": "***"}],
    }
    assert masked({"token": None}) == {"token": None}, "nothing to hide"
