"""Micro-batches of a batch, and their conversion to the inputs of the network and the loss.

A micro-batch is the `SequenceSample` of one forward pass. It is converted to a `Packed` for the
network and a `RowBatch` for the loss.

Each completion is laid out as its prompt followed by its tokens. Prefixes that sequences have in
common are repeated or, on request, shared. The row of a completion token is the hidden state that
predicts the token: the hidden state of the preceding token. After an empty prompt, the first token
has no preceding token. Its row is then its own hidden state, with mask, log-prob and value 0.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.algorithms.base import to_host_array
from weft.data import groups
from weft.data.groups import PART, SCORED_ONCE
from weft.data.sample import SequenceSample
from weft.engine.shared_prefixes import find_shared_prefixes
from weft.errors import DataError
from weft.kernels import put
from weft.models.attention.contexts import Dense, PrefixContinuation, Prefixed
from weft.models.network.packed import Packed, SamplingSupport

Index = npt.NDArray[np.int64]
# minimum tokens of a shared prompt; its last token is never shared
MIN_PROMPT = 16
KEPT_IDS = 3  # ids of a minibatch that are kept
KEPT_TOKENS = 65_536  # maximum tokens of all completions of an id; ids with more are not kept
KEPT_OUTPUTS = ("logprobs", "scores")


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


def join_results(parts: Sequence[SequenceSample], ids: Sequence[str]) -> SequenceSample:
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


@dataclass(frozen=True)
class PackLayout:
    """Layout of a micro-batch's S sequences in a pack; all attributes are int64 arrays `[S]`.

    A sequence is a prompt with one completion. If sequences begin with the same tokens, they can
    share this prefix: the pack then contains it only once, before all of these sequences. A
    prompt's last token is never shared. The generator has the same rule, so that both round
    log-probs in the same way.

    Attributes:
        group: Index of the sequence's sample id in the micro-batch's list of ids.
        prompt: Number of prompt tokens.
        length: Number of completion tokens.
        first: Index of the first sequence that shares the prefix; the sequence's own index if
            nothing is shared.
        prefix: Number of tokens of the shared prefix; 0 if nothing is shared.
    """

    group: Index  # index of the sequence's id
    prompt: Index  # number of prompt tokens
    length: Index  # number of completion tokens
    first: Index  # first sequence with the same shared prefix; itself if nothing is shared
    prefix: Index  # number of tokens of the shared prefix

    @classmethod
    def from_sample(cls, sample: SequenceSample) -> PackLayout:
        """Return the layout without sharing: every completion has its own copy of the prompt.

        Raises `DataError` if there are no completions, or if a completion and its prompt are both
        empty.
        """
        if "completion" not in sample.data:
            raise DataError(
                f"the engine reads the key 'completion'; this batch has the keys {list(sample.keys)}"
            )
        group = sample.group_of("completion")
        length = sample.lengths["completion"].astype(np.int64)
        prompts = np.zeros(sample.num_ids, np.int64)
        if "prompt" in sample.data:
            prompts = sample.lengths["prompt"].astype(np.int64)
        empty = np.flatnonzero(length + prompts[group] == 0)
        if len(empty):
            raise DataError(
                f"id {sample.ids[group[empty[0]]]!r}: a sequence without any token cannot be "
                f"computed"
            )
        return cls(group, prompts[group], length, np.arange(len(group)), np.zeros_like(length))

    def share_by_id(self, *, least: int | None = None, spared: int = 0) -> PackLayout:
        """Return the layout in which completions of the same id share their prompt.

        A prompt is shared if it has `least` tokens (default `MIN_PROMPT`) or more, and if sharing
        saves the computation of at least `spared` tokens.
        """
        first = np.searchsorted(self.group, self.group)
        others = np.bincount(self.group)[self.group] - 1
        worth = (
            (others > 0)
            & (self.prompt >= (MIN_PROMPT if least is None else least))
            & ((self.prompt - 1) * others >= spared)
        )
        return replace(
            self,
            first=np.where(worth, first, self.first),
            prefix=np.where(worth, self.prompt - 1, 0),
        )

    def share_by_prefix(self, sample: SequenceSample) -> PackLayout:
        """Return the layout in which prompts share common prefixes, even if their ids differ.

        `sample` must be the sample of this layout. A shared prefix has at least `MIN_PROMPT` - 1
        tokens and never contains a prompt's last token (`weft.engine.shared_prefixes`).
        """
        if "prompt" not in sample.data:
            return self
        prompts = [to_host_array(prompt) for prompt in sample.sequences("prompt")]
        first = self.first.copy()
        prefix = self.prefix.copy()
        for shared in find_shared_prefixes(
            [prompts[id] for id in self.group], max(1, MIN_PROMPT - 1)
        ):
            first[list(shared.sequences)], prefix[list(shared.sequences)] = (
                shared.sequences[0],
                shared.size,
            )
        return replace(self, first=first, prefix=prefix)

    @property
    def lengths(self) -> Index:
        """Number of tokens of each sequence, `[S]`."""
        return self.prompt + self.length

    @property
    def num_saved_tokens(self) -> int:
        """Number of tokens that need not be computed again because prefixes are shared."""
        return int((self.prefix - self.lead_lengths).sum())

    @cached_property
    def order(self) -> Index:
        """Indices of the sequences in pack order, `[S]`.

        Sequences that share a prefix are adjacent.
        """
        return np.argsort(self.first, kind="stable")

    @cached_property
    def lead_lengths(self) -> Index:
        """Number of shared-prefix tokens placed directly before each sequence in the pack, `[S]`.

        It is 0 except for the first of the sequences that share the prefix.
        """
        return np.where(self.first == np.arange(len(self.first)), self.prefix, 0)

    @cached_property
    def segment_lengths(self) -> Index:
        """Lengths of the segments of the pack.

        A segment is a shared prefix, a continuation of one, or a whole sequence.
        """
        both = np.stack([self.lead_lengths, self.lengths - self.prefix], axis=1)[self.order]
        return both[np.stack([both[:, 0] > 0, np.ones(len(both), np.bool_)], axis=1)]

    @cached_property
    def starts(self) -> Index:
        """Index of each completion's first token in the pack, `[S]`."""
        ends = np.empty_like(self.length)
        ends[self.order] = np.cumsum((self.lead_lengths + self.lengths - self.prefix)[self.order])
        return ends - self.length

    def index_rows(self, extra: int = 0) -> tuple[Index, npt.NDArray[np.bool_]]:
        """Return the pack index of each output row, and a mask that is False for missing rows.

        Each completion has one output row per token, followed by `extra` rows. The output for a
        token is computed at the token before it, so the row has the index of that earlier token. If
        the prompt is empty, no token comes before the completion's first one. The row of this first
        token is then marked as missing, and has the index of the token itself.
        """
        counts = self.length + extra
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        row = within - 1 + np.repeat(self.starts, counts)
        exists = within + np.repeat(self.prompt, counts) > 0
        return np.where(exists, row, row + 1), exists

    def list_joins(self) -> tuple[PrefixContinuation, ...]:
        """Return the spans of each shared prefix and of its continuations in the pack."""
        ends = self.starts + self.length
        joins = []
        for first in self.order[self.lead_lengths[self.order] > 0]:
            last = np.flatnonzero(self.first == first)[-1]
            start = int(ends[first] - self.lengths[first] + self.prefix[first])
            joins.append(
                PrefixContinuation(
                    (start - int(self.lead_lengths[first]), start), (start, int(ends[last]))
                )
            )
        return tuple(joins)

    @property
    def num_cross_pairs(self) -> float:
        """Number of (query, key) pairs between shared prefixes and their continuations."""
        return float(((self.lengths - self.prefix) * self.prefix).sum())


