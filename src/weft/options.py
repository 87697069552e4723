"""Describe, read and validate configurations.

A configuration is a dataclass, defined in the module that it configures. Its fields are created by
`option`, which adds a help text and a rule. `include` gives a group of options those of a component,
such as a loss, which defines them itself. `read` fills a configuration with nested plain values
(from a command line or a YAML file), `iterate_options` lists its options for `--help`, `validate`
checks types and rules, and `to_mapping` converts it to plain values.
"""

from __future__ import annotations

import copy
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from weft.errors import ConfigError, find_nearest
from weft.reading import shorten

Config = TypeVar("Config")
LARGEST_INTEGER = 2**63 - 1  # largest integer option; larger ones do not fit into an int64 tensor
LONGEST_VALUE = 400  # characters of a value shown in an error message


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: Sequence[Any] | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    check: Callable[[Any], str | None] | None = None,
    hidden: bool = False,
) -> Any:
    """Return a dataclass field with a help text and a rule that `validate` enforces.

    `check` is a function that returns a description of what is wrong with a value, or None.
    `hidden` marks a field that weft sets itself and that `--help` does not list. A mutable default
    (list, dict, dataclass) is copied for every instance.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "at_least": at_least,
        "at_most": at_most,
        "below": below,
        "check": check,
        "hidden": hidden,
    }
    if default is MISSING:
        return field(metadata=metadata)
    if isinstance(default, (list, dict)) or is_dataclass(default):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# -- options of components


def include(component: type[Any], **names: str) -> Any:
    """Include the options of a component in a group, as in `loss: SFTLoss = include(SFTLoss)`.

    The component is a frozen dataclass, such as a loss. Each of its fields that is created by
    `option` becomes an option of the group, with the same type, default, help text and rule; its
    name is the field's, or the one in `names`. The group's attribute, `loss`, is the component with
    the values of these options, and setting it sets the options. For a field that is not an option,
    `names` can give the attribute of the group that holds its value, such as `gen.max_new_tokens`.
    """
    return IncludedComponent(component, names)


class IncludedComponent:
    """Attribute of a group whose value is made of the group's options; see `include`."""

    def __init__(self, component: type[Any], names: Mapping[str, str]) -> None:
        self.component = component
        self.attributes = dict(names)  # the component's fields -> attributes of the group
        self.options: dict[str, Field[Any]] = {}  # options of the group -> the component's fields
        assert names.keys() <= {spec.name for spec in fields(component)}, "names no field"
        for spec in fields(component):
            is_option = "hidden" in spec.metadata  # only fields made by `option` have this key
            if is_option and not spec.metadata["hidden"]:
                name = self.attributes.setdefault(spec.name, spec.name)
                self.options[name] = spec

    def __set_name__(self, owner: type[Any], name: str) -> None:
        """Replace the attribute's annotation by fields, before `dataclass` reads them."""
        annotations: dict[str, Any] = {}
        for key, hint in owner.__annotations__.items():
            if key != name:
                annotations[key] = hint
                continue
            for option_name, spec in self.options.items():
                annotations[option_name] = _get_hints(self.component)[spec.name]
                default: Any = {"default": spec.default, "default_factory": spec.default_factory}
                setattr(owner, option_name, field(**default, metadata=spec.metadata))
        owner.__annotations__ = annotations

    def __get__(self, group: Any, owner: type[Any]) -> Any:
        if group is None:
            return self
        values = {key: attrgetter(name)(group) for key, name in self.attributes.items()}
        return self.component(**values)

    def __set__(self, group: Any, component: Any) -> None:
        for name, spec in self.options.items():
            setattr(group, name, getattr(component, spec.name))


# -- listing options


@dataclass(frozen=True)
class OptionDescription:
    """Description of one option for `--help`.

    `name` is the dotted name, such as `actor.optimizer.lr`, and `type` is the type as users write
    it.
    """

    name: str
    type: str
    default: Any
    help: str


