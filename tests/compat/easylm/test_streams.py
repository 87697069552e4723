"""Streams: reading what msgpack and numpy wrote, writing the same bytes, and damaged files."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import fsspec
import ml_dtypes
import msgpack
import numpy as np
import pytest
import torch

from tests.compat.easylm.common import (
    TINY,
    arrays_of,
    encode_array,
    encode_chunks,
    encode_entry,
    encode_stream,
    encode_tree,
    write_stream,
)
from weft.checkpoints.weight_files import write_safetensors
from weft.compat.easylm import streams
from weft.compat.easylm.checkpoints import write_hf
from weft.compat.easylm.streams import StreamSource, TensorStream, find_source, write_tensors
from weft.errors import CheckpointError, ConfigError, RunError
from weft.storage import copies
from weft.storage.buckets import BucketFolder


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


VARIED = {
    "a/bf16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "a/f16": np.array([[0.5], [-2.0]], np.float16),
    "a/long": np.arange(70_000, dtype=np.float32),
    "b/c/d/f64": np.array([[[1e300]]]),
    "b/empty": np.zeros((0, 4), np.float32),
    "b/int": np.array([-(2**40)]),
    "b/scalar": np.array(7, np.int32),
    "b/small": np.array(True),
    "b/unsigned": np.array([2**63], np.uint64),
    "b/" + "n" * 40: np.array([1, 2, 3], np.uint8),
}


@pytest.mark.parametrize("kind", ["params", "trainstate_params", "trainstate", "flax_params"])
def test_what_msgpack_wrote_is_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "weights"
    if kind == "flax_params":
        path.write_bytes(encode_tree(VARIED))
    elif kind == "params":
        write_stream(path, VARIED)
    else:
        others = encode_entry(("step",), np.array(3)) + encode_entry(("opt_state", "0"), None)
        others += encode_entry(("opt_state", "1", "mu", "b"), np.zeros(5, np.float32))
        path.write_bytes(others + encode_stream(VARIED, ("params", "params")) + others[:0])
    stream = TensorStream(StreamSource(kind, path))
    assert list(stream.tensors) == list(VARIED) and stream.bytes_read == 0
    for name, array in VARIED.items():
        read = to_numpy(stream.read(name))
        assert read.dtype == array.dtype and np.array_equal(read, array), name
    assert stream.bytes_read == sum(array.nbytes for array in VARIED.values())


@pytest.mark.parametrize("streaming", [True, False])
def test_the_bytes_are_those_of_msgpack(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "weights"
    layouts = {name: (to_torch(a).dtype, a.shape) for name, a in VARIED.items()}
    tensors = ((name, to_torch(array)) for name, array in VARIED.items())
    write_tensors(path, layouts, tensors, streaming=streaming)
    assert path.read_bytes() == (encode_stream if streaming else encode_tree)(VARIED)


@pytest.mark.parametrize("streaming", [True, False])
def test_large_tensors_are_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(streams, "CHUNK_BYTES", 64)
    array = np.arange(99, dtype=np.float32).reshape(3, 33)
    path = tmp_path / "weights"
    arrays = {"x": np.arange(16, dtype=np.float32), "y/large": array}
    layouts = {name: (torch.float32, each.shape) for name, each in arrays.items()}
    tensors = ((name, to_torch(each)) for name, each in arrays.items())
    write_tensors(path, layouts, tensors, streaming=streaming)
    expected = {"x": arrays["x"], "y/large": encode_chunks(array, 16)}
    assert path.read_bytes() == (encode_stream if streaming else encode_tree)(expected)
    stream = TensorStream(StreamSource("params" if streaming else "flax_params", path))
    assert np.array_equal(to_numpy(stream.read("y/large")), array)
    assert len(stream.tensors["y/large"].parts) == 7


def test_a_tensor_too_large_for_a_stream_is_refused(tmp_path: Path) -> None:
    layouts = {"lm_head/kernel": (torch.float32, (16384, 128256))}
    with pytest.raises(ConfigError, match="float_dtype=bf16"):
        write_tensors(tmp_path / "weights", layouts, iter(()))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    def fail() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    layouts = dict.fromkeys("ab", (torch.float32, (2,)))
    with pytest.raises(RunError, match="No space left"):
        write_tensors(tmp_path / "weights", layouts, fail())
    assert list(tmp_path.iterdir()) == []


# -- names of checkpoints


def test_a_folder_stands_for_its_highest_step(tmp_path: Path) -> None:
    names = (
        "streaming_params streaming_params_90 streaming_params_1000 value_streaming_params_2000 "
        "streaming_params_1000.old metadata_3000.pkl streaming_train_state_5 streaming_params_x"
    )
    for name in names.split():
        (tmp_path / name).touch()
    (tmp_path / "streaming_params_9999").mkdir()

    def find(text: str, **more: bool) -> str:
        source = find_source(text, **more)
        return f"{source.kind}::{source.path.name}"

    assert find(f"params::{tmp_path}") == "params::streaming_params_1000"
    assert find(str(tmp_path)) == "params::streaming_params_1000"
    assert find(f"flax_params::{tmp_path}") == "flax_params::streaming_params_1000"
    assert find(str(tmp_path), value=True) == "params::value_streaming_params_2000"
    for kind in ("trainstate", "trainstate_params"):
        assert find(f"{kind}::{tmp_path}") == f"{kind}::streaming_train_state_5"
    for name in ("streaming_params_90", "streaming_params_1000"):
        (tmp_path / name).unlink()
    assert find(str(tmp_path)) == "params::streaming_params"
    (tmp_path / "streaming_params").unlink()
    assert find(str(tmp_path)) == "trainstate_params::streaming_train_state_5"
    assert find(str(tmp_path / "metadata_3000.pkl")) == "params::metadata_3000.pkl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("param::X", "unknown prefix param::; did you mean params::"),
        ("pickle::X", "unknown prefix pickle::; known: params, trainstate_params"),
        ("params::X/nothing", "there is no such file"),
        ("params::X", "has no file streaming_params_STEP"),
        ("trainstate::X", "has no file streaming_train_state_STEP"),
    ],
)
def test_names_that_lead_nowhere_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        find_source(text.replace("X", str(tmp_path)))
    assert message in str(caught.value) and str(caught.value).startswith("load_checkpoint=")


def test_a_file_in_a_bucket_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copies.CACHE_VARIABLE, str(tmp_path))
    fsspec.filesystem("memory").store.clear()
    bucket = BucketFolder.open("memory://b/llama2/7b")
    for step in (90, 1000):
        bucket.write(f"streaming_params_{step}", str(step).encode())
    for text in (
        "params::memory://b/llama2/7b",
        "memory://b/llama2/7b/",
        "params::memory://b/llama2/7b/streaming_params_1000",
    ):
        source = find_source(text)
        assert source.kind == "params" and source.path.read_text() == "1000"
    for text, message in (
        ("trainstate::memory://b/llama2/7b", "has no file streaming_train_state_STEP"),
        ("params::memory://b/nothing", "has no file streaming_params_STEP"),
    ):
        with pytest.raises(CheckpointError, match=f"^load_checkpoint={text}: .*{message}"):
            find_source(text)


# -- damaged files


def give_damaged_streams() -> Iterator[tuple[str, bytes]]:
    """Yield (what is wrong, file); the tensors' own bytes are never changed, as no one could see."""
    arrays = arrays_of(TINY, dtype=np.float32)
    whole = encode_stream(arrays)
    entries = [encode_entry(tuple(name.split("/")), each) for name, each in arrays.items()]
    draw = random.Random(5)
    for cut in (1, 2, 9, *(draw.randrange(10, len(whole)) for _ in range(20)), len(whole) - 1):
        yield f"cut at {cut}", whole[:cut]
    # Flip one bit of a header.
    start = 0
    for entry, array in zip(entries, arrays.values(), strict=True):
        header = len(entry) - array.nbytes
        for _ in range(8):
            at = start + draw.randrange(header)
            bit = 1 << draw.randrange(8)
            yield f"bit {bit} of byte {at}", whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        start += len(entry)
    # Replace, drop, repeat or add entries.
    for index in range(0, len(entries), 3):
        yield f"without entry {index}", b"".join(entries[:index] + entries[index + 1 :])
        yield f"entry {index} twice", b"".join([*entries, entries[index]])
    yield "more bytes", whole + b"\0"
    yield "an unknown tensor", whole + encode_entry(("transformer", "bias"), np.zeros(3))
    key = ("lm_head", "kernel")
    first = whole.removeprefix(entries[0])
    array = arrays["lm_head/kernel"]
    values = {
        "wrong shape": array[:-1],
        "transposed": array.T.copy(),
        "one dimension": array.reshape(-1),
        "nine dimensions": array.reshape(1, 1, 1, 1, 1, 1, 1, *array.shape),
        "integers": array.astype(np.int32),
        "complex numbers": array.astype(np.complex64),
        "None": None,
        "text": "abc",
        "number": 5,
        "negative number": -(2**40),
        "float": 1.5,
        "list": [1.0, 2.0],
        "map": {"a": 1},
        "empty map": {},
        "scalar": encode_array(np.array(2.0), 3),
        "scalar with a shape": encode_array(array, 3),
        "complex": msgpack.ExtType(2, msgpack.packb((1.0, 2.0))),
        "timestamp": msgpack.ExtType(77, b"12345678"),
        "empty extension": msgpack.ExtType(1, b""),
        "no bytes": msgpack.ExtType(1, msgpack.packb((array.shape, "float32"))),
        "dtype of objects": msgpack.ExtType(1, msgpack.packb((array.shape, "object", b"x" * 64))),
        "dtype missing": msgpack.ExtType(1, msgpack.packb((array.shape, None, array.tobytes()))),
        "shape of texts": msgpack.ExtType(1, msgpack.packb((("a",), "float32", array.tobytes()))),
        "negative shape": msgpack.ExtType(
            1, msgpack.packb(((-32, -96), "float32", array.tobytes()))
        ),
        "bytes too few": msgpack.ExtType(1, msgpack.packb((array.shape, "float32", b"1234"))),
        "bytes as list": msgpack.ExtType(1, msgpack.packb((array.shape, "float32", [1, 2]))),
        "more in extension": msgpack.ExtType(1, encode_array(array).data + b"\0"),
        "chunks without shape": {**encode_chunks(array, 100), "shape": {}},
        "chunks too few": {**encode_chunks(array, 100), "shape": {"0": 33, "1": 96}},
        "no chunks": {**encode_chunks(array, 100), "chunks": {}},
        "chunks as list": {**encode_chunks(array, 100), "chunks": [1]},
        "chunk of text": {**encode_chunks(array, 100), "chunks": {"0": "a"}},
        "chunks in another order": {
            **encode_chunks(array, 1536),
            "chunks": {"1": encode_array(array[:16]), "0": encode_array(array[16:])},
        },
        "chunks of two dtypes": {
            **encode_chunks(array, 1536),
            "chunks": {"0": encode_array(array[:16]), "1": encode_array(array[16:].astype("f8"))},
        },
        "field of chunks": {**encode_chunks(array, 100), "order": "C"},
        "dimensions of chunks": {**encode_chunks(array, 100), "shape": {"1": 32, "0": 96}},
    }
    for what, value in values.items():
        yield what, encode_entry(key, value) + first
    keys = {
        "empty key": (),
        "key of numbers": (1, 2),
        "key of text": "lm_head/kernel",
        "None as key": None,
        "long key": ("a",) * 33,
        "long name": ("lm_head", "k" * 500),
        "nested key": (("lm_head",), "kernel"),
        "not UTF-8": (b"\xff\xfe", "kernel"),
        "line break": ("lm_head", "ker\nnel"),
        "slash": ("lm_head/kernel",),
        "another head": ("score", "kernel"),
        "another layer": ("transformer", "h", "7", "attention", "wq", "kernel"),
    }
    for what, each in keys.items():
        yield what, encode_entry(each, array) + first
    packed = msgpack.packb(encode_array(array))
    yield "a triple", msgpack.packb((key, packed, 1)) + first
    yield "a single", msgpack.packb((key,)) + first
    yield "array, not bytes", msgpack.packb((key, encode_array(array))) + first
    yield "a map", msgpack.packb({"a": 1}) + first
    yield "more in value", msgpack.packb((key, packed + b"\xc0")) + first
    # Absurd sizes.
    for code in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF):
        yield f"size after 0x{code:02x}", bytes([code]) + b"\xff" * 8 + first
        yield (
            f"size of a value 0x{code:02x}",
            b"\x92\x91\xa1a" + bytes([code]) + b"\xff" * 8 + first,
        )
        huge = b"\x92\x91\xa1a\xc6\x00\x00\x10\x00" + bytes([code]) + b"\xff" * 0x1000
        yield f"size in a value 0x{code:02x}", huge + first
    shape = b"\x93\x92" + b"\xcf" + b"\xff" * 8 + b"\xcf" + b"\xff" * 8 + b"\xa7float32\xc4\x04abcd"
    yield "absurd shape", encode_entry(key, msgpack.ExtType(1, shape)) + first
    # Other files.
    yield "nothing", b""
    yield "zeros", bytes(4096)
    yield "ones", b"\xff" * 4096
    yield "text", b"This is not a stream of tensors.\n" * 40
    yield "a pickle", pickle.dumps({"step": 3})
    yield "a zip archive", b"PK\x03\x04" + whole
    yield "gzip", b"\x1f\x8b\x08\0" + whole
    yield "Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    yield "a single value", encode_tree(arrays)
    yield "a train state", encode_stream(arrays, ("params", "params"))


