"""Bodies of HTTP messages: JSON, optionally followed by the raw bytes of named tensors.

The raw bytes follow the binary tensor data extension of the open inference protocol (KServe v2).

    body, header_length = pack({"id": "1"}, "inputs", {"input_ids": ids}, binary={"input_ids"})
    header, tensors = unpack(body, header_length, "inputs")

The module is also the program of the child process that parses large JSON bodies for the server:
`python -m weft.serve.bodies`. It does not load torch.
"""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.errors import DataError

Tensor = npt.NDArray[Any]

# Names of a model's input tensors.
IDS = "input_ids"
MASK = "attention_mask"
STARTS = "prompt_length"
CHUNK_SIZE = 8192  # numbers that are encoded at a time, so that other threads can run in between
LENGTH_HEADER = "Inference-Header-Content-Length"  # number of JSON bytes before the raw tensors
DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}
MAX_VALUES = 200_000  # limit per large JSON body, not counting lists that become arrays
# Keys whose lists of numbers are converted to arrays, which are faster to pickle.
ARRAY_KEYS = ("prompt", "data", "tokens")
MIN_ARRAY_SIZE = 64  # shorter lists are not converted


@dataclass(frozen=True)
class ServiceMetadata:
    """Names and types of a model's inputs, and names of its outputs."""

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]


def get_datatype(tensor: Tensor) -> str:
    """Return the protocol's name for an array's dtype, such as `FP32`."""
    return next(name for name, dtype in DATATYPES.items() if dtype == tensor.dtype)


def pack(
    header: Mapping[str, Any], key: str, tensors: Mapping[str, Tensor], binary: Collection[str] = ()
) -> tuple[bytes, int | None]:
    """Return a message body with `header` and `tensors`, and the length of its JSON part.

    The tensors are listed in the JSON under `key`. Tensors named in `binary` follow the JSON as raw
    bytes. The length is in bytes, and is None if the body has no raw bytes.
    """
    entries = list[str]()
    raws = list[bytes]()
    for name, tensor in tensors.items():
        dtype = DATATYPES[get_datatype(tensor)]
        entry: dict[str, Any] = {
            "name": name,
            "datatype": get_datatype(tensor),
            "shape": list(tensor.shape),
        }
        if name in binary:
            raws.append(np.ascontiguousarray(tensor, dtype).tobytes())
            entries.append(json.dumps(entry | {"parameters": {"binary_data_size": len(raws[-1])}}))
        else:
            # Encode the numbers in chunks, so that other threads can run in between.
            flat = tensor.ravel()
            chunks = (flat[start : start + CHUNK_SIZE] for start in range(0, len(flat), CHUNK_SIZE))
            numbers = ", ".join(json.dumps(chunk.tolist())[1:-1] for chunk in chunks)
            entries.append(_append_entry(entry, "data", f"[{numbers}]"))
    text = _append_entry(header, key, f"[{', '.join(entries)}]").encode()
    return b"".join([text, *raws]), len(text) if raws else None


def _append_entry(values: Mapping[str, Any], key: str, text: str) -> str:
    """Return the JSON text of `values` with one more entry, `key`, at the end.

    `text` is the value of `key`. It is already encoded as JSON and is inserted unchanged.
    """
    return f"{json.dumps(dict(values))[:-1]}{', ' if values else ''}{json.dumps(key)}: {text}}}"


def compute_header_size(body: bytes, header_length: int | None) -> int:
    """Return the number of JSON bytes at the start of the body.

    If `header_length` is None, the whole body is JSON. Raises `DataError` if `header_length` is
    negative or exceeds the body.
    """
    size = len(body) if header_length is None else header_length
    if not 0 <= size <= len(body):
        raise DataError(f"{LENGTH_HEADER}={size}: the body has {len(body)} bytes")
    return size


