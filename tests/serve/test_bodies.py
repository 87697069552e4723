"""Tensors of the inference protocol: there and back, as JSON and as bytes, and what cannot be one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from weft.errors import DataError
from weft.serve.bodies import DATATYPES, pack, unpack


@pytest.mark.parametrize("datatype", DATATYPES)
@pytest.mark.parametrize("binary", [True, False])
def test_there_and_back(datatype: str, binary: bool) -> None:
    values = np.arange(6).reshape(2, 3).astype(DATATYPES[datatype])
    body, length = pack(
        {"id": "7"}, "inputs", {"x": values, "y": values[:0]}, {"x", "y"} if binary else ()
    )
    assert (length is None) != binary
    header, made = unpack(body, length, "inputs")
    assert header["id"] == "7" and list(made) == ["x", "y"] and made["y"].shape == (0, 3)
    assert made["x"].dtype == values.dtype
    np.testing.assert_array_equal(made["x"], values)


@pytest.mark.parametrize(
    ("entries", "more", "says"),
    [
        ("x", b"", "list of tensors"),
        ([5], b"", "object with a name"),
        ([{"name": "a", "datatype": "INT32", "shape": [True], "data": [1]}], b"", "whole numbers"),
        (
            [{"name": "a", "datatype": "BYTES", "shape": [1], "data": ["x"]}],
            b"",
            "datatype='BYTES'",
        ),
        ([{"name": "a", "datatype": "INT8", "shape": [1], "data": [300]}], b"", "INT8 numbers"),
        ([{"name": "a", "datatype": "INT8", "shape": [1], "data": [True]}], b"", "INT8 numbers"),
        (
            [{"name": "a", "datatype": "FP32", "shape": [2], "data": [[1.0], [1.0, 2.0]]}],
            b"",
            "FP32 numbers",
        ),
        (
            [
                {
                    "name": "a",
                    "datatype": "INT32",
                    "shape": [1],
                    "parameters": {"binary_data_size": -4},
                }
            ],
            b"",
            "bytes, but",
        ),
        (
            [
                {
                    "name": "a",
                    "datatype": "INT32",
                    "shape": [2],
                    "parameters": {"binary_data_size": 8},
                }
            ],
            b"1234",
            "has 4 bytes, but",
        ),
        (
            [
                {
                    "name": "a",
                    "datatype": "INT32",
                    "shape": [10**9, 10**9],
                    "parameters": {"binary_data_size": 0},
                }
            ],
            b"",
            "bytes, but",
        ),
        ([{"name": "a", "datatype": "INT32", "shape": [1], "data": [1]}], b"12", "2 bytes longer"),
        ([{"name": "a", "datatype": "INT32", "shape": [1], "data": [1]}] * 2, b"", "twice"),
    ],
)
def test_what_is_no_tensor(entries: object, more: bytes, says: str) -> None:
    text = json.dumps({"inputs": entries}).encode()
    with pytest.raises(DataError, match=says):
        unpack(text + more, len(text), "inputs")


@pytest.mark.parametrize("length", [-1, 10**6])
def test_a_header_longer_than_the_body(length: int) -> None:
    with pytest.raises(DataError, match="Inference-Header-Content-Length"):
        unpack(b"{}", length, "inputs")