def iterate_options(config: Any, prefix: str = "") -> Iterator[OptionDescription]:
    """Iterate over the descriptions of all options of a configuration, including nested ones.

    `config` is an instance; its values are listed as the defaults.
    """
    hints = _get_hints(type(config))
    for spec in list_visible_fields(config):
        value = getattr(config, spec.name)
        name = f"{prefix}{spec.name}"
        if is_dataclass(value):
            yield from iterate_options(value, f"{name}.")
        else:
            choices = spec.metadata.get("choices")
            if choices:
                type_text = "|".join(map(str, choices))
            else:
                type_text = describe_type(hints[spec.name])
            yield OptionDescription(name, type_text, value, spec.metadata.get("help", ""))


def list_visible_fields(config: Any) -> list[Field[Any]]:
    """Return the fields of a configuration that are not hidden from users."""
    visible_fields: list[Field[Any]] = []
    for spec in fields(config):
        if not spec.metadata.get("hidden"):
            visible_fields.append(spec)
    return visible_fields


def describe_type(hint: Any) -> str:
    """Return the name of a type as `--help` shows it: `int`, `str or null`, `list of str`."""
    if hint is Any:
        return "any"
    if hint is type(None):
        return "null"
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe_type(a) for a in arguments)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return "mapping"
    if origin is not None and issubclass(origin, Sequence):
        return f"list of {describe_type(arguments[0])}"
    return str(hint.__name__)


# -- plain values -> configuration


@dataclass(frozen=True)
class CommandLineValue:
    """Value of an option on the command line, both parsed and as typed.

    Attributes:
        value: parsed value, or the text if `unparsed` is set
        text: text that the user typed; options of type string use it, so that `trial_name=1.10` is
            read as "1.10" and not as the number 1.1
        unparsed: set only if the text cannot be parsed or would be parsed as a sweep
    """

    value: Any
    text: str
    unparsed: UnparsedValue | None = None


@dataclass(frozen=True)
class UnparsedValue:
    """Text from the command line that cannot be parsed, or that would be parsed as a sweep.

    A sweep, such as `1,2`, is a request for one run per value. Options that take a string can use
    `text`, and options that take a list of strings can use `items`. All other options raise
    `error`.

    Attributes:
        text: whole text, or None if it is a bracketed list
        items: elements of the bracketed list, or None if the text is not a bracketed list
        sweep: True if the text would be parsed as a sweep; otherwise, an option that takes a list
            of strings can also use `text` as the only element
        error: error to raise for an option that cannot use the text
    """

    text: str | None
    items: tuple[str, ...] | None
    sweep: bool
    error: ConfigError

    def read_as(self, hint: Any) -> str | list[str]:
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            kinds = typing.get_args(hint)
        else:
            kinds = (hint,)
        if self.text is not None and str in kinds:
            return self.text
        if list[str] in kinds and self.items is not None:
            return list(self.items)
        if list[str] in kinds and self.text is not None and not self.sweep:
            return [self.text]
        raise self.error


def read(
    base: Config, values: Mapping[str, Any], prefix: str = "", *, known: Sequence[str] = ()
) -> Config:
    """Return a copy of `base` in which `values` are set, each converted to its field's type.

    `values` can be nested. `prefix` is the dotted prefix of the option names, for a nested group.
    Raises `ConfigError` for an unknown name and for a value of the wrong type. For an unknown name,
    the message suggests similar names among `known` (default: the options of `base`).
    """
    names = known or [leaf.name for leaf in iterate_options(base)]
    hints = _get_hints(type(base))
    allowed = {spec.name: spec for spec in list_visible_fields(base)}
    changed = {spec.name: getattr(base, spec.name) for spec in fields(base) if spec.init}  # type: ignore[arg-type]
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in allowed:
            raise build_unknown_option_error(_qualify_name(name, value), names)
        current = changed[key]
        if is_dataclass(current) and isinstance(value, Mapping):
            changed[key] = read(current, value, f"{name}.", known=names)
        else:
            changed[key] = coerce(value, hints[key], name)
    try:
        return type(base)(**changed)
    except ConfigError as error:
        raise _qualify_option(error, prefix, allowed) from None


