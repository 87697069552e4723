"""Forecast of one step of a run with the placement that it has: seconds, memory and messages.

Each call's forecast has a counterpart that a run measures; `weft plan` and a run's plan show the
forecast, and a run's report shows both. The functions are pure: the caller reads models and
describes the devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from weft.data.spec import DatasetSpec
from weft.experiment import Experiment
from weft.observe.memory import format_size
from weft.observe.metrics import format_duration, format_three_digits
from weft.planner.candidates import PlacementUnit
from weft.planner.cluster import DeviceCluster
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.placement import SearchSpec, build_problem, build_workload, group_calls
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.planner.row_lengths import RowLengths
from weft.planner.simulation import simulate


@dataclass(frozen=True)
class CallForecast:
    """Forecast of one call in one step.

    Attributes:
        seconds: Duration of the call, without the time to move parameters to its devices.
        transfer_seconds: Time to move newly trained parameters to the call's devices.
        moved_bytes: Bytes of these parameters that its devices receive.
        bound: The largest of the parts.
        parts: Seconds of the call by cause: "products", "memory" (reads and writes),
            "messages", "overhead" (starting kernels, packing, passing calls on), "bubble" (waiting of
            pipeline stages), "offload" (copies that nothing hides, and updates in host memory) and
            "preemption" (what preempted sequences compute again).
    """

    seconds: float
    transfer_seconds: float
    moved_bytes: float
    bound: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepForecast:
    """Forecast of one step.

    Attributes:
        step_seconds: Duration of the step, as replayed: calls on separate devices can overlap, and
            sampling that runs ahead overlaps training.
        num_tokens: Number of tokens of the step's batch, with those that are sampled.
        calls: Forecast of each call of a model with a known network.
        left_out: Roles whose calls are not included, because their network is not known.
        basis: What the forecast is based on, for example "estimated speeds of a CPU".
        notes: Messages to the user, for example on a profile that could not be used.
        problem: Problem of placing the calls, with the workloads that the forecast is made from.
        estimate: Estimate of the placement that the run has.
        startup_seconds: Time until the processes of a run have built their networks, as a profile
            measured it, or None.
    """

    step_seconds: float
    num_tokens: int
    calls: Mapping[str, CallForecast]
    left_out: tuple[str, ...]
    basis: str
    problem: PlacementProblem
    estimate: PlacementEstimate
    notes: tuple[str, ...] = ()
    startup_seconds: float | None = None

    def compute_run_seconds(self, steps: int) -> float:
        """Return the duration of a run of `steps` steps, with its start-up if that is known."""
        return steps * self.step_seconds + (self.startup_seconds or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain values, as JSON can hold them."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        del values["problem"], values["estimate"]
        values["calls"] = {name: asdict(call) for name, call in self.calls.items()}
        return values

    def format_lines(self, steps: int | None = None) -> list[str]:
        """Return lines with the duration of a step, and what each call contributes to it.

        `steps` is the number of steps of the run, or None if it is not known.
        """
        rate = self.num_tokens / self.step_seconds
        run = ""
        left_out = list(self.left_out)
        if steps is not None:
            run = f", {format_duration(self.compute_run_seconds(steps))} for {steps:,} steps"
            if self.startup_seconds is None:
                left_out.append("start-up")
            else:
                run += f" with {self.startup_seconds:.3g} s of start-up"
        missing = f", without {', '.join(left_out)}" if left_out else ""
        lines = [
            f"time: about {format_three_digits(self.step_seconds)} s per step ({rate:,.0f} tokens/s){run}{missing}; "
            f"from {self.basis}"
        ]
        for name, call in sorted(self.calls.items(), key=lambda item: -item[1].seconds):
            moving = ""
            if call.transfer_seconds:
                moving = (
                    f" + {format_three_digits(call.transfer_seconds)} s for "
                    f"{format_size(call.moved_bytes)} of weights"
                )
            bound = call.bound
            if bound == "products" and self._is_slowed_by_float32(name):
                bound += " in float32"
            most = f", mostly {bound}" if bound else ""
            lines.append(f"  {name}: {format_three_digits(call.seconds)} s{moving}{most}")
        return lines

    def _is_slowed_by_float32(self, call: str) -> bool:
        """Return whether a call computes in float32 on GPUs, which are faster in bfloat16."""
        problem = self.problem
        role = problem.units[problem.unit_of[call]].role
        on_gpu = problem.rates.cores is None
        return on_gpu and problem.networks[role].settings.dtype == "float32"


def forecast_step(
    experiment: Experiment,
    networks: Mapping[str, DecoderSizes],
    rates: DeviceRates,
    search: SearchSpec,
    user_dataset: DatasetSpec,
    rows: RowLengths | None = None,
    cluster: DeviceCluster | None = None,
    shared_roles: Mapping[str, str] | None = None,
) -> StepForecast:
    """Return the forecast of a step of `experiment` on the devices that its calls have.

    `networks` maps roles to the sizes of their models; calls of other roles are left out. `search`
    and `user_dataset` give the lengths of prompts and answers: the assumptions that the user set,
    and the dataset's options as the user wrote them. `rows` are the lengths of the run's rows, if
    they were read. `cluster` has the kinds of devices if there are several, and `shared_roles` are
    those of `PlacementProblem`.
    """
    calls = experiment.graph.list_model_calls()
    known_calls = [call for call in calls if call.role in networks]
    loads = {
        call.name: build_workload(experiment, search, user_dataset, call, rows)
        for call in known_calls
    }
    # The calls that train a role form a unit, and so does each other call; a unit has one mesh.
    units = []
    for members in group_calls(known_calls):
        first = members[0]
        names = tuple(call.name for call in members)
        mesh = experiment.call_meshes[first.name]
        units.append(PlacementUnit(first.role, names, (mesh,), trains=first.trains))
    problem = build_problem(
        experiment,
        units,
        networks,
        loads,
        rates,
        num_devices=experiment.num_devices,
        cluster=cluster,
        shared_roles=shared_roles,
    )
    return forecast_placement(experiment, problem)


def with_expert_loads(
    forecast: StepForecast, experiment: Experiment, loads: Mapping[str, float]
) -> StepForecast:
    """Return the forecast with measured loads of experts (`DecoderSizes.expert_load`), by role."""
    networks = dict(forecast.problem.networks)
    for role, load in loads.items():
        if role in networks:
            networks[role] = replace(networks[role], expert_load=load)
    updated = forecast_placement(experiment, replace(forecast.problem, networks=networks))
    return replace(updated, notes=forecast.notes)


def forecast_placement(experiment: Experiment, problem: PlacementProblem) -> StepForecast:
    """Return the forecast of a step with the only placement that `problem` has."""
    estimate = problem.estimate([0] * len(problem.units))
    step_seconds = estimate.step_seconds
    if problem.max_staleness:
        # The replay includes waiting for data and devices; the estimate is only a lower bound.
        follow = experiment.steps_follow
        replayed = simulate(experiment.graph, follow, problem, estimate, steps=1)
        step_seconds = replayed.step_seconds
    forecasts = {}
    for name, seconds in estimate.seconds.items():
        forecasts[name] = CallForecast(
            seconds,
            estimate.transfer_seconds[name],
            estimate.moved_bytes[name],
            max(estimate.parts[name], key=lambda part: estimate.parts[name][part]),
            estimate.parts[name],
        )
    calls = experiment.graph.list_model_calls()
    known = problem.networks
    left_out = tuple(dict.fromkeys(call.role for call in calls if call.role not in known))
    rates = problem.rates
    return StepForecast(
        step_seconds,
        max(load.num_tokens for load in problem.loads.values()),
        forecasts,
        left_out,
        rates.basis,
        problem,
        estimate,
        startup_seconds=None if rates.links is None else rates.links.startup_seconds,
    )
