"""Redact passwords, keys and tokens in everything that weft shows or stores.

Names of secrets are kept, and their values are masked. This applies to errors (`weft.errors`),
terminal output, logs, `run.json`, `config.yaml`, reports and data sent by loggers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
# A secret name ends with a word of LAST, or contains a word of ANYWHERE.
LAST = re.compile(
    r"(?:^|[_\-.\s])(?:api_?key|access_?key|private_?key|key|token|secrets?|password|passwd|pwd|passphrase|credentials?"
    r"|auth|authorization|bearer|cookies?)$",
    re.IGNORECASE,
)
ANYWHERE = re.compile(
    r"(?:^|[_\-.\s])(?:password|passwd|passphrase|secret|authorization)(?=[_\-.\s]|$)",
    re.IGNORECASE,
)
# Exceptions: names of variables or files that contain a secret, special tokens, and column keys.
KNOWN = re.compile(
    r"(?:[_-](?:env|file|path|name|variable)"
    r"|(?:^|[._-])(?:(?:(?:add|use|num)_)?(?:bos|eos|pad|sep|unk|mask|cls|image|stop|next|last|first|special|end|per|by)_token"
    r"|(?:prompt|answer|messages|chosen|rejected|replies|id|text|label|input|output|group|column|response|question"
    r"|reward|image|sort|dataset|rank)_key))$",
    re.IGNORECASE,
)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"<>`\\]+")
BARE_USER = re.compile(
    r"(?<![\w@/.:])[^\s:/@'\"{}\[\](),=]+:[^\s/@'\"]+@(?=[\w\-.\[]+(?::\d|[/.\]]|$|[\s'\",)]))"
)
ASSIGNED = re.compile(r"([\w.\-]+)=(?!=)(\"[^\"]*\"|'[^']*'|[^\s,;&{}\[\]()'\"]+)")
IN_MAPPING = re.compile(
    r"([{,]\s*)(['\"]?)([\w.\-]+)\2(\s*:\s*)(\"[^\"]*\"|'[^']*'|[^\s,{}\[\]'\"][^,{}\[\]]*)"
)
HEADER = re.compile(
    r"\b((?:proxy-)?authorization\s*:\s*|bearer\s+)((?:(?:bearer|basic|token)\s+)?[^\s,'\"]+)",
    re.IGNORECASE,
)
PLAIN = ("none", "null", "true", "false", "value", "")  # not secrets; `key=value` is in help texts


def is_secret(name: str) -> bool:
    """Return whether the value of an option or variable with this name is secret.

    For example, HF_TOKEN, apiKey and my.secret are secret; eos_token and answer_key are not.
    """
    spaced = CAMEL.sub("_", name)
    return (LAST.search(spaced) or ANYWHERE.search(spaced)) is not None and KNOWN.search(
        spaced
    ) is None


def redact_urls(text: str) -> str:
    """Return `text` with the user, password, query values and fragment of every URL masked."""
    if "@" not in text and "://" not in text:
        return text
    return BARE_USER.sub(f"{MASK}@", URL.sub(lambda match: _redact_url(match[0]), text))


def _redact_url(url: str) -> str:
    # punctuation of the surrounding sentence
    end = url[len(url.rstrip(".,;:)]")) :] if "?" in url or "#" in url else ""
    scheme, _, rest = url.removesuffix(end).partition("://")
    place = rest
    mark = ""
    query = ""
    if match := re.search(r"[?#]", rest):
        place = rest[: match.start()]
        mark = match[0]
        query = rest[match.end() :]
    authority, slash, path = place.partition("/")
    odd = (
        re.search(r":(?!\d*$)", authority) is not None
        and "@" not in authority
        and not authority.startswith("[")
    )
    if odd and "@" in rest:  # a password with a slash or a question mark in it
        place = f"{MASK}@{rest.rpartition('@')[2]}"
        mark = ""
        query = ""
    elif "@" in authority:
        place = f"{MASK}@{authority.rpartition('@')[2]}{slash}{path}"
    return f"{scheme}://{place}{mark}{re.sub(r'[^&#]+', _redact_entry, query)}{end}"


def _redact_entry(match: re.Match[str]) -> str:
    name, equals, _ = match[0].partition("=")
    return f"{name}={MASK}" if equals else MASK


def redact(text: str) -> str:
    """Return `text` with secrets masked.

    These are passwords and parameters in URLs, values that follow the name of a secret, such as
    `api_key=...` and `{'token': ...}`, and authorization headers.
    """
    if not any(sign in text for sign in ("=", ":", "@")) and "earer" not in text:
        return text
    text = redact_urls(text)
    text = ASSIGNED.sub(lambda match: f"{match[1]}={_hide_value(match[1], match[2])}", text)
    text = IN_MAPPING.sub(
        lambda match: (
            f"{match[1]}{match[2]}{match[3]}{match[2]}{match[4]}{_hide_value(match[3], match[5])}"
        ),
        text,
    )
    return HEADER.sub(lambda match: f"{match[1]}{MASK}", text)


def _hide_value(name: str, value: str) -> str:
    if is_secret(name) and value.strip("'\" .:").lower() not in PLAIN:
        return MASK
    return value


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the values of secrets masked.

    Recognizes `name=value`, `--name value` and mappings. A reference to an environment variable,
    `${oc.env:NAME}`, reveals nothing and is kept.
    """
    masked_words: list[str] = []
    hide = False
    for word in words:
        masked_words.append(MASK if hide and not word.startswith("-") else _mask_word(word))
        hide = word.startswith("--") and "=" not in word and is_secret(word.lstrip("-"))
    return masked_words


