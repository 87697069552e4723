"""Read and write tensors in safetensors files, either a single file or shards with an index.

A slice of a tensor can be read without reading the rest. Checkpoints in pickled `.bin` files can be
read, too. They are loaded by `torch.load(weights_only=True)`, which executes no pickled code and
accepts only tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from weft import writing
from weft.errors import CheckpointError, RunError
from weft.reading import check_file, describe_cause, explain_read_errors, read_object
from weft.topology import Slice, build_whole_slice
from weft.writing import replace_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TensorLayout = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape
CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED_SINGLE = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SHARD_BYTES = 5 * 10**9
MAX_HEADER_BYTES = 10**8  # bytes; the limit of safetensors
MAX_NAME_LENGTH = 200  # maximum characters of a tensor's name in a message


@dataclass(frozen=True)
class StoredTensor:
    """Location, dtype and shape of a tensor in a safetensors file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor in the file."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def read(self, where: Slice | None = None) -> Tensor:
        """Return the slice `where` of the tensor, or the whole tensor if `where` is None.

        Only the bytes of the slice are read. `safetensors.safe_open` is not used because it maps
        the whole file: pages that were read count as memory of the process, and the process is
        killed if the file is truncated meanwhile. It also parses the whole header at each open.
        Raises `CheckpointError` if the file is shorter than expected.
        """
        where = build_whole_slice(self.shape) if where is None else where
        shape = [each.stop - each.start for each in where]
        result = torch.empty(math.prod(shape), dtype=self.dtype)
        if not len(result):
            return result.reshape(shape)
        buffer = result.view(torch.uint8).numpy().data
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            position = 0
            for start, length in _list_byte_ranges(self, where):
                num_read = os.preadv(descriptor, [buffer[position : position + length]], start)
                # Linux reads at most 2 GiB per call.
                while num_read < length:
                    num_more = os.preadv(
                        descriptor,
                        [buffer[position + num_read : position + length]],
                        start + num_read,
                    )
                    if not num_more:
                        raise CheckpointError(f"{self.file} ended while {self.name} was read")
                    num_read += num_more
                position += length
        finally:
            os.close(descriptor)
        return result.reshape(shape)


