"""Monitoring of network addresses that a run depends on.

A connection to each address is attempted every second.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping

INTERVAL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
CONNECT_SECONDS = 20.0
# Start of an HTTP/2 connection (RFC 9113, section 3.4): a fixed text, then a SETTINGS frame
# from either side, here an empty one. The fourth byte of a frame is its type.
FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + FRAME


class AddressWatch:
    """Monitor of network addresses, which runs in a background thread.

    `places` maps names to (host, port). `lost_part` describes the first address that has not
    responded for `seconds` seconds, or is None.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]], seconds: float) -> None:
        self.lost_part: str | None = None
        self._addresses = places
        self._seconds = seconds
        self._closed = threading.Event()
        threading.Thread(target=self._poll_addresses, name="weft-watch", daemon=True).start()

    def check(self, *names: str) -> None:
        """Try to connect to the addresses with these names, or to all addresses if none is named.

        Sets `lost_part` if an address does not respond.
        """
        for name in names or self._addresses:
            if self.lost_part is None and not can_connect(self._addresses[name]):
                self.lost_part = self._describe_loss(name)

    def close(self) -> None:
        """Stop monitoring the addresses."""
        self._closed.set()

    def _poll_addresses(self) -> None:
        last_contact = dict.fromkeys(self._addresses, time.monotonic())
        while self.lost_part is None and not self._closed.wait(INTERVAL_SECONDS):
            for name, place in self._addresses.items():
                if can_connect(place):
                    last_contact[name] = time.monotonic()
                elif time.monotonic() - last_contact[name] > self._seconds:
                    self.lost_part = self._describe_loss(name)

    def _describe_loss(self, name: str) -> str:
        host, port = self._addresses[name]
        return f"{name} ({host}:{port}) does not respond"


def check_listens(address: str) -> None:
    """Raise `OSError` if no HTTP/2 server, such as Ray's head, listens at `address`.

    The address has the form HOST:PORT; an address of another form is not checked. Without this
    check, Ray itself would retry for minutes and print every attempt.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in address:
        return
    with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as line:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return
        line.sendall(PREFACE)
        answer = b""
        while len(answer) < len(FRAME) and (more := line.recv(len(FRAME) - len(answer))):
            answer += more
    if answer[3:4] != FRAME[3:4]:
        raise OSError("another program listens there")


def can_connect(place: tuple[str, int]) -> bool:
    """Return whether a TCP connection to `place`, a (host, port), can be opened."""
    try:
        socket.create_connection(place, timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