def pack(
    sample: SequenceSample, layout: PackLayout, device: torch.device, *, extra: int = 0
) -> Packed:
    """Return the network's input for a micro-batch, packed as `layout` describes.

    Each completion has one row per token, followed by `extra` rows. For example, values need one
    extra row, for the value after the last token. The label of a row is the token whose log-prob is
    computed there. The labels of extra rows are not used.
    """
    prompts = sample.sequences("prompt") if "prompt" in sample.data else None
    completions = sample.sequences("completion")
    tokens = []
    positions = []
    for s in layout.order:
        lead = int(layout.lead_lengths[s])
        prefix = int(layout.prefix[s])
        if prompts is not None:
            prompt = prompts[layout.group[s]]
            tokens += [prompt[:lead], prompt[prefix:]]
        tokens.append(completions[s])
        own = np.arange(prefix, layout.lengths[s])
        if len(own) > 1 and SCORED_ONCE in sample.metadata:
            own[-1] -= 1  # a full context has no further position
        positions += [np.arange(lead), own]
    flat = put(torch.as_tensor(groups.concatenate(tokens)).to(torch.int64), device)
    rows, exists = layout.index_rows(extra)
    last = np.repeat(layout.starts + layout.length - 1, layout.length + extra)
    following = np.minimum(np.where(exists, rows + 1, rows), last)
    return Packed(
        tokens=flat,
        positions=put(np.concatenate(positions), device),
        attention=_build_context(layout, device),
        rows=put(rows, device),
        labels=flat[put(following, device)],
    )


