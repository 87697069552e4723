"""Show the runs of a folder in a browser: a list, a page per run, and comparisons.

Pages refresh while runs are active.
"""

from __future__ import annotations

import argparse
import hmac
import secrets
import signal
import threading
import webbrowser
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from weft.cli.parsing import CommandParser
from weft.errors import ConfigError
from weft.observe.dashboard import NOT_FOUND, Dashboard, DashboardAnswer

HOST = "127.0.0.1"  # only this machine can connect
PORT = 8808
LOOPBACK = ("127.0.0.1", "localhost")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
IDLE_SECONDS = 15.0  # idle connections are closed after this time
EPILOG = """The address contains a token: whoever has it can read the runs.
Only this machine can connect.
For runs on a remote machine: ssh -L 8808:127.0.0.1:8808 MACHINE

examples:
  weft dashboard
  weft dashboard /data/runs --open"""


def build_parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="weft dashboard", description=__doc__, epilog=EPILOG)
    parser.add_argument(
        "folder",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path("runs"),
        help="folder of runs (./runs)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=None,
        help=f"port to listen on (default {PORT}, or a free one if it is taken; 0: a free one)",
    )
    parser.add_argument("--open", action="store_true", help="open a browser")
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve the pages until Ctrl-C or SIGTERM, and return the exit code 0.

    Raises `ConfigError` for a missing folder or a port that is in use.
    """
    arguments = build_parser().parse_args(list(argv))
    folder = arguments.folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; give the folder with the runs, such as ./runs"
        )
    if not folder.exists() and arguments.folder != Path("runs"):
        raise ConfigError(
            f"{folder}: there is no such folder; give the folder with the runs, such as ./runs"
        )
    from weft.launch.stop import is_alive

    token = secrets.token_urlsafe(16)
    server = open_server(Dashboard(folder, is_alive), token, arguments.port)
    address = f"http://{HOST}:{server.server_address[1]}/{token}/"
    stop_requested = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop_requested.set())
    thread = threading.Thread(target=server.serve_forever, name="weft-dashboard", daemon=True)
    thread.start()
    print(f"folder: {folder}  {address}\nCtrl-C ends it", flush=True)
    if arguments.open and not webbrowser.open(address):
        print("no browser was found; open the address yourself", flush=True)
    stop_requested.wait()
    server.shutdown()
    server.server_close()
    print("ended", flush=True)
    return 0


def open_server(dashboard: Dashboard, token: str, port: int | None = None) -> ThreadingHTTPServer:
    """Return a server on the loopback address for requests whose path begins with `token`.

    If `port` is None, the default port is used, or a free port if the default is in use. Raises
    `ConfigError` if `port` is invalid or in use.
    """
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"--port={port}: must be from 0 to 65535")

    class DashboardRequestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        server_version = "weft"
        sys_version = ""
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            self._send_answer(
                answer_request(
                    dashboard,
                    token,
                    self.path,
                    self.headers.get("Host", ""),
                    self.headers.get("If-None-Match", ""),
                )
            )

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because request paths contain the token."""

        def _send_answer(self, answer: DashboardAnswer) -> None:
            body = answer.body.encode("utf-8", errors="replace")
            content_type = "text/html" if answer.status == 200 else "text/plain"
            self.send_response(answer.status)
            for name, value in {
                **HEADERS,
                "Content-Type": f"{content_type}; charset=utf-8",
            }.items():
                self.send_header(name, value)
            if answer.tag:
                self.send_header("ETag", answer.tag)
            if answer.status != 304:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if answer.status != 304:
                self.wfile.write(body)

    for candidate in (PORT, 0) if port is None else (port,):
        try:
            return ThreadingHTTPServer((HOST, candidate), DashboardRequestHandler)
        except OSError as error:
            if port is not None:
                raise ConfigError(
                    f"--port={port}: {error.strerror}; choose another port, or leave it out"
                ) from error
    raise ConfigError("no port is free on this machine")


def answer_request(
    dashboard: Dashboard, token: str, target: str, host: str, cached_tag: str = ""
) -> DashboardAnswer:
    """Return the answer to a request for the URL path `target`.

    `host` is the request's Host header, and `cached_tag` is the ETag of the page in the client's
    cache. If the path does not begin with the token, or if the host is not this machine, the answer
    has status 403 and no information about runs.
    """
    if host.rpartition(":")[0] not in LOOPBACK:
        return DashboardAnswer(403, "Only this machine can open this address.")
    url = urlsplit(target)
    given_token, _, page = unquote(url.path).removeprefix("/").partition("/")
    if not hmac.compare_digest(given_token.encode(), token.encode()):
        return DashboardAnswer(
            403, "The address lacks its token; use the address that weft dashboard printed."
        )
    if "/" in page:
        return NOT_FOUND
    return dashboard.answer(page, parse_qs(url.query), cached_tag)
