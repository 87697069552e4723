"""Read and write EasyLM's weight files with one tensor in memory, without jax and flax.

    stream = TensorStream(find_source("params::out/streaming_params_20384"))
    stream.tensors["transformer/h/0/attention/wq/kernel"].shape     # no tensor is read yet
    stream.read("transformer/h/0/attention/wq/kernel")
    write_tensors(path, layouts, tensors, streaming=True)

A stream is a sequence of msgpack values [key, data], one for each tensor. The key is a list such as
[transformer, h, 0, attention, wq, kernel]. `data` is a binary value that contains another msgpack
value: an extension of type 1 with [shape, name of the dtype, bytes of the tensor] or, if the tensor
has more than 2**30 bytes, a map {__msgpack_chunked_array__, shape, chunks} whose chunks are flat
tensors. In a train state, the keys of the weights begin with params/params.

The other file format (`flax_params::`) is a single msgpack value: nested maps whose leaves are the
same extensions or maps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from weft.checkpoints.weight_files import TensorLayout
from weft.compat.easylm.msgpack_headers import MessageCursor, pack, pack_text
from weft.errors import CheckpointError, ConfigError, RunError, find_nearest
from weft.reading import check_file, explain_read_errors
from weft.storage.buckets import BucketFolder, explain_store_errors, is_remote
from weft.storage.copies import copy_file
from weft.writing import replace_file

IN_TRAIN_STATE = "params/params/"  # beginning of the keys of weights in a train state
# prefix of a checkpoint's path -> beginning of the keys of its weights
PREFIXES = {
    "params": "",
    "trainstate_params": IN_TRAIN_STATE,
    "trainstate": IN_TRAIN_STATE,
    "flax_params": "",
}
PARAMS = "streaming_params"
TRAIN_STATE = "streaming_train_state"
VALUE = "value_"  # beginning of the file names of PPO's critics
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint64": torch.uint64,
    "uint32": torch.uint32,
    "uint16": torch.uint16,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNKED = "__msgpack_chunked_array__"
ARRAY = 1  # type of flax's extension for arrays
SCALAR = 3  # type of flax's extension for numpy scalars
TRUE = b"\xc3"
CHUNK_BYTES = 2**30  # larger tensors are split into chunks
MAX_DIMS = 8
MAX_LEVELS = 32
# first bytes of files that users may mistake for a stream -> problem for the message
OTHER_FILES = {
    b"PK\x03\x04": "is a zip archive, such as a checkpoint of PyTorch",
    b"\x1f\x8b": "is compressed by gzip; decompress it",
    b"version https://git-lfs": "is a pointer of Git LFS, not the file; run git lfs pull",
    **{
        bytes([0x80, protocol]): "is a pickle, such as EasyLM's metadata.pkl or dataset.pkl, and "
        "contains no weights; pickles are never loaded, as they can run any program"
        for protocol in range(2, 6)
    },
}


@dataclass(frozen=True)
class StreamSource:
    """Weight file of EasyLM: its prefix (a key of `PREFIXES`) and path."""

    kind: str
    path: Path

    def __str__(self) -> str:
        return f"{self.kind}::{self.path}"


@dataclass(frozen=True)
class StreamTensor:
    """Dtype and shape of a tensor in a file, and (first byte, number of bytes) of its parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]


# -- the name of a checkpoint


def find_source(text: str, option: str = "load_checkpoint", *, value: bool = False) -> StreamSource:
    """Return the file that a checkpoint such as `params::DIR/streaming_params_100` names.

    If the path is a folder, the result is its file of the highest step. With `value`, files of
    critics (`value_streaming_params`) are preferred. Without a prefix, the kind follows from the
    name of the file. A file in a bucket is copied to this machine. Raises `ConfigError` for an
    unknown prefix, and `CheckpointError` if there is no such file; messages begin with `option`.
    """
    kind, separator, rest = text.partition("::")
    label = f"{option}={text}"
    if separator and kind not in PREFIXES:
        near = find_nearest(kind, PREFIXES)
        hint = f"did you mean {near[0]}::?" if near else f"known: {', '.join(PREFIXES)}"
        raise ConfigError(f"{label}: unknown prefix {kind}::; {hint}")
    place = rest if separator else text
    own_kind = kind if separator else ""
    if is_remote(place):
        path = _copy_source(place, own_kind, label, value=value)
    else:
        path = Path(place).expanduser()
        if path.is_dir():
            names = [file.name for file in path.iterdir() if file.is_file()]
            path = path / _find_newest(names, own_kind, label, value=value)
    check_file(path, label, CheckpointError)
    if not separator:
        kind = "trainstate_params" if TRAIN_STATE in path.name else "params"
    return StreamSource(kind, path)


