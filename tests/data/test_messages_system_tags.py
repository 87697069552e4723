"""Additions to a conversation: the constant system text, and the tags of each reply."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import templates

from tests.data.test_spec_chat_templates import marked
from weft.data.messages import ConversationAdditions, format_tag, normalize_messages, prepend_prefix
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError

REPLY = {
    "role": "assistant",
    "content": "one two three four five",
    "lang": "en",
    "quality": 0.25,
    "humor": 1.0,
    "creativity": 0,
}


def draw(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_tags_by_hand() -> None:
    text = format_tag(REPLY, None, 0.5, length=True)
    assert text == "lang: en\nquality: 0.2\nhumor: 1.0\ncreativity: 0.0\nlength: 2"
    assert format_tag({"content": "a " * 4}, None, 0.0, length=True) == "length: 1"
    assert (
        format_tag({"content": "a", "lang": " ", "context": " \n"}, None, 0.0, length=False) == ""
    )


def test_tags_are_drawn() -> None:
    said = {**REPLY, "context": "a\nb"}
    texts = [format_tag(said, draw(seed), 0.5, length=False) for seed in range(2000)]
    assert texts == [format_tag(said, draw(seed), 0.5, length=False) for seed in range(2000)]
    kept = Counter(line.split(":")[0] for text in texts for line in text.split("\n") if ":" in line)
    assert all(
        abs(kept[name] / 2000 - 0.5) < 0.04
        for name in ("lang", "quality", "humor", "creativity", "context")
    )
    assert all("context" not in text or text.endswith("context: a\nb") for text in texts), (
        "the context comes last"
    )
    firsts = Counter(
        text.split(":")[0] for text in texts if text and not text.startswith("context")
    )
    assert max(firsts.values()) < 1.3 * min(firsts.values()), "the others in any order"
    assert all(
        len(format_tag(said, draw(seed), 0.0, length=False).split("\n")) == 6 for seed in range(20)
    )


def test_a_label_that_is_none() -> None:
    with pytest.raises(DataError, match=r"quality=1\.5"):
        format_tag({"content": "a", "quality": 1.5}, None, 0.0, length=False)


def test_facts_of_messages_are_kept() -> None:
    assert normalize_messages([REPLY]) == [REPLY] and normalize_messages(
        normalize_messages([REPLY])
    ) == [REPLY]


def test_the_prefix_stands_before_a_system_message_of_ones_own() -> None:
    user = {"role": "user", "content": "Hi"}
    assert prepend_prefix([user], "P") == [{"role": "system", "content": "P"}, user]
    assert prepend_prefix([{"role": "system", "content": "S"}, user], "P")[0]["content"] == "P\n\nS"


def test_the_system_text_is_not_trained_whatever_it_says(with_template: Any) -> None:
    """Defect 2: neither the prefix nor a tag is trained, even if the reply has the same text."""
    tokenizer: Tokenizer = replace(
        with_template(templates.CHATML), additions=ConversationAdditions("Hello", tags=True)
    )
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello", "context": "Hello", "lang": "en"},
    ]
    assert marked(tokenizer, talk) == (
        "<|im_start|>system\nHello<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>system\nlang: en\ncontext: Hello"
        "<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n"
    )


def test_without_label_masking_everything_is_trained_but_the_first_token(
    with_template: Any,
) -> None:
    tokenizer: Tokenizer = replace(
        with_template(templates.CHATML), additions=ConversationAdditions(label_masking=False)
    )
    found = tokenizer.mask_chat(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    )
    assert found.mask == [False] + [True] * (len(found.ids) - 1)
