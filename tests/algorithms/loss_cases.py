"""Random ragged minibatches, and the rows of one as a loss sees them: written with plain loops, in
numpy or torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np
import torch

from weft.algorithms.base import Loss, Stat, reduce_stats
from weft.data.sample import SequenceSample

Array = Any


def make_sample(
    completions: Sequence[Sequence[int]],
    keys: Mapping[str, Sequence[float]],
    prompts: Sequence[int] | None = None,
) -> SequenceSample:
    """`completions[g]` lists the lengths of group g; each key holds one value, or row of values, a
    token or a completion.
    """
    num_tokens = sum(map(sum, completions))
    num_sequences = sum(map(len, completions))
    prompt_lengths = [2] * len(completions) if prompts is None else list(prompts)
    seqlens: dict[str, list[list[int]]] = {
        "prompt": [[n] for n in prompt_lengths],
        "completion": [list(map(int, group)) for group in completions],
    }
    data: dict[str, Any] = {
        "prompt": np.zeros(sum(prompt_lengths), dtype=np.int64),
        "completion": np.zeros(num_tokens, dtype=np.int64),
    }
    for key, values in keys.items():
        array = np.asarray(values)
        assert len(array) in (num_tokens, num_sequences), key
        per_token = len(array) == num_tokens and (
            num_tokens != num_sequences or key not in PER_SEQUENCE
        )
        seqlens[key] = (
            seqlens["completion"] if per_token else [[1] * len(group) for group in completions]
        )
        data[key] = array
    return SequenceSample.from_groups([f"id{g}" for g in range(len(completions))], seqlens, data)


PER_SEQUENCE = {
    "rank",
    "comparison",
    "margin",
    "label",
    "rewards",
    "kl_baseline",
    "reward_shift",
    "partner",
    "sampled",
}


class Rows:
    """`weft.algorithms.base.RowBatch` by plain loops, on numpy float64 or torch float64."""

    def __init__(self, sample: SequenceSample, torch_arrays: bool = False) -> None:
        self.convert = (lambda a: torch.as_tensor(a)) if torch_arrays else np.asarray
        self.sample = sample
        counts = sample.lengths["completion"].tolist()
        self.bounds = [(sum(counts[:s]), sum(counts[: s + 1])) for s in range(len(counts))]
        self.num_rows, self.num_sequences = sum(counts), len(counts)
        self.sequence = self.convert(
            np.array([s for s, n in enumerate(counts) for _ in range(n)], dtype=np.int64)
        )
        self.group = self.convert(sample.group_of("completion"))
        mask = np.ones(self.num_rows)
        if "loss_mask" in sample.data:
            mask = sample.data["loss_mask"].numpy().astype(np.float64)
        for s, (first, last) in enumerate(self.bounds):
            if sample.lengths["prompt"][int(self.group[s])] == 0 and last > first:
                mask[first] = 0.0
        self.mask = self.convert(mask)
        self.lengths = self.sum(self.mask)

    def __contains__(self, key: object) -> bool:
        return key in self.sample.data

    def __getitem__(self, key: str) -> Array:
        values = np.asarray(self.sample.data[key])
        return self.convert(values.astype(np.float64) if values.dtype.kind == "f" else values)

    def sum(self, rows: Array) -> Array:
        xp = array_api_compat.array_namespace(rows)
        return xp.stack([xp.sum(rows[first:last]) for first, last in self.bounds])

    def spread(self, sequences: Array) -> Array:
        xp = array_api_compat.array_namespace(sequences)
        return xp.take(sequences, self.sequence)

    def pairs(self) -> tuple[Array, Array]:
        rank = np.asarray(self.sample.data["rank"])
        comparison = (
            np.asarray(self.sample.data["comparison"])
            if "comparison" in self
            else np.zeros_like(rank)
        )
        group = np.asarray(self.group)
        found = [
            (i, j)
            for i in range(len(rank))
            for j in range(len(rank))
            if group[i] == group[j] and comparison[i] == comparison[j] and rank[i] < rank[j]
        ]
        pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
        return self.convert(pairs[:, 0]), self.convert(pairs[:, 1])


@dataclass
class Result:
    loss: float
    stats: dict[str, float]


def evaluate(
    loss: Loss, sample: SequenceSample, out: Mapping[str, Any], torch_arrays: bool = False
) -> Result:
    """The loss of a whole minibatch as one micro-batch, with its summary."""
    rows = Rows(sample, torch_arrays)
    arrays = {key: rows.convert(np.asarray(value, dtype=np.float64)) for key, value in out.items()}
    value, stats = loss(arrays, rows, loss.denominators(sample))
    return Result(float(value), loss.summary(reduce_stats([stats])))


def gradients(
    loss: Loss, sample: SequenceSample, out: Mapping[str, Any], parts: int = 1
) -> tuple[float, dict[str, float], dict[str, np.ndarray]]:
    """(loss, summary, gradient by output) with the minibatch cut into `parts` micro-batches."""
    leaves = {
        k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True)
        for k, v in out.items()
    }
    total = loss.denominators(sample)
    token, sequence, value = 0, 0, 0.0
    stats: list[Mapping[str, Stat]] = []
    for part in sample.split(parts):
        rows = Rows(part, torch_arrays=True)
        cut = {
            key: leaf[sequence : sequence + rows.num_sequences]
            if key == "scores"
            else leaf[token : token + rows.num_rows]
            for key, leaf in leaves.items()
        }
        part_loss, part_stats = loss(cut, rows, total)
        if part_loss.requires_grad:
            part_loss.backward()
        value += float(part_loss.detach())
        stats.append(part_stats)
        token, sequence = token + rows.num_rows, sequence + rows.num_sequences
    found = {
        k: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        for k, leaf in leaves.items()
    }
    return value, loss.summary(reduce_stats(stats)), found


def finite_differences(
    loss: Loss, sample: SequenceSample, out: Mapping[str, Any], key: str
) -> np.ndarray:
    """The gradient of the loss with respect to `out[key]` by central differences in float64."""
    base = {k: np.asarray(v, dtype=np.float64) for k, v in out.items()}
    slopes = np.zeros_like(base[key])
    step = 1e-6
    for i in np.ndindex(slopes.shape):
        ends = []
        for sign in (1.0, -1.0):
            moved = base[key].copy()
            moved[i] += sign * step
            ends.append(evaluate(loss, sample, {**base, key: moved}).loss)
        slopes[i] = (ends[0] - ends[1]) / (2 * step)
    return slopes
