"""Rules for EasyLM's flags: default, type and treatment of each flag."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Treatment = Literal["copy", "compute", "ignore", "refuse"]


@dataclass(frozen=True)
class NumberRange:
    """Range of the numbers that a flag accepts.

    The range is checked before the translation, so that messages name the flag and not weft's
    option.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """Return the bounds, such as "at least 0 and below 1"."""
        bounds = [
            f"{name.replace('_', ' ')} {bound}"
            for name, bound in asdict(self).items()
            if bound is not None
        ]
        return " and ".join(bounds)


@dataclass(frozen=True)
class FlagRule:
    """Rule for one flag.

    Attributes:
        default: EasyLM's default, or "" if the flag has none
        treatment: "copy" if the flag's value or default becomes the value of `options`; "compute"
            if the translation computes options from it; "ignore" if the flag has no effect in
            weft; "refuse" if only the default is accepted
        options: weft's options that the flag sets. {model} is the role whose checkpoint the command
            trains, {trained} each trained role, {roles} each role, {algorithm} the group of the
            algorithm's options
        note: remark for the documentation; for "ignore" and "refuse" the reason
        kind: type of the values; None for the type of `default`
        may_be_empty: True if an empty text is a value. Otherwise, it means that the flag is not set
        limits: range of accepted numbers; None for all numbers
    """

    default: Any
    treatment: Treatment
    options: tuple[str, ...] = ()
    note: str = ""
    kind: type | None = None
    may_be_empty: bool = False
    limits: NumberRange | None = None

    @property
    def value_type(self) -> type:
        return type(self.default) if self.kind is None else self.kind


def copy(
    default: Any, *options: str, note: str = "", limits: NumberRange | None = None
) -> FlagRule:
    return FlagRule(default, "copy", options, note, limits=limits)


def compute(
    default: Any,
    *options: str,
    note: str = "",
    kind: type | None = None,
    may_be_empty: bool = False,
    limits: NumberRange | None = None,
) -> FlagRule:
    return FlagRule(default, "compute", options, note, kind, may_be_empty, limits)


def ignore(
    default: Any, note: str, kind: type | None = None, limits: NumberRange | None = None
) -> FlagRule:
    return FlagRule(default, "ignore", (), note, kind, may_be_empty=True, limits=limits)


def refuse(default: Any, note: str, kind: type | None = None) -> FlagRule:
    return FlagRule(default, "refuse", (), note, kind)


COUNT = NumberRange(1)
LENGTH = NumberRange(2)  # length of a sequence, with at least one token to predict
NOT_NEGATIVE = NumberRange(0)
POSITIVE = NumberRange(above=0)
SHARE = NumberRange(0, at_most=1)
DECAY = NumberRange(0, below=1)
