"""Processor time of `weft plan show` and of its parts, for PPO with a model of 1.2 billion
parameters on 8 to 16,384 H100 on machines of 8.

Sampling and the reward have one half of the devices, the other calls the other half; ten steps are
simulated. No device is used.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from weft.cli.plan import SMALL_LLAMA
from weft.cli.quickstart import build_config
from weft.launch.facts import TargetDevices
from weft.launch.plan import forecast_run_step
from weft.launch.run import mark_as_planned, set_up_experiment
from weft.observe.plan_page import build_plan_page
from weft.planner.simulated_run import build_shown_plan
from weft.planner.simulation import simulate

DEVICES = (8, 128, 1024, 16384)
STEPS = 10
COMMAND = "import sys; from weft.cli.main import main; sys.exit(main(sys.argv[1:]))"


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("simulate", str(__doc__), repeats=3)
    arguments = parser.parse_args(words)
    results.start(arguments)
    counts = DEVICES[:1] if arguments.quick else DEVICES
    rows = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SMALL_LLAMA))
        (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "count"}) + "\n")
        for devices in counts:
            rows.append(measure(devices, folder, arguments.repeats))
    results.report(results.Results("simulate", rows, {"steps": STEPS}), arguments)


def list_words(devices: int, folder: Path) -> list[str]:
    """Return the words of the run on `devices` devices."""
    half = devices // 2
    roles = [f"{role}.path={folder / 'model'}" for role in ("actor", "critic", "rew")]
    first, second = f"0-{half - 1}", f"{half}-{devices - 1}"
    words = ["ppo", *roles, f"dataset.path={folder / 'prompts.jsonl'}", "search.gpu=H100"]
    words += [f"n_nodes={max(1, devices // 8)}", "n_gpus_per_node=8"]
    words += [f"dataset.train_bs_n_seqs={max(512, devices)}", "ppo.gen.max_new_tokens=512"]
    for role in ("actor", "critic", "ref"):
        words += [f"{role}.layout=d{half}", f"{role}.device_mesh={second}"]
    words += [f"rew.layout=d{half}", f"rew.device_mesh={first}"]
    return [*words, f"actor_gen.layout=d{half // 4}t4", f"actor_gen.device_mesh={first}"]


def measure(devices: int, folder: Path, repeats: int) -> dict[str, Any]:
    """Return the least processor seconds of each part of the plan."""
    words = [*list_words(devices, folder), "experiment_name=plan", "trial_name=plan"]
    config, _ = build_config(words)
    planned = mark_as_planned(config)
    experiment, mode = set_up_experiment(planned, None)
    target = TargetDevices.from_experiment(experiment, mode)
    forecast = forecast_run_step(experiment, target)
    assert forecast is not None
    follow, problem, estimate = experiment.steps_follow, forecast.problem, forecast.estimate
    graph = experiment.graph
    plan = build_shown_plan(experiment, forecast, "ppo", steps=STEPS)

    def run_command() -> None:
        command = [sys.executable, "-c", COMMAND, "plan", "show", *words]
        command += ["--steps", str(STEPS), "--output", str(folder / "plan.html")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ})

    parts: dict[str, Callable[[], object]] = {
        "options": lambda: set_up_experiment(planned, None),
        "forecast": lambda: forecast_run_step(experiment, target),
        "replay": lambda: simulate(graph, follow, problem, estimate, steps=STEPS),
        "replay and memory": lambda: build_shown_plan(experiment, forecast, "ppo", steps=STEPS),
        "page": lambda: build_plan_page(plan).render(),
        "command": run_command,
    }
    row: dict[str, Any] = {"devices": devices, "groups": len(plan.groups)}
    for name, part in parts.items():
        row[f"{name}, s"] = min(time_processor(part) for _ in range(repeats))
    return row


def time_processor(part: Callable[[], object]) -> float:
    """Return the processor seconds of this process and of its children while `part` runs."""
    began = time.process_time() + _sum_children()
    part()
    return time.process_time() + _sum_children() - began


def _sum_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
