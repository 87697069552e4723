"""Plan of a run as a short table with details: nodes, data, counts, models, devices and memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.observe.jsonl import shorten_path
from weft.observe.memory import format_size
from weft.observe.progress import MAX_TABLE_LINES, RunPlan
from weft.topology import LETTERS, Layout, Mesh

MAX_MODEL_ROWS = 3  # if there are more, rows are merged, those of frozen models first
MAX_PATH_LENGTH = 24  # maximum length of a path
MERGED_ROW = re.compile(r"\d+ models, ")  # start of a row for several models
MIN_SHOWN_SHARE = 0.1  # on one device, a smaller share of its memory is not mentioned


@dataclass(frozen=True)
class PlannedModel:
    """Model of a role.

    `path` is the path of its weights or, without weights, of its tokenizer. `learning_rate` is the
    peak and the type of the schedule, or None for a frozen model. `facts` is the description of its
    engine.
    """

    path: str
    backend: str
    dtype: str | None
    learning_rate: tuple[float, str] | None
    notes: Sequence[str]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class PlannedTraining:
    """Optimizer steps of a training node: per step of the run, per epoch and in total.

    The node takes no optimizer step in the first `late_epochs` epochs.
    """

    node: str
    role: str
    per_step: int
    per_epoch: int
    total: int
    late_epochs: float = 0


@dataclass(frozen=True)
class RunFacts:
    """Facts that the plan of a run shows, as plain values.

    Attributes:
        levels: Names of the graph's nodes in execution order; those of one level do not depend on
            each other.
        batch_size: Number of ids per step, or 0 if batches are laid out by tokens.
        num_ids: Number of ids per epoch, or None if the data were not read. Then the numbers of
            steps are 0, and `training` is empty.
        sampling: Name, prompts per step and completions per prompt of each generation call.
        training: Optimizer steps of the training nodes.
        models: Models by role.
        meshes: Devices of each engine, by its name.
        memory: Expected memory of each device in bytes, by rank.
        memory_is_limit: True if `memory` is an upper bound, False if it is a lower bound.
        search: Seconds per step as estimated by the search for a placement, or empty.
        data_notes: Notes on the changes of a resumed run, and on the data.
        minor_notes: Notes in `data_notes` that only the details show.
        sources: Lines about the sources of the data.
    """

    levels: Sequence[Sequence[str]]
    batch_size: int
    num_ids: int | None
    steps_per_epoch: int
    steps: int
    epochs: int
    max_steps: int | None
    sampling: Sequence[tuple[str, int, int]]
    training: Sequence[PlannedTraining]
    models: Mapping[str, PlannedModel]
    meshes: Mapping[str, Mesh]
    num_devices: int
    memory: Mapping[int, float]
    memory_lines: Sequence[str]
    memory_is_limit: bool
    on_cpu: bool
    search: Mapping[str, Any]
    notes: Sequence[str]
    data_notes: Sequence[str]
    minor_notes: Collection[str]
    sources: Sequence[str]


def build_plan(run: RunFacts, numerics: Mapping[str, Any]) -> RunPlan:
    """Return the plan of a run.

    `numerics` describes the devices: `hardware` is a line of text, `threads` the number of threads,
    and `memory` the memory in bytes; the last two can be missing.
    """
    # Rows above the models: nodes, data and counts.
    rows = [("nodes", " -> ".join(", ".join(names) for names in run.levels))]
    if run.num_ids is None:
        rows.append(("data", "not read, so the number of steps is not known"))
    else:
        rows += [("data", _format_data(run, run.num_ids)), *_iterate_counts(run, run.num_ids)]
    # Rows below the models: memory, layouts and devices.
    rows_below = list[tuple[str, str]]()
    if (
        "memory" in numerics
        and (memory_text := _format_memory(run, numerics["memory"])) is not None
    ):
        rows_below.append(("memory", memory_text))
    has_several_devices = run.num_devices > 1
    if has_several_devices:
        rows_below.append(("layouts", _format_layouts(run)))
    rows_below.append(
        ("devices" if has_several_devices else "device", _format_device(run, numerics))
    )
    # Models, in the remaining lines.
    model_rows = _build_model_rows(
        run, min(MAX_MODEL_ROWS, MAX_TABLE_LINES - len(rows) - len(rows_below))
    )
    rows += [*model_rows, *rows_below]
    # Details, and notes that are always shown.
    details = [
        *_iterate_details(run),
        *_iterate_roles(run, model_rows),
        *(note for note in run.data_notes if note in run.minor_notes),
    ]
    notes = [
        *_collect_model_notes(run),
        *(note for note in run.data_notes if note not in run.minor_notes),
    ]
    return RunPlan(rows, notes, [*details, *_iterate_versions(numerics)])


def _collect_model_notes(run: RunFacts) -> list[str]:
    """Return the notes on all models, such as which run a model comes from.

    The plan always shows these notes.
    """
    return list(dict.fromkeys(note for model in run.models.values() for note in model.notes))


# -- the table


def _format_data(run: RunFacts, num_ids: int) -> str:
    batch = run.batch_size
    remainder = num_ids % batch if batch else 0
    if batch:
        batches = f"batches of {format_number(batch)}"
    else:
        batches = "batches laid out by tokens"
    last = f" (last: {format_number(remainder)})" if remainder else ""
    unit = "prompt" if run.sampling else "sample"
    return f"{format_plural(num_ids, unit)} per epoch, {batches}{last}"


def _iterate_counts(run: RunFacts, num_ids: int) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan's table that count the work per step, per epoch and in total.

    Steps, completions and optimizer steps are counted.
    """
    # Per step.
    step = []
    for _, prompts, samples in run.sampling:
        step.append(
            f"{format_plural(prompts, 'prompt')} x {samples} = "
            f"{format_plural(prompts * samples, 'completion')}"
        )
    step += _format_updates([(training.role, training.per_step) for training in run.training])
    if step:
        yield "step", ", ".join(step)
    # Per epoch.
    epoch = [format_plural(run.steps_per_epoch, "step")]
    for _, _, samples in run.sampling:
        epoch.append(format_plural(samples * num_ids, "completion"))
    epoch += _format_updates([(training.role, training.per_epoch) for training in run.training])
    yield "epoch", ", ".join(epoch)
    # In the whole run.
    if run.max_steps != run.steps:
        run_length = format_plural(run.epochs, "epoch")
    else:
        run_length = f"max_steps={run.max_steps}"
    if run.max_steps == run.steps and run.epochs > 1:
        run_length += f", which overrides total_train_epochs={run.epochs}"
    in_total = [f"{format_plural(run.steps, 'step')} ({run_length})"]
    in_total += _format_updates([(training.role, training.total) for training in run.training])
    yield "run", ", ".join(in_total)


