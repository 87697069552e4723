"""A look every second at what a run depends on and cannot hear: whether somebody still listens at
some addresses.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping

EVERY_SECONDS = 1.0
ANSWER_SECONDS = 5.0
BEGIN_SECONDS = 20.0
# What begins a connection of HTTP/2 (RFC 9113, section 3.4): a fixed text, and from both sides a
# frame of settings, here an empty one. Its fourth byte is its kind.
FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME


class Watch:
    """`places` are (host, port) by name.

    `gone` says who has not answered for `seconds`; None while all do.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]], seconds: float) -> None:
        self.gone: str | None = None
        self._places = places
        self._seconds = seconds
        self._over = threading.Event()
        threading.Thread(target=self._look, name="weft-watch", daemon=True).start()

    def check(self, *names: str) -> None:
        """Look at some of them now, or at all."""
        for name in names or self._places:
            if self.gone is None and not listens(self._places[name]):
                self.gone = self._told(name)

    def close(self) -> None:
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
        return f"{name} ({host}:{port}) is gone"


def check_listens(address: str) -> None:
    """Raises `OSError` where the address is HOST:PORT and nobody listens there, or somebody who
    does not speak HTTP/2, as Ray's head does: Ray itself would try for minutes, and print each
    time.
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
        raise OSError("what listens there is another program")


def listens(place: tuple[str, int]) -> bool:
    """Return whether a connection to the (host, port) can be made."""
    try:
        socket.create_connection(place, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
