"""ASGI application that checks access tokens, routes requests to endpoints, and formats errors.

It also has the endpoints of the open inference protocol (KServe v2): server metadata at `/v2`, model
metadata, and inference at `/v2/models/NAME/infer`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from weft import __version__
from weft.errors import DataError, UserError
from weft.serve.background import BackgroundWork, decompress_body
from weft.serve.bodies import LENGTH_HEADER, compute_header_size, pack, read_flag, read_tensors
from weft.serve.exchange import (
    ClientDisconnected,
    HttpExchange,
    Message,
    RequestRefused,
    ServerLimits,
    ServerMetrics,
)
from weft.serve.openai_api import CompletionEndpoints
from weft.serve.openai_format import encode_json
from weft.serve.prompts import PromptReader
from weft.serve.served_model import IDS, PLATFORM, VERSION, ServedModel
from weft.serve.tokenizer_api import ANSWERS, TokenizerEndpoints

log = logging.getLogger(__name__)

COMPLETIONS = {"/v1/chat/completions": True, "/v1/completions": False}  # path -> is a chat
TOKENIZERS = ("/tokenize", "/detokenize", "/tokenizer_info")
PUBLIC_PATHS = ("/v2/health/live", "/v2/health/ready")  # paths that need no token
MODEL_PATH = re.compile(
    r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?(?P<rest>/ready|/infer|/config)?"
)
EXTENSIONS = ["binary_tensor_data"]


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
        """Served policy, or None if the server has only a reward model."""
        return next((model for model in self.models.values() if model.spec is not None), None)

    @property
    def inference_endpoint(self) -> InferenceEndpoint:
        """Endpoint for metadata and inference of all models."""
        return InferenceEndpoint(self.models, self.metrics, self.limits.max_load, self.background)

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http":
            raise ValueError(f"this server supports only HTTP, not {scope['type']}")
        exchange = HttpExchange(scope, receive, send)
        start = time.perf_counter()
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
        seconds = time.perf_counter() - start
        self.metrics.count_answer(endpoint, status or str(exchange.status), seconds)

    def _find_endpoint(self, path: str) -> str:
        """Return the label under which the metrics count requests to a path.

        All unknown paths have the same label, so that clients cannot create new time series.
        """
        known_paths = (*COMPLETIONS, *TOKENIZERS, *PUBLIC_PATHS, "/v1/models", "/v2")
        if path in known_paths:
            return path
        match = MODEL_PATH.fullmatch(path)
        return f"/v2/models{match['rest'] or ''}" if match else "other"

    async def _route_request(self, exchange: HttpExchange) -> None:
        """Pass a request to its endpoint. Raises `RequestRefused` for unknown paths and methods."""
        # Answer health checks, which need no token.
        if exchange.path == "/v2/health/live" and exchange.method == "GET":
            return await exchange.reply(200, b"")
        if exchange.path == "/v2/health/ready" and exchange.method == "GET":
            is_ready = all(model.worker.is_alive for model in self.models.values())
            return await exchange.reply(200 if is_ready else 503, b"")
        # Route all other requests by their path.
        self._check_allowed(exchange)
        if exchange.path in COMPLETIONS:
            self._check_method(exchange, "POST")
            return await self._complete(exchange, chat=COMPLETIONS[exchange.path])
        if exchange.path in TOKENIZERS:
            return await self._answer_tokenizer_request(exchange)
        if exchange.path == "/v1/models" or exchange.path.startswith("/v1/models/"):
            self._check_method(exchange, "GET")
            name = exchange.path.removeprefix("/v1/models").lstrip("/")
            return await exchange.reply_json(self._describe_models(name))
        if exchange.path in ("/v2", "/v2/"):
            self._check_method(exchange, "GET")
            return await exchange.reply_json(self.inference_endpoint.describe_server())
        if match := MODEL_PATH.fullmatch(exchange.path):
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
                hint = f"this server has {policy.name}"
            else:
                hint = "this server has only a reward model, which generates no text"
            if name in self.models:
                message = (
                    f"no text generation by {name[:80]!r}; it is a reward model, whose scores are "
                    f"at /v2/models/{name}/infer; {hint}"
                )
            else:
                message = f"unknown model {name[:80]!r}; {hint}"
            raise RequestRefused(404, message, param="model", code="model_not_found")
        endpoints = CompletionEndpoints(policy, self.metrics, self.limits, self.background)
        await endpoints.answer_request(exchange, body, chat=chat)

    async def _answer_tokenizer_request(self, exchange: HttpExchange) -> None:
        """Answer a request about the tokenizer of the model that it names, by default the policy.

        Raises `RequestRefused` if the request is invalid.
        """
        is_info = exchange.path == "/tokenizer_info"
        self._check_method(exchange, "GET" if is_info else "POST")
        body = {} if is_info else await self.background.read(await self._read_body(exchange))
        name = body.get("model")
        if name is None:
            model = self.policy or next(iter(self.models.values()))
        elif isinstance(name, str) and name in self.models:
            model = self.models[name]
        else:
            raise build_unknown_model_error(str(name), self.models)
        endpoints = TokenizerEndpoints(PromptReader(model, self.limits, self.background))
        if is_info:
            return await exchange.reply_json(endpoints.describe())
        answer = await self.background.run(ANSWERS[exchange.path], endpoints, body)
        text = await self.background.run(encode_json, answer)
        await exchange.reply(200, text.encode())

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
        for model in self.models:
            cards[model] = {
                "id": model,
                "object": "model",
                "created": self.started,
                "owned_by": "weft",
            }
        if not name:
            return {"object": "list", "data": list(cards.values())}
        if name not in cards:
            raise build_unknown_model_error(name, self.models)
        return cards[name]

    def _check_allowed(self, exchange: HttpExchange) -> None:
        """Raise `RequestRefused` if the request does not have the server's token.

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
        """Raise `RequestRefused` if the request has another method than `method`."""
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
        headers: dict[str, str] = {}
        if refused.status == 401:
            headers = {"www-authenticate": "Bearer"}
        elif refused.status == 429:
            headers = {"retry-after": "1"}
        elif refused.status in (408, 413):
            headers = {"connection": "close"}
        await exchange.reply_json(value, refused.status, headers)