def _format_updates(counts: Sequence[tuple[str, int]]) -> list[str]:
    """Format the number of optimizer steps of each trained role.

    `counts` has the role and the number of optimizer steps of each training node. Roles with the
    same number are listed together.
    """
    roles_by_count: dict[int, list[str]] = {}
    for role, count in counts:
        roles_by_count.setdefault(count, []).append(role)
    if len(roles_by_count) == 1:
        steps = format_plural(next(iter(roles_by_count)), "optimizer step")
        return [f"{steps} per model" if len(counts) > 1 else steps]
    result: list[str] = []
    for count, names in roles_by_count.items():
        result.append(f"{format_plural(count, 'optimizer step')} of {_join_names(names)}")
    return result


def _build_model_rows(run: RunFacts, max_rows: int) -> list[tuple[str, str]]:
    """Return at most `max_rows` table rows that describe the models.

    Roles with the same model share a row. If there are too many rows, the rows of frozen models are
    merged into one. If there are still too many, the last rows are merged as well.
    """
    roles_by_model: dict[str, list[str]] = {}
    for role, model in run.models.items():
        roles_by_model.setdefault(_shorten_model(model), []).append(role)
    rows = [(roles, text) for text, roles in roles_by_model.items()]
    if len(rows) > max_rows:
        trained = []
        for row in rows:
            if run.models[row[0][0]].learning_rate is not None:
                trained.append(row)
        rows = _merge_rows(
            [*trained, *(row for row in rows if row not in trained)], len(trained), run
        )
    rows = rows if len(rows) <= max_rows else _merge_rows(rows, max_rows - 1, run)
    return [(", ".join(roles), text) for roles, text in rows]


