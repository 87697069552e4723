"""weft on one CUDA GPU, beside `transformers` and the device's own limits.

Needs torch >= 2.11, transformers, numpy and safetensors, no network, and half an hour at most:

    python benchmarks/gpu.py                      # random weights in the shape of Llama-3.2-1B, bfloat16
    python benchmarks/gpu.py --first              # the tests first; ends at the first wrong number (`make gpu`)
    python benchmarks/gpu.py --minutes 8          # the most telling sections first, within the time; no failure ends it
    python benchmarks/gpu.py --minutes 4 --second # after that: why it is as fast as it is, and what was left out
    python benchmarks/gpu.py --config DIR         # another config.json
    python benchmarks/gpu.py --profile            # also which kernels take the time
    python benchmarks/gpu.py --device cpu --tiny  # the same program on tiny sizes, to see that it runs

Every section runs in a process of its own with a time limit, and none needs another. After each,
`gpu.json` and the page `gpu.md` are written to $OUT (else to `benchmarks/results`, from a clean
tree alone; with `--tiny` only where $OUT is set). With `--minutes` the record is also kept in
`build/gpu-run`, where `--second` reads it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

BEGUN = time.monotonic()  # before torch is imported, which takes seconds
ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] == str(Path(__file__).resolve().parent):
    # this folder's modules are a package, whichever way the program is called
    sys.path[0] = str(ROOT)
sys.path.insert(1, str(ROOT / "src"))

import torch  # noqa: E402

from benchmarks import bare, gpu_plan  # noqa: E402
from benchmarks.gpu_backends import (  # noqa: E402
    LLAMA_3_1_8B,
    LLAMA_3_2_1B,
    QWEN3_0_6B,
    TINY,
    TINY_QWEN3,
    Sizes,
    Where,
)
from benchmarks.gpu_page import page  # noqa: E402
from benchmarks.gpu_plan import Section  # noqa: E402
from benchmarks.gpu_run import Run, describe  # noqa: E402
from benchmarks.gpu_sections import RUNS, SECTIONS, free  # noqa: E402
from benchmarks.results import require_clean, table  # noqa: E402

FULL = Sizes(
    config=LLAMA_3_2_1B,
    sft=(2048,) * 4,
    mixed=(*(128 * n for n in range(1, 16)), 1024),
    ragged=(700, 31, 256, 5),
    long=(QWEN3_0_6B, (8192,)),
    adapted=(LLAMA_3_1_8B, (1024,) * 4),
    decode=(64, 8, 1, 256, 512, 1024),
    compared=64,
    decode_steps=64,
    rollout=(512, 128, 512),
    grpo=(64, 128, 8, 512),
    times=10,
    matmul=8192,
    copied=2**32,
)
SMALL = Sizes(
    config=TINY,
    sft=(32,) * 2,
    mixed=(5, 20, 9),
    ragged=(17, 3, 8),
    long=(TINY_QWEN3, (48,)),
    adapted=(TINY, (24,) * 2),
    decode=(1, 3, 24),
    compared=3,
    decode_steps=4,
    rollout=(6, 8, 6),
    grpo=(2, 20, 2, 6),
    times=2,
    matmul=64,
    copied=2**16,
)
FIRST = ("tests", "agreement")  # what is wrong in them makes every other figure worthless
# git ignores it, so it stays where it is between two commands on one machine
KEPT = ROOT / "build" / "gpu-run"
ENDS = 5.0  # seconds in which a process that is ended is gone
MOST_BYTES = 12 * 2**20  # of a file that is written
# On the page -> what nvidia-smi calls it.
DRIVER_FACTS = {
    "driver": "driver_version",
    "memory": "memory.total",
    "highest clock": "clocks.max.sm",
    "power limit": "power.limit",
    "ECC": "ecc.mode.current",
    "MIG": "mig.mode.current",
}


@dataclass
class Report:
    """What the sections have found so far; also written to `kept`."""

    facts: dict[str, Any]
    out: Path | None
    kept: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # section -> why
    wrong: list[str] = field(default_factory=list)
    not_started: dict[str, str] = field(default_factory=dict)  # section -> why
    ran: list[str] = field(default_factory=list)

    def take(self, name: str, found: dict[str, Any], seconds: float, failure: str | None) -> None:
        self.rows += [{**row, "section": name} for row in found.get("rows", [])]
        self.details[name] = {**found.get("details", {}), "section_s": seconds}
        self.wrong += found.get("wrong", [])
        self.ran.append(name)
        self.not_started.pop(name, None)
        if failure is not None:
            self.failed[name] = failure
        self.write()

    def record(self) -> dict[str, Any]:
        """Everything that the page is made of."""
        return {
            **self.facts,
            "failed": list(self.failed),
            "why": self.failed,
            "wrong": self.wrong,
            "ran": self.ran,
            "not_started": self.not_started,
            "rows": self.rows,
            "details": self.details,
        }

    def write(self) -> None:
        record = self.record()
        text = json.dumps(record, indent=2, default=str) + "\n"
        if len(text) > MOST_BYTES:
            text = json.dumps({**record, "details": {}}, indent=2, default=str) + "\n"
        for folder in filter(None, (self.out, self.kept)):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "gpu.json").write_text(text)
            (folder / "gpu.md").write_text(page(record))

    def known(self) -> dict[str, Any]:
        """What later sections use of earlier ones', those of a run before included."""
        first = self.facts.get("first") or {"details": {}, "rows": []}
        limits = self.details.get("limits") or first["details"].get("limits", {})
        found = {key: limits.get(key) for key in ("products_per_s", "bytes_per_s")}
        found["slowest"] = gpu_plan.slowest([*first["rows"], *self.rows])
        return {key: value for key, value in found.items() if value}


