"""Forecast of a run's memory, the smallest GPU on which it fits, and options that need less.

The memory of every alternative is estimated like that of the run itself (`weft.planner.memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from weft.engine.spec import ModelSpec
from weft.extras import install
from weft.graph.mfc import MFCDef, Offload
from weft.observe.memory import format_size
from weft.planner.devices import GIB, GPU_SIZES, subtract_reserved
from weft.planner.memory import (
    MemoryCase,
    MemorySettings,
    RoleMemory,
    compute_peak,
    count_process_bytes,
    estimate,
    list_adapted_sizes,
)

ADAPTER_RANK = 16  # rank of the suggested adapters
SHARDS = (2, 4, 8)
# Requirements of options: (imported package, extra of weft that installs it).
EXTRAS = {"optimizer.state_dtype=8bit": ("bitsandbytes", "8bit"), "fp8=true": ("torchao", "fp8")}


# -- the forecast


Cases = Mapping[str, MemoryCase]


@dataclass(frozen=True)
class CallMemory:
    """Memory that one call needs on a device of its role, apart from what the roles always hold.

    Attributes:
        engine: Name of the role's engine on the devices of the call (`name_engines`).
        demand: Peak of the call in bytes, without the permanent memory of its role.
    """

    engine: str
    demand: float


@dataclass(frozen=True)
class MemoryForecast:
    """Forecast of the memory that each role needs, in bytes.

    `incomplete` lists the roles whose network sizes are unknown. For these roles, only weights and
    optimizer states are counted.
    """

    roles: Mapping[str, RoleMemory]
    device: str  # type of the device: cpu, cuda or another of torch's
    incomplete: tuple[str, ...]
    # GiB used by the process before the engines are built, see `measure_held_memory`
    baseline: float
    # maximum bytes of the KV cache, by generation call
    cache_limits: Mapping[str, int] = field(default_factory=dict)
    # cases for the same roles on a GPU
    on_gpu: Mapping[str, MemoryCase] = field(default_factory=dict)
    num_devices: int = 1  # devices of the run; several on CPUs are separate processes
    missing: Collection[str] = ()  # packages of `EXTRAS` that are not installed
    # memory of each call of a model whose sizes are known
    calls: Mapping[str, CallMemory] = field(default_factory=dict)

    def compute_call_peaks(self, on: Mapping[int, Sequence[str]]) -> dict[str, float]:
        """Return the peak memory in bytes of each call, on its device that needs the most.

        `on` maps the rank of each device to the names of its roles. Calls that use a device with a
        role of unknown size are left out. A process on a CPU keeps the memory that a call has freed,
        so all calls of a device have the peak of the largest.
        """
        peaks: dict[str, float] = {}
        parts = [self.select_roles(names) for names in on.values()]
        for name, call in self.calls.items():
            used = [part for part in parts if call.engine in part.roles]
            if any(part.incomplete for part in used):
                continue
            for part in used:
                if self.device == "cpu":
                    peak = part.total
                else:
                    stays = sum(role.permanent - role.away for role in part.roles.values())
                    peak = stays + part.roles[call.engine].away + call.demand
                peaks[name] = max(peaks.get(name, 0.0), peak)
        return peaks

    @property
    def total(self) -> float:
        """Total memory at the peak, in bytes."""
        on_cpu = self.device == "cpu"
        used = [role.count_used_bytes(on_cpu=on_cpu) for role in self.roles.values()]
        stays = sum(permanent for permanent, _ in used)
        most = max((additional for _, additional in used), default=0)
        return stays + most + count_process_bytes(on_cpu=on_cpu, num_devices=self.num_devices)

    def format_lines(self, on: Mapping[int, Sequence[str]] | None = None) -> Iterator[str]:
        """Yield lines for the plan that state the memory of each role, KV cache and device.

        `on` maps the rank of each device to the names of its roles; without it, all roles are on
        one device.
        """
        on = on or {0: list(self.roles)}
        for name, role in self.roles.items():
            parts = []
            for part in fields(role):
                size = getattr(role, part.name)
                if size and part.name not in ("call", "away"):
                    parts.append(f"{part.name} {format_size(size)}")
            sizes = ", ".join(parts)
            if role.away:
                sizes += f"; {format_size(role.away)} of it in host memory between its calls"
            yield f"memory of {name}: {sizes or 'shared with another role'}"
        for call, limit in self.cache_limits.items():
            yield f"memory of {call}: keys and values in at most {format_size(limit)} (gen.kv_cache_gb)"
        for device, names in on.items():
            forecast = self.select_roles(names)
            place = f" of device {device}" if len(on) > 1 else ""
            yield f"memory{place}: about {format_size(forecast.total)} {forecast.scope}"
        if len(on) == 1 and not self.incomplete:
            yield from format_fit(
                self.on_gpu,
                "" if self.device == "cuda" else "on a GPU in bfloat16: ",
                self.missing,
            )

    def select_roles(self, names: Sequence[str]) -> MemoryForecast:
        """Return the forecast for only the roles in `names`."""
        roles = {}
        for name in names:
            if name in self.roles:
                roles[name] = self.roles[name]
        return replace(
            self, roles=roles, incomplete=tuple(name for name in self.incomplete if name in roles)
        )

    @property
    def scope(self) -> str:
        """Text that qualifies the total in messages, usually "at most".

        If the network sizes of some roles are unknown, their activations are not part of the total.
        The text is then "without activations of" and the names of these roles.
        """
        if self.incomplete:
            return f"without activations of {', '.join(self.incomplete)}"
        return "at most"

    def compute_needed(self, most: float, file_pages: float) -> float:
        """Return the memory in GiB that the run itself needed; `most` is the measured peak.

        The memory used before the engines were built is subtracted, and for a run in one process on
        a CPU also `file_pages`, the GiB of memory that is mapped from files. Most of it is library
        code, whose size varies with the processor and which the system can drop from memory.
        """
        is_one_process = self.device == "cpu" and self.num_devices == 1
        return most - self.baseline - (file_pages if is_one_process else 0.0)

    def format_comparison(self, most: float, needed: float) -> str:
        """Return a line that compares the measured peak with the forecast.

        Of `most`, the peak in GiB, the run itself needed `needed` (see `compute_needed`).
        """
        used = needed * GIB
        scope = f" {self.scope}" if self.incomplete else ""
        return (
            f"memory: {most:.2f} GB at most, of which this run needed {format_size(used)}; "
            f"{format_size(self.total)}{scope} were expected "
            f"({used / self.total:.0%})"
        )


def find_offloaded(spec: ModelSpec, calls: Sequence[MFCDef]) -> frozenset[str]:
    """Return what is offloaded between a role's calls: weights, optimizer state, both or neither.

    The result is a set of the words "weights" and "optimizer". The optimizer state is offloaded if
    every training call offloads it. Weights are offloaded if every call offloads them and the
    option `offload` is set. Without this option, the weights are on the device before the first
    call, together with the weights of all other roles, and therefore count as not offloaded.
    """
    after = []
    for call in calls:
        after.append({hook.what for hook in call.post_hooks if isinstance(hook, Offload)})
    trains = []
    for hooks, call in zip(after, calls, strict=True):
        if call.method == "train_step":
            trains.append(hooks)
    offloaded_state: set[str] = set()
    if spec.offload and after and all("weights" in hooks for hooks in after):
        offloaded_state.add("weights")
    if trains and all("optimizer" in hooks for hooks in trains):
        offloaded_state.add("optimizer")
    return frozenset(offloaded_state)


# -- options that need less memory


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
    lacks: str = ""

    @property
    def smallest_gpu_gb(self) -> int | None:
        """Size in GB of the smallest GPU with enough memory; None if no GPU has enough."""
        return next(
            (gb for gb, gib in GPU_SIZES if self.size / GIB <= subtract_reserved(gib)), None
        )


def list_memory_options(cases: Cases, missing: Collection[str]) -> list[MemoryOption]:
    """Return the memory needed with the current settings and with alternatives that need less.

    Every alternative recomputes layers in the backward pass. Most combine this with one more
    change: 8-bit optimizer states, an offloaded optimizer, LoRA adapters or more GPUs. A change
    that is already made is left out. LoRA adapters are also left out if they are not supported, as
    with fp8. `missing` are the packages of `EXTRAS` that are not installed.
    """
    option = "gradient_checkpointing=true"
    recomputed = _change_trained(cases, lambda s: replace(s, recompute=1))
    with_8bit_state = _change_trained(
        recomputed, lambda s: replace(s, state_dtype="8bit") if s.optimizer == "adamw" else s
    )
    on_host = _change_trained(recomputed, lambda s: replace(s, offload_optimizer=True))
    adapted = {name: _with_adapters(case) for name, case in recomputed.items()}
    options = [MemoryOption("as set", _estimate_total(cases))]
    if recomputed != cases:
        options.append(MemoryOption(option, _estimate_total(recomputed)))
    prefix = f"{option} " if recomputed != cases else ""
    for more, changed in (
        ("optimizer.state_dtype=8bit", with_8bit_state),
        ("optimizer.offload=true", on_host),
        (f"lora.r={ADAPTER_RANK}", adapted),
    ):
        if changed != recomputed:
            options.append(
                MemoryOption(
                    f"{prefix}{more}",
                    _estimate_total(changed),
                    lacks=find_install_command([more], missing),
                )
            )
    for count in () if any(case.shape.shards > 1 for case in cases.values()) else SHARDS:
        shared = {name: _shard_case(case, count) for name, case in recomputed.items()}
        options.append(MemoryOption(f"{prefix}layout=d{count}", _estimate_total(shared), count))
    return options


def find_install_command(options: Sequence[str], missing: Collection[str]) -> str:
    """Return the command that installs the packages for these options, or "" if none is missing."""
    extras = []
    for option in options:
        if option in EXTRAS and EXTRAS[option][0] in missing:
            extras.append(EXTRAS[option][1])
    return install(",".join(extras)) if extras else ""


def format_fit(cases: Cases, begin: str, missing: Collection[str]) -> Iterator[str]:
    """Yield a line that begins with `begin` and shows the smallest GPU on which the run fits.

    Further lines show options with which the run fits on smaller GPUs. If no GPU is large enough,
    the last line shows the least memory that the run can need. Nothing is yielded if no role is
    trained.
    """
    if not any(case.settings.trained for case in cases.values()):
        return
    first, *others = list_memory_options(cases, missing)
    yield f"{begin}about {format_size(first.size, 1)}, {_format_fit(first)}"
    best = first.smallest_gpu_gb or GPU_SIZES[-1][0] + 1
    smaller = [
        option
        for option in others
        if option.smallest_gpu_gb is not None and option.smallest_gpu_gb < best
    ]
    for option in smaller:
        per_gpu = " each" if option.devices > 1 else ""
        fit = f"{_format_fit(option)}{_format_install(option)}"
        yield f"  {option.options}: about {format_size(option.size, 1)}{per_gpu}, {fit}"
    if first.smallest_gpu_gb is None and not smaller:
        least = min(others, key=lambda option: option.size, default=first)
        yield f"  the least is {format_size(least.size, 1)} ({least.options}); shard it over more GPUs (layout=d16)"


def format_smaller_options(cases: Cases, usable: float, missing: Collection[str]) -> Iterator[str]:
    """Yield lines that suggest options with which the run needs at most `usable` bytes per GPU.

    There is one line for each suggestion. If no options reduce the memory enough, a single line
    shows those that need the least memory.
    """
    others = list_memory_options(cases, missing)[1:]
    fitting_options = [option for option in others if option.size <= usable]
    if fitting_options:
        for option in fitting_options:
            per_gpu = " each" if option.devices > 1 else ""
            size = f"{format_size(option.size, 1)}{per_gpu}{_format_install(option)}"
            yield f"with {option.options}: about {size}"
    elif others:
        least = min(others, key=lambda option: option.size)
        yield f"the least is {format_size(least.size, 1)} ({least.options}); take more or larger GPUs"


def format_table(options: Sequence[MemoryOption]) -> list[str]:
    """Return a line for each memory option, with its settings, size and smallest GPU."""
    width = max(len(option.options) for option in options)
    table: list[str] = []
    for option in options:
        per_gpu = " each" if option.devices > 1 else "     "
        table.append(
            f"{option.options:<{width}}  {format_size(option.size, 1):>12}{per_gpu}  "
            f"{_format_fit(option)}{_format_install(option)}"
        )
    return table


def _format_install(option: MemoryOption) -> str:
    return f" (needs {option.lacks})" if option.lacks else ""


def _format_fit(option: MemoryOption) -> str:
    gpus = f"{option.devices} GPUs" if option.devices > 1 else "a GPU"
    if option.smallest_gpu_gb is not None:
        return f"fits {gpus} of {option.smallest_gpu_gb} GB"
    return f"more than {gpus} of {GPU_SIZES[-1][0]} GB"


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
    sizes = list_adapted_sizes(shape.hidden, shape.query, shape.key, shape.inner, gated=shape.gated)
    count = shape.layers * ADAPTER_RANK * sum(sizes.values())
    adapted = replace(
        shape,
        parameters=shape.parameters + count,
        trainable=count,
        adapters=ADAPTER_RANK * len(sizes) + shape.inner,
    )
    return replace(case, shape=adapted)


def _shard_case(case: MemoryCase, ranks: int) -> MemoryCase:
    """Return the memory estimate's input for one rank, if the role is sharded over `ranks` ranks.

    `case` is the input without sharding. It is returned unchanged if the role is frozen.
    """
    if not case.settings.trained:
        return case
    shape = case.shape
    sharded = replace(
        shape,
        parameters=-(-shape.parameters // ranks),
        trainable=-(-shape.trainable // ranks),
        shards=shape.shards * ranks,
    )
    return replace(case, shape=sharded)
