"""gRPC version of the open inference protocol (KServe v2).

Inference and metadata are implemented by the `InferenceEndpoint` of the HTTP version.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

import grpc

from weft.errors import DataError, UserError
from weft.serve import inference_grpc
from weft.serve.app import ServerApp, is_authorized
from weft.serve.exchange import RequestRefused
from weft.serve.served_model import VERSION

log = logging.getLogger(__name__)

THREADS = 64  # concurrent calls
RESERVED_THREADS = 8  # threads reserved for health and metadata calls
STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
PUBLIC_CALLS = ("ServerLive", "ServerReady")  # calls that need no token


@dataclass(frozen=True)
class GrpcCallHandlers:
    """Handlers of the gRPC calls of the open inference protocol.

    Inference runs in `loop`, the event loop of the HTTP server. `inferring` limits the number of
    concurrent inference calls.
    """

    app: ServerApp
    loop: asyncio.AbstractEventLoop
    inferring: threading.BoundedSemaphore = field(
        default_factory=lambda: threading.BoundedSemaphore(THREADS - RESERVED_THREADS)
    )

    def answer(self, name: str, request: Any, context: Any) -> Any:
        """Return the response to the call `name`, or abort the call with a status code."""
        start = time.perf_counter()
        status = "OK"
        try:
            self._check_allowed(name, context)
            return getattr(self, f"_{name}")(request, context)
        except (RequestRefused, UserError) as error:
            http_status = error.status if isinstance(error, RequestRefused) else 400
            code = STATUS_CODES.get(http_status, grpc.StatusCode.INTERNAL)
            status = code.name
            context.abort(code, str(error))
        except (FutureTimeout, CancelledError):
            status = grpc.StatusCode.DEADLINE_EXCEEDED.name
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within the deadline")
        except Exception as error:
            log.error("a request failed", exc_info=error)
            status = grpc.StatusCode.INTERNAL.name
            context.abort(
                grpc.StatusCode.INTERNAL,
                f"the request failed: {type(error).__name__}; see the server's log",
            )
        finally:
            self.app.metrics.count_answer(f"grpc/{name}", status, time.perf_counter() - start)

    def _check_allowed(self, name: str, context: Any) -> None:
        """Raise `RequestRefused` if the call needs the server's token and does not have it."""
        if name in PUBLIC_CALLS or self.app.token is None:
            return
        header = dict(context.invocation_metadata()).get("authorization")
        if not is_authorized(header, self.app.token):
            raise RequestRefused(
                401, "send the server's token: metadata authorization: Bearer TOKEN"
            )

    def _ServerLive(self, request: Any, context: Any) -> Any:
        return inference_grpc.get_message_class("ServerLiveResponse")(live=True)

    def _ServerReady(self, request: Any, context: Any) -> Any:
        is_ready = all(model.worker.is_alive for model in self.app.models.values())
        return inference_grpc.get_message_class("ServerReadyResponse")(ready=is_ready)

    def _ModelReady(self, request: Any, context: Any) -> Any:
        served = self.app.inference_endpoint.get_model(request.name, request.version)
        return inference_grpc.get_message_class("ModelReadyResponse")(ready=served.worker.is_alive)

    def _ServerMetadata(self, request: Any, context: Any) -> Any:
        return inference_grpc.get_message_class("ServerMetadataResponse")(
            **self.app.inference_endpoint.describe_server()
        )

    def _ModelMetadata(self, request: Any, context: Any) -> Any:
        served = self.app.inference_endpoint.get_model(request.name, request.version)
        return inference_grpc.get_message_class("ModelMetadataResponse")(**served.build_metadata())

    def _ModelInfer(self, request: Any, context: Any) -> Any:
        if not self.inferring.acquire(blocking=False):
            raise RequestRefused(429, "the server is at its request limit; try again later")
        try:
            return self._infer(request, context)
        finally:
            self.inferring.release()

    def _infer(self, request: Any, context: Any) -> Any:
        """Return the response to an inference request; raise `DataError` for invalid tensors."""
        served = self.app.inference_endpoint.get_model(request.model_name, request.model_version)
        inputs = inference_grpc.read_tensors(request.inputs, request.raw_input_contents)
        for output in request.outputs:
            if output.name != served.output:
                raise DataError(
                    f"model {served.name!r} has no output {output.name!r}; it has {served.output}"
                )
        parameters = inference_grpc.read_parameters(request.parameters)
        tensors = self._run(self.app.inference_endpoint.infer(served, inputs, parameters), context)
        reply = inference_grpc.get_message_class("ModelInferResponse")(
            model_name=served.name, model_version=VERSION, id=request.id
        )
        inference_grpc.write_tensors(tensors, reply.outputs, reply.raw_output_contents)
        return reply

    def _run(self, work: Coroutine[Any, Any, Any], context: Any) -> Any:
        """Run a coroutine in the HTTP server's event loop, and return its result.

        The coroutine is cancelled if the client disconnects or the deadline passes.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        context.add_callback(future.cancel)
        timeout = self.app.limits.seconds
        remaining = context.time_remaining()
        if remaining is not None:
            timeout = min(timeout, remaining)
        try:
            return future.result(timeout)
        finally:
            future.cancel()


def build_grpc_server(app: ServerApp, loop: asyncio.AbstractEventLoop) -> grpc.Server:
    """Return a gRPC server for the application, without a port and not yet started.

    `loop` is the event loop of the HTTP server.
    """
    calls = GrpcCallHandlers(app, loop)
    limit = app.limits.body_bytes

    def build_handler(name: str) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda request, context: calls.answer(name, request, context),
            request_deserializer=inference_grpc.get_message_class(f"{name}Request").FromString,
            response_serializer=lambda reply: reply.SerializeToString(),
        )

    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="weft-grpc"),
        options=[
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ],
    )
    handlers = {name: build_handler(name) for name in inference_grpc.CALLS}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(inference_grpc.SERVICE, handlers),)
    )
    return server
