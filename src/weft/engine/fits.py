"""Smallest GPU for a training run, and options with which the run fits a smaller one; no torch.

The memory of every alternative is estimated like that of the run itself (`weft.engine.memory`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.engine.memory import NetworkShape, Settings, Work, estimate, total
from weft.extras import install

GIB = 2.0**30
MIB = 2.0**20
# (nominal GB, least GiB of cards of that size), without the share of driver and torch
# (`TAKEN`) subtracted
GPUS = ((24, 22.0), (40, 39.4), (48, 44.4), (80, 79.1), (141, 139.8))
TAKEN = 1.5  # GiB that driver and torch take
RANK = 16  # rank of the suggested adapters
SHARDS = (2, 4, 8)
ADAPTED = 4  # matrices of attention that get adapters
# Requirements of options: (imported package, extra of weft that installs it).
EXTRAS = {"optimizer.state_dtype=8bit": ("bitsandbytes", "8bit"), "fp8=true": ("torchao", "fp8")}


@dataclass(frozen=True)
class Case:
    """One role: its network, settings and calls."""

    shape: NetworkShape
    settings: Settings
    works: tuple[Work, ...]


Cases = Mapping[str, Case]


@dataclass(frozen=True)
class Way:
    """Options to set, and the number of bytes that each GPU then needs."""

    options: str
    size: float
    devices: int = 1
    lacks: str = ""  # command that installs missing packages

    @property
    def gpu(self) -> int | None:
        """Size in GB of the smallest GPU with enough memory; None if no GPU has enough."""
        return next((gb for gb, gib in GPUS if self.size / GIB <= gib - TAKEN), None)


def ways(cases: Cases) -> list[Way]:
    """Return the current settings and alternatives that need less memory.

    The alternatives are recomputation, and recomputation with one more change. Omitted are changes
    already made, and adapters if they are refused (fp8).
    """
    option = "gradient_checkpointing=true"
    again = _changed(cases, lambda s: replace(s, recompute=1))
    narrow = _changed(
        again, lambda s: replace(s, state_dtype="8bit") if s.optimizer == "adamw" else s
    )
    on_host = _changed(again, lambda s: replace(s, offload_optimizer=True))
    adapted = {name: _adapted(case) for name, case in again.items()}
    found = [Way("as set", _total(cases))]
    if again != cases:
        found.append(Way(option, _total(again)))
    before = f"{option} " if again != cases else ""
    for more, changed in (
        ("optimizer.state_dtype=8bit", narrow),
        ("optimizer.offload=true", on_host),
        (f"lora.r={RANK}", adapted),
    ):
        if changed != again:
            found.append(Way(f"{before}{more}", _total(changed), lacks=lacking(more)))
    for count in () if any(case.shape.shards > 1 for case in cases.values()) else SHARDS:
        shared = {name: _sharded(case, count) for name, case in again.items()}
        found.append(Way(f"{before}layout=d{count}", _total(shared), count))
    return found


def lacking(*options: str) -> str:
    """Return the command that installs the packages these options need, or "" if none is missing."""
    extras = [
        EXTRAS[option][1]
        for option in options
        if option in EXTRAS and not _is_there(EXTRAS[option][0])
    ]
    return install(",".join(extras)) if extras else ""


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def lines(cases: Cases, begin: str) -> Iterator[str]:
    """Yield a line that begins with `begin` and names the smallest GPU that holds the run.

    Further lines name changes with which the run fits on smaller GPUs, or the least it needs.
    """
    if not any(case.settings.trained for case in cases.values()):
        return
    first, *others = ways(cases)
    yield f"{begin}about {_size(first.size)}, {_held(first)}"
    best = first.gpu or GPUS[-1][0] + 1
    smaller = [way for way in others if way.gpu is not None and way.gpu < best]
    for way in smaller:
        yield f"  {way.options}: about {_size(way.size)}{' each' if way.devices > 1 else ''}, {_held(way)}{_needs(way)}"
    if first.gpu is None and not smaller:
        least = min(others, key=lambda way: way.size, default=first)
        yield f"  the least is {_size(least.size)} ({least.options}); shard it over more GPUs (layout=d16)"


def smaller(cases: Cases, usable: float) -> Iterator[str]:
    """Yield lines on the changes with which the run fits in `usable` bytes.

    If none suffices, the line names the one that needs least memory.
    """
    others = ways(cases)[1:]
    found = [way for way in others if way.size <= usable]
    if found:
        for way in found:
            yield f"with {way.options}: about {_size(way.size)}{' each' if way.devices > 1 else ''}{_needs(way)}"
    elif others:
        least = min(others, key=lambda way: way.size)
        yield f"the least is {_size(least.size)} ({least.options}); take more or larger GPUs"


def table(found: Sequence[Way]) -> list[str]:
    """Return all ways, one a line."""
    width = max(len(way.options) for way in found)
    return [
        f"{way.options:<{width}}  {_size(way.size):>12}{' each' if way.devices > 1 else '     '}  "
        f"{_held(way)}{_needs(way)}"
        for way in found
    ]


def _needs(way: Way) -> str:
    return f" (needs {way.lacks})" if way.lacks else ""


def _held(way: Way) -> str:
    many = f"{way.devices} GPUs" if way.devices > 1 else "a GPU"
    if way.gpu is not None:
        return f"fits {many} of {way.gpu} GB"
    return f"more than {many} of {GPUS[-1][0]} GB"


def _size(number: float) -> str:
    if number >= 0.1 * GIB:
        return f"{number / GIB:.1f} GiB"
    return f"{number / MIB:.0f} MiB"


def _total(cases: Cases) -> float:
    """Return the bytes of a GPU with all roles, or of each of several GPUs."""
    return float(
        total(
            {name: estimate(case.shape, case.settings, case.works) for name, case in cases.items()}
        )
    )


def _changed(cases: Cases, change: Callable[[Settings], Settings]) -> Cases:
    """Apply `change` to the settings of the trained roles."""
    return {
        name: replace(case, settings=change(case.settings)) if case.settings.trained else case
        for name, case in cases.items()
    }


def _adapted(case: Case) -> Case:
    """Return a trained role with adapters on all matrices of its blocks instead of full training.

    Returns roles with experts, fp8 or adapters unchanged.
    """
    shape = case.shape
    refused = not shape.fused or case.settings.fp8
    if not case.settings.trained or refused or shape.trainable != shape.parameters:
        return case
    mlp = (3 if shape.gated else 2) * (shape.hidden + shape.inner)
    attention = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key)
    count = shape.layers * RANK * (attention + mlp)
    kept = RANK * (ADAPTED + (3 if shape.gated else 2)) + shape.inner
    adapted = replace(shape, parameters=shape.parameters + count, trainable=count, adapters=kept)
    return replace(case, shape=adapted)


def _sharded(case: Case, ranks: int) -> Case:
    """Return one rank's part of a trained role; other roles are whole on every rank."""
    if not case.settings.trained:
        return case
    shape = case.shape
    mine = replace(
        shape,
        parameters=-(-shape.parameters // ranks),
        trainable=-(-shape.trainable // ranks),
        shards=shape.shards * ranks,
    )
    return replace(case, shape=mine)
