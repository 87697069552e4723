"""The lines printed before a run: what will be computed, how much of it, on what, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.data.loader import LoadedData
from weft.engine.spec import ModelSpec
from weft.experiment import Experiment
from weft.launch.memory import Forecast, place_name
from weft.runtime.schedule import Horizon


def plan_lines(
    experiment: Experiment,
    horizon: Horizon | None,
    facts: Mapping[str, Mapping[str, Any]],
    numerics: Mapping[str, Any],
    data: LoadedData | None,
    expected: Forecast,
) -> list[str]:
    """`facts` are the engines' descriptions by role; `numerics` says threads and, under `hardware`, in a line what a device is;
    `expected` is the memory. Without `data` and `horizon` the data were not read."""
    lines = [f"nodes: {' -> '.join(experiment.graph.order)}"]
    lines += [] if data is None else [*data.table().splitlines(), *data.notes]
    lines += experiment.plan_notes
    lines += ["steps: unknown, the data were not read"] if horizon is None else _counts(experiment, horizon)
    for role, spec in experiment.roles.items():
        lines.append(f"{role}: {_describe(spec, facts[role])}")
    said: dict[str, list[str]] = {}  # who is noted the same says it once
    for role in experiment.roles:
        for note in facts[role].get("notes", ()):
            said.setdefault(note, []).append(role)
    lines += [f"{', '.join(roles)}: {note}" for note, roles in said.items()]
    places = [*experiment.meshes().items(), *experiment.copies()]
    named = {place_name(experiment, role, mesh): mesh for role, mesh in places}
    on = {rank: [name for name in named if rank in named[name].ranks] for rank in range(experiment.num_devices)}
    lines += expected.lines(on)
    if len(on) > 1:
        lines += [f"{name}: layout {mesh.layout} on {_devices(mesh.ranks)}" for name, mesh in named.items()]
    lines += [f"parameters of {role} {move}" for role in experiment.roles for move in facts[role].get("moves", ())]
    what = f"{len(on)} devices" if len(on) > 1 else "device"
    if "threads" not in numerics:  # a plan alone
        return [*lines, f"{what}: {numerics['hardware']}"]
    each = " each" if len(on) > 1 else ""
    lines.append(
        f"{what} {numerics['hardware']}, {_many(numerics['threads'], 'thread')}{each}, torch {numerics['torch']}"
    )
    return lines


def _devices(ranks: Sequence[int]) -> str:
    return f"device {ranks[0]}" if len(ranks) == 1 else f"devices {', '.join(map(str, ranks))}"


def _counts(experiment: Experiment, horizon: Horizon) -> Iterator[str]:
    epochs, size = experiment.control.total_train_epochs, experiment.node(experiment.steps_follow).batch_size
    batch = f"{_many(size, 'id')} a step" if size else "steps laid out by tokens"
    if size and horizon.num_ids % size:
        batch += f", the last of an epoch {horizon.num_ids % size}"
    yield (
        f"{_many(horizon.num_ids, 'id')} an epoch, {batch}: {_many(horizon.steps_per_epoch, 'step')} an epoch; "
        f"{_many(horizon.steps, 'step')} in all ({_many(epochs, 'epoch')}{_limit(experiment)})"
    )
    for call in experiment.graph.model_calls():
        if call.method == "generate":
            samples = int(call.args.get("samples_per_prompt", 1))
            yield f"{call.name}: {_many(samples * call.batch_size, 'completion')} a step, {samples * horizon.num_ids} an epoch"
    for node in experiment.trained_nodes():
        updates = experiment.updates_per_firing.get(node.name, 1)
        per_epoch, total = horizon.updates(experiment, node.name)
        frozen = experiment.roles[node.role].optimizer.frozen_epochs
        trained = horizon.trained_updates(experiment, node.name)
        told = f", none in the first {'epoch' if frozen == 1 else f'{frozen} epochs'}" if trained != total else ""
        yield f"{node.name}: {_many(updates, 'optimizer step')} a step, {per_epoch} an epoch, {trained} in all{told}"


def _limit(experiment: Experiment) -> str:
    limit = experiment.control.max_steps
    return f", max_steps={limit}" if limit is not None else ""


def _describe(spec: ModelSpec, facts: Mapping[str, Any]) -> str:
    trainable, total = facts.get("num_trainable", 0), facts.get("num_parameters", 0)
    rate = f" at learning rate {spec.optimizer.peak_lr:g} ({spec.optimizer.lr_scheduler_type})"
    trained = f", {_count(trainable)} trained{rate}" if spec.trained else ", frozen"
    kind = f"{facts.get('family', spec.backend)}, {_count(total)} parameters{trained}, {spec.dtype}"
    return f"{spec.path or spec.tokenizer.path} ({kind})"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _count(number: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return str(number)