def _copy_source(url: str, kind: str, label: str, *, value: bool) -> Path:
    """Copy a weight file from a bucket, or the file of the highest step of a folder in a bucket.

    Returns the path of the copy.
    """
    bucket = BucketFolder.open(url, label, CheckpointError)
    with explain_store_errors(label, CheckpointError):
        names = bucket.list_files()
    if "" not in names:
        url = f"{url.rstrip('/')}/{_find_newest(names, kind, label, value=value)}"
    return copy_file(url, label, CheckpointError)


def _find_newest(names: Collection[str], kind: str, label: str, *, value: bool) -> str:
    """Return the name of the weight file of the highest step among the files of a folder.

    `kind` is the prefix before the path, or empty. A file without a step, which EasyLM overwrites
    at each save, is used if no file has a step.
    """
    stems = {"": (PARAMS, TRAIN_STATE), "params": (PARAMS,), "flax_params": (PARAMS,)}
    candidates = list(stems.get(kind, (TRAIN_STATE,)))
    if value:
        candidates = [*(VALUE + stem for stem in candidates), *candidates]
    for stem in candidates:
        steps = {}
        for name in names:
            match = re.fullmatch(rf"{stem}(?:_(\d+))?", name)
            if match:
                steps[int(match[1] or -1)] = name
        if steps:
            return steps[max(steps)]
    raise CheckpointError(
        f"{label}: the folder has no file {' or '.join(f'{stem}_STEP' for stem in candidates)}; "
        f"name a folder that EasyLM saved to, or a file"
    )


# -- reading


def open_stream(path: Path) -> BinaryIO:
    """Open a weight file for reading. This is the only place where weight files are opened."""
    return path.open("rb")


