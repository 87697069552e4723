"""Splitting, joining and serialization of groups and arrays.

A group is a prompt with several completions. If it has too many tokens for a microbatch, it is
split into parts with fewer completions each; this needs index arithmetic only. Operations on arrays
return arrays of the same library as the input. Tensors and plain values are serialized without
pickle.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import array_api_compat
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data import splits
from weft.errors import DataError

Index = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
PART = "part"  # metadata of a part: its origin, {id, first, stop, count, shared}
# Name of the metadata that marks a batch as scored by a single pass and not trained on. In such a
# pass, prefixes may be shared across ids (otherwise, scoring and training must share the same
# prefixes), and the last token of a sequence needs no position, because it is only a label.
SCORED_ONCE = "scored_once"


@dataclass(frozen=True)
class GroupRearrangement:
    """New ids for a sample's sequences, after groups were split or joined.

    Attributes:
        ids: new ids
        rows: for each new id, the index of the old id whose metadata are copied to it
        index: for each key, the old indices of its sequences, listed in the new order; int64
        counts: for each key, the number of sequences of each new id; int64
        metadata: additional metadata of the new ids, by name
    """

    ids: tuple[str, ...]
    rows: list[int]
    index: Mapping[str, Index]
    counts: Mapping[str, Index]
    metadata: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def split_groups(
    ids: Sequence[str],
    lengths: Mapping[str, Ints],
    offsets: Mapping[str, Ints],
    max_tokens: int,
    option: str,
) -> GroupRearrangement:
    """Split groups into parts of consecutive completions with at most `max_tokens` tokens per part.

    A group is a prompt with several completions, stored under one id. Every part has the whole
    prompt, which is counted once for each completion. `lengths` and `offsets` are fields of a
    `SequenceSample`. The new metadata record which group each part comes from.

    Under every key, an id must have either a single sequence or one sequence per completion;
    otherwise `DataError` is raised. Raises `ConfigError` naming `option` if a single completion
    with its prompt exceeds `max_tokens`.
    """
    if "completion" in lengths:
        main = "completion"
    else:
        main = max(lengths, key=lambda key: len(lengths[key]))
    parts: list[dict[str, Any]] = []
    rows: list[int] = []
    chosen: dict[str, list[Index]] = {key: [] for key in lengths}
    for row, id in enumerate(ids):
        # Count the group's sequences; keys with one sequence for several completions are shared.
        first = {key: int(offset[row]) for key, offset in offsets.items()}
        sizes = {key: int(offset[row + 1]) - first[key] for key, offset in offsets.items()}
        count = sizes[main]
        for key, size in sizes.items():
            if size not in (1, count):
                raise DataError(
                    f"id {id!r}: key {key!r} has {size} sequences; a group has 1 or {count}"
                )
        shared = sorted(key for key, size in sizes.items() if size != count)
        # Split the completions by token cost, each with the whole prompt.
        if "prompt" in lengths and main != "prompt":
            prompt = int(lengths["prompt"][first["prompt"]])
        else:
            prompt = 0
        costs = lengths[main][first[main] : first[main] + count].astype(np.int64) + prompt
        if costs.sum() <= max_tokens:
            bounds = [0, count]
        else:
            bounds = splits.split_by_budget(costs, max_tokens, option)
        # Record the parts and the sequences they consist of.
        for low, high in pairwise(bounds):
            parts.append({"id": id, "first": low, "stop": high, "count": count, "shared": shared})
            rows.append(row)
            for key, start in first.items():
                span = (0, 1) if key in shared else (low, high)
                chosen[key].append(np.arange(start + span[0], start + span[1], dtype=np.int64))
    names = tuple(f"{part['id']}[{part['first']}:{part['stop']}]" for part in parts)
    return _build_rearrangement(names, rows, chosen, {PART: tuple(parts)})


def join_groups(
    parts: Sequence[Mapping[str, Any]], offsets: Mapping[str, Ints]
) -> GroupRearrangement:
    """Return a rearrangement that joins parts into their original groups.

    `parts` contains the metadata that `split_groups` stored for each part. The sequences of part i
    for a key are those from `offsets[key][i]` up to, but not including, `offsets[key][i + 1]`.

    Groups are sorted by their first occurrence in `parts`. A sequence that all completions of a
    group share, such as the prompt, is taken from the part with the group's first completion. Keys
    added since the split must have one sequence per completion. Raises `DataError` if a part is
    missing or duplicated.
    """
    rows_by_id: dict[str, list[int]] = {}
    for row, part in enumerate(parts):
        rows_by_id.setdefault(part["id"], []).append(row)
    rows = [sorted(group, key=lambda row: parts[row]["first"]) for group in rows_by_id.values()]
    chosen: dict[str, list[Index]] = {key: [] for key in offsets}
    for group in rows:
        _check_complete([parts[row] for row in group])
        shared = parts[group[0]]["shared"]
        for key, offset in offsets.items():
            group_rows = group[:1] if key in shared else group
            chosen[key].append(
                np.concatenate(
                    [np.arange(offset[r], offset[r + 1], dtype=np.int64) for r in group_rows]
                )
            )
    return _build_rearrangement(tuple(rows_by_id), [group[0] for group in rows], chosen, {})


def _check_complete(parts: Sequence[Mapping[str, Any]]) -> None:
    end = 0
    for part in parts:
        if part["first"] != end:
            break
        end = part["stop"]
    if end != parts[0]["count"] or parts[-1]["stop"] != end:
        spans = ", ".join(f"{part['first']}:{part['stop']}" for part in parts)
        raise DataError(
            f"id {parts[0]['id']!r} has {parts[0]['count']} completions, but its parts are {spans}"
        )


def _build_rearrangement(
    ids: tuple[str, ...],
    rows: list[int],
    chosen: Mapping[str, list[Index]],
    metadata: Mapping[str, tuple[Any, ...]],
) -> GroupRearrangement:
    none = np.zeros(0, dtype=np.int64)
    index = {key: np.concatenate([none, *spans]) for key, spans in chosen.items()}
    counts = {}
    for key, spans in chosen.items():
        counts[key] = np.asarray([len(span) for span in spans], dtype=np.int64)
    return GroupRearrangement(ids, rows, index, counts, metadata)


Array = Any  # a numpy array, a torch tensor, or any other array of the array API standard


def concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays after converting them to the library and device of the first one."""
    first = arrays[0]
    return array_api_compat.array_namespace(first).concat(
        [convert_like(first, array) for array in arrays]
    )


