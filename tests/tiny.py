"""Small models and data made on the spot: what a test needs where no download and no real data is
at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = [
    "Once upon a time there was a little girl named Lily. She loved to play outside in the park.",
    "What is two plus two? The answer is four. #### 4",
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Please write a short story about a red ball. No, I will not do that.",
]


def make_tokenizer(directory: Path, *, chat: bool = True, vocab_size: int = 320) -> Any:
    """A byte-level BPE tokenizer with `<s>`, `</s>`, `<pad>` and a chat template, saved as Hugging
    Face does.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return fast


def make_llama(directory: Path, *, chat: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A random Llama of a few ten thousand parameters with its tokenizer, as a Hugging Face
    directory.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(directory, chat=chat)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = LlamaConfig(vocab_size=len(tokenizer), **{**ids, **shape, **changes})
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_answer_rows(count: int = 16) -> list[dict[str, Any]]:
    """Rows of the `prompt_answer` form."""
    return [
        {"id": f"r{i}", "prompt": f"What is {i} plus {i}?", "answer": f" The answer is {2 * i}."}
        for i in range(count)
    ]


def pair_rows(count: int = 16) -> list[dict[str, Any]]:
    """Rows of the `paired_comparison` form."""
    return [
        {
            "prompt": f"What is {i} plus {i}?",
            "pos_answers": [f" {2 * i}"],
            "neg_answers": [f" I will not do {i}."],
        }
        for i in range(count)
    ]


def prompt_rows(count: int = 16) -> list[dict[str, Any]]:
    """Rows of the `prompt` form with an answer for a verifier."""
    return [{"prompt": f"What is {i} plus {i}?", "answer": f"#### {2 * i}"} for i in range(count)]
