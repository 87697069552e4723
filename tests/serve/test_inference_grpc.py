"""gRPC messages are those of the public protocol: another program's stubs read ours, and ours
theirs.
"""

from __future__ import annotations

import numpy as np
import pytest

from weft.errors import DataError
from weft.serve import inference_grpc


def test_tritonclient_reads_what_is_written() -> None:
    theirs = pytest.importorskip(
        "tritonclient.grpc", reason="tritonclient is not installed"
    ).service_pb2
    for name in inference_grpc.MESSAGES:
        if "." in name:
            continue
        own, other = (
            inference_grpc.get_message_class(name).DESCRIPTOR,
            getattr(theirs, name).DESCRIPTOR,
        )
        fields = {field.name: (field.number, field.type) for field in other.fields}
        assert {field.name: (field.number, field.type) for field in own.fields} == fields, name
    request = inference_grpc.get_message_class("ModelInferRequest")(model_name="m", id="1")
    inference_grpc.write_tensors(
        {"x": np.arange(6, dtype="<i4").reshape(2, 3)}, request.inputs, request.raw_input_contents
    )
    values = {"a": True, "b": 3, "c": 0.5, "d": "text"}
    inference_grpc.write_parameters(values, request.parameters)
    read = theirs.ModelInferRequest.FromString(request.SerializeToString())
    assert (read.model_name, list(read.inputs[0].shape), read.inputs[0].datatype) == (
        "m",
        [2, 3],
        "INT32",
    )
    assert np.frombuffer(read.raw_input_contents[0], "<i4").tolist() == [0, 1, 2, 3, 4, 5]
    again = inference_grpc.get_message_class("ModelInferRequest").FromString(
        read.SerializeToString()
    )
    assert inference_grpc.read_parameters(again.parameters) == values
    assert inference_grpc.read_tensors(again.inputs, again.raw_input_contents)["x"].tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_contents_that_are_no_bytes() -> None:
    request = inference_grpc.get_message_class("ModelInferRequest")()
    request.inputs.add(name="x", datatype="INT64", shape=[2]).contents.int64_contents.extend([5, 6])
    assert inference_grpc.read_tensors(request.inputs, [])["x"].tolist() == [5, 6]
    request.inputs.add(name="y", datatype="INT8", shape=[1]).contents.int_contents.append(1000)
    with pytest.raises(DataError, match="out of range"):
        inference_grpc.read_tensors(request.inputs, [])
    with pytest.raises(DataError, match="raw contents"):
        inference_grpc.read_tensors(request.inputs, [b""])
    with pytest.raises(DataError, match="shape"):
        bad = inference_grpc.get_message_class("ModelInferRequest")()
        bad.inputs.add(name="x", datatype="INT64", shape=[-1])
        inference_grpc.read_tensors(bad.inputs, [])
