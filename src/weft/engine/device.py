"""Choice of a device; its memory, speed, numerical settings and traces; FLOPs of a network."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import ProfilerActivity

from weft.errors import ConfigError
from weft.kernels import flash, fused, product
from weft.observe import memory as observe_memory
from weft.writing import rename, resolve_destination

GIGABYTE = 1024.0**3
# Large enough to run at full speed, small enough to go unnoticed.
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
MATMUL_REPEATS = 3


def choose_device() -> torch.device:
    """Return the current CUDA or ROCm device if there is one, else the CPU.

    Apple's `mps` must be requested explicitly, because it lacks float64, which sampling uses.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def resolve_device(name: str | None) -> torch.device:
    """Return the device called `name`, or the best available device if `name` is None.

    `name` is the value of the option `device`. Raises `ConfigError` if the device cannot be used.
    """
    return choose_device() if name is None else _parse_device(name)


def _parse_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={name!r} cannot be used on this machine ({reason}); leave it out, or say cpu"
        ) from error
    if device.type == "cuda" and device.index is None:
        return choose_device()
    return device


def use_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which `device` is the current CUDA device of this thread.

    Each thread has its own current device, which is device 0 by default. A kernel that is launched
    on a different device than that of its tensors silently computes wrong values.
    """
    if device.type == "cuda":
        current: AbstractContextManager[None] = torch.cuda.device(device)
    else:
        current = contextlib.nullcontext()
    return current


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has finished all its work, so that timings are correct."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait(device: torch.device) -> None:
    """Wait until this thread's current CUDA stream has finished its work.

    On other devices, return immediately.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def record_event(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has finished the work queued so far.

    This is the work of this thread's current CUDA stream. On other devices, the function returns
    immediately.
    """
    if device.type == "cuda":
        event = torch.cuda.current_stream(device).record_event()
        return event.synchronize
    return lambda: None


# Largest peak of each CUDA device before the last restart of its measurement, in GiB.
_earlier_peaks: dict[torch.device, float] = {}


def measure_peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory use in GiB.

    On CUDA, this is the device's peak since `reset_peak_memory`. On a CPU, it is the process's peak
    since it started.
    """
    if device.type == "cuda":
        return max(_earlier_peaks.get(device, 0.0), _measure_recent_peak_gib(device))
    return observe_memory.measure_peak_memory_gb()


def _measure_recent_peak_gib(device: torch.device) -> float:
    """Return the peak memory use in GiB since `_restart_peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIGABYTE
    return observe_memory.measure_recent_peak_gb()


def _restart_peak_memory(device: torch.device) -> bool:
    """Start a new measurement of the recent peak, and return whether this is possible."""
    if device.type == "cuda":
        _earlier_peaks[device] = measure_peak_memory_gib(device)
        torch.cuda.reset_peak_memory_stats(device)
        return True
    return device.type == "cpu" and observe_memory.restart_peak_memory()


@dataclass
class PeakReading:
    """Peak memory of a section of work in bytes; None if it could not be measured."""

    num_bytes: int | None = None


class PeakMemoryMeter:
    """Meter of the peak memory of sections of work on one device.

    Sections can be nested; the peak of an inner section counts for the outer one, too. On a CPU, the
    peak is the largest resident set size of this process.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._open: list[PeakReading] = []

    @contextmanager
    def measure(self) -> Iterator[PeakReading]:
        """Measure the peak memory of the body of a `with` statement.

        The reading has its value when the body has ended.
        """
        reading = PeakReading()
        self._update_open()
        if not _restart_peak_memory(self._device):
            yield reading
            return
        self._open.append(reading)
        try:
            yield reading
        finally:
            self._update_open()
            self._open.pop()

    def _update_open(self) -> None:
        if self._open:
            recent = round(_measure_recent_peak_gib(self._device) * GIGABYTE)
            for reading in self._open:
                reading.num_bytes = max(reading.num_bytes or 0, recent)


def read_memory_bytes(device: torch.device) -> int:
    """Return the memory size of a device in bytes.

    For a CPU, this is the memory that the process may use, which a cgroup can limit, as in a
    container.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *read_cgroup_limits()])


def free_bytes(device: torch.device) -> int:
    """Return the number of free bytes of a CUDA device, including memory that torch has cached."""
    return (
        torch.cuda.mem_get_info(device)[0]
        + torch.cuda.memory_reserved(device)
        - torch.cuda.memory_allocated(device)
    )


def read_cgroup_limits(
    mounted: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """Return the memory limits in bytes of this process's cgroup (v1 or v2) and its ancestors.

    The result is empty on systems other than Linux.
    """
    limits = []
    lines = groups.read_text().splitlines() if groups.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (
            (mounted / "memory", "memory.limit_in_bytes")
            if controllers
            else (mounted, "memory.max")
        )
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root):
                # the root group has no such file; "max" is not a number
                with contextlib.suppress(OSError, ValueError):
                    limits.append(int((group / name).read_text()))
    return limits


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        _earlier_peaks.pop(device, None)
        torch.cuda.reset_peak_memory_stats(device)


def set_deterministic(enabled: bool) -> None:
    """Make torch use bitwise reproducible kernels (slower on CUDA; no change on CPUs).

    Must be called before the first kernel, because cuBLAS reads its workspace setting when it
    starts.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # torch loads its compiler to set this: over a second
    if enabled or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(enabled)


def keep_sums_wide(device: torch.device) -> None:
    """Make a GPU add the partial sums of half-precision matmuls in float32.

    By default, they are rounded to half precision before they are added.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_flash(device: torch.device, version: str) -> tuple[str, ...]:
    """Select the version of flash attention, and return a tuple of notes for the user.

    `version` is the value of the option `flash_attention`. The tuple has one note, which names the
    selected version, if the device is a Hopper GPU and `version` is "auto" or "fa3"; otherwise, it
    is empty. Raises `ConfigError` if the version is not available.
    """
    try:
        note = flash.choose(device, version)
    except RuntimeError as refused:
        raise ConfigError(f"flash_attention={version}: {refused}; leave it out") from refused
    return () if note is None else (note,)


def set_threads(count: int) -> None:
    """Set the number of torch's threads, unless it is already `count`.

    Setting the same number again would slow down small matrix products in MKL, because its threads
    would wait for each other.
    """
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def set_tf32(enabled: bool, device: torch.device) -> None:
    """Let a GPU use TF32 (10 bits of mantissa) for float32 matrix products.

    Does nothing if `enabled` is False, or on a device without CUDA.
    """
    if enabled and device.type == "cuda":
        torch.set_float32_matmul_precision("high")


def describe_numerics(device: torch.device) -> dict[str, Any]:
    """Return the settings that two processes must share to compute bitwise equal results.

    They are stored in a recovery point and compared when a run is resumed.
    """
    rounded = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    switches = sorted(fused.read_switches()) if device.type == "cuda" else []
    return {
        **({"tf32": True} if rounded else {}),
        **({"flash_attention": flash.find_version()} if device.type == "cuda" else {}),
        **({"gpu_kernels": switches} if switches else {}),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def describe_hardware(device: torch.device) -> dict[str, Any]:
    """Return facts about the device for display.

    The keys are `name` and `memory` (in bytes). A GPU also has `driver` and the manufacturer's peak
    rates `tflops` and `gb_per_s`, and a CPU has `cores`. Unknown facts are left out.
    """
    if device.type != "cuda":
        return {
            "name": _read_processor_name() if device.type == "cpu" else device.type,
            "cores": count_cores(),
            "memory": read_memory_bytes(device),
        }
    properties = torch.cuda.get_device_properties(device)
    facts = {"name": properties.name, "memory": properties.total_memory}
    if (driver := _read_driver_version()) is not None:
        facts["driver"] = driver
    if (peak := find_peak_rates(properties.name)) is not None:
        facts |= {"tflops": peak.tflops, "gb_per_s": peak.gb_per_s}
    return facts


def describe_profiled_device(device: torch.device) -> tuple[str, str]:
    """Return what a profile of a device depends on: its name with its cores, and torch's version."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_read_processor_name()}, {count_cores()} cores"
    return name, torch.__version__


def format_hardware(facts: Mapping[str, Any], called: str) -> str:
    """Format a device's name and the facts from `describe_hardware` as one line.

    `called` is the name. Examples: cpu (AMD EPYC 9354, 8 cores, 62.70 GiB); NVIDIA A100-SXM4-80GB
    (driver 550.54.15, 79.25 GiB, at most 312 bfloat16 TFLOP/s and 2,039 GB/s).
    """
    parts = [] if facts["name"] == called else [str(facts["name"])]
    if "cores" in facts:
        parts.append(f"{facts['cores']} {'core' if facts['cores'] == 1 else 'cores'}")
    if "driver" in facts:
        parts.append(f"driver {facts['driver']}")
    parts.append(f"{facts['memory'] / GIGABYTE:.2f} GiB")
    if "tflops" in facts:
        parts.append(
            f"at most {facts['tflops']:g} bfloat16 TFLOP/s and {facts['gb_per_s']:,.0f} GB/s"
        )
    return f"{called} ({', '.join(parts)})"


def _read_processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name, or its architecture if the name is unknown."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = []
    for line in lines:
        if line.startswith("model name"):
            named.append(line.split(":", 1)[1].strip())
    return named[0] if named else platform.processor() or platform.machine()


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def read_thread_limit() -> int | None:
    """Return the number of threads that the user allows a process, or None if it is not set."""
    words = os.environ.get("OMP_NUM_THREADS", "")
    return int(words) if words.isdecimal() and int(words) else None


def _read_driver_version(version: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel module, or None if it is unknown."""
    if version.is_file():
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", version.read_text())
    else:
        match = None
    return None if match is None else match[0]


@functools.cache
def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the highest rate, in FLOP/s, measured over several sizes of large matmuls.

    The matrices are random. Later calls return the first measurement.
    """
    return max(
        _measure_rate(size, device, dtype)
        for size in MATMUL_SIZES.get(device.type, MATMUL_SIZES["cpu"])
    )


def _measure_rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Equal numbers switch fewer transistors than a network's, so a GPU multiplies them at a higher
    # clock: by 13% on an H100.
    random = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, dtype=dtype, generator=random) for _ in range(2)
    )
    seconds = []
    for _ in range(MATMUL_REPEATS + 1):  # the first one warms up
        wait_for_device(device)
        start = time.perf_counter()
        product(left, right)
        wait_for_device(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds[1:])


