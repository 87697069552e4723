"""The models that are measured: Llama's shape with random weights, written once as a Hugging Face
directory for both sides.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    intermediate: int
    heads: int
    vocabulary: int = 32_000
    positions: int = 4096


SHAPES = {
    "12.7M": Shape(hidden=256, layers=6, intermediate=640, heads=8),
    "40M": Shape(hidden=512, layers=8, intermediate=1280, heads=8),
    "tiny": Shape(hidden=64, layers=2, intermediate=128, heads=2),
}


def write_model(
    directory: Path, shape: Shape, tokenizer: Path, *, score: bool = False, seed: int = 0
) -> Path:
    """Random float32 weights with tied embeddings; `score` makes a reward model of one label.

    Returns the directory.

    `tokenizer` is the folder of Llama 2's: 32,000 entries. Its unknown token serves as padding.
    """
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.num_labels = 1
    network: Any = (LlamaForSequenceClassification if score else LlamaForCausalLM)(config)
    shutil.rmtree(directory, ignore_errors=True)
    network.save_pretrained(directory)
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )
    fast.save_pretrained(directory)
    return directory