def test_damaged_streams_are_refused_with_one_message(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    folder = tmp_path / "hf"
    count = 0
    path.write_bytes(encode_stream(arrays_of(TINY, dtype=np.float32)))
    write_hf(find_source(f"params::{path}"), TINY, tmp_path / "whole")
    for what, content in give_damaged_streams():
        count += 1
        path.write_bytes(content)
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError) as caught:
                write_hf(StreamSource("params", path), TINY, folder)
        except BaseException as failed:
            raise AssertionError(what) from failed
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        message = str(caught.value)
        assert str(path) in message and "\n" not in message and len(message) < 1000, what
        assert peak < 500_000, (what, peak)  # bytes
        assert sorted(each.name for each in tmp_path.iterdir()) == ["weights", "whole"], what
    assert count > 250


def test_a_train_state_is_named_as_one(tmp_path: Path) -> None:
    write_stream(tmp_path / "weights", {"a": np.zeros(2)}, ("params", "params"))
    with pytest.raises(CheckpointError, match="write trainstate_params:: before"):
        TensorStream(StreamSource("params", tmp_path / "weights"))


def test_safetensors_and_folders_are_no_streams(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "weights", {"a": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="is a safetensors file"):
        TensorStream(StreamSource("params", tmp_path / "weights"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="has no file streaming_params_STEP"):
        find_source(f"params::{tmp_path / 'folder'}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encode_stream({"a": np.zeros(2)}), "write params:: before"),
        (encode_tree({"a": np.zeros(2)}) + b"\0", "1 bytes follow the last tensor"),
        (encode_tree({"a": np.zeros(2)})[:-1], "takes 29 bytes, and 28 are left"),
        (encode_tree({"/".join("ab" * 17): np.zeros(2)}), "nested deeper than 32"),
        (encode_tree({"a": 3}), "is of kind integer, not a tensor"),
        (b"\x82" + encode_tree({"a": np.zeros(2)})[1:] * 2, "a occurs twice"),
        (msgpack.packb({}), "contains no tensors"),
        (b"\x81\xa1a" * 100_000, "nested deeper than 32"),
    ],
)
def test_damaged_single_values_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        TensorStream(StreamSource("flax_params", tmp_path / "weights"))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "weights", {"a": np.zeros(1000)})
    stream = TensorStream(StreamSource("params", path))
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match="ended while it was read"):
        stream.read("a")
