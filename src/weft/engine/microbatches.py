"""Splitting of a batch into micro-batches by number of tokens, and joining of their results.

A micro-batch is the input of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.data.groups import PART
from weft.data.sample import SequenceSample


def split_batch(
    batch: SequenceSample, max_tokens: int, unit: Literal["sequence", "group"]
) -> list[SequenceSample]:
    """Split a batch into micro-batches of at most `max_tokens` tokens.

    With unit "group", all completions of an id are in one micro-batch. With "sequence", the
    completions of an id are divided among several micro-batches if they are too large for one.
    Raises `ConfigError`, which names the option `max_tokens_per_microbatch`, if the batch cannot be
    split in this way.
    """
    if 0 < batch.token_costs().sum() <= max_tokens:
        return [batch]
    parts = batch.ungroup(max_tokens) if unit == "sequence" else batch
    return parts.split_by_tokens(max_tokens)


def join(parts: Sequence[SequenceSample], ids: Sequence[str]) -> SequenceSample:
    """Join the results of all micro-batches into one sample with these ids.

    Completions of an id that `split_batch` divided among several micro-batches are reunited.
    """
    return SequenceSample.gather(parts).regroup().select(ids=ids)


def list_sample_ids(part: SequenceSample) -> list[str]:
    """Return the ids of the samples that have completions in the micro-batch `part`.

    These are ids of the whole batch, without duplicates. If the completions of an id were divided
    among micro-batches, the ids of `part` have the form `id[first:stop]`; the result has the
    original id.
    """
    cuts = part.metadata.get(PART)
    return list(dict.fromkeys(part.ids if cuts is None else (c["id"] for c in cuts)))


def list_sequence_keys(part: SequenceSample) -> list[tuple[str, int]]:
    """Return (id, index of the completion within its id) for every sequence of a micro-batch.

    The index counts all completions of the id in the batch, so it does not depend on how they are
    divided among micro-batches.
    """
    counts = [len(group) for group in part.seqlens["completion"]]
    cuts = part.metadata.get(PART) or tuple({"id": id, "first": 0} for id in part.ids)
    sequence_keys: list[tuple[str, int]] = []
    for cut, count in zip(cuts, counts, strict=True):
        for k in range(count):
            sequence_keys.append((cut["id"], cut["first"] + k))
    return sequence_keys