def build_unknown_model_error(name: str, models: Collection[str]) -> RequestRefused:
    """Return the error for a model that the server does not have."""
    message = f"unknown model {name[:80]!r}; this server has {', '.join(models)}"
    return RequestRefused(404, message, param="model", code="model_not_found")


def is_authorized(header: str | None, token: str) -> bool:
    """Return whether an `Authorization` header contains `token`, compared in constant time."""
    scheme, _, sent_token = (header or "").partition(" ")
    is_equal = secrets.compare_digest(sent_token.strip().encode(), token.encode())
    return is_equal and scheme.lower() == "bearer"


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
    if isinstance(error, DataError | UserError):
        return RequestRefused(400, str(error))
    log.error("a request failed", exc_info=error)
    return RequestRefused(
        500,
        f"the request failed: {type(error).__name__}; see the server's log",
        code="server_error",
    )


def _build_error_object(refused: RequestRefused) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    types = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    default_type = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {
        "message": refused.message,
        "type": types.get(refused.status, default_type),
        "param": refused.param,
        "code": refused.code,
    }


@dataclass(frozen=True)
class InferenceEndpoint:
    """Endpoint for the metadata of all served models, and for inference with these models.

    `max_load` limits the load of each model, which is the number of its unfinished completions and
    unscored token sequences. Requests above the limit are refused.
    """

    models: Mapping[str, ServedModel]
    metrics: ServerMetrics
    max_load: int
    background: BackgroundWork

    def describe_server(self) -> dict[str, Any]:
        """Return the server's metadata."""
        return {"name": PLATFORM, "version": __version__, "extensions": EXTENSIONS}

    def get_model(self, name: str, version: str | None) -> ServedModel:
        """Return the model with this name and version.

        Raises `RequestRefused` if there is no such model.
        """
        if name not in self.models or version not in (None, "", VERSION):
            label = name if version in (None, "") else f"{name} version {version}"
            raise RequestRefused(
                404, f"unknown model {label[:80]!r}; this server has {', '.join(self.models)}"
            )
        return self.models[name]

    async def answer_request(
        self, exchange: HttpExchange, body: bytes, served: ServedModel
    ) -> None:
        """Answer an inference request for the model `served`.

        Raises `RequestRefused` if the request is invalid or the model is overloaded.
        """
        # Read the request, and run the model.
        try:
            size = compute_header_size(body, _read_header_length(exchange))
            header = await self.background.read(body[:size])
            inputs = await self.background.run(read_tensors, body, size, header, "inputs")
            output_names, binary = _read_outputs(header, served)
            parameters = header.get("parameters") or {}
            if not isinstance(parameters, Mapping):
                raise DataError("parameters must be an object")
            tensors = await exchange.await_unless_disconnected(
                self.infer(served, inputs, parameters)
            )
        except DataError as error:
            raise RequestRefused(400, str(error)) from None
        # Send the requested outputs.
        reply_header = {"model_name": served.name, "model_version": VERSION}
        if header.get("id") is not None:
            reply_header["id"] = header["id"]
        outputs = {name: tensors[name] for name in output_names}
        reply_body, header_length = await self.background.run(
            pack, reply_header, "outputs", outputs, binary
        )
        if header_length is None:
            await exchange.reply(200, reply_body)
        else:
            await exchange.reply(
                200,
                reply_body,
                "application/octet-stream",
                {LENGTH_HEADER.lower(): str(header_length)},
            )

    async def infer(
        self, served: ServedModel, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run inference with a model, and return its output tensors by name.

        Raises `DataError` for invalid inputs, and `RequestRefused` if the model is overloaded.
        """
        if served.worker.load + len(inputs.get(IDS, ())) > self.max_load:
            raise RequestRefused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        outputs = await served.infer(inputs, parameters, self.background)
        self.metrics.count_tokens(scored=int(inputs[IDS].size))
        return outputs


def _read_header_length(exchange: HttpExchange) -> int | None:
    """Return the length of the body's JSON part in bytes, or None if the request does not state it.

    Raises `DataError` if it is not a whole number.
    """
    text = exchange.headers.get(LENGTH_HEADER.lower())
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise DataError(f"{LENGTH_HEADER} must be a whole number")
    return int(text)


def _read_outputs(header: Mapping[str, Any], served: ServedModel) -> tuple[list[str], set[str]]:
    """Return the names of the requested outputs, and of the outputs to send as binary data.

    `header` is the JSON part of the request. Raises `DataError` for an output that the model does
    not have.
    """
    default = read_flag(header, "binary_data_output", False)
    entries = header.get("outputs")
    if entries is None or entries == []:
        entries = [{"name": served.output}]
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise DataError("outputs must be a list of objects")
    for entry in entries:
        if entry.get("name") != served.output:
            raise DataError(
                f"model {served.name!r} has no output {entry.get('name')!r}; it has {served.output}"
            )
    if any(read_flag(entry, "binary_data", default) for entry in entries):
        binary = {served.output}
    else:
        binary = set()
    return [served.output], binary
