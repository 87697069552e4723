"""The lines printed before a run: what will be computed, how much of it, on what, and what memory it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weft.data.loader import LoadedData
from weft.engine.adapters_off import shares_base
from weft.engine.spec import ModelSpec
from weft.experiment import Experiment
from weft.runtime.schedule import Horizon

GIB, MIB = 2.0**30, 2.0**20
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = {"adamw": 2, "lion": 1, "sgd": 1}  # float32 values that an optimizer keeps for each trained parameter


def plan_lines(
    experiment: Experiment,
    horizon: Horizon,
    facts: Mapping[str, Mapping[str, Any]],
    numerics: Mapping[str, Any],
    data: LoadedData,
) -> list[str]:
    """`facts` are the engines' descriptions by role; `numerics` says device and threads."""
    lines = [f"nodes: {' -> '.join(experiment.graph.order)}", *data.table().splitlines(), *data.notes]
    lines += experiment.plan_notes
    lines += _counts(experiment, horizon)
    total = 0.0
    for role, spec in experiment.roles.items():
        shared = any(shares_base(spec, other) for other in experiment.roles.values())
        size = 0.0 if shared else memory_bytes(spec, facts[role])
        total += size
        lines.append(f"{role}: {_describe(spec, facts[role])}, {_size(size)}")
        lines += [f"{role}: {note}" for note in facts[role].get("notes", ())]
    lines.append(
        f"memory: about {_size(total)} for weights, gradients and optimizers; activations and caches come on top"
    )
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


def memory_bytes(spec: ModelSpec, facts: Mapping[str, Any]) -> float:
    """Frozen parameters in their dtype; trained ones in float32 with gradient and optimizer state, and a copy to compute
    with where that is in another dtype."""
    trainable, total = int(facts.get("num_trainable", 0)), int(facts.get("num_parameters", 0))
    compute = BYTES[spec.dtype]
    copy = compute if spec.dtype != "float32" else 0
    each = 4 + 4 + 4 * STATES[spec.optimizer.type] + copy
    trained = trainable if spec.trained else 0
    return float(trained * each + (total - trained) * compute)


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= 0.1 * GIB else f"{number / MIB:.1f} MiB"


def _count(number: int) -> str:
    for size, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return str(number)