def label_work(name: str) -> AbstractContextManager[object]:
    """Return a context manager that labels the work in its block as `name` in profiler traces."""
    label: AbstractContextManager[object] = torch.profiler.record_function(name)
    return label


class DeviceTrace:
    """Recorder of one thread's operators and GPU kernels.

    Recording starts when the object is created. `end` must be called in the same thread.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        self._profiler: Any = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def end(self, path: Path) -> None:
        """Stop the trace and write it to `path`, which ends in .json.gz.

        The file has Chrome's trace event format, which ui.perfetto.dev can display.
        """
        self._profiler.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name("." + path.name)
        self._profiler.export_chrome_trace(str(temporary))
        rename(temporary, resolve_destination(path))


@dataclass(frozen=True)
class TokenCost:
    """Sizes of a network that determine its number of operations per token.

    Attributes:
        products: Number of weights that are multiplied with each token's hidden states. It includes
            only the experts to which a token is routed, and excludes the embedding.
        attention: Number of layers x number of heads x head size.
        backward: Cost of a backward pass relative to a forward pass: 2, or 1 if most weights are
            frozen and need no gradient.
        late: Part of `products` that is used only for tokens whose output is needed, such as the
            number of weights of the output layer.
    """

    products: int
    attention: int
    backward: int = 2
    late: int = 0

    def count_training_flops(
        self, lengths: npt.NDArray[np.int64], *, rows: float | None = None, across: float = 0.0
    ) -> float:
        """Return the floating-point operations of a forward and a backward pass over a pack.

        `lengths` contains the number of tokens of each segment of the pack, usually a sequence.
        `across` is the number of (query, key) pairs between segments, for example between a shared
        prefix and its continuations. The output layer is computed for `rows` tokens, or for all
        tokens if `rows` is None.

        A forward pass has 2 operations per parameter and token, and 4 per head dimension and
        (query, key) pair. A backward pass has `backward` times as many; recomputation is not
        counted. Attention is causal, so a segment of length L has L (L + 1) / 2 pairs. Chowdhery et
        al. 2022 (arXiv:2204.02311, appendix B) count all L^2 pairs instead.
        """
        tokens = float(lengths.sum())
        pairs = float((lengths.astype(np.float64) * (lengths + 1) / 2).sum()) + across
        products = self.products * tokens - self.late * (0.0 if rows is None else tokens - rows)
        return (1 + self.backward) * (2.0 * products + 4.0 * self.attention * pairs)

    def split_over_ranks(self, ranks: int) -> TokenCost:
        """Return the cost of one rank under context parallelism.

        `ranks` is the number of ranks that divide the tokens of each pack. The cost is still per
        token of the whole pack, so it is 1 / `ranks` of the total.
        """
        return replace(
            self,
            products=self.products // ranks,
            attention=self.attention // ranks,
            late=self.late // ranks,
        )

    @property
    def flops_per_token(self) -> float:
        """Number of floating-point operations per token in training, except those of attention."""
        return (1 + self.backward) * 2.0 * self.products


class BestMatmulRate:
    """Highest matmul rate known for a device, in operations per second.

    This is the measured rate, or the rate of the fastest training step so far if that is higher.
    """

    def __init__(self, measure: Callable[[], float]) -> None:
        self._measure = measure

    @functools.cached_property
    def best(self) -> float:
        """Highest known rate in operations per second, measured on the first access."""
        return self._measure()

    def compute_mfu(self, operations: float, seconds: float) -> float:
        """Return the MFU (model FLOPs utilization) of a training step, at most 1.

        This is the step's rate, `operations` operations in `seconds` seconds, divided by the best
        known rate. A rate above the best known rate becomes the new best rate.
        """
        rate = operations / seconds
        self.best = max(self.best, rate)
        return rate / self.best


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of a GPU according to its manufacturer.

    `tflops` is the rate of dense bfloat16 products with float32 accumulation (float16 products if
    the GPU lacks bfloat16); `gb_per_s` is the memory bandwidth.
    """

    tflops: float
    gb_per_s: float


