"""Compiles the C++ of this folder for the processor at hand, once, and loads it.

The compiled file lies in the user's cache (`weft/kernels` in `$XDG_CACHE_HOME`, else in
`~/.cache`), under a name that is the hash of the sources, the flags, the compiler, torch's version
and the processor. `WEFT_NATIVE` chooses the instructions: all of the processor's (`native`, the
default), or those of one variant in `VARIANTS`. Without a compiler, and with `WEFT_NATIVE=0`, there
is no library and torch's own kernels do the work.
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
from weft.kernels.cpu.structures import SHARED

FOLDER = Path(__file__).parent
# Sums are fused multiply-adds wherever they can be: for some processors GCC takes others in some
# loops, and so other bits.
FUSED = ("-ffp-contract=fast", "--param=avoid-fma-max-bits=0")
FLAGS = ("-std=c++17", "-O3", *FUSED, "-fopenmp", "-fPIC")
SWITCH = "WEFT_NATIVE"
# Instructions by variant, as GCC's options and /proc/cpuinfo name them. Compiled for x86-64 in
# general and these instructions alone, so a variant's code is the same on every processor that has
# them.
AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
VARIANTS = {
    "sse2": ("sse2",),
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": (*AVX512, "amx_tile", "amx_bf16"),
}
# where its name is another
IN_GCC = {"bmi1": "bmi", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
# no subclass: a DTensor has no memory of its own, and a fake one none at all
PLAIN = (Tensor, nn.Parameter)
PATIENCE = 120  # seconds for a run of the compiler, which takes a few


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they are not to be had, which is said once.

    Raises `ConfigError` for a `WEFT_NATIVE` that names no variant, or one whose instructions the
    processor lacks.
    """
    variant = _variant()
    if variant is None or sys.platform != "linux":
        return None
    try:
        return _checked(_load(*_working(_compilers()), _flags(variant), _cache()))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"weft's CPU kernels were not compiled ({_reason(error)}): generation takes about "
            f"twice as long without them. "
            "Install g++, or set WEFT_NATIVE=0 to do without",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _variant() -> str | None:
    """Return the choice of `WEFT_NATIVE`: `native`, the name of a variant, or None for no kernels."""
    asked = os.environ.get(SWITCH, "").strip().lower()
    if asked in ("", "1", "native"):
        return "native"
    if asked == "0":
        return None
    if asked not in VARIANTS:
        raise ConfigError(
            f"{SWITCH}={asked} names no variant of weft's kernels; leave it unset for all "
            f"instructions of the processor, or "
            f"set one of {', '.join(VARIANTS)}, or 0 for torch's own kernels"
        )
    lacking = lacks(asked)
    if lacking:
        raise ConfigError(
            f"{SWITCH}={asked} needs {', '.join(lacking)}, which this processor does not have; "
            f"leave {SWITCH} unset for all "
            "instructions that it has"
        )
    return asked


def lacks(variant: str) -> list[str]:
    """Instructions of a variant that this processor does not have."""
    found = {word for line in _processor() if line.startswith("flags") for word in line.split()}
    return [name for name in VARIANTS[variant] if name not in found]


def _flags(variant: str) -> tuple[str, ...]:
    """The compiler's options for a variant."""
    if variant == "native":
        return (*FLAGS, "-march=native")
    return (*FLAGS, "-march=x86-64", *(f"-m{IN_GCC.get(name, name)}" for name in VARIANTS[variant]))


def _checked(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, whose structures have the sizes that Python's have."""
    sizes = (ctypes.c_long * len(SHARED))()
    kernels.weft_sizes(sizes)
    wrong = [s.__name__ for s, size in zip(SHARED, sizes, strict=True) if ctypes.sizeof(s) != size]
    assert not wrong, f"other sizes in C++ than in structures.py: {', '.join(wrong)}"
    return kernels


def is_plain(x: Tensor) -> bool:
    """Whether a tensor has memory of its own on this host."""
    return type(x) in PLAIN and x.is_cpu


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels work on tensors like these: plain, float32, on a CPU, where they are
    compiled.
    """
    return all(is_plain(x) and x.dtype == torch.float32 for x in tensors) and library() is not None


def call(name: str, *arguments: Any) -> int:
    """A kernel on structures, or on contiguous tensors and numbers; None is a null pointer.

    The last argument of those on tensors, the number of threads, is added here. The return value
    has a meaning only where the kernel documents one.
    """
    kernels = library()
    assert kernels is not None
    kernel = getattr(kernels, name)
    kernel.restype = ctypes.c_long
    if isinstance(arguments[-1], ctypes.Structure):
        return int(kernel(*map(ctypes.byref, arguments)))
    if kernel.argtypes is None:
        kernel.argtypes = [*map(_type_of, arguments), ctypes.c_long]
    given = (
        argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments
    )
    return int(kernel(*given, torch.get_num_threads()))


def _type_of(argument: Any) -> Any:
    if argument is None or isinstance(argument, Tensor):
        return ctypes.c_void_p
    return ctypes.c_long if isinstance(argument, int) else ctypes.c_double


def _compilers() -> list[list[str]]:
    """Commands that may be GCC's C++ compiler, the user's own first."""
    return [command for command in (shlex.split(os.environ.get("CXX", "")), ["g++"]) if command]


def _working(commands: list[list[str]]) -> tuple[list[str], str]:
    """The first that is there and is GCC, and what it says of its version."""
    for command in commands:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            if "gcc version" in (said := _run([*command, "-v"])):
                return command, said
    raise FileNotFoundError(
        f"none of {', '.join(command[0] for command in commands)} is GCC's C++ compiler"
    )


def _load(
    compiler: list[str], version: str, flags: tuple[str, ...], cache: Path | None
) -> ctypes.CDLL:
    if cache is not None:
        kept = cache / f"kernels-{_fingerprint(version, flags)}.so"
        if kept.is_file() and _is_ours(kept):
            with contextlib.suppress(OSError):  # no library: compiled again
                return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(prefix="weft-", dir=cache) as folder:
        built = _compile([*compiler, *flags], Path(folder))
        built.chmod(0o700)
        if cache is not None:
            built = built.rename(kept)  # in one step: another process may do the same
        return ctypes.CDLL(str(built))


def _compile(compiler: list[str], folder: Path) -> Path:
    """Each source on its own, all at once."""
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
    """What the compiler says."""
    environment = {**os.environ, "LC_ALL": "C"}  # in English
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "errors": "replace",
        "timeout": PATIENCE,
    }
    return str(subprocess.run(command, check=True, env=environment, **options).stderr)


def _fingerprint(version: str, flags: tuple[str, ...]) -> str:
    parts = [" ".join(flags), version, torch.__version__, *_processor()]
    parts += [path.read_text() for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> list[str]:
    """What tells processors apart that need other code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.startswith(wanted)})


def _cache() -> Path | None:
    """The folder of compiled kernels, which nobody else may write to; None where there can be none."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "weft" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_ours(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _is_ours(path: Path) -> bool:
    """Whether no one else can have put anything there."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    if str(said).strip():
        return str(said).strip().splitlines()[0]
    return type(error).__name__
