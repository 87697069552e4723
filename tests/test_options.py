"""Reading configurations: types, unknown names, rules, and the way back to plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from weft.errors import ConfigError
from weft.options import CommandLineValue, iterate_options, option, read, to_mapping, validate


@dataclass
class Inner:
    lr: float = option(1e-3, "step size", at_least=0.0)
    kind: str = option("adam", "which", choices=("adam", "sgd"))
    secret: int = option(0, "", hidden=True)


@dataclass
class Outer:
    name: str = option("", "a text")
    path: str | None = option(None, "a text or nothing")
    count: int = option(1, "a number", at_least=1)
    limit: int | None = option(None, "a number or nothing", at_least=0)
    deep: bool = option(False, "a switch")
    texts: list[str] = option([], "texts")
    numbers: list[int] = option([], "numbers")
    args: dict[str, Any] = option({}, "anything by name")
    level: Literal["a", "b"] = option("a", "one of two")
    any: Any = option(None, "anything")
    inner: Inner = option(Inner(), "a group")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # what YAML makes of a number without a dot
        ({"inner": {"lr": "1e-5"}}, ("inner.lr", 1e-5)),
        ({"inner": {"lr": 1}}, ("inner.lr", 1.0)),
        ({"count": 1e3}, ("count", 1000)),
        ({"count": "12"}, ("count", 12)),
        ({"limit": None}, ("limit", None)),
        ({"limit": "null"}, ("limit", None)),
        ({"path": "None"}, ("path", None)),
        ({"deep": "True"}, ("deep", True)),
        ({"name": CommandLineValue(1.1, "1.10")}, ("name", "1.10")),
        ({"path": CommandLineValue(7, "007")}, ("path", "007")),
        ({"limit": CommandLineValue(7, "7")}, ("limit", 7)),
        ({"limit": CommandLineValue(None, "null")}, ("limit", None)),
        ({"path": CommandLineValue(None, "null")}, ("path", None)),
        ({"name": CommandLineValue(None, "null")}, ("name", "null")),  # as in backend=null, a name
        ({"texts": ["a", "b"]}, ("texts", ["a", "b"])),
        ({"texts": "a"}, ("texts", ["a"])),
        ({"args": {"k": {"x": CommandLineValue(1, "1")}}}, ("args", {"k": {"x": 1}})),
        ({"any": [1, {"a": CommandLineValue(2, "2")}]}, ("any", [1, {"a": 2}])),
        ({"level": "b"}, ("level", "b")),
    ],
)
def test_values_come_to_their_type(values: dict[str, Any], expected: tuple[str, Any]) -> None:
    config: Any = read(Outer(), values)
    for part in expected[0].split("."):
        config = getattr(config, part)
    assert config == expected[1]
    assert type(config) is type(expected[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": "many"}, r"count='many': must be a whole number"),
        ({"count": 1.5}, r"count=1.5: must be a whole number"),
        ({"count": True}, r"count=True: must be a whole number"),
        ({"inner": {"lr": "fast"}}, r"inner.lr='fast': must be a number"),
        ({"deep": 1}, r"deep=1: must be true or false"),
        ({"deep": "yes"}, r"deep='yes': must be true or false"),
        ({"name": 3}, r"name=3: must be a text; quote it"),
        ({"args": "x"}, r"args='x': must be a mapping"),
        ({"inner": 3}, r"inner=3: is a group of options; set one of them, such as inner.lr"),
        ({"numbers": [1, "x"]}, r"numbers\[1\]='x': must be a whole number"),
        ({"level": "c"}, r"level='c': must be one of a, b"),
        ({"nmae": "x"}, r"unknown option 'nmae'; did you mean name"),
        ({"inner": {"learning": 1}}, r"unknown option 'inner.learning'"),
        ({"lr": 1}, r"unknown option 'lr'; did you mean inner.lr"),
        ({"inner": {"secret": 1}}, r"unknown option 'inner.secret'"),
        ({"iner": {"lr": 1}}, r"unknown option 'iner.lr'; did you mean inner.lr"),
    ],
)
def test_wrong_values_are_named_with_their_rule(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(Outer(), values)


def test_the_base_keeps_its_values_and_stays_as_it_was() -> None:
    base = Outer(count=5, inner=Inner(lr=0.5))
    changed = read(base, {"inner": {"kind": "sgd"}})
    assert (changed.count, changed.inner.lr, changed.inner.kind) == (5, 0.5, "sgd")
    assert base.inner.kind == "adam"


def test_defaults_are_not_shared() -> None:
    one = Outer()
    one.inner.lr = 9.0
    one.texts.append("x")
    assert (Outer().inner.lr, Outer().texts) == (1e-3, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count=0: must be at least 1"),
        ({"count": "3"}, "count='3': must be int; write 3"),
        ({"inner": Inner(lr=-1.0)}, "inner.lr=-1.0: must be at least 0"),
        ({"inner": Inner(lr=float("nan"))}, "must be a number"),
        ({"inner": Inner(kind="lion")}, "inner.kind='lion': must be one of adam, sgd"),
        ({"texts": "x"}, "texts='x': must be list of str"),
    ],
)
def test_validate_names_option_value_and_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(Outer(**changes))


def test_plain_values_go_there_and_back() -> None:
    config = Outer(name="x", texts=["a"], args={"k": 1}, inner=Inner(lr=2.0, secret=9))
    mapping = to_mapping(config)
    assert "secret" not in mapping["inner"]
    assert to_mapping(read(Outer(), mapping)) == mapping


def test_leaves_show_type_default_and_help() -> None:
    found = {leaf.name: leaf for leaf in iterate_options(Outer(inner=Inner(lr=0.25)))}
    assert (found["inner.lr"].type, found["inner.lr"].default, found["inner.lr"].help) == (
        "float",
        0.25,
        "step size",
    )
    assert found["inner.kind"].type == "adam|sgd"
    assert found["limit"].type == "int or null"
    assert found["texts"].type == "list of str"
    assert "inner.secret" not in found
