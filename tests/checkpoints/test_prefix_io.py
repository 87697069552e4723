"""Prefixes in PEFT's files: PEFT and weft compute the same logits, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from torch import Tensor

from tests.checkpoints.test_peft_io import check
from tests.models import common
from tests.models.common import sequences, tiny
from tests.models.network.test_prefix import COUNT, with_prefix
from weft.checkpoints import hf_io, peft_io, prefix_io
from weft.checkpoints.names import ADAPTER
from weft.errors import CheckpointError
from weft.models.network.linear import find_canonical_values
from weft.models.network.transformer import Head, Transformer

ROW = sequences([18])[0].clamp_min(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def logits(network: Transformer) -> Tensor:
    return common.logits(network, ROW)


def saved(directory: Path, name: str = "llama", head: Head = "lm") -> tuple[Path, Path]:
    """Return the directories (model, prefix)."""
    plain = tiny(name, head)
    hf_io.save(directory / "base", find_canonical_values(plain), plain.config, head)
    network = with_prefix(plain, head)
    prefix_io.save_prefix(
        directory / "prefix",
        find_canonical_values(network),
        network.config,
        head,
        base=str(directory / "base"),
        score="score.weight",
    )
    return directory / "base", directory / "prefix"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
def test_peft_computes_what_weft_saved(name: str, tmp_path: Path) -> None:
    base, where = saved(tmp_path, name)
    module = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    wrapped = peft.PeftModel.from_pretrained(module, where).eval()
    again = hf_io.load(where)
    assert again.prefix_tokens == COUNT
    check(again, wrapped)
    assert not torch.allclose(logits(hf_io.load(base)), logits(again), atol=0.1)


def test_weft_computes_what_peft_saved(tmp_path: Path) -> None:
    base, _ = saved(tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(module, settings).eval()
    wrapped.save_pretrained(tmp_path / "theirs")
    assert not (tmp_path / "theirs" / "config.json").exists()
    check(hf_io.load(tmp_path / "theirs"), wrapped)


def test_a_reward_model_saves_its_head_with_the_prefix(tmp_path: Path) -> None:
    base, where = saved(tmp_path, head="score")
    module = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    head = hf_io.load(where, "score").score.weight.detach().clone()
    # whose pass no reward model of transformers takes
    wrapped = peft.PeftModel.from_pretrained(module, where)
    assert torch.equal(wrapped.base_model.score.modules_to_save["default"].weight, head)
    with torch.no_grad():
        hf_io.save(
            base, find_canonical_values(tiny("llama", "score", seed=5)), tiny().config, "score"
        )
    assert torch.equal(hf_io.load(where, "score").score.weight, head)  # its own, not the model's


def test_a_part_of_a_prefix(tmp_path: Path) -> None:
    _, where = saved(tmp_path)
    reader = hf_io.ParameterReader(where)
    whole = reader.read("blocks.1.attention.prefix.v")
    part = reader.read("blocks.1.attention.prefix.v", (slice(1, 3), slice(4, 8)))
    assert torch.equal(part, whole[1:3, 4:8])


def test_a_prefix_of_another_model_is_refused(tmp_path: Path) -> None:
    _, where = saved(tmp_path)
    settings = json.loads((where / ADAPTER).read_text())
    (where / ADAPTER).write_text(json.dumps(settings | {"num_virtual_tokens": 9}))
    with pytest.raises(
        CheckpointError, match=r"prompt_embeddings; a prefix of 9 tokens of .* has \(9, "
    ):
        hf_io.load(where)


def test_a_prefix_cannot_be_merged(tmp_path: Path) -> None:
    _, where = saved(tmp_path)
    with pytest.raises(
        CheckpointError, match="is a prefix: keys and values, which no weights can take in"
    ):
        peft_io.load_adapter(where, tiny())


def test_a_prefix_starts_close_to_zero(tmp_path: Path) -> None:
    network = hf_io.init_random(replace(tiny().config, prefix_tokens=64), seed=1)
    first = network.blocks[0].attention.prefix
    for value in (first.k, first.v):
        assert value.std().item() == pytest.approx(network.config.initializer_range, rel=0.1)
