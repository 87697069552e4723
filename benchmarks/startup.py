"""How long a run takes to its first step: on one device, on two and on four, and how long `weft
--help` takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import model, results
from weft.runtime.processes import ProcessId, adopt_orphans, find_descendants

LAYOUTS = {"one device": "d1", "two devices": "d2", "four devices": "d4"}
# seconds, on two idle cores
GOALS = {"weft --help": 0.1, "one device": 5.0, "two devices": 12.0, "four devices": 16.0}
POLL_SECONDS = 0.01
LONGEST = 600.0
TICKS = os.sysconf("SC_CLK_TCK")
# by what a command line holds; the rest is Ray's
KINDS = {"ray::_Device": "devices", "weft.cli.main": "driver"}
WEFT = [sys.executable, "-m", "weft.cli.main"]


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("startup", str(__doc__), repeats=5)
    arguments = parser.parse_args(words)
    results.start(arguments)
    del os.environ["OMP_NUM_THREADS"]  # a run settles it for each of its processes
    adopt_orphans()  # Ray's processes leave their parents, and are to be counted
    layouts = dict(list(LAYOUTS.items())[:2]) if arguments.quick else LAYOUTS
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("weft --help", *layouts)}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        write_inputs(folder, arguments.data)
        first_step(folder, "d1", "warm")  # builds kernels and bytecode, once for an installation
        # in turns, so that what else the machine does falls on all
        for number in range(arguments.repeats):
            time.sleep(arguments.rest)
            runs["weft --help"].append(helps())
            for case, layout in layouts.items():
                time.sleep(arguments.rest)
                runs[case].append(first_step(folder, layout, f"{layout}-{number}"))
    rows = [row(case, measured) for case, measured in runs.items()]
    notes = [
        "seconds from the start of the command to the first line of metrics.jsonl; CPU seconds "
        "until then of all its",
        "processes, and of these: the command and the child that it supervises (driver), the "
        "devices' processes, Ray's own",
    ]
    results.report(
        results.Results("startup", rows, {"repeats": arguments.repeats}, runs, notes), arguments
    )


def row(case: str, measured: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    def middle(name: str) -> float:
        return median(each.get(name, 0.0) for each in measured)

    seconds = [each["seconds"] for each in measured]
    return {
        "case": case,
        "seconds": middle("seconds"),
        "least": min(seconds),
        "most": max(seconds),
        "goal": GOALS[case],
        "first line": middle("first line"),
        "CPU seconds": middle("cpu"),
        "driver": middle("driver"),
        "devices": middle("devices"),
        "Ray": middle("Ray"),
    }


def write_inputs(folder: Path, data: Path) -> None:
    """A model of two layers with Llama 2's tokenizer, and rows of the `prompt_answer` form."""
    model.write_model(folder / "model", model.SHAPES["tiny"], data / "tokenizers" / "llama2")
    rows = [
        {"prompt": f"What is {i} plus {i}?", "answer": f" The answer is {2 * i}."}
        for i in range(64)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))


def helps() -> dict[str, float]:
    """`weft --help`, to its end."""
    before, began = os.times(), time.monotonic()
    subprocess.run([*WEFT, "--help"], stdout=subprocess.DEVNULL, check=True)
    seconds, after = time.monotonic() - began, os.times()
    cpu = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    return {"seconds": seconds, "first line": seconds, "cpu": cpu, "driver": cpu}


def first_step(folder: Path, layout: str, trial: str) -> dict[str, float]:
    """Seconds of an SFT run of one step until it is made, and until the first line on the screen;
    CPU seconds by kind of process. Raises `RuntimeError` with what the run has printed where it
    fails.
    """
    command = [
        *WEFT,
        "quickstart",
        "sft",
        "experiment_name=startup",
        f"trial_name={trial}",
        f"fileroot={folder}",
        f"model.path={folder}/model",
        f"model.layout={layout}",
        f"dataset.path={folder}/rows.jsonl",
        "max_steps=1",
        "device=cpu",
    ]
    metrics, screen = folder / "startup" / trial / "metrics.jsonl", folder / f"{trial}.txt"
    first_line, others = 0.0, find_descendants()  # what an earlier run's Ray has left for a moment
    with screen.open("wb") as output:
        began = time.monotonic()
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while not (metrics.exists() and metrics.stat().st_size):
            if run.poll() is not None or time.monotonic() - began > LONGEST:
                run.kill()
                raise RuntimeError(f"{layout}: no step was made:\n{screen.read_text()}")
            if not first_line and screen.stat().st_size:
                first_line = time.monotonic() - began
            time.sleep(POLL_SECONDS)
        seconds, used = time.monotonic() - began, cpu_seconds(find_descendants() - others)
        run.wait()
    return {"seconds": seconds, "first line": first_line, "cpu": sum(used.values()), **used}


def cpu_seconds(processes: set[ProcessId]) -> dict[str, float]:
    """CPU seconds of these processes, and of children of theirs that have ended, by kind."""
    used = dict.fromkeys((*KINDS.values(), "Ray"), 0.0)
    for process in processes:
        place = Path(f"/proc/{process.pid}")
        try:
            spent = (place / "stat").read_text().rpartition(")")[2].split()[11:15]
            said = (place / "cmdline").read_text()
        except OSError:  # it has ended just now
            continue
        kind = next((kind for sign, kind in KINDS.items() if sign in said), "Ray")
        used[kind] += sum(map(int, spent)) / TICKS
    return used


if __name__ == "__main__":
    main()
