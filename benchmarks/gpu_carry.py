"""What a bare GPU machine lacks, and the commands to run there: `make gpu-carry`.

Needs pip and a package index, no torch.

The machine has Python 3.12, torch and transformers with what they need, and neither a network nor
weft. Wheels and a tokenizer go to `build/gpu-carry`, which travels with the tree; git ignores it.
The commands run in the root of a copy of the tree.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(ROOT)

from benchmarks import gpu_plan, gpu_tokenizer  # noqa: E402

FOLDER = Path("build", "gpu-carry")  # in the root
PYTHON = "3.12"
# Package that is imported -> what pip is asked for. omegaconf 2.4 needs another ANTLR runtime than
# math-verify.
CARRIED = {
    "array_api_compat": "array-api-compat>=1.11",
    "hydra": "hydra-core>=1.3.2",
    "omegaconf": "omegaconf>=2.3,<2.4",
    "math_verify": "math-verify>=0.9,<0.10",
    "latex2sympy2_extended": "latex2sympy2-extended==1.11.0",
    "beartype": "beartype>=0.20",
    "optax": "optax>=0.2.4",
    "absl": "absl-py>=2.0",
}
BUILT = {"antlr4": "antlr4-python3-runtime==4.9.3"}  # only a source archive is published
# Packages that weft and its tests import and that such a machine has.
THERE = (
    "fsspec",
    "huggingface_hub",
    "hypothesis",
    "httpx",
    "jax",
    "jaxlib",
    "jaxtyping",
    "jinja2",
    "mpmath",
    "numpy",
    "packaging",
    "pyarrow",
    "pytest",
    "rich",
    "safetensors",
    "sentencepiece",
    "sympy",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "yaml",
)
MOST_COMMAND = 2000  # characters
MOST_BYTES = 8 * 2**20  # of everything that is carried
MINUTES = {"first": 8, "second": 4}


def main(words: list[str] | None = None) -> int:
    """Fill the folder and print the commands; 1 where a package cannot be had."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu_carry.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--print", action="store_true", help="print the commands alone, and fetch nothing"
    )
    parser.add_argument(
        "--options",
        default="",
        help="further options of benchmarks/gpu.py, as '--device cpu --tiny'",
    )
    chosen = parser.parse_args(words)
    if not chosen.print:
        code = fill(ROOT / FOLDER)
        if code:
            return code
    print(instructions(_commit(), chosen.options))
    return 0


def fill(folder: Path) -> int:
    """Download and build the wheels, and write the tokenizer; 0, or 1 with the reason on the
    terminal.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    asked = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        PYTHON,
        "--implementation",
        "cp",
    ]
    fetched = _call([*pip, "download", *asked, "--dest", str(folder), *CARRIED.values()])
    if not fetched or not _call(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), *BUILT.values()]
    ):
        print(
            "the packages cannot be fetched: see what pip says above; it needs a package index",
            file=sys.stderr,
        )
        return 1
    gpu_tokenizer.write(folder / "tokenizer")
    found = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in found)
    wheels = [path for path in found if path.suffix == ".whl"]
    foreign = [path.name for path in wheels if not path.name.endswith("-none-any.whl")]
    if foreign or size > MOST_BYTES or len(wheels) != len(CARRIED) + len(BUILT):
        names = ", ".join(sorted(path.name for path in wheels))
        print(
            f"these wheels do not fit another machine, or are too large ({size} bytes): {names}",
            file=sys.stderr,
        )
        return 1
    print(f"{FOLDER}: {len(wheels)} wheels and a tokenizer, {size / 2**20:.1f} MiB")
    return 0


def _call(words: Sequence[str]) -> bool:
    return subprocess.run(words, cwd=ROOT, check=False).returncode == 0


def command(which: str, commit: str = "", options: str = "") -> str:
    """The "first" or the "second" command, to be run in the root of a copy of the tree."""
    minutes = MINUTES[which]
    site = "build/gpu-site"
    install = (
        f"python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade "
        f"--target {site} "
        f"{FOLDER.as_posix()}/*.whl || exit 1"
    )
    surroundings = (
        f"export PYTHONPATH=$PWD/{site}:$PWD/src OUT=${{OUT:-$PWD/build/gpu-out}} "
        f"PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 "
        # whose kernels for a CPU would be compiled for half a minute
        "TOKENIZERS_PARALLELISM=false WEFT_NATIVE=0"
    )
    words = [
        "python3 benchmarks/gpu.py",
        f"--minutes {minutes}",
        *(["--second"] if which == "second" else []),
    ]
    words += [f"--commit {commit}"] if commit else []
    words += [options] if options else []
    # The program ends itself in time; `timeout` is for a machine that hangs.
    run = f"timeout -k 5 {60 * minutes + 20} {' '.join(words)} 2>&1 | tee $OUT/gpu.txt"
    return f"{install}\n{surroundings}\nset -o pipefail; mkdir -p $OUT; {run}"


def instructions(commit: str = "", options: str = "") -> str:
    """Both commands, each with what it runs in which order and for how long."""
    lines = [
        f"# Copy the tree with {FOLDER.as_posix()} in it to the machine, and run both commands in "
        f"its root, in this order.",
        "# Results are in $OUT, else in build/gpu-out: gpu.md to read, gpu.json; profiles in "
        "gpu_profile.",
    ]
    for which, names in (("first", gpu_plan.FIRST), ("second", gpu_plan.SECOND)):
        turns = (
            " beside ".join(f"{each.name} {each.limit} s" for each in turn)
            for turn in gpu_plan.turns(names)
        )
        lines += ["", f"# The {which} command, {MINUTES[which]} minutes: {', '.join(turns)}"]
        lines += ["# and what the first left out"] if which == "second" else []
        lines.append(command(which, commit, options))
        assert len(command(which, commit, options)) < MOST_COMMAND
    return "\n".join(lines)


def _commit() -> str:
    """The commit of the tree, with a mark where files differ from it; empty where git does not say."""
    if shutil.which("git") is None:
        return ""
    head, changes = (
        subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    )
    return f"{head}+changes" if head and changes else head


if __name__ == "__main__":
    sys.exit(main())
