"""`weft plan show`: simulate steps of a run on its placement, and write a page that shows them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.experiment import Experiment
    from weft.experiments.common import RunConfig
    from weft.observe.shown_plan import ShownPlan

SUMMARY = "simulated steps of a run: which call runs when and where, memory, and what bounds calls"
DEFAULT_STEPS = 3
MAX_STEPS = 1000
DEFAULT_PAGE = Path("plan.html")
# texts by which a page of weft is recognized
PAGE_BEGINNING = "<!doctype html>"
PAGE_MARK = "· weft</title>"
EPILOG = """Only options and config.json are read; the devices need not exist. Layouts are those of the
options: set by hand, or by allocation_mode=search or heuristic. search.* sets the assumptions.

examples:
  weft plan show sft model.path=MODEL dataset.train_path=sft.jsonl search.gpu=H100
  weft plan show ppo actor.path=MODEL rew.path=REWARDS dataset.path=prompts.jsonl n_gpus_per_node=8 search.gpu=H100
  weft plan show ppo ... n_nodes=2048 n_gpus_per_node=8 allocation_mode=d2048t8 search.gpu=H100 --timeline timeline.json"""


def add_parser(commands: Any, words: Mapping[str, Any]) -> None:
    """Add the command `show` to the commands of `weft plan`.

    `words` are the settings of the argument that names the run.
    """
    parser = commands.add_parser(
        "show", help=SUMMARY, description=f"Write a page with {SUMMARY}.", epilog=EPILOG
    )
    parser.add_argument("words", **words)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help=f"page to write (default: {DEFAULT_PAGE}, but no page with --json)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=DEFAULT_STEPS,
        metavar="N",
        help="steps to simulate (%(default)s)",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the steps as Chrome trace events, as a run's timeline.json, for Perfetto",
    )
    parser.add_argument(
        "--host-times",
        metavar="RUN",
        help="run of the same experiment, whose times of host functions such as rewards, and whose "
        "load of experts, are simulated (default: no time, an assumed load)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(arguments: argparse.Namespace, words: Sequence[str]) -> None:
    """Simulate the run that `words` describe, and write its page.

    `words` are the arguments of `weft quickstart`, with names for the run. Raises `UserError`,
    before anything is written, for unusable arguments, and if a model's config.json is missing or
    the speed of the devices is not known.
    """
    from weft.cli.quickstart import build_config
    from weft.writing import write

    # Check the arguments first.
    if not 1 <= arguments.steps <= MAX_STEPS:
        raise ConfigError(f"--steps={arguments.steps}: simulate 1 to {MAX_STEPS:,} steps")
    page_path = arguments.output
    if page_path is None and not arguments.json:
        page_path = DEFAULT_PAGE
    if page_path is not None:
        check_replaceable(page_path, "--output", is_page)
    if arguments.timeline is not None:
        check_replaceable(arguments.timeline, "--timeline", is_timeline)
    # Simulate.
    config, notes = build_config(list(words))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    plan = simulate_config(config, arguments.words[0], arguments.steps, arguments.host_times)
    # Write the files.
    if arguments.timeline is not None:
        write(arguments.timeline, format_plan_timeline(plan))
    if page_path is not None:
        from weft.observe.plan_page import build_plan_page

        write(page_path, build_plan_page(plan).render(), errors="replace")
    if arguments.json:
        print(json.dumps(plan.to_plain(), indent=2))
        return
    print("\n".join(format_summary(plan)))
    if arguments.timeline is not None:
        print(f"timeline: {arguments.timeline} (open it at ui.perfetto.dev)")
    print(page_path)


def simulate_config(
    config: RunConfig, title: str, steps: int, host_times: str | None = None
) -> ShownPlan:
    """Return the plan of a run, with `steps` simulated steps.

    `title` is the title of the page. `host_times` names a run whose times of host functions and
    loads of experts are used. Raises `ConfigError` if a model's config.json is missing, the speed
    of the devices is not known, or the named run has no such times.
    """
    from weft.launch.plan import forecast_run_step
    from weft.launch.plan_run import plan_experiment, with_assumed_lengths
    from weft.planner.profile import refuse_unusable_profiles
    from weft.planner.simulated_run import build_shown_plan
    from weft.planner.step_forecast import with_expert_loads

    resolved, target = plan_experiment(with_assumed_lengths(config))
    experiment = resolved.experiment
    refuse_unusable_profiles(experiment.plan_notes)
    missing = [note for note in experiment.plan_notes if "config.json" in note]
    if missing:
        raise ConfigError("\n".join(missing))
    host_seconds: Mapping[str, float] = {}
    loads: Mapping[str, float] = {}
    if host_times is not None:
        host_seconds, loads = read_host_times(host_times, experiment)
    forecast = forecast_run_step(experiment, target)
    if forecast is None:
        raise ConfigError(
            "plan show: the speed of these devices is not known; name a GPU, such as "
            "search.gpu=H100, or set device=cpu"
        )
    refuse_unusable_profiles(forecast.notes)
    if loads:
        forecast = with_expert_loads(forecast, experiment, loads)
    return build_shown_plan(experiment, forecast, title, steps=steps, host_seconds=host_seconds)


def read_host_times(run: str, experiment: Experiment) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds of each host function, load of each role's experts) in an earlier run.

    Both are medians over the steps of `run`. Raises `ConfigError` if there is no such run, or if it
    has no times of the host functions of `experiment`.
    """
    from weft.cli.named_run import RUNS, find_run, open_root
    from weft.observe.expert_loads import read_expert_loads
    from weft.observe.host_times import read_host_seconds
    from weft.observe.run_files import RunFiles

    models = {call.name for call in experiment.graph.list_model_calls()}
    names = [name for name in experiment.graph.order if name not in models]
    lines = RunFiles.read(find_run(run, open_root(RUNS))).lines
    roles = {node.name: node.role for node in experiment.trained_nodes}
    seconds, loads = read_host_seconds(lines, names), read_expert_loads(lines, roles)
    if not names and not loads:
        raise ConfigError(
            f"--host-times {run}: this experiment has no host functions; leave it out"
        )
    if names and not seconds:
        raise ConfigError(
            f"--host-times {run}: this run has no times of {', '.join(names)}; name a run of the "
            "same experiment that has finished a step"
        )
    return seconds, loads