def main(words: list[str] | None = None) -> int:
    """0, or 1 where a section failed or a number is wrong (the others are reported all the same)."""
    chosen = _arguments(words)
    missing = bare.stand_in()
    sizes = SMALL if chosen.tiny else FULL
    if chosen.config is not None:
        sizes = replace(sizes, config=json.loads((chosen.config / "config.json").read_text()))
    device = torch.device(chosen.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu" and not chosen.tiny:
        print(
            "there is no CUDA device here: give --device cpu --tiny to see that the program runs",
            file=sys.stderr,
        )
        return 2
    where = Where(device, "float32" if device.type == "cpu" else "bfloat16")
    if chosen.section is not None:
        known = json.loads(chosen.known) if chosen.known else {}
        profile = chosen.record.parent / "gpu_profile" if chosen.profile else None
        return _section(
            chosen.section,
            Run(sizes, where, chosen.record, profile, known, quick=chosen.minutes is not None),
        )
    facts, timed = _provenance(where, missing, chosen), chosen.minutes is not None
    if timed and chosen.second and (KEPT / "gpu.json").is_file():
        facts["first"] = {**json.loads((KEPT / "gpu.json").read_text()), "first": None}
    report = Report(
        facts, _folder(chosen.tiny), KEPT / "second" if chosen.second else KEPT if timed else None
    )
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as folder:
        if timed:
            _within(60 * chosen.minutes, chosen, report, Path(folder))
        else:
            _one_by_one(chosen, report, Path(folder))
    print(
        f"\n{table([{key: row.get(key, '') for key in ('what', 'value', 'unit', 'goal', 'by')} for row in report.rows])}"
    )
    if report.out is not None:
        print(f"written to {report.out / 'gpu.json'} and {report.out / 'gpu.md'}")
    for line in [
        *(f"wrong: {each}" for each in report.wrong),
        *(f"{n}: {why}" for n, why in report.failed.items()),
    ]:
        print(line, file=sys.stderr)
    return 1 if report.failed or report.wrong else 0


def _one_by_one(chosen: argparse.Namespace, report: Report, folder: Path) -> None:
    """Every section that is chosen; with `--first` until numbers are wrong."""
    for name in chosen.only or [name for name in SECTIONS if chosen.first or name != "tests"]:
        _apart(name, chosen, report, folder)
        if chosen.first and name in FIRST and (report.wrong or name in report.failed):
            print(
                f"{name}: wrong numbers, so the figures that follow would mean nothing",
                file=sys.stderr,
            )
            break


def _within(seconds: float, chosen: argparse.Namespace, report: Report, folder: Path) -> None:
    """The sections of the plan until `seconds` after the program began."""
    # by way of `finally`, which ends what runs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    planned = (
        gpu_plan.second(report.facts.get("first") or {}) if chosen.second else list(gpu_plan.FIRST)
    )
    names = [name for name in planned if not chosen.only or name in chosen.only]
    end = BEGUN + seconds - gpu_plan.MARGIN
    report.not_started = dict.fromkeys(names, "the run ended before")
    report.write()
    print(f"{len(names)} sections within {seconds:.0f} s: {', '.join(names)}", flush=True)
    for turn in gpu_plan.turns(names):
        names = names[len(turn) :]
        left = end - time.monotonic()
        if left < gpu_plan.LEAST:
            report.not_started |= {section.name: "no time was left" for section in turn}
            report.write()
            continue
        _together(turn, left, names, chosen, report, folder)


