"""`check_family` finds families that are wrong: each of these breaks one thing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CheckpointError
from weft.models.families import common
from weft.models.families.base import ConfigReader, Family
from weft.models.families.keymap import Key
from weft.models.network.config import TransformerConfig
from weft.registry import families
from weft.testing import check_family

LLAMA: Family = families.get("llama")


def reading(change: Callable[[TransformerConfig], TransformerConfig]) -> Family:
    def read(reader: ConfigReader) -> TransformerConfig:
        return change(LLAMA.read_config(reader))

    return replace(LLAMA, read_config=read)


def with_keys(change: Callable[[Key], Key]) -> Family:
    return replace(LLAMA, keys=lambda config: tuple(change(key) for key in LLAMA.keys(config)))


def swap(key: Key) -> Key:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    for one, other in names.items():
        if one in key.hf:
            return replace(key, hf=key.hf.replace(one, other))
    return key


BROKEN: dict[str, tuple[Family, type[Exception], str]] = {
    "epsilon": (reading(lambda c: replace(c, norm_eps=1e-2)), AssertionError, "config|logits"),
    "activation": (
        reading(lambda c: replace(c, activation="gelu")),
        AssertionError,
        "config|logits",
    ),
    "scale": (reading(lambda c: replace(c, attention_scale=0.3)), AssertionError, "logits"),
    "gate and up swapped": (with_keys(swap), AssertionError, "logits"),
    "a missing key": (
        replace(LLAMA, keys=lambda c: LLAMA.keys(c)[:-1]),
        CheckpointError,
        "post_attention_layernorm",
    ),
    "a key of no part": (
        with_keys(lambda k: replace(k, part="body") if "norm" in k.name else k),
        AssertionError,
        "parts",
    ),  # type: ignore[arg-type]
    "a value lost on writing": (
        replace(
            LLAMA,
            write_config=lambda c: {
                k: v for k, v in LLAMA.write_config(c).items() if k != "rms_norm_eps"
            },
        ),
        AssertionError,
        "configuration",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_family_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, error, said = BROKEN[what]
    monkeypatch.setitem(families._objects, "llama", family)
    with pytest.raises(error, match=said):
        check_family(family)


def test_an_unregistered_family_is_told_so() -> None:
    other: Any = replace(LLAMA, score="other.weight")
    with pytest.raises(AssertionError, match="not registered"):
        check_family(other)


def test_the_page_on_families_lists_every_field_and_helper(repo: Path) -> None:
    page = (repo / "docs" / "new-family.md").read_text()
    listed = set(re.findall(r"`(\w+)[`(]", page))
    helpers = {
        name
        for name, thing in vars(common).items()
        if getattr(thing, "__module__", "") == common.__name__
    }
    wanted = {spec.name for cls in (Family, TransformerConfig) for spec in fields(cls)}
    assert wanted | {name for name in helpers if not name.startswith("_")} <= listed


def test_a_good_family_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    check_family(LLAMA)
    said = capsys.readouterr().out
    assert (
        said.startswith("check_family(llama), a random model of ")
        and "the gradient of every parameter" in said
    )
    assert said.endswith("scores of classifiers saved by both\n")
