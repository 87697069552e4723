"""Cutting a batch into micro-batches by tokens, and undoing it.

A micro-batch is what goes through the network at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.data.groups import PART
from weft.data.sample import SequenceSample


def cut(
    batch: SequenceSample, max_tokens: int, unit: Literal["sequence", "group"]
) -> list[SequenceSample]:
    """Parts of at most `max_tokens` tokens.

    `group` keeps an id whole; `sequence` cuts the completions of an id that is too large for one
    part. Raises `ConfigError` naming `max_tokens_per_microbatch` where that cannot be done.
    """
    if 0 < batch.token_costs().sum() <= max_tokens:
        return [batch]
    parts = batch.ungroup(max_tokens) if unit == "sequence" else batch
    return parts.split_by_tokens(max_tokens)


def join(parts: Sequence[SequenceSample], ids: Sequence[str]) -> SequenceSample:
    """The results of all parts as one sample of `ids`, groups made whole again."""
    return SequenceSample.gather(parts).regroup().select(ids=ids)


def sample_ids(part: SequenceSample) -> list[str]:
    """Ids as the user knows them, also where groups were cut."""
    cuts = part.metadata.get(PART)
    return list(dict.fromkeys(part.ids if cuts is None else (c["id"] for c in cuts)))


def sequence_keys(part: SequenceSample) -> list[tuple[str, int]]:
    """(id, index of the completion within its id) of every sequence, the same however groups were
    cut.
    """
    counts = [len(group) for group in part.seqlens["completion"]]
    cuts = part.metadata.get(PART) or tuple({"id": id, "first": 0} for id in part.ids)
    return [
        (cut["id"], cut["first"] + k)
        for cut, count in zip(cuts, counts, strict=True)
        for k in range(count)
    ]
