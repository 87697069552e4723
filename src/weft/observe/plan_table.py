"""Plan of a run as a short table with details: nodes, data, counts, models, devices and memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.observe.jsonl import shorten_path
from weft.observe.memory import format_size
from weft.observe.progress import LINES, RunPlan
from weft.topology import LETTERS, Layout, Mesh

# maximum lines for models; further ones are merged, frozen ones first
MODELS = 3
PATH = 24  # maximum length of a path
MERGED = re.compile(r"\d+ models, ")  # start of a line for several models
LEAST_SHOWN_SHARE = 0.1  # least share of the device's memory that is mentioned


@dataclass(frozen=True)
class PlannedModel:
    """Model of a role. `facts` is the description of its engine.

    `path` is that of its weights or, without weights, of its tokenizer. `learning_rate` is the peak
    and the type of the schedule, or None for a frozen model.
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

    In the first `late_epochs` epochs it takes none.
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
        memory: Bytes that are expected to be needed on each device, by rank.
        memory_is_limit: Whether this is the most that is needed.
        search: Seconds per step as the search for a placement has estimated them, or empty.
        data_notes: Notes on what a resumed run changes, and on the data.
        minor_notes: Those of `data_notes` that only the details show.
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
    below = list[tuple[str, str]]()
    if "memory" in numerics and (room := _format_memory(run, numerics["memory"])) is not None:
        below.append(("memory", room))
    several = run.num_devices > 1
    if several:
        below.append(("layouts", _format_layouts(run)))
    below.append(("devices" if several else "device", _format_device(run, numerics)))
    # Models, in the lines that are left.
    models = _build_model_rows(run, min(MODELS, LINES - len(rows) - len(below)))
    rows += [*models, *below]
    # Details, and notes that are always shown.
    details = [
        *_iterate_details(run),
        *_iterate_roles(run, models),
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
    rest = num_ids % batch if batch else 0
    if batch:
        laid_out = f"batches of {format_number(batch)}"
    else:
        laid_out = "batches laid out by tokens"
    last = f" (last: {format_number(rest)})" if rest else ""
    unit = "prompt" if run.sampling else "sample"
    return f"{format_plural(num_ids, unit)} per epoch, {laid_out}{last}"


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
    step += _format_updates([(each.role, each.per_step) for each in run.training])
    if step:
        yield "step", ", ".join(step)
    # Per epoch.
    epoch = [format_plural(run.steps_per_epoch, "step")]
    for _, _, samples in run.sampling:
        epoch.append(format_plural(samples * num_ids, "completion"))
    epoch += _format_updates([(each.role, each.per_epoch) for each in run.training])
    yield "epoch", ", ".join(epoch)
    # In the whole run.
    if run.max_steps != run.steps:
        run_length = format_plural(run.epochs, "epoch")
    else:
        run_length = f"max_steps={run.max_steps}"
    if run.max_steps == run.steps and run.epochs > 1:
        run_length += f", which overrides total_train_epochs={run.epochs}"
    whole = [f"{format_plural(run.steps, 'step')} ({run_length})"]
    whole += _format_updates([(each.role, each.total) for each in run.training])
    yield "run", ", ".join(whole)


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


def _build_model_rows(run: RunFacts, most: int) -> list[tuple[str, str]]:
    """Return at most `most` table rows that describe the models.

    Roles with the same model share a row. If there are too many rows, first the frozen models are
    merged into one row. If there are still too many, the last rows are merged as well.
    """
    roles_by_model: dict[str, list[str]] = {}
    for role, model in run.models.items():
        roles_by_model.setdefault(_shorten_model(model), []).append(role)
    rows = [(roles, text) for text, roles in roles_by_model.items()]
    if len(rows) > most:
        trained = []
        for row in rows:
            if run.models[row[0][0]].learning_rate is not None:
                trained.append(row)
        rows = _merge_rows(
            [*trained, *(row for row in rows if row not in trained)], len(trained), run
        )
    rows = rows if len(rows) <= most else _merge_rows(rows, most - 1, run)
    return [(", ".join(roles), text) for roles, text in rows]


def _merge_rows(
    rows: Sequence[tuple[list[str], str]], num_kept: int, run: RunFacts
) -> list[tuple[list[str], str]]:
    """Return the first `num_kept` rows, followed by one row that summarizes the others."""
    names = []
    for roles, _ in rows[num_kept:]:
        names.extend(roles)
    total = sum(run.models[role].facts.get("num_parameters", 0) for role in names)
    if all("frozen" in text for _, text in rows[num_kept:]):
        frozen = "frozen, "
    else:
        frozen = ""
    return [
        *rows[:num_kept],
        (
            names,
            f"{len(rows) - num_kept} models, {frozen}{format_amount(total)} parameters in total",
        ),
    ]


def _shorten_model(model: PlannedModel) -> str:
    path = shorten_path(model.path)
    path = path if len(path) <= PATH else f"…{path[-PATH + 1 :]}"
    total = model.facts.get("num_parameters", 0)
    trainable = model.facts.get("num_trainable", 0)
    if not total:
        if model.backend == "null":
            return f"{path}, a tokenizer alone"
        return f"{path} ({model.backend})"
    if model.learning_rate is None:
        trained = "frozen"
    elif trainable == total:
        trained = "trained"
    else:
        trained = f"{format_amount(trainable)} trained"
    return f"{path} ({model.facts.get('family', model.backend)}), {format_amount(total)} parameters, {trained}, {model.dtype}"


def _format_memory(run: RunFacts, room: int) -> str | None:
    """Format the row of the plan's table that shows the memory needed per device.

    `room` is a device's memory in bytes, or the memory that all CPU devices share. Returns None if
    there is only one device and less than a tenth of its memory is needed.
    """
    several = len(run.memory) > 1
    need = sum(run.memory.values()) if run.on_cpu else max(run.memory.values())
    if not several and need < LEAST_SHOWN_SHARE * room:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, part in run.memory.items():
        ranks.setdefault(format_size(part), []).append(rank)
    sizes = []
    for size, held in ranks.items():
        sizes.append(f"{size} on {_format_ranks(held) if len(ranks) > 1 else 'each device'}")
    if several:
        of = f"{', '.join(sizes)}, of {format_size(room)}{' in total' if run.on_cpu else ''}"
    else:
        of = f"{format_size(need)} of {format_size(room)}"
    most = "at most" if run.memory_is_limit else "at least"
    return f"{most} about {of}" + (
        "; it may not fit: weft plan memory shows what would" if need > room else ""
    )


def _format_layouts(run: RunFacts) -> str:
    names_by_layout: dict[str, list[str]] = {}
    for name, mesh in run.meshes.items():
        where = f"{_format_degrees(mesh.layout)} on {_format_ranks(mesh.ranks)}"
        names_by_layout.setdefault(where, []).append(name)
    text = "; ".join(f"{', '.join(names)} {where}" for where, names in names_by_layout.items())
    if not run.search:
        return text
    ours, usual = (run.search[name]["step_seconds"] for name in ("search", "heuristic"))
    return f"{text} (allocation_mode=search: {ours:.2g} s per step as estimated, {usual:.2g} s with heuristic)"


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
    count = run.num_devices
    each = " each" if count > 1 else ""
    if "threads" in numerics:
        threads = f", {format_plural(numerics['threads'], 'thread')}{each}"
    else:
        threads = ""
    return f"{f'{count} x ' if count > 1 else ''}{numerics['hardware']}{threads}"


# -- the details


def _iterate_details(run: RunFacts) -> Iterator[str]:
    yield from run.sources
    own = _collect_model_notes(run)
    yield from (note for note in run.notes if note not in own)
    yield from () if run.num_ids is None else _iterate_node_counts(run)
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
    for each in run.training:
        late = each.late_epochs
        if late:
            yield f"{each.node}: no optimizer step in the first {'epoch' if late == 1 else f'{late} epochs'}"


def _iterate_roles(run: RunFacts, models: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each role with the details that the table leaves out.

    These are long paths, learning rates, and the models of merged table rows.
    """
    merged = []
    for roles, text in models:
        if MERGED.match(text):
            merged.extend(roles.split(", "))
    for role, model in run.models.items():
        path = model.path
        if (shorten_path(path) != path or len(path) > PATH) and path not in " ".join(model.notes):
            details = [path]
        else:
            details = []
        if role in merged:
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


def format_plural(count: int, what: str) -> str:
    return f"{format_number(count)} {what}{'' if count == 1 else 's'}"


def format_number(count: int) -> str:
    """Format a number, with thousands separators if it has five digits or more."""
    return f"{count:,}" if count >= 10_000 else str(count)


def format_amount(count: int) -> str:
    for base, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= base:
            return f"{count / base:.3g}{name}"
    return str(count)


def _join_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"
