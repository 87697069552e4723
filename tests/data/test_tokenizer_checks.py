"""Chat templates that would never end or exhaust the memory are refused beforehand."""

from __future__ import annotations

import threading
import time

import pytest

from weft.data import tokenizer_checks
from weft.data.spec import TEMPLATES, read_template_text
from weft.data.tokenizer_checks import TimeLimitExceeded, find_template_problem, limit_time


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "does not compile, line 1"),
        ("\n{{ messages | nofilter }}", "does not compile, line 2"),
        ("{{ 'x' * 10**9 }}", "repeats a text 1,000,000,000 times, line 1"),
        ("{{ [1, 2, 3] | join('x' * 100000000) }}", "repeats a text"),
        ("{{ 10 ** (10 ** 8) }}", "takes a power of 1e+08"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "is nested too deeply"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "is nested too deeply"),
        (
            "{% for a in range(2000) %}{{ 'x' * 1000 }}{% endfor %}",
            "renders a greeting as 2,000,000 characters",
        ),
    ],
)
def test_what_a_template_may_not_do(template: str, said: str) -> None:
    assert said in str(find_template_problem(template))


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_checks, "GREETING_SECONDS", 0.05)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    assert "does not end within" in str(find_template_problem(loop))


def test_templates_that_refuse_a_greeting_or_mark_replies_are_none_of_these() -> None:
    for template in (
        "{{ raise_exception('no') }}",
        "{{ messages[9].content }}",
        "{{ 1 // 0 }}",
        "{% generation %}a{% endgeneration %}",
    ):
        assert find_template_problem(template) is None
    assert [name for name in TEMPLATES if find_template_problem(read_template_text(name))] == []


def test_what_ends_in_time_is_left_alone() -> None:
    with limit_time(0.5):
        pass
    time.sleep(0.6)
    with pytest.raises(TimeLimitExceeded), limit_time(0.02):
        while True:
            pass


def test_many_short_ones_are_watched_by_one_thread_which_then_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_checks, "IDLE_SECONDS", 0.1)
    for _ in range(100):
        with limit_time(5.0):
            pass
    watching = [thread for thread in threading.enumerate() if thread.name == "weft-templates"]
    assert len(watching) == 1
    watching[0].join(10.0)
    assert not watching[0].is_alive()
    with pytest.raises(TimeLimitExceeded, match=r"does not end within 0\.02 s"), limit_time(0.02):
        while True:
            pass
