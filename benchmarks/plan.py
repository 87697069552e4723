"""How right `weft plan` is: the forecasts of a step's time and memory next to the measured ones, for
runs of every algorithm on at most two processes of one thread each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import data, model, pairs, plan_clock, results
from benchmarks.plan_cases import CASES, LARGE, SMALL, Case
from weft.observe.memory import keep_freed_memory

WARM = 2  # steps before the clock starts
STEPS = 20
# Percent: the most that the median error may be
BAR = 15
MEMORY_BAR = 10


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("plan", str(__doc__), repeats=1)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="timed steps of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--only", default="", help="names of cases, with semicolons between; without it, all"
    )
    parser.add_argument(
        "--profiles", type=Path, help="folder of profiles of these models, in place of new ones"
    )
    parser.add_argument(
        "--no-profile", action="store_true", help="forecast from the estimated speeds of a CPU"
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only.split(";")]
    if not cases:
        raise SystemExit(f"--only={arguments.only}: cases are {'; '.join(c.name for c in CASES)}")
    steps, shapes = arguments.steps, (SMALL, LARGE)
    if arguments.quick:
        cases, steps, shapes = [case.quick() for case in cases], 1, ("tiny", "tiny")
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        work = Path(name)
        write_models(work, arguments.data, shapes)
        spent = 0.0
        folder = None if arguments.no_profile else arguments.profiles or work / "profiles"
        if folder is not None and arguments.profiles is None:
            spent = profile_models(work, folder, quick=arguments.quick)
        runs = {}
        for case in cases:
            runs[case.name] = run_case_alone(case, work, arguments.data, steps, folder)
            print(f"{case.name}: {describe(runs[case.name])}", flush=True)
    rows = [build_row(name, each) for name, each in runs.items()]
    errors = [abs(row["error, %"]) for row in rows]
    memory_errors = [abs(row["its error, %"]) for row in rows]
    notes = [
        f"time: median error {median(errors):.0f}%, at most {max(errors):.0f}%; to reach: {BAR}%",
        f"memory: median error {median(memory_errors):.0f}%, at most {max(memory_errors):.0f}%; to "
        f"reach: {MEMORY_BAR}%",
        f"measured: the median of {steps} steps after {WARM}; a process of {arguments.threads} "
        "thread for each device",
        "least: the fastest of these steps; processor: the median processor time of a step, of the "
        "device that trains longest, which other work on the machine hardly lengthens; of it: the "
        "error against that, where one device does everything",
        "memory: the most that a process used in all steps, with the interpreter and its libraries; "
        "its error: of the forecast that the run printed and wrote",
    ]
    if spent:
        notes.append(f"weft plan profile took {spent:.0f} s for the two models together")
    settings = {"steps": steps, "warm": WARM, "shapes": shapes, "profile": not arguments.no_profile}
    results.report(results.Results("plan", rows, settings, runs, notes), arguments)


def write_models(work: Path, source: Path, shapes: Sequence[str]) -> None:
    """Write a small and a larger model, and a reward model."""
    tokenizer = source / "tokenizers" / "llama2"
    small, large = (model.SHAPES[name] for name in shapes)
    model.write_model(work / "model", small, tokenizer)
    model.write_model(work / "large", large, tokenizer, seed=1)
    model.write_model(work / "rewards", small, tokenizer, score=True, seed=2)


def profile_models(work: Path, folder: Path, *, quick: bool) -> float:
    """Profile the models as a user does, for one and two tensor-parallel ranks.

    Returns the seconds that it took.
    """
    started = time.perf_counter()
    for name in ("model", "large"):
        for tensor in (1, 2):
            words = ["--device", "cpu", "--threads", "1", "--tensor", str(tensor)]
            words += ["--output", str(folder / f"{name}-t{tensor}.json")]
            words += ["--max-tokens", "128"] if quick else []
            command = [sys.executable, "-m", "weft.cli.main", "plan", "profile", str(work / name)]
            subprocess.run([*command, *words], check=True)
    return time.perf_counter() - started


def run_case_alone(
    case: Case, work: Path, source: Path, steps: int, profiles: Path | None
) -> dict[str, Any]:
    """Call `run_case` in a process of its own, whose memory no other run has used."""
    with ProcessPoolExecutor(1, pairs.CONTEXT, keep_freed_memory) as pool:
        return pool.submit(run_case, case, work, source, steps, profiles).result()


def run_case(
    case: Case, work: Path, source: Path, steps: int, profiles: Path | None
) -> dict[str, Any]:
    """Forecast and run one case; return the forecast and each measured step.

    `profiles` is the folder of profiles, or None to forecast without them.
    """
    from weft.cli.quickstart import build_config
    from weft.launch import run
    from weft.launch.facts import TargetDevices
    from weft.launch.plan import forecast_run_step
    from weft.launch.resolve import read_data, resolve_run, set_up_device
    from weft.launch.run import set_up_experiment

    folder = work / case.name.replace(" ", "-").replace(",", "")
    words = build_words(case, work, folder, source, steps)
    words += [] if profiles is None else [f"search.profile={profiles}"]
    config, _ = build_config(words)
    experiment, mode = set_up_experiment(config, None)
    target = TargetDevices.from_experiment(experiment, mode)
    resolved = resolve_run(experiment, set_up_device(experiment, in_process=True))
    rows = read_data(resolved, progress=False)
    forecast = forecast_run_step(resolved.experiment, target, rows.loaded)
    rows.loaded.close()
    assert forecast is not None
    clocks = folder / "clocks"
    clocks.mkdir()
    os.environ[plan_clock.FOLDER] = str(clocks)
    whole = run(build_config(words)[0]).metrics
    lines = whole[WARM:]
    return {
        "forecast": forecast.to_dict(),
        "memory_gb": {
            "forecast": float(lines[-1]["predicted/peak_memory_gb"]),
            "measured": max(float(line["peak_memory_gb"]) for line in whole),
        },
        "steps": [select_times(line) for line in lines],
        "cpu_seconds": read_clocks(clocks),
        "devices": experiment.num_devices,
    }


def read_clocks(folder: Path) -> list[list[float]]:
    """Return the processor seconds of each timed step, by rank that trains."""
    ranks = []
    for path in sorted(folder.iterdir()):
        times = [float(line) for line in path.read_text().split()]
        ranks.append([after - before for before, after in pairwise(times)][WARM - 1 :])
    return ranks


def build_words(case: Case, work: Path, folder: Path, source: Path, steps: int) -> list[str]:
    """Write the rows of a case, and return the arguments of `weft quickstart` that run it."""
    folder.mkdir()
    places = {"MODEL": work / "model", "LARGE": work / "large", "REWARDS": work / "rewards"}
    lengths = data.Lengths(source / "tokenizers" / "llama2" / "tokenizer.json")
    count = case.batch * (steps + WARM)
    rows, _ = data.take(data.SOURCES[case.rows](source), lengths, count, case.longest)
    path = data.write(folder / "rows.jsonl", rows)
    words = [case.algorithm]
    for word in case.words:
        name, _, value = word.partition("=")
        words.append(f"{name}={places.get(value, value)}")
    longest = case.longest + case.new_tokens
    words += [
        f"dataset.train_path={path}",
        f"dataset.train_bs_n_seqs={case.batch}",
        f"dataset.max_seqlen={longest}",
        f"dataset.cache_dir={folder / 'rows'}",
        "dataset.shuffle=false",
        "device=cpu",
        "progress=false",
        f"{'train' if case.algorithm in ('sft', 'rw') else 'actor_train'}"
        f".post_hooks=[{plan_clock.HOOK}]",
        "imports=[benchmarks.plan_clock]",
        "recover_mode=disabled",
        f"max_steps={steps + WARM}",
        "experiment_name=bench",
        "trial_name=plan",
        f"fileroot={folder}",
    ]
    if case.samples:
        gen = "gen" if case.algorithm == "gen" else f"{case.algorithm}.gen"
        words += [f"dataset.max_prompt_len={case.longest}"]
        words += [f"{gen}.{end}_new_tokens={case.new_tokens}" for end in ("min", "max")]
    return words


def select_times(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of a step from its line of metrics, in seconds."""
    kept = {"step_seconds": float(line["step_seconds"])}
    for name, value in line.items():
        if name.startswith("time/"):
            kept[name] = float(value)
    return kept


