"""Client calls of the inference protocol, each of which returns an answer or a `RequestFailure`.

The protocol is the Open Inference Protocol (`weft.protocol`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import numpy as np

from weft.engine.service_address import ServiceAddress
from weft.errors import DataError
from weft.host import http
from weft.host.http import RequestFailure
from weft.protocol.tensors import LENGTH_HEADER, Tensor, pack, read_object, unpack

STATUS_FIXES = {
    401: "set the token that the server asks for in the environment variable that service.token_env names",
    404: "check the model's name at the end of url",
    413: "lower service.rows",
}


@dataclass(frozen=True)
class ServiceMetadata:
    """Names and types of a model's inputs, and names of its outputs."""

    inputs: Mapping[str, str]
    outputs: tuple[str, ...]


class ServiceTransport(Protocol):
    """Interface of clients that send inference requests to a server, for example over HTTP."""

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure: ...
    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure: ...
    def close(self) -> None: ...


class HTTPTransport:
    """Implementation of `ServiceTransport` over HTTP; tensors are sent in binary form."""

    def __init__(self, place: ServiceAddress, timeout_s: float) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._base = f"{place.scheme}://{place.address}/v2/models/{quote(place.model, safe='')}"
        if place.token is not None:
            headers = {"Authorization": f"Bearer {place.token}"}
        else:
            headers = {}
        # Don't follow redirects: another host would get the token. Bypass the proxy for loopback
        # addresses, which it cannot reach.
        self._client = httpx.Client(
            headers=headers, timeout=timeout_s, follow_redirects=False, trust_env=not place.loopback
        )

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure:
        came = self._send("GET", self._base)
        if isinstance(came, RequestFailure):
            return came
        with contextlib.suppress(DataError, KeyError, TypeError, AttributeError):
            metadata = read_object(came.content)
            inputs = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
            return ServiceMetadata(inputs, tuple(entry["name"] for entry in metadata["outputs"]))
        return _build_reply_trouble(self._place)

    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure:
        head: dict[str, Any] = {"outputs": [{"name": output, "parameters": {"binary_data": True}}]}
        if parameters:
            head["parameters"] = dict(parameters)
        body, length = pack(head, "inputs", inputs, set(inputs))
        headers = {LENGTH_HEADER: str(length), "Content-Type": "application/octet-stream"}
        came = self._send("POST", f"{self._base}/infer", content=body, headers=headers)
        if isinstance(came, RequestFailure):
            return came
        with contextlib.suppress(DataError, ValueError, KeyError):
            size = came.headers.get(LENGTH_HEADER)
            return np.asarray(
                unpack(came.content, None if size is None else int(size), "outputs")[1][output]
            )
        return _build_reply_trouble(self._place)

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, url: str, **more: Any) -> httpx.Response | RequestFailure:
        try:
            response = self._client.request(method, url, **more)
        except httpx.TimeoutException:
            return _build_timeout_trouble(self._timeout_s)
        except httpx.HTTPError as error:
            return RequestFailure(
                type(error).__name__,
                "start the server, or correct url",
                True,
                http.mask_key(str(error), self._place.token),
            )
        status = response.status_code
        if status == 200:
            return response
        if status in (401, 403):
            response_text = ""
        else:
            response_text = http.mask_key(response.text, self._place.token)
        fix = STATUS_FIXES.get(
            status, "look at the server's log" if status >= 500 else "check url and the model"
        )
        return RequestFailure(
            f"status {status}",
            fix,
            http.is_retryable_status(status),
            response_text,
            http.parse_retry_after(response.headers.get("Retry-After")),
        )


def _build_timeout_trouble(timeout_s: float) -> RequestFailure:
    return RequestFailure(
        f"no answer within service.timeout_s={timeout_s:g} seconds",
        "raise it, lower service.rows, or check that the server works",
        True,
    )


def _build_reply_trouble(place: ServiceAddress) -> RequestFailure:
    return RequestFailure(
        "the answer does not follow the inference protocol",
        f"check that {place.url} is a server of that protocol (KServe v2, Triton)",
        False,
    )