class TensorStream:
    """Tensors in a weight file of EasyLM.

    The constructor reads everything except the bytes of the tensors. It raises `CheckpointError` if
    the file is cut short, damaged or of another kind. A tensor's name is its key, joined by
    slashes, without `params/params/`.

    Attributes:
        source: the file
        tensors: tensors by name, in the order of the file
        bytes_read: total number of bytes that `read` has read
    """

    def __init__(self, source: StreamSource) -> None:
        self.source = source
        self.tensors: dict[str, StreamTensor] = {}
        self.bytes_read = 0
        where = str(source)
        with explain_read_errors(where, CheckpointError), open_stream(source.path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            _check_start(file.read(32), where, single=source.kind == "flax_params")
            file.seek(0)
            cursor = MessageCursor(file, where, 0, size)
            if source.kind == "flax_params":
                self._read_tree(cursor, ())
                if cursor.position != size:
                    raise cursor.fail(f"{size - cursor.position:,} bytes follow the last tensor")
            while cursor.position < size:
                self._read_entry(cursor, PREFIXES[source.kind])
        prefix = PREFIXES[source.kind]
        if not self.tensors and prefix:
            raise CheckpointError(
                f"{where}: none of its keys begins with {prefix}; write params:: before a file "
                f"that contains weights only"
            )
        if not self.tensors:
            raise CheckpointError(f"{where}: contains no tensors")
        if not prefix and any(name.startswith(IN_TRAIN_STATE) for name in self.tensors):
            raise CheckpointError(
                f"{where}: is a train state; write trainstate_params:: before its path"
            )

    def read(self, name: str) -> Tensor:
        """Read and return a tensor, in the dtype of the file."""
        stored = self.tensors[name]
        tensor = torch.empty(math.prod(stored.shape), dtype=stored.dtype)
        content: Any = tensor.view(torch.uint8).numpy().data
        where = f"{self.source}: {name}"
        filled = 0
        with explain_read_errors(where, CheckpointError), open_stream(self.source.path) as file:
            for start, size in stored.parts:
                file.seek(start)
                end = filled + size
                while filled < end:
                    count = file.readinto(content[filled:end])  # type: ignore[attr-defined]
                    if not count:
                        raise CheckpointError(f"{where}: the file ended while it was read")
                    filled += count
        self.bytes_read += filled
        return tensor.reshape(stored.shape)

    def _read_entry(self, cursor: MessageCursor, prefix: str) -> None:
        """Read the entry [key, data] of one tensor. Skip it if its key lacks the prefix."""
        start = cursor.position
        if cursor.read("array", "an entry of the stream") != 2:
            cursor.position = start
            raise cursor.fail("an entry of the stream is not a pair of a key and a tensor")
        levels = cursor.read("array", "a key")
        if not 1 <= levels <= MAX_LEVELS:
            raise cursor.fail(f"a key has {levels:,} names, and 1 to {MAX_LEVELS} are expected")
        name = "/".join([cursor.read_name("a name of a key") for _ in range(levels)])
        size = cursor.read("binary", f"the value of {name}")
        if not name.startswith(prefix):
            cursor.skip(size, name)
            return
        cursor.check_room(size, name)
        end = cursor.position + size
        value = MessageCursor(cursor.file, cursor.where, cursor.position, end)
        self._add(value, name.removeprefix(prefix), _read_tensor(value, name))
        if value.position != end:
            raise value.fail(f"{end - value.position:,} bytes follow the value of {name}")
        cursor.position = end

    def _read_tree(self, cursor: MessageCursor, key: tuple[str, ...]) -> None:
        """Read the nested maps of tensors below `key`."""
        name = "/".join(key)
        if len(key) > MAX_LEVELS:
            raise cursor.fail(f"{name} is nested deeper than {MAX_LEVELS} levels")
        start = cursor.position
        header = cursor.read_header()
        if header.kind != "map" or _is_chunked(cursor, header.size):
            cursor.move_to(start)
            self._add(cursor, name, _read_tensor(cursor, name))
            return
        for _ in range(header.size):
            self._read_tree(cursor, (*key, cursor.read_name("a name of a key")))

    def _add(self, cursor: MessageCursor, name: str, tensor: StreamTensor) -> None:
        if name in self.tensors:
            raise cursor.fail(f"{name} occurs twice")
        self.tensors[name] = tensor


def _check_start(start: bytes, where: str, *, single: bool) -> None:
    """Raise `CheckpointError` if the first bytes of a file show that it is of another kind.

    With `single`, a single msgpack value is expected (`flax_params::`), otherwise a stream.
    """
    if not start:
        raise CheckpointError(f"{where}: the file is empty; copy it again")
    for beginning, kind in OTHER_FILES.items():
        if start.startswith(beginning):
            raise CheckpointError(f"{where}: {kind}")
    if start[8:10] == b'{"':
        raise CheckpointError(f"{where}: is a safetensors file, not a stream of EasyLM")
    is_map = 0x80 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)
    if is_map and not single:
        raise CheckpointError(
            f"{where}: is a single msgpack value, not a stream; write flax_params:: before its path"
        )
    if not is_map and single:
        raise CheckpointError(
            f"{where}: is not a map of tensors; write params:: before the path of a stream"
        )


def _is_chunked(cursor: MessageCursor, size: int) -> bool:
    """Return whether a map of `size` entries, whose header was just read, is a chunked tensor."""
    if not size:
        return False
    start = cursor.position
    name = cursor.read_name("a name of a key")
    cursor.move_to(start)
    return name == CHUNKED


