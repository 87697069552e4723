"""Comparison of the ranking of layouts by `weft plan` with that of runs: the forecast and the measured
time of a step for eight placements of the same run on CPU processes, and of the one that
`allocation_mode=search` finds.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import results
from benchmarks.plan import WARM, profile_models, run_case_alone, write_models
from benchmarks.plan_cases import CASES, LARGE, SMALL, Case

STEPS = 8
ROUNDS = 2  # runs of each placement, in an order that is drawn for each round
BAR = 0.8  # the least Kendall tau
SEARCHED = "search"

SFT, PPO = (next(case for case in CASES if case.name == name) for name in ("sft", "ppo"))
# Placements on four devices by their layouts
LAYOUTS = ("d1", "d2", "d4", "t2", "p2", "d2t2", "d2p2", "t2p2")
# Placements on two devices: options of roles and calls
PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "all on one": (),
    "all d2": ("allocation_mode=d2", "n_gpus_per_node=2"),
    "all t2": ("allocation_mode=t2", "n_gpus_per_node=2"),
    "all p2": ("allocation_mode=p2", "n_gpus_per_node=2"),
    "critic apart": ("critic.device_mesh=1",),
    "critic and rewards apart": ("critic.device_mesh=1", "rew.device_mesh=1"),
    "sampling d2": ("actor_gen.layout=d2",),
    "sampling d2, critic apart": ("actor_gen.layout=d2", "critic.device_mesh=1"),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("plan_ranking", str(__doc__), repeats=ROUNDS)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="timed steps of a run (default: %(default)s)"
    )
    parser.add_argument("--only", choices=(SFT.name, PPO.name), help="the run; without it, both")
    parser.add_argument(
        "--profiles", type=Path, help="folder of profiles of these models, in place of new ones"
    )
    parser.add_argument(
        "--no-profile", action="store_true", help="forecast from the estimated speeds of a CPU"
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    groups = list_cases()
    if arguments.only:
        groups = {arguments.only: groups[arguments.only]}
    steps, shapes = arguments.steps, (SMALL, LARGE)
    if arguments.quick:
        steps, shapes = 1, ("tiny", "tiny")
        groups = {name: [case.quick() for case in cases[:2]] for name, cases in groups.items()}
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    notes = []
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        work = Path(name)
        write_models(work, arguments.data, shapes)
        folder = None if arguments.no_profile else arguments.profiles or work / "profiles"
        if folder is not None and arguments.profiles is None:
            profile_models(work, folder, quick=arguments.quick)
        for group, cases in groups.items():
            measured: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
            for turn in range(arguments.repeats):
                place = work / f"{group}{turn}"
                place.mkdir(exist_ok=True)
                link_models(work, place)
                order = random.Random(turn).sample(cases, len(cases))
                for case in order:
                    result = run_case_alone(case, place, arguments.data, steps, folder)
                    measured[case.name].append(result)
                    print(f"{case.name}: {compute_seconds([result]):.3g} s", flush=True)
            runs[group] = measured
            rows += [build_row(name, each) for name, each in measured.items()]
            notes += build_notes(group, measured)
    settings = {"steps": steps, "warm": WARM, "shapes": shapes, "profile": folder is not None}
    results.report(results.Results("plan_ranking", rows, settings, runs, notes), arguments)


def list_cases() -> dict[str, list[Case]]:
    """Return the placements of both runs, each with that of the search at the end."""
    sft = [add_words(SFT, layout, (f"model.layout={layout}",)) for layout in LAYOUTS]
    ppo = [add_words(PPO, name, words) for name, words in PLACEMENTS.items()]
    sft.append(add_words(SFT, SEARCHED, ("allocation_mode=search", "n_gpus_per_node=4")))
    ppo.append(add_words(PPO, SEARCHED, ("allocation_mode=search", "n_gpus_per_node=2")))
    return {SFT.name: sft, PPO.name: ppo}


def add_words(case: Case, name: str, words: Sequence[str]) -> Case:
    return replace(case, name=f"{case.name} {name}", words=(*case.words, *words))


def link_models(work: Path, place: Path) -> None:
    """Link the models into the folder of a round, which has run folders of its own."""
    for name in ("model", "large", "rewards"):
        (place / name).symlink_to(work / name)


def compute_seconds(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return the median time of a step over all rounds, in seconds."""
    return median(step["step_seconds"] for each in rounds for step in each["steps"])


def compute_noise(rounds: Sequence[Mapping[str, Any]]) -> float:
    """Return how far the rounds' medians are apart, relative to the median of all."""
    medians = [compute_seconds([each]) for each in rounds]
    return (max(medians) - min(medians)) / compute_seconds(rounds)


def compute_tau(
    forecasts: Sequence[float], measured: Sequence[float], noise: Sequence[float]
) -> tuple[float, int, int]:
    """Return Kendall's tau, the number of pairs that count, and that of pairs within the noise.

    A pair counts if its measured times differ by more than the larger noise of the two.
    """
    agreeing = 0
    counted = 0
    left_out = 0
    for a, b in combinations(range(len(measured)), 2):
        difference = measured[a] - measured[b]
        if abs(difference) <= max(noise[a], noise[b]) * min(measured[a], measured[b]):
            left_out += 1
            continue
        counted += 1
        expected = forecasts[a] - forecasts[b]
        agreeing += (expected * difference > 0) - (expected * difference < 0)
    return agreeing / counted if counted else 1.0, counted, left_out


def build_row(name: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    expected = rounds[0]["forecast"]["step_seconds"]
    took = compute_seconds(rounds)
    return {
        "run": name,
        "processes": rounds[0]["devices"],
        "forecast, s": expected,
        "measured, s": took,
        "error, %": 100 * (expected / took - 1),
        "rounds differ, %": 100 * compute_noise(rounds),
    }


def build_notes(group: str, measured: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return lines on the rank correlation, and on the place of the search's choice."""
    searched = measured.get(f"{group} {SEARCHED}")
    tried = {name: each for name, each in measured.items() if not name.endswith(SEARCHED)}
    forecasts = [each[0]["forecast"]["step_seconds"] for each in tried.values()]
    seconds = [compute_seconds(each) for each in tried.values()]
    tau, counted, left_out = compute_tau(
        forecasts, seconds, list(map(compute_noise, tried.values()))
    )
    lines = [
        f"{group}: Kendall tau {tau:.2f} over {counted} pairs, {left_out} within the noise; to "
        f"reach: {BAR}"
    ]
    if searched is not None:
        best = min(tried, key=lambda name: compute_seconds(tried[name]))
        lines.append(
            f"{group}: the search's placement takes {compute_seconds(searched):.3g} s, the fastest "
            f"tried one ({best}) {min(seconds):.3g} s"
        )
    return lines


if __name__ == "__main__":
    main()
