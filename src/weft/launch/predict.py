"""Prediction of a run's steps from its engines and devices, to be compared with what it measures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from weft.data.loader import LoadedData
from weft.engine.backends.auto import choose_backend
from weft.engine.service_spec import NO_NETWORK
from weft.engine.spec import TPU
from weft.errors import UserError
from weft.experiment import Experiment
from weft.experiments.planned_networks import MODULES
from weft.launch.facts import TargetDevices
from weft.launch.plan import forecast_run_step
from weft.observe.memory import measure_file_pages_gb
from weft.observe.metrics import PREDICTED
from weft.observe.predicted import PEAK, PEAK_MEMORY, STEP_SECONDS, WEIGHTS, PredictedStep
from weft.planner.devices import GIB, subtract_reserved
from weft.planner.forecast import MemoryForecast
from weft.planner.run_plan import group_roles_by_device
from weft.planner.simulated_run import build_shown_plan
from weft.planner.step_forecast import StepForecast, with_expert_loads


def predict_step(
    experiment: Experiment,
    expected: MemoryForecast,
    device: torch.device,
    machine: Mapping[str, Any],
    data: LoadedData | None,
    *,
    alone: bool,
) -> PredictedStep:
    """Return the values that are predicted for each step of a run.

    `expected` is the memory forecast, `device` a device of the run, and `machine` its description
    (`describe_hardware`). `data` are the run's rows. With `alone`, the run is in this process.
    Seconds are those of a step with rows of average length, memory is that of the largest batches.
    """
    metrics = _predict_memory(experiment, expected, alone=alone)
    target = _find_target(experiment, device, machine)
    forecast, reason = _forecast_seconds(experiment, target, data)
    if forecast is None:
        return PredictedStep(metrics, reason=reason)
    held = dict(metrics)
    metrics |= _list_seconds(forecast)

    def predict_again(loads: Mapping[str, float]) -> dict[str, float]:
        return held | _list_seconds(with_expert_loads(forecast, experiment, loads))

    divides_experts = any(mesh.layout.expert > 1 for mesh in forecast.estimate.meshes.values())
    basis = "; ".join([forecast.basis, *forecast.notes])
    title = f"{experiment.control.experiment_name}/{experiment.control.trial_name}"
    steps = 1 if not forecast.problem.max_staleness else forecast.problem.max_staleness + 3
    plan = build_shown_plan(experiment, forecast, title, steps=steps)
    again = predict_again if divides_experts else None
    return PredictedStep(metrics, basis, forecast.left_out, plan=plan, predict_again=again)


def _list_seconds(forecast: StepForecast) -> dict[str, float]:
    """Return the predicted seconds of a step and of its calls, and the bytes of moved weights."""
    metrics = {f"{PREDICTED}{STEP_SECONDS}": forecast.step_seconds}
    for name, call in forecast.calls.items():
        metrics[f"{PREDICTED}{name}"] = call.seconds
        if call.moved_bytes:
            metrics[f"{PREDICTED}{name}/{WEIGHTS}"] = float(call.moved_bytes)
    return metrics


def _find_target(
    experiment: Experiment, device: torch.device, machine: Mapping[str, Any]
) -> TargetDevices:
    """Return the devices that the run has, as their processes describe them."""
    count = experiment.num_devices
    if experiment.control.device == TPU:
        return TargetDevices(device, "TPU", count, math.inf, "TPU")
    name = str(machine["name"])
    if device.type == "cuda":
        usable = subtract_reserved(machine["memory"] / GIB) * GIB
    else:
        usable = machine["memory"] / count
    return TargetDevices(device, name, count, usable, name)


def _forecast_seconds(
    experiment: Experiment, target: TargetDevices, data: LoadedData | None
) -> tuple[StepForecast | None, str]:
    """Return the forecast of a step and "", or None and the reason why nothing can be predicted."""
    backends = {}
    for role, spec in experiment.roles.items():
        if spec.path:
            backends[role] = choose_backend(spec).backend
    for role, backend in backends.items():
        if backend not in (*MODULES, *NO_NETWORK):
            return None, f"the speed of {role}.backend={backend} is not known"
    if not set(backends.values()) & {"torch", "jax"}:
        return None, "no role has a network of weft's own (backend=torch or jax)"
    try:
        forecast = forecast_run_step(experiment, target, data)
    except UserError as error:  # the forecast needs more than the run does
        return None, str(error)
    if forecast is None:
        return None, f"the speed of the device is not known ({target.name})"
    return forecast, ""


def _predict_memory(
    experiment: Experiment, expected: MemoryForecast, *, alone: bool
) -> dict[str, float]:
    """Return the predicted peak memory of the run and of each call.

    What a CPU measures is the size of the process, to which memory counts that was in use before the
    engines were built, and files that are mapped into memory.
    """
    on = group_roles_by_device(experiment)
    other = expected.baseline * GIB
    if alone and expected.device == "cpu":
        other += measure_file_pages_gb() * GIB
    metrics: dict[str, float] = {}
    if expected.roles and not expected.incomplete:
        most = max(expected.select_roles(names).total for names in on.values())
        metrics[f"{PREDICTED}{PEAK_MEMORY}"] = (most + other) / GIB
    for name, peak in expected.compute_call_peaks(on).items():
        metrics[f"{PREDICTED}{name}/{PEAK}"] = float(round(peak + other))
    return metrics