def _build_context(layout: PackLayout, device: torch.device) -> Dense | Prefixed:
    sizes = layout.segment_lengths
    cu_seqlens = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    dense = Dense(put(cu_seqlens, device), int(sizes.max()), int(sizes.sum()))
    joins = layout.list_joins()
    if not joins:
        return dense
    return Prefixed(dense, joins, put(layout.starts + layout.length - 1, device))


class _SumBySequence(torch.autograd.Function):
    """Autograd function that sums the values of each sequence's rows: `[N]` to `[S]`.

    The sums are added in row order, so they are bitwise reproducible.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(lengths)
        ctx.num_rows = len(rows)
        return torch.segment_reduce(rows, "sum", lengths=lengths, initial=0.0, unsafe=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].repeat_interleave(ctx.saved_tensors[0], output_size=ctx.num_rows), None


class _RepeatByRow(torch.autograd.Function):
    """Autograd function that copies the value of each sequence to all its rows: `[S]` to `[N]`."""

    @staticmethod
    def forward(ctx: Any, sequences: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(lengths)
        # with output_size given, the host doesn't wait for the device
        return sequences.repeat_interleave(lengths, output_size=num_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        lengths = ctx.saved_tensors[0]
        by_row = gradients[0].contiguous()
        return (
            torch.segment_reduce(by_row, "sum", lengths=lengths, initial=0.0, unsafe=True),
            None,
            None,
        )


class SampleRows:
    """Input of a loss for one micro-batch; implements `weft.algorithms.base.RowBatch`.

    The batch has N rows (one per completion token) and S sequences. Floating-point values are
    converted to `dtype`.
    """

    def __init__(
        self, sample: SequenceSample, layout: PackLayout, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._sample = sample
        self._layout = layout
        self._device = device
        self._dtype = dtype
        self._counts = self._on_device(layout.length)
        self.num_rows = int(layout.length.sum())
        self.num_sequences = len(layout.length)
        self.group = self._on_device(layout.group)
        numbers = np.repeat(np.arange(self.num_sequences), layout.length)
        self.sequence = self._on_device(numbers)
        self._known: dict[str, Tensor] = {}
        self.exists = self._on_device(layout.index_rows()[1])
        if "loss_mask" in self:
            mask = self["loss_mask"]
        else:
            mask = torch.ones(self.num_rows, dtype=dtype, device=device)
        self.mask = mask * self.exists
        self.lengths = self.sum(self.mask)

    def __contains__(self, key: object) -> bool:
        return key in self._sample.data

    def __getitem__(self, key: str) -> Tensor:
        """Return the values of a key of the batch.

        The shape is `[N]` for one value per completion token, `[N, K]` for K values per token, and
        `[S]` for one value per sequence or id. If a completion of L tokens has L + 1 values, the
        last one is dropped. Raises `KeyError` if the batch lacks the key, and `DataError` for any
        other shape.
        """
        if key not in self._known:  # cached: a loss reads its keys again for every chunk of rows
            self._known[key] = self._read(key)
        return self._known[key]

    def _read(self, key: str) -> Tensor:
        sample = self._sample
        layout = self._layout
        if key not in sample.data:
            raise KeyError(f"the batch has no key {key!r}; its keys are {list(sample.data)}")
        values = put(sample.data[key], self._device)
        lengths = sample.lengths[key]
        if values.is_floating_point():
            values = values.to(self._dtype)
        if np.array_equal(lengths, layout.length):
            return values
        if np.array_equal(lengths, layout.length + 1):
            last = np.cumsum(lengths) - 1
            return values[self._on_device(np.delete(np.arange(len(values)), last))]
        if (lengths == 1).all() and len(lengths) == self.num_sequences:
            return values
        if (lengths == 1).all() and len(lengths) == sample.num_ids:
            return values[self.group]
        raise DataError(
            f"key {key!r} has neither one value per completion token nor one per sequence; a loss "
            f"cannot read it"
        )

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sum of `rows` [N] over each sequence, [S].

        On every device, the values are added in row order.
        """
        return _SumBySequence.apply(rows, self._counts)

    def spread(self, sequences: Tensor) -> Tensor:
        """Return each sequence's value repeated for all rows of the sequence, [N].

        `sequences` has one value per sequence, [S].
        """
        return _RepeatByRow.apply(sequences, self._counts, self.num_rows)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the better and the worse sequences of all P pairs, as two index tensors, each
        `[P]`.

        Two sequences of the same id form a pair if they have the same `comparison` and different
        ranks; the one with the smaller `rank` is the better one. `rank` and `comparison` are keys
        of the batch. Without the key `comparison`, each id is a single ranking. The pairs are in
        the order of the better sequences.
        """
        rank = to_host_array(self._sample.data["rank"])
        zeros = np.zeros_like(rank)
        if "comparison" in self:
            comparison = to_host_array(self._sample.data["comparison"])
        else:
            comparison = zeros
        group = self._layout.group
        better = []
        worse = []
        for first in range(self.num_sequences):
            same = (
                (group == group[first]) & (comparison == comparison[first]) & (rank > rank[first])
            )
            worse_indices = np.flatnonzero(same)
            better.append(np.full(len(worse_indices), first))
            worse.append(worse_indices)
        return self._on_device(np.concatenate(better)), self._on_device(np.concatenate(worse))

    def _on_device(self, array: npt.NDArray[Any]) -> Tensor:
        return put(np.ascontiguousarray(array), self._device)


def build_support(sample: SequenceSample, device: torch.device) -> SamplingSupport | None:
    """Return the ids that top-k, top-p or min-p kept at each row, or None if they are not recorded."""
    if "support" not in sample.data:
        return None
    counts = to_host_array(sample.data["support_counts"])
    return SamplingSupport(
        put(sample.data["support"], device), put(sample.data["support_counts"], device), counts
    )


def build_given_ids(sample: SequenceSample, device: torch.device) -> Tensor:
    """Return the ids whose log-probs are requested at each row, int `[N, K]` for K ids per row.

    Raises `DataError` if the batch does not contain these ids.
    """
    if "given_ids" not in sample.data:
        raise DataError(
            f"given_logprobs need the key 'given_ids'; this batch has {list(sample.data)}"
        )
    return put(sample.data["given_ids"], device)


def to_sample(
    sample: SequenceSample, layout: PackLayout, out: Mapping[str, Tensor]
) -> SequenceSample:
    """Return the network's outputs on the CPU, grouped by the ids of `sample`.

    For a completion of L tokens, the shape is `[L + 1]` for values, `[1]` for scores, and `[L]` or,
    with K values per token, `[L, K]` for all other outputs.
    """
    bounds = np.cumsum(np.bincount(layout.group, minlength=sample.num_ids))[:-1]
    lengths_by_key: dict[str, list[list[int]]] = {}
    for key in out:
        if key == "scores":
            lengths = np.ones_like(layout.length)
        else:
            lengths = layout.length + (key == "values")
        lengths_by_key[key] = [part.tolist() for part in np.split(lengths, bounds)]
    return SequenceSample.from_groups(
        sample.ids,
        lengths_by_key,
        {key: value.cpu() for key, value in out.items()},
        sample.metadata,
    )


def choose_ids(ids: Iterable[str]) -> list[str]:
    """Choose at most `KEPT_IDS` ids whose outputs are kept for inspection.

    These are the ids with the smallest hashes. Each rank may first choose among its own ids:
    choosing among the results of all ranks then gives the same ids as choosing among all ids. The
    choice is therefore the same in every layout.
    """
    by_hash = sorted(ids, key=lambda id: (zlib.crc32(id.encode("utf-8", "surrogatepass")), id))
    return by_hash[:KEPT_IDS]


def keep_outputs(
    part: SequenceSample, out: Mapping[Any, Tensor], chosen: Collection[str]
) -> SequenceSample | None:
    """Return a micro-batch's outputs for the ids in `chosen`, to be kept for inspection.

    Each completion of L tokens has `logprobs` [L] or `scores` [1], without gradients, on the device
    of `out`. Ids whose completions have more than `KEPT_TOKENS` tokens in total are left out.
    Returns None if no id is left, if some ids may have completions outside this micro-batch, or if
    the loss uses neither log-probs nor scores.
    """
    names = [name for name in KEPT_OUTPUTS if name in out]
    if not names or any(name in part.metadata for name in (PART, "completion_of")):
        return None
    offsets = part.offsets["completion"]  # [num_ids + 1], in completions
    tokens = part.starts["completion"][offsets]  # [num_ids + 1]
    indices = []
    for index, id in enumerate(part.ids):
        if id in chosen and tokens[index + 1] - tokens[index] <= KEPT_TOKENS:
            indices.append(index)
    if not indices:
        return None
    groups = [part.seqlens["completion"][index] for index in indices]
    lengths = {
        "logprobs": [group.tolist() for group in groups],
        "scores": [[1] * len(group) for group in groups],
    }
    ends: dict[str, Any] = {"logprobs": tokens, "scores": offsets}
    data = {}
    for name in names:
        data[name] = torch.cat(
            [
                out[name].detach()[int(ends[name][index]) : int(ends[name][index + 1])]
                for index in indices
            ]
        )
    return SequenceSample.from_groups(
        [part.ids[index] for index in indices], {name: lengths[name] for name in names}, data
    )
