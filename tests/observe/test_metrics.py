"""Titles and numbers of metrics, and the pace of a run."""

from __future__ import annotations

import math

import pytest

from weft.observe.metrics import (
    compute_rank,
    compute_tokens_per_second,
    find_headline,
    find_leading,
    find_title,
    format_duration,
    format_number,
    format_three_digits,
    get_direction,
)
from weft.observe.pace import RunPace, draw_sparkline


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            ["step", "actor_train/loss", "time/rew_inf", "rew_inf/reward", "rew_inf/reward_std"],
            "rew_inf/reward",
        ),
        (["train/loss", "train/grad_norm", "eval/loss"], "train/loss"),
        (["train/accuracy", "train/loss"], "train/loss"),
        (["train/accuracy"], "train/accuracy"),
        (["step", "eval/reward", "time/reward"], None),
        (["train/accuracy", "train/kendalltau", "train/loss"], "train/accuracy"),
        (["actor_train/loss", "actor_train/rewards/accuracies"], "actor_train/rewards/accuracies"),
    ],
)
def test_the_headline_is_reward_or_loss(names: list[str], wanted: str | None) -> None:
    assert find_headline(names) == wanted


@pytest.mark.parametrize(
    ("names", "algorithm", "wanted"),
    [
        (
            ["train/loss", "train/accuracy", "eval/loss", "eval/accuracy", "eval/a/loss"],
            "sft",
            "eval/loss",
        ),
        (["train/loss", "train/accuracy", "eval/loss", "eval/accuracy"], "rw", "eval/accuracy"),
        (
            ["actor_train/rewards/accuracies", "eval/rewards/accuracies", "eval/loss"],
            None,
            "eval/rewards/accuracies",
        ),
        (
            ["rew_inf/reward", "actor_train/loss", "eval/pass@1", "eval/reward"],
            "ppo",
            "eval/reward",
        ),
        (["rew_inf/reward", "actor_train/loss"], "ppo", "rew_inf/reward"),
        (["step", "step_seconds"], None, None),
    ],
)
def test_validation_goes_before_training(
    names: list[str], algorithm: str | None, wanted: str | None
) -> None:
    assert find_leading(names, algorithm) == wanted


def test_titles_of_validation_metrics_begin_with_eval() -> None:
    assert [
        find_title(name) for name in ("eval/reward", "eval/rewards/accuracies", "a/reward")
    ] == [
        "eval reward",
        "eval accuracy",
        "reward",
    ]


def test_more_reward_and_less_loss_are_better() -> None:
    assert [get_direction(n) for n in ("x/reward", "x/value_loss", "eval/a/accuracy", "x/kl")] == [
        1,
        -1,
        1,
        0,
    ]


def test_informative_names_come_first_and_evaluations_next_to_their_metric() -> None:
    names = ["a/mfu", "a/kl", "eval/loss", "a/reward", "a/loss"]
    assert sorted(names, key=compute_rank) == ["a/reward", "eval/loss", "a/loss", "a/kl", "a/mfu"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[
            (0.0213, "0.0213"),
            (1234.56, "1,235"),
            (12345.6, "12,346"),
            (0.1 + 0.2, "0.3"),
            (-0.0123456, "-0.01235"),
        ],
        *[
            (3.14e-7, "3.14e-7"),
            (0, "0"),
            (60, "60"),
            (1e-4, "0.0001"),
            (math.nan, "–"),
            (None, "–"),
            (9.99999, "10"),
        ],
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.14, "3.1 s"), (61, "1:01"), (3723, "1:02:03"), (200000, "2 d 7 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_tokens_a_second_are_of_the_whole_step() -> None:
    line = {"step_seconds": 2.0, "actor_train/num_tokens": 500.0, "critic_train/num_tokens": 400.0}
    assert compute_tokens_per_second(line) == 250.0
    assert compute_tokens_per_second({"step_seconds": 2.0, "train/tokens_per_second": 7.0}) == 7.0
    assert compute_tokens_per_second({"step_seconds": 2.0}) is None


def test_a_sparkline_keeps_the_shape_in_few_signs() -> None:
    assert draw_sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline(range(800), 8) == "▁▂▃▄▅▆▇█"
    assert draw_sparkline([2.0, 2.0], 8) == "▄▄"
    assert (draw_sparkline([], 8), draw_sparkline([1.0], 0)) == ("", "")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_remaining_time_includes_the_time_between_steps() -> None:
    clock = Clock()
    pace = RunPace(clock=clock)
    pace.expect(10, 4)
    assert pace.remaining is None
    for step in (5, 6):
        clock.now += 3.0  # of which the step itself took 1
        pace.record_step({"step": step, "step_seconds": 1.0, "a/loss": 1.0 / step, "epoch": 0.5})
    assert pace.remaining == pytest.approx(12.0)
    assert pace.format_line() == "step  6/10  epoch 0.50  loss 0.1667  1 s  ETA 12.0 s".replace(
        "1 s  ETA", "1.0 s  ETA"
    )


def test_a_line_says_step_epoch_reward_tokens_seconds_and_eta() -> None:
    clock = Clock()
    pace = RunPace(clock=clock)
    pace.expect(60, 0)
    clock.now += 2.0
    line = {
        "step": 1,
        "epoch": 0.02,
        "step_seconds": 2.0,
        "r/reward": -0.25,
        "t/kl": 0.01,
        "t/num_tokens": 4000.0,
    }
    pace.record_step(line | {"eval/reward": -0.5})
    text = pace.format_line()
    assert (
        text
        == "step  1/60  epoch 0.02  eval reward -0.5  reward -0.25  KL 0.01  2,000 tokens/s  2.0 s  ETA 1:58"
    )


def test_best_and_summary_follow_the_direction() -> None:
    pace = RunPace(clock=Clock())
    for step, loss in enumerate([3.0, 1.0, 2.0], 1):
        pace.record_step({"step": step, "train/loss": loss})
    assert pace.best == 1.0
    assert pace.format_summary("finished") == "finished after step 3 in 0.0 s, loss 3 -> 2 (-1)"


def test_large_numbers_have_no_exponent() -> None:
    values = (0.01234, 12.34, 999.4, 999.6, 2807.4)
    assert [format_three_digits(value) for value in values] == [
        "0.0123",
        "12.3",
        "999",
        "1,000",
        "2,807",
    ]
