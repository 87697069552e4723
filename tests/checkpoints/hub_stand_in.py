"""A hub on this machine: as much of the Hugging Face hub's HTTP interface as an upload needs.

It takes files in the commit itself, which the real one does for small files.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_standin"  # the only token that may write
MAIN = "main"


@dataclass
class StoredRepository:
    """Files of each branch, and the messages of the commits."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {MAIN: {}})
    messages: list[str] = field(default_factory=list)


@dataclass
class HubStandIn:
    """Repositories of the hub, and the requests that it got: (method, path).

    `refused` maps kinds of requests about a repository, such as `commit`, to the status with which
    they are refused.
    """

    url: str = ""
    repositories: dict[str, StoredRepository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        """Return (status, JSON, headers) of the answer to a request."""
        place, _, _ = path.partition("?")
        parts = [unquote(part) for part in place.strip("/").split("/")]
        if parts == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}, {}
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.repositories:
                return 409, {"url": f"{self.url}/{name}", "error": "exists"}, {}
            # clients of version 2 send `visibility`, older ones `private`
            is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.repositories[name] = StoredRepository(is_private)
            return 200, {"url": f"{self.url}/{name}"}, {}
        name = "/".join(parts[2:4])
        stored = self.repositories.get(name)
        if stored is None:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        if parts[4:5] and parts[4] in self.refused:
            return self.refused[parts[4]], {"error": "refused by the test"}, {}
        return self._answer_about(stored, name, parts[4:], body)

    def _answer_about(
        self, stored: StoredRepository, name: str, rest: list[str], body: bytes
    ) -> tuple[int, Any, dict[str, str]]:
        if rest[:1] == ["branch"]:
            if rest[1] in stored.branches:
                return 409, {"error": "exists"}, {}
            stored.branches[rest[1]] = dict(stored.branches[MAIN])
            return 200, {}, {}
        files = stored.branches[rest[1] if len(rest) > 1 else MAIN]
        if rest[:1] == ["tree"]:
            listed = [
                {"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
                for path, data in files.items()
            ]
            return 200, listed, {}
        if rest[:1] == ["preupload"]:
            asked = json.loads(body)["files"]
            answers = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                for each in asked
            ]
            return 200, {"files": answers}, {}
        if rest[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    stored.messages.append(line["value"]["summary"])
                elif line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            commit = f"{self.url}/{name}/commit/{'1' * 40}"
            return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": commit}, {}
        about = {"id": name, "modelId": name, "private": stored.private, "sha": "1" * 40}
        return 200, {**about, "siblings": [{"rfilename": each} for each in files]}, {}


@contextmanager
def serve_hub() -> Iterator[HubStandIn]:
    """Serve a hub without repositories on a free port of this machine."""
    hub = HubStandIn()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append((self.command, self.path))
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                status, content, headers = hub.answer(self.command, self.path, body)
            else:
                status, content, headers = 401, {"error": "Invalid credentials"}, {}
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = handle_request

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