def unpack(
    body: bytes, header_length: int | None, key: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON header of a message body, and the tensors listed under `key`, by name.

    Raises `DataError` for a malformed body.
    """
    size = compute_header_size(body, header_length)
    header = read_object(body[:size])
    return header, read_tensors(body, size, header, key)


def read_tensors(body: bytes, size: int, header: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """Return the tensors listed under `key` of `header`, by name.

    `header` is the parsed JSON from the first `size` bytes of `body`; raw tensors follow it. Raises
    `DataError` for a malformed tensor, a repeated name or leftover bytes.
    """
    entries = header.get(key)
    if not isinstance(entries, list):
        raise DataError(f"{key} must be a list of tensors")
    tensors: dict[str, Tensor] = {}
    offset = size
    for entry in entries:
        name, dtype, shape = _read_description(entry, key)
        if name in tensors:
            raise DataError(f"{key} has the tensor {name!r} twice")
        num_bytes = _read_integer_parameter(entry, "binary_data_size")
        if num_bytes is None:
            tensors[name] = _from_list(name, dtype, shape, entry.get("data"))
        else:
            raw = body[offset : offset + num_bytes] if num_bytes >= 0 else b""
            tensors[name] = from_bytes(name, dtype, shape, raw)
            offset += num_bytes
    if offset != len(body):
        raise DataError(f"the body is {len(body) - offset} bytes longer than its tensors")
    return tensors


def read_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises `DataError` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError("the body must be a JSON object")
    return value


def from_bytes(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> Tensor:
    """Return the tensor stored in `raw` as little-endian numbers.

    Raises a `DataError` that names the tensor if the number of bytes does not match the shape.
    """
    dtype = DATATYPES[check_datatype(name, datatype)]
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise DataError(
            f"tensor {name!r} has {len(raw)} bytes, but {datatype} of shape {list(shape)} "
            f"needs {math.prod(shape) * dtype.itemsize}"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def check_datatype(name: str, datatype: Any) -> str:
    """Return `datatype` if it is one of the numeric `DATATYPES`; raise `DataError` otherwise."""
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise DataError(
            f"tensor {name!r}: datatype={datatype!r} must be one of {', '.join(DATATYPES)}"
        )
    return datatype


def read_flag(entry: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return the Boolean parameter `name` of `entry`, the JSON object of a tensor or a request.

    Returns `default` if the parameter is absent. Raises `DataError` if it has another type.
    """
    parameters = entry.get("parameters") or {}
    if isinstance(parameters, Mapping):
        value = parameters.get(name, default)
    else:
        value = None
    if not isinstance(value, bool):
        raise DataError(f"the parameter {name} must be true or false")
    return value


def _read_description(entry: Any, key: str) -> tuple[str, str, list[int]]:
    """Return (name, datatype, shape) of `entry`, the JSON object of one tensor.

    Raises `DataError` if one of the three is missing or invalid. `key` is the name of the list that
    contains the tensor, for messages.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise DataError(f"each of {key} must be an object with a name")
    name = entry["name"]
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise DataError(f"tensor {name!r}: shape={shape!r} must be a list of whole numbers")
    return name, check_datatype(name, entry.get("datatype")), shape


def _read_integer_parameter(entry: Mapping[str, Any], name: str) -> int | None:
    """Return the integer parameter `name` of a tensor's JSON object, or None if it is absent.

    Raises `DataError` if the parameter has another type.
    """
    parameters = entry.get("parameters") or {}
    value = parameters.get(name) if isinstance(parameters, Mapping) else None
    if value is not None and type(value) is not int:
        raise DataError(f"tensor {entry['name']!r}: {name}={value!r} must be a whole number")
    return value


def _from_list(name: str, datatype: str, shape: Sequence[int], data: Any) -> Tensor:
    """Return the tensor whose values are a nested or flat list of numbers.

    Raises `DataError` for values that do not fit the datatype or the shape.
    """
    if not isinstance(data, (list, np.ndarray)):
        raise DataError(f"tensor {name!r} has neither data nor binary_data_size")
    # Kinds of arrays that can be converted to each kind of datatype.
    convertible = {"b": "b", "i": "i", "u": "iu", "f": "fiu"}
    kind = DATATYPES[datatype].kind
    try:
        array = np.array(data)
        if array.size and array.dtype.kind not in convertible[kind]:
            raise ValueError("of another type")
        tensor = array.astype(DATATYPES[datatype])
        if kind in "iu" and not np.array_equal(tensor, array):
            raise ValueError("out of range")
        return tensor.reshape(shape)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise DataError(
            f"tensor {name!r}: data must be {datatype} numbers of shape {list(shape)}"
        ) from None


def main() -> None:
    """Parse JSON bodies from standard input until it ends.

    This is done in a child process, because Python's JSON parser holds the GIL until it is done: a
    list of five million numbers would delay the server's health checks by a second. A request on
    standard input consists of the body's length in bytes, as an 8-byte little-endian integer, and
    the body. The answer on standard output has the same layout; its content is a pickled
    ("ok", value) or ("error", message).
    """
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    while length := requests.read(8):
        answer: tuple[str, Any]
        try:
            value = json.loads(requests.read(int.from_bytes(length, "little")))
            answer = "ok", CompactConverter().convert_value(value)
        except (ValueError, RecursionError) as error:
            answer = "error", f"the body is not JSON: {error}"
        content = pickle.dumps(answer, protocol=5)
        answers.write(len(content).to_bytes(8, "little") + content)
        answers.flush()


class CompactConverter:
    """Converter of parsed JSON, which converts long lists of numbers to arrays.

    Only lists under the keys in `ARRAY_KEYS` are converted.
    """

    def __init__(self) -> None:
        self._count = 0

    def convert_value(self, parsed: Any, *, arrays: bool = False) -> Any:
        """Return `parsed` with long lists of numbers as arrays.

        `arrays` is True for values under one of the keys in `ARRAY_KEYS`. Raises `ValueError` if
        the JSON has more than `MAX_VALUES` values, not counting the elements of arrays.
        """
        if isinstance(parsed, dict):
            self._count_values(len(parsed))
            converted = {}
            for key, value in parsed.items():
                converted[key] = self.convert_value(value, arrays=arrays or key in ARRAY_KEYS)
            return converted
        if not isinstance(parsed, list):
            return parsed
        if arrays and len(parsed) >= MIN_ARRAY_SIZE:
            array = convert_numbers(parsed)
            if array is not None:
                return array
        self._count_values(len(parsed))
        return [self.convert_value(value, arrays=arrays) for value in parsed]

    def _count_values(self, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES:,} values")


def convert_numbers(numbers: list[Any]) -> np.ndarray[Any, Any] | None:
    """Return the numbers as an int64 array, or as float64 if any is a float.

    Returns None if the list contains anything but numbers, or an integer too large for int64.
    """
    types = set(map(type, numbers))
    try:
        if types == {int}:
            return np.array(numbers, np.int64)
        if types in ({float}, {float, int}):
            return np.array(numbers, np.float64)
    except OverflowError:
        return None
    return None


if __name__ == "__main__":
    main()
