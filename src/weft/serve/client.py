"""Backend `service`: scores and log-probs of a model that is served at a URL.

Requests follow the open inference protocol (KServe v2). They are sent concurrently, and again after
failures that may be temporary. A transport's calls return an answer or a `RequestFailure`.
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

# Names of a model's outputs that provide each output; preferred names come first.
NAMES: Mapping[str, Sequence[str]] = {
    "scores": ("rewards", "scores"),
    "logprobs": ("logprobs", "logits"),
}
LOGIT_ROWS = 8  # maximum rows of a request whose answer is whole logits
ROLES = {"score": "rew", "lm": "ref"}  # name of the role by its head
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
    client = ServiceClient(
        ROLES[spec.head],
        ServiceAddress.parse(ROLES[spec.head], spec.url, spec.service),
        spec.service,
    )
    return NullEngine(layout, client.compute, f"served by {spec.url}")


@dataclass
class ServiceClient:
    """Client that requests a role's outputs from the server at `place`.

    It replaces `Engine.forward` for this role. `role` is the role's name, for error messages.
    """

    role: str
    place: ServiceAddress
    spec: ServiceSpec
    _transport: ServiceTransport = field(init=False, repr=False)
    _known: ServiceMetadata | None = field(default=None, repr=False)
    _closing: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        self._transport = build_transport(self.place, self.spec.timeout_s)

    def compute(
        self, batch: SequenceSample, want: frozenset[Output], temperature: float
    ) -> SequenceSample:
        """Return float32 `scores` [1] or `logprobs` [L] for each completion of L tokens.

        Raises `RunError` with role, URL and cause if all attempts fail, and `ConfigError` for an
        output that the model does not provide.
        """
        (wanted,) = want
        if wanted not in NAMES or "support" in batch.keys:
            if "support" in batch.keys:
                limited = " over the ids that a sampling limit kept"
            else:
                limited = ""
            raise ConfigError(
                f"{self.role}.url: a server gives scores and log-probs, not {wanted}{limited}"
            )
        # Split the sequences into requests.
        name = self._choose_output(wanted, temperature)
        prompts = [ids.tolist() for ids in batch.sequences("prompt")]
        rows = []
        for group, completion in zip(
            batch.group_of("completion"), batch.sequences("completion"), strict=True
        ):
            rows.append(([*prompts[int(group)], *completion.tolist()], len(prompts[int(group)])))
        if name == "logits":
            size = min(self.spec.rows, LOGIT_ROWS)
        else:
            size = self.spec.rows
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        # Send them concurrently, and join the answers in order.
        answers = [
            values
            for part in self._map_concurrently(
                lambda part: self._ask(part, name, temperature), parts
            )
            for values in part
        ]
        if wanted == "scores":
            return batch.one_per("completion", scores=np.array(answers, np.float32)).select(
                keys=["scores"]
            )
        flat = np.concatenate(answers) if answers else np.zeros(0, np.float32)
        return batch.like("completion", logprobs=flat.astype(np.float32)).select(keys=["logprobs"])

    def _map_concurrently(
        self, ask: Callable[[list[Row]], list[Any]], parts: Sequence[list[Row]]
    ) -> list[list[Any]]:
        """Call `ask` on each list of rows in `parts` concurrently, and return the answers in order.

        `ask` sends one request. After a failure, no more requests are sent.
        """
        self._closing.clear()
        with ThreadPoolExecutor(self.spec.concurrency) as pool:
            futures = [pool.submit(ask, part) for part in parts]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._closing.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _choose_output(self, wanted: str, temperature: float) -> str:
        """Return the name of the model's output from which `wanted` can be computed.

        Raises `ConfigError` if no output is suitable.
        """
        if self._known is None:
            self._known = self._call_with_retries(self._transport.fetch_metadata)
        candidates = []
        for name in NAMES[wanted]:
            if name in self._known.outputs:
                candidates.append(name)
        if not candidates or IDS not in self._known.inputs:
            raise ConfigError(
                f"{self.role}.url={self.place.url}: this model takes "
                f"{', '.join(self._known.inputs)} and gives "
                f"{', '.join(self._known.outputs)}; it must take {IDS} and give "
                f"{' or '.join(NAMES[wanted])}"
            )
        if temperature != 1.0 and candidates[0] == "logprobs" and STARTS not in self._known.inputs:
            raise ConfigError(
                f"{self.role}.url={self.place.url}: this model gives log-probs at temperature 1, "
                f"and completions are sampled "
                f"at {temperature:g}; sample at 1, or use weft serve or a model that gives logits"
            )
        return candidates[0]

    def _ask(self, rows: list[Row], name: str, temperature: float) -> list[Any]:
        """Send one request for the model's output `name`, and return one answer per row.

        The answers are the scores of the rows, or the log-probs of their completions. Raises
        `RunError` if the shape of the response does not match the request.
        """
        assert self._known is not None
        inputs = self._build_inputs(rows, self._known.inputs)
        if name == "logprobs" and temperature != 1.0:
            own = {"temperature": float(temperature)}
        else:
            own = {}
        values = to_host_array(
            self._call_with_retries(lambda: self._transport.infer(inputs, name, own))
        )
        # A server of another model may answer with another shape.
        tokens = len(rows)
        longest = inputs[IDS].shape[1]
        shapes = {
            "logprobs": (tokens, longest),
            "logits": (tokens, longest, values.shape[-1] if values.ndim else 0),
        }
        if values.shape != shapes.get(name, values.shape) or (
            name not in shapes and values.size != tokens
        ):
            raise RunError(
                f"{self._describe_address()}: the output {name} has the shape {list(values.shape)} for "
                f"{tokens} x {longest} tokens"
            )
        # Cut the padded answer into one result per row.
        if name not in shapes:
            return [float(value) for value in values.ravel()]
        logprobs = []
        for index, (ids, start) in enumerate(rows):
            if name == "logprobs":
                logprobs.append(values[index, start : len(ids)].astype(np.float32))
            else:
                logprobs.append(
                    _compute_log_softmax(
                        values[index, start - 1 : len(ids) - 1], ids[start:], temperature
                    )
                )
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

    def _call_with_retries(self, ask: Callable[[], T | RequestFailure]) -> T:
        """Call `ask` until it succeeds, and return its answer.

        `ask` is called again only after failures that may be temporary. Raises `RunError` after any
        other failure, or if the last attempt fails.
        """
        jitter = random.Random()
        attempt = 0
        while isinstance(came := ask(), RequestFailure):
            last = (
                not came.is_retryable
                or came.retry_after_s > http.MAX_DELAY_S
                or attempt == self.spec.retries
                or self._closing.is_set()
            )
            if last:
                times = f" (asked {attempt + 1} times)" if attempt else ""
                excerpt = f": {came.response.strip()[:200]!r}" if came.response.strip() else ""
                raise RunError(
                    f"{self._describe_address()}: {came.cause}{times}{excerpt}; {came.fix}"
                )
            time.sleep(http.compute_retry_delay(attempt, came.retry_after_s, jitter))
            attempt += 1
        return came

    def _describe_address(self) -> str:
        return f"{self.role}.url={self.place.url}"


def _compute_log_softmax(logits: Tensor, ids: Sequence[int], temperature: float) -> Vector:
    """Return the log-prob of `ids[i]` in row i of `logits` [n, V], for each i, as float32 [n].

    Logits are divided by the temperature, and the computation is in float64.
    """
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    chosen = scaled[np.arange(len(ids)), list(ids)]
    return (chosen - np.log(np.exp(scaled).sum(axis=-1))).astype(np.float32)


def build_transport(place: ServiceAddress, timeout_s: float) -> ServiceTransport:
    """Return the transport for the URL's scheme.

    Raises `ConfigError` if the scheme needs gRPC and gRPC isn't installed.
    """
    if place.scheme in ("http", "https"):
        return HTTPTransport(place, timeout_s)
    try:
        from weft.serve.inference_grpc import GRPCTransport
    except ImportError as error:
        raise ConfigError(
            f"{place.url}: gRPC needs the package {error.name}; run: {install('serve')}"
        ) from None
    return GRPCTransport(place, timeout_s)


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


def _build_reply_trouble(place: ServiceAddress) -> RequestFailure:
    return RequestFailure(
        "the answer does not follow the inference protocol",
        f"check that {place.url} is a server of that protocol (KServe v2, Triton)",
        False,
    )
