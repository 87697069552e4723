"""Plan of a run as a short table with details: nodes, data, counts, models, devices and memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from weft.engine.spec import ModelSpec
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef
from weft.observe.jsonl import shorten_path
from weft.observe.progress import LINES, RunPlan
from weft.planner.forecast import MemoryForecast, format_size
from weft.planner.lengths import RunLength
from weft.topology import LETTERS, Layout, Mesh

if TYPE_CHECKING:
    from weft.data.loader import LoadedData

# maximum lines for models; further ones are merged, frozen ones first
MODELS = 3
PATH = 24  # maximum length of a path
MERGED = re.compile(r"\d+ models, ")  # start of a line for several models
LEAST_SHOWN_SHARE = 0.1  # least share of the device's memory that is mentioned

Facts = Mapping[str, Mapping[str, Any]]


def build_plan(
    experiment: Experiment,
    horizon: RunLength | None,
    facts: Facts,
    numerics: Mapping[str, Any],
    data: LoadedData | None,
    expected: MemoryForecast,
) -> RunPlan:
    """Return the plan of a run.

    `facts` maps roles to the descriptions of their engines. `numerics` describes the devices:
    `hardware` is a line of text, `threads` the number of threads, and `memory` the memory in bytes;
    the last two can be missing. `expected` is the memory forecast. `data` and `horizon` (the length
    of the run) are None if the data were not read.
    """
    # Rows above the models: nodes, data and counts.
    rows = [("nodes", " -> ".join(", ".join(names) for names in _group_into_levels(experiment)))]
    if horizon is None:
        rows.append(("data", "not read, so the number of steps is not known"))
    else:
        rows += [("data", _format_data(experiment, horizon)), *_iterate_counts(experiment, horizon)]
    # Rows below the models: memory, layouts and devices.
    below = list[tuple[str, str]]()
    if (
        "memory" in numerics
        and (
            room := format_memory_row(
                expected, group_roles_by_device(experiment), numerics["memory"]
            )
        )
        is not None
    ):
        below.append(("memory", room))
    several = experiment.num_devices > 1
    if several:
        below.append(("layouts", _format_layouts(experiment)))
    below.append(("devices" if several else "device", _format_device(experiment, numerics)))
    # Models, in the lines that are left.
    models = _build_model_rows(experiment, facts, min(MODELS, LINES - len(rows) - len(below)))
    rows += [*models, *below]
    # Details, and notes that are always shown.
    data_notes = () if data is None else data.notes
    unused: set[str] = set()
    if data is not None:
        for count in data.counts:
            unused.update(count.build_unused_notes())
    details = [
        *_iterate_details(experiment, horizon, facts, data, expected),
        *_iterate_roles(experiment, facts, models),
        *(note for note in data_notes if note in unused),
    ]
    notes = [
        *_collect_model_notes(experiment),
        *(note for note in data_notes if note not in unused),
    ]
    return RunPlan(rows, notes, [*details, *_iterate_versions(numerics)])


def _collect_model_notes(experiment: Experiment) -> list[str]:
    """Return the notes on all models, such as which run a model comes from.

    The plan always shows these notes.
    """
    return list(dict.fromkeys(note for spec in experiment.roles.values() for note in spec.notes))


# -- the table


def _group_into_levels(experiment: Experiment) -> list[list[str]]:
    """Group the names of the graph's nodes into levels, in execution order.

    The nodes of one level do not depend on each other.
    """
    depth: dict[str, int] = {}
    for name in experiment.graph.order:
        depth[name] = max(
            (depth[each] + 1 for each in experiment.graph.find_producers(name)), default=0
        )
    ordered = sorted(experiment.graph.order, key=lambda name: depth[name])
    return [list(names) for _, names in groupby(ordered, key=lambda name: depth[name])]


def _format_data(experiment: Experiment, horizon: RunLength) -> str:
    batch = experiment.graph.get_node(experiment.steps_follow).batch_size
    rest = horizon.num_ids % batch if batch else 0
    if batch:
        laid_out = f"batches of {format_number(batch)}"
    else:
        laid_out = "batches laid out by tokens"
    last = f" (last: {format_number(rest)})" if rest else ""
    return f"{format_plural(horizon.num_ids, _choose_unit(experiment))} per epoch, {laid_out}{last}"


def _choose_unit(experiment: Experiment) -> str:
    if any(call.method == "generate" for call in experiment.graph.list_model_calls()):
        return "prompt"
    return "sample"


def _iterate_sampling(experiment: Experiment) -> Iterator[tuple[MFCDef, int]]:
    """Yield each generation call with its number of completions per prompt."""
    for call in experiment.graph.list_model_calls():
        if call.method == "generate":
            yield call, int(call.args.get("samples_per_prompt", 1))


def _iterate_counts(experiment: Experiment, horizon: RunLength) -> Iterator[tuple[str, str]]:
    """Yield the rows of the plan's table that count the work per step, per epoch and in total.

    Steps, completions and optimizer steps are counted.
    """
    # Per step.
    sampling = list(_iterate_sampling(experiment))
    step = []
    for call, samples in sampling:
        step.append(
            f"{format_plural(call.batch_size, 'prompt')} x {samples} = "
            f"{format_plural(call.batch_size * samples, 'completion')}"
        )
    nodes = [node.name for node in experiment.trained_nodes]
    updates = {name: experiment.updates_per_firing.get(name, 1) for name in nodes}
    step += _format_updates(experiment, updates)
    if step:
        yield "step", ", ".join(step)
    # Per epoch.
    epoch = [format_plural(horizon.steps_per_epoch, "step")]
    for _, samples in sampling:
        epoch.append(format_plural(samples * horizon.num_ids, "completion"))
    yield (
        "epoch",
        ", ".join(
            [
                *epoch,
                *_format_updates(experiment, {n: horizon.updates[n][0] for n in nodes}),
            ]
        ),
    )
    # In the whole run.
    limit = experiment.control.max_steps
    epochs = experiment.control.total_train_epochs
    if limit != horizon.steps:
        run_length = format_plural(epochs, "epoch")
    else:
        run_length = f"max_steps={limit}"
    if limit == horizon.steps and epochs > 1:
        run_length += f", which overrides total_train_epochs={epochs}"
    trained = {name: horizon.schedules[name].total_steps for name in nodes}
    yield (
        "run",
        ", ".join(
            [
                f"{format_plural(horizon.steps, 'step')} ({run_length})",
                *_format_updates(experiment, trained),
            ]
        ),
    )


def _format_updates(experiment: Experiment, counts: Mapping[str, int]) -> list[str]:
    """Format the number of optimizer steps of each trained role.

    `counts` maps each training node to its number of optimizer steps. Roles with the same number
    are listed together.
    """
    roles = {node.name: node.role for node in experiment.trained_nodes}
    roles_by_count: dict[int, list[str]] = {}
    for name, count in counts.items():
        roles_by_count.setdefault(count, []).append(roles[name])
    if len(roles_by_count) == 1:
        steps = format_plural(next(iter(roles_by_count)), "optimizer step")
        return [f"{steps} per model" if len(roles) > 1 else steps]
    result: list[str] = []
    for count, names in roles_by_count.items():
        result.append(f"{format_plural(count, 'optimizer step')} of {_join_names(names)}")
    return result


def _build_model_rows(experiment: Experiment, facts: Facts, most: int) -> list[tuple[str, str]]:
    """Return at most `most` table rows that describe the models.

    Roles with the same model share a row. If there are too many rows, first the frozen models are
    merged into one row. If there are still too many, the last rows are merged as well.
    """
    roles_by_model: dict[str, list[str]] = {}
    for role, spec in experiment.roles.items():
        roles_by_model.setdefault(_shorten_model(spec, facts[role]), []).append(role)
    rows = [(roles, text) for text, roles in roles_by_model.items()]
    if len(rows) > most:
        trained = []
        for row in rows:
            if experiment.roles[row[0][0]].trained:
                trained.append(row)
        rows = _merge_rows(
            [*trained, *(row for row in rows if row not in trained)], len(trained), facts
        )
    rows = rows if len(rows) <= most else _merge_rows(rows, most - 1, facts)
    return [(", ".join(roles), text) for roles, text in rows]


def _merge_rows(
    rows: Sequence[tuple[list[str], str]], num_kept: int, facts: Facts
) -> list[tuple[list[str], str]]:
    """Return the first `num_kept` rows, followed by one row that summarizes the others."""
    names = []
    for roles, _ in rows[num_kept:]:
        names.extend(roles)
    total = sum(facts[role].get("num_parameters", 0) for role in names)
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


def _shorten_model(spec: ModelSpec, facts: Mapping[str, Any]) -> str:
    path = shorten_path(spec.path or spec.tokenizer.path or "")
    path = path if len(path) <= PATH else f"…{path[-PATH + 1 :]}"
    total = facts.get("num_parameters", 0)
    trainable = facts.get("num_trainable", 0)
    if not total:
        if spec.backend == "null":
            return f"{path}, a tokenizer alone"
        return f"{path} ({spec.backend})"
    if not spec.trained:
        trained = "frozen"
    elif trainable == total:
        trained = "trained"
    else:
        trained = f"{format_amount(trainable)} trained"
    return f"{path} ({facts.get('family', spec.backend)}), {format_amount(total)} parameters, {trained}, {spec.dtype}"


def format_memory_row(
    expected: MemoryForecast, on: Mapping[int, Sequence[str]], room: int
) -> str | None:
    """Format the row of the plan's table that shows the memory needed per device.

    `on` maps the rank of each device to the names of its roles. `room` is a device's memory in
    bytes, or the memory that all CPU devices share. Returns None if there is only one device and
    less than a tenth of its memory is needed.
    """
    parts = {rank: expected.select_roles(names).total for rank, names in on.items()}
    several = len(on) > 1
    shared = expected.device == "cpu"
    need = sum(parts.values()) if shared else max(parts.values())
    if not several and need < LEAST_SHOWN_SHARE * room:
        return None
    ranks: dict[str, list[int]] = {}
    for rank, part in parts.items():
        ranks.setdefault(format_size(part), []).append(rank)
    sizes = []
    for size, held in ranks.items():
        sizes.append(f"{size} on {_format_ranks(held) if len(ranks) > 1 else 'each device'}")
    if several:
        of = f"{', '.join(sizes)}, of {format_size(room)}{' in total' if shared else ''}"
    else:
        of = f"{format_size(need)} of {format_size(room)}"
    most = "at least" if "without" in expected.scope else "at most"
    return f"{most} about {of}" + (
        "; it may not fit: weft plan memory shows what would" if need > room else ""
    )


def group_roles_by_device(experiment: Experiment) -> dict[int, list[str]]:
    """Return a mapping from the rank of each device to the names of its roles and copies."""
    named = name_engines(experiment)
    result: dict[int, list[str]] = {}
    for rank in range(experiment.num_devices):
        result[rank] = [name for (_, mesh), name in named.items() if rank in mesh.ranks]
    return result


def name_engines(experiment: Experiment) -> dict[tuple[str, Mesh], str]:
    """Return a readable name for the engine of each role on each of its meshes.

    The name is the role or, for a copy, the role with its calls: `actor (actor_gen)`.
    """
    primary = {place: place[0] for place in experiment.role_meshes.items()}
    calls: dict[tuple[str, Mesh], dict[str, None]] = {}
    for name, call in experiment.calls.items():
        place = (call.role, experiment.call_meshes[name])
        if place not in primary:
            calls.setdefault(place, {})[call.name] = None
    return primary | {place: f"{place[0]} ({', '.join(each)})" for place, each in calls.items()}


def _format_layouts(experiment: Experiment) -> str:
    names_by_layout: dict[str, list[str]] = {}
    for (_, mesh), name in name_engines(experiment).items():
        where = f"{_format_degrees(mesh.layout)} on {_format_ranks(mesh.ranks)}"
        names_by_layout.setdefault(where, []).append(name)
    text = "; ".join(f"{', '.join(names)} {where}" for where, names in names_by_layout.items())
    if not experiment.search:
        return text
    ours, usual = (experiment.search[name]["step_seconds"] for name in ("search", "heuristic"))
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


def _format_device(experiment: Experiment, numerics: Mapping[str, Any]) -> str:
    count = experiment.num_devices
    each = " each" if count > 1 else ""
    if "threads" in numerics:
        threads = f", {format_plural(numerics['threads'], 'thread')}{each}"
    else:
        threads = ""
    return f"{f'{count} x ' if count > 1 else ''}{numerics['hardware']}{threads}"


# -- the details


def _iterate_details(
    experiment: Experiment,
    horizon: RunLength | None,
    facts: Facts,
    data: LoadedData | None,
    expected: MemoryForecast,
) -> Iterator[str]:
    yield from () if data is None else _format_sources(data)
    own = _collect_model_notes(experiment)
    yield from (note for note in experiment.plan_notes if note not in own)
    yield from () if horizon is None else _iterate_node_counts(experiment, horizon)
    roles_by_note: dict[str, list[str]] = {}  # note -> roles
    for role in experiment.roles:
        for note in facts[role].get("notes", ()):
            roles_by_note.setdefault(note, []).append(role)
    for note, roles in roles_by_note.items():
        yield f"{', '.join(roles)}: {note}"
    on = group_roles_by_device(experiment)
    yield from expected.format_lines(on)
    if len(on) > 1:
        for (_, mesh), name in name_engines(experiment).items():
            devices = "device" if len(mesh.ranks) == 1 else "devices"
            yield f"{name}: layout {mesh.layout} on {devices} {_format_ranks(mesh.ranks)}"
    for role in experiment.roles:
        for move in facts[role].get("moves", ()):
            yield f"parameters of {role} {move}"


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


def _iterate_node_counts(experiment: Experiment, horizon: RunLength) -> Iterator[str]:
    """Yield the plan's lines about generation calls and about training nodes that start late.

    If there are several generation calls, each has a line with its number of completions per
    prompt. A training node has a line if it takes no optimizer step in the first epochs.
    """
    sampling = list(_iterate_sampling(experiment))
    if len(sampling) > 1:
        yield from (
            f"{call.name}: {format_plural(samples, 'completion')} of each prompt"
            for call, samples in sampling
        )
    for node in experiment.trained_nodes:
        frozen = experiment.roles[node.role].optimizer.frozen_epochs
        if horizon.schedules[node.name].total_steps != horizon.updates[node.name][1]:
            yield f"{node.name}: no optimizer step in the first {'epoch' if frozen == 1 else f'{frozen} epochs'}"


def _iterate_roles(
    experiment: Experiment, facts: Facts, models: Sequence[tuple[str, str]]
) -> Iterator[str]:
    """Yield a line for each role with the details that the table leaves out.

    These are long paths, learning rates, and the models of merged table rows.
    """
    merged = []
    for roles, text in models:
        if MERGED.match(text):
            merged.extend(roles.split(", "))
    for role, spec in experiment.roles.items():
        path = spec.path or spec.tokenizer.path or ""
        if (shorten_path(path) != path or len(path) > PATH) and path not in " ".join(spec.notes):
            details = [path]
        else:
            details = []
        if role in merged:
            details = [_shorten_model(spec, facts[role])]
        if spec.trained:
            details.append(
                f"learning rate {spec.optimizer.peak_lr:g} ({spec.optimizer.lr_scheduler_type})"
            )
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
