"""Passwords, keys and tokens of services in what a run writes down and shows: the name stays, the value does not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
SECRET = re.compile(r"(?:^|[_\-.])(?:api_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
# Words of a vocabulary and names of columns, which tell nothing.
KNOWN = re.compile(
    r"(?:^|[._-])(?:(?:add_)?(?:bos|eos|pad|sep|unk|mask|cls|image)_token"
    r"|(?:prompt|answer|messages|chosen|rejected|replies|id|text|label|input|output|group|column|response|question)_key"
    r"|by_token|per_token)$"
)
ENTRY = re.compile(r"([\w.\-]+)(['\"]?\s*[:=]\s*)([^,{}\[\]\s][^,{}\[\]]*)")
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a value of this name is nobody's business: HF_TOKEN, api_key, my.secret, but not eos_token or answer_key."""
    return SECRET.search(name) is not None and KNOWN.search(name) is None


def masked_words(words: Sequence[str]) -> list[str]:
    """The words of a command: of `name=value` and `--name value` with a telling name the value is masked, also in mappings."""
    found: list[str] = []
    hide = False
    for word in words:
        found.append(MASK if hide and not word.startswith("-") else _masked_word(word))
        hide = word.startswith("--") and "=" not in word and is_secret(word.lstrip("-"))
    return found


def _masked_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and is_secret(name.lstrip("-+~")):
        return f"{name}={MASK}"
    return f"{name}{equals}{_masked_text(value)}" if equals else _masked_text(word)


def _masked_text(text: str) -> str:
    text = IN_ADDRESS.sub(MASK, text)
    return ENTRY.sub(lambda found: f"{found[1]}{found[2]}{MASK if is_secret(found[1]) else found[3]}", text)


def masked(value: Any, name: str = "") -> Any:
    """Nested plain values, such as a configuration, with every telling value masked."""
    if isinstance(value, Mapping):
        return {key: masked(each, str(key)) for key, each in value.items()}
    if value is not None and not isinstance(value, bool) and is_secret(name):
        return MASK
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    return IN_ADDRESS.sub(MASK, value) if isinstance(value, str) else value
