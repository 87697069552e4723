"""Messages of the open inference protocol over gRPC, defined by tables, and a client.

The messages are in a separate descriptor pool, so that another implementation of the protocol
(`tritonclient`) can be loaded in the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from weft.engine.service_spec import ServiceAddress
from weft.errors import DataError
from weft.host import http
from weft.host.http import RequestFailure
from weft.serve.bodies import (
    CHUNK_SIZE,
    DATATYPES,
    ServiceMetadata,
    Tensor,
    check_datatype,
    from_bytes,
    get_datatype,
)

SERVICE = "inference.GRPCInferenceService"
CALLS = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

# (name, number, type). The type of a repeated field has the prefix "*"; "{}" is a parameter map.
Field = tuple[str, int, str]

_MODEL: tuple[Field, ...] = (("name", 1, "string"), ("version", 2, "string"))
_TENSOR: tuple[Field, ...] = (
    ("name", 1, "string"),
    ("datatype", 2, "string"),
    ("shape", 3, "*int64"),
    ("parameters", 4, "{}"),
    ("contents", 5, "InferTensorContents"),
)
_INFER: tuple[Field, ...] = (
    ("model_name", 1, "string"),
    ("model_version", 2, "string"),
    ("id", 3, "string"),
    ("parameters", 4, "{}"),
)
MESSAGES: Mapping[str, tuple[Field, ...]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": (("live", 1, "bool"),),
    "ServerReadyRequest": (),
    "ServerReadyResponse": (("ready", 1, "bool"),),
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": (("ready", 1, "bool"),),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": (*_MODEL, ("extensions", 3, "*string")),
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": (
        ("name", 1, "string"),
        ("versions", 2, "*string"),
        ("platform", 3, "string"),
        ("inputs", 4, "*ModelMetadataResponse.TensorMetadata"),
        ("outputs", 5, "*ModelMetadataResponse.TensorMetadata"),
    ),
    "ModelMetadataResponse.TensorMetadata": (
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
    ),
    "InferParameter": (
        ("bool_param", 1, "bool"),
        ("int64_param", 2, "int64"),
        ("string_param", 3, "string"),
        ("double_param", 4, "double"),
        ("uint64_param", 5, "uint64"),
    ),
    "InferTensorContents": (
        ("bool_contents", 1, "*bool"),
        ("int_contents", 2, "*int32"),
        ("int64_contents", 3, "*int64"),
        ("uint_contents", 4, "*uint32"),
        ("uint64_contents", 5, "*uint64"),
        ("fp32_contents", 6, "*float"),
        ("fp64_contents", 7, "*double"),
        ("bytes_contents", 8, "*bytes"),
    ),
    "ModelInferRequest": (
        *_INFER,
        ("inputs", 5, "*ModelInferRequest.InferInputTensor"),
        ("outputs", 6, "*ModelInferRequest.InferRequestedOutputTensor"),
        ("raw_input_contents", 7, "*bytes"),
    ),
    "ModelInferRequest.InferInputTensor": _TENSOR,
    "ModelInferRequest.InferRequestedOutputTensor": (
        ("name", 1, "string"),
        ("parameters", 2, "{}"),
    ),
    "ModelInferResponse": (
        *_INFER,
        ("outputs", 5, "*ModelInferResponse.InferOutputTensor"),
        ("raw_output_contents", 6, "*bytes"),
    ),
    "ModelInferResponse.InferOutputTensor": _TENSOR,
}
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}

RETRYABLE_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
FIXES = {
    grpc.StatusCode.UNAVAILABLE: "start the server, or correct url",
    grpc.StatusCode.DEADLINE_EXCEEDED: "raise service.timeout_s, lower service.rows, or check that the server works",
    grpc.StatusCode.UNAUTHENTICATED: "set the token that the server asks for in the environment variable of service.token_env",
    grpc.StatusCode.NOT_FOUND: "check the model's name at the end of url",
}
NO_LIMIT = -1  # gRPC's value for an unlimited message size
_FieldProto = descriptor_pb2.FieldDescriptorProto


@cache
def get_message_class(name: str) -> Any:
    """Return the protobuf class of a message, such as `ModelInferRequest`."""
    return message_factory.GetMessageClass(_build_pool().FindMessageTypeByName(f"inference.{name}"))


@cache
def _build_pool() -> descriptor_pool.DescriptorPool:
    """Return a descriptor pool with all `MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(
        name="weft/inference.proto", package="inference", syntax="proto3"
    )
    message_types: dict[str, Any] = {}
    for name, fields in MESSAGES.items():
        outer, _, inner = name.rpartition(".")
        siblings = message_types[outer].nested_type if outer else file.message_type
        message_types[name] = siblings.add(name=inner)
        for field in fields:
            _add_field(message_types[name], name, field)
    # The fields of `InferParameter` are alternatives.
    for field in message_types["InferParameter"].field:
        field.oneof_index = 0
    message_types["InferParameter"].oneof_decl.add(name="parameter_choice")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(owner: Any, name: str, field: Field) -> None:
    """Add a field to a message type.

    `owner` is the descriptor of the message type, and `name` is its full name. `field` is a tuple
    (name, number, type).
    """
    field_name, number, field_type = field
    if field_type == "{}":
        entry = owner.nested_type.add(name="ParametersEntry")
        entry.options.map_entry = True
        _add_field(entry, name, ("key", 1, "string"))
        _add_field(entry, name, ("value", 2, "InferParameter"))
        field_type = f"*{name}.ParametersEntry"
    if field_type.startswith("*"):
        label = _FieldProto.LABEL_REPEATED
    else:
        label = _FieldProto.LABEL_OPTIONAL
    type_name = field_type.removeprefix("*")
    descriptor = owner.field.add(name=field_name, number=number, label=label)
    if type_name[0].isupper():
        descriptor.type = _FieldProto.TYPE_MESSAGE
        descriptor.type_name = f".inference.{type_name}"
    else:
        descriptor.type = getattr(_FieldProto, f"TYPE_{type_name.upper()}")


def read_tensors(tensors: Any, raws: Any) -> dict[str, Tensor]:
    """Return the tensors of a message, by name.

    `tensors` are the tensor descriptions in the message, and `raws` are their values as raw bytes.
    If `raws` is empty, the values are read from the typed contents in `tensors`. Raises `DataError`
    for a tensor that does not match its declared datatype or shape.
    """
    if len(raws) not in (0, len(tensors)):
        raise DataError(f"the message has {len(raws)} raw contents for {len(tensors)} tensors")
    tensors_by_name: dict[str, Tensor] = {}
    for index, tensor in enumerate(tensors):
        datatype = check_datatype(tensor.name, tensor.datatype)
        shape = list(tensor.shape)
        if tensor.name in tensors_by_name or any(size < 0 for size in shape):
            raise DataError(
                f"tensor {tensor.name!r} occurs twice, or has the invalid shape {shape}"
            )
        if len(raws):
            raw = raws[index]
        else:
            if datatype in CONTENTS:
                values = getattr(tensor.contents, CONTENTS[datatype])
            else:
                values = ()
            # Convert the values in chunks, so that other threads can run in between.
            parts = (
                values[start : start + CHUNK_SIZE] for start in range(0, len(values), CHUNK_SIZE)
            )
            try:
                raw = b"".join(np.array(part, DATATYPES[datatype]).tobytes() for part in parts)
            except OverflowError:
                raise DataError(
                    f"tensor {tensor.name!r}: a number is out of range for {datatype}"
                ) from None
        tensors_by_name[tensor.name] = from_bytes(tensor.name, datatype, shape, raw)
    return tensors_by_name


def write_tensors(tensors: Mapping[str, Tensor], entries: Any, raws: Any) -> None:
    """Append the name, datatype and shape of each tensor to `entries`, and its bytes to `raws`.

    `entries` and `raws` are repeated fields of a message.
    """
    for name, tensor in tensors.items():
        datatype = get_datatype(tensor)
        entries.add(name=name, datatype=datatype, shape=list(tensor.shape))
        raws.append(tensor.astype(DATATYPES[datatype]).tobytes())


def read_parameters(parameters: Any) -> dict[str, Any]:
    """Return the protocol parameters of a message as plain Python values."""
    result: dict[str, Any] = {}
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        if choice:
            result[name] = getattr(value, choice)
    return result


def write_parameters(values: Mapping[str, Any], parameters: Any) -> None:
    """Write plain Python values to `parameters`, the parameter map of a protocol message."""
    fields = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in values.items():
        setattr(parameters[name], fields[type(value)], value)


class GRPCTransport:
    """Implementation of `ServiceTransport` over gRPC."""

    def __init__(self, server: ServiceAddress, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        options = [
            ("grpc.max_receive_message_length", NO_LIMIT),
            ("grpc.max_send_message_length", NO_LIMIT),
            ("grpc.enable_http_proxy", int(not server.loopback)),
        ]
        if server.scheme == "grpcs":
            self._channel = grpc.secure_channel(
                server.address, grpc.ssl_channel_credentials(), options
            )
        else:
            self._channel = grpc.insecure_channel(server.address, options)
        self._calls = {}
        for name in ("ModelMetadata", "ModelInfer"):
            self._calls[name] = self._channel.unary_unary(
                f"/{SERVICE}/{name}",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=get_message_class(f"{name}Response").FromString,
            )
        if server.token is not None:
            self._metadata = [("authorization", f"Bearer {server.token}")]
        else:
            self._metadata = []

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure:
        request = get_message_class("ModelMetadataRequest")(name=self._server.model)
        response = self._send("ModelMetadata", request)
        if isinstance(response, RequestFailure):
            return response
        return ServiceMetadata(
            {entry.name: entry.datatype for entry in response.inputs},
            tuple(entry.name for entry in response.outputs),
        )

    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure:
        request = get_message_class("ModelInferRequest")(model_name=self._server.model)
        write_tensors(inputs, request.inputs, request.raw_input_contents)
        write_parameters(parameters, request.parameters)
        request.outputs.add(name=output)
        response = self._send("ModelInfer", request)
        if isinstance(response, RequestFailure):
            return response
        try:
            return np.asarray(read_tensors(response.outputs, response.raw_output_contents)[output])
        except (DataError, KeyError):
            return RequestFailure(
                "the answer lacks the output that was asked for",
                f"check the model at {self._server.url}",
                False,
            )

    def close(self) -> None:
        self._channel.close()

    def _send(self, name: str, request: Any) -> Any:
        """Make the call `name`, and return its response, or a `RequestFailure`."""
        try:
            return self._calls[name](request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                details = ""
            else:
                details = http.mask_key(error.details() or "", self._server.token)
            return RequestFailure(
                code.name,
                FIXES.get(code, "look at the server's log"),
                code in RETRYABLE_CODES,
                details,
            )