def _together(
    turn: Sequence[Section],
    left: float,
    rest: Sequence[str],
    chosen: argparse.Namespace,
    report: Report,
    folder: Path,
) -> None:
    """Sections that run at the same time; what one prints is printed once it ends."""
    children = []
    try:
        for section in turn:
            said = (folder / f"{section.name}.txt").open("w+") if len(turn) > 1 else None
            limit = min(chosen.limit or left, gpu_plan.allowance(section, left, rest))
            threads = max(1, (os.cpu_count() or 1) // len(turn)) if len(turn) > 1 else None
            children.append(Child(section.name, chosen, report, folder, limit, said, threads))
        for child in children:
            child.finish(report)
    finally:
        for child in children:
            child.end()


class Child:
    """A section in a process of its own.

    `said` is the file that takes what it prints. `threads` is its share of the processor, where
    others run at the same time and the user does not set OMP_NUM_THREADS.
    """

    def __init__(
        self,
        name: str,
        chosen: argparse.Namespace,
        report: Report,
        folder: Path,
        limit: float,
        said: IO[str] | None = None,
        threads: int | None = None,
    ) -> None:
        self.name, self.limit, self.said, self.begun = name, limit, said, time.monotonic()
        profiles = name in gpu_plan.SECOND or chosen.profile
        self.record = (
            report.out if profiles and report.out is not None else folder
        ) / f"section_{name}.json"
        self.record.parent.mkdir(parents=True, exist_ok=True)
        words = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--section",
            name,
            "--record",
            str(self.record),
        ]
        words += ["--known", json.dumps(report.known())]
        words += [f"--device={chosen.device}"] if chosen.device else []
        words += [f"--config={chosen.config}"] if chosen.config else []
        words += [f"--minutes={chosen.minutes}"] if chosen.minutes else []
        words += ["--tiny"] * chosen.tiny + ["--profile"] * profiles
        print(f"{name}, {limit:.0f} s at most", flush=True)
        environment = {**({"OMP_NUM_THREADS": str(threads)} if threads else {}), **os.environ}
        self.is_ended = False
        self.process = subprocess.Popen(words, stdout=said, start_new_session=True, env=environment)

    def finish(self, report: Report) -> None:
        """Wait until the section ends or its time is over; what it found joins the report."""
        try:
            code = self.process.wait(max(0.0, self.limit - (time.monotonic() - self.begun)))
            failure = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            failure = f"did not end within {self.limit:.0f} s"
        self.end()
        try:
            found = json.loads(self.record.read_text()) if self.record.is_file() else {}
        except json.JSONDecodeError:  # ended while it wrote
            found = {}
        for left in (self.record, self.record.with_suffix(".part")):
            left.unlink(missing_ok=True)
        raised = found.get("details", {}).get("raised")
        failure = f"{failure}, {raised}" if failure and raised else failure
        report.take(self.name, found, time.monotonic() - self.begun, failure)
        if self.said is not None:
            self.said.seek(0)
            print(f"{self.name}:\n{self.said.read()}", end="", flush=True)
            self.said.close()
        if failure:
            print(f"  {self.name} {failure}", flush=True)

    def end(self) -> None:
        """End the process with all that it started, also what outlived it: it would hold the pipe
        that takes the output open.
        """
        if self.is_ended:
            return
        self.is_ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDS)  # the driver can hold a process that waits for a hung GPU


