"""Watching of network addresses that a run depends on, by connecting to each every second."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping

EVERY_SECONDS = 1.0
ANSWER_SECONDS = 5.0
BEGIN_SECONDS = 20.0
# Start of an HTTP/2 connection (RFC 9113, section 3.4): a fixed text, then a SETTINGS frame
# from either side, here an empty one. The fourth byte of a frame is its type.
FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME


class Watch:
    """Watch `places`, (host, port) by name.

    `gone` describes the first that has not answered for `seconds`, or is None.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]], seconds: float) -> None:
        self.gone: str | None = None
        self._places = places
        self._seconds = seconds
        self._over = threading.Event()
        threading.Thread(target=self._look, name="weft-watch", daemon=True).start()

    def check(self, *names: str) -> None:
        """Check the named addresses now, by default all."""
        for name in names or self._places:
            if self.gone is None and not listens(self._places[name]):
                self.gone = self._told(name)

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _look(self) -> None:
        heard = dict.fromkeys(self._places, time.monotonic())
        while self.gone is None and not self._over.wait(EVERY_SECONDS):
            for name, place in self._places.items():
                if listens(place):
                    heard[name] = time.monotonic()
                elif time.monotonic() - heard[name] > self._seconds:
                    self.gone = self._told(name)

    def _told(self, name: str) -> str:
        host, port = self._places[name]
        return f"{name} ({host}:{port}) does not respond"


def check_listens(address: str) -> None:
    """Raise `OSError` if no HTTP/2 server, such as Ray's head, listens at HOST:PORT.

    Ray itself would retry for minutes and print every attempt. Other forms of addresses are not
    checked.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        return
    with socket.create_connection((host, int(port)), timeout=BEGIN_SECONDS) as line:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return
        line.sendall(PREFACE)
        answer = b""
        while len(answer) < len(FRAME) and (more := line.recv(len(FRAME) - len(answer))):
            answer += more
    if answer[3:4] != FRAME[3:4]:
        raise OSError("another program listens there")


def listens(place: tuple[str, int]) -> bool:
    """Return whether a connection to the (host, port) can be made."""
    try:
        socket.create_connection(place, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