def _mask_word(word: str) -> str:
    name, equals, value = word.partition("=")
    if equals and re.fullmatch(r"[-+~]*[\w.\-]+", name):
        hidden = is_secret(name.lstrip("-+~")) and not value.startswith("${oc.env:")
        return f"{name}={MASK if hidden else _mask_text(value)}"
    return _mask_text(word)


def _mask_text(text: str) -> str:
    references: list[str] = []

    def keep(match: re.Match[str]) -> str:
        references.append(match[0])
        return f"\0{len(references) - 1}\0"

    text = re.sub(r"\$\{oc\.env:[^}]*\}", keep, text)
    text = IN_MAPPING.sub(
        lambda match: (
            f"{match[1]}{match[2]}{match[3]}{match[2]}{match[4]}"
            + (
                match[5]
                if re.fullmatch(r"['\"]?\0\d+\0['\"]?\s*", match[5])
                else _hide_value(match[3], match[5])
            )
        ),
        redact_urls(text),
    )
    return re.sub(r"\0(\d+)\0", lambda match: references[int(match[1])], text)


def mask_values(value: Any, name: str = "") -> Any:
    """Return nested plain values, such as a configuration, with all secret values masked."""
    hide = name != "" and is_secret(name)
    if isinstance(value, Mapping):
        return {key: mask_values(each, name if hide else str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [mask_values(each, name if hide else "") for each in value]
    if hide and value is not None and not isinstance(value, bool) and value != "":
        return MASK
    return redact_urls(value) if isinstance(value, str) else value


def iterate_masked_options(value: Any, name: str = "", *, in_secret: bool = False) -> Iterator[str]:
    """Iterate over the dotted names of options whose secret values were replaced by a mask.

    `value` is a stored configuration. The other arguments are used in recursive calls, in which
    `value` is a part of the configuration: `name` is its dotted name, and `in_secret` is True if
    one of the keys in this name is that of a secret, such as "api_key".
    """
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from iterate_masked_options(
                each, f"{name}.{key}".lstrip("."), in_secret=in_secret or is_secret(str(key))
            )
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from iterate_masked_options(each, f"{name}[{index}]", in_secret=in_secret)
    elif isinstance(value, str) and MASK in value:
        in_url = any(MASK in url for url in URL.findall(value)) or value.startswith(f"{MASK}@")
        if in_url or (in_secret and value == MASK):
            yield name
