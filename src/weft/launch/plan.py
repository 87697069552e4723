"""The lines printed before a run: what will be computed, how much of it, on what, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.data.loader import LoadedData
from weft.engine.spec import ModelSpec
from weft.experiment import Experiment
from weft.launch.memory import Forecast
from weft.runtime.schedule import Horizon


def plan_lines(
    experiment: Experiment,
    horizon: Horizon,
    facts: Mapping[str, Mapping[str, Any]],
    numerics: Mapping[str, Any],
    data: LoadedData,
    expected: Forecast,
) -> list[str]:
    """`facts` are the engines' descriptions by role; `numerics` says device and threads; `expected` is the memory."""
    lines = [f"nodes: {' -> '.join(experiment.graph.order)}", *data.table().splitlines(), *data.notes]
    lines += experiment.plan_notes
    lines += _counts(experiment, horizon)
    for role, spec in experiment.roles.items():
        lines.append(f"{role}: {_describe(spec, facts[role])}")
        lines += [f"{role}: {note}" for note in facts[role].get("notes", ())]
    lines += expected.lines()
    lines.append(f"device {numerics['device']}, {numerics['threads']} threads, torch {numerics['torch']}")
    return lines


def _counts(experiment: Experiment, horizon: Horizon) -> Iterator[str]:
    epochs, size = experiment.control.total_train_epochs, experiment.node(experiment.steps_follow).batch_size
    batch = f"{size} ids a step" if size else "steps laid out by tokens"
    if size and horizon.num_ids % size:
        batch += f", the last of an epoch {horizon.num_ids % size}"
    yield (
        f"{horizon.num_ids} ids an epoch, {batch}: {horizon.steps_per_epoch} steps an epoch; "
        f"{horizon.steps} steps in all ({epochs} epochs{_limit(experiment)})"
    )
    for call in experiment.graph.model_calls():
        if call.method == "generate":
            samples = int(call.args.get("samples_per_prompt", 1))
            yield f"{call.name}: {samples * call.batch_size} completions a step, {samples * horizon.num_ids} an epoch"
    for node in experiment.trained_nodes():
        updates = experiment.updates_per_firing.get(node.name, 1)
        per_epoch, total = horizon.updates(experiment, node.name)
        yield f"{node.name}: {updates} optimizer steps a step, {per_epoch} an epoch, {total} in all"


def _limit(experiment: Experiment) -> str:
    limit = experiment.control.max_steps
    return f", max_steps={limit}" if limit is not None else ""


def _describe(spec: ModelSpec, facts: Mapping[str, Any]) -> str:
    trainable, total = facts.get("num_trainable", 0), facts.get("num_parameters", 0)
    trained = f", {_count(trainable)} trained" if spec.trained else ", frozen"
    kind = f"{facts.get('family', spec.backend)}, {_count(total)} parameters{trained}, {spec.dtype}"
    return f"{spec.path or spec.tokenizer.path} ({kind})"


def _count(number: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return str(number)
