"""Byte-level tokenizer for inspecting rows without a model. It needs no files."""

from __future__ import annotations

from dataclasses import replace

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from weft.data import tokenizer_files
from weft.data.chat_templates import TEMPLATES
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer

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
