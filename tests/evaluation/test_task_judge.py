"""Verdicts of a judge behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import re

import pytest

from tests.host.test_judge import Stub, said
from weft.errors import UserError
from weft.evaluation.task_judge import (
    QUESTIONS,
    VERDICT,
    JudgeFilter,
    JudgeSettings,
    ask_judge,
    check_judge,
)

ITEMS = [{"prompt": "Say hi.", "reference": "hello"}, {"prompt": "Sum?", "reference": "7"}]


def open_judge(server: Stub) -> JudgeSettings:
    return JudgeSettings(server.url, "judge", cache=False)


def test_both_orders_of_a_comparison_are_averaged(server: Stub) -> None:
    def prefer_hi(text: str, number: int) -> object:
        first = text.split("# Answer 1\n")[1].split("\n")[0]
        return said(f"Fine.\nVerdict: {3 if first == 'hi' else 1}")

    server.reply = prefer_hi
    judge = open_judge(server)
    assert ask_judge(judge, QUESTIONS["comparison"], ITEMS[:1], ["hi"]) == [1.0]
    # A judge that always prefers the first place gives a tie.
    server.reply = lambda text, number: said("Verdict: 3")
    assert ask_judge(judge, QUESTIONS["comparison"], ITEMS, ["hi", "8"]) == [0.5, 0.5]
    assert len(server.bodies) == 2 + 4


@pytest.mark.parametrize(
    "answer", ["I like both.", "Verdict: NUMBER", "Verdict: 9", "Verdict: 2 or 3", "", "Verdict: 0"]
)
def test_garbage_is_no_verdict(server: Stub, answer: str) -> None:
    server.reply = lambda text, number: said(answer)
    assert ask_judge(open_judge(server), QUESTIONS["refusal"], ITEMS, ["a", "b"]) == [None, None]


def test_a_failing_request_is_no_verdict(server: Stub) -> None:
    server.reply = lambda text, number: (400, {}, {"error": "no"})
    assert ask_judge(open_judge(server), QUESTIONS["toxicity"], ITEMS[:1], ["a"]) == [None]


def test_an_echo_of_the_question_is_no_verdict() -> None:
    for question in QUESTIONS.values():
        assert not re.search(VERDICT, question.text)


def test_verdicts_stay_with_their_answers(server: Stub) -> None:
    server.reply = lambda text, number: said(f"Verdict: {2 if 'bad' in text else 1}")
    judged = JudgeFilter(open_judge(server), QUESTIONS["toxicity"])().apply(
        [["good", "bad"], ["bad", "good"]], ITEMS
    )
    assert [[each["verdict"] for each in own] for own in judged] == [[0.0, 1.0], [1.0, 0.0]]
    assert judged[0][1]["answer"] == "bad"


def test_the_judge_is_asked_before_the_run(server: Stub) -> None:
    server.reply = lambda text, number: said("hello")
    check_judge(open_judge(server))
    server.reply = lambda text, number: (404, {}, {"error": "no such model"})
    with pytest.raises(UserError, match=r"the judge does not answer: .*404") as caught:
        check_judge(open_judge(server))
    assert "on_failure" not in str(caught.value)
