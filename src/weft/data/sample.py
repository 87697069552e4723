"""Batches of packed sequences of different lengths: `SequenceSample`.

All data that pass between the nodes of the dataflow graph (generation, rewards, training, ...) are
samples. Samples are immutable.

Each id denotes a group: one `prompt` and K >= 1 completions of it. The key `prompt` has one
sequence per id, and the key `completion` has K. Any other key, such as `loss_mask`, has either K
sequences per id (one for each completion) or one. The sequences of a key are concatenated in one
array, either a numpy array or a torch tensor. Operations on samples preserve the array type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.algorithms.base import to_host_array
from weft.data import groups, splits
from weft.data.groups import PART, Array, GroupRearrangement
from weft.errors import DataError, find_nearest

Ints = npt.NDArray[np.int32]
Values = Array | Sequence[Any]


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """Immutable batch of packed sequences with ids and metadata.

    The sequences are stored under keys such as `prompt` and `completion`. Under each key, an id can
    have any number of sequences. Raises `DataError` naming the key if the fields contradict each
    other.

    Attributes:
        ids: unique strings; integers are converted to strings
        lengths: for each key, the lengths of its sequences in the order of the ids, int32
        offsets: for each key, int32 [num_ids + 1]; the lengths of the sequences of id i are
            `lengths[key][offsets[key][i]:offsets[key][i + 1]]`
        data: for each key, its concatenated sequences, [sum of lengths, *trailing]; a key that is
            missing here has its data stored elsewhere
        metadata: for each name, a tuple with one value per id; the values are not tensors
    """

    ids: tuple[str, ...]
    lengths: Mapping[str, Ints]
    offsets: Mapping[str, Ints]
    data: Mapping[str, Array] = field(default_factory=dict)
    metadata: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _set(self, "ids", _convert_ids(tuple(self.ids)))
        for name in ("lengths", "offsets"):
            _set(self, name, {key: _freeze(value) for key, value in getattr(self, name).items()})
        _set(self, "data", dict(self.data))
        _set(self, "metadata", {key: tuple(value) for key, value in self.metadata.items()})
        _check_sample(self)

    @classmethod
    def from_default(
        cls,
        ids: Iterable[str],
        seqlens: Sequence[int] | Mapping[str, Sequence[int]],
        data: Mapping[str, Values],
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Build a sample with one sequence per id.

        `seqlens` is a list with one length per id, which applies to every key of `data`, or a
        mapping from each key to such a list.
        """
        if isinstance(seqlens, Mapping):
            by_key = seqlens
        else:
            by_key = dict.fromkeys(data, seqlens)
        single = {}
        for key, lengths in by_key.items():
            single[key] = [[int(n)] for n in lengths]
        return cls.from_groups(ids, single, data, metadata)

    @classmethod
    def from_groups(
        cls,
        ids: Iterable[str],
        seqlens: Mapping[str, Sequence[Sequence[int]]],
        data: Mapping[str, Values] | None = None,
        metadata: Mapping[str, Sequence[Any]] | None = None,
    ) -> SequenceSample:
        """Build a sample with any number of sequences per id.

        `seqlens[key][i]` lists the lengths of the sequences of id i. The values of `data` are
        converted to torch tensors.
        """
        lengths = {}
        offsets = {}
        for key, by_id in seqlens.items():
            lengths[key] = np.asarray([n for group in by_id for n in group], dtype=np.int32)
            offsets[key] = _compute_offsets([len(group) for group in by_id])
        tensors = {key: torch.as_tensor(value) for key, value in (data or {}).items()}
        return cls(
            tuple(ids),
            lengths,
            offsets,
            tensors,
            {k: tuple(v) for k, v in (metadata or {}).items()},
        )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.lengths)

    @property
    def num_ids(self) -> int:
        return len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def seqlens(self) -> dict[str, list[Ints]]:
        """Lengths of the sequences of each key, as a list with one int32 vector per id."""
        result: dict[str, list[Ints]] = {}
        for key in self.lengths:
            result[key] = np.split(self.lengths[key], self.offsets[key][1:-1]) if self.ids else []
        return result

    @cached_property
    def starts(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """Index at which each sequence starts in the data array, by key; int64 [num sequences + 1].

        The last value is the end of the last sequence.
        """
        result = {}
        for key, value in self.lengths.items():
            result[key] = np.concatenate([[0], np.cumsum(value, dtype=np.int64)])
        return result

    def num_sequences(self, key: str = "completion") -> int:
        return len(_get_known(self, key, self.lengths))

    def num_tokens(self, key: str = "completion") -> int:
        return int(_get_known(self, key, self.lengths).sum())

    def sequences(self, key: str) -> list[Array]:
        """Return the sequences of `key` in order, as views of its data array."""
        return groups.split_rows(_get_known(self, key, self.data), self.lengths[key])

    def group_of(self, key: str) -> npt.NDArray[np.int64]:
        """Return, for each sequence of `key`, the index of its id; int64 [num sequences]."""
        return np.repeat(
            np.arange(self.num_ids, dtype=np.int64), np.diff(_get_known(self, key, self.offsets))
        )

    def token_costs(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens that each id has in a forward pass; int64 [num_ids].

        The prompt is counted once for each completion.
        """
        if "completion" in self.lengths:
            cost = _sum_lengths(self, "completion")
            if "prompt" in self.lengths:
                cost = cost + _sum_lengths(self, "prompt") * np.diff(self.offsets["completion"])
            return cost
        return np.max(
            [_sum_lengths(self, key) for key in self.lengths], axis=0, initial=0
        ) + np.zeros(self.num_ids, np.int64)

    # -- joining and splitting

    @classmethod
    def gather(
        cls, samples: Sequence[SequenceSample], keys: Iterable[str] | None = None
    ) -> SequenceSample:
        """Concatenate `samples` in order, keeping only `keys` if they are given.

        If `keys` is None, all keys are kept, and all samples must have the same ones. Metadata
        values that a sample lacks are None in the result.
        """
        if not samples:
            raise DataError("gather of no samples: give at least one")
        names = list(samples[0].keys if keys is None else keys)
        if keys is None:
            _check_same_keys(samples)
        lengths = {}
        for k in names:
            lengths[k] = np.concatenate([_get_known(s, k, s.lengths) for s in samples])
        offsets = {}
        for k in names:
            offsets[k] = _compute_offsets(np.concatenate([np.diff(s.offsets[k]) for s in samples]))
        stored = []
        for k in names:
            if any(k in s.data for s in samples):
                stored.append(k)
        data = {}
        for k in stored:
            data[k] = groups.concatenate([_get_known(s, k, s.data) for s in samples])
        columns = dict.fromkeys(name for s in samples for name in s.metadata)
        metadata = {}
        for c in columns:
            metadata[c] = tuple(v for s in samples for v in s.metadata.get(c, (None,) * s.num_ids))
        return cls(tuple(i for s in samples for i in s.ids), lengths, offsets, data, metadata)

    def split(self, k: int) -> list[SequenceSample]:
        """Split into `k` samples of consecutive ids so that the largest token count is minimal.

        `gather` joins the samples again.
        """
        return _split_at(self, splits.split_evenly(self.token_costs(), k))

    def split_by_tokens(
        self, budget: int, field: str = "max_tokens_per_microbatch"
    ) -> list[SequenceSample]:
        """Split into the fewest samples of consecutive ids with at most `budget` tokens each.

        The token counts of the samples are as even as possible. Raises `ConfigError` naming the
        option `field` if a single id has more than `budget` tokens. `ungroup` can split such an id
        beforehand.
        """
        return _split_at(self, splits.split_by_budget(self.token_costs(), budget, field))

    def unpack(self) -> list[SequenceSample]:
        """Split into samples that have one id each."""
        return _split_at(self, list(range(self.num_ids + 1)))

    def select(
        self, ids: Iterable[str] | None = None, keys: Iterable[str] | None = None
    ) -> SequenceSample:
        """Return a sample with only the given ids, in the given order, and only the given keys.

        None keeps all ids or all keys. The data are views if the ids are consecutive, and copies
        otherwise.
        """
        names = self.keys if keys is None else tuple(keys)
        for name in names:
            _get_known(self, name, self.lengths)
        if keys is None:
            picked = self
        else:
            picked = _with_keys(self, {name: name for name in names})
        if ids is None:
            return picked
        ids = tuple(ids)
        if ids == self.ids:
            return picked
        place = {id: index for index, id in enumerate(self.ids)}
        missing = [id for id in ids if id not in place]
        if missing:
            raise DataError(f"ids {missing[:5]} are not in this sample of {self.num_ids} ids")
        return picked.at([place[id] for id in ids])

    def at(self, rows: Sequence[int]) -> SequenceSample:
        """Return a sample with the ids at the indices `rows`, in this order.

        The data are views if the indices are consecutive, and copies otherwise.
        """
        index = np.asarray(rows, dtype=np.int64)
        counts = {}
        for k, offset in self.offsets.items():
            counts[k] = (offset[index + 1] - offset[index]).astype(np.int64)
        chosen = {}
        for key, offset in self.offsets.items():
            chosen[key] = groups.concatenate_ranges(offset[index], counts[key])
        return _rearrange(
            self,
            GroupRearrangement(tuple(self.ids[row] for row in rows), list(rows), chosen, counts),
        )

    def ungroup(self, max_tokens: int, field: str = "max_tokens_per_microbatch") -> SequenceSample:
        """Split each group into parts of consecutive completions with at most `max_tokens` tokens.

        A group is an id with a prompt and several completions. Each part becomes a new id
        `id[first:stop]` with the whole prompt. The prompt's tokens are counted once for each
        completion of the part. `metadata["part"]` records the group that the part belongs to.
        `regroup` is the inverse. Raises `ConfigError` naming the option `field` if the prompt with
        a single completion exceeds `max_tokens`.
        """
        return _rearrange(
            self, groups.split_groups(self.ids, self.lengths, self.offsets, max_tokens, field)
        )

    def regroup(self) -> SequenceSample:
        """Join the parts made by `ungroup` into the original groups.

        The parts may be in any order; each group is placed where its first part is. Keys added
        since `ungroup` must have one sequence per completion. Raises `DataError` if a part of a
        group is missing.
        """
        if PART not in self.metadata:
            return self
        return _rearrange(self, groups.join_groups(self.metadata[PART], self.offsets), drop=PART)

    # -- samples with new keys

    def like(self, key: str, /, **values: Values) -> SequenceSample:
        """Return a sample that has only the new keys `values`, with the ids and lengths of `key`.

        For example, `sample.like("completion", advantages=..)` has one advantage per completion
        token. The arrays are converted to the array type of this sample. Raises `DataError` naming
        a key whose values do not fit the lengths.
        """
        return _build_like(self, key, _get_known(self, key, self.lengths), values)

    def one_per(self, key: str, /, **values: Values) -> SequenceSample:
        """Return a sample with new keys that have one value for each sequence of `key`.

        For example, `sample.one_per("completion", rewards=..)` has one reward per completion. The
        result has the ids of this sample, but none of its keys.
        """
        return _build_like(self, key, np.ones(self.num_sequences(key), dtype=np.int32), values)

    def meta(self) -> SequenceSample:
        """Return a copy of the sample with ids, lengths and metadata, but without data."""
        return SequenceSample(self.ids, self.lengths, self.offsets, {}, self.metadata)

    def remap_keys(self, mapping: Mapping[str, str]) -> SequenceSample:
        """Return a sample with renamed keys; `mapping` maps old names to new names.

        Other keys keep their names. Raises `DataError` if two keys would have the same name.
        """
        names = {key: mapping.get(key, key) for key in self.keys}
        if len(set(names.values())) < len(names):
            raise DataError(
                f"remap {dict(mapping)} gives two of the keys {list(names)} the same name"
            )
        return _with_keys(self, names)

    def update(self, other: SequenceSample) -> SequenceSample:
        """Return this sample with the keys and metadata of `other` added.

        Values of `other` replace those with the same name. Raises `DataError` if the samples do not
        have the same ids (the order may differ).
        """
        if set(self.ids) != set(other.ids):
            unshared = sorted(set(self.ids) ^ set(other.ids))
            raise DataError(
                f"update joins samples of the same ids; these differ in {len(unshared)}: "
                f"{unshared[:5]}"
            )
        new = other if other.ids == self.ids else other.select(ids=self.ids)
        unchanged_data = {}
        for key, value in self.data.items():
            if key not in new.lengths:
                unchanged_data[key] = value
        return SequenceSample(
            self.ids,
            {**self.lengths, **new.lengths},
            {**self.offsets, **new.offsets},
            {**unchanged_data, **new.data},
            {**self.metadata, **new.metadata},
        )

    def to(self, device: str | torch.device) -> SequenceSample:
        """Return a sample with the data as torch tensors on `device`."""
        data = {key: torch.as_tensor(value).to(device) for key, value in self.data.items()}
        return SequenceSample(self.ids, self.lengths, self.offsets, data, self.metadata)

    def numpy(self) -> SequenceSample:
        """Return a sample with the data as numpy arrays."""
        data = {key: to_host_array(value) for key, value in self.data.items()}
        return SequenceSample(self.ids, self.lengths, self.offsets, data, self.metadata)

    def to_bytes(self, compression: str | None = None) -> bytes:
        """Serialize the sample without pickle. `compression` is None or "zlib".

        Metadata must be JSON values (tuples become lists).
        """
        shapes = {}
        for key, value in self.lengths.items():
            shapes[f"lengths/{key}"] = torch.from_numpy(value.copy())
        for key, value in self.offsets.items():
            shapes[f"offsets/{key}"] = torch.from_numpy(value.copy())
        tensors = {f"data/{key}": torch.as_tensor(value) for key, value in self.data.items()}
        numpy_keys = []
        for key, value in self.data.items():
            if isinstance(value, np.ndarray):
                numpy_keys.append(key)
        values = {
            "ids": self.ids,
            "metadata": dict(self.metadata),
            **({"numpy": numpy_keys} if numpy_keys else {}),
        }
        return groups.encode({**shapes, **tensors}, values, compression)

    @classmethod
    def from_bytes(cls, raw: bytes) -> SequenceSample:
        """Deserialize bytes that `to_bytes` returned. Tensors are on the CPU.

        Raises `DataError` if the bytes have another format or are truncated.
        """
        tensors, values = groups.decode(raw)
        fields: dict[str, dict[str, Any]] = {"lengths": {}, "offsets": {}, "data": {}}
        for name, tensor in tensors.items():
            part, key = name.split("/", 1)
            as_tensor = part == "data" and key not in values.get("numpy", ())
            fields[part][key] = tensor if as_tensor else tensor.numpy()
        return cls(
            tuple(values["ids"]),
            fields["lengths"],
            fields["offsets"],
            fields["data"],
            values["metadata"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Read-only mappings cannot be pickled, but processes of one machine exchange samples.
        fields = (self.lengths, self.offsets, self.data, self.metadata)
        return SequenceSample, (self.ids, *(dict(value) for value in fields))

    def __repr__(self) -> str:
        keys = ", ".join(
            f"{key}[{self.num_tokens(key)}]{'' if key in self.data else '?'}" for key in self.keys
        )
        return f"SequenceSample({self.num_ids} ids; {keys})"


def _build_like(
    sample: SequenceSample, key: str, lengths: Ints, values: Mapping[str, Values]
) -> SequenceSample:
    example = sample.data.get(key, next(iter(sample.data.values()), torch.empty(0)))
    data = {name: groups.convert_like(example, array) for name, array in values.items()}
    offsets = dict.fromkeys(values, sample.offsets[key])
    return SequenceSample(sample.ids, dict.fromkeys(values, lengths), offsets, data)


def _with_keys(sample: SequenceSample, names: Mapping[str, str]) -> SequenceSample:
    """Return the sample with only some of its keys, under new names.

    `names` maps each key to keep to its new name.
    """
    lengths = {new: sample.lengths[old] for old, new in names.items()}
    offsets = {new: sample.offsets[old] for old, new in names.items()}
    data = {}
    for old, new in names.items():
        if old in sample.data:
            data[new] = sample.data[old]
    return SequenceSample(sample.ids, lengths, offsets, data, sample.metadata)


def _split_at(sample: SequenceSample, bounds: Sequence[int]) -> list[SequenceSample]:
    """Split a sample into parts of consecutive ids, whose data are views.

    Part i has the ids with the indices `bounds[i]` to `bounds[i + 1] - 1`.
    """
    parts = []
    for low, high in pairwise(bounds):
        span = {}
        for key, offset in sample.offsets.items():
            span[key] = (int(offset[low]), int(offset[high]))
        lengths = {key: sample.lengths[key][a:b] for key, (a, b) in span.items()}
        offsets = {key: sample.offsets[key][low : high + 1] - a for key, (a, _) in span.items()}
        data = {}
        for key, value in sample.data.items():
            data[key] = value[
                int(sample.starts[key][span[key][0]]) : int(sample.starts[key][span[key][1]])
            ]
        metadata = {name: values[low:high] for name, values in sample.metadata.items()}
        parts.append(SequenceSample(sample.ids[low:high], lengths, offsets, data, metadata))
    return parts


def _rearrange(sample: SequenceSample, new: GroupRearrangement, drop: str = "") -> SequenceSample:
    """Return the sample with its sequences regrouped under new ids, as described by `new`.

    Each new id inherits the metadata of an old id, except for the metadata named `drop`.
    """
    lengths = {key: sample.lengths[key][index] for key, index in new.index.items()}
    offsets = {key: _compute_offsets(counts) for key, counts in new.counts.items()}
    data = {}
    for key, value in sample.data.items():
        data[key] = groups.take_segments(value, sample.starts[key], new.index[key])
    metadata = {}
    for k, v in sample.metadata.items():
        if k != drop:
            metadata[k] = tuple(v[row] for row in new.rows)
    return SequenceSample(new.ids, lengths, offsets, data, {**metadata, **new.metadata})


def _get_known(sample: SequenceSample, key: str, values: Mapping[str, Any]) -> Any:
    """Return `values[key]`, or raise a `DataError` that suggests keys of the sample."""
    if key in values:
        return values[key]
    if key in sample.lengths:
        raise DataError(f"key {key!r} has lengths, but this sample has no data for it")
    close = find_nearest(key, sample.keys)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        hint = f"it holds {', '.join(sample.keys) or 'none'}"
    raise DataError(f"this sample has no key {key!r}; {hint}")


def _sum_lengths(sample: SequenceSample, key: str) -> npt.NDArray[np.int64]:
    """Return the number of tokens of `key` for each id; int64 [num_ids]."""
    return np.diff(sample.starts[key][sample.offsets[key]])


def _set(sample: SequenceSample, name: str, value: Any) -> None:
    object.__setattr__(sample, name, MappingProxyType(value) if isinstance(value, dict) else value)


def _freeze(value: npt.ArrayLike) -> Ints:
    """Return a vector as read-only int32, without making the caller's array read-only."""
    array = np.asarray(value, dtype=np.int32).view()
    array.flags.writeable = False
    return array


def _compute_offsets(counts: npt.ArrayLike) -> Ints:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int32)


def _check_same_keys(samples: Sequence[SequenceSample]) -> None:
    keys = set(samples[0].keys)
    for sample in samples[1:]:
        unshared = sorted(keys ^ set(sample.keys))
        if unshared:
            raise DataError(
                f"gather: samples differ in the keys {unshared}; name the keys you want, or add "
                f"what is missing"
            )


def _convert_ids(ids: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the ids with integers converted to strings."""
    if set(map(type, ids)) <= {str}:  # the usual case, and a fast check
        return ids
    return tuple(str(id) if isinstance(id, int | np.integer) else id for id in ids)


def _check_sample(sample: SequenceSample) -> None:
    ids = sample.ids
    # The first condition is fast, and almost always false.
    if not set(map(type, ids)) <= {str} and not all(isinstance(id, str) for id in ids):
        raise DataError(
            f"ids are texts, but one is {next(id for id in ids if not isinstance(id, str))!r}"
        )
    if len(set(ids)) < len(ids):
        twice = sorted({id for id in ids if ids.count(id) > 1})[:5]
        raise DataError(f"ids are unique within a sample, but {twice} are there more than once")
    if sample.lengths.keys() != sample.offsets.keys():
        raise DataError(
            f"lengths have the keys {list(sample.lengths)}, offsets {list(sample.offsets)}; they "
            f"must agree"
        )
    for key, lengths in sample.lengths.items():
        offsets = sample.offsets[key]
        if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 0):
            raise DataError(f"key {key!r}: lengths must be one vector of non-negative counts")
        if (
            offsets.shape != (len(ids) + 1,)
            or offsets[0] != 0
            or offsets[-1] != len(lengths)
            or np.any(np.diff(offsets) < 0)
        ):
            raise DataError(
                f"key {key!r}: {len(lengths)} lengths do not belong to {len(ids)} ids as its "
                f"offsets say"
            )
    for key, value in sample.data.items():
        if key not in sample.lengths:
            raise DataError(f"key {key!r} has a tensor but no lengths")
        total = int(sample.lengths[key].sum(dtype=np.int64))
        if value.ndim == 0 or value.shape[0] != total:
            raise DataError(
                f"key {key!r}: its tensor has shape {tuple(value.shape)}, but its lengths sum to "
                f"{total}"
            )
    for name, values in sample.metadata.items():
        if len(values) != len(ids):
            raise DataError(f"metadata {name!r} has {len(values)} values for {len(ids)} ids")