class WeightFiles:
    """Tensors in the weight files of a model directory.

    `bytes_read` counts the bytes of tensors read so far, without headers. The constructor raises
    `CheckpointError` if there are no weights, a shard is missing or a file is truncated.
    """

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        self.directory = directory
        self.bytes_read = 0
        self._pickle_tensors: dict[str, Tensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        if (directory / INDEX).is_file():
            for file, names in _read_index(directory / INDEX).items():
                if not (directory / file).exists():
                    raise CheckpointError(
                        f"{directory / file} is missing, though the index of {directory} names it"
                    )
                self.tensors |= _select_tensors(
                    read_header(directory / file)[0], names, directory / INDEX
                )
        elif (directory / single).exists():
            self.tensors, _ = read_header(directory / single)
        else:
            self._pickle_tensors = _load_pickled(directory)

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self._pickle_tensors]

    @property
    def dtype(self) -> torch.dtype:
        """Most common dtype of the tensors, by number of elements."""
        counts: Counter[torch.dtype] = Counter()
        for stored in self.tensors.values():
            counts[stored.dtype] += math.prod(stored.shape)
        for tensor in self._pickle_tensors.values():
            counts[tensor.dtype] += tensor.numel()
        return counts.most_common(1)[0][0]

    def get_shape(self, name: str) -> tuple[int, ...]:
        if name in self._pickle_tensors:
            return tuple(self._pickle_tensors[name].shape)
        return self.tensors[name].shape

    def get_dtype(self, name: str) -> torch.dtype:
        if name in self._pickle_tensors:
            return self._pickle_tensors[name].dtype
        return self.tensors[name].dtype

    def check_floats(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` if one of the tensors `names` is not floating-point.

        Quantized and damaged weights can contain integers.
        """
        for name in names:
            dtype = self.get_dtype(name)
            if not dtype.is_floating_point:
                dtype_name = str(dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{self.directory}: {name} is {dtype_name}, and weights are floats; use "
                    "unquantized weights"
                )

    def find_not_finite(self) -> str | None:
        """Return a message about the first tensor with NaN or infinite values, or None.

        Tensors are read one after the other until such a tensor is found.
        """
        for name in self.names:
            values = self.read(name)
            if values.dtype in CHECKED and not bool(values.isfinite().all()):
                file = self.tensors[name].file if name in self.tensors else self.directory
                count = int((~values.isfinite()).count_nonzero())
                return (
                    f"{file}: {name} holds {count:,} of {values.numel():,} numbers that are NaN or "
                    f"infinite"
                )
        return None

    def read(self, name: str, where: Slice | None = None) -> Tensor:
        """Return the slice `where` of a tensor, in the stored dtype.

        `where` has a `slice` for each dimension; None means the whole tensor. In a safetensors
        file, only the bytes of the slice are read.
        """
        if name in self._pickle_tensors:
            return (
                self._pickle_tensors[name] if where is None else self._pickle_tensors[name][where]
            )
        tensor = self.tensors[name].read(where)
        self.bytes_read += tensor.nbytes
        return tensor


def _list_byte_ranges(stored: StoredTensor, where: Slice) -> Iterator[tuple[int, int]]:
    """Yield (first byte, number of bytes) of each contiguous part of a slice, in order.

    `where` is the slice of the tensor `stored`; the bytes are counted from the start of the file.
    """
    shape = stored.shape
    size = stored.dtype.itemsize
    whole_from = len(shape)  # dimensions from here on are read in full
    while whole_from and (where[whole_from - 1].start, where[whole_from - 1].stop) == (
        0,
        shape[whole_from - 1],
    ):
        whole_from -= 1
    split = max(whole_from - 1, 0)  # the dimension that is read in part, as one range
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if shape:
        length = (where[split].stop - where[split].start) * strides[split]
    else:
        length = 1
    first_element = where[split].start * strides[split] if shape else 0
    for outer in itertools.product(*(range(s.start, s.stop) for s in where[:split])):
        offset = first_element + sum(i * strides[dim] for dim, i in enumerate(outer))
        yield stored.start + offset * size, length * size


def _read_index(index: Path) -> dict[str, list[str]]:
    """Read an index file, and return the names of the tensors in each weight file.

    The result maps file names to tensor names. Raises `CheckpointError` if the index is invalid or
    names files in another directory.
    """
    file_by_name = read_object(index, str(index), CheckpointError).get("weight_map")
    if not isinstance(file_by_name, dict) or not file_by_name:
        raise CheckpointError(f"{index} has no weight_map of tensors and their files")
    files: dict[str, list[str]] = {}
    for name, file in file_by_name.items():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise CheckpointError(
                f"{index}: {name} lies in {file!r}, which is not a file next to the index"
            )
        files.setdefault(file, []).append(name)
    return dict(sorted(files.items()))


def _select_tensors(
    tensors: dict[str, StoredTensor], names: list[str], index: Path
) -> dict[str, StoredTensor]:
    """Return the tensors `names`, which the index assigns to a weight file.

    `tensors` are all tensors in the weight file, and `index` is the path of the index, for
    messages. Raises `CheckpointError` if the weight file lacks one of the names.
    """
    for name in names:
        if name not in tensors:
            raise CheckpointError(
                f"{index}: says that {name} lies in a file that does not hold it; copy the files "
                f"again"
            )
    return {name: tensors[name] for name in names}


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors listed in the header of a safetensors file, by name, and its metadata.

    The file consists of the header's length (8 bytes), the header in JSON, and the tensors. Raises
    `CheckpointError` if the file is truncated or damaged: if a tensor's size does not match its
    shape and dtype, if two tensors overlap, or if some bytes belong to no tensor.
    """
    check_file(file, str(file), CheckpointError)
    # Read the header. Its length is checked first, because a damaged file may state gigabytes.
    size = file.stat().st_size
    with explain_read_errors(str(file), CheckpointError), file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8 or length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file, or is truncated: {size} bytes, a header of "
                f"{length}"
            )
        raw = handle.read(length)
    with explain_read_errors(
        f"{file} is not a safetensors file: its header cannot be read", CheckpointError
    ):
        header = json.loads(raw, object_pairs_hook=_build_unique_object)
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not a safetensors file: its header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(note, str) for note in metadata.values()
    ):
        raise CheckpointError(
            f"{file}: __metadata__ is not a mapping of texts; the header is damaged"
        )
    # Check that the file is not truncated.
    ends = []
    for entry in header.values():
        end_offset = _read_end_offset(entry)
        if end_offset is not None:
            ends.append(end_offset)
    if ends and 8 + length + max(ends) > size:
        raise CheckpointError(
            f"{file} is truncated: its header promises {8 + length + max(ends)} bytes, the file "
            f"has {size}; copy it again"
        )
    tensors = {name: _parse_entry(file, name, entry, 8 + length) for name, entry in header.items()}
    # Check that every byte after the header belongs to exactly one tensor.
    by_start = []
    for name, stored in tensors.items():
        if stored.end > stored.start:
            by_start.append((stored.start, stored.end, name))
    by_start.sort()
    previous = "the header"
    position = 8 + length
    for start, end, name in by_start:
        if start < position:
            raise CheckpointError(
                f"{file}: {previous} and {name} lie in the same bytes; the file is damaged"
            )
        if start > position:
            raise CheckpointError(
                f"{file}: {start - position:,} bytes between {previous} and {name} belong to no "
                "tensor; the file is damaged"
            )
        previous = name
        position = end
    if position != size:
        raise CheckpointError(
            f"{file}: {size - position:,} bytes behind the last tensor belong to none; the file is "
            f"damaged, copy it again"
        )
    return tensors, metadata


def _build_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dictionary for a JSON object with the given (key, value) pairs.

    Raises `ValueError` if a key occurs twice; by default, `json` would silently keep the last
    value.
    """
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        repeated = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{repeated!r} occurs twice")
    return entries


def _read_end_offset(entry: Any) -> int | None:
    """Return the second of a header entry's `data_offsets`, or None for an invalid entry."""
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and type(offsets[1]) is int:
        return offsets[1]
    return None


def _parse_entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """Return the location of the tensor that the header entry `entry` describes.

    `data_start` is the number of bytes before the tensors in the file. Raises `CheckpointError` for
    an invalid entry.
    """
    if len(name) <= MAX_NAME_LENGTH:
        shown_name = name
    else:
        shown_name = f"{name[:MAX_NAME_LENGTH]} ..."
    values: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype_name: Any = values.get("dtype")
    shape: Any = values.get("shape")
    offsets: Any = values.get("data_offsets")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(
            f"{file}: {shown_name} is {dtype_name}, which weft does not read; use unquantized "
            "weights"
        )
    if (
        not _are_counts(shape)
        or not _are_counts(offsets)
        or len(offsets) != 2
        or offsets[1] < offsets[0]
    ):
        raise CheckpointError(
            f"{file}: {shown_name} has shape {shape} and offsets {offsets}; the header is damaged"
        )
    num_bytes = math.prod(shape) * DTYPES[dtype_name].itemsize
    if num_bytes != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{file}: {shown_name} of shape {shape} in {dtype_name} takes {num_bytes:,} bytes, and "
            f"the header gives it {offsets[1] - offsets[0]:,}; the file is damaged"
        )
    return StoredTensor(file, name, DTYPES[dtype_name], tuple(shape), data_start + offsets[0])


def _are_counts(values: Any) -> bool:
    """Return whether `values` is a list of integers that are not negative."""
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)


def _load_pickled(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint in `.bin` files, without executing pickled code.

    Raises `CheckpointError` if there is no such checkpoint, or if it cannot be loaded.
    """
    if (directory / PICKLED_INDEX).is_file():
        files = list(_read_index(directory / PICKLED_INDEX))
    elif (directory / PICKLED_SINGLE).is_file():
        files = [PICKLED_SINGLE]
    else:
        raise CheckpointError(
            f"{directory} holds no weights: neither {SINGLE}, {INDEX} nor {PICKLED_SINGLE}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not (directory / file).exists():
            raise CheckpointError(f"{directory / file} is missing, though the index names it")
        tensors |= read_pickled_tensors(directory / file)
    return tensors


def read_pickled_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors in a file that `torch.save` wrote, without executing pickled code.

    The file is mapped into memory, unless its format is older than torch 1.6. Raises
    `CheckpointError` unless the file is a mapping from names to dense tensors.
    """
    try:
        with file.open("rb") as handle:
            # torch can map only zip archives, which it writes since version 1.6
            can_map = handle.read(4) == b"PK\x03\x04"
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=can_map)
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {describe_cause(error)}") from error
    except Exception as error:
        raise CheckpointError(
            f"{file} holds more than tensors and is not loaded: {describe_cause(error)}"
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, and no tensors by name")
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise CheckpointError(f"{file}: {name} is not a plain tensor")
    return content


# -- writing


def write(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    layouts: Mapping[str, TensorLayout],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the tensors as `model.safetensors`, or as shards with an index.

    `layouts` maps the name of each tensor to its dtype and shape, in the order of `tensors`. The
    shards are planned from these, so that only one tensor is in memory at a time. The tensors of a
    file have at most `shard_bytes`, except for a single larger tensor. Each file has a temporary
    name until it is complete. Raises `RunError` if writing fails.
    """
    sizes = {}
    for name, (dtype, shape) in layouts.items():
        sizes[name] = math.prod(shape) * dtype.itemsize
    shards = _split_shards(sizes, shard_bytes)
    if len(shards) == 1:
        names = [SINGLE]
    else:
        names = [format_shard_name(i, len(shards)) for i in range(len(shards))]
    remaining = iter(tensors)
    for name, shard_names in zip(names, shards, strict=True):
        planned = {member: layouts[member] for member in shard_names}
        write_one_by_one(directory / name, planned, itertools.islice(remaining, len(shard_names)))
    if len(shards) > 1:
        file_by_name = {}
        for name, shard_names in zip(names, shards, strict=True):
            for member in shard_names:
                file_by_name[member] = name
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": file_by_name}
        write_text(directory / INDEX, json.dumps(index, indent=2))
    current_files = {*names, INDEX} if len(shards) > 1 else {SINGLE}
    # Remove files of an earlier save that had other shards.
    for file in (*directory.glob("model*.safetensors"), directory / INDEX):
        if file.name not in current_files:
            file.unlink(missing_ok=True)


def write_one_by_one(
    file: Path,
    layouts: Mapping[str, TensorLayout],
    tensors: Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically, with one of the `tensors` in memory at a time.

    `layouts` maps the name of each tensor to its dtype and shape, in the order of `tensors`.
    `metadata` are texts to add to the header's metadata. As the library safetensors does, tensors
    with larger elements are placed first, so that all are aligned, and the header is padded with
    spaces to a multiple of 8 bytes. Raises `RunError` if writing fails.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in sorted(layouts, key=lambda name: (-layouts[name][0].itemsize, name)):
        dtype, shape = layouts[name]
        start = end
        end += math.prod(shape) * dtype.itemsize
        offsets = {"data_offsets": [start, end]}
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), **offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with replace_file(file) as partial, partial.open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            data_start = handle.tell()
            handle.truncate(data_start + end)
            names = iter(layouts)
            for name, tensor in tensors:
                assert name == next(names), "tensors come in the order of layouts"
                assert (tensor.dtype, tuple(tensor.shape)) == layouts[name], name
                handle.seek(data_start + header[name]["data_offsets"][0])
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                handle.write(flat.view(torch.uint8).numpy().data)
                del tensor, flat  # free them before the next tensor is made
            assert next(names, None) is None, "a tensor for every layout"
    except OSError as error:
        raise RunError(f"{file} could not be written: {error}") from error


def _split_shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of the tensors in each shard; `sizes` and `limit` are in bytes."""
    shards: list[list[str]] = [[]]
    remaining = limit
    for name, size in sizes.items():
        if size > remaining and shards[-1]:
            shards.append([])
            remaining = limit
        shards[-1].append(name)
        remaining -= size
    return shards


def format_shard_name(index: int, count: int) -> str:
    """Return the file name of the shard `index`, counted from 0, of `count` shards."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file atomically. Raises `RunError` if writing fails."""
    try:
        with replace_file(file) as partial:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
                partial,
                {"format": "pt"},
            )
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} could not be written: {error}") from error


def write_text(file: Path, text: str) -> None:
    """Write a small file atomically. Raises `RunError` if writing fails."""
    try:
        writing.write(file, text)
    except OSError as error:
        raise RunError(f"{file} could not be written: {error}") from error
