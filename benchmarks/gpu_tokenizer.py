"""A byte-level tokenizer for tiny models, as Hugging Face writes one: every byte is a token.

Plain Python, no packages.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BEGIN, END = range(3)
VOCABULARY = len(SPECIAL) + 256


def alphabet() -> list[str]:
    """The character that stands for each byte: itself where it is visible, else one beyond the
    bytes (GPT-2's table).
    """
    visible = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def write(folder: Path) -> Path:
    """Save the tokenizer in a folder, which is made; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *alphabet()))}
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    bytes_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary,
        "merges": [],
    }
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {"id": index, "content": token, **flags} for index, token in enumerate(SPECIAL)
        ],
        "pre_tokenizer": bytes_level,
        "decoder": bytes_level,
        "model": model,
    }
    (folder / FILE).write_text(
        json.dumps(whole, ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BEGIN],
        "eos_token": SPECIAL[END],
    }
    (folder / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n")
    return folder
