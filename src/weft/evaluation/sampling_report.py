"""Sampling reports as JSON and HTML, and the best of several answers as training data.

The JSON has the form of Open-Assistant's sampling reports, `{model_name, date, args, prompts:
[{prompt, results: [{sampling_config, sampling_params, outputs}]}]}`. A result also has `scores` if
a reward model has scored its outputs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from weft import writing
from weft.errors import DataError
from weft.evaluation.answers import EvaluationPrompt, SampledAnswer, SamplingSettings
from weft.reading import explain_read_errors, make_folder, read_json

FOLDER = Path(__file__).parent
Report = dict[str, Any]


def build(
    model: str,
    args: Mapping[str, Any],
    prompts: Sequence[EvaluationPrompt],
    settings: Sequence[SamplingSettings],
    answers: Sequence[Sequence[Sequence[SampledAnswer]]],
) -> Report:
    """Return the report of one model, given its `answers` as `[prompt][setting][sample]`."""
    rows = []
    for prompt, prompt_answers in zip(prompts, answers, strict=True):
        results = []
        for setting, samples in zip(settings, prompt_answers, strict=True):
            results.append(
                {
                    "sampling_config": setting.name,
                    "sampling_params": _read_sampling_parameters(setting),
                    "outputs": [answer.text for answer in samples],
                    "finish": [answer.finish_reason for answer in samples],
                }
            )
        rows.append(
            {
                "id": prompt.id,
                "prompt": prompt.text,
                "messages": list(prompt.messages),
                "results": results,
            }
        )
    return {
        "model_name": model,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "args": dict(args),
        "prompts": rows,
    }


def _read_sampling_parameters(settings: SamplingSettings) -> dict[str, Any]:
    """Return the options of sampling that a report shows."""
    spec = settings.spec
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "greedy",
        "max_new_tokens",
        "min_new_tokens",
        "stop",
        "seed",
    )
    return {name: getattr(spec, name) for name in names}


def read(path: Path) -> Report:
    """Read a report that weft or Open-Assistant has written.

    Raises `DataError` if the file is not a sampling report.
    """
    report = read_json(path, f"{path} cannot be read as a sampling report", DataError)
    problem = _find_problem(report)
    if problem:
        raise DataError(
            f"{path} is not a sampling report: {problem}; weft sample report writes one"
        )
    return dict(report)


def _find_problem(report: Any) -> str | None:
    """Return the reason why `report` is not a sampling report, or None."""
    if (
        not isinstance(report, Mapping)
        or not isinstance(report.get("prompts"), list)
        or not report["prompts"]
    ):
        return "it has no list of prompts"
    for number, row in enumerate(report["prompts"], 1):
        if (
            not isinstance(row, Mapping)
            or not isinstance(row.get("prompt"), str)
            or not isinstance(row.get("results"), list)
        ):
            return f"prompt {number} has no text or no results"
        for result in row["results"]:
            has_setting = isinstance(result, Mapping) and isinstance(
                result.get("sampling_config"), str
            )
            outputs = result.get("outputs") if has_setting else None
            if not isinstance(outputs, list) or not all(
                isinstance(output, str) for output in outputs
            ):
                return f"prompt {number} has a result without sampling_config or outputs"
    return None


def extract_prompts(report: Report) -> list[EvaluationPrompt]:
    """Return the prompts of a report.

    Open-Assistant's reports contain plain texts instead of messages. Each text becomes a user
    message.
    """
    prompts = []
    for number, row in enumerate(report["prompts"]):
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        prompts.append(EvaluationPrompt(str(row.get("id", number)), row["prompt"], tuple(messages)))
    return prompts


def add_scores(report: Report, scores: Sequence[npt.NDArray[np.float64]]) -> None:
    """Add `scores` to the results of a report.

    `scores` has one array per prompt, with the scores of the prompt's outputs in the order in which
    the report lists the outputs.
    """
    for row, row_scores in zip(report["prompts"], scores, strict=True):
        start = 0
        for result in row["results"]:
            count = len(result["outputs"])
            result["scores"] = [float(value) for value in row_scores[start : start + count]]
            start += count


def compute_means(report: Report) -> dict[str, tuple[float, float, int]]:
    """Return, for each setting, the mean score, its standard error, and the number of outputs.

    Mean and standard error are over prompts; the score of a prompt is the mean of its outputs'
    scores.
    """
    by_setting: dict[str, list[list[float]]] = {}
    for row in report["prompts"]:
        for result in row["results"]:
            if result.get("scores"):
                by_setting.setdefault(result["sampling_config"], []).append(result["scores"])
    means = {}
    for name, groups in by_setting.items():
        prompt_means = np.array([np.mean(group) for group in groups])
        if len(prompt_means) > 1:
            error = float(prompt_means.std(ddof=1) / np.sqrt(len(prompt_means)))
        else:
            error = 0.0
        means[name] = (float(prompt_means.mean()), error, sum(map(len, groups)))
    return means


def write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    make_folder(path.parent, f"--out {path.parent}")
    with explain_read_errors(f"--out {path}", fix="name another file"):
        writing.write(path, text, errors="replace")


# -- the page


def render_page(reports: Sequence[Report]) -> str:
    """Return an HTML page that shows the answers to each prompt side by side.

    There is one column per model and setting. The page loads nothing from the network.
    """
    columns = _name_columns(reports)
    script = (FOLDER / "sampling_report.js").read_text(encoding="utf-8")
    prompts = dict.fromkeys(row["prompt"] for report in reports for row in report["prompts"])
    return Template((FOLDER / "sampling_report.html").read_text(encoding="utf-8")).substitute(
        title=escape(
            ", ".join(dict.fromkeys(shorten_name(report["model_name"]) for report in reports))
        ),
        reward="<th>mean reward</th>" if any(map(compute_means, reports)) else "",
        models=_render_models(reports),
        columns="".join(
            f'<label><input type="checkbox" checked data-column="{index}"> {escape(name)}</label>'
            for index, name in enumerate(columns)
        ),
        prompts="".join(_render_prompt(text, reports, columns) for text in prompts),
        css=(FOLDER / "sampling_report.css").read_text(encoding="utf-8"),
        js=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def shorten_name(name: str) -> str:
    """Return a short name for the model at the path `name`, for display.

    This is the folder's name or, for a run's checkpoint, a name such as `chat/a/actor/step40`.
    """
    parts = [part for part in name.split("/") if part]
    if "checkpoints" in parts:
        index = parts.index("checkpoints")
        return "/".join([*parts[max(0, index - 2) : index], *parts[index + 1 :]])
    num_parts = 2 if len(parts) > 1 and parts[-1].startswith("step") else 1
    return "/".join(parts[-num_parts:]) or name


def _name_columns(reports: Sequence[Report]) -> list[str]:
    """Return the names of the page's columns, in the order of the reports.

    A model has one column for each setting with which it was sampled.
    """
    columns: dict[str, None] = {}
    for index, report in enumerate(reports):
        for row in report["prompts"]:
            for result in row["results"]:
                columns[_name_column(reports, index, result["sampling_config"])] = None
    return list(columns)


def _name_column(reports: Sequence[Report], index: int, setting: str) -> str:
    """Return the name of a column: model and setting, numbered if models have the same name."""
    name = shorten_name(reports[index]["model_name"])
    with_same_name = []
    for other, report in enumerate(reports):
        if shorten_name(report["model_name"]) == name:
            with_same_name.append(other)
    if len(with_same_name) > 1:
        name = f"{name} ({with_same_name.index(index) + 1})"
    return f"{name} / {setting}"


def _render_models(reports: Sequence[Report]) -> str:
    """Return table rows for all models and settings, with mean rewards if there are scores."""
    rows = list[str]()
    has_rewards = any(map(compute_means, reports))
    for index, report in enumerate(reports):
        means = compute_means(report)
        settings = dict.fromkeys(
            result["sampling_config"] for row in report["prompts"] for result in row["results"]
        )
        for setting in settings:
            mean, error, _ = means.get(setting, (None, None, 0))
            reward_text = "" if mean is None else f"{mean:.3f} &plusmn; {error:.3f}"
            cell = f"<td>{reward_text}</td>" if has_rewards else ""
            rows.append(f"<tr><td>{escape(_name_column(reports, index, setting))}</td>{cell}</tr>")
    return "".join(rows)


def _render_prompt(text: str, reports: Sequence[Report], columns: Sequence[str]) -> str:
    """Render a prompt with one cell for each model and setting."""
    cells = []
    for index, report in enumerate(reports):
        row = next((row for row in report["prompts"] if row["prompt"] == text), None)
        for result in row["results"] if row else ():
            column = _name_column(reports, index, result["sampling_config"])
            cells.append(
                f'<div class="cell" data-column="{columns.index(column)}"><h3>{escape(column)}</h3>'
                f"{_render_outputs(result)}</div>"
            )
    return f'<article><p class="prompt">{escape(text)}</p><div class="answers">{"".join(cells)}</div></article>'


def _render_outputs(result: Mapping[str, Any]) -> str:
    """Render the outputs of one result, with rewards if there are scores."""
    outputs = result["outputs"]
    scores = result.get("scores") or []
    finishes = result.get("finish") or []
    blocks = []
    for number, output in enumerate(outputs):
        facts = [f"reward {scores[number]:.3f}"] if number < len(scores) else []
        facts += ["cut"] if number < len(finishes) and finishes[number] == "length" else []
        note = f'<p class="facts">{", ".join(facts)}</p>' if facts else ""
        blocks.append(f"<blockquote>{escape(output) or '<i>nothing</i>'}</blockquote>{note}")
    return "".join(blocks)


@dataclass(frozen=True)
class RankedAnswers:
    """Answers to one prompt with their scores, best first."""

    prompt: EvaluationPrompt
    answers: tuple[SampledAnswer, ...]
    scores: tuple[float, ...]


def choose(
    prompts: Sequence[EvaluationPrompt],
    answers: Sequence[Sequence[SampledAnswer]],
    scores: Sequence[npt.NDArray[np.float64]],
    *,
    finished_only: bool = True,
) -> list[RankedAnswers]:
    """Return each prompt's distinct non-empty answers, sorted by score, best first.

    Prompts without a non-empty answer are dropped. With `finished_only`, answers that were cut off
    at the length limit are dropped if the prompt has an answer that was not cut off.
    """
    rankings = []
    for prompt, candidates, candidate_scores in zip(prompts, answers, scores, strict=True):
        distinct = {}
        for answer, value in zip(candidates, candidate_scores, strict=True):
            if answer.text:
                distinct[answer.text] = (answer, float(value))
        selected = list(distinct.values())
        finished = [pair for pair in selected if pair[0].finish_reason == "stop"]
        selected = finished if finished_only and finished else selected
        if selected:
            selected.sort(key=lambda pair: -pair[1])
            rankings.append(
                RankedAnswers(
                    prompt,
                    tuple(answer for answer, _ in selected),
                    tuple(value for _, value in selected),
                )
            )
    return rankings


def save(
    choices: Sequence[RankedAnswers], folder: Path, *, min_score: float | None = None
) -> dict[str, int]:
    """Write the best and the worst answers to three files, and return the number of rows in each.

    `selected.jsonl` has the best answers as rows of the dataset type `chat`, for SFT; with
    `min_score`, only answers whose score is at least `min_score`. `rejected.jsonl` has the worst
    answers as `chat` rows. `comparison.jsonl` has the best and the worst answer of each prompt as
    `preference` rows, for a reward model or DPO. The last two files omit prompts whose answers have
    equal scores. All rows include the scores.
    """
    selected = []
    for choice in choices:
        if min_score is None or choice.scores[0] >= min_score:
            selected.append(choice)
    with_gap = []
    for choice in choices:
        if choice.scores[0] > choice.scores[-1]:
            with_gap.append(choice)
    files = {
        "selected.jsonl": [_build_chat_row(choice, 0) for choice in selected],
        "rejected.jsonl": [_build_chat_row(choice, -1) for choice in with_gap],
        "comparison.jsonl": [_build_pair_row(choice) for choice in with_gap],
    }
    for name, rows in files.items():
        write(folder / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return {name: len(rows) for name, rows in files.items()}


def _build_chat_row(choice: RankedAnswers, index: int) -> dict[str, Any]:
    reply = {"role": "assistant", "content": choice.answers[index].text}
    messages: Iterable[Mapping[str, Any]] = [*choice.prompt.messages, reply]
    return {"id": choice.prompt.id, "messages": list(messages), "score": choice.scores[index]}


def _build_pair_row(choice: RankedAnswers) -> dict[str, Any]:
    return {
        "id": choice.prompt.id,
        "prompt": list(choice.prompt.messages),
        "chosen": choice.answers[0].text,
        "rejected": choice.answers[-1].text,
        "score_chosen": choice.scores[0],
        "score_rejected": choice.scores[-1],
    }