# Rates from the makers' data sheets, without sparsity. The first entry whose words are all in the
# GPU's name applies.
PEAKS: tuple[tuple[str, PeakRates], ...] = (
    ("B200", PeakRates(2250, 8000)),
    ("H200 NVL", PeakRates(835, 4800)),
    ("H200", PeakRates(989, 4800)),
    ("H100 PCIe", PeakRates(756, 2000)),
    ("H100 NVL", PeakRates(835, 3900)),
    ("H100", PeakRates(989, 3350)),
    ("H800", PeakRates(989, 3350)),
    ("H20", PeakRates(148, 4000)),
    ("A100 80GB SXM", PeakRates(312, 2039)),
    ("A100 80GB", PeakRates(312, 1935)),
    ("A100", PeakRates(312, 1555)),
    ("A800", PeakRates(312, 2039)),
    ("L40S", PeakRates(362, 864)),
    ("L40", PeakRates(181, 864)),
    ("L4", PeakRates(121, 300)),
    ("A10G", PeakRates(70, 600)),
    ("A10", PeakRates(125, 600)),
    ("A30", PeakRates(165, 933)),
    ("A40", PeakRates(150, 696)),
    ("RTX 5090", PeakRates(209, 1792)),
    ("RTX 4090", PeakRates(165, 1008)),
    ("RTX 3090", PeakRates(71, 936)),
    ("RTX A6000", PeakRates(155, 768)),
    ("RTX 6000 Ada", PeakRates(364, 960)),
    ("V100", PeakRates(125, 900)),
    ("T4", PeakRates(65, 320)),
    ("MI300X", PeakRates(1307, 5300)),
)


def parse_gpu_model(name: str) -> str | None:
    """Return the GPU model for the device name that the driver reports, or None if unknown.

    For example, the model of `NVIDIA A100-SXM4-80GB` is `A100 80GB SXM`.
    """
    words = name.replace("-", " ").replace("SXM4", "SXM").replace("SXM5", "SXM").split()
    return next((known for known, _ in PEAKS if set(known.split()) <= set(words)), None)


def find_peak_rates(name: str) -> PeakRates | None:
    """Return the peak rates of a GPU, or None if the GPU is not known.

    `name` is the device name that the driver reports.
    """
    model = parse_gpu_model(name)
    return None if model is None else dict(PEAKS)[model]
