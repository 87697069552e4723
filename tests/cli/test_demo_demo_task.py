"""Preference pairs of the demo: a correct and a wrong sum, only for training problems."""

from __future__ import annotations

import json
import random
from pathlib import Path

from weft.cli import demo as task


def test_a_pair_is_the_right_sum_over_a_wrong_answer_to_a_training_problem(tmp_path: Path) -> None:
    training, held_out = task.draw_problems(seed=1, num_held_out=200)
    first = training[0]
    samples = [first.answer + "</s>", "7</s>", "7</s>", ""]
    generations = task.write_rows(
        tmp_path / "g.jsonl", ({"prompt": first.prompt, "completion": s} for s in samples)
    )

    rows = task.build_preference_rows(generations, training, seed=1, times=5)

    assert rows[0] == {"prompt": first.prompt, "pos_answers": [first.answer], "neg_answers": ["7"]}
    pairs = [(row["prompt"], *row["pos_answers"], *row["neg_answers"]) for row in rows]
    assert len(set(pairs)) == len(pairs)
    assert {prompt for prompt, _, _ in pairs} == {p.prompt for p in training}
    assert not {prompt for prompt, _, _ in pairs} & {p.prompt for p in held_out}
    assert all(
        task.is_correct(prompt, good) and not task.is_correct(prompt, bad)
        for prompt, good, bad in pairs
    )
    assert task.build_preference_rows(generations, training, seed=1, times=5) == rows


def test_a_slip_has_one_wrong_digit() -> None:
    draw = random.Random(0)
    for _ in range(100):
        slipped = task.change_digit("104", draw)
        assert sum(a != b for a, b in zip("104", slipped, strict=True)) == 1


def test_accuracy_is_the_share_of_exact_sums(tmp_path: Path) -> None:
    rows = [
        {"prompt": "47+8=", "completion": text} for text in ("55</s>", "55", "5</s>", "056</s>")
    ]
    path = tmp_path / "generations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert task.compute_accuracy(path) == 0.5