def _apart(name: str, chosen: argparse.Namespace, report: Report, folder: Path) -> None:
    """One section in a process of its own."""
    child = Child(name, chosen, report, folder, chosen.limit or RUNS[name][1])
    try:
        child.finish(report)
    finally:
        child.end()


def _section(name: str, run: Run) -> int:
    free(run.where)
    run.write()
    try:
        RUNS[name][0](run)
    except Exception as error:
        run.details["raised"] = describe(error)
        run.details["traceback"] = traceback.format_exc().splitlines()[-30:]
        raise
    finally:
        run.write()
    return 0


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/gpu.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument(
        "--config", type=Path, help="folder with a config.json (default: Llama-3.2-1B's shape)"
    )
    parser.add_argument("--only", nargs="+", choices=RUNS, help="these sections")
    parser.add_argument(
        "--first", action="store_true", help="the tests first, and end where numbers are wrong"
    )
    parser.add_argument(
        "--minutes",
        type=_minutes,
        help="the most telling sections first; end within so many minutes",
    )
    parser.add_argument(
        "--second",
        action="store_true",
        help="with --minutes: profiles, and what the run before left out",
    )
    parser.add_argument(
        "--limit", type=int, help="seconds that a section may take (default: its own limit)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="write which kernels take the time, to gpu_profile/"
    )
    parser.add_argument("--commit", help="the commit that is measured, where git does not say")
    for hidden in ("--section", "--known"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.second and chosen.minutes is None:
        parser.error("--second needs --minutes, such as --minutes 4")
    if chosen.first and chosen.minutes is not None:
        parser.error(
            "--first ends at wrong numbers, and with --minutes nothing does; give one of them"
        )
    return chosen


def _minutes(word: str) -> float:
    value = float(word)
    if not 0.5 <= value <= 1000:
        raise argparse.ArgumentTypeError(f"{word} minutes: give 0.5 or more")
    return value


def _folder(tiny: bool) -> Path | None:
    """Where the result goes.

    Exits with code 2 where that is among the repository's results and the tree is dirty.
    """
    results = ROOT / "benchmarks" / "results"
    given = os.environ.get("OUT")
    folder = Path(given) if given else None if tiny else results
    if folder is not None and folder.resolve() == results.resolve():
        require_clean(ROOT, "set OUT to another folder")
    return folder


def _provenance(where: Where, missing: list[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """How the figures came about."""
    from weft.engine.device import describe_hardware, parse_gpu_model

    cuda = where.device.type == "cuda"
    found = {name: _version(name) for name in ("triton", "transformers", "numpy", "jax")}
    return {
        "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "tiny": chosen.tiny,
        "commit": _output("git", "rev-parse", "HEAD") or chosen.commit,
        "dirty": bool(_output("git", "status", "--porcelain")),
        "device": torch.cuda.get_device_name() if cuda else describe_hardware(where.device)["name"],
        "gpu": parse_gpu_model(torch.cuda.get_device_name()) if cuda else None,
        "gpu_facts": _ask_driver() if cuda else {},
        "machine": {
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{name: version for name, version in found.items() if version},
        },
        "stand_ins": missing,
    }


def _version(package: str) -> str | None:
    """The version of an installed package; None of one that is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_driver() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; empty where it says nothing."""
    asked = f"--query-gpu={','.join(DRIVER_FACTS.values())}"
    lines = _output("nvidia-smi", asked, "--format=csv,noheader").splitlines()
    values = lines[0].split(",") if lines else []
    return {name: value.strip() for name, value in zip(DRIVER_FACTS, values, strict=False)}


def _output(*words: str) -> str:
    """What a command prints; nothing where there is no such command, or it fails or hangs."""
    try:
        return subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=10
        ).stdout.strip()
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.exit(main())
