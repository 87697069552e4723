"""Runs the numerical tests as other processors, and other versions of torch and transformers, would
compute them.

    python tools/processors.py            # every configuration that this processor supports
    python tools/processors.py --list
    python tools/processors.py --only torch-avx2 kernels-off --tests tests/models

Prints a line for each configuration: what passed, or why it is not run. Exits with 1 if a test
fails. Logs, and the virtual environments of other versions (some gigabytes each), are in
`build/processors`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "processors"
ASKED = "WEFT_TEST_ENVIRONMENT"  # of tests/environment.py
TESTS = (
    "kernels",
    "models",
    "algorithms",
    "interfaces",
    "engine",
    "parallel",
    "realloc",
    "checkpoints",
    "host",
)
OLDEST = ("torch==2.11.0", "transformers==5.17.0")  # the lower bounds of pyproject.toml
AVX2, AVX512 = (
    ("avx2", "fma"),
    ("avx2", "fma", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
)


@dataclass(frozen=True)
class Configuration:
    """Environment variables that tests run with, and instructions that the processor must have.

    `capability` is what torch must then say that it uses; `native`: weft's kernels must be there;
    `versions`: `oldest`, `newest` or the environment's.
    """

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    capability: str | None = None
    native: bool = False
    versions: str | None = None


def aten(name: str, needs: Sequence[str] = ()) -> Configuration:
    return Configuration(f"torch-{name}", {"ATEN_CPU_CAPABILITY": name}, needs, name.upper())


def kernels(name: str, needs: Sequence[str] = ()) -> Configuration:
    return Configuration(f"kernels-{name}", {"WEFT_NATIVE": name}, needs, native=True)


CONFIGURATIONS = (
    Configuration("unchanged"),
    aten("default"),
    aten("avx2", AVX2),
    aten("avx512", AVX512),
    Configuration("onednn-avx2", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, AVX2),
    Configuration("onednn-avx512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, AVX512),
    Configuration("mkl-compatible", {"MKL_CBWR": "COMPATIBLE"}),
    Configuration("mkl-avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, AVX2),
    Configuration("kernels-off", {"WEFT_NATIVE": "0"}),
    kernels("sse2", ("sse2",)),
    kernels("avx2", AVX2),
    kernels("avx512", AVX512),
    kernels("amx", (*AVX512, "amx_tile", "amx_bf16")),
    # Threads that wait for others sleep: beside as many test processes as cores, spinning ones would
    # take the cores from those that compute.
    Configuration("threads-2", {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}),
    Configuration("threads-4", {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"}),
    Configuration(
        "avx2-kernels-off",
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "WEFT_NATIVE": "0",
        },
        AVX2,
        "AVX2",
    ),
    Configuration("oldest", versions="oldest"),
    Configuration("newest", versions="newest"),
)


def instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor has, as Linux names it; nothing where that is not known."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return {
        word for line in lines if line.startswith("flags") for word in line.split(":", 1)[1].split()
    }


def why_not(configuration: Configuration, found: set[str]) -> str | None:
    """Why a configuration cannot be run here, or None."""
    lacking = [name for name in configuration.needs if name not in found]
    if lacking:
        return f"this processor has no {', '.join(lacking)}"
    if configuration.native and shutil.which("g++") is None:
        return "no g++ to compile weft's kernels"
    return None


def environment(configuration: Configuration) -> dict[str, str]:
    words = " ".join(f"{name}={value}" for name, value in configuration.variables.items())
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Variables that torch reads while it is imported are also set directly: a plugin of pytest may
    # import it first.
    return {**os.environ, **configuration.variables, ASKED: words, "PYTHONPATH": path}


def interpreter(versions: str | None, python: str) -> str | None:
    """The Python of some versions, installed first where that was not done; None for the `newest`
    if `python` has them.
    """
    if versions is None:
        return python
    limits = OLDEST if versions == "oldest" else _newer(python)
    if not limits:
        return None
    folder = BUILD / f"venv-{versions}"
    made, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join([*limits, (ROOT / "pyproject.toml").read_text()])
    if not stamp.is_file() or stamp.read_text() != wanted:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        words = ["install", "--quiet", "--editable", f"{ROOT}[dev]", *limits]
        subprocess.run([str(made), "-m", "pip", *words], check=True)
        stamp.write_text(wanted)
    return str(made)


def _newer(python: str) -> list[str]:
    """Newer torch and transformers than `python` has, that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text()
    limits = [re.search(rf'"({name}[<>=][^"]+)"', text)[1] for name in ("torch", "transformers")]  # type: ignore[index]
    words = ["install", "--dry-run", "--upgrade", "--no-deps", *limits]
    done = subprocess.run([python, "-m", "pip", *words], capture_output=True, text=True, check=True)
    found = re.search(r"Would install (.*)", done.stdout)
    return (
        [re.sub(r"-(?=[\d.]+)", "==", word, count=1) for word in found[1].split()] if found else []
    )


