"""Merging of the results of a call's ranks: their outputs, metrics and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult
from weft.runtime.group import SECONDS, STARTED
from weft.runtime.split import join_outputs


def merge_results(
    results: Sequence[MFCResult], counts: Sequence[int], ids: Sequence[str]
) -> MFCResult:
    """Merge the results of data-parallel ranks into one result.

    The outputs are in the order of `ids`. `counts` has the number of ids of each rank.
    """
    outputs = join_outputs([result.outputs for result in results], ids)
    return MFCResult(outputs, merge_metrics([result.metrics for result in results], counts))


def merge_seen(results: Iterable[MFCResult]) -> SequenceSample | None:
    """Merge the samples that all ranks returned for display (`MFCResult.seen`).

    Each id occurs once in the result, even if several ranks returned it. Returns None if no rank
    has such samples.
    """
    samples_by_id: dict[str, SequenceSample] = {}
    for result in results:
        for one in result.seen.unpack() if result.seen is not None else ():
            samples_by_id.setdefault(one.ids[0], one)
    return SequenceSample.gather(list(samples_by_id.values())) if samples_by_id else None


def merge_metrics(parts: Sequence[Mapping[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Combine the metrics of data-parallel ranks.

    `counts` has the number of ids of each rank. Metrics that are equal on all ranks are unchanged.
    For names that end in `_max` or `_min`, the maximum or minimum is kept. Other metrics are
    averaged over ids; ranks that lack a metric do not count in its average. The duration of the
    call is measured from the start of the first rank to the end of the last rank.
    """
    whole: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = []
        for part, count in zip(parts, counts, strict=True):
            if name in part:
                having.append((part[name], count))
        values = [value for value, _ in having]
        weight = sum(count for _, count in having)
        if name == STARTED or name.endswith("_min"):
            whole[name] = min(values)
        elif name.endswith("_max"):
            whole[name] = max(values)
        elif weight == 0 or all(value == values[0] for value in values):
            whole[name] = values[0]
        else:
            whole[name] = sum(value * count for value, count in having) / weight
    if STARTED in whole:
        whole[SECONDS] = max(part[STARTED] + part[SECONDS] for part in parts) - whole[STARTED]
    return whole
