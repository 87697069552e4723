"""The environment that tests run in: made here alone, before torch is imported, whatever the user's
shell and home hold.

Names that are not listed in `KEPT` are dropped, for processes that tests start too: settings of
Ray, Hugging Face, W&B, MKL, proxies, locale, terminal and Python itself. Home is an empty folder,
without tokens or configuration files.

To test under other settings, name them in `WEFT_TEST_ENVIRONMENT`, as `tools/processors.py` does.
"""

from __future__ import annotations

import atexit
import locale
import os
import re
import shlex
import shutil
import site
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

ASKED = "WEFT_TEST_ENVIRONMENT"  # NAME=VALUE words that tests are to run with
HOME = "WEFT_TEST_HOME"  # the folder that was made, for processes that read this again
CACHE = (
    Path(__file__).resolve().parent.parent / "build" / "test-cache"
)  # compiled kernels, which are named by their content

# Where programs, packages and devices are, and what the tests' own options say.
KEPT = {
    "PATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "TMPDIR",
    "USER",
    "LOGNAME",
    "SHELL",
    "CI",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "CUDA_PATH",
    "OUT",
}
KEPT_FAMILIES = (
    "WEFT_TEST_",
    "WEFT_BENCH_",
    "WEFT_CUDA_",
    "PYTEST_",
    "COV_",
    "COVERAGE_",
    "NVIDIA_",
    "PIP_",
    "UV_",
)


def build_xla_flags(devices: int) -> str:
    """Settings of XLA: meshes of JAX divide work over devices, of which a CPU stands in for several.

    Without LLVM's optimizations, programs that run once compile in two thirds of the time.
    """
    fast = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return f"--xla_force_host_platform_device_count={devices} {fast}"


SET = {
    # results repeat, and processes of tests do not take each other's processors
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "LC_ALL": "C.UTF-8",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "xterm",
    "XLA_FLAGS": build_xla_flags(8),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    # torch's compiler would start a pool of processes, which import torch, for a few C++ files
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

# The environment as `prepare` made it; weft, Ray and fixtures set other variables afterwards.
prepared: dict[str, str] = {}


def cleaned(given: Mapping[str, str], home: Path) -> dict[str, str]:
    """The environment of tests from the one that was `given`, with `home` as the user's home."""
    kept = {
        name: value
        for name, value in given.items()
        if name in KEPT or name.startswith(KEPT_FAMILIES)
    }
    own = {
        "HOME": str(home),
        HOME: str(home),
        "HF_HOME": str(home / "huggingface"),
        "XDG_CACHE_HOME": str(CACHE),
        "JAX_COMPILATION_CACHE_DIR": str(CACHE / "jax"),
        # Its keys leave out settings that change what is compiled, such as the vectors' width.
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor" / _name_settings(given)),
    }
    if site.ENABLE_USER_SITE:  # packages of the user's own, which lie in the real home
        own["PYTHONUSERBASE"] = site.getuserbase()
    asked = dict(word.split("=", 1) for word in shlex.split(given.get(ASKED, "")))
    return {**kept, **SET, **own, **asked}


def _name_settings(given: Mapping[str, str]) -> str:
    return re.sub(r"[^\w=]+", "-", given.get(ASKED, "")) or "default"


def prepare() -> None:
    """Give this process, and those that it starts, the environment of tests."""
    made = os.environ.get(HOME)
    if made is None or not Path(made).is_dir():
        made = tempfile.mkdtemp(prefix="weft-tests-home-")
        atexit.register(_remove, made, os.getpid())
    fresh = cleaned(os.environ, Path(made))
    os.environ.clear()
    os.environ.update(fresh)
    prepared.update(fresh)
    time.tzset()
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")  # what `open` reads text as


def copy() -> dict[str, str]:
    """Return this process's variables, also while another thread sets or drops some: pytest names
    the running test in one.
    """
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if value is not None}


def reset_warnings() -> None:
    """Drop what PYTHONWARNINGS says; pytest sets the filters of pyproject.toml.

    To be called once pytest is configured: it puts filters back that are changed while it reads
    conftest.py.
    """
    if sys.warnoptions:
        sys.warnoptions.clear()
        warnings.resetwarnings()


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # not in one that was forked
        shutil.rmtree(folder, ignore_errors=True)