def concatenate_ranges(
    starts: npt.NDArray[Any], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Concatenate the integer ranges [start, start + count) into one array.

    `starts` and `counts` have one value per range.
    """
    ends = np.cumsum(counts)
    shift = np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + shift


def take_segments(
    array: Array, starts: npt.NDArray[np.int64], index: npt.NDArray[np.int64]
) -> Array:
    """Concatenate the segments of `array` that `index` selects.

    Segment i consists of the rows `starts[i]` to `starts[i + 1]` (exclusive), and `index` lists the
    indices of the selected segments. If the segments are consecutive, the result is a view.
    """
    if len(index) == 0:
        return array[:0]
    if np.array_equal(index, np.arange(index[0], index[0] + len(index))):
        return array[int(starts[index[0]]) : int(starts[index[-1] + 1])]
    rows = concatenate_ranges(starts[index], starts[index + 1] - starts[index])
    xp = array_api_compat.array_namespace(array)
    return xp.take(array, xp.asarray(rows, device=array_api_compat.device(array)), axis=0)


def split_rows(array: Array, lengths: npt.NDArray[np.int32]) -> list[Array]:
    """Split an array into consecutive views of its rows; view i has `lengths[i]` rows."""
    if array_api_compat.is_torch_array(array):
        return list(torch.split(array, lengths.tolist()))  # one call makes all views
    ends = np.cumsum(lengths)
    rows: list[Array] = []
    for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
        rows.append(array[end - length : end])
    return rows


def convert_like(like: Array, values: Any) -> Array:
    """Convert `values` (an array or numbers) to the library and device of `like`."""
    xp = array_api_compat.array_namespace(like)
    if array_api_compat.is_array_api_obj(values) and array_api_compat.array_namespace(values) is xp:
        return values
    if array_api_compat.is_array_api_obj(values):
        source = values
    else:
        source = np.asarray(values)
    return xp.asarray(source, device=array_api_compat.device(like))


MAGIC = b"weft1\n"
COMPRESSIONS = (None, "zlib")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def encode(tensors: Mapping[str, Tensor], values: Any, compression: str | None = None) -> bytes:
    """Serialize named tensors and JSON values to bytes.

    Raises `DataError` for values that JSON cannot represent, and for an unknown dtype or
    compression.
    """
    if compression not in COMPRESSIONS:
        raise DataError(
            f"compression={compression!r}: must be one of {', '.join(map(str, COMPRESSIONS))}"
        )
    layout = []
    buffers = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise DataError(
                f"key {name!r} has dtype {dtype}, which cannot be serialized; known: "
                f"{', '.join(DTYPES)}"
            )
        layout.append([name, dtype, list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        buffers.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    body = b"".join(buffers)
    if compression == "zlib":
        body = zlib.compress(body, 1)
    try:
        header = json.dumps(
            {"tensors": layout, "values": values, "compression": compression}
        ).encode()
    except TypeError as error:
        raise DataError(
            f"metadata must be JSON values (text, numbers, lists, mappings): {error}"
        ) from error
    return MAGIC + len(header).to_bytes(8, "little") + header + body


def decode(raw: bytes) -> tuple[dict[str, Tensor], Any]:
    """Deserialize the output of `encode` to (tensors, values).

    Raises `DataError` if the bytes have another format or are truncated.
    """
    if not raw.startswith(MAGIC):
        raise DataError("these bytes are not a SequenceSample: they do not begin with its header")
    start = len(MAGIC) + 8
    length = int.from_bytes(raw[len(MAGIC) : start], "little")
    header = json.loads(raw[start : start + length])
    body = raw[start + length :]
    if header["compression"] == "zlib":
        body = zlib.decompress(body)
    tensors = {}
    position = 0
    for name, dtype, shape in header["tensors"]:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        size = tensor.numel() * tensor.element_size()
        if position + size > len(body):
            raise DataError(
                f"the bytes end within key {name!r}: there are {len(body)} of at least "
                f"{position + size} bytes"
            )
        if size:
            tensor = torch.frombuffer(
                bytearray(body[position : position + size]), dtype=DTYPES[dtype]
            ).reshape(shape)
        tensors[name] = tensor
        position += size
    return tensors, header["values"]
