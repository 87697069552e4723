"""What a benchmark leaves: a table on the terminal and `benchmarks/results/NAME.json`, which says
how it came about.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("weft", "torch", "transformers", "trl", "numpy", "jax", "optax", "aiconfigurator")
GIB = 2**30
# seconds; what a step of gigabytes gives back keeps the host of a virtual machine busy for some
# tenths
REST = 1.0


class DirtyTree(SystemExit):
    """Exit code 2: a result must belong to a commit."""


@dataclass
class Results:
    """`rows` is the table (one mapping a line, all with the same keys); `runs` what it was made
    from.
    """

    name: str
    rows: list[dict[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    runs: Any = None
    notes: Sequence[str] = ()


def parser(name: str, about: str, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    made.add_argument(
        "--dry", action="store_true", help="print the table and write no file; any tree will do"
    )
    made.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; writes no file"
    )
    made.add_argument(
        "--repeats", type=int, default=repeats, help="pairs of runs (default: %(default)s)"
    )
    made.add_argument(
        "--threads", type=int, default=2, help="threads of either side (default: %(default)s)"
    )
    made.add_argument(
        "--rest",
        type=seconds,
        default=REST,
        help="seconds of rest before each turn (default: %(default)s)",
    )
    made.add_argument(
        "--data", type=Path, default=_data(), help="folder of real data (default: $WEFT_TEST_DATA)"
    )
    return made


def seconds(word: str) -> float:
    value = float(word)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is no time: give 0 or more seconds")
    return value


def start(arguments: argparse.Namespace) -> None:
    """To be called first: refuses a dirty tree before anything is measured, and sets what child
    processes inherit.
    """
    if arguments.quick:
        arguments.dry, arguments.repeats, arguments.rest = True, 1, 0.0
    if not arguments.dry:
        require_clean(ROOT)
    if not arguments.data.is_dir():
        print(
            f"{arguments.data} is no folder: set WEFT_TEST_DATA or --data to the folder of real "
            f"data",
            file=sys.stderr,
        )
        raise SystemExit(2)
    os.environ |= {
        "OMP_NUM_THREADS": str(arguments.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def require_clean(
    root: Path, instead: str = "give --dry to print the table without writing a file"
) -> None:
    """Exit with code 2 where files differ from the commit; results of other benchmarks may.

    `instead`: another way out.
    """
    lines = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results").splitlines()
    if lines:
        shown = "\n".join(lines[:10])
        print(
            f"the tree is dirty, so no commit says what would be measured:\n{shown}\n"
            f"commit or remove these files, or {instead}",
            file=sys.stderr,
        )
        raise DirtyTree(2)


def report(results: Results, arguments: argparse.Namespace, folder: Path = RESULTS) -> Path | None:
    """Print the table; write the file unless `--dry`. Returns its path."""
    print(f"\n{results.name}\n{table(results.rows)}")
    for note in results.notes:
        print(note)
    if arguments.dry:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.name}.json"
    whole = {**provenance(arguments.threads), **asdict(results)}
    path.write_text(json.dumps(whole, indent=2, default=str) + "\n")
    print(f"written to {path.relative_to(folder.parent.parent)}")
    return path


def provenance(threads: int) -> dict[str, Any]:
    """How a result came about: command, commit, hardware, versions, date."""
    module = Path(sys.argv[0]).stem
    return {
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{module}", *map(_without_folder, sys.argv[1:])]
        ),
        "commit": _git(ROOT, "rev-parse", "HEAD").strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "threads": threads,
        "hardware": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        },
        "versions": {"python": platform.python_version(), **versions()},
    }


def _without_folder(word: str) -> str:
    """A word of a command; `DIR` instead of a folder of this machine."""
    option, sign, value = word.rpartition("=")
    return f"{option}{sign}DIR" if Path(value).is_absolute() else word


def versions() -> dict[str, str]:
    """Installed packages that a benchmark may use; absent ones are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns of equal width; numbers stand to the right."""
    if not rows:
        return "(no rows)"
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    numeric = [all(isinstance(row[name], int | float) for row in rows) for name in names]
    return "\n".join(
        "  ".join(
            c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [names, ["-" * width for width in widths], *cells]
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return (
            f"{value:,.0f}"
            if abs(value) >= 1000
            else f"{value:.3g}"
            if abs(value) < 10
            else f"{value:.1f}"
        )
    return str(value)


def _data() -> Path:
    return Path(os.environ.get("WEFT_TEST_DATA", ROOT.parent / "shared" / "data"))


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(
            f"git {words[0]} fails: {done.stderr.strip()}; give --dry where there is no repository",
            file=sys.stderr,
        )
        raise DirtyTree(2)
    return done.stdout


def _cpu() -> str:
    """What the kernel knows of the first processor: its name, and the family and model that tell
    generations apart.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.is_file() else []
    known = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    if "model name" not in known:
        return platform.processor() or platform.machine()
    told = [
        f"{what} {known[key]}"
        for what, key in (("family", "cpu family"), ("model", "model"))
        if key in known
    ]
    return ", ".join([known["model name"], *told])
