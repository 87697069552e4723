"""Add results of evaluations to a model card and, for the hub, the name of the repository.

The results are read from files `results_*.json` of lm-evaluation-harness or `weft eval suite` below
the checkpoint's folder, and from the files of the run's option `eval_suite`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from weft.observe.jsonl import CHECKPOINTS, POLICIES, STEP, SUITE_FOLDER, read_json
from weft.observe.metrics import is_finite
from weft.observe.model_card import (
    README,
    append_checksum,
    build_card,
    describe_use,
    find_architecture,
    find_facts,
    read_card,
    strip_checksum,
)
from weft.writing import write

RESULTS = "results_*.json"
ADAPTER_ROW = re.compile(r"^\| adapter \| .* \|$", re.MULTILINE)
RESULTS_SECTION = re.compile(r"\n*^## Results\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
USE_SECTION = re.compile(r"^## Use\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class TaskResult:
    """Value of one metric of one task, as stored by lm-evaluation-harness.

    `filter` is the name of the harness' filter. `error` is the standard error, `shots` the number
    of examples in the prompt, `items` the number of evaluated items, and `total` the number of
    items of the task; each is None if the file does not state it. `dataset` is the hub name of the
    task's dataset, or the name of the task if the dataset is not on the hub.
    """

    task: str
    metric: str
    filter: str
    value: float
    error: float | None = None
    shots: int | None = None
    items: int | None = None
    total: int | None = None
    dataset: str = ""

    @property
    def is_partial(self) -> bool:
        """True if only some items of the task were evaluated."""
        return None not in (self.items, self.total) and self.items != self.total


@dataclass(frozen=True)
class CardMetadata:
    """Metadata that a user adds to a card. None keeps the card's own value."""

    base_model: str | None = None
    license: str | None = None


def read_task_results(checkpoint: Path) -> list[TaskResult]:
    """Return the results stored below a checkpoint's folder, sorted by task and metric.

    For a checkpoint of a run's policy, the results of the run's `eval_suite` for this step are
    included. If a task was evaluated several times with the same number of shots, the last results
    are used. Files without results are ignored.
    """
    files = []
    for path in sorted([*checkpoint.rglob(RESULTS), *_list_run_results(checkpoint.absolute())]):
        content = read_json(path)
        date = content.get("date")
        files.append((date if is_finite(date) else 0.0, path.name, content))
    newest: dict[tuple[str, int | None], list[TaskResult]] = {}
    for _, _, content in sorted(files, key=lambda file: file[:2]):
        newest |= _group_results(content)
    results = [result for group in newest.values() for result in group]
    results.sort(key=lambda each: (each.task, each.shots or 0, each.metric, each.filter))
    return results


def _list_run_results(checkpoint: Path) -> list[Path]:
    """Return the files with the results of the run's `eval_suite` for the checkpoint of a policy.

    The list is empty for other checkpoints.
    """
    role = checkpoint.parent
    is_step = STEP.fullmatch(checkpoint.name) is not None
    if not is_step or role.name not in POLICIES or role.parent.name != CHECKPOINTS:
        return []
    return list((role.parent.parent / SUITE_FOLDER / checkpoint.name).glob(RESULTS))


def _group_results(content: Mapping[str, Any]) -> dict[tuple[str, int | None], list[TaskResult]]:
    """Return the results in the content of a result file, by (task, number of shots)."""
    grouped: dict[tuple[str, int | None], list[TaskResult]] = {}
    results = content.get("results")
    for task, task_values in results.items() if isinstance(results, Mapping) else ():
        if not isinstance(task_values, Mapping):
            continue
        shots = _read_whole(_get(content, "n-shot", task))
        samples = _get(content, "n-samples", task)
        counts = samples if isinstance(samples, Mapping) else {}
        config = _get(content, "configs", task)
        dataset = config.get("dataset_path") if isinstance(config, Mapping) else None
        is_public = isinstance(dataset, str) and dataset.count("/") == 1 and dataset[0] not in "/.~"
        for key, value in task_values.items():
            metric, comma, filter = key.partition(",")
            if not comma or metric.endswith("_stderr") or not is_finite(value):
                continue
            error = task_values.get(f"{metric}_stderr,{filter}")
            result = TaskResult(
                task=str(task),
                metric=metric,
                filter=filter,
                value=float(value),
                error=float(error) if isinstance(error, float) and is_finite(error) else None,
                shots=shots,
                items=_read_whole(counts.get("effective")),
                total=_read_whole(counts.get("original")),
                dataset=str(dataset) if is_public else str(task),
            )
            grouped.setdefault((result.task, shots), []).append(result)
    return grouped


