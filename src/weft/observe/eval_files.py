"""Reader for result files of lm-evaluation-harness: scores of checkpoints, and their items.

    reader = ResultReader()
    results = reader.read([Path("runs")])      # every results_*.json below the folders
    reader.load_items(results.scores[0])       # items from samples_TASK_*.jsonl in the same folder

A file or entry that cannot be used becomes a note; a number that is not finite is never a score.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import DataError, UserError
from weft.observe.eval_statistics import (
    BITS,
    MEAN,
    PERPLEXITY,
    ScoredItems,
    compute_scores,
)
from weft.observe.jsonl import CHECKPOINTS, STEP, clean_value, shorten_path
from weft.observe.run_list import is_run
from weft.reading import check_file, explain_read_errors, iterate_files, read_object

RESULT_FILE = re.compile(r"results_(.*)\.json")
STEPPED = re.compile(r"(?P<run>.*)@step(?P<step>\d{1,18})(?P<role>:.*)?")
SAMPLES = "samples_{task}_{date}.jsonl"
ERROR = "_stderr"  # end of the name of a standard error
# End of the name of an interval in results of `weft eval suite`. It is not read: intervals are
# computed from the items.
INTERVAL = "_ci95"
NO_FILTER = "none"
FALLING = ("perplexity", "bits_per_byte", "loss", "brier_score", "ter")
# Metrics whose items are pairs of a log-likelihood and a number of words or bytes.
WEIGHTED = ("perplexity", "bits_per_byte")
# Settings of a task that must be equal for a comparison, in addition to its prompts and version.
SETTINGS = ("output_type", "generation_kwargs", "filter_list", "repeats")
# Maximum relative difference between a recorded score and the score of its items; the rounding of
# float32 is 1e-7.
MAX_SCORE_DIFFERENCE = 1e-5
RecordKey = tuple[str, int]  # task and number of an item


@dataclass(frozen=True)
class EvaluationScore:
    """Score of one model on one task, by one metric.

    Attributes:
        model: full name of the model, such as `runs/E/T@step40`
        task: name of the task or group
        metric: name of the metric
        filter: name of the filter that extracts the answers; `none` without a filter
        shots: number of examples in the prompt; None if unknown
        value: the score, finite
        error: standard error that the harness recorded, or None
        num_items: number of items, or None if unknown
        rises: True if higher is better
        version: the task's version
        settings: text of each setting that must be equal for a comparison
        subtasks: tasks of a group; empty for a task
        path: the result file
        date: time of the evaluation, in seconds since the epoch
    """

    model: str
    task: str
    metric: str
    filter: str
    shots: int | None
    value: float
    error: float | None
    num_items: int | None
    rises: bool
    version: str
    settings: Mapping[str, str]
    subtasks: tuple[str, ...]
    path: Path
    date: float

    @property
    def measure(self) -> str:
        """Metric, with the filter if there is one, such as `exact_match (strict-match)`."""
        return self.metric if self.filter == NO_FILTER else f"{self.metric} ({self.filter})"

    def get_samples_path(self, task: str) -> Path:
        """Return the path of the file with the items of `task`."""
        match = RESULT_FILE.fullmatch(self.path.name)
        assert match is not None, "`find_result_files` returns only such names"
        name = SAMPLES.format(task=task, date=match[1])
        return self.path.with_name(name.replace("/", "_"))  # never a path to another folder


@dataclass(frozen=True)
class ItemRecord:
    """Item of a task, without its texts.

    `hashes` are those of the document, the prompt and the target. `values` maps each metric with a
    finite value to (value, weight).
    """

    hashes: tuple[str, str, str]
    values: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class ItemTable:
    """Items of one score of one model: keys, records and values, all in the same order."""

    keys: Sequence[RecordKey]
    records: Sequence[ItemRecord]
    scored: ScoredItems


@dataclass(frozen=True)
class FoundResults:
    """Scores in result files, and notes on files and entries that could not be used.

    `scores` has one score for each model, task, metric, filter and number of shots.
    """

    scores: Sequence[EvaluationScore] = ()
    notes: Sequence[str] = ()


@dataclass
class ResultReader:
    """Reader of result files with a cache; a file is read again only if it has changed."""

    _files: dict[Path, tuple[Any, Any]] = field(default_factory=dict)

    def read(self, folders: Sequence[Path]) -> FoundResults:
        """Return the scores in all result files below the folders.

        Of several results for the same score, the one with the most items is returned, or the
        newest of them. Raises `DataError` for a missing folder.
        """
        paths: dict[Path, Path] = {}
        for folder in folders:
            for path in find_result_files(folder):
                paths.setdefault(path.resolve(), path)
        scores: dict[tuple[Any, ...], EvaluationScore] = {}
        notes: list[str] = []
        repeated_tasks: dict[tuple[str, str], None] = {}  # (model, task), used as an ordered set
        for path in paths.values():
            read_scores, problems = self._read_cached(path, _read_results)
            notes += problems
            for score in read_scores:
                key = (score.model, score.task, score.metric, score.filter, score.shots)
                earlier = scores.get(key)
                if earlier is not None:
                    repeated_tasks[score.model, score.task] = None
                if earlier is None or _rank_result(score) > _rank_result(earlier):
                    scores[key] = score
        if repeated_tasks:
            examples = ", ".join(f"{task} of {model}" for model, task in list(repeated_tasks)[:3])
            more = f" and {len(repeated_tasks) - 3} more" if len(repeated_tasks) > 3 else ""
            notes.append(
                f"several results of {examples}{more}: the one with the most items is shown, and of "
                f"these the newest"
            )
        return FoundResults(list(scores.values()), notes)

    def load_items(self, score: EvaluationScore) -> tuple[ItemTable | None, str]:
        """Return (items of a score, "") or (None, reason why they cannot be used).

        The items are used only if the score computed from them equals the recorded score.
        """
        tasks = score.subtasks or (score.task,)
        keys: list[RecordKey] = []
        records: list[ItemRecord] = []
        parts: list[int] = []
        for part, task in enumerate(tasks):
            path = score.get_samples_path(task)
            if not os.path.isfile(path):
                return (
                    None,
                    f"no items of {task} are stored beside {path.with_name(score.path.name)}",
                )
            by_filter, problem = self._read_cached(path, _read_samples)
            if problem:
                return None, problem
            for number, record in by_filter.get(score.filter, {}).items():
                if score.metric in record.values:
                    keys.append((task, number))
                    records.append(record)
                    parts.append(part)
        if not records:
            return None, f"{path}: has no finite values of {score.measure}"
        scored = _find_aggregation(score, records, parts)
        if scored is None:
            return None, (
                f"{score.measure} of {score.task} is no mean over items, or items are missing: no "
                f"interval from the items"
            )
        return ItemTable(keys, records, scored), ""

    def _read_cached(self, path: Path, read: Any) -> Any:
        """Return `read(path)`, from the cache unless the file has changed."""
        try:
            stat = path.stat()
        except OSError:
            return read(path)
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        cached = self._files.get(path)
        if cached is None or cached[0] != state:
            cached = self._files[path] = (state, read(path))
        return cached[1]


def find_result_files(folder: Path) -> list[Path]:
    """Return the result files below a folder, by path. Raises `DataError` for a missing folder."""
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; name a run, or a folder of runs")
    paths = [
        path
        for path in iterate_files(folder, str(folder), DataError)
        if RESULT_FILE.fullmatch(path.name)
    ]
    return sorted(paths)


def describe_result_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return (path, size in bytes, modification time in ns) of each result file below a folder.

    A different result means that the files have changed. Returns an empty list if the folder does
    not exist or is too large to be searched.
    """
    descriptions = []
    try:
        for path in find_result_files(folder):
            stat = path.stat()
            descriptions.append((str(path), stat.st_size, stat.st_mtime_ns))
    except (OSError, UserError):
        return []
    return descriptions


