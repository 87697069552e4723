"""The host function `reward`: verifiers and users' functions on the text of completions, in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, ClassVar

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
KEPT = 1  # batches that a head start outlives, for ids that come later than others
SHOWN = 5  # ids in a message


@register_function("reward")
@dataclass
class RewardFunction(Stateless):
    """`rewards` [1] of each completion: the weighted sum of `reward`'s parts, and of `scores` where a reward model made some.

    `reward` is a verifier's name, `module:function`, `FILE.py:function`, `{NAME: WEIGHT, ..}`, or a list of these, of
    `[NAME, WEIGHT]` and of `{name, weight, args}`. A function
    `fn(prompts, completions, *, completion_ids, **columns)` gets lists with one entry a completion (all completions of a
    prompt in one call) and returns a number or None (it does not apply) for each; it may be async. It is called on parts of
    the batch (`chunk_size` prompts at a time) in `num_workers` processes that live as long as the run. Without a `chunk_size`
    it is called on a prompt as soon as all completions of it are there, while others are still sampled.

    `timeout_s` is for the whole batch, from when all its completions are there. Completions whose call has not come back by
    then stop the run, or get `on_timeout` for that part where it is set, counted as the metric `timeouts`. The process is
    killed, with all that it started.

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
    begins_with: ClassVar[Sequence[str]] = ("prompt", "completion")

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
        self._begun: dict[str, Call] = {}  # by id, until the batch that holds it
        self._batches = 0  # that were computed

    def begin(self, batch: SequenceSample, context: HostContext) -> None:
        """Have the rewards of these ids computed."""
        if self.chunk_size is not None:
            return
        texts = Texts.of(batch, context.require_tokenizer("reward"))
        for index, id in enumerate(batch.ids):
            self._drop([id])
            self._begun[id] = self._submit(texts, np.flatnonzero(texts.group == index).tolist())

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        texts = Texts.of(batch, context.require_tokenizer("reward"))
        self.pool.start()
        calls = self._calls(texts, batch.ids)
        replies = iter(self.pool.collect([reply for call in calls for reply in call.replies], self.timeout_s))
        columns = np.full((len(self.parts), len(texts.names)), np.nan)
        timeouts = 0
        for call in calls:
            for column, label, reply in zip(columns, self.labels, islice(replies, len(self.parts)), strict=True):
                column[call.places] = self._values(reply, label, [texts.names[place] for place in call.places])
                timeouts += len(call.places) if reply.status == "timeout" else 0
        rewards = self._sum(columns, texts.names, batch, context)
        if self.on_timeout is not None:
            context.record("timeouts", timeouts)
        record_rewards(rewards, texts.group, context)
        counts = np.diff(batch.offsets["completion"])
        data = {"rewards": torch.from_numpy(rewards.astype(np.float32))}
        return SequenceSample.from_groups(batch.ids, {"rewards": [[1] * int(n) for n in counts]}, data)

    def _calls(self, texts: Texts, ids: Sequence[str]) -> list[Call]:
        """All completions, those of consecutive prompts together, `chunk_size` prompts at a time; a prompt whose completions
        were begun with is a call of its own."""
        calls, rest = [], []
        for index, id in enumerate(ids):
            places = np.flatnonzero(texts.group == index).tolist()
            begun = self._begun.get(id)
            if begun is not None and begun.told == texts.told(places):
                calls.append(replace(self._begun.pop(id), places=places))
            else:
                rest.append(places)
        self._batches += 1
        self._drop([*ids, *(id for id, call in list(self._begun.items()) if call.batches < self._batches - KEPT)])
        size = self.chunk_size or max(1, -(-len(rest) // (self.pool.size * CALLS_PER_WORKER)))
        return calls + [
            self._submit(texts, list(chain.from_iterable(rest[n : n + size]))) for n in range(0, len(rest), size)
        ]

    def _submit(self, texts: Texts, places: list[int]) -> Call:
        task = texts.task(places)
        replies = [self.pool.submit((index, *task)) for index in range(len(self.parts))]
        return Call(places, texts.told(places), replies, self._batches)

    def _drop(self, ids: Iterable[str]) -> None:
        """Head starts that nobody wants, as far as there are any."""
        for id in ids:
            if (call := self._begun.pop(id, None)) is not None:
                self.pool.drop(call.replies)

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
class Call:
    """The completions at some places of a batch, and what each part will say of them."""

    places: list[int]
    told: Any  # what the functions are told, as ids and columns
    replies: list[Future[Reply]]
    batches: int  # that were computed when it was begun


@dataclass(frozen=True)
class Texts:
    """What reward functions are told: one entry a completion. Texts are made for the calls that need them."""

    names: list[str]  # id[k]
    group: npt.NDArray[np.int64]
    prompt_ids: list[list[int]]  # one a prompt
    completion_ids: list[list[int]]
    columns: Mapping[str, list[Any]]  # of the dataset (the batch's metadata)
    tokenizer: Tokenizer

    @classmethod
    def of(cls, batch: SequenceSample, tokenizer: Tokenizer) -> Texts:
        group = batch.group_of("completion")
        starts = batch.offsets["completion"][group]
        return cls(
            names=[f"{batch.ids[g]}[{n - start}]" for n, (g, start) in enumerate(zip(group, starts, strict=True))],
            group=group,
            prompt_ids=[sequence.tolist() for sequence in batch.sequences("prompt")],
            completion_ids=[sequence.tolist() for sequence in batch.sequences("completion")],
            columns={name: list(values) for name, values in batch.metadata.items() if name not in (*RESERVED, PART)},
            tokenizer=tokenizer,
        )

    def told(self, chunk: Sequence[int]) -> tuple[Any, ...]:
        """Prompt ids, completion ids and columns of some completions."""
        groups = self.group[list(chunk)].tolist()
        columns = {name: [values[g] for g in groups] for name, values in self.columns.items()}
        return [self.prompt_ids[g] for g in groups], [self.completion_ids[n] for n in chunk], columns

    def task(self, chunk: Sequence[int]) -> Task:
        """Texts without special tokens, ids and columns of some completions."""
        groups = self.group[list(chunk)].tolist()
        prompts, ids, columns = self.told(chunk)
        texts = {g: self.tokenizer.decode(self.prompt_ids[g], skip_special=True) for g in dict.fromkeys(groups)}
        completions = [
            self.tokenizer.decode_after(prompt, each, True) for prompt, each in zip(prompts, ids, strict=True)
        ]
        return [texts[g] for g in groups], completions, ids, columns


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
