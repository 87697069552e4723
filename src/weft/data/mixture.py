"""Selection, order and random pairing of the samples of an epoch.

All draws depend only on the seed and the epoch, so they do not depend on the number of devices. A
pair of short samples counts as one id of a batch, so that batches of short samples have more
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SourceShare:
    """Number of training samples of a source, and the share of them that each epoch uses.

    At most one of `fraction`, `size` and `weight` is set. If none is set, all samples are used.

    Attributes:
        name: name of the source
        rows: number of training samples
        fraction: fraction of the samples to use in each epoch
        size: number of samples to use in each epoch
        weight: weight of the source in the mixture; the source provides a fraction
            `weight / (sum of all weights)` of the samples of each epoch
    """

    name: str
    rows: int
    fraction: float | None = None
    size: int | None = None
    weight: float | None = None


def make_generator(seed: int, purpose: str, epoch: int) -> np.random.Generator:
    """Return the random generator for one purpose in one epoch.

    `purpose` is a string that identifies the use of the random numbers. The generator produces the
    same numbers on every machine with the same version of numpy.
    """
    digest = hashlib.blake2b(f"{seed}|{purpose}|{epoch}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def count_per_epoch(shares: Sequence[SourceShare]) -> list[int]:
    """Return the number of samples that each source contributes to an epoch.

    Raises `ConfigError` if a source has fewer samples than its `size`.
    """
    if shares and shares[0].weight is not None:
        total = sum(share.weight or 0.0 for share in shares)
        parts = [(share.weight or 0.0) / total for share in shares]
        # The scarcest source limits the epoch, since no row is used twice.
        length = min(share.rows / part for share, part in zip(shares, parts, strict=True))
        per_epoch: list[int] = []
        for share, part in zip(shares, parts, strict=True):
            per_epoch.append(min(share.rows, max(1, round(length * part))))
        return per_epoch
    return [_count_samples(share) for share in shares]


def _count_samples(share: SourceShare) -> int:
    if share.size is not None and share.size > share.rows:
        raise ConfigError(
            f"dataset.sources: {share.name} has size={share.size}, but only {share.rows} training "
            f"samples; "
            "lower size, or leave it out for all of them"
        )
    if share.size is not None:
        return share.size
    if share.fraction is None:
        return share.rows
    return max(1, round(share.rows * share.fraction))


def compute_epoch_order(
    shares: Sequence[SourceShare], seed: int, epoch: int, shuffle: bool
) -> tuple[Index, Index]:
    """Return the samples of an epoch in order, as int64 arrays (source indices, sample indices).

    If only a part of a source's samples is used per epoch, each epoch draws a new random subset of
    them, without replacement. Without `shuffle`, the sources follow each other, and samples are in
    file order.
    """
    sources = []
    samples = []
    for number, (share, count) in enumerate(zip(shares, count_per_epoch(shares), strict=True)):
        drawn = np.arange(share.rows, dtype=np.int64)
        if count < share.rows:
            drawn = np.sort(
                make_generator(seed, f"draw|{share.name}", epoch).permutation(share.rows)[:count]
            )
        sources.append(np.full(len(drawn), number, dtype=np.int64))
        samples.append(drawn)
    source = np.concatenate(sources)
    sample = np.concatenate(samples)
    if shuffle:
        order = make_generator(seed, "order", epoch).permutation(len(source))
        source = source[order]
        sample = sample[order]
    return source, sample


def hold_out(keys: Sequence[str], share: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the samples to hold out for validation, given the key of each sample.

    `share` is the fraction of the distinct keys to hold out. At least one key is held out, but
    never all. Nothing is held out if `share` is 0 or there are fewer than two distinct keys. The
    choice depends only on hashes of the keys, so it is the same in every run. Samples with the same
    key (such as the samples of one tree) stay together.
    """
    different = sorted(
        set(keys), key=lambda key: hashlib.blake2b(f"hold out|{key}".encode()).digest()
    )
    if share <= 0 or len(different) < 2:
        return np.zeros(len(keys), dtype=np.bool_)
    count = min(max(1, round(len(different) * share)), len(different) - 1)
    chosen = set(different[:count])
    return np.asarray([key in chosen for key in keys], dtype=np.bool_)


def pair_short(
    costs: Index, below: int, probability: float, draw: np.random.Generator
) -> tuple[Index, Index]:
    """Pair short samples at random by putting them next to each other in a new order.

    Each sample of fewer than `below` tokens is selected with `probability`. The first selected
    sample is paired with the second, the third with the fourth, and so on. A pair takes the
    position of its second sample. A selected sample without a partner is put at the end.

    Returns (order of the samples, boundaries). In the new order, the samples from boundary i up to,
    but not including, boundary i + 1 are a pair or a single sample.
    """
    is_selected = (draw.random(len(costs)) < probability) & (costs < below)
    units: list[list[int]] = []
    waiting: list[int] = []
    for place, selected in enumerate(is_selected.tolist()):
        if not selected:
            units.append([place])
        elif waiting:
            units.append([waiting.pop(), place])
        else:
            waiting.append(place)
    for place in waiting:
        units.append([place])
    order = np.asarray([place for unit in units for place in unit], dtype=np.int64)
    return order, np.cumsum([0, *map(len, units)]).astype(np.int64)