def _read_tensor(cursor: MessageCursor, name: str) -> StreamTensor:
    """Read the value of a tensor, without the tensor's bytes."""
    start = cursor.position
    header = cursor.read_header()
    if header.kind == "extension":
        return _read_array(cursor, name, header.size, header.tag)
    if header.kind != "map" or not _is_chunked(cursor, header.size):
        cursor.position = start
        raise cursor.fail(f"the value of {name} is of kind {header.kind}, not a tensor")
    shape = None
    chunks: list[StreamTensor] = []
    for _ in range(header.size):
        field = cursor.read_name(f"a field of {name}")
        if field == CHUNKED:
            cursor.read("constant", f"{field} of {name}")
        elif field == "shape":
            count = cursor.read("map", f"the shape of {name}")
            shape = _read_shape(cursor, name, count, numbered=True)
        elif field == "chunks":
            for index in range(cursor.read("map", f"the chunks of {name}")):
                _check_index(cursor, name, index)
                part = cursor.read_header()
                if part.kind != "extension":
                    raise cursor.fail(f"a chunk of {name} is of kind {part.kind}, not a tensor")
                chunks.append(_read_array(cursor, name, part.size, part.tag))
        else:
            raise cursor.fail(f"{name} has an unknown field {field!r}")
    if shape is None or not chunks:
        raise cursor.fail(f"{name} lacks its shape or its chunks")
    dtypes = {chunk.dtype for chunk in chunks}
    count = sum(math.prod(chunk.shape) for chunk in chunks)
    if len(dtypes) > 1 or count != math.prod(shape):
        raise cursor.fail(f"the chunks of {name} do not add up to a tensor of shape {shape}")
    return StreamTensor(chunks[0].dtype, shape, tuple(chunk.parts[0] for chunk in chunks))


def _read_array(cursor: MessageCursor, name: str, size: int, tag: int) -> StreamTensor:
    """Read flax's extension for a tensor after its header, which had `size` and `tag`."""
    if tag not in (ARRAY, SCALAR):
        raise cursor.fail(f"the value of {name} is an extension of type {tag}, not a tensor")
    cursor.check_room(size, name)
    end = cursor.position + size
    if cursor.read("array", f"the value of {name}") != 3:
        raise cursor.fail(f"the value of {name} is not a shape, a dtype and bytes")
    shape = _read_shape(cursor, name, cursor.read("array", f"the shape of {name}"))
    if tag == SCALAR and shape:
        raise cursor.fail(f"the value of {name} is a scalar of shape {shape}")
    kind = cursor.read_name(f"the dtype of {name}")
    if kind not in DTYPES:
        raise cursor.fail(f"{name} has the dtype {kind!r}, which weft does not read")
    count = cursor.read("binary", f"the bytes of {name}")
    needed = math.prod(shape) * DTYPES[kind].itemsize
    if count != needed:
        raise cursor.fail(
            f"{name} of shape {shape} in {kind} takes {needed:,} bytes, and has {count:,}"
        )
    start = cursor.skip(count, name)
    if cursor.position != end:
        raise cursor.fail(f"the size of {name} is {end - cursor.position:,} bytes off")
    return StreamTensor(DTYPES[kind], shape, ((start, count),))


def _read_shape(
    cursor: MessageCursor, name: str, length: int, *, numbered: bool = False
) -> tuple[int, ...]:
    """Read a shape of `length` dimensions. With `numbered`, its index precedes each dimension."""
    if length > MAX_DIMS:
        raise cursor.fail(f"{name} has {length:,} dimensions, more than {MAX_DIMS}")
    shape = []
    for index in range(length):
        if numbered:
            _check_index(cursor, name, index)
        shape.append(cursor.read("integer", f"a dimension of {name}"))
    return tuple(shape)


def _check_index(cursor: MessageCursor, name: str, index: int) -> None:
    """Read a key of a list that is stored as a map. Raise `CheckpointError` if it isn't `index`."""
    key = cursor.read_name(f"an index of {name}")
    if key != str(index):
        raise cursor.fail(f"{name} has the index {key!r} in place of {index}")


# -- writing


