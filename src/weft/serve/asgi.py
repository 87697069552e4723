"""Handling of one HTTP request over ASGI: reading the body, replying, and detecting disconnects."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Message = dict[str, Any]
T = TypeVar("T")

WORTH_COMPRESSING = 4096  # bytes
ENCODINGS = ("gzip", "deflate")
# A body that is too large is read up to this multiple of the limit and discarded, so that its
# sender can read the answer.
DRAIN = 4


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
        return str(self.scope["method"])

    @property
    def path(self) -> str:
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
                    if not message.get("more_body") or size > DRAIN * limit:
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
        left = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            for one in (task, left):
                one.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    async def _wait_for_disconnect(self) -> None:
        """Wait until the client disconnects."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a complete reply, compressed if the client accepts it and the body is large.

        `kind` is the content type.
        """
        more = dict(headers or {})
        encoding = self._choose_encoding() if len(body) >= WORTH_COMPRESSING else None
        if encoding is not None:
            body = await asyncio.to_thread(compress_body, body, encoding)
            more |= {"content-encoding": encoding, "vary": "accept-encoding"}
        await self._start(status, {"content-type": kind, "content-length": str(len(body)), **more})
        await self.send({"type": "http.response.body", "body": body})

    def _choose_encoding(self) -> str | None:
        """Return the first of `ENCODINGS` that the client accepts, or None."""
        taken = {}
        for entry in self.headers.get("accept-encoding", "").lower().split(","):
            name, _, weight = entry.partition(";")
            taken[name.strip()] = weight.replace(" ", "") not in (
                "q=0",
                "q=0.0",
                "q=0.00",
                "q=0.000",
            )
        return next((name for name in ENCODINGS if taken.get(name, False)), None)

    async def reply_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
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
    if encoding == "gzip":
        return gzip.compress(body, 1, mtime=0)
    return zlib.compress(body, 1)
