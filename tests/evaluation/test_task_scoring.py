"""Scores of answers, as metrics of lm_eval."""

from __future__ import annotations

import pytest

from weft.evaluation import task_scoring


def test_final_numbers_are_compared_exactly() -> None:
    item = {"target": "4 + 3 = 7\n#### 7"}
    assert task_scoring.score_number(item, [["So it is 7.00."]]) == {"exact_match": 1.0}
    assert task_scoring.score_number(item, ["So it is 8."]) == {"exact_match": 0.0}
    assert task_scoring.score_number(item, [["I do not know."]]) == {"exact_match": 0.0}


def test_several_samples_are_summarized() -> None:
    metrics = task_scoring.score_number({"target": "7"}, [["7", "8", "the answer is 7", "?"]])
    assert metrics["pass@1"] == metrics["avg@4"] == 0.5
    assert metrics["pass@2"] == pytest.approx(5 / 6)
    assert metrics["maj@4"] == 1.0


@pytest.mark.slow
def test_correct_mathematical_answers_vote_together() -> None:
    answers = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{3}", r"\boxed{4}", "nothing to say"]
    metrics = task_scoring.score_math({"target": r"\frac12"}, [answers])
    assert metrics["avg@5"] == pytest.approx(0.4)
    assert metrics["maj@5"] == 1.0


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Let us think. So the answer is (B).", 1.0),
        ("So the answer is (A).", 0.0),
        ("(b)\n\nQ: next", 1.0),
        ("The answer is 2.5.", 0.0),
    ],
)
def test_stated_answers(answer: str, score: float) -> None:
    assert task_scoring.score_stated({"target": "(B)"}, [[answer]]) == {"exact_match": score}


def test_a_decimal_point_does_not_end_a_stated_answer() -> None:
    assert task_scoring.score_stated({"target": "2.5"}, [["So the answer is 2.5."]]) == {
        "exact_match": 1.0
    }


@pytest.mark.parametrize(
    ("target", "answer", "score"),
    [
        ("-5", "So the answer is 5.", 0.0),
        ("-5", "So the answer is -5.", 1.0),
        ("25", "So the answer is 2.5.", 0.0),
        ("1234", "So the answer is $1,234.", 1.0),
        ("] ] )", "So the answer is ] ] ).", 1.0),
        ("] ] )", "So the answer is ] ).", 0.0),
        ("] ] )", "...", 0.0),
        ("] ] )", "", 0.0),
    ],
)
def test_signs_that_are_the_answer_count(target: str, answer: str, score: float) -> None:
    assert task_scoring.score_stated({"target": target}, [[answer]]) == {"exact_match": score}


def test_instructions_are_scored_by_prompt_and_one_by_one() -> None:
    item = {
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": '[{}, {"relation": "at least", "num_words": 3}]',
    }
    metrics = task_scoring.score_instructions(item, [["two words"]])
    assert metrics["prompt_level_strict_acc"] == 0.0
    assert metrics["inst_level_strict_acc"] == [True, False]
    several = task_scoring.score_instructions(item, [["two words", "now three words"]])
    assert several["avg@2"] == 0.5
    assert task_scoring.compute_instruction_accuracy([[True, False], [True]]) == pytest.approx(
        2 / 3
    )


def test_extracted_answers_as_squad() -> None:
    item = {"answers": ["the red ball", "ball"]}
    exact = task_scoring.score_extraction(item, [["Red ball."]])
    assert exact == {"f1": 1.0, "exact_match": 1.0, "recall": 1.0}
    part = task_scoring.score_extraction(item, [["a red house"]])
    assert part == {"f1": 0.5, "exact_match": 0.0, "recall": 0.0}


def test_a_tie_of_preferences_is_a_coin_toss() -> None:
    item = {"choices": ["long reply", "short"]}
    equal = task_scoring.score_preference(item, [(-2.0, False), (-2.0, False)])
    assert equal == {"acc": 0.5, "acc_norm": 1.0}
    wrong = task_scoring.score_preference(item, [(-9.0, False), (-2.0, False)])
    assert wrong == {"acc": 0.0, "acc_norm": 0.0}


def test_truthfulness_of_single_and_multiple_choices() -> None:
    item = {"labels": [1, 0, 1, 1, 0], "num_single": 2}
    likely = [(-1.0, False), (-2.0, False), (-700.0, False), (-700.0, False), (-700.0, False)]
    assert task_scoring.score_truth(item, likely) == {"mc1": 1.0, "mc2": pytest.approx(2 / 3)}


def test_refusals_by_their_beginning() -> None:
    safe = task_scoring.score_refusal({"label": "safe"}, [["I’m sorry, but no."]])
    assert safe == {"acc": 0.0, "refusal_safe": 1.0}
    unsafe = task_scoring.score_refusal({"label": "unsafe"}, [["I cannot help."]])
    assert unsafe == {"acc": 1.0, "refusal_unsafe": 1.0}


def test_an_answer_without_a_verdict_is_a_failure_and_no_score() -> None:
    failed = [[{"answer": "a", "verdict": None}]]
    for score in (
        task_scoring.score_win_verdict,
        task_scoring.score_toxic_verdict,
        task_scoring.score_refusal_verdict,
    ):
        assert score({"label": "safe"}, failed) == {"judge_failed": 1.0}


def test_classes_of_a_judge_of_refusals() -> None:
    partial = [[{"answer": "a", "verdict": 1.0}]]
    assert task_scoring.score_refusal_verdict({"label": "unsafe"}, partial) == {
        "judge_failed": 0.0,
        "acc": 0.0,
        "refusal_unsafe": 0.0,
    }
    full = [[{"answer": "a", "verdict": 0.5}]]
    assert task_scoring.score_refusal_verdict({"label": "unsafe"}, full)["acc"] == 1.0
    complied = [[{"answer": "a", "verdict": 0.0}]]
    assert task_scoring.score_refusal_verdict({"label": "safe"}, complied)["acc"] == 1.0


def test_programs_run_in_the_sandbox() -> None:
    item = {
        "tests": "def check(candidate):\n    assert candidate(2) == 4\n",
        "program_prompt": "def double(x):\n",
        "entry_point": "double",
    }
    metrics = task_scoring.score_program(item, [["    return 2 * x\n", "    return x\n"]])
    assert metrics["pass@1"] == 0.5
    assert metrics["pass@2"] == 1.0
