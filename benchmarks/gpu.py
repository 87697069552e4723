"""weft on one CUDA GPU, beside `transformers` and the device's own limits. Needs torch >= 2.11, transformers, numpy and
safetensors, no network, and half an hour at most:

    python benchmarks/gpu.py                      # random weights in the shape of Llama-3.2-1B, bfloat16
    python benchmarks/gpu.py --first              # the tests first; ends at the first wrong number (`make gpu`)
    python benchmarks/gpu.py --config DIR         # another config.json
    python benchmarks/gpu.py --profile            # also which kernels take the time
    python benchmarks/gpu.py --device cpu --tiny  # the same program on tiny sizes, to see that it runs

Every section runs in a process of its own with a time limit, and none needs another. After each, `gpu.json` and the page
`gpu.md` are written to $OUT (else to `benchmarks/results`, from a clean tree alone; with `--tiny` only where $OUT is set).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path[0] = str(ROOT)  # this folder's modules are a package, whichever way the program is called
sys.path.insert(1, str(ROOT / "src"))

import torch  # noqa: E402

from benchmarks import bare  # noqa: E402
from benchmarks.gpu_backends import LLAMA_3_2_1B, TINY, Sizes, Where  # noqa: E402
from benchmarks.gpu_run import Run  # noqa: E402
from benchmarks.gpu_sections import SECTIONS, free  # noqa: E402
from benchmarks.results import require_clean, table  # noqa: E402

FULL = Sizes(
    config=LLAMA_3_2_1B, sft=(2048,) * 4, mixed=(*(128 * n for n in range(1, 16)), 1024), ragged=(700, 31, 256, 5),
    decode=(1, 8, 64, 256, 512, 1024), compared=64, decode_steps=64, rollout=(512, 128, 512), grpo=(64, 128, 8, 512),
    times=10, matmul=8192, copied=2**32,
)  # fmt: skip
SMALL = Sizes(
    config=TINY, sft=(32,) * 2, mixed=(5, 20, 9), ragged=(17, 3, 8), decode=(1, 3, 24), compared=3, decode_steps=4,
    rollout=(6, 8, 6), grpo=(2, 20, 2, 6), times=2, matmul=64, copied=2**16,
)  # fmt: skip
FIRST = ("tests", "agreement")  # what is wrong in them makes every other figure worthless


@dataclass
class Report:
    """What the sections have found so far."""

    facts: dict[str, Any]
    out: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # section -> why
    wrong: list[str] = field(default_factory=list)

    def take(self, name: str, found: dict[str, Any], seconds: float, failure: str | None) -> None:
        self.rows += found.get("rows", [])
        self.details[name] = {**found.get("details", {}), "section_s": seconds}
        self.wrong += found.get("wrong", [])
        if failure is not None:
            self.failed[name] = failure
        self.write()

    def write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        written = {
            **self.facts, "failed": list(self.failed), "why": self.failed, "wrong": self.wrong, "rows": self.rows,
            "details": self.details,
        }  # fmt: skip
        (self.out / "gpu.json").write_text(json.dumps(written, indent=2, default=str) + "\n")
        (self.out / "gpu.md").write_text(self.page())

    def page(self) -> str:
        """Markdown: what failed, what is wrong, every figure with its goal, and how they came about."""
        versions = ", ".join(f"{name} {version}" for name, version in self.facts["versions"].items())
        lines = [f"# weft on {self.facts['device'] or 'this device'}", ""]
        lines += [
            f"`{self.facts['command']}`, commit {self.facts['commit']}{' (dirty)' if self.facts['dirty'] else ''}. {versions}.",
            "",
        ]
        lines += [f"- **wrong**: {each}" for each in self.wrong]
        lines += [f"- **{name} failed**: {why}" for name, why in self.failed.items()]
        lines += ["", "| what | value | unit | goal | |", "|---|---|---|---|---|"]
        for row in self.rows:
            lines.append(f"| {row['what']} | {row['value']:.4g} | {row['unit']} | {row['goal']} | {verdict(row)} |")
        notes = [note for details in self.details.values() for note in details.get("notes", ())]
        return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def verdict(row: dict[str, Any]) -> str:
    """Whether a figure reaches its goal."""
    if not row["goal"]:
        return ""
    sign, bound = row["goal"].split()
    reached = row["value"] >= float(bound) if sign == ">=" else row["value"] <= float(bound)
    return "reached" if reached else "**missed**"


def main(words: list[str] | None = None) -> int:
    """0, or 1 where a section failed or a number is wrong (the others are reported all the same)."""
    chosen = _arguments(words)
    missing = bare.stand_in()
    sizes = SMALL if chosen.tiny else FULL
    if chosen.config is not None:
        sizes = replace(sizes, config=json.loads((chosen.config / "config.json").read_text()))
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not chosen.tiny:
        print("there is no CUDA device here: give --device cpu --tiny to see that the program runs", file=sys.stderr)
        return 2
    where = Where(device, "float32" if device.type == "cpu" else "bfloat16")
    if chosen.section is not None:
        known = json.loads(chosen.known) if chosen.known else {}
        profile = chosen.record.parent / "gpu_profile" if chosen.profile else None
        return _section(chosen.section, Run(sizes, where, chosen.record, profile, known))
    report = Report(_provenance(where, missing), _folder(chosen.tiny))
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        for name in chosen.only or [name for name in SECTIONS if chosen.first or name != "tests"]:
            _apart(name, chosen, report, Path(folder))
            if chosen.first and name in FIRST and (report.wrong or name in report.failed):
                print(f"{name}: wrong numbers, so the figures that follow would mean nothing", file=sys.stderr)
                break
    print(f"\n{table(report.rows)}")
    if report.out is not None:
        print(f"written to {report.out / 'gpu.json'} and {report.out / 'gpu.md'}")
    for line in [*(f"wrong: {each}" for each in report.wrong), *(f"{n}: {why}" for n, why in report.failed.items())]:
        print(line, file=sys.stderr)
    return 1 if report.failed or report.wrong else 0


def _apart(name: str, chosen: argparse.Namespace, report: Report, folder: Path) -> None:
    """One section in a process of its own."""
    print(name, flush=True)
    record = (report.out if chosen.profile and report.out is not None else folder) / f"section_{name}.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    known = {key: report.details.get("limits", {}).get(key) for key in ("products_per_s", "bytes_per_s")}
    words = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--record", str(record)]
    words += ["--known", json.dumps({key: value for key, value in known.items() if value})]
    words += [f"--device={chosen.device}"] if chosen.device else []
    words += [f"--config={chosen.config}"] if chosen.config else []
    words += ["--tiny"] * chosen.tiny + ["--profile"] * chosen.profile
    seconds, begin, failure = chosen.limit or SECTIONS[name][1], time.monotonic(), None
    try:
        code = subprocess.run(words, timeout=seconds, check=False).returncode
        failure = f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        failure = f"did not end within {seconds} s"
    found = json.loads(record.read_text()) if record.is_file() else {}
    record.unlink(missing_ok=True)
    report.take(name, found, time.monotonic() - begin, failure)
    if failure:
        print(f"  {failure}", flush=True)


def _section(name: str, run: Run) -> int:
    free(run.where)
    run.write()
    SECTIONS[name][0](run)
    run.write()
    return 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--config", type=Path, help="folder with a config.json (default: Llama-3.2-1B's shape)")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="these sections")
    parser.add_argument("--first", action="store_true", help="the tests first, and end where numbers are wrong")
    parser.add_argument("--limit", type=int, help="seconds that a section may take (default: its own limit)")
    parser.add_argument("--profile", action="store_true", help="write which kernels take the time, to gpu_profile/")
    for hidden in ("--section", "--known"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def _folder(tiny: bool) -> Path | None:
    """Where the result goes. Exits with code 2 where that is among the repository's results and the tree is dirty."""
    results = ROOT / "benchmarks" / "results"
    given = os.environ.get("OUT")
    folder = Path(given) if given else None if tiny else results
    if folder is not None and folder.resolve() == results.resolve():
        require_clean(ROOT, "set OUT to another folder")
    return folder


def _provenance(where: Where, missing: list[str]) -> dict[str, Any]:
    """How the figures came about."""
    import numpy
    import transformers

    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    state = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    cuda = where.device.type == "cuda"
    return {
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "commit": git.stdout.strip() or None,
        "dirty": bool(state.stdout.strip()),
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "driver": _driver() if cuda else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "numpy": numpy.__version__,
        },
        "stand_ins": missing,
    }


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    except FileNotFoundError:
        return None
    return found[0].strip() if found else None


if __name__ == "__main__":
    sys.exit(main())
