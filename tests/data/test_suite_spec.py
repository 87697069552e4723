"""Options of `eval_suite`: options without effect are refused, and a run's plan shows the suite."""

from __future__ import annotations

from typing import Any

import pytest

from weft.data.suite_spec import EvalSuiteSpec
from weft.errors import ConfigError
from weft.options import read, validate


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 200}, r"eval_suite\.limit=200: only used with eval_suite\.tasks"),
        ({"data": {"gsm8k": "x"}}, r"eval_suite\.data=.*only used with eval_suite\.tasks"),
        ({"tasks": ["a"], "judge": "http://x"}, r"eval_suite\.judge_model=None: belong together"),
        (
            {"tasks": ["a"], "fewshot_as_multiturn": True},
            r"needs eval_suite\.apply_chat_template=true",
        ),
    ],
)
def test_options_without_effect_are_refused(values: dict[str, Any], message: str) -> None:
    EvalSuiteSpec().check()
    with pytest.raises(ConfigError, match=message):
        read(EvalSuiteSpec(), values).check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limit": 1.5}, "limit=1.5: must be a number of items, or a share below 1"),
        ({"limit": 0}, "limit=0: must be a number of items, or a share below 1"),
        ({"include_path": ["a", "gs://b/tasks"]}, "include_path=.*gs://b/tasks"),
        ({"data": {"gsm8k": "s3://b/x"}}, "data=.*s3://b/x"),
        ({"num_fewshot": -1}, "num_fewshot=-1: must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(read(EvalSuiteSpec(), values))


def test_the_plan_shows_tasks_and_items() -> None:
    assert EvalSuiteSpec().describe() == []
    spec = EvalSuiteSpec(["a", "b"], limit=2000, num_fewshot=3, apply_chat_template=True)
    assert spec.describe() == [
        "eval_suite: a, b; at most 2,000 items of each task; 3 examples in each prompt; asked in "
        "conversations"
    ]
    share = EvalSuiteSpec(["a"], limit=0.25).describe()
    assert share == ["eval_suite: a; the first 0.25 of the items of each task"]
