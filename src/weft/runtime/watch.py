"""A look every second at what a run depends on and cannot hear: whether somebody still listens at some addresses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping

EVERY_SECONDS = 1.0
ANSWER_SECONDS = 5.0
BEGIN_SECONDS = 20.0


class Watch:
    """`places` are (host, port) by name. `gone` says who has not answered for `seconds`; None while all do."""

    def __init__(self, places: Mapping[str, tuple[str, int]], seconds: float) -> None:
        self.gone: str | None = None
        self._places, self._seconds = places, seconds
        self._over = threading.Event()
        threading.Thread(target=self._look, name="weft-watch", daemon=True).start()

    def check(self, *names: str) -> None:
        """Look at some of them now, or at all."""
        for name in names or self._places:
            if self.gone is None and not _listens(self._places[name]):
                self.gone = self._told(name)

    def close(self) -> None:
        self._over.set()

    def _look(self) -> None:
        heard = dict.fromkeys(self._places, time.monotonic())
        while self.gone is None and not self._over.wait(EVERY_SECONDS):
            for name, place in self._places.items():
                if _listens(place):
                    heard[name] = time.monotonic()
                elif time.monotonic() - heard[name] > self._seconds:
                    self.gone = self._told(name)

    def _told(self, name: str) -> str:
        host, port = self._places[name]
        return f"{name} ({host}:{port}) is gone"


def check_listens(address: str) -> None:
    """Raises `OSError` where the address is HOST:PORT and nobody listens there."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in address:
        socket.create_connection((host, int(port)), timeout=BEGIN_SECONDS).close()


def _listens(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
