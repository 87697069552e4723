"""Bytes of single tokens, and a tokenizer whose tokens are bytes.

Decoding a single token does not return its bytes: sentencepiece drops the leading space of the
first word, and a token with a part of a character decodes to U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weft.data import tokenizer_files
from weft.data.spec import TEMPLATES, TokenizerSpec
from weft.data.tokenizer import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BLANK = "▁"


class TokenBytes:
    """Lookup of the bytes that each token of a tokenizer represents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.hf.added_tokens_decoder.items()}
        if tokenizer.hf.is_fast:
            backend = getattr(tokenizer.hf, "backend_tokenizer", None)
        else:
            backend = None
        if backend is not None:
            decoders = list(_iterate_decoders(json.loads(backend.to_str()).get("decoder")))
        else:
            decoders = []
        kinds = {str(each.get("type")) for each in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._blanks = "Metaspace" in kinds or any(
            each.get("type") == "Replace"
            and each.get("content") == " "
            and BLANK in str(each.get("pattern"))
            for each in decoders
        )
        self._cached_bytes: dict[int, bytes] = {}

    def get_bytes(self, id: int) -> bytes:
        """Return the bytes that the token `id` represents, including any leading space."""
        if id not in self._cached_bytes:
            self._cached_bytes[id] = self._compute_bytes(id)
        return self._cached_bytes[id]

    def _compute_bytes(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode(errors="replace")
        piece = self._tokenizer.hf.convert_ids_to_tokens(id)
        if isinstance(piece, str) and self._byte_level:
            known = _map_characters_to_bytes()
            return b"".join(known.get(sign, sign.encode(errors="replace")) for sign in piece)
        if isinstance(piece, str) and self._blanks:
            byte = BYTE.fullmatch(piece)
            if byte:
                return bytes([int(byte[1], 16)])
            return piece.replace(BLANK, " ").encode(errors="replace")
        return self._tokenizer.decode([id]).encode(errors="replace")


def _iterate_decoders(described: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a decoder and its nested decoders, given in the format of `tokenizer.json`."""
    if isinstance(described, dict):
        yield described
        for decoder in described.get("decoders", []):
            yield from _iterate_decoders(decoder)


@cache
def _map_characters_to_bytes() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level vocabulary represents.

    Visible Latin-1 characters represent themselves. The other bytes are represented by the
    characters from U+0100 on.
    """
    plain = []
    for n in range(256):
        if chr(n) in pre_tokenizers.ByteLevel.alphabet() and n < 256:
            plain.append(n)
    others = [n for n in range(256) if n not in plain]
    return {chr(n): bytes([n]) for n in plain} | {
        chr(256 + index): bytes([n]) for index, n in enumerate(others)
    }


NAME = "the byte tokenizer"
FORM = "chatml"
WITH_ITS_TOKENS = "template"  # value of `add_tokens`: the special tokens of the chat template


def build_byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and the special tokens `<s>`, `</s>` and `<pad>`.

    It has no chat template.
    """
    alphabet = {}
    for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        alphabet[token] = index
    core = tokenizers.Tokenizer(models.BPE(alphabet, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def load_byte_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Return the byte tokenizer with the options of `spec`.

    The default chat template is ChatML. Raises `UserError` if an option is invalid.
    """
    template = spec.chat_template or FORM
    if template in TEMPLATES:
        added = [*spec.add_tokens, WITH_ITS_TOKENS]
    else:
        added = spec.add_tokens
    hf = build_byte_level()
    hf.name_or_path = NAME
    tokenizer_files.apply_spec(
        hf,
        replace(spec, chat_template=template, add_tokens=list(dict.fromkeys(added))),
        NAME,
        "tokenizer",
    )
    return Tokenizer(hf)