def _merge_rows(
    rows: Sequence[tuple[list[str], str]], num_kept: int, run: RunFacts
) -> list[tuple[list[str], str]]:
    """Return the first `num_kept` rows, followed by one row that summarizes the others."""
    merged_roles = []
    for roles, _ in rows[num_kept:]:
        merged_roles.extend(roles)
    total = sum(run.models[role].facts.get("num_parameters", 0) for role in merged_roles)
    if all("frozen" in text for _, text in rows[num_kept:]):
        frozen = "frozen, "
    else:
        frozen = ""
    return [
        *rows[:num_kept],
        (
            merged_roles,
            f"{len(rows) - num_kept} models, {frozen}{format_amount(total)} parameters in total",
        ),
    ]


def _shorten_model(model: PlannedModel) -> str:
    """Describe a model in a row of the table: path, family, size, trained part and dtype."""
    path = shorten_path(model.path)
    path = path if len(path) <= MAX_PATH_LENGTH else f"…{path[-MAX_PATH_LENGTH + 1 :]}"
    total = model.facts.get("num_parameters", 0)
    trainable = model.facts.get("num_trainable", 0)
    if not total:
        if model.backend == "null":
            return f"{path}, a tokenizer alone"
        return f"{path} ({model.backend})"
    if model.learning_rate is None:
        training = "frozen"
    elif trainable == total:
        training = "trained"
    else:
        training = f"{format_amount(trainable)} trained"
    return f"{path} ({model.facts.get('family', model.backend)}), {format_amount(total)} parameters, {training}, {model.dtype}"


def _format_memory(run: RunFacts, capacity: int) -> str | None:
    """Format the row of the plan's table that shows the memory needed per device.

    `capacity` is a device's memory in bytes, or the memory that all CPU devices share. Returns None
    if there is only one device and less than `MIN_SHOWN_SHARE` of its memory is needed.
    """
    has_several_devices = len(run.memory) > 1
    needed = sum(run.memory.values()) if run.on_cpu else max(run.memory.values())
    if not has_several_devices and needed < MIN_SHOWN_SHARE * capacity:
        return None
    ranks_by_size: dict[str, list[int]] = {}
    for rank, num_bytes in run.memory.items():
        ranks_by_size.setdefault(format_size(num_bytes), []).append(rank)
    sizes = []
    for size, ranks in ranks_by_size.items():
        sizes.append(
            f"{size} on {_format_ranks(ranks) if len(ranks_by_size) > 1 else 'each device'}"
        )
    if has_several_devices:
        amount = (
            f"{', '.join(sizes)}, of {format_size(capacity)}{' in total' if run.on_cpu else ''}"
        )
    else:
        amount = f"{format_size(needed)} of {format_size(capacity)}"
    bound = "at most" if run.memory_is_limit else "at least"
    return f"{bound} about {amount}" + (
        "; it may not fit: weft plan memory shows what would" if needed > capacity else ""
    )


def _format_layouts(run: RunFacts) -> str:
    """Format the layouts of all engines, and the step times that a search has estimated."""
    names_by_layout: dict[str, list[str]] = {}
    for name, mesh in run.meshes.items():
        placement = f"{_format_degrees(mesh.layout)} on {_format_ranks(mesh.ranks)}"
        names_by_layout.setdefault(placement, []).append(name)
    text = "; ".join(
        f"{', '.join(names)} {placement}" for placement, names in names_by_layout.items()
    )
    if not run.search:
        return text
    searched = run.search["search"]["step_seconds"]
    heuristic = run.search["heuristic"]["step_seconds"]
    return (
        f"{text} (allocation_mode=search: {searched:.2g} s per step as estimated, "
        f"{heuristic:.2g} s with heuristic)"
    )


