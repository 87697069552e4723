"""Backend `service`: scores and log-probs of a model that is served at a URL.

Requests follow the open inference protocol (KServe v2). They are sent concurrently, and are sent
again after failures that may be temporary. The calls of a transport return an answer or a
`RequestFailure`.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx
import numpy as np
import numpy.typing as npt

from weft.algorithms.base import Output, to_host_array
from weft.data.sample import SequenceSample
from weft.engine.backends.null import NullEngine
from weft.engine.service_spec import ServedSpec, ServiceAddress, ServiceSpec
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError, DataError, RunError
from weft.extras import install
from weft.host import http
from weft.host.http import RequestFailure
from weft.registry import register_backend
from weft.serve.bodies import (
    DATATYPES,
    IDS,
    LENGTH_HEADER,
    MASK,
    STARTS,
    ServiceMetadata,
    Tensor,
    pack,
    read_object,
    unpack,
)
from weft.topology import Layout

T = TypeVar("T")
Vector = npt.NDArray[np.float32]
Row = tuple[list[int], int]  # (token ids, number of them that belong to the prompt)

# For each of weft's outputs, the names of a model's outputs that provide it, preferred names first.
OUTPUT_NAMES: Mapping[str, Sequence[str]] = {
    "scores": ("rewards", "scores"),
    "logprobs": ("logprobs", "logits"),
}
LOGIT_ROWS = 8  # maximum rows of a request that asks for the logits of all ids
ROLES = {"score": "rew", "lm": "ref"}  # head -> name of the role
STATUS_FIXES = {
    401: "set the token that the server asks for in the environment variable that service.token_env names",
    404: "check the model's name at the end of url",
    413: "lower service.rows",
}


@register_backend("service")
def service(spec: ModelSpec, layout: Layout) -> NullEngine:
    """Build an engine that gets its outputs from a service.

    Raises `ConfigError` for a role without a URL, and for a trained role.
    """
    if not isinstance(spec, ServedSpec) or spec.url is None:
        raise ConfigError(
            "backend=service: the role needs a url; leave backend out and set rew.url or ref.url"
        )
    if spec.trained:
        raise ConfigError(
            f"url={spec.url!r}: a role that is trained has its network here; set path"
        )
    role = ROLES[spec.head]
    server = ServiceAddress.parse(role, spec.url, spec.service)
    client = ServiceClient(role, server, spec.service)
    return NullEngine(layout, client.compute, f"served by {spec.url}")


@dataclass
class ServiceClient:
    """Client that requests a role's outputs from a server.

    Its method `compute` replaces `Engine.forward` for this role. `role` is the role's name, for
    error messages.
    """

    role: str
    server: ServiceAddress
    spec: ServiceSpec
    _transport: ServiceTransport = field(init=False, repr=False)
    _metadata: ServiceMetadata | None = field(default=None, repr=False)  # None before a request
    _closing: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        self._transport = build_transport(self.server, self.spec.timeout_s)

    def compute(
        self, batch: SequenceSample, want: frozenset[Output], temperature: float
    ) -> SequenceSample:
        """Return float32 `scores` [1] or `logprobs` [L] for each completion of L tokens.

        Raises `RunError` with role, URL and cause if all attempts fail, and `ConfigError` for an
        output that the model does not provide.
        """
        (output,) = want
        if output not in OUTPUT_NAMES or "support" in batch.keys:
            restriction = ""
            if "support" in batch.keys:
                restriction = " over the ids that a sampling limit kept"
            raise ConfigError(
                f"{self.role}.url: a server gives scores and log-probs, not {output}{restriction}"
            )
        # Split the sequences into requests.
        name = self._choose_output(output, temperature)
        prompts = [ids.tolist() for ids in batch.sequences("prompt")]
        rows = []
        for group, completion in zip(
            batch.group_of("completion"), batch.sequences("completion"), strict=True
        ):
            prompt = prompts[int(group)]
            rows.append(([*prompt, *completion.tolist()], len(prompt)))
        max_rows = self.spec.rows
        if name == "logits":
            max_rows = min(max_rows, LOGIT_ROWS)
        requests = [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
        # Send them concurrently, and join the answers in order.
        answers: list[Any] = []
        for values in self._map_concurrently(
            lambda request: self._request_rows(request, name, temperature), requests
        ):
            answers += values
        if output == "scores":
            scores = np.array(answers, np.float32)
            return batch.one_per("completion", scores=scores).select(keys=["scores"])
        logprobs = np.concatenate(answers) if answers else np.zeros(0, np.float32)
        return batch.like("completion", logprobs=logprobs.astype(np.float32)).select(
            keys=["logprobs"]
        )

    def _map_concurrently(
        self, send: Callable[[list[Row]], list[Any]], requests: Sequence[list[Row]]
    ) -> list[list[Any]]:
        """Call `send` for the rows of each request concurrently, and return the answers in order.

        After a failure, no more requests are sent.
        """
        self._closing.clear()
        with ThreadPoolExecutor(self.spec.concurrency) as pool:
            futures = [pool.submit(send, rows) for rows in requests]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._closing.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _choose_output(self, output: str, temperature: float) -> str:
        """Return the name of the model's output from which `output` can be computed.

        Raises `ConfigError` if no output is suitable.
        """
        if self._metadata is None:
            self._metadata = self._call_with_retries(self._transport.fetch_metadata)
        candidates = [name for name in OUTPUT_NAMES[output] if name in self._metadata.outputs]
        if not candidates or IDS not in self._metadata.inputs:
            raise ConfigError(
                f"{self.role}.url={self.server.url}: this model takes "
                f"{', '.join(self._metadata.inputs)} and gives "
                f"{', '.join(self._metadata.outputs)}; it must take {IDS} and give "
                f"{' or '.join(OUTPUT_NAMES[output])}"
            )
        if (
            temperature != 1.0
            and candidates[0] == "logprobs"
            and STARTS not in self._metadata.inputs
        ):
            raise ConfigError(
                f"{self.role}.url={self.server.url}: this model gives log-probs at temperature 1, "
                f"and completions are sampled "
                f"at {temperature:g}; sample at 1, or use weft serve or a model that gives logits"
            )
        return candidates[0]

    def _request_rows(self, rows: list[Row], name: str, temperature: float) -> list[Any]:
        """Send one request for the model's output `name`, and return one answer per row.

        The answers are the scores of the rows, or the log-probs of their completions. Raises
        `RunError` if the shape of the response does not match the request.
        """
        assert self._metadata is not None
        inputs = self._build_inputs(rows, self._metadata.inputs)
        parameters = {}
        if name == "logprobs" and temperature != 1.0:
            parameters = {"temperature": float(temperature)}
        values = to_host_array(
            self._call_with_retries(lambda: self._transport.infer(inputs, name, parameters))
        )
        # Check the shape, because the server's model may be another one.
        num_rows = len(rows)
        longest = inputs[IDS].shape[1]
        shapes = {
            "logprobs": (num_rows, longest),
            "logits": (num_rows, longest, values.shape[-1] if values.ndim else 0),
        }
        if name in shapes:
            is_valid = values.shape == shapes[name]
        else:
            is_valid = values.size == num_rows
        if not is_valid:
            raise RunError(
                f"{self._describe_address()}: the output {name} has the shape "
                f"{list(values.shape)} for {num_rows} x {longest} tokens"
            )
        # Cut the padded answer into one result per row.
        if name not in shapes:
            return [float(value) for value in values.ravel()]
        logprobs = []
        for index, (ids, start) in enumerate(rows):
            if name == "logprobs":
                logprobs.append(values[index, start : len(ids)].astype(np.float32))
            else:
                logits = values[index, start - 1 : len(ids) - 1]
                logprobs.append(_compute_log_softmax(logits, ids[start:], temperature))
        return logprobs

    def _build_inputs(self, rows: Sequence[Row], types: Mapping[str, str]) -> dict[str, Tensor]:
        """Return the input tensors for the rows, padded at the end.

        `types` maps the names of the model's inputs to their data types.
        """
        longest = max(len(ids) for ids, _ in rows)
        arrays = {
            IDS: np.array([[*ids, *[0] * (longest - len(ids))] for ids, _ in rows]),
            MASK: np.array([[*[1] * len(ids), *[0] * (longest - len(ids))] for ids, _ in rows]),
            STARTS: np.array([[max(1, start)] for _, start in rows]),
        }
        result: dict[str, Tensor] = {}
        for name, values in arrays.items():
            if name in types:
                result[name] = values.astype(DATATYPES[types[name]])
        return result

    def _call_with_retries(self, send: Callable[[], T | RequestFailure]) -> T:
        """Call `send` until it succeeds, and return its answer.

        `send` is called again only after failures that may be temporary. Raises `RunError` after
        any other failure, or if the last attempt fails.
        """
        jitter = random.Random()
        attempt = 0
        while isinstance(answer := send(), RequestFailure):
            can_retry = (
                answer.is_retryable
                and answer.retry_after_s <= http.MAX_DELAY_S
                and attempt != self.spec.retries
                and not self._closing.is_set()
            )
            if not can_retry:
                times = f" (asked {attempt + 1} times)" if attempt else ""
                response = answer.response.strip()
                excerpt = f": {response[:200]!r}" if response else ""
                raise RunError(
                    f"{self._describe_address()}: {answer.cause}{times}{excerpt}; {answer.fix}"
                )
            time.sleep(http.compute_retry_delay(attempt, answer.retry_after_s, jitter))
            attempt += 1
        return answer

    def _describe_address(self) -> str:
        return f"{self.role}.url={self.server.url}"


def _compute_log_softmax(logits: Tensor, ids: Sequence[int], temperature: float) -> Vector:
    """Return the log-probs of `ids` [n], one in each row of `logits` [n, V], as float32 [n].

    The logits are divided by the temperature, and the computation is in float64.
    """
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    selected = scaled[np.arange(len(ids)), list(ids)]
    return (selected - np.log(np.exp(scaled).sum(axis=-1))).astype(np.float32)


def build_transport(server: ServiceAddress, timeout_s: float) -> ServiceTransport:
    """Return the transport for the URL's scheme.

    Raises `ConfigError` if the scheme needs gRPC and gRPC isn't installed.
    """
    if server.scheme in ("http", "https"):
        return HTTPTransport(server, timeout_s)
    try:
        from weft.serve.inference_grpc import GRPCTransport
    except ImportError as error:
        raise ConfigError(
            f"{server.url}: gRPC needs the package {error.name}; run: {install('serve')}"
        ) from None
    return GRPCTransport(server, timeout_s)


class ServiceTransport(Protocol):
    """Interface of clients that send inference requests to a server, for example over HTTP."""

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure:
        """Request the names and types of the model's inputs and outputs."""
        ...

    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure:
        """Request the output named `output` for the given inputs and parameters."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class HTTPTransport:
    """Implementation of `ServiceTransport` over HTTP; tensors are sent in binary form."""

    def __init__(self, server: ServiceAddress, timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._base = f"{server.scheme}://{server.address}/v2/models/{quote(server.model, safe='')}"
        if server.token is not None:
            headers = {"Authorization": f"Bearer {server.token}"}
        else:
            headers = {}
        # Don't follow redirects: another host would get the token. Bypass the proxy for loopback
        # addresses, which it cannot reach.
        self._client = httpx.Client(
            headers=headers,
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=not server.loopback,
        )

    def fetch_metadata(self) -> ServiceMetadata | RequestFailure:
        response = self._send("GET", self._base)
        if isinstance(response, RequestFailure):
            return response
        with contextlib.suppress(DataError, KeyError, TypeError, AttributeError):
            metadata = read_object(response.content)
            inputs = {entry["name"]: entry["datatype"] for entry in metadata["inputs"]}
            return ServiceMetadata(inputs, tuple(entry["name"] for entry in metadata["outputs"]))
        return _build_protocol_failure(self._server)

    def infer(
        self, inputs: Mapping[str, Tensor], output: str, parameters: Mapping[str, Any]
    ) -> Tensor | RequestFailure:
        head: dict[str, Any] = {"outputs": [{"name": output, "parameters": {"binary_data": True}}]}
        if parameters:
            head["parameters"] = dict(parameters)
        body, length = pack(head, "inputs", inputs, set(inputs))
        headers = {LENGTH_HEADER: str(length), "Content-Type": "application/octet-stream"}
        response = self._send("POST", f"{self._base}/infer", content=body, headers=headers)
        if isinstance(response, RequestFailure):
            return response
        with contextlib.suppress(DataError, ValueError, KeyError):
            header_length = response.headers.get(LENGTH_HEADER)
            size = None if header_length is None else int(header_length)
            _, tensors = unpack(response.content, size, "outputs")
            return np.asarray(tensors[output])
        return _build_protocol_failure(self._server)

    def close(self) -> None:
        self._client.close()

    def _send(self, method: str, url: str, **options: Any) -> httpx.Response | RequestFailure:
        """Send a request, and return the response, or a failure if its status is not 200."""
        try:
            response = self._client.request(method, url, **options)
        except httpx.TimeoutException:
            return RequestFailure(
                f"no answer within service.timeout_s={self._timeout_s:g} seconds",
                "raise it, lower service.rows, or check that the server works",
                True,
            )
        except httpx.HTTPError as error:
            return RequestFailure(
                type(error).__name__,
                "start the server, or correct url",
                True,
                http.mask_key(str(error), self._server.token),
            )
        status = response.status_code
        if status == 200:
            return response
        if status in (401, 403):
            response_text = ""
        else:
            response_text = http.mask_key(response.text, self._server.token)
        default_fix = "look at the server's log" if status >= 500 else "check url and the model"
        fix = STATUS_FIXES.get(status, default_fix)
        return RequestFailure(
            f"status {status}",
            fix,
            http.is_retryable_status(status),
            response_text,
            http.parse_retry_after(response.headers.get("Retry-After")),
        )


def _build_protocol_failure(server: ServiceAddress) -> RequestFailure:
    """Return the failure for an answer that cannot be parsed."""
    return RequestFailure(
        "the answer does not follow the inference protocol",
        f"check that {server.url} is a server of that protocol (KServe v2, Triton)",
        False,
    )
