"""Compilation and loading of the C++ kernels in this folder, their argument types and constants.

The compiled file is cached in the user's cache folder (`weft/kernels` in `$XDG_CACHE_HOME`, else in
`~/.cache`). The name of the file contains a hash of the sources, the flags, the versions of the
compiler and of torch, and the processor. `WEFT_NATIVE` selects the instructions: `native`, the
default, uses all instructions of the processor; a name in `VARIANTS` uses the variant's
instructions. Without a compiler, or with `WEFT_NATIVE=0`, torch's own kernels are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import stat
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
PRODUCTS = ("qkv", "o", "gate_up", "down")


def get_pointer(x: Tensor | None) -> int | None:
    """Return the address of a tensor's values, or None, which C++ receives as a null pointer."""
    return None if x is None else x.data_ptr()


class HeadsStruct(ctypes.Structure):
    """Tensor [tokens, heads, dim], as an address and the strides of tokens and heads."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_stride", ctypes.c_long),
        ("head_stride", ctypes.c_long),
    )

    @classmethod
    def from_tensor(cls, x: Tensor) -> HeadsStruct:
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class AttentionStruct(ctypes.Structure):
    """Arguments of the attention kernels."""

    _fields_ = (
        *(
            (name, HeadsStruct)
            for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
        ),
        *((name, ctypes.c_void_p) for name in ("lse", "segments")),
        *(
            (name, ctypes.c_long)
            for name in ("count", "heads", "kv", "dim", "causal", "window", "threads")
        ),
        ("scale", ctypes.c_double),
    )


# Weights of the norms, then weight and bias of each product.
Parameters: Any = ctypes.c_void_p * (len(NORMS) + 2 * len(PRODUCTS))


class BlockStruct(ctypes.Structure):
    """Parameters of a transformer block, its cached keys and values, and its attention settings."""

    _fields_ = (
        ("parameters", Parameters),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("scale", ctypes.c_double),
        ("window", ctypes.c_long),
    )


class PrefixStruct(ctypes.Structure):
    """Keys and values of a shared prefix, and the rows whose sequences begin with this prefix."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("count", "keys", "room")),
        ("stored", ctypes.POINTER(ctypes.c_void_p)),
    )


class StepStruct(ctypes.Structure):
    """Arguments and results of one forward pass of a network over a cache."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "embedding", "norm", "cos", "sin")),
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "positions", "wanted", "slots", "new_tokens", "lengths")
        ),
        *(
            (name, ctypes.c_long)
            for name in ("rows", "num_wanted", "count", "blocks", "vocabulary", "hidden", "heads")
        ),
        *(
            (name, ctypes.c_long)
            for name in ("kv", "dim", "inner", "half", "room", "few", "threads")
        ),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
        ("prefixes", ctypes.POINTER(PrefixStruct)),
        ("shared", ctypes.c_long),
    )


class DrawsStruct(ctypes.Structure):
    """Sampling parameters and results of decode steps."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("head", "bias", "uniforms", "is_stop", "early", "ids", "logprobs")
        ),
        ("temperature", ctypes.c_double),
        ("steps", ctypes.c_long),
    )