def check(configuration: Configuration, python: str) -> str | None:
    """What is not as the configuration says, before the tests."""
    code = "import torch; from weft.kernels.cpu.library import load_library; print(torch.backends.cpu.get_cpu_capability(), load_library() is not None)"  # noqa: E501
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, env=environment(configuration)
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    capability, native = done.stdout.split()
    if configuration.capability not in (None, capability):
        return f"torch uses {capability}"
    if configuration.native and native != "True":
        return "weft's kernels are not there"
    if configuration.variables.get("WEFT_NATIVE") == "0" and native != "False":
        return "weft's kernels are there"
    return None


def run(
    configuration: Configuration, python: str, tests: Sequence[str], more: Sequence[str]
) -> tuple[bool, str]:
    """Whether all tests pass, and what to say of them."""
    wrong = check(configuration, python)
    if wrong is not None:
        return False, wrong
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *more,
        *tests,
    ]
    begin, log = time.monotonic(), BUILD / f"{configuration.name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(configuration), stdout=output, stderr=output
        )
    counts = re.findall(
        r"\d+ (?:passed|failed|skipped|errors?)\b", log.read_text().strip().rpartition("\n")[2]
    )
    text = ", ".join(counts) or f"pytest ended with {done.returncode}"
    where = "" if done.returncode == 0 else f"; see {log.relative_to(ROOT)}"
    return done.returncode == 0, f"{text} in {time.monotonic() - begin:.0f} s{where}"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Run the numerical tests as other processors would compute them."
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="configurations, of those that --list shows"
    )
    parser.add_argument(
        "--skip", nargs="+", metavar="NAME", default=[], help="configurations to leave out"
    )
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", default=[f"tests/{name}" for name in TESTS]
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="show the configurations, and which this processor supports",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter of configurations without own versions",
    )
    arguments, more = parser.parse_known_args(words)
    names = [each.name for each in CONFIGURATIONS]
    unknown = [name for name in [*(arguments.only or []), *arguments.skip] if name not in names]
    if unknown:
        parser.error(f"no configuration {', '.join(unknown)}; there are {', '.join(names)}")
    BUILD.mkdir(parents=True, exist_ok=True)
    found, passed = instructions(), True
    for each in CONFIGURATIONS:
        if each.name in arguments.skip or (arguments.only and each.name not in arguments.only):
            if not arguments.list:
                print(f"{each.name:18} not run: not asked for", flush=True)
            continue
        reason = why_not(each, found)
        if reason is None and not arguments.list:
            python = interpreter(each.versions, arguments.python)
            if python is None:
                reason = "the environment has the newest versions already; see unchanged"
            else:
                fine, reason_or_counts = run(each, python, arguments.tests, more)
                passed &= fine
                print(
                    f"{each.name:18} {'passed' if fine else 'FAILED'}: {reason_or_counts}",
                    flush=True,
                )
                continue
        print(f"{each.name:18} {f'not run: {reason}' if reason else 'supported'}", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
