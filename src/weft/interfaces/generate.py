"""Interface `generate`: samples completions of prompts, with log-probs and weight versions.

Several nodes can generate with the same role. For example, ReMax's greedy baseline is a second node
with `greedy=true` and `samples_per_prompt=1`, whose outputs are mapped to other key names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft import randomness
from weft.algorithms.base import to_host_array
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Generator, Partial, Request, TokenEvent
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.interfaces.base import MFCResult, Model, have_same_tokens
from weft.options import read, validate
from weft.registry import register_interface


@register_interface("generate")
class GenerateInterface:
    """Interface that samples `samples_per_prompt` completions of every prompt.

    With `record_support`, the outputs also contain, for each token, the token ids that the sampling
    limits (such as top-k) allowed. The other keyword arguments are the fields of `GenerationSpec`
    (options `gen.*`).

    With a `share` below 1, completions are sampled only for this share of the sample ids, chosen at
    random; the other samples keep the completions of their dataset rows. If the call is
    interruptible, new weights can be loaded between two tokens: completions continue at the same
    position, and `versions` records the weights that sampled each token. Random draws depend only
    on the run's seed, the index of the call, the sample id and the index of the completion.
    """

    def __init__(
        self,
        *,
        samples_per_prompt: int = 1,
        record_support: bool = False,
        share: float = 1.0,
        **gen: Any,
    ) -> None:
        if samples_per_prompt < 1:
            raise ConfigError(f"samples_per_prompt={samples_per_prompt}: must be at least 1")
        if not 0.0 < share <= 1.0:
            raise ConfigError(
                f"share={share}: must be above 0 and at most 1; to sample nothing, leave out the call"
            )
        if share < 1.0 and record_support:
            raise ConfigError(
                f"share={share} with record_support: completions of the rows have no sampling limits "
                f"to record; set share to 1 or record_support to false"
            )
        self.samples_per_prompt = samples_per_prompt
        self.share = share
        spec = read(GenerationSpec(), gen, "gen.")
        validate(spec, "gen.")
        self.spec = replace(spec, record_support=record_support)

    def check_tokens(self, role: str, own: Tokenizer, data: Tokenizer) -> None:
        """Raise `ConfigError` if the role's vocabulary differs from that of the data."""
        if not have_same_tokens(own, data):
            raise ConfigError(
                f"role {role!r} generates with another tokenizer than the one that made the "
                f"prompts; "
                "use one tokenizer for both"
            )

    def generate(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Sample `samples_per_prompt` completions of each id's `prompt`.

        The result has these keys:

        - `completion` (int64), `logprobs` (float32), `versions` (int64) and `loss_mask` (float32,
          all 1), with one value per token, including the end token.
        - `finished` (float32), with one value per completion: 1 if it ended by itself, 0 if it was
          truncated at the length limit.
        - With `record_support`: `support` (int64), the token ids that the sampling limits allowed,
          concatenated over the tokens of a completion, and `support_counts` (int64), the number of
          these ids at each token (0 if no id was excluded).

        As soon as all completions of an id have ended, its outputs are passed to `model.announce`.

        With a `share` below 1, the call also reads `completion`, and `loss_mask` if present. It
        returns only these two keys and `sampled` (float32), with one value per completion: 1 if it
        was sampled, 0 if it was taken from the dataset row. `model.announce` is not called.

        Raises `ConfigError` if the role's tokenizer and the data's have different vocabularies.
        """
        self.check_tokens(model.role, model.tokenizer, model.data_tokenizer)
        if self.share < 1.0:
            return self._sample_share(model, batch)
        sample, counts = self._sample(model, batch)
        return MFCResult(sample, _compute_metrics(model.gather(counts)))

    def _sample_share(self, model: Model, batch: SequenceSample) -> MFCResult:
        """Sample completions for a random share of the ids.

        For the other ids, the completions of their dataset rows are returned.
        """
        purpose = f"share/{model.role}"
        draws = []
        for id in batch.ids:
            draws.append(randomness.draw_uniform(model.seed, purpose, model.step, id, 0, 0))
        chosen = []
        others = []
        for id, draw in zip(batch.ids, draws, strict=True):
            if draw < self.share:
                chosen.append(id)
            else:
                others.append(id)
        if others or not batch.num_ids:
            parts = [_extract_own_completions(batch.select(ids=others))]
        else:
            parts = []
        counts = model.gather((len(chosen), batch.num_ids))
        metrics = {
            "sampled_fraction": sum(count for count, _ in counts)
            / sum(count for _, count in counts)
        }
        # On every rank, even without chosen ids: gathering the weights is a collective operation
        if metrics["sampled_fraction"]:
            sample, rank_counts = self._sample(
                replace(model, announce=None), batch.select(ids=chosen, keys=["prompt"])
            )
            parts += [_mark_sampled(sample, 1.0)] if chosen or not parts else []
            metrics |= _compute_metrics(model.gather(rank_counts))
        return MFCResult(SequenceSample.gather(parts).select(ids=batch.ids), metrics)

    def _sample(
        self, model: Model, batch: SequenceSample
    ) -> tuple[SequenceSample, GenerationCounts]:
        """Return the completions of every prompt, and this rank's counts for the metrics."""
        stop_ids = [*self.spec.stop_ids, *model.tokenizer.list_stop_ids()]
        spec = replace(self.spec, seed=model.seed, stop_ids=stop_ids, tokenizer=model.tokenizer)
        # One request per completion.
        requests = []
        for id, prompt in zip(batch.ids, batch.sequences("prompt"), strict=True):
            for k in range(self.samples_per_prompt):
                requests.append(Request(id, k, prompt.tolist(), step=model.step))
        progress = _GenerationProgress(
            {(request.id, request.k): [] for request in requests}, dict.fromkeys(batch.ids, 0)
        )
        started = time.perf_counter()
        unfinished = requests
        interruptions = 0
        # At least once, even with nothing to sample: other ranks may need this one's weights
        continues = True
        while continues:
            with model.engine.generating(spec) as generator:
                generator.submit(unfinished)
                partials = self._run(model, generator, progress)
            # After an interruption, apply the updates and resume the unfinished completions.
            interruptions += bool(partials)
            parts = {(partial.id, partial.k): partial for partial in partials}
            unfinished = []
            for request in requests:
                if (request.id, request.k) in parts:
                    unfinished.append(replace(request, generated=parts[request.id, request.k]))
            continues = model.updates is not None and model.updates.take(left=bool(unfinished))
        seconds = time.perf_counter() - started
        completions = list(progress.rows.values())
        num_truncated = sum(row[-1].finish == "length" for row in completions)
        sampled = GenerationCounts(
            [len(row) for row in completions],
            num_truncated,
            seconds,
            interruptions if model.updates is not None else None,
        )
        return self._build_outputs(batch.ids, completions), sampled

    def _run(
        self, model: Model, generator: Generator, progress: _GenerationProgress
    ) -> list[Partial]:
        """Sample until all completions have ended or an update of the weights is waiting.

        Returns the unfinished completions.
        """
        partials: list[Partial] = []
        while not generator.idle:
            complete = []
            for event in generator.step():
                progress.rows[event.id, event.k].append(event)
                if event.finish is not None:
                    progress.ended[event.id] += 1
                    if progress.ended[event.id] == self.samples_per_prompt:
                        complete.append(event.id)
            if complete and model.announce is not None:
                completed_rows = []
                for id in complete:
                    for k in range(self.samples_per_prompt):
                        completed_rows.append(progress.rows[id, k])
                model.announce(self._build_outputs(complete, completed_rows))
            if partials or generator.idle or model.updates is None:
                continue
            if model.updates.are_waiting():
                partials = generator.abort(progress.ended)  # steps in flight can still yield tokens
        return partials

    def _build_outputs(
        self, ids: Sequence[str], rows: Sequence[Sequence[TokenEvent]]
    ) -> SequenceSample:
        """Return a sample with the completions of `ids` and the keys that `generate` describes.

        `rows` has the tokens of each completion, in the order of `ids`, with `samples_per_prompt`
        consecutive completions for each id.
        """
        events = []
        for row in rows:
            for event in row:
                events.append(event)
        tokens = [len(row) for row in rows]
        single = [1] * len(rows)
        columns: dict[str, tuple[list[int], list[Any], npt.DTypeLike]] = {
            "completion": (tokens, [event.token for event in events], np.int64),
            "logprobs": (tokens, [event.logprob for event in events], np.float32),
            "versions": (tokens, [event.version for event in events], np.int64),
            "loss_mask": (tokens, [1.0] * len(events), np.float32),
            "finished": (single, [float(row[-1].finish == "stop") for row in rows], np.float32),
        }
        if self.spec.record_support:
            support_sizes = []
            for row in rows:
                support_sizes.append(sum(len(event.support) for event in row))
            columns["support"] = (
                support_sizes,
                [id for event in events for id in event.support],
                np.int64,
            )
            columns["support_counts"] = (tokens, [len(event.support) for event in events], np.int64)
        count = self.samples_per_prompt
        lengths = {}
        for key, (sizes, _, _) in columns.items():
            lengths[key] = [sizes[i : i + count] for i in range(0, len(rows), count)]
        data = {key: np.array(values, dtype=dtype) for key, (_, values, dtype) in columns.items()}
        return SequenceSample.from_groups(ids, lengths, data)


def _extract_own_completions(batch: SequenceSample) -> SequenceSample:
    """Return the completions that the dataset rows of a batch contain, marked as not sampled.

    If the batch has no `loss_mask`, the mask is set to 1 for all tokens.
    """
    keys = ["completion", *(["loss_mask"] if "loss_mask" in batch.data else [])]
    completions = batch.select(keys=keys)
    if len(keys) > 1:
        mask = to_host_array(completions.data["loss_mask"])
    else:
        mask = np.ones(completions.num_tokens())
    data = {"completion": completions.data["completion"], "loss_mask": mask.astype(np.float32)}
    return _mark_sampled(completions.like("completion", **data), 0.0)


def _mark_sampled(completions: SequenceSample, sampled: float) -> SequenceSample:
    """Return the keys `completion` and `loss_mask` of a sample, with the additional key `sampled`.

    The argument `sampled` is the value of this key for all completions.
    """
    marks = np.full(completions.num_sequences(), sampled, dtype=np.float32)
    return completions.select(keys=["completion", "loss_mask"]).update(
        completions.one_per("completion", sampled=marks)
    )


@dataclass(frozen=True)
class _GenerationProgress:
    """Progress of a generation call.

    Attributes:
        rows: Tokens sampled so far, keyed by (id, index of the completion).
        ended: Number of completions of each id that have ended.
    """

    rows: dict[tuple[str, int], list[TokenEvent]]
    ended: dict[str, int]


@dataclass(frozen=True)
class GenerationCounts:
    """Statistics of one rank's generation, from which metrics are computed.

    Attributes:
        lengths: Number of tokens of each completion.
        num_truncated: Number of completions that were truncated at the length limit.
        seconds: Duration of the generation.
        interruptions: Number of interruptions for updates of the weights, or None if the call is
            not interruptible.
    """

    lengths: list[int]
    num_truncated: int
    seconds: float
    interruptions: int | None = None


def _compute_metrics(ranks: Sequence[GenerationCounts]) -> dict[str, float]:
    """Return the metrics of a generation over all ranks, or no metrics if nothing was sampled.

    `response_length` and `response_length_max` are the mean and maximum number of tokens of a
    completion. `truncated_fraction` is the share of completions that were truncated at the length
    limit. `tokens_per_second` is the total number of tokens divided by the duration of the slowest
    rank. For interruptible calls, `interruptions_max` is the maximum number of interruptions on a
    rank.
    """
    lengths = []
    for rank in ranks:
        for length in rank.lengths:
            lengths.append(length)
    if not lengths:
        return {}
    interrupted = []
    for rank in ranks:
        if rank.interruptions is not None:
            interrupted.append(rank.interruptions)
    return {
        **({"interruptions_max": float(max(interrupted))} if interrupted else {}),
        "response_length": sum(lengths) / len(lengths),
        "response_length_max": float(max(lengths)),
        "truncated_fraction": sum(rank.num_truncated for rank in ranks) / len(lengths),
        "tokens_per_second": sum(lengths) / max(rank.seconds for rank in ranks),
    }