def write_tensors(
    path: Path,
    layouts: Mapping[str, TensorLayout],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    streaming: bool = True,
) -> None:
    """Write tensors as a stream, or as a single msgpack value if `streaming` is False.

    `layouts` maps the name of each tensor to its dtype and shape, and `tensors` yields the tensors
    in the same order. For a single value, which is a tree, names must be sorted. The result is
    byte for byte the file that EasyLM would write. `path` is replaced only once the file is
    complete. Raises `RunError` if writing fails, and `ConfigError` for a tensor that is too large
    for msgpack.
    """
    headers = {}
    for name, (dtype, shape) in layouts.items():
        headers[name] = _plan_pieces(name, dtype, shape)
        size = sum(len(header) + count for header, count in headers[name])
        if streaming and size >= 2**32:
            raise ConfigError(
                f"{name} of shape {shape} takes {size:,} bytes, and an entry of a stream has less "
                f"than 2**32; set --float_dtype=bf16"
            )
    openings = _open_entries(headers) if streaming else _open_subtrees(list(layouts))
    with _explain_write_errors(path), replace_file(path) as partial, partial.open("wb") as file:
        names = iter(layouts)
        for name, tensor in tensors:
            assert name == next(names), "tensors come in the order of layouts"
            assert (tensor.dtype, tuple(tensor.shape)) == layouts[name], name
            file.write(openings[name])
            content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            start = 0
            for header, count in headers[name]:
                file.write(header)
                file.write(content[start : start + count])
                start += count
            del tensor, content  # before the next one is read


@contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as failed:
        raise RunError(f"{path} could not be written: {failed}") from failed


def _plan_pieces(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> list[tuple[bytes, int]]:
    """Return (header, number of tensor bytes after it) for each part of a tensor's value."""
    if dtype not in DTYPE_NAMES:
        raise ConfigError(f"{name} is {dtype}, which a stream cannot store; set --float_dtype")
    count = math.prod(shape)
    size = dtype.itemsize
    if count * size <= CHUNK_BYTES:
        return [(_pack_array(dtype, shape), count * size)]
    step = CHUNK_BYTES // size
    lengths = [min(step, count - start) for start in range(0, count, step)]
    opening = pack("map", 3) + pack_text(CHUNKED) + TRUE + pack_text("shape")
    opening += pack("map", len(shape))
    for index, length in enumerate(shape):
        opening += pack_text(str(index)) + pack("integer", length)
    opening += pack_text("chunks") + pack("map", len(lengths))
    pieces = []
    for index, length in enumerate(lengths):
        header = opening + pack_text(str(index)) + _pack_array(dtype, (length,))
        pieces.append((header, length * size))
        opening = b""
    return pieces


def _pack_array(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return flax's extension for a tensor, without the tensor's bytes at its end."""
    size = math.prod(shape) * dtype.itemsize
    content = pack("array", 3) + pack("array", len(shape))
    for length in shape:
        content += pack("integer", length)
    content += pack_text(DTYPE_NAMES[dtype]) + pack("binary", size)
    return pack("extension", len(content) + size, ARRAY) + content


def _open_entries(headers: Mapping[str, Sequence[tuple[bytes, int]]]) -> dict[str, bytes]:
    """Return the bytes before the value of each tensor in a stream."""
    openings = {}
    for name, pieces in headers.items():
        key = name.split("/")
        size = sum(len(header) + count for header, count in pieces)
        packed = b"".join(pack_text(part) for part in key)
        openings[name] = pack("array", 2) + pack("array", len(key)) + packed + pack("binary", size)
    return openings


def _open_subtrees(names: Sequence[str]) -> dict[str, bytes]:
    """Return the bytes before the value of each tensor in a single msgpack value.

    They are the last part of the tensor's key, preceded by the headers and keys of the subtrees
    that begin with this tensor.
    """
    children: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        key = tuple(name.split("/"))
        for level, part in enumerate(key):
            children.setdefault(key[:level], set()).add(part)
    openings = {}
    opened = set[tuple[str, ...]]()
    for name in names:
        key = tuple(name.split("/"))
        opening = b""
        for level, part in enumerate(key):
            if key[:level] not in opened:
                opened.add(key[:level])
                opening += pack("map", len(children[key[:level]]))
            if key[: level + 1] not in opened:
                opening += pack_text(part)
        openings[name] = opening
    return openings
