"""Model directories with one file a pipeline stage: the same bytes, loaded by transformers as the
original.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from tests.tiny import make_llama
from weft.checkpoints.hf_io import ParameterReader
from weft.checkpoints.stages import partition
from weft.cli import main as weft
from weft.errors import ConfigError


def contents(directory: Path) -> dict[str, bytes]:
    tensors = {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}
    return {
        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def gpt2(directory: Path) -> Path:
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2)
    ).save_pretrained(directory)
    return directory


def mixtral(directory: Path) -> Path:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        max_position_embeddings=32,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(directory, max_shard_size="20KB")
    return directory


def llama(directory: Path, **changes: Any) -> Path:
    return make_llama(directory, num_hidden_layers=3, **changes)


def tied(directory: Path) -> Path:
    return llama(directory, tie_word_embeddings=True)


@pytest.mark.parametrize("make", [llama, tied, gpt2, mixtral])
def test_the_files_are_the_stages_and_hold_the_same_bytes(make: Any, tmp_path: Path) -> None:
    source, target = make(tmp_path / "m"), tmp_path / "out"
    sizes = partition(source, target, 2)
    assert contents(target) == contents(source)
    names = [f"model-0000{s}-of-00002.safetensors" for s in (1, 2)]
    assert sorted(p.name for p in target.glob("*.safetensors*")) == [
        *names,
        "model.safetensors.index.json",
    ]
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert (
        index["metadata"]["total_size"]
        == sum(sizes)
        == sum(len(v) for v in contents(source).values())
    )
    layers = [
        {n.split(".")[2] for n in load_file(target / name) if ".layers." in n or ".h." in n}
        for name in names
    ]
    assert layers == [{"0", "1"}, {"2"}]  # the last one has the output matrix too
    own, cut = (
        AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (source, target)
    )
    ids = torch.arange(12)[None]
    assert torch.equal(own(ids).logits, cut(ids).logits)
    assert {p.name for p in source.iterdir() if "safetensors" not in p.name} <= {
        p.name for p in target.iterdir()
    }
    assert torch.equal(
        ParameterReader(target).read("embed.weight"), ParameterReader(source).read("embed.weight")
    )


def test_buffers_go_with_their_layer(tmp_path: Path) -> None:
    source = llama(tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(3)}
    save_file({**tensors, **buffers}, source / "model.safetensors", {"format": "pt"})
    partition(source, tmp_path / "out", 3)
    for n in range(3):
        held = load_file(tmp_path / "out" / f"model-0000{n + 1}-of-00003.safetensors")
        assert [name for name in held if "inv_freq" in name] == [
            f"model.layers.{n}.self_attn.rotary_emb.inv_freq"
        ]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(llama(tmp_path / "m"))
    words = ["--model_dir", source, "--model_type", "llama", "--num_stages", "3", "--output_dir"]
    assert weft.main(["convert", "partition", *words, str(tmp_path / "a")]) == 0
    assert "stage 2 " in capsys.readouterr().out
    assert contents(tmp_path / "a") == contents(tmp_path / "m")
    assert weft.main(["convert", "partition", *words, str(tmp_path / "a")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_too_many_stages_are_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"--num_stages 4: .*/m has 3 layers, and every stage"):
        partition(source, tmp_path / "out", 4)
    with pytest.raises(ConfigError, match="must be at least 1"):
        partition(source, tmp_path / "out", 0)
    with pytest.raises(
        ConfigError,
        match=r"--model_type gpt2: .*/m is not such a model: its config.json says 'llama'; leave",
    ):
        partition(source, tmp_path / "out", 2, "gpt2")
    with pytest.raises(
        ConfigError, match="--model_type: unknown model family 'wizard'; known: gemma"
    ):
        partition(source, tmp_path / "out", 2, "wizard")
    assert not (tmp_path / "out").exists()