def count_result_bytes(folder: Path) -> int:
    """Return the size in bytes of all result files and files of items below a folder."""
    descriptions = describe_result_files(folder)
    total = sum(size for _, size, _ in descriptions)
    for result_folder in {Path(path).parent for path, _, _ in descriptions}:
        for samples in result_folder.glob("samples_*.jsonl"):
            total += samples.stat().st_size if samples.is_file() else 0
    return total


def split_model_name(model: str) -> tuple[str, int]:
    """Return (run, step) of a checkpoint's name. The step is -1 if the name has none."""
    match = STEPPED.fullmatch(model)
    if match is None:
        return model, -1
    return match["run"] + (match["role"] or ""), int(match["step"])


def name_model(path: Path, recorded: str) -> str:
    """Return the name of the model whose results are in the file `path`.

    Results below a checkpoint, or below a folder `stepN` of a run, belong to that checkpoint.
    Other results are named by the harness, which recorded the model as `recorded`.
    """
    for folder in path.parents:
        if STEP.fullmatch(folder.name) is None:
            continue
        if folder.parent.parent.name == CHECKPOINTS:
            return shorten_path(str(folder))
        run = next((parent for parent in folder.parents if is_run(parent)), None)
        if run is not None:
            return f"{run}@{folder.name}"
    return shorten_path(recorded) if recorded else str(path.parent)


