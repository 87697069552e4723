"""What the keys of an Open-Assistant configuration come to: options of weft, notes, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.cli.aliases import Translation, data_ranks
from weft.experiments.common import RunConfig
from weft.options import leaves

SFT = "sft"
RM = "rm"
RL = "rl"
# Which of Open-Assistant's trainers a quickstart stands for, by the options of its algorithm.
MODES = {"sft": SFT, "distill": SFT, "rw": RM, "dpo": RM}
IMPLIED = "Open-Assistant's trainer"  # the key of what its code does whatever the keys say
TRL = "trlx."  # before the keys of trlX's configuration
NOTHING = object()


@dataclass(frozen=True)
class Option:
    """A value for an option of weft, and the key that says so."""

    value: Any
    key: str


@dataclass
class Mapped:
    """The keys of a stack of sections, and what they come to.

    `ranks` says how late in the stack a key was set.
    """

    config: RunConfig
    values: Mapping[str, Any]  # without those that are null
    ranks: Mapping[str, int]
    # weft's own options that are set beside them
    given: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Option] = field(default_factory=dict)
    # reason -> the keys that it holds for
    notes: dict[str, list[str]] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (key, what is wrong)
    key: str = IMPLIED  # that is being read
    known: frozenset[str] = frozenset()  # the options of the experiment

    def __post_init__(self) -> None:
        self.known = self.known or frozenset(leaf.name for leaf in leaves(self.config))

    @property
    def mode(self) -> str:
        return MODES.get(self.config.algorithm, MODES.get(self.config.generation.split(".")[0], RL))

    @property
    def data_ranks(self) -> int:
        ranks = data_ranks(Translation(self.config, self.known), dict(self.given))
        if isinstance(ranks, int) and not isinstance(ranks, bool):
            return ranks
        return 1

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def under(self, key: str) -> Mapped:
        """The same mapping while it reads `key`."""
        return replace(self, key=key)

    def put(self, target: str, value: Any, *, off: Any = NOTHING) -> None:
        """An option of the run; `{model}` is every trained role, `{first}` the main one,
        `{algorithm}` its group.

        `off` is the value that asks for nothing, which an experiment without the option may have
        too. A key set later in the stack goes over an earlier one.
        """
        config = self.config
        roles = config.trained_roles or (config.main_role,)
        for role in roles if "{model}" in target else ("",):
            name = target.replace("{model}", role).replace("{first}", config.main_role)
            name = name.replace("{algorithm}", config.algorithm).replace("{gen}", config.generation)
            if off is not NOTHING and value == off and name not in self.known:
                continue
            before = self.options.get(name)
            if before is None or self.rank(self.key) >= self.rank(before.key):
                self.options[name] = Option(value, self.key)

    def rank(self, key: str) -> int:
        """How late a key was set; one within a group, such as `rank_config.dtype`, by itself or
        with the group.
        """
        return self.ranks.get(key, self.ranks.get(key.split(".")[0], -1))

    def note(self, why: str) -> None:
        keys = self.notes.setdefault(why, [])
        if self.key not in keys:
            keys.append(self.key)

    def refuse(self, value: Any, why: str) -> None:
        self.refused.append((self.key, f"{self.key.removeprefix(TRL)}={shown(value)}: {why}"))

    def truth(self, value: Any) -> bool:
        """Whether a switch is on; refused where it is neither true nor false."""
        if isinstance(value, bool):
            return value
        self.refuse(value, "must be true or false")
        return False

    def number(self, value: Any, least: float = 0.0) -> bool:
        """Whether it is a number of at least `least`; refused where it is none."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            self.refuse(value, f"must be a number, at least {least:g}")
            return False
        return True


def shown(value: Any) -> str:
    """A value as YAML spells it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Key:
    """What becomes of a key.

    `says` is its line in the documentation; `modes` are the trainers that read it.
    """

    says: str
    rule: Callable[[Mapped, Any], None]
    modes: Sequence[str] = (SFT, RM)


def to(target: str, *modes: str, off: Any = NOTHING) -> Key:
    """A key that is an option of weft under another name."""
    return Key(
        f"`{_named(target)}`",
        lambda done, value: done.put(target, value, off=off),
        modes or (SFT, RM),
    )


def anyway(why: str, *modes: str) -> Key:
    """A key that says only what weft does anyway, or how Open-Assistant did it: noted once."""
    return Key(f"nothing: {why}", lambda done, value: done.note(why), modes or (SFT, RM, RL))


def never(why: str, *allowed: Any, modes: Sequence[str] = (SFT, RM, RL)) -> Key:
    """A key that may hold only the `allowed` values, which ask for nothing."""

    def rule(done: Mapped, value: Any) -> None:
        if value not in allowed:
            done.refuse(value, why)

    return Key(f"refused unless {' or '.join(shown(each) for each in allowed)}: {why}", rule, modes)


def _named(target: str) -> str:
    names = {"{model}": "MODEL", "{first}": "MODEL", "{gen}": "GEN", "{algorithm}": "ALGORITHM"}
    for mark, name in names.items():
        target = target.replace(mark, name)
    return target
