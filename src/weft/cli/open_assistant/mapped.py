"""Result of mapping an Open-Assistant configuration: options, notes and rejected keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.cli.aliases import Translation, data_ranks
from weft.experiments.common import RunConfig
from weft.options import iterate_options

SFT = "sft"
RM = "rm"
RL = "rl"
# Algorithm of a quickstart -> the corresponding trainer of Open-Assistant.
MODES = {"sft": SFT, "distill": SFT, "rw": RM, "dpo": RM}
IMPLIED = "Open-Assistant's trainer"  # key of settings that its code always applies
TRL = "trlx."  # prefix of keys of trlX's configuration
NOTHING = object()


@dataclass(frozen=True)
class Option:
    """A value for an option of weft, and the key that sets it."""

    value: Any
    key: str


@dataclass
class Mapped:
    """Keys of a stack of sections, and the options they map to.

    `ranks` maps a key to its position in the stack.
    """

    config: RunConfig
    values: Mapping[str, Any]  # null values left out
    ranks: Mapping[str, int]
    # weft's own options that are also set
    given: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Option] = field(default_factory=dict)
    # note -> keys that it applies to
    notes: dict[str, list[str]] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)  # (key, what is wrong)
    key: str = IMPLIED  # key being mapped
    known: frozenset[str] = frozenset()  # the options of the experiment

    def __post_init__(self) -> None:
        self.known = self.known or frozenset(leaf.name for leaf in iterate_options(self.config))

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
        """Return a view of this mapping that attributes options to `key`."""
        return replace(self, key=key)

    def put(self, target: str, value: Any, *, off: Any = NOTHING) -> None:
        """Set an option of the run.

        In `target`, `{model}` means every trained role, `{first}` for the main one,
        `{algorithm}` for its group. `off` is the value without effect, which is accepted in
        experiments that lack the option. A key set later in the stack overrides an earlier one.
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
        """Return the position of a key in the stack.

        A key in a group, such as `rank_config.dtype`, has its own position or the group's.
        """
        return self.ranks.get(key, self.ranks.get(key.split(".")[0], -1))

    def note(self, why: str) -> None:
        keys = self.notes.setdefault(why, [])
        if self.key not in keys:
            keys.append(self.key)

    def refuse(self, value: Any, why: str) -> None:
        self.refused.append((self.key, f"{self.key.removeprefix(TRL)}={shown(value)}: {why}"))

    def truth(self, value: Any) -> bool:
        """Return a Boolean value; reject any other value and return False."""
        if isinstance(value, bool):
            return value
        self.refuse(value, "must be true or false")
        return False

    def number(self, value: Any, least: float = 0.0) -> bool:
        """Return whether `value` is a number of at least `least`; reject it if not."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            self.refuse(value, f"must be a number, at least {least:g}")
            return False
        return True


def shown(value: Any) -> str:
    """Format a value as in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Key:
    """The mapping rule of a key.

    `says` is its line in the documentation; `modes` are the trainers that read it.
    """

    says: str
    rule: Callable[[Mapped, Any], None]
    modes: Sequence[str] = (SFT, RM)


def to(target: str, *modes: str, off: Any = NOTHING) -> Key:
    """Return the rule of a key that is an option of weft under another name."""
    return Key(
        f"`{_named(target)}`",
        lambda done, value: done.put(target, value, off=off),
        modes or (SFT, RM),
    )


def anyway(why: str, *modes: str) -> Key:
    """Return the rule of a key that needs no option: weft's behaviour is fixed; noted once."""
    return Key(f"nothing: {why}", lambda done, value: done.note(why), modes or (SFT, RM, RL))


def never(why: str, *allowed: Any, modes: Sequence[str] = (SFT, RM, RL)) -> Key:
    """Return the rule of a key that only accepts the `allowed` values, which have no effect."""

    def rule(done: Mapped, value: Any) -> None:
        if value not in allowed:
            done.refuse(value, why)

    return Key(f"refused unless {' or '.join(shown(each) for each in allowed)}: {why}", rule, modes)


def _named(target: str) -> str:
    names = {"{model}": "MODEL", "{first}": "MODEL", "{gen}": "GEN", "{algorithm}": "ALGORITHM"}
    for mark, name in names.items():
        target = target.replace(mark, name)
    return target