def _rank_result(score: EvaluationScore) -> tuple[int, float]:
    """Return a sort key: number of items, then date."""
    return (score.num_items or 0, score.date)


# -- result files


def _read_results(path: Path) -> tuple[list[EvaluationScore], list[str]]:
    """Return the scores in a result file, and notes on entries that are not scores."""
    try:
        with explain_read_errors(str(path), DataError):
            content = clean_value(read_object(path, str(path), DataError))
    except UserError as error:
        return [], [str(error)]
    results = content.get("results")
    if not isinstance(results, dict):
        return [], [f"{path}: has no `results`, so it is no result file of lm-evaluation-harness"]
    model = name_model(path, _get_text(content, "model_name"))
    date = _parse_number(content.get("date"))
    scores: list[EvaluationScore] = []
    notes: list[str] = []
    for task, entry in results.items():
        if not isinstance(entry, dict):
            notes.append(f"{path}: results of {task} are no object")
            continue
        task_facts = _read_task_facts(content, task)
        items = _parse_number(entry.get("sample_len"))
        for name, recorded in entry.items():
            metric, comma, answer_filter = name.rpartition(",")
            if not comma or metric.endswith((ERROR, INTERVAL)):
                continue
            value = _parse_number(recorded)
            if value is None:
                text = (
                    json.dumps(recorded)
                    if isinstance(recorded, float | str | None)
                    else "no number"
                )
                notes.append(f"{path}: {metric} of {task} is {text[:40]}, which is not a score")
                continue
            scores.append(
                EvaluationScore(
                    model=model,
                    task=task,
                    metric=metric,
                    filter=answer_filter,
                    value=value,
                    error=_parse_number(entry.get(f"{metric}{ERROR},{answer_filter}")),
                    num_items=None if items is None else int(items),
                    rises=_is_rising(content, task, metric),
                    path=path,
                    date=date or 0.0,
                    **task_facts,
                )
            )
    return scores, notes


