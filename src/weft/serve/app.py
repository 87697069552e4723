"""ASGI application that checks access tokens, routes requests to endpoints, and formats errors."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.errors import DataError, UserError
from weft.serve.asgi import ClientDisconnected, HttpExchange, Message, RequestRefused
from weft.serve.background import BackgroundWork, decompress_body
from weft.serve.inference_api import MODEL, InferenceEndpoint
from weft.serve.limits import ServerLimits
from weft.serve.metrics import ServerMetrics
from weft.serve.openai_api import CompletionEndpoints
from weft.serve.served_model import ServedModel

log = logging.getLogger(__name__)

COMPLETIONS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> is a chat
OPEN = ("/v2/health/live", "/v2/health/ready")  # paths that need no token


@dataclass(frozen=True)
class ServerApp:
    """ASGI application that answers all requests to the server's HTTP port.

    Requests must have the header `Authorization: Bearer TOKEN`, where TOKEN is `token`. If `token`
    is None, no token is needed. `started` is the server's start as a Unix time.
    """

    models: Mapping[str, ServedModel]
    limits: ServerLimits
    token: str | None
    metrics: ServerMetrics
    started: int
    background: BackgroundWork

    @property
    def policy(self) -> ServedModel | None:
        return next((model for model in self.models.values() if model.spec is not None), None)

    @property
    def inference_endpoint(self) -> InferenceEndpoint:
        return InferenceEndpoint(self.models, self.metrics, self.limits.most_load, self.background)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this server supports only HTTP, not {scope['type']}")
        exchange = HttpExchange(scope, receive, send)
        began = time.perf_counter()
        endpoint = self._find_endpoint(exchange.path)
        status = ""
        try:
            async with asyncio.timeout(self.limits.seconds):
                await self._route_request(exchange)
        except ClientDisconnected:
            self.metrics.count_abandoned()
            status = "abandoned"
        except Exception as error:
            refused = _convert_exception(error, self.limits.seconds)
            status = str(refused.status)
            await self._refuse(exchange, refused)
        self.metrics.count_answer(
            endpoint, status or str(exchange.status), time.perf_counter() - began
        )

    def _find_endpoint(self, path: str) -> str:
        """Return the label under which the metrics count requests to a path.

        All unknown paths have the same label, so that clients cannot create new time series.
        """
        if path in COMPLETIONS or path in OPEN or path in ("/v1/models", "/v2"):
            return path
        match = MODEL.fullmatch(path)
        return f"/v2/models{match['rest'] or ''}" if match else "other"

    async def _route_request(self, exchange: HttpExchange) -> None:
        """Pass a request to its endpoint. Raises `RequestRefused` for unknown paths and methods."""
        if exchange.path == "/v2/health/live" and exchange.method == "GET":
            return await exchange.reply(200, b"")
        if exchange.path == "/v2/health/ready" and exchange.method == "GET":
            ready = all(model.worker.is_alive for model in self.models.values())
            return await exchange.reply(200 if ready else 503, b"")
        self._check_allowed(exchange)
        if exchange.path in COMPLETIONS:
            self._check_method(exchange, "POST")
            return await self._complete(exchange, chat=COMPLETIONS[exchange.path])
        if exchange.path == "/v1/models" or exchange.path.startswith("/v1/models/"):
            self._check_method(exchange, "GET")
            return await exchange.reply_json(
                self._describe_models(exchange.path.removeprefix("/v1/models").lstrip("/"))
            )
        if exchange.path in ("/v2", "/v2/"):
            self._check_method(exchange, "GET")
            return await exchange.reply_json(self.inference_endpoint.describe_server())
        if match := MODEL.fullmatch(exchange.path):
            return await self._answer_model_request(
                exchange, match["name"], match["version"], match["rest"]
            )
        raise RequestRefused(404, f"unknown path {exchange.path[:80]!r}; see /v1/models and /v2")

    async def _complete(self, exchange: HttpExchange, *, chat: bool) -> None:
        """Answer a chat or text completion request with the policy.

        Raises `RequestRefused` if the request names a model other than the policy.
        """
        body = await self.background.read(await self._read_body(exchange))
        name = body.get("model")
        policy = self.policy
        if not isinstance(name, str):
            raise RequestRefused(400, "model is missing or not a string", param="model")
        if policy is None or name != policy.name:
            if policy:
                here = f"this server has {policy.name}"
            else:
                here = "this server has only a reward model, which generates no text"
            if name in self.models:
                scores = (
                    f"it is a reward model, whose scores are at /v2/models/{name}/infer; {here}"
                )
            else:
                scores = here
            what = "no text generation by" if name in self.models else "unknown model"
            raise RequestRefused(
                404, f"{what} {name[:80]!r}; {scores}", param="model", code="model_not_found"
            )
        await CompletionEndpoints(
            policy, self.metrics, self.limits, self.background
        ).answer_request(exchange, body, chat=chat)

    async def _read_body(self, exchange: HttpExchange) -> bytes:
        """Return the request's body, decompressed."""
        limit = self.limits.body_bytes
        body = await exchange.read_body(limit, self.limits.body_seconds)
        encoding = exchange.headers.get("content-encoding", "").strip().lower()
        if encoding:
            return await self.background.run(decompress_body, body, encoding, limit)
        return body

    async def _answer_model_request(
        self, exchange: HttpExchange, name: str, version: str | None, rest: str | None
    ) -> None:
        """Answer a request to `/v2/models/NAME`, with or without a version, or to a path below it.

        `rest` is the end of the path, such as `/infer`, or None if the path ends with the model.
        """
        served = self.inference_endpoint.get_model(name, version)
        self._check_method(exchange, "POST" if rest == "/infer" else "GET")
        if rest is None:
            await exchange.reply_json(served.build_metadata())
        elif rest == "/ready":
            await exchange.reply(200 if served.worker.is_alive else 503, b"")
        elif rest == "/infer":
            await self.inference_endpoint.answer_request(
                exchange, await self._read_body(exchange), served
            )
        else:
            raise RequestRefused(
                404, "/config is an extension of Triton; this server has /v2/models/NAME"
            )

    def _describe_models(self, name: str) -> dict[str, Any]:
        """Return a model's description in OpenAI's format.

        If `name` is empty, return a list with the descriptions of all models. Raises
        `RequestRefused` for an unknown model.
        """
        cards = {}
        for each in self.models:
            cards[each] = {
                "id": each,
                "object": "model",
                "created": self.started,
                "owned_by": "weft",
            }
        if not name:
            return {"object": "list", "data": list(cards.values())}
        if name not in cards:
            raise RequestRefused(
                404,
                f"unknown model {name[:80]!r}; this server has {', '.join(cards)}",
                code="model_not_found",
            )
        return cards[name]

    def _check_allowed(self, exchange: HttpExchange) -> None:
        """Raise `RequestRefused` if the request does not carry the server's token.

        If the server has no token, requests with an `Origin` header are refused, because they come
        from scripts of web pages.
        """
        if self.token is None:
            if "origin" in exchange.headers:
                raise RequestRefused(
                    403, "requests from web pages are refused if the server has no token"
                )
            return
        if not is_authorized(exchange.headers.get("authorization"), self.token):
            raise RequestRefused(
                401, "send the server's token: Authorization: Bearer TOKEN", code="invalid_api_key"
            )

    def _check_method(self, exchange: HttpExchange, method: str) -> None:
        if exchange.method != method:
            raise RequestRefused(
                405, f"{exchange.method} is not allowed for this path; use {method}"
            )

    async def _refuse(self, exchange: HttpExchange, refused: RequestRefused) -> None:
        """Send an error response in the format of the endpoint's protocol.

        If a streamed answer has begun, the error is sent as the last event of the stream.
        """
        if exchange.path.startswith("/v2"):
            value: dict[str, Any] = {"error": refused.message}
        else:
            value = {"error": _build_error_object(refused)}
        if exchange.status is not None:
            await exchange.send_event(json.dumps(value))
            await exchange.end()
            return
        headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}}.get(
            refused.status, {}
        )
        if refused.status in (408, 413):
            headers = {"connection": "close"}
        await exchange.reply_json(value, refused.status, headers)


def is_authorized(header: str | None, token: str) -> bool:
    """Return whether an `Authorization` header carries `token`; the comparison takes constant time."""
    scheme, _, given = (header or "").partition(" ")
    return (
        secrets.compare_digest(given.strip().encode(), token.encode())
        and scheme.lower() == "bearer"
    )


def _convert_exception(error: Exception, seconds: float) -> RequestRefused:
    """Convert an exception to an error response.

    `seconds` is the server's time limit, which is stated in the message of a timeout. Details of
    internal errors are written only to the server's log.
    """
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, TimeoutError):
        return RequestRefused(
            504, f"no answer within {seconds:g} seconds, the server's --timeout", code="timeout"
        )
    if isinstance(error, DataError):
        return RequestRefused(400, str(error))
    if isinstance(error, UserError):
        return RequestRefused(400, str(error))
    log.error("a request failed", exc_info=error)
    return RequestRefused(
        500,
        f"the request failed: {type(error).__name__}; see the server's log",
        code="server_error",
    )


def _build_error_object(refused: RequestRefused) -> dict[str, Any]:
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    usual = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {
        "message": refused.message,
        "type": kinds.get(refused.status, usual),
        "param": refused.param,
        "code": refused.code,
    }
