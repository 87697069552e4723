"""`weft plan search`: find the placement of a run by search, and print it or write a plan file."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.plan_run import WORDS, build_planned_config
from weft.errors import ConfigError
from weft.observe.metrics import format_three_digits
from weft.planner.devices import GIB
from weft.planner.placement import SEARCH, is_plan_path
from weft.planner.profile import refuse_unusable_profiles

if TYPE_CHECKING:
    from weft.experiments.common import RunConfig
    from weft.launch.plan_run import RunForecast

SUMMARY = "the placement that allocation_mode=search finds for an experiment"
EPILOG = """Seconds are estimates from the sizes of matrix products, memory reads and messages.
Use them to compare placements. search.* sets the assumptions: the GPU, which this machine need
not have, its memory, and the lengths of prompts and answers.

examples:
  weft plan search ppo actor.path=MODEL critic.path=MODEL rew.path=REWARDS dataset.path=prompts.jsonl n_gpus_per_node=8
  weft plan search sft model.path=MODEL dataset.train_path=sft.jsonl n_nodes=2 n_gpus_per_node=8 search.gpu=H100 --json
  weft plan search ppo ... n_gpus_per_node=8 --output plan.yaml       # to edit; run it with allocation_mode=plan.yaml
  weft plan search ppo ... n_gpus_per_node=8 allocation_mode=plan.yaml    # compare the plan with the search"""


def add_parser(commands: Any) -> None:
    """Add the command `search` to the commands of `weft plan`."""
    parser = commands.add_parser(
        "search", help=SUMMARY, description=f"Print {SUMMARY}.", epilog=EPILOG
    )
    parser.add_argument("words", **WORDS)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the plan to a file, such as plan.yaml"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def print_search(arguments: argparse.Namespace) -> None:
    """Print the devices that `allocation_mode=search` assigns to each model call of a run.

    If there is nothing to choose, because the run has one device or every role has a layout, the
    time of a step with these layouts is printed instead. If the command line sets `allocation_mode`
    to a plan file, the plan is compared with the search. Raises `ConfigError` if a model's
    config.json is missing or if the speed of the devices is not known.
    """
    from weft.launch.plan_run import (
        forecast_experiment,
        forecast_run,
        plan_experiment,
        with_assumed_lengths,
    )

    output = arguments.output
    if output is not None:
        check_output(output)
    given_config = build_planned_config(arguments.words)
    config = replace(given_config, allocation_mode=SEARCH)
    planned, target = plan_experiment(with_assumed_lengths(config))
    experiment = planned.experiment
    refuse_unusable_profiles(experiment.plan_notes)
    missing = [note for note in experiment.plan_notes if "config.json is not" in note]
    if missing and not experiment.search:
        raise ConfigError("\n".join(missing))
    forecast = None
    has_plan = is_plan_path(given_config.allocation_mode)
    if output is not None or has_plan or not experiment.search:
        forecast = forecast_experiment(planned, target, config.max_steps)
    if arguments.json:
        if experiment.search:
            report = dict(experiment.search)
        else:
            assert forecast is not None
            report = forecast.step.to_dict()
        lines = []
    elif experiment.search:
        lines = [
            line for line in experiment.plan_notes if line.startswith(("allocation_mode", "  "))
        ]
    else:
        assert forecast is not None
        lines = [
            *forecast.step.format_lines(),
            forecast.target.format_verdict(forecast.needed),
            "nothing to choose: the run has one device, or every role has a layout; "
            "n_gpus_per_node=8 (or n_nodes) asks for more devices",
        ]
    if has_plan:
        assert forecast is not None
        plan_forecast = forecast_run(given_config)
        lines.append(_compare(given_config.allocation_mode, plan_forecast, forecast))
        if arguments.json:
            report["plan"] = {
                "step_seconds": plan_forecast.step.step_seconds,
                "memory_gb": plan_forecast.needed / GIB,
                "fits": plan_forecast.fits,
            }
    if output is not None:
        assert forecast is not None
        write_plan(output, forecast, config, arguments.words[0])
        lines.append(
            f"written to {output}; weft plan run ... allocation_mode={output} prices it, and weft "
            f"quickstart ... allocation_mode={output} runs it"
        )
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(lines))


def _compare(path: str, plan_forecast: RunForecast, search_forecast: RunForecast) -> str:
    """Return a line that compares the plan in the file `path` with the result of the search."""
    plan_seconds, search_seconds = (
        plan_forecast.step.step_seconds,
        search_forecast.step.step_seconds,
    )
    remark = "" if plan_forecast.fits else ", which does not fit"
    line = (
        f"{path}: {format_three_digits(plan_seconds)} s per step and "
        f"{plan_forecast.needed / GIB:.1f} GiB of a device{remark}; the search finds "
        f"{format_three_digits(search_seconds)} s and {search_forecast.needed / GIB:.1f} GiB"
    )
    return (
        line
        if search_seconds == plan_seconds
        else f"{line} ({plan_seconds / search_seconds:.2f} times as fast)"
    )


def check_output(path: Path) -> None:
    """Raise `ConfigError` if `path` is a file that weft did not write, or that was edited since."""
    from weft.planner.plan_file import CHECKSUM, is_unchanged
    from weft.reading import read_text
    from weft.writing import resolve_destination

    resolve_destination(path)
    if not path.exists():
        return
    text = read_text(path, f"--output {path}", ConfigError)
    if is_unchanged(text):
        return
    problem = "is no plan of weft's"
    if CHECKSUM.search(text):
        problem = "has been edited since weft wrote it"
    raise ConfigError(
        f"--output {path}: exists already and {problem}; name another file, or remove this one"
    )


def write_plan(path: Path, forecast: RunForecast, config: RunConfig, algorithm: str) -> None:
    """Write the placement of a run and its forecast to a plan file.

    `algorithm` is the name of the quickstart.
    """
    from weft.experiments.plans import build_run_plan
    from weft.planner.placement import build_workload
    from weft.planner.plan_file import format_plan
    from weft.writing import write

    experiment = forecast.experiment
    plan = build_run_plan(experiment, config)
    peaks = forecast.compute_call_peaks()
    calls = {}
    for name, call in plan.calls.items():
        call_estimates: dict[str, Any] = {}
        if name in forecast.step.calls:
            forecast_call = forecast.step.calls[name]
            call_estimates = {"seconds": forecast_call.seconds, "bound": forecast_call.bound}
        if name in peaks:
            call_estimates["memory_gb"] = peaks[name] / GIB
        calls[name] = replace(call, estimated=call_estimates)
    first_call = experiment.graph.list_model_calls()[0]
    workload = build_workload(experiment, config.search, experiment.dataset, first_call)
    estimates = {
        "device": forecast.device,
        "step_seconds": forecast.step.step_seconds,
        "memory_gb": forecast.needed / GIB,
        "usable_memory_gb": forecast.usable / GIB,
        "tokens_per_step": forecast.step.num_tokens,
        "prompt_tokens": workload.prompt_tokens,
        "answer_tokens": workload.new_tokens,
        "basis": forecast.step.basis,
    }
    per_node = config.n_gpus_per_node or 1
    facts = replace(plan.facts, devices=config.n_nodes * per_node, devices_per_node=per_node)
    plan = replace(plan, calls=calls, estimates=estimates, facts=facts, source=str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, format_plan(plan, algorithm))
