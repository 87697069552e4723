"""The files of `weft examples write`: sums of two digits as rows of every form, and a small model without training. The same
bytes on every machine."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

CHARACTERS = "0123456789+="
SPECIAL = ("<pad>", "</s>", "<unk>")
HIDDEN, INNER, LAYERS, HEADS, CONTEXT = 96, 288, 3, 4, 64
RIGHT = 0.7  # share of the SFT answers that are right, so that there is something left to learn from a reward
LESSONS = 8  # SFT rows a sum
SEED = 1
# A sum is answered on its own: the template shows the model what follows the last question, not the talk before it.
CHAT_TEMPLATE = (
    "{% set last = namespace(at=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages[last.at:] %}{% if m['role'] == 'user' %}{{ m['content'] | replace(' ', '') }}="
    "{% elif m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)


def files() -> dict[str, bytes]:
    """Every file by its place in the folder."""
    sums = [(left, right) for left in range(10) for right in range(10)]
    draw = random.Random(SEED)
    draw.shuffle(sums)
    lessons = [(each, _answer(each) if draw.random() < RIGHT else _slip(each, draw)) for each in sums * LESSONS]
    draw.shuffle(lessons)
    slips = sorted({(each, _slip(each, draw)) for each in sums * 6})
    draw.shuffle(slips)
    rows: dict[str, list[dict[str, Any]]] = {
        "sft.jsonl": [{"prompt": _asked(each), "answer": answer} for each, answer in lessons],
        "chat.jsonl": [{"messages": _talk(each, answer)} for each, answer in lessons[:100]],
        "pairs.jsonl": [{"prompt": _asked(each), "chosen": _answer(each), "rejected": wrong} for each, wrong in slips],
        "prompts.jsonl": [{"prompt": _asked(each), "answer": _answer(each)} for each in sums],
    }
    return {name: _lines(each) for name, each in rows.items()} | {
        f"model/{name}": content for name, content in _model().items()
    }


def _asked(each: tuple[int, int]) -> str:
    return f"{each[0]}+{each[1]}="


def _answer(each: tuple[int, int]) -> str:
    return str(sum(each))


def _slip(each: tuple[int, int], draw: random.Random) -> str:
    """A wrong answer, near the right one."""
    return str(draw.choice([n for n in range(max(0, sum(each) - 3), sum(each) + 4) if n != sum(each)]))


def _talk(each: tuple[int, int], answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": _asked(each).rstrip("=")},
        {"role": "assistant", "content": answer},
    ]


def _lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _model() -> dict[str, bytes]:
    """A Hugging Face directory: a Llama of some 400,000 random weights, with a token a character."""
    from safetensors.numpy import save

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": vocabulary["</s>"],
        "pad_token_id": vocabulary["<pad>"],
        "dtype": "float32",
    }
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "chat_template": CHAT_TEMPLATE}
    return {
        "config.json": _json(config),
        "tokenizer.json": _json(_tokenizer(vocabulary)),
        "tokenizer_config.json": _json({**named, "model_max_length": CONTEXT}),
        "model.safetensors": save(_weights(len(vocabulary)), metadata={"format": "pt"}),
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _tokenizer(vocabulary: dict[str, int]) -> dict[str, Any]:
    """tokenizer.json: a token a character."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in SPECIAL],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }


def _weights(vocabulary: int) -> dict[str, Any]:
    """Random weights by their names. `RandomState` draws the same numbers in every version of numpy."""
    import numpy as np

    draw, bound = np.random.RandomState(SEED), 0.02 * 3**0.5

    def matrix(rows: int, columns: int) -> Any:
        return draw.uniform(-bound, bound, (rows, columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        own = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            weights[f"{own}.self_attn.{name}_proj.weight"] = matrix(HIDDEN, HIDDEN)
        for name in ("gate", "up"):
            weights[f"{own}.mlp.{name}_proj.weight"] = matrix(INNER, HIDDEN)
        weights[f"{own}.mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{own}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return {**weights, "model.norm.weight": np.ones(HIDDEN, np.float32)}