def format_summary(plan: ShownPlan) -> list[str]:
    """Return lines with the duration of a step, the peak memory, and notes."""
    from weft.observe.memory import format_size
    from weft.observe.plan_page import describe_devices, format_seconds

    fullest = plan.fullest
    rate = plan.num_tokens / plan.step_seconds
    line = (
        f"{format_seconds(plan.step_seconds)} per step ({rate:,.0f} tokens/s) on "
        f"{describe_devices(plan)}; {format_size(fullest.peak_bytes, 1)} at most on a device"
    )
    if fullest.capacity is not None:
        line += f" of {format_size(fullest.capacity, 1)}"
    if not fullest.fits:
        line += ", which does NOT fit"
    if plan.left_out:
        line += f"; without {', '.join(plan.left_out)}"
    return [f"{line}; from {plan.basis}", *plan.notes]


# -- files


def is_page(beginning: str) -> bool:
    """Return whether a file with this beginning is a page that weft wrote."""
    return beginning.startswith(PAGE_BEGINNING) and PAGE_MARK in beginning


def is_timeline(beginning: str) -> bool:
    """Return whether a file with this beginning is a timeline that weft wrote."""
    from weft.observe.timeline import STARTED

    return beginning.lstrip().startswith("[") and f'"{STARTED}"' in beginning


def check_replaceable(path: Path, option: str, is_replaceable: Callable[[str], bool]) -> None:
    """Raise `UserError` if `path` cannot be written, or is a file that weft did not write.

    `is_replaceable` returns whether weft wrote a file, given the beginning of its text. `option` is
    the flag that names the path.
    """
    from weft.writing import resolve_destination

    destination = resolve_destination(path)
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: the folder {path.parent} does not exist; create it")
    if not destination.exists():
        return
    with destination.open("rb") as file:
        beginning = file.read(4096).decode("utf-8", errors="replace")
    if beginning and not is_replaceable(beginning):
        raise ConfigError(
            f"{option} {path}: exists and was not written by weft plan show; nothing is "
            "overwritten: name another file"
        )


def format_plan_timeline(plan: ShownPlan) -> str:
    """Return the content of a timeline file with the simulated steps and the memory of devices."""
    from weft.observe.memory import GIB
    from weft.observe.shown_plan import HOST_FUNCTION, WEIGHTS
    from weft.observe.timeline import HOST, ROLES, CounterValue, TimelineSpan, format_timeline

    roles = {call.name: call.role for call in plan.calls}
    groups = {HOST_FUNCTION: HOST, WEIGHTS: WEIGHTS}
    spans = []
    for span in plan.spans:
        name = f"weights for {span.name}" if span.kind == WEIGHTS else span.name
        lane = roles.get(span.name, span.name)
        group = groups.get(span.kind, ROLES)
        spans.append(TimelineSpan(name, group, lane, span.start, span.seconds, span.step))
    counters = []
    for devices in plan.groups:
        for time, num_bytes in devices.memory:
            counters.append(CounterValue(f"memory of {devices.name}", time, num_bytes / GIB))
    counters.sort(key=lambda counter: counter.time)
    return format_timeline(spans, [span.note for span in plan.spans], counters)
