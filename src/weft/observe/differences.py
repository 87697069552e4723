"""What runs differ in: their options, their algorithms, what gave their rewards, and what they were computed with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.observe import configuration
from weft.observe.run_files import RunFiles

ALGORITHM = "algorithm"
SOURCES = (
    "reward",
    "reward_column",
    "rew.path",
    "rew.url",
    "rew_step",
    "rew_weight",
)  # options that say what a reward is
FACTS = ("commit", "host", "hardware")


def differing(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Option -> its value in each run, where these are not all the same; first the algorithm. An option of the algorithm's own
    group is matched with that of another algorithm: `grpo|ppo.gen.max_new_tokens`. One that some runs have not at all counts
    where somebody has set it, and so does one of two algorithms. What weft chose because nobody did is no difference."""
    algorithms = [configuration.algorithm(run) for run in runs]
    found: dict[str, list[Any]] = {ALGORITHM: list(algorithms)} if len(set(algorithms)) > 1 and all(algorithms) else {}
    flat = [dict(configuration.flat(run.config)) for run in runs]
    own = [{_matched(name, algorithms): name for name in values} for values in flat]
    told = [configuration.changed(run) for run in runs]
    for name in dict.fromkeys(name for names in own for name in names):
        real = [names.get(name) for names in own]
        values = [each.get(key) if key is not None else None for each, key in zip(flat, real, strict=True)]
        if name in configuration.NAMES or all(value == values[0] for value in values):
            continue
        left_open = [
            configuration.left_open(value) or key in configuration.chosen(run)
            for value, key, run in zip(values, real, runs, strict=True)
        ]
        changed = any(
            key is not None and (each is None or (key in each and key not in configuration.chosen(run)))
            for each, key, run in zip(told, real, runs, strict=True)
        )
        alike = all(key in values for key, values in zip(real, flat, strict=True)) and len(set(real)) == 1
        if not all(left_open) and (changed or alike):
            found[_called(name, real)] = values
    return found


def _matched(name: str, algorithms: Sequence[str | None]) -> str:
    """What an option is called whatever the algorithm."""
    group, dot, rest = name.partition(".")
    return f"{ALGORITHM}.{rest}" if dot and group in algorithms else name


def _called(name: str, real: Sequence[str | None]) -> str:
    """What stands in the table."""
    groups = dict.fromkeys(each.partition(".")[0] for each in real if each is not None)
    return name if not name.startswith(f"{ALGORITHM}.") else f"{'|'.join(sorted(groups))}.{name.partition('.')[2]}"


def rewards_compare(runs: Sequence[RunFiles]) -> bool:
    """Whether a reward means the same in all runs: it comes from the same reward model and functions, as far as is known."""
    found = []
    for run in runs:
        options = dict(configuration.flat(run.config))
        if any(not configuration.unset(options.get(name)) for name in SOURCES[:4]):
            found.append([configuration.written(options.get(name)) for name in SOURCES])
    return all(each == found[0] for each in found)


def versions(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """What they were computed with, where that differs."""
    starts = [run.record.get("starts") for run in runs]
    last = [
        dict(found[-1]) if isinstance(found, list) and found and isinstance(found[-1], Mapping) else {}
        for found in starts
    ]
    told = [{**(one.get("versions") or {}), **{key: one.get(key) for key in FACTS}} for one in last]
    names = dict.fromkeys(name for one in told for name in one)
    rows = [(name, [str(one.get(name) or "") for one in told]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]
