"""Splitting of batches into minibatches and data-parallel parts, and merging of the parts' results.

The parts are balanced by tokens. The master splits only metadata; workers find the tensors of their
parts with `take_samples`. Each data-parallel rank returns a result for its part; the outputs,
metrics and times of these results are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from weft import randomness
from weft.data import groups
from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult, Minibatches, Unit
from weft.runtime.calls import SECONDS, STARTED

OWNER = "completion_of"  # metadata column of single completions: the id of their group


def split(
    batch: SequenceSample, settings: Minibatches, ranks: int, *, seed: int, role: str, step: int
) -> list[list[SequenceSample]]:
    """Split a batch into minibatches, and each minibatch into one part per data-parallel rank.

    `settings` has the number of epochs, and the number or size of their minibatches. The result is
    indexed by [minibatch][rank] and contains the minibatches of all epochs in order. In epochs
    after the first, the ids are shuffled. Their order depends only on `seed`, `role`, `step` (the
    index of the call) and the epoch, so it is the same after a restart and on every layout.
    """
    parts: list[SequenceSample] = []
    for epoch in range(settings.epochs):
        epoch_batch = batch
        if epoch:
            order = randomness.draw_permutation(
                batch.num_ids, seed, f"minibatches/{role}/{epoch}", step
            )
            epoch_batch = batch.select(ids=[batch.ids[index] for index in order])
        parts += split_minibatches(epoch_batch, settings.count_for_batch(batch), settings.unit)
    return [split_over_ranks(part, ranks, settings.unit) for part in parts]


def split_minibatches(batch: SequenceSample, count: int, unit: Unit) -> list[SequenceSample]:
    """Split a batch into `count` minibatches of consecutive ids, as equal in size as possible.

    The completions of an id stay together if `unit` is "group", or if the number of ids is
    divisible by `count`. Otherwise, the batch is first split into single completions.
    """
    if count == 1:
        return [batch]
    if unit == "sequence" and batch.num_ids % count:
        batch = split_completions(batch)
    runs = np.array_split(np.arange(batch.num_ids), count)
    minibatches: list[SequenceSample] = []
    for run in runs:
        minibatches.append(batch.select(ids=[batch.ids[index] for index in run]))
    return minibatches


def split_over_ranks(batch: SequenceSample, ranks: int, unit: Unit) -> list[SequenceSample]:
    """Split a batch into one part of consecutive ids per rank, balanced by tokens.

    The number of tokens of the largest part is minimized. Groups of completions stay whole unless
    `unit` is "sequence" and there are fewer groups than ranks. Some parts may be empty.
    """
    if ranks == 1:
        return [batch]
    if unit == "sequence" and batch.num_ids < ranks:
        batch = split_completions(batch)
    parts = batch.split(min(ranks, batch.num_ids))
    return parts + [batch.select(ids=[])] * (ranks - len(parts))


def split_completions(batch: SequenceSample) -> SequenceSample:
    """Return the batch with one id per completion, named `id[k]`, each with its prompt.

    A value that exists once per original id is repeated for each completion of this id. If every id
    has only one completion, the batch is returned unchanged.
    """
    counts = np.diff(batch.offsets["completion"])
    if (counts == 1).all():
        return batch
    ids = []
    for id, count in zip(batch.ids, counts, strict=True):
        for index in range(count):
            ids.append(f"{id}[{index}]")
    lengths = {}
    data = {}
    for key in batch.keys:
        sizes = batch.lengths[key].astype(np.int64)
        num_sequences = np.diff(batch.offsets[key])
        chosen = np.arange(len(sizes))
        if not np.array_equal(num_sequences, counts):
            assert (num_sequences == 1).all(), (
                f"key {key!r} has neither one sequence per completion nor one per id"
            )
            chosen = np.repeat(chosen, counts)
        lengths[key] = [[int(size)] for size in sizes[chosen]]
        if key in batch.data:
            sequences = batch.sequences(key)
            data[key] = groups.concatenate([sequences[index] for index in chosen])
    metadata = {}
    for name, values in {OWNER: batch.ids, **batch.metadata}.items():
        metadata[name] = [
            value for value, count in zip(values, counts, strict=True) for _ in range(count)
        ]
    return SequenceSample.from_groups(ids, lengths, data, metadata)


def collect_owners(parts: Sequence[SequenceSample]) -> list[str]:
    """Return the original ids of samples that may have been split into single completions.

    The ids are in the order of `parts`, without duplicates.
    """
    owners = [part.metadata.get(OWNER, part.ids) for part in parts]
    return list(dict.fromkeys(itertools.chain.from_iterable(owners)))


def take_samples(batch: SequenceSample, parts: Sequence[SequenceSample]) -> list[SequenceSample]:
    """Return the samples in `parts` with their tensors, which are taken from `batch`.

    The samples in `parts` have only metadata. A sample can also be a single completion of a sample
    in `batch`.
    """
    if any(OWNER in part.metadata for part in parts):
        single = split_completions(batch)
    else:
        single = batch
    samples: list[SequenceSample] = []
    for part in parts:
        if part.ids == batch.ids:
            samples.append(batch)
        else:
            source = single if OWNER in part.metadata else batch
            samples.append(source.select(ids=part.ids))
    return samples


# -- results of the ranks


def merge_results(
    results: Sequence[MFCResult], counts: Sequence[int], ids: Sequence[str]
) -> MFCResult:
    """Merge the results of data-parallel ranks into one result.

    The outputs are in the order of `ids`. `counts` has the number of ids of each rank.
    """
    outputs = join_outputs([result.outputs for result in results], ids)
    return MFCResult(outputs, merge_metrics([result.metrics for result in results], counts))


def join_outputs(
    outputs: Sequence[SequenceSample | None], ids: Sequence[str]
) -> SequenceSample | None:
    """Join the outputs of all ranks, in the order of `ids`.

    Returns None if there are no outputs.
    """
    samples = [sample for sample in outputs if sample is not None and sample.num_ids]
    return SequenceSample.gather(samples).select(ids=ids) if samples else None


def merge_seen(results: Iterable[MFCResult]) -> SequenceSample | None:
    """Merge the samples that all ranks returned for display (`MFCResult.seen`).

    Each id occurs once in the result, even if several ranks returned it. Returns None if no rank
    has such samples.
    """
    samples_by_id: dict[str, SequenceSample] = {}
    for result in results:
        for sample in result.seen.unpack() if result.seen is not None else ():
            samples_by_id.setdefault(sample.ids[0], sample)
    return SequenceSample.gather(list(samples_by_id.values())) if samples_by_id else None


def merge_metrics(parts: Sequence[Mapping[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Combine the metrics of data-parallel ranks.

    `counts` has the number of ids of each rank. Metrics that are equal on all ranks are unchanged.
    For names that end in `_max` or `_min`, the maximum or minimum is kept. Other metrics are
    averaged over ids; ranks that lack a metric do not count in its average. The duration of the
    call is measured from the start of the first rank to the end of the last rank.
    """
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = []
        for part, count in zip(parts, counts, strict=True):
            if name in part:
                having.append((part[name], count))
        values = [value for value, _ in having]
        weight = sum(count for _, count in having)
        if name == STARTED or name.endswith("_min"):
            merged[name] = min(values)
        elif name.endswith("_max"):
            merged[name] = max(values)
        elif weight == 0 or all(value == values[0] for value in values):
            merged[name] = values[0]
        else:
            merged[name] = sum(value * count for value, count in having) / weight
    if STARTED in merged:
        merged[SECONDS] = max(part[STARTED] + part[SECONDS] for part in parts) - merged[STARTED]
    return merged
