"""The 25 instructions: each with a response that follows it and one that does not, and the real
rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import DataError
from weft.host.verifiers.ifeval import CHECKS, count_sentences, ifeval, is_followed

BOTH = [  # instruction, arguments, a response that follows it, one that does not
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Cat and a dog.", "A cat."),
    (
        "keywords:frequency",
        {"keyword": "war", "relation": "at least", "frequency": 2},
        "War and war.",
        "War.",
    ),
    (
        "keywords:frequency",
        {"keyword": "war", "relation": "less than", "frequency": 2},
        "War.",
        "war WAR",
    ),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category.", "A cat."),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_relation": "at least", "let_frequency": 2},
        "quiQ",
        "queen",
    ),
    (
        "language:response_language",
        {"language": "de"},
        "Das ist ein Satz und er ist nicht lang.",
        "This is the one.",
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "at least", "num_sentences": 2},
        "One. Two!",
        "One of Mr. X.",
    ),
    (
        "length_constraints:number_sentences",
        {"relation": "less than", "num_sentences": 2},
        "Just 3.5 of it",
        "A. b? c",
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "One\n***\nTwo",
        "One\n***\n\n***\nTwo",
    ),
    (
        "length_constraints:number_words",
        {"relation": "at least", "num_words": 3},
        "one two three",
        "one two",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'One\n\n"Then, two',
        "Then\n\nTwo",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] at [place]",
        "[name]",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. more", "Bye."),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "Bye.\nP.P.S more",
        "P.S. more",
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "* one\n- two",
        "* one\n* two\n* three",
    ),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "Maybe."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*one* and **two**",
        "*one* and **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<My title>>\ntext", "<<>> <title>"),
    ("combination:two_responses", {}, "One\n******\nTwo", "Same******Same"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Said.", "Said."),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        'So "it was. the end."',
        "The end. Or not.",
    ),
    ("startend:quotation", {}, ' "All of it." ', '"Part" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "less than", "capital_frequency": 2},
        "Only ONE here",
        "ONE and TWO",
    ),
    ("change_case:english_capital", {}, "ALL OF THIS IS LOUD.", "ALL OF this."),
    ("change_case:english_lowercase", {}, "this is the quiet one.", "This is the one."),
    ("punctuation:no_comma", {}, "None here.", "One, here."),
]


@pytest.mark.parametrize(("instruction", "arguments", "good", "bad"), BOTH)
def test_each_instruction(instruction: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    assert is_followed(good, instruction, arguments)
    assert not is_followed(bad, instruction, arguments)
    assert not is_followed("  ", instruction, arguments)


def test_deeply_nested_brackets_are_no_json() -> None:
    assert not is_followed("[" * 100_000, "detectable_format:json_format", {})


def test_all_instructions_are_tried() -> None:
    assert {case[0] for case in BOTH} == set(CHECKS)
    assert len(CHECKS) == 25


def test_the_real_rows(data_dir: Path) -> None:
    """Every row can be scored; answers made for one instruction follow it."""
    rows = [json.loads(line) for line in (data_dir / "ifeval" / "input_data.jsonl").open()]
    assert {id for row in rows for id in row["instruction_id_list"]} == set(CHECKS)
    columns = {
        name: [row[name] for row in rows] for name in ("instruction_id_list", "kwargs", "key")
    }
    prompts = [row["prompt"] for row in rows]
    made = ifeval(
        prompts, ["A plain reply, with a comma."] * len(rows), completion_ids=[], **columns
    )
    assert len(made) == 541
    assert all(reward is not None and 0.0 <= reward <= 1.0 for reward in made)
    strict = ifeval(prompts, prompts, completion_ids=[], score="all", **columns)
    loose = ifeval(prompts, prompts, completion_ids=[], score="all", loose=True, **columns)
    assert all(one <= other for one, other in zip(strict, loose, strict=True))  # type: ignore[operator]
    assert sum(loose) > sum(strict) > 0  # type: ignore[type-var, arg-type]
    for row in rows:
        for id, arguments in zip(row["instruction_id_list"], row["kwargs"], strict=True):
            if id == "combination:repeat_prompt":
                assert is_followed(arguments["prompt_to_repeat"] + " Done.", id, arguments)
            if id == "startend:end_checker":
                assert is_followed("Well. " + arguments["end_phrase"], id, arguments)
            if id == "keywords:existence":
                assert is_followed(" ".join(arguments["keywords"]), id, arguments)


def test_scores() -> None:
    row: dict[str, Any] = {
        "instruction_id_list": [["punctuation:no_comma", "startend:quotation"], None],
        "kwargs": [[{}, {}], None],
    }
    assert ifeval(["", ""], ["no comma", "x"], completion_ids=[], **row) == [0.5, None]
    assert ifeval(["", ""], ["no comma", "x"], completion_ids=[], score="all", **row) == [0.0, None]


def test_the_loose_reading() -> None:
    response = "Sure, here it is:\n*no comma in this*\nHope that helps, bye"
    assert not is_followed(response, "punctuation:no_comma", {})
    assert is_followed(response, "punctuation:no_comma", {}, loose=True)


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(DataError, match="did you mean punctuation:no_comma"):
        is_followed("x", "punctuation:no_commas", {})
    with pytest.raises(DataError, match="num_words"):
        is_followed(
            "x", "length_constraints:number_words", {"relation": "at least", "num_words": None}
        )
    with pytest.raises(DataError, match="kwargs"):
        ifeval(
            [""],
            ["x"],
            completion_ids=[],
            instruction_id_list=[["punctuation:no_comma"]],
            kwargs=[[]],
        )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Mr. Smith has e.g. 3.5 dogs.", 1),
        ('He said "Go!" Then he left.', 2),
        ("No end", 1),
        ("", 0),
        ("Well... yes. ", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert count_sentences(text) == count
