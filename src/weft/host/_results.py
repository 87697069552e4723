"""Validation of what reward functions return, in the process that called them.

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

# Reward of a completion (None: does not apply), of each of its tokens, or of its steps, keyed by
# their end positions in the text
Value = float | None | list[float | None] | dict[int, float]

# Largest absolute value of a reward: the square of a larger one overflows float32, in which losses
# are computed
MAX_REWARD = 1e18


class InvalidRewardResult(Exception):
    """Raised if a reward function has an invalid signature or returns an invalid result.

    `text` is the reason. `index` is the index of the affected completion, or None if several
    completions can be affected.
    """

    def __init__(self, text: str, index: int | None = None) -> None:
        super().__init__(text)
        self.index = index


@dataclass(frozen=True)
class RewardResultCheck:
    """Validator of the result of a reward function for a list of completions.

    `texts` and `ids` are the texts and token ids of these completions. With `by_token`, the
    function may also return rewards for single tokens or steps of a completion.
    """

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    by_token: bool

    def validate(self, result: Any) -> tuple[list[Value], dict[str, float]]:
        """Check the result of a reward function, and return its rewards and metrics.

        `result` is a list with one reward per completion, or a tuple of such a list and a mapping
        of metrics. A reward is None or a number from -`MAX_REWARD` to `MAX_REWARD`. With
        `by_token`, it can also be a list with a number or None for each token, or a mapping from
        the end positions of steps (in characters of the completion) to numbers. Raises
        `InvalidRewardResult` for anything else.
        """
        metrics: dict[str, float] = {}
        if (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], Mapping)
            and all(isinstance(name, str) for name in result[1])
        ):
            result, raw_metrics = result
            metrics = {name: _validate_metric(name, value) for name, value in raw_metrics.items()}
        if isinstance(result, (str, bytes, Mapping)) or not (
            isinstance(result, Sized) and isinstance(result, Iterable)
        ):
            raise InvalidRewardResult(
                f"it returned a {type(result).__name__}; return a list with one number or None "
                f"for each completion"
            )
        if len(result) != len(self.texts):
            raise InvalidRewardResult(
                f"it returned {len(result)} rewards for {len(self.texts)} completions; return one "
                f"for each"
            )
        return [self._validate_value(value, index) for index, value in enumerate(result)], metrics

    def _validate_value(self, value: Any, index: int) -> Value:
        if isinstance(value, Mapping) and self.by_token:
            return self._validate_steps(value, index)
        if isinstance(value, (list, tuple)) and self.by_token:
            count = len(self.ids[index])
            if len(value) != count:
                raise InvalidRewardResult(
                    f"it returned {len(value)} rewards for the {count} tokens of a completion; "
                    f"return one for each token, "
                    "None for tokens without a reward",
                    index,
                )
            return [_validate_number(reward, index) for reward in value]
        if isinstance(value, (Mapping, list, tuple)):
            raise InvalidRewardResult(
                f"it returned a {type(value).__name__} for a completion; return a number, or set "
                f"reward_by_token=true for "
                "rewards of tokens or steps",
                index,
            )
        return _validate_number(value, index)

    def _validate_steps(self, value: Mapping[Any, Any], index: int) -> dict[int, float]:
        length = len(self.texts[index])
        step_rewards = {}
        for end, reward in value.items():
            number = _validate_number(reward, index)
            if (
                isinstance(end, bool)
                or not isinstance(end, int)
                or not 0 < end <= length
                or number is None
            ):
                raise InvalidRewardResult(
                    f"it returned the step {end!r}: {reward!r} for a completion of {length} "
                    f"characters; give a step as its end position "
                    f"in characters, from 1 to {length}, and a number",
                    index,
                )
            step_rewards[end] = number
        return step_rewards


def _validate_metric(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRewardResult(
            f"it returned the metric {name}={value!r}; a metric is a finite number, which is "
            f"summed over the batch"
        )
    return float(value)


def _validate_number(value: Any, index: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidRewardResult(
            f"it returned {value!r} ({type(value).__name__}); return a number, or None where the "
            f"reward does not apply",
            index,
        ) from None
    if not math.isfinite(number):
        raise InvalidRewardResult(
            f"it returned {number}; return a finite number, or None where the reward does not "
            f"apply",
            index,
        )
    if abs(number) > MAX_REWARD:
        raise InvalidRewardResult(
            f"it returned {number:g}; the absolute value of a reward must be at most "
            f"{MAX_REWARD:g}, or the loss is not finite: scale the reward",
            index,
        )
    return number
