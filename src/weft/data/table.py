"""Tables of tokenized rows in memory and on disk.

A table is stored as one `SequenceSample` with small dtypes, such as int32 token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data import groups
from weft.data.lengths import EncodedSample
from weft.data.sample import SequenceSample
from weft.data.turns import TemplateOmission, merge_omissions

# Key -> (dtype in the table, dtype on the graph's edges).
DTYPES = {
    "prompt": (np.int32, torch.int64),
    "completion": (np.int32, torch.int64),
    "loss_mask": (np.bool_, torch.float32),
    "rank": (np.int32, torch.int64),
    "comparison": (np.int32, torch.int64),
    "margin": (np.float32, torch.float32),
    "label": (np.float32, torch.float32),
}


@dataclass(frozen=True)
class TokenizationReport:
    """Counts of the rows and samples of a source, and the columns that were read.

    Attributes:
        rows: number of rows
        prompts_cut: number of samples with a truncated prompt
        answers_cut: number of samples with a truncated answer
        both_cut: number of samples in which both the prompt and the answer were truncated
        dropped: number of samples dropped because of their length
        read: columns that were read
        held: columns that have a value in at least one row
        cut: parts of trained turns that the chat template omits
    """

    rows: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    both_cut: int = 0
    dropped: int = 0
    read: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    cut: tuple[TemplateOmission, ...] = ()

    def __add__(self, other: TokenizationReport) -> TokenizationReport:
        return TokenizationReport(
            self.rows + other.rows,
            self.prompts_cut + other.prompts_cut,
            self.answers_cut + other.answers_cut,
            self.both_cut + other.both_cut,
            self.dropped + other.dropped,
            self.read | other.read,
            self.held | other.held,
            merge_omissions([*self.cut, *other.cut]),
        )

    @property
    def too_long(self) -> int:
        """Number of samples that were truncated or dropped."""
        return self.prompts_cut + self.answers_cut - self.both_cut + self.dropped

    @property
    def unused(self) -> list[str]:
        """Columns that have values but were never read."""
        return sorted(self.held - self.read)

    def to_values(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        return {**asdict(self), "read": sorted(self.read), "held": sorted(self.held)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> TokenizationReport:
        sets = {name: frozenset(values[name]) for name in ("read", "held")}
        return cls(
            **{**values, **sets, "cut": tuple(TemplateOmission(**cut) for cut in values["cut"])}
        )


@dataclass(frozen=True)
class TokenTable:
    """Table of all samples of one source.

    Attributes:
        sample: all samples as one batch, with small dtypes
        rows: for each sample, the index of the row from which it was made; a row can have several
            samples
        report: report on the tokenized rows
    """

    sample: SequenceSample
    rows: npt.NDArray[np.int32]
    report: TokenizationReport

    def __len__(self) -> int:
        return self.sample.num_ids

    @property
    def ids(self) -> tuple[str, ...]:
        return self.sample.ids

    def __getitem__(self, index: int) -> SequenceSample:
        """Return the sample at `index`, with the dtypes used in batches (see `take`)."""
        return self.take([index])

    def take(self, indices: Sequence[int]) -> SequenceSample:
        """Return the samples at `indices` as one `SequenceSample`.

        The data have the dtypes used in batches, such as int64 token ids.
        """
        return cast_to_edge_dtypes(self.sample.at(indices))

    def get_encoded(self, index: int) -> EncodedSample:
        """Convert the sample at `index` back to the `EncodedSample` that it was made from."""
        sample = self.sample.at([index])

        def split_lists(key: str) -> list[Any]:
            if key in sample.keys:
                return [part.tolist() for part in sample.sequences(key)]
            return []

        token_keys = ("prompt", "completion", "loss_mask")
        values = {key: sample.data[key].tolist() for key in sample.keys if key not in token_keys}
        metadata = {name: value[0] for name, value in sample.metadata.items()}
        return EncodedSample(
            split_lists("prompt")[0],
            split_lists("completion"),
            split_lists("loss_mask"),
            values,
            metadata,
        )

    def count_tokens(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each sample. The prompt is counted once per completion."""
        return self.sample.token_costs()

    def compute_max_seqlen(self) -> int:
        """Return the length of the longest sequence (a prompt with one of its completions)."""
        return int(self.compute_seqlens().max(initial=0))

    def compute_seqlens(self) -> npt.NDArray[np.int64]:
        """Return the length of each sample's longest sequence (prompt and completion)."""
        lengths = self.sample.lengths
        sizes = lengths["prompt"].astype(np.int64)
        if "completion" in lengths:
            groups = self.sample.group_of("completion")
            np.maximum.at(
                sizes, groups, lengths["prompt"].astype(np.int64)[groups] + lengths["completion"]
            )
        return sizes

    @classmethod
    def from_rows(
        cls,
        ids: Sequence[str],
        encoded: Sequence[EncodedSample],
        rows: Sequence[int],
        report: TokenizationReport,
    ) -> TokenTable:
        """Build a table that contains encoded samples in the given order.

        `rows` are the row numbers of the samples. The keys of the table are the keys of the first
        sample.
        """
        kinds = ["prompt"]
        if encoded:
            if encoded[0].completions:
                kinds += ["completion", "loss_mask"]
            kinds += encoded[0].values
        seqlens = {}
        for key in kinds:
            seqlens[key] = [_list_lengths(row, key) for row in encoded]
        data = {key: _pack_rows(encoded, key) for key in kinds}
        columns = dict.fromkeys(name for row in encoded for name in row.metadata)
        metadata = {}
        for name in columns:
            metadata[name] = [row.metadata.get(name) for row in encoded]
        sample = SequenceSample.from_groups(ids, seqlens, data, metadata)
        return cls(sample, np.asarray(rows, dtype=np.int32), report)

    def to_bytes(self) -> bytes:
        values = {
            "ids": self.sample.ids,
            "metadata": dict(self.sample.metadata),
            "report": self.report.to_values(),
        }
        tensors = {"rows": torch.from_numpy(self.rows.copy())}
        for key in self.sample.keys:
            tensors[f"lengths/{key}"] = torch.from_numpy(self.sample.lengths[key].copy())
            tensors[f"offsets/{key}"] = torch.from_numpy(self.sample.offsets[key].copy())
            tensors[f"data/{key}"] = self.sample.data[key]
        return groups.encode(tensors, values)

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenTable:
        """Deserialize the output of `to_bytes`.

        Raises `DataError` if the bytes have another format.
        """
        tensors, values = groups.decode(raw)
        fields: dict[str, dict[str, Any]] = {"lengths": {}, "offsets": {}, "data": {}}
        rows = tensors.pop("rows").numpy()
        for name, tensor in tensors.items():
            part, key = name.split("/", 1)
            fields[part][key] = tensor if part == "data" else tensor.numpy()
        sample = SequenceSample(
            tuple(values["ids"]),
            fields["lengths"],
            fields["offsets"],
            fields["data"],
            values["metadata"],
        )
        return cls(sample, rows, TokenizationReport.from_values(values["report"]))


def cast_to_edge_dtypes(sample: SequenceSample) -> SequenceSample:
    """Convert samples of a table to the dtypes used in batches, such as int64 token ids."""
    return replace(
        sample, data={key: value.to(DTYPES[key][1]) for key, value in sample.data.items()}
    )


def _list_lengths(row: EncodedSample, key: str) -> list[int]:
    if key == "prompt":
        return [len(row.prompt)]
    if key in ("completion", "loss_mask"):
        return [len(completion) for completion in row.completions]
    return [1] * len(row.values[key])


def _pack_rows(rows: Sequence[EncodedSample], key: str) -> torch.Tensor:
    parts: list[Any] = []
    for row in rows:
        if key == "prompt":
            parts.append(row.prompt)
        elif key in ("completion", "loss_mask"):
            parts += row.completions if key == "completion" else row.masks
        else:
            parts.append(row.values[key])
    total = sum(map(len, parts))
    packed: npt.NDArray[Any] = np.empty(total, dtype=DTYPES[key][0])
    ends = np.cumsum([0, *map(len, parts)])
    for part, (start, stop) in zip(parts, pairwise(ends), strict=True):
        packed[start:stop] = part
    return torch.from_numpy(packed)