def _format_degrees(layout: Layout) -> str:
    """Format a layout without the parallelism degrees that are 1.

    For example, `d2f2t1p1c1e1` becomes `d2f2`, and `d2f1t1p1c1e1` becomes `d2`.
    """
    degrees = {letter: getattr(layout, name) for letter, name in LETTERS.items()}
    return "".join(f"{letter}{degree}" for letter, degree in degrees.items() if degree > 1) or "d1"


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def _format_device(run: RunFacts, numerics: Mapping[str, Any]) -> str:
    multiple = run.num_devices > 1
    text = str(numerics["hardware"])
    if multiple:
        text = f"{run.num_devices} x {text}"
    if "threads" in numerics:
        threads = format_plural(numerics["threads"], "thread")
        text += f", {threads} each" if multiple else f", {threads}"
    return text


# -- the details


def _iterate_details(run: RunFacts) -> Iterator[str]:
    """Yield the lines of the plan's details, without those of `_iterate_roles`."""
    yield from run.sources
    model_notes = _collect_model_notes(run)
    yield from (note for note in run.notes if note not in model_notes)
    if run.num_ids is not None:
        yield from _iterate_node_counts(run)
    roles_by_note: dict[str, list[str]] = {}  # note -> roles
    for role, model in run.models.items():
        for note in model.facts.get("notes", ()):
            roles_by_note.setdefault(note, []).append(role)
    for note, roles in roles_by_note.items():
        yield f"{', '.join(roles)}: {note}"
    yield from run.memory_lines
    if run.num_devices > 1:
        for name, mesh in run.meshes.items():
            devices = "device" if len(mesh.ranks) == 1 else "devices"
            yield f"{name}: layout {mesh.layout} on {devices} {_format_ranks(mesh.ranks)}"
    for role, model in run.models.items():
        for move in model.facts.get("moves", ()):
            yield f"parameters of {role} {move}"


def _iterate_node_counts(run: RunFacts) -> Iterator[str]:
    """Yield the plan's lines about generation calls and about training nodes that start late.

    If there are several generation calls, each has a line with its number of completions per
    prompt. A training node has a line if it takes no optimizer step in the first epochs.
    """
    if len(run.sampling) > 1:
        for call, _, samples in run.sampling:
            yield f"{call}: {format_plural(samples, 'completion')} of each prompt"
    for training in run.training:
        late_epochs = training.late_epochs
        if late_epochs:
            yield f"{training.node}: no optimizer step in the first {'epoch' if late_epochs == 1 else f'{late_epochs} epochs'}"


def _iterate_roles(run: RunFacts, model_rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each role with the details that the table leaves out.

    These are long paths, learning rates, and the models of merged table rows.
    """
    merged_roles = []
    for roles, text in model_rows:
        if MERGED_ROW.match(text):
            merged_roles.extend(roles.split(", "))
    for role, model in run.models.items():
        path = model.path
        if (shorten_path(path) != path or len(path) > MAX_PATH_LENGTH) and path not in " ".join(
            model.notes
        ):
            details = [path]
        else:
            details = []
        if role in merged_roles:
            details = [_shorten_model(model)]
        if model.learning_rate is not None:
            peak, schedule = model.learning_rate
            details.append(f"learning rate {peak:g} ({schedule})")
        if details:
            yield f"{role}: {', '.join(details)}"


def _iterate_versions(numerics: Mapping[str, Any]) -> Iterator[str]:
    flash = numerics.get("flash_attention")
    if "torch" in numerics:
        yield f"computed with torch {numerics['torch']}" + (
            "" if flash is None else f", flash attention {flash}"
        )


# -- words


def format_plural(count: int, noun: str) -> str:
    """Format a count with a noun in singular or plural, such as `1 step` or `2 steps`."""
    return f"{format_number(count)} {noun}{'' if count == 1 else 's'}"


def format_number(count: int) -> str:
    """Format a number, with thousands separators if it has five digits or more."""
    return f"{count:,}" if count >= 10_000 else str(count)


def format_amount(count: int) -> str:
    """Format a large count with three significant digits and a suffix, such as `1.24B`."""
    for base, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= base:
            return f"{count / base:.3g}{suffix}"
    return str(count)


def _join_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
