"""HTTP requests over ASGI and their replies, and the limits and metrics of the server.

An exchange reads the body of one request, replies, and detects disconnects. The metrics are written
in the text format of Prometheus.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T")

MIN_COMPRESSED_SIZE = 4096  # bytes; smaller replies are not compressed
ENCODINGS = ("gzip", "deflate")
# A body that exceeds the limit is read up to this multiple of the limit and discarded, so that the
# client can read the answer.
DISCARD_FACTOR = 4

# Metrics
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)  # seconds
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "weft_requests_total": "Requests answered, by endpoint and status.",
    "weft_request_seconds": "Seconds from a request's arrival to the end of its answer.",
    "weft_abandoned_total": "Requests whose client disconnected before the answer.",
    "weft_prompt_tokens_total": "Prompt tokens.",
    "weft_generated_tokens_total": "Sampled tokens.",
    "weft_scored_tokens_total": "Scored tokens.",
    "weft_load": "Waiting and running completions and rows, by model.",
}


class RequestRefused(Exception):
    """Raised if a request must be answered with an error status.

    `status` is the HTTP status. `param` is the name of the invalid field, and `code` is a short
    name of the error, as in OpenAI's API.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class ClientDisconnected(Exception):
    """Raised if the client has closed the connection."""


@dataclass
class HttpExchange:
    """One HTTP request over ASGI and its reply."""

    scope: Mapping[str, Any]
    receive: Callable[[], Awaitable[Message]]
    send: Callable[[Message], Awaitable[None]]
    status: int | None = None  # status of the reply; None before it begins
    headers: Mapping[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in self.scope["headers"]
        }

    @property
    def method(self) -> str:
        """HTTP method of the request, such as "GET"."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Path of the request, without the query."""
        return str(self.scope["path"])

    async def read_body(self, limit: int, seconds: float) -> bytes:
        """Read the whole request body.

        Raises `RequestRefused` if the body exceeds `limit` bytes or takes longer than `seconds`,
        and `ClientDisconnected` if the client disconnects before the end of the body.
        """
        parts = []
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
                    if not message.get("more_body") or size > DISCARD_FACTOR * limit:
                        break
        except TimeoutError:
            raise RequestRefused(
                408, f"the body did not arrive within {seconds:g} seconds"
            ) from None
        if size > limit:
            raise RequestRefused(
                413, f"the body has more than {limit} bytes, the server's --max-body-mb"
            )
        return b"".join(parts)

    async def await_unless_disconnected(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work` and return its result, unless the client disconnects.

        If the client disconnects, `work` is cancelled and `ClientDisconnected` is raised. The
        request body must have been read before this call, because the method discards all messages
        until the one that reports the disconnect.
        """
        task = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            for each in (task, disconnect):
                each.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        """Wait until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a complete reply, compressed if the client accepts it and the body is large."""
        encoding_headers = {}
        encoding = self._choose_encoding() if len(body) >= MIN_COMPRESSED_SIZE else None
        if encoding is not None:
            body = await asyncio.to_thread(compress_body, body, encoding)
            encoding_headers = {"content-encoding": encoding, "vary": "accept-encoding"}
        body_headers = {"content-type": content_type, "content-length": str(len(body))}
        await self._start(status, {**body_headers, **(headers or {}), **encoding_headers})
        await self.send({"type": "http.response.body", "body": body})

    def _choose_encoding(self) -> str | None:
        """Return the first of `ENCODINGS` that the client accepts, or None."""
        accepted = {}
        for entry in self.headers.get("accept-encoding", "").lower().split(","):
            name, _, weight = entry.partition(";")
            is_refused = weight.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000")
            accepted[name.strip()] = not is_refused
        return next((name for name in ENCODINGS if accepted.get(name, False)), None)

    async def reply_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send `value` as JSON in a complete reply."""
        await self.reply(status, json.dumps(value).encode(), headers=headers)

    async def send_event(self, text: str) -> None:
        """Send `text` as a server-sent event; the first event starts the reply."""
        if self.status is None:
            await self._start(
                200,
                {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"},
            )
        await self.send(
            {"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True}
        )

    async def end(self) -> None:
        """End a streamed reply."""
        await self.send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


def compress_body(body: bytes, encoding: str) -> bytes:
    """Compress a body with one of the `ENCODINGS`."""
    if encoding == "gzip":
        return gzip.compress(body, 1, mtime=0)
    return zlib.compress(body, 1)


@dataclass(frozen=True)
class ServerLimits:
    """Limits on each request and on the load of each model.

    Attributes:
        body_bytes: Maximum size of a request's body in bytes, also after decompression.
        body_seconds: Maximum time in seconds for a body to arrive.
        seconds: Maximum time in seconds from the arrival of a request to the end of its answer.
        max_prompt_tokens: Maximum length of a prompt in tokens.
        prompt_bytes: Maximum size of a request's text in bytes, before it is tokenized.
        max_new_tokens: Maximum length of a completion in tokens.
        max_load: Maximum load of a model: the number of its waiting and running completions, plus
            the number of sequences that it has to score.
    """

    body_bytes: int = 16 * 2**20
    body_seconds: float = 30.0
    seconds: float = 600.0
    max_prompt_tokens: int = 16384
    prompt_bytes: int = 512 * 2**10
    max_new_tokens: int = 1024
    max_load: int = 1024


@dataclass
class ServerMetrics:
    """Thread-safe counters of requests and tokens, and a histogram of request durations."""

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_answer(self, endpoint: str, status: str, seconds: float) -> None:
        """Count an answered request, and the seconds from its arrival to the end of its answer."""
        with self._lock:
            self.requests[endpoint, status] += 1
            self.buckets[bisect_left(BUCKETS, seconds)] += 1
            self.seconds += seconds

    def count_abandoned(self) -> None:
        """Count a request whose client disconnected before the answer."""
        with self._lock:
            self.counts["weft_abandoned_total"] += 1

    def count_tokens(self, prompt: int = 0, generated: int = 0, scored: int = 0) -> None:
        """Add to the numbers of prompt tokens, sampled tokens and scored tokens."""
        with self._lock:
            self.counts["weft_prompt_tokens_total"] += prompt
            self.counts["weft_generated_tokens_total"] += generated
            self.counts["weft_scored_tokens_total"] += scored

    def format_text(self, loads: dict[str, int]) -> str:
        """Return all metrics in Prometheus's text format.

        `loads` maps the name of each model to its current load.
        """
        with self._lock:
            lines = _format_head("weft_requests_total", "counter")
            for (endpoint, status), count in sorted(self.requests.items()):
                lines.append(
                    f'weft_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
                )
            lines += _format_head("weft_request_seconds", "histogram")
            cumulative_count = 0
            for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.buckets, strict=True):
                cumulative_count += count
                lines.append(f'weft_request_seconds_bucket{{le="{bound}"}} {cumulative_count}')
            lines += [
                f"weft_request_seconds_sum {self.seconds:.6f}",
                f"weft_request_seconds_count {cumulative_count}",
            ]
            for name in HELP:
                if name.endswith("_total") and name != "weft_requests_total":
                    lines += [*_format_head(name, "counter"), f"{name} {self.counts[name]}"]
        lines += _format_head("weft_load", "gauge")
        for model, load in loads.items():
            label = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'weft_load{{model="{label}"}} {load}')
        return "\n".join(lines) + "\n"


def _format_head(name: str, kind: str) -> list[str]:
    return [f"# HELP {name} {HELP[name]}", f"# TYPE {name} {kind}"]
