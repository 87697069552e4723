"""Tokenized rows in memory and on disk, as one SequenceSample with small dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.data import codec
from weft.data.cuts import Cut, joined
from weft.data.lengths import Encoded
from weft.data.sample import SequenceSample

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
class Report:
    """Counts of a source's rows, and of the samples that were truncated or dropped.

    `both_cut`: number of samples with truncated prompt and answer. `read`: columns that were read;
    `held`: columns with a value in any row; `cut`: parts of trained turns that the chat template
    omits.
    """

    rows: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    both_cut: int = 0
    dropped: int = 0
    read: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    cut: tuple[Cut, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(
            self.rows + other.rows,
            self.prompts_cut + other.prompts_cut,
            self.answers_cut + other.answers_cut,
            self.both_cut + other.both_cut,
            self.dropped + other.dropped,
            self.read | other.read,
            self.held | other.held,
            joined([*self.cut, *other.cut]),
        )

    @property
    def too_long(self) -> int:
        """Number of samples that were truncated or dropped."""
        return self.prompts_cut + self.answers_cut - self.both_cut + self.dropped

    @property
    def unused(self) -> list[str]:
        """Return the columns with values that were read in no row."""
        return sorted(self.held - self.read)

    def to_values(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "read": sorted(self.read), "held": sorted(self.held)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Report:
        sets = {name: frozenset(values[name]) for name in ("read", "held")}
        return cls(**{**values, **sets, "cut": tuple(Cut(**each) for each in values["cut"])})


@dataclass(frozen=True)
class TokenTable:
    """All samples of one source.

    `rows[i]` is the number of the row that sample i was made from; a row can give several samples.
    """

    sample: SequenceSample
    rows: npt.NDArray[np.int32]
    report: Report

    def __len__(self) -> int:
        return self.sample.num_ids

    @property
    def ids(self) -> tuple[str, ...]:
        return self.sample.ids

    def __getitem__(self, index: int) -> SequenceSample:
        """Return sample `index` alone, in the dtypes of the graph's edges."""
        return self.at([index])

    def at(self, indices: Sequence[int]) -> SequenceSample:
        """Return these samples as one `SequenceSample`, in the dtypes of the graph's edges."""
        return on_edges(self.sample.at(indices))

    def encoded(self, index: int) -> Encoded:
        """Return sample `index` in the form in which it was encoded."""
        one = self.sample.at([index])

        def lists(key: str) -> list[Any]:
            if key in one.keys:
                return [part.tolist() for part in one.sequences(key)]
            return []

        kept = ("prompt", "completion", "loss_mask")
        values = {key: one.data[key].tolist() for key in one.keys if key not in kept}
        metadata = {name: value[0] for name, value in one.metadata.items()}
        return Encoded(
            lists("prompt")[0], lists("completion"), lists("loss_mask"), values, metadata
        )

    def costs(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each sample, the prompt counted per completion."""
        return self.sample.token_costs()

    def longest(self) -> int:
        """Return the length of the longest sequence, a prompt with one of its completions."""
        return int(self.sizes().max(initial=0))

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each sample's longest sequence (prompt and completion)."""
        lengths = self.sample.lengths
        sizes = lengths["prompt"].astype(np.int64)
        if "completion" in lengths:
            groups = self.sample.group_of("completion")
            np.maximum.at(
                sizes, groups, lengths["prompt"].astype(np.int64)[groups] + lengths["completion"]
            )
        return sizes

    @classmethod
    def build(
        cls, ids: Sequence[str], encoded: Sequence[Encoded], rows: Sequence[int], report: Report
    ) -> TokenTable:
        """Pack encoded samples in order; `rows` are their row numbers.

        The keys are those of the first sample.
        """
        kinds = _kinds(encoded[0]) if encoded else ("prompt",)
        seqlens = {key: [_lengths(row, key) for row in encoded] for key in kinds}
        data = {key: _packed(encoded, key) for key in kinds}
        columns = dict.fromkeys(name for row in encoded for name in row.metadata)
        metadata = {name: [row.metadata.get(name) for row in encoded] for name in columns}
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
        return codec.encode(tensors, values)

    @classmethod
    def from_bytes(cls, raw: bytes) -> TokenTable:
        """Read the output of `to_bytes`. Raises `DataError` for other bytes."""
        tensors, values = codec.decode(raw)
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
        return cls(sample, rows, Report.from_values(values["report"]))


def on_edges(sample: SequenceSample) -> SequenceSample:
    """Convert samples of a table to the dtypes of the graph's edges."""
    return replace(
        sample, data={key: value.to(DTYPES[key][1]) for key, value in sample.data.items()}
    )


def _kinds(row: Encoded) -> tuple[str, ...]:
    answers = ("completion", "loss_mask") if row.completions else ()
    return ("prompt", *answers, *row.values)


def _lengths(row: Encoded, key: str) -> list[int]:
    if key == "prompt":
        return [len(row.prompt)]
    if key in ("completion", "loss_mask"):
        return [len(completion) for completion in row.completions]
    return [1] * len(row.values[key])


def _packed(rows: Sequence[Encoded], key: str) -> torch.Tensor:
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
