"""Rows of `samples.jsonl` for reports, grouped by prompt, and answers to fixed prompts over time.

The answers are shown as a filmstrip, with one strip per prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeVar

from weft.observe.jsonl import clean_value, read_row
from weft.observe.metrics import format_number, is_finite
from weft.observe.page import escape_text

SAMPLES = "samples.jsonl"
MAX_STEPS = 12  # maximum steps that a report shows
MAX_GROUPS = 6  # maximum groups for each step
STEP = re.compile(rb'\s*\{"step": (\d{1,15})[,}]')
DETAILED = b'"tokens": ['  # text of rows with per-token values
T = TypeVar("T")


@dataclass(frozen=True)
class SampleGroup:
    """One prompt in one step, with its completions.

    `rows` has one row per completion. The completions are samples of the model, or answers from the
    dataset, which may be ranked. If all of them have a rank, the best one comes first.
    """

    step: float
    id: str | None
    rows: Sequence[Mapping[str, Any]]

    @property
    def prompt(self) -> str:
        return str(self.rows[0].get("prompt") or "")

    @property
    def answer(self) -> str | None:
        """Reference answer in the dataset; None if the dataset has no answer for the prompt."""
        reference = self.rows[0].get("answer")
        return str(reference) if isinstance(reference, str | int | float) else None

    @property
    def is_ranked(self) -> bool:
        """True if there are at least two completions and all of them have a rank."""
        return len(self.rows) > 1 and all(is_finite(row.get("rank")) for row in self.rows)

    def read_values(self, name: str) -> list[float]:
        """Return the finite values of the key `name` in the rows."""
        values: list[float] = []
        for row in self.rows:
            if is_finite(row.get(name)):
                values.append(float(row[name]))
        return values


def pick_evenly(values: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of `values`, evenly spaced, including the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def read_samples(path: Path, steps: int = MAX_STEPS) -> list[dict[str, Any]]:
    """Return the rows of at most `steps` evenly spaced training steps from samples.jsonl.

    If some training steps have per-token values, only these steps and the last training step are
    considered. Only the rows that are returned are parsed, because the file of a long run is large.
    """
    lines: dict[int, list[bytes]] = {}
    detailed_steps: set[int] = set()
    if not path.is_file():
        return []
    with path.open("rb") as file:
        for line in file:
            step = _read_step(line)
            if step is not None:
                lines.setdefault(step, []).append(line)
                if DETAILED in line:
                    detailed_steps.add(step)
    last_step = max(lines, default=0)
    if lines:
        chosen_steps = pick_evenly(
            sorted(detailed_steps | {last_step} if detailed_steps else lines), steps
        )
    else:
        chosen_steps = []
    return [
        row
        for step in chosen_steps
        for line in lines[step]
        if (row := _parse_row(line)) is not None
    ]


def _read_step(line: bytes) -> int | None:
    """Return the step of a line; None if the line cannot be read.

    If the line has the layout that weft writes, the step is found without parsing the whole line.
    """
    match = STEP.match(line)
    if match is not None:
        return int(match[1])  # at most 15 digits
    row = _parse_row(line)
    return None if row is None else int(row["step"])


def _parse_row(line: bytes) -> dict[str, Any] | None:
    row = read_row(line.decode("utf-8", errors="replace"))
    return None if row is None else dict(clean_value(row))


def group_rows(
    rows: Iterable[Mapping[str, Any]], max_groups: int = MAX_GROUPS
) -> dict[float, list[SampleGroup]]:
    """Group rows by step, and within a step by prompt, with at most `max_groups` groups per step.

    Rows with the same `id` form one group. A row without an `id` forms a separate group.
    """
    rows_by_step: dict[float, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        id = row.get("id")
        rows_by_key = rows_by_step.setdefault(float(row["step"]), {})
        key = f"id {id}" if id is not None else f"row {len(rows_by_key)}"
        rows_by_key.setdefault(key, []).append(row)
    result: dict[float, list[SampleGroup]] = {}
    for step, rows_by_key in sorted(rows_by_step.items()):
        result[step] = groups = []
        for group in list(rows_by_key.values())[:max_groups]:
            id = group[0].get("id")
            if all(is_finite(row.get("rank")) for row in group):
                group.sort(key=lambda row: row["rank"])  # answers from best to worst
            groups.append(SampleGroup(step, None if id is None else str(id), group))
    return result


EVAL_PROMPTS = "eval_prompts.jsonl"
MAX_FRAMES = 12  # maximum steps of a strip, evenly spaced, including the first and the last
MAX_STRIPS = 20  # maximum prompts

Rows = Sequence[Mapping[str, Any]]


def render_filmstrip(rows: Rows) -> str:
    """Render one strip per prompt, which shows the model's answers at several steps side by side.

    Returns "" if there are no answers.
    """
    answers_by_prompt: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in rows:
        if is_finite(row.get("step")):
            answers_by_prompt.setdefault(str(row.get("id")), {})[float(row["step"])] = row
    if not answers_by_prompt:
        return ""
    steps = pick_evenly(
        sorted({step for answers in answers_by_prompt.values() for step in answers}), MAX_FRAMES
    )
    strips = "".join(
        _render_strip(answers, steps) for answers in list(answers_by_prompt.values())[:MAX_STRIPS]
    )
    num_left_out = len(answers_by_prompt) - MAX_STRIPS
    note = (
        "The same prompts, answered greedily at several steps: scroll sideways. Answers that are "
        "the same as the one before "
        "are grey."
    ) + (f" {num_left_out} more prompts are in {EVAL_PROMPTS}." if num_left_out > 0 else "")
    return f'<p class="note">{note}</p>{strips}'


def _render_strip(answers: Mapping[float, Mapping[str, Any]], steps: Sequence[float]) -> str:
    """Render the answers to one prompt at several steps, side by side."""
    rows = [answers[step] for step in steps if step in answers]
    previous = [None, *(row.get("completion") for row in rows)]
    frames = "".join(
        _render_frame(row, is_same=row.get("completion") == previous_completion)
        for row, previous_completion in zip(rows, previous, strict=False)
    )
    prompt = escape_text(str(rows[0].get("prompt") or "")) if rows else ""
    return (
        f'<article class="strip"><div class="prompt" tabindex="0" aria-label="prompt">{prompt}</div>'
        f'<ol class="frames" tabindex="0" role="list" aria-label="answers by step, scrolls sideways">{frames}</ol></article>'
    )


def _render_frame(row: Mapping[str, Any], *, is_same: bool) -> str:
    """Render one answer; `is_same` is True if it equals the answer before it."""
    completion = (
        escape_text(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    )
    if row.get("finish_reason") == "length":
        cut = ' <span class="warn">cut by length</span>'
    else:
        cut = ""
    if is_finite(row.get("tokens")):
        tokens = f"{escape(format_number(float(row['tokens'])))} tokens"
    else:
        tokens = ""
    return (
        f'<li class="frame{" same" if is_same else ""}"><b>Step {escape(format_number(float(row["step"])))}</b>'
        f'<div class="completion">{completion}</div><footer><span>{tokens}</span>{cut}</footer></li>'
    )
