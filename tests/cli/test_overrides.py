"""Parsing of command lines in Hydra's grammar and of YAML files to nested values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weft.cli import overrides
from weft.cli.quickstart import apply_overrides
from weft.errors import ConfigError
from weft.experiments import SFTConfig
from weft.experiments.common import MFCOptions
from weft.options import read, to_mapping, to_plain


def nested(*words: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides.parse(words):
        overrides.merge(values, override)
    return to_plain(values)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.b=1e-5"], {"a": {"b": 1e-5}}),
        (["a=[1,2]", "b={x: 1, y: {z: t}}"], {"a": [1, 2], "b": {"x": 1, "y": {"z": "t"}}}),
        (["a='x, [y]'"], {"a": "x, [y]"}),
        (["a=null", "b=true", "c=False"], {"a": None, "b": True, "c": False}),
        (["+a.b=1"], {"a": {"b": 1}}),
        (["a.b=1", "~a.b"], {"a": {}}),
        (["a.b=1", "a={c: 2}"], {"a": {"b": 1, "c": 2}}),
        (
            ["reward=[{name: 'f.py:g', weight: 0.5}, gsm8k]"],
            {"reward": [{"name": "f.py:g", "weight": 0.5}, "gsm8k"]},
        ),
        (["reward={gsm8k: 0.5, length: 0.1}"], {"reward": {"gsm8k": 0.5, "length": 0.1}}),
        (["reward=[[length,0.5],[f.py:g,1.0]]"], {"reward": [["length", 0.5], ["f.py:g", 1.0]]}),
        (["path=/a/b-c_d.jsonl"], {"path": "/a/b-c_d.jsonl"}),
        (["a="], {"a": ""}),
    ],
)
def test_hydras_grammar(words: list[str], expected: dict[str, Any]) -> None:
    assert nested(*words) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("a=range(1,3)", "sweep"),
        ("abc", "key=value"),
        ("a=[1", "cannot be read"),
        ("a={b", "quote"),
        ("a='b", "quote"),
        ("a=${b", "quote"),
        ("a=[b=1,]", "quote"),
    ],
)
def test_messages_for_unreadable_words(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overrides.parse([word])


@dataclass
class Options:
    text: str | None = None
    texts: list[str] = field(default_factory=list)
    number: int = 0
    any: Any = None


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("text=2,3", "2,3"),
        ("text=node[01-02,05]", "node[01-02,05]"),
        ("text=fast&big", "fast&big"),
        ("text=--a=b", "--a=b"),
        ("texts=[--mail-type=END]", ["--mail-type=END"]),
        ("texts=--mail-type=END,FAIL", ["--mail-type=END,FAIL"]),
        ("texts=[--gres=gpu:1, --exclude=n[1,2]]", ["--gres=gpu:1", "--exclude=n[1,2]"]),
        ("texts=source a && b", ["source a && b"]),
    ],
)
def test_an_option_of_texts_takes_them_as_they_stand(word: str, expected: Any) -> None:
    (found,) = overrides.parse([word])
    assert getattr(read(Options(), {found.name: found.value}), found.name) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("number=1,2", "sweep"),
        ("any=a,b", "sweep"),
        ("texts=a,b", r"texts=\[1,2\]"),
        ("any=a&b", "quote"),
        ("text=[a=b]", "cannot be read"),
    ],
)
def test_other_options_do_not(word: str, message: str) -> None:
    (found,) = overrides.parse([word])
    with pytest.raises(ConfigError, match=message):
        read(Options(), {found.name: found.value})


@pytest.mark.parametrize("word", ["device_mesh=2,3", "device_mesh=[2,3]", "device_mesh='2,3'"])
def test_device_numbers_are_written_in_any_way(word: str) -> None:
    base = MFCOptions()
    assert read(base, overrides.resolve(raw(word), to_mapping(base))).device_mesh == "2,3"
    assert nested("rew.device_mesh=[0,2-3]") == {"rew": {"device_mesh": "0,2-3"}}


def raw(word: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    overrides.merge(values, overrides.parse([word])[0])
    return values


def test_interpolation_takes_another_options_value() -> None:
    values = nested("ref.path='${actor.path}'", "actor.path=x", "n=3")
    resolved = overrides.resolve(values, {"actor": {"path": None}, "ref": {"path": None}, "n": 1})
    assert resolved == {"ref": {"path": "x"}, "actor": {"path": "x"}, "n": 3}


def test_an_unknown_interpolation_is_an_error() -> None:
    with pytest.raises(ConfigError, match="actr"):
        overrides.resolve({"a": "${actr.path}"}, {"a": None})


def test_a_file_is_read_and_flattened(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "seed: 3\nmodel: {path: x, optimizer: {lr: 1e-5}}\ndataset: {args: {}}\nreward: {f.py:g: "
        "0.5}\n"
    )
    found = {o.name: o.value for o in overrides.flatten(overrides.read_file(str(file)))}
    assert found == {
        "seed": 3,
        "model.path": "x",
        "model.optimizer.lr": 1e-5,
        "dataset.args": {},
        "reward": {"f.py:g": 0.5},
    }


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "a: [", ""])
def test_a_file_that_holds_no_options_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--config"):
        overrides.read_file(str(file))


def test_an_option_set_to_several_values_is_reported() -> None:
    def told(*words: str) -> list[str]:
        return overrides.describe_repeated(overrides.parse(words))

    assert told("a.b=4", "c=1", "a.b=8") == ["a.b=4 and a.b=8 are both set; the last counts"]
    assert told("a=1", "a=2", "a=1") == ["a=2 and a=1 are both set; the last counts"]
    assert told("a=1", "a=2", "a=3") == ["a=1, a=2 and a=3 are all set; the last counts"]
    assert told("a=1", "a=1", "b={x: 1}", "b={y: 2}") == []
    assert (
        overrides.describe_repeated([overrides.Override("a", 1), overrides.Override("a", 2)]) == []
    ), "a file, and one over it"


def test_an_error_shows_values_as_they_were_written() -> None:
    for word, shown in (
        ("model.path={a: 1, b: [x, 2.5]}", "model.path={'a': 1, 'b': ['x', 2.5]}: must be a text"),
        ("model.type.is_here=true", "model.type={'is_here': True}: must be a text"),
        ("model.path=[1, true]", "model.path=[1, True]: must be a text"),
        ("model.lora.r=[1, true]", "model.lora.r=[1, True]: must be a whole number, such as 8"),
        ("dataset.args=[1]", "dataset.args=[1]: must be a mapping"),
    ):
        with pytest.raises(ConfigError) as caught:
            apply_overrides(SFTConfig(), overrides.parse([word]))
        assert str(caught.value).startswith(shown) and "Scalar" not in str(caught.value)
