"""Selection of the reward functions for each completion, by the option `reward` or a data column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.groups import PART
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer, find_step_tokens
from weft.errors import ConfigError, DataError
from weft.host._pool import Task
from weft.host.spec import RewardPart, RewardTarget, locate, parse_reward
from weft.registry import verifiers

# Verifier -> options that a row of the data must not set. For the judge: the server that receives
# the API key, the variable that contains the key, whether the key may be sent unencrypted, and the
# file of the cache.
FORBIDDEN_ROW_OPTIONS = {"judge": ("url", "api_key_env", "insecure", "cache")}


@dataclass(frozen=True)
class RoutedFunction:
    """Reward function of a `RewardRoute`, with its weight in the total reward.

    `target` is the function's index in `RewardRoutes.targets`. `args` are the keyword arguments
    that a dataset row specifies for this function.
    """

    target: int
    weight: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RewardRoute:
    """Set of reward functions whose weighted sum is the reward of a completion.

    Rows of the data that specify the same reward share one route.
    """

    functions: tuple[RoutedFunction, ...]


class RewardRoutes:
    """Registry of a run's reward functions, which finds the functions for each row of the data.

    By default, these are the functions of the option `reward`. If `column` is given, rows can name
    other functions in that data column. They can name only registered verifiers, so that a data
    file cannot make weft call arbitrary functions.

    `targets` are all functions that rows can use, and `labels` are their names in metrics. The
    constructor raises `ConfigError` if a function cannot be found.
    """

    def __init__(self, reward: Any, column: str | None, *, by_token: bool) -> None:
        if reward is None and column is not None:
            parts = []
        else:
            parts = parse_reward(reward)
        self.column = column
        targets = [locate(part) for part in parts]
        self.default_route = RewardRoute(
            tuple(RoutedFunction(index, part.weight) for index, part in enumerate(parts))
        )
        self._by_name: dict[str, int] = {}
        if column is not None:
            for name in verifiers.list_names():
                self._by_name[name] = len(targets)
                targets.append(locate(RewardPart(name), checked=False))
        self.targets: list[RewardTarget] = [
            replace(target, by_token=by_token) for target in targets
        ]
        self.labels = _make_distinct([target.label for target in targets])
        self._parsed_routes: dict[str, RewardRoute] = {}

    def find_routes(
        self, columns: Mapping[str, Sequence[Any]], ids: Sequence[str]
    ) -> list[RewardRoute]:
        """Return the route (set of reward functions) of each id, as specified in the id's row.

        The specification is the row's value in the column `column`. If this value is empty, or if
        `column` is None, the functions of the option `reward` are used. Raises `DataError` if the
        column is missing, if a value specifies anything but verifiers, or if a value is empty and
        `reward` is not set.
        """
        if self.column is None:
            return [self.default_route] * len(ids)
        if self.column not in columns:
            available = ", ".join(sorted(columns)) or "none"
            raise DataError(
                f"reward_column={self.column!r} is not a column; the dataset's columns are: "
                f"{available}"
            )
        routes: list[RewardRoute] = []
        for value, id in zip(columns[self.column], ids, strict=True):
            routes.append(self._find_route(value, id))
        return routes

    def _find_route(self, value: Any, id: str) -> RewardRoute:
        if value is None or value in ("", [], {}):
            if not self.default_route.functions:
                raise DataError(
                    f"{id}: the column {self.column!r} is empty in this row, and there is no "
                    f"default reward; set reward"
                )
            return self.default_route
        key = repr(value)
        if key not in self._parsed_routes:
            self._parsed_routes[key] = self._parse(value, id)
        return self._parsed_routes[key]

    def _parse(self, value: Any, id: str) -> RewardRoute:
        """Parse a row's entry in the reward column, and return the row's reward route.

        `value` is the entry, and `id` is the row's id. Raises `DataError`, naming the id, if the
        entry is invalid.
        """
        # Parse the parts, and check that a row can set them.
        try:
            parts = parse_reward(value)
            for part in parts:
                if ":" in part.name:
                    raise ConfigError(
                        f"reward: {part.name!r} is not a verifier; a row can name registered "
                        f"verifiers only"
                    )
                forbidden = []
                for name in FORBIDDEN_ROW_OPTIONS.get(part.name, ()):
                    if name in part.args:
                        forbidden.append(name)
                if forbidden:
                    raise ConfigError(
                        f"reward: a row must not set {', '.join(forbidden)} of {part.name!r}"
                    )
                locate(part)
        except ConfigError as error:
            raise DataError(
                f"{id}: column {self.column!r}: {str(error).removeprefix('reward: ')}"
            ) from None
        # Look up the functions; each verifier can appear once.
        names = [part.name for part in parts]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise DataError(
                f"{id}: column {self.column!r} names {repeated[0]!r} twice; list it once"
            )
        return RewardRoute(
            tuple(
                RoutedFunction(self._by_name[part.name], part.weight, part.args) for part in parts
            )
        )


def _make_distinct(labels: Sequence[str]) -> list[str]:
    """Return the labels with a number appended to repeated ones: f, f, f become f, f_2, f_3."""
    seen: dict[str, int] = {}
    distinct_labels = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        distinct_labels.append(label if seen[label] == 1 else f"{label}_{seen[label]}")
    return distinct_labels


RESERVED = ("prompts", "completions", "completion_ids")  # arguments that columns cannot replace


@dataclass(frozen=True)
class CompletionTexts:
    """Prompts, completions and data columns of a batch, decoded to text only when needed."""

    names: list[str]  # names of the completions in messages: "id[k]" is completion k of an id
    group: npt.NDArray[np.int64]  # index of each completion's prompt [S]
    prompt_ids: list[list[int]]  # token ids of each prompt
    completion_ids: list[list[int]]  # token ids of each completion
    columns: Mapping[str, list[Any]]  # columns of the dataset (the batch's metadata), by prompt
    tokenizer: Tokenizer

    @classmethod
    def from_batch(cls, batch: SequenceSample, tokenizer: Tokenizer) -> CompletionTexts:
        """Collect the prompts, completions and data columns of a batch.

        Columns with a reserved name, such as "prompts", are left out.
        """
        group = batch.group_of("completion")
        starts = batch.offsets["completion"][group]
        return cls(
            names=[
                f"{batch.ids[g]}[{n - start}]"
                for n, (g, start) in enumerate(zip(group, starts, strict=True))
            ],
            group=group,
            prompt_ids=[sequence.tolist() for sequence in batch.sequences("prompt")],
            completion_ids=[sequence.tolist() for sequence in batch.sequences("completion")],
            columns={
                name: list(values)
                for name, values in batch.metadata.items()
                if name not in (*RESERVED, PART)
            },
            tokenizer=tokenizer,
        )

    def select_inputs(self, chunk: Sequence[int]) -> tuple[Any, ...]:
        """Return the tokens and data columns of the completions with the indices `chunk`.

        The result is (prompt token ids, completion token ids, columns). Each of the two lists and
        each column has one entry per completion.
        """
        groups = self.group[list(chunk)].tolist()
        columns = {}
        for name, values in self.columns.items():
            columns[name] = [values[g] for g in groups]
        return (
            [self.prompt_ids[g] for g in groups],
            [self.completion_ids[n] for n in chunk],
            columns,
        )

    def build_task(self, chunk: Sequence[int]) -> Task:
        """Return the inputs of a reward function for the completions with the indices `chunk`.

        The result is (prompts, completions, completion token ids, columns), each with one entry per
        completion. Prompts and completions are decoded to text without special tokens.
        """
        groups = self.group[list(chunk)].tolist()
        prompts, ids, columns = self.select_inputs(chunk)
        texts = {}
        for g in dict.fromkeys(groups):
            texts[g] = self.tokenizer.decode(self.prompt_ids[g], skip_special=True)
        completions = []
        for prompt, token_ids in zip(prompts, ids, strict=True):
            completions.append(self.tokenizer.decode_after(prompt, token_ids, True))
        return [texts[g] for g in groups], completions, ids, columns

    def spread_over_tokens(
        self, position: int, value: Sequence[float | None] | Mapping[int, float]
    ) -> npt.NDArray[np.float64]:
        """Return the reward of each token of the completion with the index `position`, float64 [L].

        Tokens without a reward get NaN. `value` is either a list with one number or None per token,
        or a mapping from the end of each step (a character offset in the completion) to the step's
        reward. The reward of a step goes to the last token of the step.
        """
        ids = self.completion_ids[position]
        if not isinstance(value, Mapping):
            return np.array([np.nan if reward is None else reward for reward in value])
        ends = sorted(value)
        token_rewards = np.full(len(ids), np.nan)
        for index, end in zip(
            find_step_tokens(self.tokenizer, self.prompt_ids[self.group[position]], ids, ends),
            ends,
            strict=True,
        ):
            token_rewards[index] = np.nan_to_num(token_rewards[index]) + value[end]
        return token_rewards
