"""Writer of result files in the form of lm-evaluation-harness 0.4.13, from given item scores.

`tests/observe/test_eval_files.py` compares the form with what the harness itself writes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


@dataclass(frozen=True)
class FakeTask:
    """Task with one value per item, for one metric and filter; `None` is an item without a value."""

    name: str
    values: Sequence[Any]
    metric: str = "acc"
    filter: str = "none"
    shots: int = 0
    version: float = 1.0
    template: str = "What is {number} + 1?"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def aggregate(self) -> float:
        if self.metric == "word_perplexity":
            pairs = np.array(self.values, dtype=float)
            return math.exp(-pairs[:, 0].sum() / pairs[:, 1].sum())
        known = [value for value in self.values if value is not None]
        return float(np.mean(known))


def make_row(task: FakeTask, number: int, value: Any) -> dict[str, Any]:
    """Return the object that the harness stores for one item."""
    prompt = task.template.format(number=number)
    doc = {"question": prompt, "answer": str(number + 1)}
    row: dict[str, Any] = {"doc_id": number, "doc": doc, "target": str(number + 1)}
    if task.metric.startswith("acc"):
        wrong = value is not None and value < 0.5
        likelihoods = ["-2.5", "-0.5"] if wrong else ["-0.5", "-2.5"]
        choices = [f" {number + 1}", f" {number + 2}"]
        row["target"] = "0"
        row["arguments"] = {
            f"gen_args_{index}": {"arg_0": prompt, "arg_1": choice}
            for index, choice in enumerate(choices)
        }
        row["resps"] = [[[each, "False"]] for each in likelihoods]
        row["filtered_resps"] = [[each, "False"] for each in likelihoods]
    elif task.metric == "exact_match":
        answer = f"It is {number + 1 if value else number + 7}."
        row["arguments"] = {"gen_args_0": {"arg_0": prompt, "arg_1": {"until": ["\n"]}}}
        row["resps"] = [[answer]]
        row["filtered_resps"] = [answer.split()[-1].rstrip(".")]
    else:
        row["arguments"] = {"gen_args_0": {"arg_0": prompt}}
        row["resps"] = [[str(value[0] if isinstance(value, list) else value)]]
        row["filtered_resps"] = row["resps"][0]
    row |= {"filter": task.filter, "metrics": [task.metric], task.metric: value}
    row["doc_hash"] = hash_text(json.dumps(doc))
    row["prompt_hash"] = hash_text(prompt)
    row["target_hash"] = hash_text(row["target"])
    return row


def write_evaluation(
    folder: Path,
    tasks: Sequence[FakeTask],
    *,
    model: str = "",
    date: float = 1.0,
    groups: Mapping[str, Sequence[str]] | None = None,
    samples: bool = True,
) -> Path:
    """Write a result file and its items to `folder`, and return the path of the result file."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = f"2026-11-28T20-00-{date:09.6f}"
    results: dict[str, dict[str, Any]] = {}
    content: dict[str, Any] = {
        "results": results,
        "group_subtasks": {name: list(children) for name, children in (groups or {}).items()},
        "configs": {},
        "versions": {},
        "n-shot": {},
        "higher_is_better": {},
        "date": 1.7e9 + date,
        "model_name": model,
    }
    for task in tasks:
        entry = results.setdefault(task.name, {"name": task.name, "alias": task.name})
        entry["sample_len"] = len(task.values)
        entry[f"{task.metric},{task.filter}"] = task.aggregate()
        entry[f"{task.metric}_stderr,{task.filter}"] = "N/A"
        content["configs"][task.name] = {"task": task.name, "repeats": 1, **task.settings}
        content["versions"][task.name] = task.version
        content["n-shot"][task.name] = task.shots
        rises = content["higher_is_better"].setdefault(task.name, {})
        rises[task.metric] = "perplexity" not in task.metric
        if samples:
            rows = [make_row(task, number, value) for number, value in enumerate(task.values)]
            with (folder / f"samples_{task.name}_{stamp}.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    for group, children in (groups or {}).items():
        own = [task for task in tasks if task.name in children]
        pooled = [value for task in own for value in task.values]
        results[group] = {"name": group, "alias": group, "sample_len": len(pooled)}
        results[group][f"{own[0].metric},{own[0].filter}"] = float(np.mean(pooled))
        content["n-shot"][group] = 0
        content["versions"][group] = "1"
    path = folder / f"results_{stamp}.json"
    path.write_text(json.dumps(content, indent=1))
    return path


def draw_answers(share: float, count: int, seed: int = 0) -> list[float]:
    """Return `count` right and wrong answers; a higher share makes more of the same items right."""
    difficulty = np.random.default_rng(seed).random(count)
    return [float(value) for value in difficulty < share]


def write_checkpoints(
    run: Path, shares: Mapping[int, float], *, count: int = 200, text: bool = True
) -> Path:
    """Write evaluations of a run's checkpoints, with a share of right answers for each step."""
    for step, share in shares.items():
        tasks = [
            FakeTask("sums", draw_answers(share, count), "acc"),
            FakeTask(
                "words", draw_answers(share, count, 1), "exact_match", "strict-match", shots=5
            ),
        ]
        if text:
            pairs = [[-10.0 - index % 7 + 4 * share, 9 + index % 5] for index in range(40)]
            tasks.append(FakeTask("stories", pairs, "word_perplexity"))
        write_evaluation(run / f"checkpoints/actor/step{step}/eval", tasks, date=float(step))
    return run
