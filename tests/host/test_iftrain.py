"""IFBench's 29 training instructions: for each, a response that follows it and ones that do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.host.instructions import Case, check_missing_arguments, check_verdicts
from weft.errors import DataError
from weft.host.verifiers._iftrain import CHECKS, split_at_marks
from weft.host.verifiers.ifeval import ifeval

REQUEST = {"prompt_to_repeat": "Say it now."}
PHRASE = {"phrase": "time flies when having fun", "small_n": 2}

CASES: list[Case] = [
    # instruction, arguments, responses that follow it, responses that do not
    (
        "copy:repeat_phrase",
        PHRASE,
        ["time flies while having fun, time goes when having fun"],
        ["time flies while having fun", "time flies when having fun, time goes when having fun"],
    ),
    ("copy:copy", REQUEST, [" say it now."], ["Say it.", "Say it now. Done."]),
    ("copy:copying_simple", REQUEST, ["SAY IT NOW."], ["Say it."]),
    (
        "copy:copying_multiple",
        {**REQUEST, "N": 2},
        ["Say it now.\n******\nsay it now."],
        ["Say it now.", "Say it now.******Say it.", "Say it now.******Say it now.******"],
    ),
    ("new:copy_span_idx", {**REQUEST, "n_start": 4, "n_end": 6}, ["IT"], ["it n", "t"]),
    ("detectable_format:sentence_hyphens", {}, ["I am.-You are."], ["I am. - You are.", "I-am."]),
    ("detectable_format:square_brackets", {}, ["[One] [two.]"], ["[One] two", "[One two]"]),
    ("detectable_format:bigram_wrapping", {}, ["<<I am>> <<at home>> now"], ["<<I am>> at home"]),
    ("keywords:no_adjacent_consecutive", {}, ["All cats eat."], ["All big cats.", "I just."]),
    ("keywords:word_once", {"keyword": "cat"}, ["A Category."], ["A dog.", "cat, cat"]),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["Cat and cat."],
        ["A cat."],
    ),
    (
        "keywords:word_count_different_numbers",
        {"keyword": "cat", "frequency": 2, "relation": "less than"},
        ["A cat."],
        ["Cat and cat."],
    ),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, ["A dog, cat."], ["A cat is here."]),
    ("keywords:palindrome", {}, ["I see the level sea."], ["See the sea."]),
    (
        "keywords:keyword_specific_position",
        {"keyword": "cat", "n": 2, "m": 2},
        ["I see. A cat."],
        ["A cat.", "I see. A Cat.", "I see. A big cat."],
    ),
    ("keywords:start_end", {}, ["Go and go"], ["Go and go.", "Go"]),
    (
        "paragraphs:paragraphs",
        {},
        ["One\n***\nTwo", "***One***Two"],
        ["One", "a***b***c", "a******b"],
    ),
    ("paragraphs:paragraphs2", {}, ["One\n\nTwo\n"], ["One\nTwo", "One\n\n\n\nTwo"]),
    ("first_word:first_word_sent", {"first_word": "we"}, ["We go. We see!"], ["We go. I see!"]),
    ("first_word:first_word_sent", {"first_word": ["we"]}, ["We go."], ["I go."]),
    ("first_word:first_word_answer", {"first_word": "we"}, ["We go. I see."], ["I see. We go."]),
    ("last_word:last_word_sent", {"last_word": "it"}, ["I see it. Is it?"], ["I see it. Go."]),
    ("last_word:last_word_answer", {"last_word": "it"}, ["Go. I see it!"], ["I see it. Go."]),
    ("punctuation:punctuation_dot", {}, ["No dot!"], ["A dot.", "3.5"]),
    ("punctuation:punctuation_exclamation", {}, ["None."], ["One!"]),
    ("count:lowercase_counting", {"N": 2}, ["This is it"], ["this is it"]),
    (
        "count:counting_composition",
        {"n_sent": 2, "n_words": 3},
        ["Go on. I am.\n***\nWe do. You are.\n***\nThey do. It is."],
        ["Go on. I am.", "Go on. I am.\n***\nWe do.\n***\nThey do. It is.", "***a b.***c d."],
    ),
    ("count:count_unique", {}, ["One two three."], ["One and one and.", "a, b, c"]),
    (
        "count:count_increment_word",
        {"keyword1": "cat", "keyword2": "dog"},
        ["Dog, cat, dog."],
        ["Dog, cat.", "cat dog cat dog"],
    ),
    ("letters:letter_counting", {"N": 3, "relation": "at least"}, ["a b c"], ["a b 3"]),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, ["a b 3"], ["abc"]),
    (
        "letters:letter_counting2",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        ["quiQ"],
        ["queen"],
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_each_instruction(case: Case) -> None:
    check_verdicts(case)


def test_all_instructions_are_tried() -> None:
    assert {case[0] for case in CASES} == set(CHECKS)
    assert len(CHECKS) == 29


@pytest.mark.parametrize(("instruction", "arguments"), [case[:2] for case in CASES if case[1]])
def test_a_missing_argument_is_named(instruction: str, arguments: dict[str, Any]) -> None:
    check_missing_arguments(instruction, [*arguments])


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. No. He is 3.5 km.\nOk", ["Dr. No.", "He is 3.5 km.", "Ok"]),
        ("See weft.org and e.g. it... Done?! ", ["See weft.org and e.g. it...", "Done?", "!"]),
        ('He said "Go." I went.', ['He said "Go".', "I went."]),
        ("J. R. lives in the U.S. He is Ph.D. at X Inc. there.", 2),
    ],
)
def test_sentences_by_rules(text: str, sentences: Any) -> None:
    found = split_at_marks(text)
    assert (len(found) if isinstance(sentences, int) else found) == sentences


GROUND_TRUTH = "[{'instruction_id': ['punctuation:punctuation_dot', 'count:count_unique'], 'kwargs': [None, {}]}]"


@pytest.mark.parametrize(
    ("truth", "reward"),
    [
        (GROUND_TRUTH, 0.5),
        (GROUND_TRUTH.replace("'", '"').replace("None", "null"), 0.5),
        (repr([GROUND_TRUTH[1:-1].replace("'", '"').replace("None", "null")]), 0.5),
        ("72", None),
        (None, None),
    ],
)
def test_the_form_of_the_training_data(truth: str | None, reward: float | None) -> None:
    made = ifeval(["p"], ["Go on and on"], completion_ids=[[]], ground_truth=[truth])
    assert made == [reward]


def test_data_without_instructions() -> None:
    with pytest.raises(DataError, match=r"needs the columns 'instruction_id_list'.*has: answer"):
        ifeval(["p"], ["c"], completion_ids=[[]], answer=["7"])
    with pytest.raises(DataError, match="ground_truth must be"):
        ifeval(["p"], ["c"], completion_ids=[[]], ground_truth=["[{'instruction_id': 3"])
