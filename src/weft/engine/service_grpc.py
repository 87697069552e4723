"""Client calls of the Open Inference Protocol (`weft.protocol`) over gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from weft.engine.service_address import ServiceAddress
from weft.engine.service_transport import ServiceMetadata
from weft.errors import DataError
from weft.host import http
from weft.host.http import RequestFailure
from weft.protocol import messages
from weft.protocol.tensors import Tensor

AGAIN = (
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
LARGEST = -1  # gRPC's value for no limit on the bytes of a message


class GRPCTransport:
    """Implementation of `ServiceTransport` over gRPC."""

    def __init__(self, place: ServiceAddress, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        options = [
            ("grpc.max_receive_message_length", LARGEST),
            ("grpc.max_send_message_length", LARGEST),
            ("grpc.enable_http_proxy", int(not place.loopback)),
        ]
        if place.scheme == "grpcs":
            self._channel = grpc.secure_channel(
                place.address, grpc.ssl_channel_credentials(), options
            )
        else:
            self._channel = grpc.insecure_channel(place.address, options)
        self._calls = {name: self._build_call(name) for name in ("ModelMetadata", "ModelInfer")}
        if place.token is not None:
            self._metadata = [("authorization", f"Bearer {place.token}")]
        else:
            self._metadata = []

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure:
        came = self._send(
            "ModelMetadata",
            messages.get_message_class("ModelMetadataRequest")(name=self._place.model),
        )
        if isinstance(came, RequestFailure):
            return came
        return ServiceMetadata(
            {entry.name: entry.datatype for entry in came.inputs},
            tuple(entry.name for entry in came.outputs),
        )

    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure:
        request = messages.get_message_class("ModelInferRequest")(model_name=self._place.model)
        messages.write_tensors(inputs, request.inputs, request.raw_input_contents)
        messages.write_parameters(parameters, request.parameters)
        request.outputs.add(name=output)
        came = self._send("ModelInfer", request)
        if isinstance(came, RequestFailure):
            return came
        try:
            return np.asarray(messages.read_tensors(came.outputs, came.raw_output_contents)[output])
        except (DataError, KeyError):
            return RequestFailure(
                "the answer lacks the output that was asked for",
                f"check the model at {self._place.url}",
                False,
            )

    def close(self) -> None:
        self._channel.close()

    def _build_call(self, name: str) -> Any:
        return self._channel.unary_unary(
            f"/{messages.SERVICE}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=messages.get_message_class(f"{name}Response").FromString,
        )

    def _send(self, name: str, request: Any) -> Any:
        try:
            return self._calls[name](request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                details = ""
            else:
                details = http.mask_key(error.details() or "", self._place.token)
            return RequestFailure(
                code.name, FIXES.get(code, "look at the server's log"), code in AGAIN, details
            )
