"""Lengths of a run's rows, taken from a sample of the data, for estimates of time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from weft.data.splits import split_evenly

MAX_BATCHES = 8  # batches whose division over ranks is tried

Counts = npt.NDArray[np.int64]
RowBatch = tuple[tuple[int, int], ...]  # (tokens, answer tokens) of each row


@dataclass(frozen=True)
class RowLengths:
    """Lengths of a sample of rows, in tokens.

    Attributes:
        prompts: Length of each row's prompt.
        answers: Length of each answer in the rows; empty if the rows are only prompts.
        saved_share: Share of the tokens of a batch that need not be computed, because its rows
            begin with the same tokens.
    """

    prompts: Counts
    answers: Counts
    saved_share: float = 0.0

    @property
    def mean_prompt(self) -> float:
        """Mean length of a prompt."""
        return float(self.prompts.mean())

    @property
    def mean_answer(self) -> float:
        """Mean length of an answer in the rows; 0 without answers."""
        return float(self.answers.mean()) if len(self.answers) else 0.0

    def compute_attended_length(self, answer: float) -> float:
        """Return the mean length of the sequence of a token.

        `answer` is the number of tokens after each prompt if the rows have no answers.
        """
        if len(self.answers):
            per_prompt = len(self.answers) // len(self.prompts)
            prompts = np.repeat(self.prompts, per_prompt)
            sequences = prompts + self.answers[: per_prompt * len(self.prompts)]
            lengths = sequences.astype(np.float64)
        else:
            lengths = self.prompts.astype(np.float64) + answer
        return float((lengths**2).sum() / max(1.0, float(lengths.sum())))

    def list_batches(self, batch: int, samples: int, answer: int) -> tuple[RowBatch, ...]:
        """Return the (tokens, answer tokens) of each row of some batches of `batch` rows.

        Rows without answers get `samples` answers of `answer` tokens. A prompt counts once for each
        of its answers.
        """
        count = len(self.prompts)
        per_prompt = len(self.answers) // count
        if per_prompt:
            answers = self.answers[: per_prompt * count].reshape(count, per_prompt).sum(1)
        else:
            per_prompt = samples
            answers = np.full(count, samples * answer, np.int64)
        tokens = per_prompt * self.prompts + answers
        pairs = list(zip(tokens.tolist(), answers.tolist(), strict=True))
        batches = []
        for first in range(0, len(pairs) - batch + 1, batch):
            batches.append(tuple(pairs[first : first + batch]))
        return tuple(batches[:MAX_BATCHES])

    def compute_shared_tokens(self, least: int, samples: int, spared: int) -> float:
        """Return the mean number of tokens of a prompt that its `samples` sequences share.

        A prompt is shared except for its last token if it has `least` tokens or more, and if this
        saves `spared` tokens.
        """
        shared = np.maximum(self.prompts - 1, 0)
        worth = (self.prompts >= least) & (shared * (samples - 1) >= spared)
        return float(np.where(worth, shared, 0).mean())


@lru_cache(maxsize=256)
def compute_imbalance(batches: tuple[RowBatch, ...], ranks: int) -> tuple[float, float]:
    """Return how unequally data-parallel ranks share tokens, and how unequally answer tokens.

    Each is the share of the rank with the most of them, relative to an equal one, on average over
    the batches. They are divided as a run divides them (`weft.runtime.split`): consecutive rows,
    so that the rank with the most tokens has as few as possible.
    """
    ratios = []
    for batch in batches:
        rows = np.array(batch, np.int64)
        bounds = split_evenly(rows[:, 0], min(ranks, len(rows)))
        sums = np.add.reduceat(rows, bounds[:-1])
        means = np.maximum(rows.sum(0), 1) / ranks
        ratios.append(sums.max(0) / means)
    if not ratios:
        return 1.0, 1.0
    tokens, answers = np.mean(ratios, axis=0).tolist()
    return max(1.0, tokens), max(1.0, answers)
