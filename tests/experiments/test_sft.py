"""SFT with the options of Open-Assistant's recipes, on its real trees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import make_llama
from weft.cli import overrides
from weft.errors import ConfigError
from weft.experiments import RWConfig, SFTConfig
from weft.launch import run
from weft.options import read, validate


def config_of(data_dir: Path, tmp_path: Path) -> SFTConfig:
    made = SFTConfig(
        experiment_name="e",
        trial_name="t",
        fileroot=str(tmp_path),
        progress=False,
        total_train_epochs=2,
    )
    model, data = made.model, made.dataset
    model.path = str(make_llama(tmp_path / "hf", num_hidden_layers=3))
    model.tokenizer.chat_template, model.tokenizer.add_tokens = "oasst_v25", ["template"]
    model.freeze_layers, model.residual_dropout, model.residual_dropout_lima = 1, 0.3, True
    text = tmp_path / "text.jsonl"
    text.write_text(
        "\n".join(
            json.dumps({"text": "Once upon a time there was a girl. " * 20}) for _ in range(4)
        )
    )
    data.sources = [
        {"path": str(data_dir / "oasst" / "en_100_tree.jsonl"), "type": "chat", "size": 24},
        {"path": str(text), "type": "text"},
    ]
    data.max_seqlen, data.random_window, data.train_bs_n_seqs = 192, 0.8, 8
    data.system_prefix, data.system_tags, data.system_tag_length = "You are Joi.", True, True
    data.sample_mixing, data.sample_mixing_below = 0.4, 150
    made.sft.loss_type = "poly"
    made.model.optimizer.lr = 1e-2
    return made


@pytest.mark.slow
def test_the_options_together(data_dir: Path, tmp_path: Path) -> None:
    config = config_of(data_dir, tmp_path)
    done = run(config)
    losses = [line["train/loss"] for line in done.metrics]
    assert len(losses) >= 6 and all(math.isfinite(loss) for loss in losses)
    assert all(line["train/loss"] > line["train/nll"] for line in done.metrics), (
        "1 - p is added to every token's loss"
    )
    assert sum(losses[-2:]) < sum(losses[:2])
    saved = done.checkpoint("model")
    tokenizer, model = (
        AutoTokenizer.from_pretrained(saved),
        AutoModelForCausalLM.from_pretrained(saved),
    )
    assert model.config.vocab_size % 16 == 0 and model.config.vocab_size >= len(tokenizer)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|prompter|>") and ids[
        -1
    ] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    old = AutoModelForCausalLM.from_pretrained(config.model.path).get_input_embeddings().weight
    assert model.get_input_embeddings().weight[: len(old)].equal(old), "embeddings are frozen"


def test_sample_mixing_is_for_sft(data_dir: Path, tmp_path: Path) -> None:
    config = RWConfig(experiment_name="e", trial_name="t", fileroot=str(tmp_path))
    config.model.path, config.dataset.sample_mixing = str(make_llama(tmp_path / "hf")), 0.4
    config.dataset.train_path = str(data_dir / "oasst" / "en_100_tree.jsonl")
    with pytest.raises(ConfigError, match="only sft mixes"):
        config.build()


def test_the_options_as_they_are_typed() -> None:
    words = [
        "model.rope_scaling={type: linear, factor: 2}",
        "model.tokenizer.add_tokens=[template,'<|x|>']",
        "dataset.system_prefix='You are Joi, a bot.'",
        "sft.loss_type=poly",
        "model.freeze_layers=2",
    ]
    values: dict[str, Any] = {}
    for override in overrides.parse(words):
        overrides.merge(values, override)
    config = read(SFTConfig(), values)
    validate(config)
    assert config.model.rope_scaling == {"type": "linear", "factor": 2}
    assert config.model.tokenizer.add_tokens == ["template", "<|x|>"]
    assert config.dataset.system_prefix == "You are Joi, a bot."
    wrong = read(SFTConfig(), {"model": {"rope_scaling": {"type": "ntk", "factor": 2}}})
    with pytest.raises(ConfigError, match="type ntk takes alpha"):
        validate(wrong)
