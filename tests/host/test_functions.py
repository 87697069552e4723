"""Advantages and filters written as one function, compared with classes that do the same."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError, UserError
from weft.host.base import HostContext, make_host_function
from weft.registry import register_advantage, register_filter


@register_advantage("test-centred")
def centred(rewards: Any, group: Any, scale: float = 1.0) -> Any:
    return scale * (
        rewards - np.array([rewards[group == one].mean() for one in range(group.max() + 1)])[group]
    )


@register_advantage("test-late", per="token")
def late(logprobs: Any, lengths: Any) -> Any:
    return logprobs + np.repeat(lengths, lengths)


@register_filter("test-hard")
def hard(rewards: Any, level: int, most: float = 0.5) -> bool:
    return bool(rewards.mean() <= most) and level > 1


def batch() -> SequenceSample:
    """Two prompts of two completions; the second token of the first is not trained."""
    counts = [[2, 1], [1, 3]]
    return SequenceSample.from_groups(
        ["a", "b"],
        {
            "prompt": [[1], [1]],
            "completion": counts,
            "loss_mask": counts,
            "logprobs": counts,
            "rewards": [[1, 1], [1, 1]],
            "finished": [[1, 1], [1, 1]],
        },
        {
            "prompt": torch.zeros(2, dtype=torch.int64),
            "completion": torch.arange(7),
            "loss_mask": torch.tensor([1.0, 0, 1, 1, 1, 1, 1]),
            "logprobs": -torch.arange(7.0),
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.0]),
            "finished": torch.ones(4),
        },
        {"level": [3, 1]},
    )


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_one_number_a_completion_lies_on_its_trained_tokens(kind: str) -> None:
    sample = batch().numpy() if kind == "numpy" else batch()
    context = HostContext()
    made = make_host_function("test-centred", {"scale": 2.0})(sample, context)
    assert made is not None
    assert made.data["advantages"].tolist() == [1.0, 0.0, -1.0, 0.5, -0.5, -0.5, -0.5]
    assert made.lengths["advantages"].tolist() == [2, 1, 1, 3]
    assert context.metrics["reward"] == 0.375
    assert isinstance(made.data["advantages"], np.ndarray if kind == "numpy" else torch.Tensor)


def test_it_equals_the_shipped_class() -> None:
    shipped = make_host_function("group_advantages", {"scale": "none"})(batch(), HostContext())
    own = make_host_function("test-centred", {})(batch(), HostContext())
    assert shipped is not None and own is not None
    # rewards and means that float32 holds exactly
    assert own.data["advantages"].tolist() == shipped.data["advantages"].tolist()


def test_one_number_a_token() -> None:
    made = make_host_function("test-late", {})(batch(), HostContext())
    assert made is not None
    assert made.data["advantages"].tolist() == [2.0, 0.0, -1.0, -2.0, -1.0, -2.0, -3.0]


def test_a_filter_sees_one_prompt_and_its_columns() -> None:
    context = HostContext()
    made = make_host_function("test-hard", {"most": 0.5})(batch(), context)
    assert made is not None
    assert made.ids == ("a",)
    assert made.data["kept"].tolist() == [1.0]
    assert context.metrics == {"kept_fraction": 0.5}


def test_wrong_readings_and_options() -> None:
    with pytest.raises(
        ConfigError, match="argument of host function 'test-hard': 'mots'; did you mean most"
    ):
        make_host_function("test-hard", {"mots": 1})
    with pytest.raises(ConfigError, match="argument of host function 'test-hard': 'level'"):
        make_host_function("test-hard", {"level": 1})
    with pytest.raises(DataError, match="no key 'rewards'"):
        make_host_function("test-centred", {})(
            batch().select(keys=["prompt", "completion"]), HostContext()
        )
    with pytest.raises(DataError, match=r"reads 'rewards'.*available: level"):
        make_host_function("test-hard", {})(batch().meta(), HostContext())


def test_a_result_of_another_shape_is_refused() -> None:
    def short(rewards: Any) -> Any:
        return rewards[:-1]

    register_advantage("test-short", short)
    with pytest.raises(
        ConfigError,
        match=r"short returned advantages of shape \(3,\); it must return one number per "
        r"completion, 4",
    ):
        make_host_function("test-short", {})(batch(), HostContext())
    register_advantage("test-odd", short, per="row")
    with pytest.raises(ConfigError, match="per of advantage"):
        make_host_function("test-odd", {})


@register_advantage("test-huge", per="token")
def huge(logprobs: Any, value: float = 0.0) -> Any:
    return np.where(np.arange(len(logprobs)) >= 4, value, 0.0)


@pytest.mark.parametrize("value", [1e308, -1e19, float("nan"), float("inf")])
def test_an_advantage_with_which_the_loss_is_not_finite_is_named(value: float) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"huge returned the advantage {value:g} for a completion of b")
    ):
        make_host_function("test-huge", {"value": value})(batch(), HostContext())
