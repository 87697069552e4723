"""Real browser for tests: chromedriver's HTTP interface; only Chromium needs to be installed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRIVER = shutil.which("chromedriver")
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MISSING = "" if DRIVER and BROWSER else "no chromium with chromedriver on this machine"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
)


class Browser:
    """Window of a browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, url: str) -> None:
        self._call("url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """Return the result of a function with this body."""
        return self._call("execute/sync", {"script": script, "args": list(args)})

    def until(self, script: str, seconds: float = 20.0) -> Any:
        """Return the result of the script as soon as it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"it stayed false: {script}"
            time.sleep(0.1)
        return found

    def drag(self, selector: str, start: float, stop: float) -> None:
        """Drag the mouse over an element, between two fractions of its width."""
        left, top, width, height = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center', "
            "behavior: 'instant'});"
            "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
            selector,
        )

        def move(share: float) -> dict[str, Any]:
            return {
                "type": "pointerMove",
                "duration": 20,
                "x": int(left + width * share),
                "y": int(top + height / 2),
            }

        button = {"button": 0}
        actions = [
            move(start),
            {"type": "pointerDown", **button},
            move((start + stop) / 2),
            move(stop),
        ]
        actions.append({"type": "pointerUp", **button})
        mouse = {
            "type": "pointer",
            "id": "mouse",
            "parameters": {"pointerType": "mouse"},
            "actions": actions,
        }
        self._call("actions", {"actions": [mouse]})

    def errors(self) -> list[str]:
        """Return the errors in the console."""
        entries = self._call("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def resize(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call(
            "goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        )

    def _call(self, path: str, body: Any) -> Any:
        return _post(f"{self._session}/{path}", body)


def _post(url: str, body: Any, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.loads(error.read())["value"]["message"]) from error


@contextmanager
def browser(folder: Path, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Start a browser with its profile in `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        base = f"http://127.0.0.1:{port}"
        _wait(base)
        args = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}"]
        options = {"binary": BROWSER, "args": args}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        made = _post(f"{base}/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{base}/session/{made['sessionId']}"
        yield Browser(session)
        _post(session, None, "DELETE")
    finally:
        driver.terminate()
        driver.wait(20)


def _wait(base: str) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            with urllib.request.urlopen(f"{base}/status", timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, "chromedriver did not begin to listen"
            time.sleep(0.1)
