"""Facts that the plan of a run shows: steps, completions, models, devices and memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from weft.experiment import Experiment
from weft.observe.plan_table import PlannedModel, PlannedTraining, RunFacts
from weft.planner.forecast import MemoryForecast
from weft.planner.lengths import RunLength
from weft.topology import Mesh

if TYPE_CHECKING:
    from weft.data.loader import LoadedData


def describe_run(
    experiment: Experiment,
    horizon: RunLength | None,
    facts: Mapping[str, Mapping[str, Any]],
    data: LoadedData | None,
    expected: MemoryForecast,
) -> RunFacts:
    """Return the facts that the plan of a run shows.

    `facts` maps roles to the descriptions of their engines, and `expected` is the memory forecast.
    `data` and `horizon` (the length of the run) are None if the data were not read.
    """
    graph = experiment.graph
    control = experiment.control
    on = group_roles_by_device(experiment)
    models = {}
    for role, spec in experiment.roles.items():
        optimizer = spec.optimizer
        models[role] = PlannedModel(
            spec.path or spec.tokenizer.path or "",
            spec.backend,
            spec.dtype,
            (optimizer.peak_lr, optimizer.lr_scheduler_type) if spec.trained else None,
            spec.notes,
            facts[role],
        )
    sampling = []
    for call in graph.list_model_calls():
        if call.method == "generate":
            completions = int(call.args.get("samples_per_prompt", 1))
            sampling.append((call.name, call.batch_size, completions))
    return RunFacts(
        levels=_group_into_levels(experiment),
        batch_size=graph.get_node(experiment.steps_follow).batch_size,
        num_ids=None if horizon is None else horizon.num_ids,
        steps_per_epoch=0 if horizon is None else horizon.steps_per_epoch,
        steps=0 if horizon is None else horizon.steps,
        epochs=control.total_train_epochs,
        max_steps=control.max_steps,
        sampling=sampling,
        training=() if horizon is None else _count_training(experiment, horizon),
        models=models,
        meshes={name: mesh for (_, mesh), name in name_engines(experiment).items()},
        num_devices=experiment.num_devices,
        memory={rank: expected.select_roles(names).total for rank, names in on.items()},
        memory_lines=list(expected.format_lines(on)),
        memory_is_limit=not expected.incomplete,
        on_cpu=expected.device == "cpu",
        search=experiment.search,
        notes=experiment.plan_notes,
        data_notes=(*experiment.resume_notes, *(() if data is None else data.notes)),
        minor_notes=() if data is None else _collect_unused_notes(data),
        sources=() if data is None else _format_sources(data),
    )


def _count_training(experiment: Experiment, horizon: RunLength) -> list[PlannedTraining]:
    result: list[PlannedTraining] = []
    for node in experiment.trained_nodes:
        per_epoch, in_run = horizon.updates[node.name]
        total = horizon.schedules[node.name].total_steps
        frozen = experiment.roles[node.role].optimizer.frozen_epochs
        result.append(
            PlannedTraining(
                node.name,
                node.role,
                experiment.updates_per_firing.get(node.name, 1),
                per_epoch,
                total,
                0 if total == in_run else frozen,
            )
        )
    return result


def _group_into_levels(experiment: Experiment) -> list[list[str]]:
    """Group the names of the graph's nodes into levels, in execution order.

    The nodes of one level do not depend on each other.
    """
    depth: dict[str, int] = {}
    for name in experiment.graph.order:
        producers = experiment.graph.find_producers(name)
        depth[name] = max((depth[producer] + 1 for producer in producers), default=0)
    ordered = sorted(experiment.graph.order, key=lambda name: depth[name])
    return [list(names) for _, names in groupby(ordered, key=lambda name: depth[name])]


def _collect_unused_notes(data: LoadedData) -> set[str]:
    notes: set[str] = set()
    for count in data.counts:
        notes.update(count.build_unused_notes())
    return notes


def _format_sources(data: LoadedData) -> list[str]:
    """Return the lines of a table of data sources, or a single line if a table is not needed.

    A table is needed if there are several sources, or if the only source has validation rows or
    notes, for example on truncated rows.
    """
    counts = data.counts
    plain = len(counts) == 1 and not counts[0].evaluation and not counts[0].build_notes("")
    if plain:
        return [f"rows: {counts[0].name}, of type {counts[0].type}"]
    return data.format_counts().splitlines()


def group_roles_by_device(experiment: Experiment) -> dict[int, list[str]]:
    """Return a mapping from the rank of each device to the names of its roles and copies."""
    engines = name_engines(experiment)
    result: dict[int, list[str]] = {}
    for rank in range(experiment.num_devices):
        result[rank] = [name for (_, mesh), name in engines.items() if rank in mesh.ranks]
    return result


def name_engines(experiment: Experiment) -> dict[tuple[str, Mesh], str]:
    """Return a readable name for the engine of each role on each of its meshes.

    The name is the role or, for a copy, the role with its calls: `actor (actor_gen)`.
    """
    names = {place: place[0] for place in experiment.role_meshes.items()}
    calls: dict[tuple[str, Mesh], dict[str, None]] = {}
    for name, call in experiment.calls.items():
        place = (call.role, experiment.call_meshes[name])
        if place not in names:
            calls.setdefault(place, {})[call.name] = None
    for place, names_of_calls in calls.items():
        names[place] = f"{place[0]} ({', '.join(names_of_calls)})"
    return names