def build_row(name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    expected = measured["forecast"]["step_seconds"]
    took = median(step["step_seconds"] for step in measured["steps"])
    busiest = max(median(rank) for rank in measured["cpu_seconds"])
    alone = measured["devices"] == 1
    memory = measured["memory_gb"]
    return {
        "run": name,
        "forecast, s": expected,
        "measured, s": took,
        "error, %": 100 * (expected / took - 1),
        "least, s": min(step["step_seconds"] for step in measured["steps"]),
        "processor, s": busiest,
        "of it, %": f"{100 * (expected / busiest - 1):.3g}" if alone else "-",
        "memory, GiB": memory["measured"],
        "its error, %": 100 * (memory["forecast"] / memory["measured"] - 1),
    }


def describe(measured: Mapping[str, Any]) -> str:
    """Return forecast and measured seconds of a step, and of each of its calls, and the memory."""
    parts = []
    for name, call in measured["forecast"]["calls"].items():
        times = [step[f"time/{name}"] for step in measured["steps"]]
        parts.append(f"{name} {call['seconds']:.3f} ({median(times):.3f})")
    row = build_row("", measured)
    memory = measured["memory_gb"]
    return (
        f"{row['forecast, s']:.3f} ({row['measured, s']:.3f}): {json.dumps(parts)}; "
        f"{memory['forecast']:.3f} ({memory['measured']:.3f}) GiB"
    )


if __name__ == "__main__":
    main()
