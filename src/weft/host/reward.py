"""The host function `reward`: verifiers and users' functions on the text of completions, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.algorithms.advantages import group_stds, zero_variance
from weft.algorithms.base import host_array
from weft.data.groups import PART
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError, RunError, UserError
from weft.host._pool import Pool, Reply, Task
from weft.host.base import HostContext, Stateless
from weft.host.spec import locate, parse_reward
from weft.registry import register_function

Vector = npt.NDArray[np.float64]
MOST_WORKERS = 8
CALLS_PER_WORKER = 4  # a hung call then loses a small part of the batch
SHOWN = 5  # ids in a message


@register_function("reward")
@dataclass
class RewardFunction(Stateless):
    """`rewards` [1] of each completion: the weighted sum of `reward`'s parts, and of `scores` where a reward model made some.

    `reward` is a verifier's name, `module:function`, `FILE.py:function`, `{NAME: WEIGHT, ..}`, or a list of these, of
    `[NAME, WEIGHT]` and of `{name, weight, args}`. A function
    `fn(prompts, completions, *, completion_ids, **columns)` gets lists with one entry a completion (all completions of a
    prompt in one call) and returns a number or None (it does not apply) for each; it may be async. It is called on parts of
    the batch (`chunk_size` prompts at a time) in `num_workers` processes that live as long as the run.

    `timeout_s` is for the whole batch. Completions whose call has not come back by then stop the run, or get `on_timeout` for
    that part where it is set, counted as the metric `timeouts`. The process is killed, with all that it started.

    Metrics: `reward`; `reward_std`, the mean over prompts of the standard deviation among a prompt's completions (of the whole
    batch, where prompts have one each); `frac_reward_zero_std`, the share of prompts whose completions all have one reward;
    `reward/{part}`, the mean of a part where it applies.

    Raises `UserError` when built for functions that cannot be found or imported; when called, for a function that raises,
    hangs, or returns something else than finite numbers, with its name and the samples' ids.
    """

    reward: Any = None
    timeout_s: float = 60.0
    on_timeout: float | None = None
    num_workers: int | None = None
    chunk_size: int | None = None
    scores_weight: float = 1.0
    pool: Pool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.parts = parse_reward(self.reward)
        for name in ("timeout_s", "num_workers", "chunk_size"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"reward: {name}={value} must be above 0")
        targets = [locate(part) for part in self.parts]
        self.labels = _distinct([target.label for target in targets])
        self.pool = Pool(targets, self.num_workers or min(MOST_WORKERS, os.cpu_count() or 1))
        self.pool.start()

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        texts = Texts.of(batch, context.require_tokenizer("reward"))
        chunks = self._chunks(texts.group, batch.num_ids)
        tasks = [(index, *texts.task(chunk)) for index in range(len(self.parts)) for chunk in chunks]
        replies = self.pool.run(tasks, self.timeout_s)
        columns = np.full((len(self.parts), len(texts.names)), np.nan)
        timeouts = 0
        for (index, *_), chunk, reply in zip(tasks, chunks * len(self.parts), replies, strict=True):
            columns[index, chunk] = self._values(reply, self.labels[index], [texts.names[place] for place in chunk])
            timeouts += len(chunk) if reply.status == "timeout" else 0
        rewards = self._sum(columns, texts.names, batch, context)
        if self.on_timeout is not None:
            context.record("timeouts", timeouts)
        record_rewards(rewards, texts.group, context)
        counts = np.diff(batch.offsets["completion"])
        data = {"rewards": torch.from_numpy(rewards.astype(np.float32))}
        return SequenceSample.from_groups(batch.ids, {"rewards": [[1] * int(n) for n in counts]}, data)

    def _chunks(self, group: npt.NDArray[np.int64], num_ids: int) -> list[list[int]]:
        """Completions of consecutive prompts, `chunk_size` prompts together."""
        size = self.chunk_size or -(-num_ids // (self.pool.size * CALLS_PER_WORKER))
        return [np.flatnonzero(group // size == n).tolist() for n in range(-(-num_ids // size))]

    def _values(self, reply: Reply, label: str, names: Sequence[str]) -> list[float]:
        """The rewards of one call, NaN where the part does not apply."""
        if reply.status == "ok":
            return [np.nan if value is None else float(value) for value in reply.value]
        shown = names if reply.index is None else [names[reply.index]]
        where = ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")
        if reply.status == "error":
            raise UserError(f"reward {label!r} failed on {where}: {reply.value}")
        if reply.status == "died" and reply.value >= 0:
            raise UserError(
                f"reward {label!r} failed on {where}: it ended its process (exit code {reply.value}); return, or raise an error"
            )
        if reply.status == "died":
            raise RunError(
                f"reward {label!r} failed on {where}: its process was killed by signal {-reply.value}; it may need more memory"
            )
        if self.on_timeout is None:
            raise UserError(
                f"reward {label!r} did not finish within reward_timeout_s={self.timeout_s:g} seconds on {where}; make it "
                "faster, raise reward_timeout_s, or set reward_on_timeout to the reward that such completions get"
            )
        return [self.on_timeout] * len(names)

    def _sum(self, columns: Vector, names: Sequence[str], batch: SequenceSample, context: HostContext) -> Vector:
        """The weighted sum over the parts that apply to each completion."""
        weights = np.array([part.weight for part in self.parts])
        for label, column in zip(self.labels, columns, strict=True):
            if not np.isnan(column).all():
                context.record(f"reward/{label}", float(np.nanmean(column)))
        applies = ~np.isnan(columns)
        total = np.where(applies, columns * weights[:, None], 0.0).sum(axis=0)
        if "scores" in batch.data:
            scores = host_array(batch.data["scores"]).astype(np.float64)
            if len(scores) != len(total):
                raise DataError(f"key 'scores' holds {len(scores)} values; there are {len(total)} completions")
            context.record("reward/model", float(scores.mean()))
            return total + self.scores_weight * scores
        without = [names[int(n)] for n in np.flatnonzero(~applies.any(axis=0))]
        if without:
            raise UserError(
                f"no reward applies to {', '.join(without[:SHOWN])} ({len(without)} of {len(names)} completions): "
                f"{', '.join(self.labels)} returned None; give these rows what a reward needs, or add one that applies"
            )
        return total


@dataclass(frozen=True)
class Texts:
    """What reward functions are told: one entry a completion."""

    names: list[str]  # id[k]
    group: npt.NDArray[np.int64]
    prompts: list[str]
    completions: list[str]
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]]

    @classmethod
    def of(cls, batch: SequenceSample, tokenizer: Tokenizer) -> Texts:
        """Texts without special tokens, and the dataset's columns (the batch's metadata)."""
        group = batch.group_of("completion")
        ids = [sequence.tolist() for sequence in batch.sequences("completion")]
        prompt_ids = [sequence.tolist() for sequence in batch.sequences("prompt")]
        prompts = [tokenizer.decode(each, skip_special=True) for each in prompt_ids]
        starts = batch.offsets["completion"][group]
        columns = {
            name: [values[g] for g in group] for name, values in batch.metadata.items() if name not in (*RESERVED, PART)
        }
        return cls(
            names=[f"{batch.ids[g]}[{n - start}]" for n, (g, start) in enumerate(zip(group, starts, strict=True))],
            group=group,
            prompts=[prompts[g] for g in group],
            completions=[tokenizer.decode_after(prompt_ids[g], each, True) for g, each in zip(group, ids, strict=True)],
            completion_ids=ids,
            columns=columns,
        )

    def task(self, chunk: Sequence[int]) -> Task:
        columns = {name: [values[n] for n in chunk] for name, values in self.columns.items()}
        lists = ([values[n] for n in chunk] for values in (self.prompts, self.completions, self.completion_ids))
        return (*lists, columns)


RESERVED = ("prompts", "completions", "completion_ids")


def record_rewards(rewards: Vector, group: npt.NDArray[np.int64], context: HostContext) -> None:
    """The metrics of any node that makes rewards; see `RewardFunction`."""
    if (np.bincount(group) < 2).all():
        group = np.zeros_like(group)
    first = np.unique(group, return_index=True)[1]
    context.record("reward", float(rewards.mean()))
    context.record("reward_std", float(group_stds(rewards, group)[first].mean()))
    context.record("frac_reward_zero_std", float(zero_variance(rewards, group).mean()))


def _distinct(labels: Sequence[str]) -> list[str]:
    """Names for metrics: the second `f` is `f_2`."""
    seen: dict[str, int] = {}
    made = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        made.append(label if seen[label] == 1 else f"{label}_{seen[label]}")
    return made
