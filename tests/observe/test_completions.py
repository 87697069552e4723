"""Samples of a run: groups, pairs and rows, as HTML and as data for the page's script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.observe.test_report import Page
from weft.observe.completions import choose_heading, choose_num_columns, render_completions
from weft.observe.run_files import RunFiles


def of(*rows: dict[str, Any], lines: tuple[dict[str, Any], ...] = ()) -> RunFiles:
    return RunFiles(Path("run"), lines, rows)


def group(step: int, count: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "id": "7",
            "k": k,
            "prompt": "why?",
            "completion": f"because {k}",
            "reward": float(k),
            "answer": "so",
            "tokens": ["because", f" {k}"],
            "logprobs": [-0.5, -1.5],
            "advantage": k - 1.0,
            "finish_reason": "length" if k else "stop",
        }
        for k in range(count)
    ]


def test_answers_of_a_group_are_shown_with_their_values() -> None:
    html, tokens = render_completions(of(*group(1)))
    page = Page(html)
    assert page.text.count("why?") == 1 and page.text.count("so") >= 1
    for part in (
        "because 0",
        "because 2",
        "mean reward of these 3: 1",
        "from 0 to 2",
        "ended with EOS or a stop text",
        "cut by length",
    ):
        assert part in page.text, part
    assert "advantage -1" in page.text and "log-prob per token -1" in page.text
    assert [one["advantages"] for one in tokens] == [[-1.0] * 2, [0.0] * 2, [1.0] * 2]
    assert [attrs["data-tokens"] for _, attrs in page.tags if "data-tokens" in attrs] == [
        "0",
        "1",
        "2",
    ]


def test_tabs_show_the_mean_of_the_batch_not_of_the_samples() -> None:
    html, _ = render_completions(
        of(
            *group(1),
            *group(2),
            lines=({"step": 1, "r/reward": 0.25}, {"step": 2, "r/reward": 0.75}),
        )
    )
    tabs = [text for text in Page(html).words if text.startswith("batch")]
    assert tabs == ["batch reward 0.25", "batch reward 0.75"] * 2, (
        "in the tabs, and above the panels"
    )


def test_pairs_are_labelled_chosen_and_rejected() -> None:
    rows = [
        {
            "step": 1,
            "id": "1",
            "k": k,
            "prompt": "p",
            "completion": f"c{k}",
            "rank": 1 - k,
            "score": score,
        }
        for k, score in ((0, 0.5), (1, 0.75))
    ]
    run = of(*rows)
    page = Page(render_completions(run)[0])
    assert choose_heading(run) == "Pairs of the dataset" and "margin 0.25, right order" in page.text
    assert page.text.index("chosen c1") < page.text.index("rejected c0")
    rows[0]["score"] = 2.0
    assert "wrong order" in Page(render_completions(of(*rows))[0]).text


def test_rows_of_the_dataset_mark_their_trained_tokens() -> None:
    row = {
        "step": 1,
        "id": "1",
        "k": 0,
        "prompt": "",
        "completion": "a b",
        "tokens": ["a", " b"],
        "logprobs": [-1.0, -2.0],
        "trained": [0, 1],
        "loss": 2.0,
    }
    html, tokens = render_completions(of(row))
    assert choose_heading(of(row)) == "Rows of the dataset" and tokens[0]["trained"] == [0, 1]
    assert "loss 2" in Page(html).text and "prompt" not in [
        attrs.get("aria-label") for _, attrs in Page(html).tags
    ]


def test_rows_with_few_or_odd_keys_are_shown() -> None:
    html, tokens = render_completions(
        of(
            {"step": 1},
            {"step": 2, "completion": "c", "tokens": ["c"], "logprobs": ["x"], "rank": "y"},
        )
    )
    assert "(empty)" in Page(html).text and tokens == [{"t": ["c"]}]


def test_few_places_in_the_last_row_of_answers_are_empty() -> None:
    assert [choose_num_columns(count) for count in range(1, 10)] == [1, 2, 3, 4, 3, 3, 4, 4, 3]