def _get(content: Mapping[str, Any], key: str, task: str) -> Any:
    values = content.get(key)
    return values.get(task) if isinstance(values, Mapping) else None


def _read_whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def describe_results(results: Sequence[TaskResult]) -> str:
    """Return the section "Results" of a card: a table with a row for each metric of each task."""
    lines = [
        "## Results\n",
        "Values of lm-evaluation-harness, with the standard error.\n",
        "| task | metric | value | shots | items |",
        "|---|---|---|---|---|",
    ]
    for each in results:
        metric = each.metric if each.filter in ("", "none") else f"{each.metric} ({each.filter})"
        value = f"{each.value:.4g}"
        if each.error is not None:
            value += f" ± {each.error:.2g}"
        items = "" if each.items is None else f"{each.items:,}"
        if each.is_partial:
            items += f" of {each.total:,}"
        shots = "" if each.shots is None else str(each.shots)
        lines.append(f"| `{each.task}` | {metric} | {value} | {shots} | {items} |")
    return "\n".join(lines) + "\n"


def write_card_results(checkpoint: Path, result_folder: Path | None = None) -> None:
    """Replace the results in a checkpoint's card by the stored results.

    The results are read from `result_folder`; the default is the checkpoint's folder. A card that
    weft did not write, or that a user has edited, is not changed.
    """
    stored = read_card(checkpoint)
    body = None if stored is None else strip_checksum(stored)
    if body is None:
        return
    results = read_task_results(result_folder or checkpoint)
    text = f"{RESULTS_SECTION.sub('', body).rstrip()}\n"
    if results:
        text += f"\n{describe_results(results)}"
    write(checkpoint / README, append_checksum(text))


def complete_card(
    checkpoint: Path, folder: Path, repo: str, metadata: CardMetadata
) -> tuple[str, list[str]]:
    """Return (text, notes) of the model card for an upload to the repository `repo`.

    `checkpoint` is the folder with the card and the results. `folder` has the weights: it is
    `checkpoint` itself, or the folder of the adapter in it. The text of a card that the user has
    edited is kept; only `metadata` are set.
    """
    stored = read_card(checkpoint)
    body = None if stored is None else strip_checksum(stored)
    notes = []
    if stored is not None and body is None:
        card = ModelCard(stored, ignore_metadata_errors=True)
        _add_metadata(card, metadata)
        notes.append("README.md was edited, so its text is uploaded as it is")
        return str(card), notes
    if body is None:
        body = build_card(checkpoint, *find_facts(checkpoint))
    body = RESULTS_SECTION.sub("", body)
    use = "".join(describe_use(folder, find_architecture(folder), repo))
    text = USE_SECTION.sub(lambda _: f"{use}\n" if use else "", body)
    if folder == checkpoint:
        text = ADAPTER_ROW.sub("| adapter | merged into the weights |", text)
    else:
        text = ADAPTER_ROW.sub("| adapter | this repository; its base model is apart |", text)
    results = read_task_results(checkpoint)
    if results:
        text = f"{text.rstrip()}\n\n{describe_results(results)}"
    card = ModelCard(text, ignore_metadata_errors=True)
    _add_metadata(card, metadata)
    data: Any = card.data
    if folder != checkpoint:
        data.library_name = "peft"
    complete_results = [each for each in results if not each.is_partial]
    if complete_results:
        data.model_name = repo.split("/")[-1]
        data.eval_results = [_convert_result(each) for each in complete_results]
    if len(complete_results) < len(results):
        notes.append("results of a part of a task's items are in the card's table only")
    return f"{str(card).rstrip()}\n", notes


def _add_metadata(card: ModelCard, metadata: CardMetadata) -> None:
    data: Any = card.data
    if metadata.base_model is not None:
        data.base_model = metadata.base_model
    if metadata.license is not None:
        data.license = metadata.license


def _convert_result(result: TaskResult) -> EvalResult:
    """Return a result in the form of the hub's `model-index`."""
    name = result.metric if result.filter in ("", "none") else f"{result.metric} ({result.filter})"
    return EvalResult(
        task_type="text-generation",
        dataset_type=result.dataset,
        dataset_name=result.task if result.shots is None else f"{result.task}, {result.shots}-shot",
        metric_type=result.metric,
        metric_name=name,
        metric_value=result.value,
    )
