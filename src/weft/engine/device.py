"""The device at hand: which one, how fast, how full, and whether it repeats itself. Keeps no state of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from weft.errors import ConfigError
from weft.kernels import flash, product
from weft.observe import memory as observe_memory

GIGABYTE = 1024.0**3
# Large enough to run at full speed, small enough to go unnoticed.
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
MATMUL_REPEATS = 3


def best_device() -> torch.device:
    """The accelerator that weft is tested on (CUDA, ROCm under its name) where there is one, else the CPU.

    Apple's `mps` has no float64, in which tokens are sampled, so it is taken only where it is asked for.
    """
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_device(name: str | None) -> torch.device:
    """The device that the option `device` names; the best one when it is None. Raises `ConfigError`."""
    return best_device() if name is None else _named(name)


def _named(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"device={name!r} cannot be used on this machine ({reason}); leave it out, or say cpu"
        ) from error
    return best_device() if device.type == "cuda" and device.index is None else device


def using(device: torch.device) -> AbstractContextManager[None]:
    """In this thread streams, captures and kernels are the device's meanwhile. CUDA has a current device for each thread, 0
    until it is told, and what runs on another one than its tensors' gives garbage without a word."""
    current: AbstractContextManager[None] = (
        torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    )
    return current


def synchronise(device: torch.device) -> None:
    """Wait until the device has done everything it was given, so that a clock read next is honest."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def wait(device: torch.device) -> None:
    """Wait until this thread's stream has done what it was given."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def peak_memory_gb(device: torch.device) -> float:
    """Most memory held at once since `reset_peak_memory` (CUDA) or since the process began (CPU), in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIGABYTE
    return observe_memory.peak_memory_gb()


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of a CPU what its process may use, which a control group (a container's) may limit."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits()])


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nobody holds, what torch keeps of this process's freed tensors included."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def cgroup_limits(mounted: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Memory limits, in bytes, of this process's control group and those above it, version 2 or 1; none off Linux."""
    limits = []
    lines = groups.read_text().splitlines() if groups.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (mounted / "memory", "memory.limit_in_bytes") if controllers else (mounted, "memory.max")
        own = root / path.lstrip("/")
        for group in (own, *own.parents):
            if group.is_relative_to(root):
                with contextlib.suppress(OSError, ValueError):  # none there: the root group has no file; or "max"
                    limits.append(int((group / name).read_text()))
    return limits


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def set_deterministic(enabled: bool) -> None:
    """Make torch choose kernels that repeat bit for bit (slower on CUDA; the CPU's repeat anyway).

    cuBLAS reads its workspace setting when it starts, so this is called before the first kernel.
    """
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)


def keep_sums_wide(device: torch.device) -> None:
    """Have a GPU's products of half precision add their parts in float32: by default those of split sums are rounded first."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_flash(device: torch.device, asked: str) -> tuple[str, ...]:
    """Have this process use the flash attention that the option `flash_attention` asks for; what to say of it, if anything.
    Raises `ConfigError` where it cannot be had."""
    try:
        note = flash.choose(device, asked)
    except RuntimeError as refused:
        raise ConfigError(f"flash_attention={asked}: {refused}; leave it out") from refused
    return () if note is None else (note,)


def set_threads(count: int) -> None:
    """How many threads torch computes with. Left alone where it holds already: once it was set, MKL's small products wait for
    each other."""
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def numerics(device: torch.device) -> dict[str, Any]:
    """What bitwise repetition depends on beside the inputs; stored with a recovery point and compared on restart."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@functools.cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product, the best of some, measured once."""
    return max(_rate(size, device, dtype) for size in MATMUL_SIZES.get(device.type, MATMUL_SIZES["cpu"]))


def _rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(MATMUL_REPEATS + 1):  # the first one warms up
        synchronise(device)
        start = time.perf_counter()
        product(left, right)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds[1:])
