"""Log-probabilities of continuations, in packed batches that compute shared prefixes only once.

A request is a context and a continuation. Requests with the same tokens are computed once. Requests
are sorted by their tokens, so that those with a common prefix (the examples of a few-shot prompt,
or the question before several answers) are in the same batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.data.groups import SCORED_ONCE
from weft.data.sample import SequenceSample
from weft.errors import DataError
from weft.evaluation.models import EvaluatedModel

# Limit on the tokens of one forward pass with all copies of shared prefixes, as a multiple of the
# limit with each shared prefix counted once.
MAX_REPEATS = 16
Ids = list[int]
TokenSequence = tuple[tuple[int, ...], int]  # (tokens, number of tokens of the context)
Score = tuple[float, bool]  # (log-probability, True if greedy decoding gives the continuation)


@dataclass(frozen=True)
class ScoredPair:
    """Tokens of a context and of the continuation whose log-probability is wanted."""

    context: Ids
    continuation: Ids


class ContinuationScorer:
    """Scorer that computes log-probabilities of continuations with a model.

    `max_length` is the number of tokens of the model's context. `max_tokens` limits the tokens of
    one forward pass, in which shared prefixes count once.
    """

    def __init__(self, opened: EvaluatedModel, max_length: int, max_tokens: int) -> None:
        self._opened = opened
        self._max_length = max_length
        self._max_tokens = max(max_tokens, max_length + 1)

    def score(
        self,
        pairs: Sequence[ScoredPair],
        finish: Callable[[int, Score], None],
        progress: Callable[[int, int], None],
    ) -> list[Score]:
        """Return the score of each pair; see `Score`.

        `finish` is called with the index and result of each pair as soon as it is known, and
        `progress` with the numbers of finished and of all sequences. Raises `DataError` for a
        continuation without tokens, or one that exceeds the model's context.
        """
        sequences = dict[TokenSequence, list[int]]()  # indices of the pairs of each sequence
        for index, pair in enumerate(pairs):
            sequences.setdefault(self.cut(pair), []).append(index)
        results: list[Score] = [(0.0, True)] * len(pairs)
        done = 0
        for batch in split_by_shared_tokens(sorted(sequences), self._max_tokens):
            for sequence, score in zip(batch, self._forward(batch), strict=True):
                for index in sequences[sequence]:
                    results[index] = score
                    finish(index, score)
            done += len(batch)
            progress(done, len(sequences))
        return results

    def cut(self, pair: ScoredPair) -> TokenSequence:
        """Return the tokens of a pair, cut at the start to fit into the model's context.

        The last token is only a label, and needs no room in the context. Raises `DataError` for a
        continuation without tokens, or one that exceeds the model's context.
        """
        count = len(pair.continuation)
        if not 1 <= count <= self._max_length:
            text = self._opened.tokenizer.decode(pair.continuation[:20])
            raise DataError(
                f"the continuation {text!r} has {count} tokens, and {self._opened.name} scores "
                f"1 to {self._max_length}; change the task"
            )
        tokens = (pair.context + pair.continuation)[-(self._max_length + 1) :]
        return tuple(tokens), len(tokens) - count

    def _forward(self, batch: Sequence[TokenSequence]) -> list[Score]:
        """Return the score of each sequence, computed in one forward pass."""
        lengths = {
            "prompt": [[start] for _, start in batch],
            "completion": [[len(tokens) - start] for tokens, start in batch],
        }
        data = {
            "prompt": join_ids(tokens[:start] for tokens, start in batch),
            "completion": join_ids(tokens[start:] for tokens, start in batch),
        }
        ids = [str(index) for index in range(len(batch))]
        shares = {SCORED_ONCE: [True] * len(batch)}
        output = self._opened.engine.forward(
            SequenceSample.from_groups(ids, lengths, data, shares),
            frozenset({"logprobs", "top1"}),
            max_tokens=sum(len(tokens) for tokens, _ in batch),
        )
        scores = []
        for logprobs, is_likeliest in zip(
            output.sequences("logprobs"), output.sequences("top1"), strict=True
        ):
            logprob = to_host_array(logprobs).astype(np.float64).sum()
            scores.append((float(logprob), bool(to_host_array(is_likeliest).all())))
        return scores


def split_by_shared_tokens(
    sequences: Sequence[TokenSequence], max_tokens: int
) -> Iterator[list[TokenSequence]]:
    """Yield batches of sequences, which must be sorted.

    Context tokens that a sequence shares with its predecessor count once. A batch has at most
    `max_tokens` tokens counted like this, and at most `MAX_REPEATS * max_tokens` in total, unless a
    single sequence has more.
    """
    batch = list[TokenSequence]()
    num_distinct = 0
    total = 0
    for sequence in sequences:
        size = len(sequence[0])
        shared = count_common(batch[-1], sequence) if batch else 0
        is_full = (
            num_distinct + size - shared > max_tokens or total + size > MAX_REPEATS * max_tokens
        )
        if batch and is_full:
            yield batch
            batch = []
            num_distinct = total = shared = 0
        batch.append(sequence)
        num_distinct += size - shared
        total += size
    if batch:
        yield batch


def count_common(sequence: TokenSequence, other: TokenSequence) -> int:
    """Return the length of the common prefix of two sequences' contexts, in tokens."""
    max_common = min(sequence[1], other[1])
    for index in range(max_common):
        if sequence[0][index] != other[0][index]:
            return index
    return max_common


def join_ids(parts: Iterable[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the ids of all parts in one int64 array, [tokens]."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