STRUCTS = (
    HeadsStruct,
    AttentionStruct,
    BlockStruct,
    PrefixStruct,
    StepStruct,
    DrawsStruct,
)  # in the order of `sizes.cpp`
FOLDER = Path(__file__).parent
# Use fused multiply-adds wherever possible. For some processors, GCC avoids them in some loops,
# which would change the bits of results.
FUSED_FLAGS = ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0")
FLAGS = ("-std=c++17", "-O3", *FUSED_FLAGS, "-fopenmp", "-fPIC")
VARIABLE = "WEFT_NATIVE"
# Instructions of each variant, as named in /proc/cpuinfo. Code is compiled for generic x86-64 plus
# these instructions, so a variant's code is the same on every processor that has them.
AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
VARIANTS = {
    "sse2": ("sse2",),
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": (*AVX512, "amx_tile", "amx_bf16"),
}
# GCC's names of instructions, if they differ from the names in /proc/cpuinfo.
GCC_NAMES = {"bmi1": "bmi", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
# Subclasses are excluded: a DTensor wraps another tensor, and a fake tensor has no memory.
PLAIN_TYPES = (Tensor, nn.Parameter)
COMPILER_TIMEOUT_S = 120  # seconds; a compiler run usually takes a few seconds


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels; if they cannot be built, warn once and return None.

    Returns None without a warning if `WEFT_NATIVE` is 0 or the system is not Linux. Raises
    `ConfigError` if `WEFT_NATIVE` does not name a variant, or if the processor lacks the variant's
    instructions.
    """
    variant = _choose_variant()
    if variant is None or sys.platform != "linux":
        return None
    try:
        compiler, version = _find_working(_list_compilers())
        return _check_sizes(_load(compiler, version, _build_flags(variant), _find_cache()))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"weft's CPU kernels were not compiled ({_describe_error(error)}): generation takes "
            f"about twice as long without them. "
            "Install g++, or set WEFT_NATIVE=0 to use torch's kernels",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _choose_variant() -> str | None:
    """Return the kernel variant that the environment variable `WEFT_NATIVE` selects.

    Returns "native" if `WEFT_NATIVE` is not set, and None if it is 0. Raises `ConfigError` for an
    unknown variant and for one that the processor does not support.
    """
    variant = os.environ.get(VARIABLE, "").strip().lower()
    if variant in ("", "1", "native"):
        return "native"
    if variant == "0":
        return None
    if variant not in VARIANTS:
        raise ConfigError(
            f"{VARIABLE}={variant} names no variant of weft's kernels; leave it unset for all "
            f"instructions of the processor, or "
            f"set one of {', '.join(VARIANTS)}, or 0 for torch's own kernels"
        )
    missing = list_missing_instructions(variant)
    if missing:
        raise ConfigError(
            f"{VARIABLE}={variant} needs {', '.join(missing)}, which this processor does not have; "
            f"leave {VARIABLE} unset for all "
            "instructions that it has"
        )
    return variant


def list_missing_instructions(variant: str) -> list[str]:
    """Return the variant's instructions that this processor does not have."""
    cpu_flags = {
        word for line in _read_processor() if line.startswith("flags") for word in line.split()
    }
    return [name for name in VARIANTS[variant] if name not in cpu_flags]


def _build_flags(variant: str) -> tuple[str, ...]:
    """Return the compiler options for a kernel variant: "native" or a name in `VARIANTS`."""
    if variant == "native":
        return (*FLAGS, "-march=native")
    return (
        *FLAGS,
        "-march=x86-64",
        *(f"-m{GCC_NAMES.get(name, name)}" for name in VARIANTS[variant]),
    )


def _check_sizes(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library `kernels` after checking the sizes of its structures.

    Raises `AssertionError` if a structure has different sizes in C++ and in Python.
    """
    sizes = (ctypes.c_long * len(STRUCTS))()
    kernels.weft_sizes(sizes)
    mismatched = [
        struct.__name__
        for struct, size in zip(STRUCTS, sizes, strict=True)
        if ctypes.sizeof(struct) != size
    ]
    assert not mismatched, f"sizes differ between C++ and library.py: {', '.join(mismatched)}"
    return kernels


def is_plain(x: Tensor) -> bool:
    """Return whether x is an ordinary CPU tensor or parameter, not an instance of a subclass."""
    return type(x) in PLAIN_TYPES and x.is_cpu


def serves(*tensors: Tensor) -> bool:
    """Return whether the kernels are available and all tensors are plain float32 CPU tensors."""
    return (
        all(is_plain(x) and x.dtype == torch.float32 for x in tensors)
        and load_library() is not None
    )


def call(name: str, *arguments: Any) -> int:
    """Call the kernel `name` and return the kernel's return value.

    Either all arguments are structures, or each argument is a contiguous tensor, a number or None.
    In the second case, None is passed as a null pointer, and the number of threads is appended as
    the last argument. Use the return value only if the kernel documents it.
    """
    kernels = load_library()
    assert kernels is not None
    kernel = getattr(kernels, name)
    kernel.restype = ctypes.c_long
    if isinstance(arguments[-1], ctypes.Structure):
        return int(kernel(*map(ctypes.byref, arguments)))
    if kernel.argtypes is None:
        kernel.argtypes = [*map(_find_type, arguments), ctypes.c_long]
    values = (
        argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments
    )
    return int(kernel(*values, torch.get_num_threads()))


def _find_type(argument: Any) -> Any:
    """Return the C type with which `call` passes the argument."""
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    return ctypes.c_long if isinstance(argument, int) else ctypes.c_double


def _list_compilers() -> list[list[str]]:
    """Return the C++ compiler commands to try: the one in `CXX` if it is set, and then `g++`."""
    return [command for command in (shlex.split(os.environ.get("CXX", "")), ["g++"]) if command]


def _find_working(commands: list[list[str]]) -> tuple[list[str], str]:
    """Return the first of the commands that runs GCC, and the text that it prints with `-v`.

    Raises `FileNotFoundError` if none of the commands runs GCC.
    """
    for command in commands:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            version_output = _run([*command, "-v"])
            if "gcc version" in version_output:
                return command, version_output
    raise FileNotFoundError(
        f"none of {', '.join(command[0] for command in commands)} is GCC's C++ compiler"
    )


def _load(
    compiler: list[str], version: str, flags: tuple[str, ...], cache: Path | None
) -> ctypes.CDLL:
    """Load the kernels from the cache folder, or compile them first; `version` is GCC's output."""
    if cache is not None:
        cached_path = cache / f"kernels-{_compute_fingerprint(version, flags)}.so"
        if cached_path.is_file() and _is_ours(cached_path):
            with contextlib.suppress(OSError):  # not a loadable library: compile it again
                return ctypes.CDLL(str(cached_path))
    with tempfile.TemporaryDirectory(prefix="weft-", dir=cache) as folder:
        built = _compile([*compiler, *flags], Path(folder))
        built.chmod(0o700)
        if cache is not None:
            built = built.rename(cached_path)  # atomic: another process can rename to this path too
        return ctypes.CDLL(str(built))


def _compile(compiler: list[str], folder: Path) -> Path:
    """Compile all sources in parallel, link them, and return the path of the library."""
    built = folder / "kernels.so"
    sources = sorted(FOLDER.glob("*.cpp"))
    parts = [folder / f"{source.stem}.o" for source in sources]

    def compile(source: Path, part: Path) -> None:
        _run([*compiler, "-c", str(source), "-o", str(part)])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile, sources, parts))
    _run([*compiler, "-shared", *map(str, parts), "-o", str(built)])
    return built


