"""Server with HTTP, gRPC and metrics ports, each served in a separate thread.

Usage:

    with Server([policy, reward], ServerPorts(http=8000), ServerLimits(), token) as server:
        print(server.urls)
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from weft.errors import ConfigError
from weft.serve.app import ServerApp
from weft.serve.background import BackgroundWork
from weft.serve.exchange import (
    METRICS_CONTENT_TYPE,
    HttpExchange,
    Message,
    RequestRefused,
    ServerLimits,
    ServerMetrics,
)
from weft.serve.served_model import ServedModel

GRACE_S = 5.0  # seconds for running requests to finish at shutdown
MAX_CONNECTIONS = 2048


@dataclass(frozen=True)
class ServerPorts:
    """Address and ports to listen on.

    A port of 0 is replaced by a free port. A port of None disables that protocol.
    """

    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int | None = None
    metrics: int | None = None


@dataclass
class Server:
    """Context manager that serves models over HTTP, and over gRPC if `ports.grpc` is set.

    If `ports.metrics` is set, metrics are served over HTTP on this port. `urls` contains the
    addresses of the servers under the names `http`, `grpc` and `metrics`.
    """

    models: Sequence[ServedModel]
    ports: ServerPorts
    limits: ServerLimits
    token: str | None
    urls: dict[str, str] = field(default_factory=dict)
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    background: BackgroundWork = field(default_factory=BackgroundWork)
    _loop: asyncio.AbstractEventLoop | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _servers: list[Any] = field(default_factory=list)  # uvicorn servers
    _grpc: Any = None

    def __enter__(self) -> Server:
        """Start the models' workers, and listen on the ports.

        Raises `ConfigError` for a port that is in use.
        """
        models = {model.name: model for model in self.models}
        app = ServerApp(
            models, self.limits, self.token, self.metrics, int(time.time()), self.background
        )
        http_socket = _open_socket("--port", self.ports.host, self.ports.http)
        try:
            metrics_socket = None
            if self.ports.metrics is not None:
                metrics_socket = _open_socket("--metrics-port", self.ports.host, self.ports.metrics)
            for model in self.models:
                self.background.prepare(model.tokenizer)
                model.worker.start()
            self._serve(app, http_socket, "http")
            if metrics_socket is not None:
                self._serve(self._serve_metrics, metrics_socket, "metrics")
            if self.ports.grpc is not None:
                self._start_grpc(app, self.ports.grpc)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, wait up to `GRACE_S` seconds for running requests, and end all threads."""
        if self._grpc is not None:
            self._grpc.stop(GRACE_S).wait()
        for server in self._servers:
            server.should_exit = True
        for thread in self._threads:
            thread.join()
        for model in self.models:
            model.worker.stop()
        self.background.close()

    def _serve(self, app: Any, listener: socket.socket, name: str) -> None:
        """Serve an ASGI application on the socket `listener`, in a new thread.

        The method returns when the application accepts connections or has failed. The thread runs
        until `close` is called. `name` is the application's key in `urls`.
        """
        import uvicorn

        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            interface="asgi3",
            timeout_graceful_shutdown=int(GRACE_S),
            limit_concurrency=MAX_CONNECTIONS,
            server_header=False,
        )
        # Start the server in a thread, and store its event loop for gRPC.
        server = uvicorn.Server(config)
        has_loop = threading.Event()

        async def serve() -> None:
            if name == "http":
                self._loop = asyncio.get_running_loop()
            has_loop.set()
            await server.serve([listener])

        thread = threading.Thread(
            target=lambda: asyncio.run(serve()), name=f"weft-{name}", daemon=True
        )
        thread.start()
        has_loop.wait()
        # Wait until the server accepts connections or has failed.
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        self._servers.append(server)
        self._threads.append(thread)
        host, port = listener.getsockname()[:2]
        self.urls[name] = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _start_grpc(self, app: ServerApp, port: int) -> None:
        """Start the gRPC server. Raises `ConfigError` if it cannot listen on the port."""
        from weft.serve.grpc_server import build_grpc_server

        assert self._loop is not None
        server = build_grpc_server(app, self._loop)
        host = f"[{self.ports.host}]" if ":" in self.ports.host else self.ports.host
        try:
            bound_port = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            bound_port = 0
        if not bound_port:
            raise ConfigError(
                f"--grpc-port={port}: cannot listen on this port; choose another, or 0 for a free one"
            )
        server.start()
        self._grpc = server
        self.urls["grpc"] = f"grpc://{host}:{bound_port}"

    async def _serve_metrics(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer an ASGI request for the metrics page.

        The page contains only counts, so no token is required.
        """
        exchange = HttpExchange(scope, receive, send)
        if exchange.path != "/metrics":
            return await exchange.reply_json(
                {"error": RequestRefused(404, "see /metrics").message}, 404
            )
        text = self.metrics.format_text({model.name: model.worker.load for model in self.models})
        await exchange.reply(200, text.encode(), METRICS_CONTENT_TYPE)


def _open_socket(option: str, host: str, port: int) -> socket.socket:
    """Return a socket bound to the port. Raises `ConfigError` if that fails."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"{option}={port} on --host={host}: {error}; choose another, or port 0 for a free one"
        ) from None
    return listener
