"""Layouts and the part of a tensor that a rank holds. The only place that turns (shape, layout, rank) into a `Slice`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from weft.errors import ConfigError

Slice = tuple[slice, ...]

LETTERS = {"d": "data", "f": "fsdp", "t": "tensor", "p": "pipeline", "c": "context", "e": "expert"}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one role on one set of devices; written `d2f2t2p1c1e1`, letters left out are 1.

    `fsdp` counts the ranks that share one sharded copy (it divides `data`). Devices used: data x tensor x pipeline x context.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            degree = getattr(self, field.name)
            if degree < 1:
                raise ConfigError(f"layout: {field.name} is {degree}; every degree is at least 1")
        if self.data % self.fsdp:
            raise ConfigError(
                f"layout: f={self.fsdp} does not divide d={self.data}; f ranks of d share one sharded copy"
            )

    @classmethod
    def parse(cls, text: str, *, trained: bool = False) -> Layout:
        """Read `d2t2p1`; `f` left out is `d` for trained roles and 1 otherwise. Raises `ConfigError` on unknown letters."""
        rule = "letters d f t p c e, each once, each followed by its degree, such as d2t2p1"
        degrees: dict[str, int] = {}
        if not text or not re.fullmatch(r"([a-z]\d+)+", text):
            raise ConfigError(f"layout {text!r} cannot be read; it holds {rule}")
        for letter, degree in re.findall(r"([a-z])(\d+)", text):
            if letter not in LETTERS or LETTERS[letter] in degrees:
                raise ConfigError(f"layout {text!r}: {letter!r} is unknown or given twice; it holds {rule}")
            degrees[LETTERS[letter]] = int(degree)
        degrees.setdefault("fsdp", degrees.get("data", 1) if trained else 1)
        return cls(**degrees)

    @property
    def num_devices(self) -> int:
        return math.prod((self.data, self.tensor, self.pipeline, self.context))

    def __str__(self) -> str:
        return "".join(f"{letter}{getattr(self, name)}" for letter, name in LETTERS.items())


def whole(shape: tuple[int, ...]) -> Slice:
    """The slice that covers a tensor of `shape`."""
    return tuple(slice(0, n) for n in shape)


def shard(shape: tuple[int, ...], dim: int, parts: int, index: int) -> Slice:
    """Part `index` of `parts` equal parts along `dim`. Raises `ConfigError` where the parts would be unequal."""
    if shape[dim] % parts:
        raise ConfigError(f"{shape[dim]} entries (dim {dim} of {shape}) do not split into {parts} equal parts")
    size = shape[dim] // parts
    cut = list(whole(shape))
    cut[dim] = slice(index * size, (index + 1) * size)
    return tuple(cut)