def _run(command: list[str]) -> str:
    """Run a command and return what it writes to standard error.

    Raises `CalledProcessError` if the command fails.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # messages in English
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": COMPILER_TIMEOUT_S,
    }
    return str(subprocess.run(command, check=True, env=environment, **options).stderr)


def _compute_fingerprint(version: str, flags: tuple[str, ...]) -> str:
    parts = [" ".join(flags), version, torch.__version__, *_read_processor()]
    parts += [path.read_text() for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _read_processor() -> list[str]:
    """Return the lines of /proc/cpuinfo that describe the processor's model and instruction sets.

    The compiled code depends on these lines.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    prefixes = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(prefixes)})


def _find_cache() -> Path | None:
    """Return the cache folder, or None if there is no folder that only this user can write to."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        user_cache = Path(base) if base else Path.home() / ".cache"
        folder = user_cache / "weft" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_ours(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _is_ours(path: Path) -> bool:
    """Return whether the path belongs to this user and is not writable by group or others."""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _describe_error(error: Exception) -> str:
    """Return the first line of the compiler's output or of the error, else the error's type."""
    message = getattr(error, "stderr", None) or str(error)
    if str(message).strip():
        return str(message).strip().splitlines()[0]
    return type(error).__name__


VECTOR = 16  # floats per vector register of the widest CPUs
MIN_QUERIES = 4  # torch sums over fewer query rows in another order
MIN_SPARED_KEYS = 256  # least number of keys per step that merging a prefix must save to pay off


def in_vectors(length: int, device: torch.device) -> int:
    """Return the number of keys to which `length` keys are padded for attention.

    On a CPU, this is `length` rounded up to a multiple of `VECTOR`, the number of floats in a
    vector register. The padding is needed because a sum over an incomplete vector would depend on
    the values that follow in memory. On other devices, `length` is returned.
    """
    return -(-length // VECTOR) * VECTOR if device.type == "cpu" else length
