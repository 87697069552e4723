"""Search for the smallest GPU on which a run fits, and for options that need less memory.

The memory of every alternative is estimated like that of the run itself (`weft.planner.memory`). The
module does not import torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.extras import install
from weft.planner.memory import CallDemand, MemorySettings, NetworkShape, compute_peak, estimate

GIB = 2.0**30
MIB = 2.0**20
# Sizes of GPUs: (nominal GB, smallest GiB of cards sold with that size). The GiB include the part
# that driver and torch take (`RESERVED_GIB`).
GPUS = ((24, 22.0), (40, 39.4), (48, 44.4), (80, 79.1), (141, 139.8))
RESERVED_GIB = 1.5  # GiB that driver and torch take
ADAPTER_RANK = 16  # rank of the suggested adapters
SHARDS = (2, 4, 8)
ADAPTED_MATRICES = 4  # matrices of attention that get adapters
# Requirements of options: (imported package, extra of weft that installs it).
EXTRAS = {"optimizer.state_dtype=8bit": ("bitsandbytes", "8bit"), "fp8=true": ("torchao", "fp8")}


@dataclass(frozen=True)
class MemoryCase:
    """Input for estimating the memory of one role.

    `works` are the memory demands of the role's model calls.
    """

    shape: NetworkShape
    settings: MemorySettings
    works: tuple[CallDemand, ...]


Cases = Mapping[str, MemoryCase]


@dataclass(frozen=True)
class MemoryOption:
    """Options to set, and the memory that each GPU needs with these options.

    Attributes:
        options: Options as the user writes them, such as `lora.r=16`.
        size: Memory that each GPU needs, in bytes.
        devices: Number of GPUs.
        lacks: Command that installs missing packages, or "" if none is missing.
    """

    options: str
    size: float
    devices: int = 1
    lacks: str = ""  # command that installs missing packages

    @property
    def smallest_gpu_gb(self) -> int | None:
        """Size in GB of the smallest GPU with enough memory; None if no GPU has enough."""
        return next((gb for gb, gib in GPUS if self.size / GIB <= gib - RESERVED_GIB), None)


def list_memory_options(cases: Cases) -> list[MemoryOption]:
    """Return the memory needed with the current settings and with alternatives that need less.

    Every alternative recomputes layers in the backward pass. Most combine this with one more
    change: 8-bit optimizer states, an offloaded optimizer, LoRA adapters or more GPUs. A change
    that is already made is left out. LoRA adapters are also left out if they are not supported, as
    with fp8.
    """
    option = "gradient_checkpointing=true"
    again = _change_trained(cases, lambda s: replace(s, recompute=1))
    narrow = _change_trained(
        again, lambda s: replace(s, state_dtype="8bit") if s.optimizer == "adamw" else s
    )
    on_host = _change_trained(again, lambda s: replace(s, offload_optimizer=True))
    adapted = {name: _with_adapters(case) for name, case in again.items()}
    options = [MemoryOption("as set", _estimate_total(cases))]
    if again != cases:
        options.append(MemoryOption(option, _estimate_total(again)))
    before = f"{option} " if again != cases else ""
    for more, changed in (
        ("optimizer.state_dtype=8bit", narrow),
        ("optimizer.offload=true", on_host),
        (f"lora.r={ADAPTER_RANK}", adapted),
    ):
        if changed != again:
            options.append(
                MemoryOption(
                    f"{before}{more}", _estimate_total(changed), lacks=find_install_command(more)
                )
            )
    for count in () if any(case.shape.shards > 1 for case in cases.values()) else SHARDS:
        shared = {name: _shard_case(case, count) for name, case in again.items()}
        options.append(MemoryOption(f"{before}layout=d{count}", _estimate_total(shared), count))
    return options


def find_install_command(*options: str) -> str:
    """Return the command that installs the packages for these options, or "" if none is missing."""
    extras = []
    for option in options:
        if option in EXTRAS and not _is_installed(EXTRAS[option][0]):
            extras.append(EXTRAS[option][1])
    return install(",".join(extras)) if extras else ""


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def format_fit(cases: Cases, begin: str) -> Iterator[str]:
    """Yield a line that begins with `begin` and shows the smallest GPU on which the run fits.

    Further lines show options with which the run fits on smaller GPUs. If no GPU is large enough,
    the last line shows the least memory that the run can need. Nothing is yielded if no role is
    trained.
    """
    if not any(case.settings.trained for case in cases.values()):
        return
    first, *others = list_memory_options(cases)
    yield f"{begin}about {_format_size(first.size)}, {_format_fit(first)}"
    best = first.smallest_gpu_gb or GPUS[-1][0] + 1
    smaller = [
        way for way in others if way.smallest_gpu_gb is not None and way.smallest_gpu_gb < best
    ]
    for way in smaller:
        each = " each" if way.devices > 1 else ""
        fit = f"{_format_fit(way)}{_format_install(way)}"
        yield f"  {way.options}: about {_format_size(way.size)}{each}, {fit}"
    if first.smallest_gpu_gb is None and not smaller:
        least = min(others, key=lambda way: way.size, default=first)
        yield f"  the least is {_format_size(least.size)} ({least.options}); shard it over more GPUs (layout=d16)"


def format_smaller_options(cases: Cases, usable: float) -> Iterator[str]:
    """Yield lines that suggest options with which the run needs at most `usable` bytes per GPU.

    There is one line for each suggestion. If no options reduce the memory enough, a single line
    shows those that need the least memory.
    """
    others = list_memory_options(cases)[1:]
    fitting_options = [way for way in others if way.size <= usable]
    if fitting_options:
        for way in fitting_options:
            each = " each" if way.devices > 1 else ""
            size = f"{_format_size(way.size)}{each}{_format_install(way)}"
            yield f"with {way.options}: about {size}"
    elif others:
        least = min(others, key=lambda way: way.size)
        yield f"the least is {_format_size(least.size)} ({least.options}); take more or larger GPUs"


def format_table(options: Sequence[MemoryOption]) -> list[str]:
    """Return a line for each memory option, with its settings, size and smallest GPU."""
    width = max(len(way.options) for way in options)
    table: list[str] = []
    for way in options:
        table.append(
            f"{way.options:<{width}}  {_format_size(way.size):>12}{' each' if way.devices > 1 else '     '}  "
            f"{_format_fit(way)}{_format_install(way)}"
        )
    return table


def _format_install(way: MemoryOption) -> str:
    return f" (needs {way.lacks})" if way.lacks else ""


def _format_fit(way: MemoryOption) -> str:
    many = f"{way.devices} GPUs" if way.devices > 1 else "a GPU"
    if way.smallest_gpu_gb is not None:
        return f"fits {many} of {way.smallest_gpu_gb} GB"
    return f"more than {many} of {GPUS[-1][0]} GB"


def _format_size(number: float) -> str:
    if number >= 0.1 * GIB:
        return f"{number / GIB:.1f} GiB"
    return f"{number / MIB:.0f} MiB"


def _estimate_total(cases: Cases) -> float:
    """Return the number of bytes that all roles together need on one GPU."""
    return float(
        compute_peak(
            {name: estimate(case.shape, case.settings, case.works) for name, case in cases.items()}
        )
    )


def _change_trained(cases: Cases, change: Callable[[MemorySettings], MemorySettings]) -> Cases:
    """Return the roles, with `change` applied to the settings of trained roles."""
    trained = {}
    for name, case in cases.items():
        trained[name] = (
            replace(case, settings=change(case.settings)) if case.settings.trained else case
        )
    return trained


def _with_adapters(case: MemoryCase) -> MemoryCase:
    """Return the case with full training replaced by LoRA adapters on all matrices of the blocks.

    Cases of frozen roles, and cases with experts, fp8 or adapters, are returned unchanged.
    """
    shape = case.shape
    refused = not shape.fused or case.settings.fp8
    if not case.settings.trained or refused or shape.trainable != shape.parameters:
        return case
    mlp = (3 if shape.gated else 2) * (shape.hidden + shape.inner)
    attention = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key)
    count = shape.layers * ADAPTER_RANK * (attention + mlp)
    saved_elements = ADAPTER_RANK * (ADAPTED_MATRICES + (3 if shape.gated else 2)) + shape.inner
    adapted = replace(
        shape, parameters=shape.parameters + count, trainable=count, adapters=saved_elements
    )
    return replace(case, shape=adapted)


def _shard_case(case: MemoryCase, ranks: int) -> MemoryCase:
    """Return the memory estimate's input for one rank, if the role is sharded over `ranks` ranks.

    `case` is the input without sharding. It is returned unchanged if the role is frozen.
    """
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
