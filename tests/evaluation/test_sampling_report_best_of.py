"""Best of several answers, and the rows of training data made from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from weft.evaluation.answers import EvaluationPrompt, SampledAnswer
from weft.evaluation.sampling_report import choose, save


def prompt(id: str) -> EvaluationPrompt:
    return EvaluationPrompt(id, f"Q{id}", ({"role": "user", "content": f"Q{id}"},))


def answer(text: str, finish: str = "stop") -> SampledAnswer:
    return SampledAnswer(text, (1,), finish)


ANSWERS = [
    [answer("a"), answer("b"), answer("long", "length"), answer("b")],
    [answer("", "stop")],
    [answer("cut", "length"), answer("cut more", "length")],
]
SCORES = [np.array([0.5, 2.0, 9.0, 2.0]), np.array([1.0]), np.array([-1.0, -2.0])]
PROMPTS = [prompt("0"), prompt("1"), prompt("2")]


def test_the_best_comes_first_and_cut_answers_last() -> None:
    first, third = choose(PROMPTS, ANSWERS, SCORES)
    assert [a.text for a in first.answers] == ["b", "a"] and first.scores == (2.0, 0.5)
    assert [a.text for a in third.answers] == ["cut", "cut more"]
    assert choose(PROMPTS, ANSWERS, SCORES, finished_only=False)[0].answers[0].text == "long"


def test_the_three_files(tmp_path: Path) -> None:
    counts = save(choose(PROMPTS, ANSWERS, SCORES), tmp_path, min_score=0.0)
    assert counts == {"selected.jsonl": 1, "rejected.jsonl": 2, "comparison.jsonl": 2}
    (selected,) = [
        json.loads(line) for line in (tmp_path / "selected.jsonl").read_text().splitlines()
    ]
    assert selected == {
        "id": "0",
        "messages": [{"role": "user", "content": "Q0"}, {"role": "assistant", "content": "b"}],
        "score": 2.0,
    }
    pair = json.loads((tmp_path / "comparison.jsonl").read_text().splitlines()[0])
    assert (pair["chosen"], pair["rejected"], pair["score_chosen"]) == ("b", "a", 2.0)
