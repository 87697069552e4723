"""The host function `reward`: rewards of completions by verifiers and users' functions.

The functions run in separate processes and get the texts of the completions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError, RunError, UserError
from weft.host._pool import RewardPool, RewardReply
from weft.host._results import MAX_REWARD, Value
from weft.host._routes import CompletionTexts, RewardRoute, RewardRoutes
from weft.host.base import ConfiguredHostFunction, HostContext, record_rewards
from weft.host.spec import RewardOptions
from weft.host.verifiers._sandbox import describe_protections, find_protections
from weft.registry import register_function

Vector = npt.NDArray[np.float64]
MAX_WORKERS = 8  # default number of workers, if there are as many CPUs
CALLS_PER_WORKER = 4  # so that a hung call loses only a small part of the batch
# Number of batches for which unused prefetched calls are kept, since their ids may come later
MAX_BATCHES_PREFETCHED = 1
MAX_NAMES_SHOWN = 5  # maximum number of ids in a message
CODE = "weft.host.verifiers.code"  # the verifier that runs completions


@register_function("reward")
class RewardFunction(ConfiguredHostFunction):
    """Host function that computes rewards as weighted sums of reward functions.

    It outputs the key `rewards`, one value per completion. If the batch has the `scores` of a
    reward model, they are added with the weight `scores_weight`.

    `reward` specifies one or more functions. A single function is given by a NAME, which is either
    the name of a registered verifier, or `module:function`, or `FILE.py:function`. Several
    functions are given by a mapping `{NAME: WEIGHT, ..}`, or by a list whose entries are NAME,
    `[NAME, WEIGHT]`, `{NAME: WEIGHT, ..}` or `{name, weight, args}`. Each function contributes one
    part of the reward.

    If `column` is set, each row of the data can specify its own verifiers in this column, in the
    same format as `reward`. Rows whose column is empty use `reward`.

    A function `fn(prompts, completions, *, completion_ids, **columns)` gets lists with one entry
    per completion (all completions of a prompt in one call). It returns a list with one number per
    completion, or None for completions to which it does not apply. It may instead return `(rewards,
    metrics)`; metrics are summed by name over the batch. The function may be async.

    With `by_token`, a function may return rewards of single tokens or steps instead of one number
    per completion: a list with one number or None per token, or a mapping from the end of each step
    (a character offset in the completion) to the step's reward. Their sum counts as the
    completion's reward. The key `token_rewards` is then also output, with one value per completion
    token: the weighted reward, or NaN for a token without reward.

    With `keep_parts`, the key `reward_parts` is also output. For each completion, it has the
    unweighted reward from each function, NaN if the function does not apply, and finally the reward
    model's score, if there is one.

    A function is called on `chunk_size` prompts at a time, in `num_workers` processes that live as
    long as the run. Without a `chunk_size`, it is called on a prompt as soon as all completions of
    the prompt are available, while other prompts are still being sampled.

    `timeout_s` limits the time for the whole batch in seconds, measured from the moment when all
    completions are available. By default, a call that exceeds the limit stops the run. If
    `on_timeout` is set, the completions of the call get the reward `on_timeout` from this function
    instead, and the metric `timeouts` counts them. The process of such a call is killed with all
    its children.

    Metrics:

    - `reward`: mean reward
    - `reward_std`: mean over prompts of the standard deviation among a prompt's completions (or the
      standard deviation of the whole batch, if prompts have one completion each)
    - `frac_reward_zero_std`: fraction of prompts whose completions all have the same reward
    - `reward/{part}`: mean of a part over the completions to which it applies
    - `reward/{part}/{name}`: a metric that the part's function returned

    The constructor raises `UserError` for functions that cannot be found or imported. Calls of the
    object raise `UserError` if a function raises an error, hangs, or returns anything but finite
    numbers and None; the message has the function's name and the samples' ids.
    """

    options_class = RewardOptions
    begins_with: ClassVar[Sequence[str]] = ("prompt", "completion")
    keeps_all: ClassVar[Literal[True]] = True

    def __init__(self, options: RewardOptions) -> None:
        for name in ("timeout_s", "num_workers", "chunk_size"):
            value = getattr(options, name)
            if value is not None and not value > 0:
                raise ConfigError(f"reward: {name}={value} must be above 0")
        self.options = options
        self.routes = RewardRoutes(options.reward, options.column, by_token=options.by_token)
        if options.keep_parts and options.column is not None:
            raise ConfigError(
                f"reward: keep_parts needs the same parts in all rows, but with "
                f"column={options.column!r} rows can have different ones"
            )
        self.pool = RewardPool(
            self.routes.targets, options.num_workers or min(MAX_WORKERS, os.cpu_count() or 1)
        )
        self.pool.start()
        self.notes: Sequence[str] = ()
        if any(target.module == CODE for target in self.routes.targets):
            self.notes = describe_protections(find_protections())
        # Prefetched calls by id, until the batch with that id arrives
        self._prefetched_calls: dict[str, PendingRewardCall] = {}
        self._num_batches = 0  # number of batches computed so far

    def begin(self, batch: SequenceSample, context: HostContext) -> None:
        """Submit a reward call for each prompt in `batch`, while other prompts are still being
        sampled.

        Does nothing if `chunk_size` is set, because the calls are then formed from the whole batch.
        """
        if self.options.chunk_size is not None:
            return
        texts = CompletionTexts.from_batch(batch, context.require_tokenizer("reward"))
        routes = self.routes.find_routes(texts.columns, batch.ids)
        for index, id in enumerate(batch.ids):
            self._cancel_prefetched([id])
            self._prefetched_calls[id] = self._submit(
                texts, np.flatnonzero(texts.group == index).tolist(), routes[index]
            )

    def __call__(self, batch: SequenceSample, context: HostContext) -> SequenceSample:
        # Submit the calls, except those that `begin` has submitted, and wait for the replies.
        texts = CompletionTexts.from_batch(batch, context.require_tokenizer("reward"))
        self.pool.start()
        calls = self._collect_calls(texts, batch.ids)
        replies = iter(
            self.pool.collect(
                [reply for call in calls for reply in call.replies], self.options.timeout_s
            )
        )
        # Add up the weighted rewards; each call has one reply per function of its route.
        sums = RewardSums(texts, self.routes.labels)
        for call in calls:
            for function, reply in zip(
                call.route.functions, islice(replies, len(call.route.functions)), strict=True
            ):
                names = [texts.names[position] for position in call.positions]
                values, metrics = self._read_reply(
                    reply, self.routes.labels[function.target], names
                )
                sums.add(function.target, function.weight, call.positions, values)
                sums.add_metrics(function.target, metrics)
                sums.timeouts += len(call.positions) if reply.status == "timeout" else 0
        rewards = self._add_scores(sums, batch, context)
        if self.options.on_timeout is not None:
            context.record("timeouts", sums.timeouts)
        self._check_size(rewards, texts)
        record_rewards(rewards, texts.group, context)
        return self._build_sample(rewards, sums, batch)

    def _build_sample(
        self, rewards: Vector, sums: RewardSums, batch: SequenceSample
    ) -> SequenceSample:
        columns = {"rewards": rewards}
        if self.options.keep_parts:
            if "scores" in batch.data:
                scores = [to_host_array(batch.data["scores"])]
            else:
                scores = []
            columns["reward_parts"] = np.column_stack([*sums.parts, *scores])
        sample = batch.one_per(
            "completion", **{key: values.astype(np.float32) for key, values in columns.items()}
        )
        if self.options.by_token:
            sample = sample.update(
                batch.like("completion", token_rewards=sums.by_token.astype(np.float32))
            )
        return sample

    def _check_size(self, rewards: Vector, texts: CompletionTexts) -> None:
        """Raise `UserError` if the total reward of a completion is too large.

        The weighted sum can be too large even if no single reward is. Scores of a reward model that
        are not finite are not checked here, because training reports them.
        """
        too_large = np.flatnonzero(np.isfinite(rewards) & (np.abs(rewards) > MAX_REWARD))
        if len(too_large):
            raise UserError(
                f"the reward of {texts.names[int(too_large[0])]} is "
                f"{rewards[too_large[0]]:g} with the weights of "
                f"{', '.join(self.routes.labels)}; its absolute value must be at most "
                f"{MAX_REWARD:g}, or the loss is not finite: lower the weights"
            )

    def _collect_calls(self, texts: CompletionTexts, ids: Sequence[str]) -> list[PendingRewardCall]:
        """Return the reward calls for all completions, and submit those that are still missing.

        If `begin` has submitted a call for a prompt and its inputs have not changed, that call is
        used. The other prompts are grouped into new calls of at most `chunk_size` prompts with the
        same route (set of reward functions). If `chunk_size` is not set, enough calls are made to
        keep all workers busy.
        """
        # Take the prefetched calls whose inputs are still the same.
        calls: list[PendingRewardCall] = []
        remaining: dict[RewardRoute, list[list[int]]] = {}
        for index, (id, route) in enumerate(
            zip(ids, self.routes.find_routes(texts.columns, ids), strict=True)
        ):
            positions = np.flatnonzero(texts.group == index).tolist()
            prefetched = self._prefetched_calls.get(id)
            if prefetched is not None and prefetched.inputs == texts.select_inputs(positions):
                calls.append(replace(self._prefetched_calls.pop(id), positions=positions))
            else:
                remaining.setdefault(route, []).append(positions)
        # Cancel the prefetched calls of this batch that were not used, and all that are too old.
        self._num_batches += 1
        cancelled = list(ids)
        for id, call in list(self._prefetched_calls.items()):
            if call.batches_before < self._num_batches - MAX_BATCHES_PREFETCHED:
                cancelled.append(id)
        self._cancel_prefetched(cancelled)
        # Submit the remaining prompts in chunks.
        num_remaining = sum(len(prompts) for prompts in remaining.values())
        size = self.options.chunk_size or max(
            1, -(-num_remaining // (self.pool.size * CALLS_PER_WORKER))
        )
        for route, prompts in remaining.items():
            chunks = (prompts[n : n + size] for n in range(0, len(prompts), size))
            for chunk in chunks:
                calls.append(self._submit(texts, list(chain.from_iterable(chunk)), route))
        return calls

    def _submit(
        self, texts: CompletionTexts, positions: list[int], route: RewardRoute
    ) -> PendingRewardCall:
        task = texts.build_task(positions)
        replies = [
            self.pool.submit((function.target, *task, function.args))
            for function in route.functions
        ]
        return PendingRewardCall(
            positions, route, texts.select_inputs(positions), replies, self._num_batches
        )

    def _cancel_prefetched(self, ids: Iterable[str]) -> None:
        """Cancel the calls that `begin` has submitted for these ids, if any."""
        for id in ids:
            if (call := self._prefetched_calls.pop(id, None)) is not None:
                self.pool.drop(call.replies)

    def _read_reply(
        self, reply: RewardReply, label: str, names: Sequence[str]
    ) -> tuple[Sequence[Value], Mapping[str, float]]:
        """Return the rewards and metrics from the reply to one call.

        If the call timed out and `on_timeout` is set, all rewards are `on_timeout`. `label` and
        `names` identify the function and the completions in error messages. Raises `UserError` or
        `RunError` if the call failed.
        """
        if reply.status == "ok":
            values, metrics = reply.value
            return values, metrics
        failed_names = names if reply.index is None else [names[reply.index]]
        listing = ", ".join(failed_names[:MAX_NAMES_SHOWN])
        if len(failed_names) > MAX_NAMES_SHOWN:
            listing += f" and {len(failed_names) - MAX_NAMES_SHOWN} more"
        if reply.status == "error":
            raise UserError(f"reward {label!r} failed on {listing}: {reply.value}")
        if reply.status == "died" and reply.value >= 0:
            raise UserError(
                f"reward {label!r} failed on {listing}: it ended its process (exit code "
                f"{reply.value}); return, or raise an error"
            )
        if reply.status == "died":
            raise RunError(
                f"reward {label!r} failed on {listing}: its process was killed by signal "
                f"{-reply.value}; it may need more memory"
            )
        if self.options.on_timeout is None:
            raise UserError(
                f"reward {label!r} did not finish within reward_timeout_s={self.options.timeout_s:g} "
                f"seconds on {listing}; make it "
                "faster, raise reward_timeout_s, or set reward_on_timeout to the reward that such "
                "completions get"
            )
        return [self.options.on_timeout] * len(names), {}

    def _add_scores(self, sums: RewardSums, batch: SequenceSample, context: HostContext) -> Vector:
        """Return each completion's total reward: the weighted sum of its rewards and its score.

        The score is the value of the key `scores`, which comes from a reward model. Without this
        key, only rewards are summed, and `UserError` is raised if every reward function has
        returned None for a completion.
        """
        sums.record_metrics(context)
        if "scores" in batch.data:
            scores = to_host_array(batch.data["scores"]).astype(np.float64)
            if len(scores) != len(sums.total):
                raise DataError(
                    f"key 'scores' has {len(scores)} values for {len(sums.total)} completions"
                )
            context.record("reward/model", float(scores.mean()))
            return sums.total + self.options.scores_weight * scores
        names = sums.texts.names
        unrewarded = [names[int(n)] for n in np.flatnonzero(np.isnan(sums.parts).all(axis=0))]
        if unrewarded:
            raise UserError(
                f"no reward applies to {', '.join(unrewarded[:MAX_NAMES_SHOWN])} "
                f"({len(unrewarded)} of {len(names)} completions): "
                f"{', '.join(self.routes.labels)} returned None; add the columns that a reward "
                f"needs to these rows, or add a reward function that applies to them"
            )
        return sums.total


@dataclass(frozen=True)
class PendingRewardCall:
    """Pending call of one or more reward functions for some completions of a batch.

    All of these completions have the same `route`: their reward is a weighted sum over the same
    reward functions.
    """

    positions: list[int]  # indices of the completions in the batch
    route: RewardRoute
    inputs: Any  # inputs of the functions: token ids and columns (`CompletionTexts.select_inputs`)
    replies: list[Future[RewardReply]]  # one per function of the route
    batches_before: int  # number of batches computed before this call was submitted


class RewardSums:
    """Rewards of a batch, accumulated over the calls to the reward functions.

    `parts` contains the unweighted reward of each completion from each function, or NaN if the
    function does not apply to the completion. Its shape is [functions, S] for S completions.
    `total`, [S], contains the weighted sum of each completion's rewards. `by_token`, [T], contains
    the weighted rewards of the T tokens of all completions, or NaN for tokens without a reward.
    """

    def __init__(self, texts: CompletionTexts, labels: Sequence[str]) -> None:
        self.texts = texts
        self.labels = labels
        self.parts = np.full((len(labels), len(texts.names)), np.nan)
        self.total = np.zeros(len(texts.names))
        self.lengths = np.array([len(ids) for ids in texts.completion_ids], np.int64)
        self.by_token = np.full(int(self.lengths.sum()), np.nan)
        self.metrics: dict[str, float] = {}
        self.timeouts = 0

    def add(
        self, part: int, weight: float, positions: Sequence[int], values: Sequence[Value]
    ) -> None:
        """Add the rewards that one call returned for the completions with the indices `positions`.

        `values` has one reward per completion. `part` is the index of the reward function.
        """
        for position, value in zip(positions, values, strict=True):
            if value is None:
                continue
            if isinstance(value, (int, float)):
                self.parts[part, position] = value
            else:
                self._add_tokens(
                    part, weight, position, self.texts.spread_over_tokens(position, value)
                )
            if not np.isnan(self.parts[part, position]):
                self.total[position] += weight * self.parts[part, position]

    def _add_tokens(self, part: int, weight: float, position: int, rewards: Vector) -> None:
        if np.isnan(rewards).all():
            return
        self.parts[part, position] = np.nansum(rewards)
        start = int(self.lengths[:position].sum())
        token_rewards = self.by_token[start : start + len(rewards)]  # a view
        has_reward = ~np.isnan(rewards)
        token_rewards[has_reward] = (
            np.nan_to_num(token_rewards[has_reward]) + weight * rewards[has_reward]
        )

    def add_metrics(self, part: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics that one call of the function with index `part` returned."""
        for name, value in metrics.items():
            key = f"reward/{self.labels[part]}/{name}"
            self.metrics[key] = self.metrics.get(key, 0.0) + value

    def record_metrics(self, context: HostContext) -> None:
        """Record the mean reward of each function, and the metrics that the calls returned."""
        for label, part in zip(self.labels, self.parts, strict=True):
            if not np.isnan(part).all():
                context.record(f"reward/{label}", float(np.nanmean(part)))
        for name, value in self.metrics.items():
            context.record(name, value)
