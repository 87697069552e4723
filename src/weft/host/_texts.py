"""Inputs of reward functions: texts, token ids and columns, with one entry per completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.groups import PART
from weft.data.sample import SequenceSample
from weft.data.steps import find_step_tokens
from weft.data.tokenizer import Tokenizer
from weft.host._pool import Task

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
        for prompt, each in zip(prompts, ids, strict=True):
            completions.append(self.tokenizer.decode_after(prompt, each, True))
        return [texts[g] for g in groups], completions, ids, columns

    def spread_over_tokens(
        self, place: int, value: Sequence[float | None] | Mapping[int, float]
    ) -> npt.NDArray[np.float64]:
        """Return the reward of each token of the completion with the index `place`, float64 [L].

        Tokens without a reward get NaN. `value` is either a list with one number or None per token,
        or a mapping from the end of each step (a character offset in the completion) to the step's
        reward. The reward of a step goes to the last token of the step.
        """
        ids = self.completion_ids[place]
        if not isinstance(value, Mapping):
            return np.array([np.nan if each is None else each for each in value])
        ends = sorted(value)
        token_rewards = np.full(len(ids), np.nan)
        for index, end in zip(
            find_step_tokens(self.tokenizer, self.prompt_ids[self.group[place]], ids, ends),
            ends,
            strict=True,
        ):
            token_rewards[index] = np.nan_to_num(token_rewards[index]) + value[end]
        return token_rewards
