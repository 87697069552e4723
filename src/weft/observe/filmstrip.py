"""HTML of the answers to a run's fixed prompts at several steps, with one strip per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.metrics import format_number, is_finite
from weft.observe.page import escape_text
from weft.observe.sample_rows import pick

FILE = "eval_prompts.jsonl"
FRAMES = 12  # maximum steps of a strip, evenly spaced, including the first and the last
STRIPS = 20  # maximum prompts

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
    steps = pick(
        sorted({step for answers in answers_by_prompt.values() for step in answers}), FRAMES
    )
    strips = "".join(
        _strip(answers, steps) for answers in list(answers_by_prompt.values())[:STRIPS]
    )
    more = len(answers_by_prompt) - STRIPS
    note = (
        "The same prompts, answered greedily at several steps: scroll sideways. Answers that are "
        "the same as the one before "
        "are grey."
    ) + (f" {more} more prompts are in {FILE}." if more > 0 else "")
    return f'<p class="note">{note}</p>{strips}'


def _strip(answers: Mapping[float, Mapping[str, Any]], steps: Sequence[float]) -> str:
    there = [answers[step] for step in steps if step in answers]
    before = [None, *(row.get("completion") for row in there)]
    frames = "".join(
        _render_frame(row, same=row.get("completion") == last)
        for row, last in zip(there, before, strict=False)
    )
    prompt = escape_text(str(there[0].get("prompt") or "")) if there else ""
    return (
        f'<article class="strip"><div class="prompt" tabindex="0" aria-label="prompt">{prompt}</div>'
        f'<ol class="frames" tabindex="0" role="list" aria-label="answers by step, scrolls sideways">{frames}</ol></article>'
    )


def _render_frame(row: Mapping[str, Any], *, same: bool) -> str:
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
        f'<li class="frame{" same" if same else ""}"><b>Step {escape(format_number(float(row["step"])))}</b>'
        f'<div class="completion">{completion}</div><footer><span>{tokens}</span>{cut}</footer></li>'
    )
