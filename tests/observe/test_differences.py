"""Options and reward sources that count as differences between runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.observe.differences import find_differences, find_incomparable_options
from weft.observe.run_files import RunFiles

RUN = {"experiment_name": "e", "trial_name": "t"}


def files(config: dict[str, Any], *chosen: str) -> RunFiles:
    return RunFiles(Path("run"), config=RUN | config, record={"chosen": list(chosen)})


def test_options_of_another_algorithm_count_if_they_are_set() -> None:
    one = files({"max_steps": 3, "ppo": {"eps_clip": 0.1, "gae_lambda": 0.95, "discount": 0.5}})
    other = files({"max_steps": 4, "grpo": {"group_size": 8}})
    assert find_differences([one, other]) == {
        "algorithm": ["ppo", "grpo"],
        "max_steps": [3, 4],
        "ppo.eps_clip": [0.1, None],
        "ppo.discount": [0.5, None],
    }


def test_the_same_option_of_two_algorithms_is_one() -> None:
    one, other = (
        files({"ppo": {"gen": {"max_new_tokens": 4}}}),
        files({"grpo": {"gen": {"max_new_tokens": 4}}}),
    )
    assert find_differences([one, other]) == {"algorithm": ["ppo", "grpo"]}
    longer = files({"grpo": {"gen": {"max_new_tokens": 8}}})
    assert find_differences([one, longer])["grpo|ppo.gen.max_new_tokens"] == [4, 8]
    assert find_differences([longer, other]) == {"grpo.gen.max_new_tokens": [8, 4]}


def test_options_chosen_by_weft_differ_only_if_a_run_sets_them() -> None:
    chosen = files({"sft": {}, "dataset": {"max_seqlen": 64}}, "dataset.max_seqlen")
    for other in (
        files({"dataset": {"max_seqlen": None}}),
        files({"dataset": {"max_seqlen": 9}}, "dataset.max_seqlen"),
    ):
        assert find_differences([chosen, other]) == {}
    assert find_differences([chosen, files({"dataset": {"max_seqlen": 9}})]) == {
        "dataset.max_seqlen": [64, 9]
    }
    assert (
        find_differences(
            [
                files({"rew": {"backend": "torch"}}, "rew.backend"),
                files({"rew": {"backend": "auto"}}),
            ]
        )
        == {}
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"reward": "gsm8k"}, {"reward": "gsm8k", "rew": {"path": None}}, True),
        ({"reward": "gsm8k"}, {"reward": "math"}, False),
        ({"reward": "gsm8k"}, {"rew": {"path": "m"}}, False),
        ({"reward": "gsm8k", "rew": {"path": "m"}}, {"reward": "gsm8k"}, False),
        ({"rew": {"path": "m"}}, {"rew": {"path": "n"}}, False),
        ({"reward": "gsm8k"}, {"model": {"path": "a"}}, True),
    ],
)
def test_options_that_define_the_reward(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    found = find_incomparable_options(
        [files(one), files(other)], ["rew_inf/reward", "reward/reward"]
    )
    assert (not found) is same
