"""Who stops listening is missed, after the time it has."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from weft.runtime.machines import AddressWatch, check_listens


def listener() -> tuple[socket.socket, tuple[str, int]]:
    made = socket.create_server(("127.0.0.1", 0))
    return made, made.getsockname()[:2]


def test_who_stops_listening_is_gone(monkeypatch):
    monkeypatch.setattr("weft.runtime.machines.INTERVAL_SECONDS", 0.02)
    (one, here), (two, there) = listener(), listener()
    watch = AddressWatch({"the head": here, "the other": there}, 0.1)
    time.sleep(0.3)  # looks that come late find both, too
    assert watch.lost_part is None
    one.close()
    end = time.monotonic() + 300
    while watch.lost_part is None and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.lost_part == f"the head ({here[0]}:{here[1]}) does not respond"
    two.close()


def test_a_look_now_does_not_wait(monkeypatch):
    (one, here), (two, there) = listener(), listener()
    watch = AddressWatch({"the head": here, "the other": there}, 1e9)
    one.close()
    watch.check("the other")
    assert watch.lost_part is None
    watch.check()
    assert watch.lost_part is not None and watch.lost_part.startswith("the head")
    watch.close()
    two.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"SSH"])
def test_who_speaks_another_language_is_not_ray(says):
    listens, (host, port) = listener()
    threading.Thread(target=answer, args=(listens, says), daemon=True).start()
    with pytest.raises(OSError, match="another program listens there"):
        check_listens(f"{host}:{port}")
    listens.close()


def test_who_speaks_http2_may_be_ray(monkeypatch):
    listens, (host, port) = listener()
    threading.Thread(
        target=answer, args=(listens, bytes([0, 0, 18, 4, 0]), bytes(22)), daemon=True
    ).start()
    check_listens(f"{host}:{port}")
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_listens(f"{host}:{port}")
    check_listens("auto")
    listens.close()
    with pytest.raises(OSError, match="refused"):
        check_listens(f"{host}:{port}")


def answer(listens: socket.socket, *parts: bytes) -> None:
    line, _ = listens.accept()
    with line, suppress(OSError):  # the other side may be gone first
        for each in parts:
            line.sendall(each)
            time.sleep(0.02)
        line.shutdown(socket.SHUT_WR)
        while line.recv(1024):
            pass
