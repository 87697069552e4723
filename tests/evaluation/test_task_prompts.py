"""Prompts with examples from the item's subset."""

from __future__ import annotations

import copy

import pytest

from weft.errors import DataError
from weft.evaluation.task_prompts import ShotPrompt

ITEM = {
    "subset": "high_school_law",
    "question": "Who?",
    "choices": ["me", "you"],
    "letters": ["A", "B"],
    "target": 1,
}
SHOTS = {"high_school_law": [{**ITEM, "question": "Example?", "target": 0}, ITEM]}
BBH = (
    "About words.\n\nQ: x\nA: Let us think. So the answer is (C).\n\nQ: y\nA: So the answer is no."
)


def test_multiple_choice_with_examples_of_the_subject() -> None:
    assert ShotPrompt("choice", SHOTS, 1)(ITEM) == (
        "The following are multiple choice questions (with answers) about high school law.\n\n"
        "Example?\nA. me\nB. you\nAnswer: A\n\n"
        "Who?\nA. me\nB. you\nAnswer:"
    )
    assert "Example?" not in ShotPrompt("choice", SHOTS, 0)(ITEM)


def test_reasoning_is_left_out_of_direct_examples() -> None:
    item = {"subset": "words", "input": "z"}
    reasoned = ShotPrompt("reasoned", {"words": BBH}, 3)(item)
    assert reasoned == f"{BBH}\n\nQ: z\nA:"
    direct = ShotPrompt("direct", {"words": BBH}, 3)(item)
    assert direct == "About words.\n\nQ: x\nA: (C).\n\nQ: y\nA: no.\n\nQ: z\nA:"


def test_questions_with_and_without_a_passage() -> None:
    item = {"subset": "finnish", "context": "Lily.", "question": "Who?", "answers": ["Lily"]}
    shots = {"finnish": [{**item, "context": "Tom.", "answers": ["Tom"]}]}
    assert ShotPrompt("passage", shots, 1)(item).endswith(
        "\n\nPassage: Tom.\nQuestion: Who?\nAnswer: Tom\n\nPassage: Lily.\nQuestion: Who?\nAnswer:"
    )
    assert ShotPrompt("question", shots, 1)(item).endswith(
        "\n\nQuestion: Who?\nAnswer: Tom\n\nQuestion: Who?\nAnswer:"
    )


def test_missing_examples_are_reported_before_the_run() -> None:
    prompt = ShotPrompt("choice", SHOTS, 5)
    with pytest.raises(DataError, match="needs 5 examples of 'high_school_law', and there are 2"):
        prompt.check([ITEM], "task 'mmlu_5shot'")
    ShotPrompt("choice", {}, 0).check([ITEM], "task 'mmlu_0shot'")


def test_copies_share_the_examples() -> None:
    prompt = ShotPrompt("choice", SHOTS, 1)
    assert copy.deepcopy(prompt) is prompt
