"""Plan of a run with simulated steps, as pages and commands show it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.experiment import Experiment
from weft.observe.shown_plan import HOST_FUNCTION, ShownCall, ShownGroup, ShownPlan, ShownSpan
from weft.planner.cost import CallWorkload
from weft.planner.plan_file import format_layout
from weft.planner.simulated_memory import build_memory_course, estimate_memory
from weft.planner.simulation import RunSimulation, simulate
from weft.planner.step_forecast import StepForecast


def build_shown_plan(
    experiment: Experiment,
    forecast: StepForecast,
    title: str,
    *,
    steps: int,
    host_seconds: Mapping[str, float] | None = None,
) -> ShownPlan:
    """Return the plan of `experiment`, with `steps` simulated steps.

    `forecast` is the forecast of a step with the experiment's placement, `title` the heading of the
    plan. `host_seconds` maps names of host functions to seconds a step; those of others are 0.
    """
    problem, estimate = forecast.problem, forecast.estimate
    known = host_seconds or {}
    simulation = simulate(
        experiment.graph,
        experiment.steps_follow,
        problem,
        estimate,
        steps=steps,
        host_seconds=known,
    )
    rates = problem.rates
    located = simulation.locate(estimate.meshes)
    calls = []
    for name, call in forecast.calls.items():
        calls.append(
            ShownCall(
                name,
                experiment.calls[name].role,
                format_layout(estimate.meshes[name].layout),
                list(located[name]),
                call.seconds,
                call.transfer_seconds,
                float(call.moved_bytes),
                call.bound,
                dict(call.parts),
            )
        )
    spans = []
    for span in simulation.spans:
        if span.kind == HOST_FUNCTION and not span.seconds:
            continue
        spans.append(
            ShownSpan(
                span.name,
                span.kind,
                span.step,
                list(span.groups),
                round(span.start, 7),
                round(span.seconds, 7),
                span.describe_wait(),
            )
        )
    return ShownPlan(
        title=title,
        device=rates.name,
        num_devices=problem.num_devices,
        per_node=rates.per_node,
        step_seconds=simulation.step_seconds,
        num_tokens=forecast.num_tokens,
        max_staleness=problem.max_staleness,
        step_ends=list(simulation.step_ends),
        groups=_build_groups(forecast, simulation),
        calls=calls,
        spans=spans,
        assumptions=_list_assumptions(experiment, forecast, known),
        basis=forecast.basis,
        left_out=list(forecast.left_out),
        notes=list(forecast.notes),
    )


def _build_groups(forecast: StepForecast, simulation: RunSimulation) -> list[ShownGroup]:
    memory = estimate_memory(forecast.problem, forecast.estimate, simulation.groups)
    groups = []
    for number, devices in enumerate(simulation.groups):
        course = build_memory_course(simulation, number, memory[number])
        devices_of = forecast.problem.devices
        (kind,) = devices_of.find_kinds([devices.intervals[0][0]])
        capacity = devices_of.groups[kind].rates.capacity
        groups.append(
            ShownGroup(
                devices.name,
                [list(interval) for interval in devices.intervals],
                [[round(time, 7), float(used)] for time, used in course],
                None if math.isinf(capacity) else capacity,
            )
        )
    return groups


def _list_assumptions(
    experiment: Experiment, forecast: StepForecast, host_seconds: Mapping[str, float]
) -> list[list[str]]:
    """Return pairs (what is assumed, value)."""
    rows = []
    lengths: dict[str, list[str]] = {}
    for name, load in forecast.problem.loads.items():
        lengths.setdefault(_describe_load(load), []).append(name)
    for text, names in lengths.items():
        rows.append([", ".join(names), text])
    for node in experiment.graph.nodes:
        if node.name in forecast.problem.loads:
            continue
        if getattr(node, "role", None) is None:
            seconds = host_seconds.get(node.name, 0.0)
            rows.append([node.name, f"{seconds:.3g} s a step" if seconds else "takes no time"])
    staleness = forecast.problem.max_staleness
    if staleness:
        rows.append(
            ["staleness", f"sampling may be {staleness} train step{'s' * (staleness > 1)} ahead"]
        )
    return rows


def _describe_load(load: CallWorkload) -> str:
    """Return the lengths of a call's sequences as text."""
    answers = f"{load.new_tokens:,}"
    if load.longest_answer and load.longest_answer > load.new_tokens:
        answers += f" (at most {load.longest_answer:,})"
    text = f"{load.num_sequences:,} sequences of {load.prompt_tokens:,} + {answers} tokens a step"
    updates = load.num_updates * load.num_epochs
    if load.trains and updates > 1:
        text += f", {updates} optimizer steps"
    if load.method != "generate":
        text += f", at most {load.microbatch:,} tokens at a time"
    return text
