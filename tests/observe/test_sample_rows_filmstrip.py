"""Filmstrip of answers to fixed prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.observe.test_report import EVIL, Page, write_run
from weft.observe.report import build_report
from weft.observe.sample_rows import EVAL_PROMPTS, MAX_FRAMES, MAX_STRIPS, render_filmstrip


def row(step: int, id: str, said: str, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "id": id,
        "prompt": f"p{id}",
        "completion": said,
        "tokens": 3,
        "finish_reason": "stop",
    } | more


def test_each_prompt_has_a_strip_of_its_answers_by_step() -> None:
    rows = [row(step, id, f"a{step}{id}") for step in (0, 10, 20) for id in "01"]
    page = Page(render_filmstrip(rows))
    assert page.text.partition("p0")[2].split("p1")[0].split() == (
        [
            "Step",
            "0",
            "a00",
            "3",
            "tokens",
            "Step",
            "10",
            "a100",
            "3",
            "tokens",
            "Step",
            "20",
            "a200",
            "3",
            "tokens",
        ]
    )
    assert render_filmstrip([]) == ""


def test_a_long_run_shows_its_first_and_last_step_and_an_answer_that_stays_is_marked() -> None:
    rows = [row(step, "0", "same" if step else "first") for step in range(0, 500, 5)]
    text = render_filmstrip(rows)
    assert text.count("<li ") == MAX_FRAMES and "Step 0<" in text and "Step 495<" in text
    assert text.count('class="frame same"') == MAX_FRAMES - 2
    assert "cut by length" in render_filmstrip([row(1, "0", "x", finish_reason="length")])


def test_many_prompts_are_counted(tmp_path: Path) -> None:
    text = render_filmstrip([row(0, str(n), "x") for n in range(MAX_STRIPS + 3)])
    assert text.count("<article") == MAX_STRIPS and f"3 more prompts are in {EVAL_PROMPTS}" in text


def test_the_report_shows_strips_with_any_text(tmp_path: Path) -> None:
    rows = [row(0, EVIL, EVIL, prompt=EVIL), {"step": "x"}, row(3, EVIL, "fine", prompt=EVIL)]
    run = write_run(
        tmp_path / "run",
        **{"eval_prompts__jsonl": "".join(json.dumps(each) + "\n" for each in rows)},
    )
    page = Page(build_report(run).read_text())
    assert page.sections()[1:3] == ["curves", "filmstrip"] and "fine" in page.text
    assert not any("onerror" in attrs for _, attrs in page.tags)