def _qualify_option(error: ConfigError, prefix: str, names: Iterable[str]) -> ConfigError:
    """Return `error` with `prefix` added to the option's name at the start of its message.

    The error is returned unchanged if its message does not begin with one of the option names
    `names`.
    """
    begins = re.match(r"([a-z_]+)(=| and )", str(error))
    if begins and begins[1] in names:
        return ConfigError(f"{prefix}{error}")
    return error


def _qualify_name(name: str, value: Any) -> str:
    """Return the dotted name of an option as the user wrote it, for a message.

    For example, the name `a` with the value `{"b": {"c": 1}}` becomes `a.b.c`.
    """
    while isinstance(value, Mapping) and len(value) == 1:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def build_unknown_option_error(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error for an unknown option.

    The message suggests known options whose dotted name has the same last component, then options
    with a similar name.
    """
    root = name.split(".")[0]
    last = name.rsplit(".", 1)[-1]
    same_end = sorted(
        (k for k in known if k.rsplit(".", 1)[-1] == last), key=lambda k: k.split(".")[0] != root
    )
    close = list(dict.fromkeys([*same_end, *find_nearest(name, known)]))[:3]
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = "--help lists every option"
    return ConfigError(f"unknown option {name!r}; {hint}")


def coerce(value: Any, hint: Any, name: str) -> Any:
    """Return `value` converted to the type `hint`. Raises `ConfigError` if it cannot be converted.

    A string such as "1e-5" is accepted for a number, but 1.5 is not accepted for an int. `name` is
    the option's name for error messages.
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    # Choose between a text and the value that it spells.
    if isinstance(value, CommandLineValue) and value.unparsed is not None:
        value = value.unparsed.read_as(hint)
    if isinstance(value, CommandLineValue):
        null = value.value is None and type(None) in arguments
        accepts_text = hint is str or str in arguments
        value = value.text if accepts_text and not null else value.value
    # Any value, unions and literals.
    if hint is Any or isinstance(hint, TypeVar):
        return to_plain(value)
    if origin in (typing.Union, types.UnionType):
        return _coerce_union(value, arguments, name)
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise _build_error(name, value, f"must be one of {', '.join(map(str, arguments))}")
    # Groups of options, mappings and lists.
    if is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return read(hint(), value, f"{name}.")
        first = next(iterate_options(hint(), f"{name}.")).name
        raise _build_error(name, value, f"is a group of options; set one of them, such as {first}")
    container = origin or hint
    if isinstance(container, type) and issubclass(container, Mapping):
        return _coerce_mapping(value, arguments[1] if arguments else Any, name)
    if isinstance(container, type) and issubclass(container, Sequence) and container is not str:
        item = arguments[0] if arguments else Any
        items = value if isinstance(value, (list, tuple)) else [value]
        return [coerce(each, item, f"{name}[{index}]") for index, each in enumerate(items)]
    return _coerce_scalar(value, hint, name)


def to_plain(value: Any) -> Any:
    """Return nested values with each `CommandLineValue` replaced by its parsed value."""
    if isinstance(value, CommandLineValue):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return value


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the visible options as nested plain values.

    The result can be written to YAML, compared with the options of another run, or passed to
    `read`.
    """
    mapping = {}
    for spec in list_visible_fields(config):
        value = getattr(config, spec.name)
        mapping[spec.name] = to_mapping(value) if is_dataclass(value) else to_plain(value)
    return mapping


# -- rules


def find_problem(spec: Field[Any], value: Any) -> str | None:
    """Return a description of what is wrong with a field's value, or None if it is valid.

    The description can include a fix after a semicolon.
    """
    rules = spec.metadata
    if value is None or not rules:
        return None
    if rules.get("choices") is not None and value not in rules["choices"]:
        return f"must be one of {', '.join(map(str, rules['choices']))}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value != value:
            return "must be a number"
        if rules.get("at_least") is not None and not value >= rules["at_least"]:
            return f"must be at least {rules['at_least']}"
        if rules.get("at_most") is not None and not value <= rules["at_most"]:
            return f"must be at most {rules['at_most']}"
        if rules.get("below") is not None and not value < rules["below"]:
            return f"must be below {rules['below']}"
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            return f"must be at most {LARGEST_INTEGER}"
    if isinstance(value, str) and not value.isprintable() and "\0" in value:
        return "must not contain the character NUL"
    if value == "" and spec.default is None:
        return "is empty; leave the option out, or write null"
    check = rules.get("check")
    return check(value) if check else None


def validate(config: Any, path: str = "") -> None:
    """Check the type and the rule of every field of a dataclass, including nested ones.

    Raises `ConfigError`, which names the dotted option, its value and the rule. Values are not
    converted, unlike in `read`: for example, the text "3" is an error in a field for numbers.
    """
    hints = _get_hints(type(config))
    try:
        replace(config)  # run `__post_init__` again, since attributes can have changed
    except ConfigError as error:
        raise _qualify_option(error, path, hints) from None
    for spec in fields(config):
        value = getattr(config, spec.name)
        name = f"{path}{spec.name}"
        if is_dataclass(value) and not isinstance(value, type):
            validate(value, f"{name}.")
            continue
        wanted = coerce(value, hints[spec.name], name)
        as_list = list(value) if isinstance(value, tuple) else value
        # NaN differs from itself; the field's rule reports it
        if wanted != as_list and wanted == wanted:
            raise _build_error(
                name, value, f"must be {describe_type(hints[spec.name])}; write {wanted!r}"
            )
        wrong = find_problem(spec, value)
        if wrong:
            raise _build_error(name, value, wrong)


def _build_error(name: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(f"{name}={shorten(repr(to_plain(value)), LONGEST_VALUE)}: {rule}")


# Cache of type hints by class; evaluating string annotations is slow.
_HINTS: dict[type[Any], Mapping[str, Any]] = {}


def _get_hints(cls: type[Any]) -> Mapping[str, Any]:
    """Return the types of a configuration class's fields, by name."""
    if cls not in _HINTS:
        _HINTS[cls] = types.MappingProxyType(typing.get_type_hints(cls))
    return _HINTS[cls]


def _coerce_union(value: Any, arguments: tuple[Any, ...], name: str) -> Any:
    if type(None) in arguments and (value is None or value in ("None", "null")):
        return None
    wanted = [a for a in arguments if a is not type(None)]
    failures = []
    for hint in wanted:
        try:
            return coerce(value, hint, name)
        except ConfigError as failure:
            failures.append(failure)
    if len(failures) == 1:
        raise failures[0]
    raise _build_error(name, value, f"must be {' or '.join(describe_type(a) for a in arguments)}")


def _coerce_mapping(value: Any, item: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _build_error(
            name, value, f"must be a mapping; write {name}.KEY=VALUE or '{name}={{KEY: VALUE}}'"
        )
    return {str(key): coerce(each, item, f"{name}.{key}") for key, each in value.items()}


def _coerce_scalar(value: Any, hint: Any, name: str) -> Any:
    if hint is bool:
        truth = {"true": True, "false": False}.get(str(value).lower())
        if not isinstance(value, (bool, str)) or truth is None:
            raise _build_error(name, value, "must be true or false")
        return truth
    if hint is str:
        if not isinstance(value, str):
            if isinstance(value, Mapping | list | tuple):
                raise _build_error(name, value, "must be a text")
            spelled = "null" if value is None else value
            raise _build_error(name, value, f"must be a text; quote it: {name}='{spelled}'")
        return value
    if hint in (int, float):
        return _coerce_number(value, hint, name)
    raise _build_error(
        name,
        value,
        f"has the type {describe_type(hint)}, which no command line can write; set it in code",
    )


def _coerce_number(value: Any, hint: Any, name: str) -> int | float:
    if hint is int:
        rule = "must be a whole number, such as 8"
    else:
        rule = "must be a number, such as 0.1 or 1e-5"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _build_error(name, value, rule)
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _build_error(name, value, rule) from None
    if hint is float:
        return number
    if not number.is_integer():
        raise _build_error(name, value, rule)
    if not isinstance(value, str) or value.lstrip("+-").isdigit():
        return int(value)
    return int(number)