def _read_task_facts(content: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return shots, version, settings and subtasks of a task, as fields of `EvaluationScore`."""
    subtasks = tuple(_iterate_subtasks(content, task, set()))
    versions = _get_mapping(content, "versions")
    settings = {}
    for member in subtasks or (task,):
        config = _get_mapping(_get_mapping(content, "configs"), member)
        for name in SETTINGS:
            settings[f"{member} {name}"] = json.dumps(config.get(name), sort_keys=True)
        settings[f"{member} version"] = str(versions.get(member))
    shots = _parse_number(_get_mapping(content, "n-shot").get(task))
    return {
        "shots": None if shots is None else int(shots),
        "version": str(versions.get(task)),
        "settings": settings,
        "subtasks": subtasks,
    }


def _iterate_subtasks(content: Mapping[str, Any], group: str, visited: set[str]) -> Iterator[str]:
    """Yield the tasks of a group and of all its subgroups.

    `visited` has the names that were already yielded or searched; names are added to it.
    """
    children = _get_mapping(content, "group_subtasks").get(group)
    for child in children if isinstance(children, list) else ():
        if not isinstance(child, str) or child in visited:
            continue
        visited.add(child)
        if _get_mapping(content, "group_subtasks").get(child):
            yield from _iterate_subtasks(content, child, visited)
        else:
            yield child


def _is_rising(content: Mapping[str, Any], task: str, metric: str) -> bool:
    """Return whether higher values of a metric are better."""
    recorded = _get_mapping(_get_mapping(content, "higher_is_better"), task).get(metric)
    if isinstance(recorded, bool):
        return recorded
    return not any(metric == name or metric.endswith(f"_{name}") for name in FALLING)


def _get_mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _get_text(content: Mapping[str, Any], name: str) -> str:
    value = content.get(name)
    return value if isinstance(value, str) else ""


def _parse_number(value: Any) -> float | None:
    """Return a finite number, or None.

    The harness writes numbers of types unknown to JSON, such as numpy's float32, as strings.
    """
    if isinstance(value, str):
        value = {"True": 1.0, "False": 0.0}.get(value, value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


# -- items


def _read_samples(path: Path) -> tuple[dict[str, dict[int, ItemRecord]], str]:
    """Return (items of a task by filter and number, "") or ({}, reason why the file is invalid)."""
    by_filter: dict[str, dict[int, ItemRecord]] = {}
    try:
        for place, row in read_sample_rows(path):
            number = row.get("doc_id")
            if not isinstance(number, int):
                return {}, f"{place}: has no whole number `doc_id`"
            records = by_filter.setdefault(str(row.get("filter", NO_FILTER)), {})
            if number in records:
                return {}, f"{place}: repeats item {number}"
            records[number] = _build_record(row)
    except UserError as error:
        return {}, str(error)
    return by_filter, ""


def read_sample_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line in a file of items.

    Raises `DataError` for a line that is not a JSON object.
    """
    check_file(path, str(path), DataError)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}:{number}"
            with explain_read_errors(place, DataError):
                row = json.loads(line)
            if not isinstance(row, dict):
                raise DataError(f"{place}: contains no JSON object")
            yield place, row


def _build_record(row: Mapping[str, Any]) -> ItemRecord:
    """Return the hashes and the finite metrics of an item's row."""
    hashes = tuple(str(row.get(name, "")) for name in ("doc_hash", "prompt_hash", "target_hash"))
    names = row.get("metrics")
    values = {}
    for name in names if isinstance(names, list) else ():
        recorded = row.get(str(name))
        pair = [recorded, 1.0]
        if isinstance(recorded, list) and len(recorded) == 2 and str(name).endswith(WEIGHTED):
            pair = recorded
        value, weight = map(_parse_number, pair)
        if value is not None and weight is not None and weight > 0:
            values[str(name)] = (value, weight)
    return ItemRecord((hashes[0], hashes[1], hashes[2]), values)


def _find_aggregation(
    score: EvaluationScore, records: Sequence[ItemRecord], parts: Sequence[int]
) -> ScoredItems | None:
    """Return the items with the aggregation that gives the recorded score, or None.

    `parts` has the index of each item's subtask. The mean, perplexity and bits per byte are tried,
    first over all items, then over the means of the subtasks.
    """
    pairs = np.array([record.values[score.metric] for record in records], dtype=np.float64)
    undivided = ScoredItems(
        pairs[:, :1], pairs[:, 1], np.zeros(len(pairs), dtype=np.int64), np.ones(1)
    )
    part_indices = np.unique(np.array(parts, dtype=np.int64), return_inverse=True)[1]
    count = int(part_indices.max()) + 1
    divided = replace(undivided, parts=part_indices, shares=np.full(count, 1 / count))
    for candidate in (undivided, divided):
        for form in (MEAN, PERPLEXITY, BITS):
            items = replace(candidate, form=form)
            with np.errstate(all="ignore"):  # values that overflow give no recorded score
                value = float(compute_scores(items)[0])
            if abs(value - score.value) <= MAX_SCORE_DIFFERENCE * max(abs(score.value), 1e-3):
                return items
    return None


def sort_models(scores: Iterable[EvaluationScore]) -> list[str]:
    """Return the models in the order of a table.

    Models without a step come first. Checkpoints of runs follow: the run with the oldest evaluation
    comes first, and the checkpoints of a run are sorted by step.
    """
    oldest: dict[str, float] = {}
    models = set()
    for score in scores:
        run, _ = split_model_name(score.model)
        oldest[run] = min(score.date, oldest.get(run, score.date))
        models.add(score.model)

    def build_key(model: str) -> tuple[bool, float, str, int]:
        run, step = split_model_name(model)
        return (step >= 0, oldest[run], run, step)

    return sorted(models, key=build_key)
