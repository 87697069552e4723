"""Who stops listening is missed, after the time it has."""

from __future__ import annotations

import socket
import time

from weft.runtime.watch import Watch


def listener() -> tuple[socket.socket, tuple[str, int]]:
    made = socket.create_server(("127.0.0.1", 0))
    return made, made.getsockname()[:2]


def test_who_stops_listening_is_gone(monkeypatch):
    monkeypatch.setattr("weft.runtime.watch.EVERY_SECONDS", 0.02)
    (one, here), (two, there) = listener(), listener()
    watch = Watch({"the head": here, "the other": there}, 0.1)
    time.sleep(0.3)
    assert watch.gone is None
    one.close()
    end = time.monotonic() + 5
    while watch.gone is None and time.monotonic() < end:
        time.sleep(0.01)
    assert watch.gone == f"the head ({here[0]}:{here[1]}) is gone"
    two.close()


def test_a_look_now_does_not_wait(monkeypatch):
    (one, here), (two, there) = listener(), listener()
    watch = Watch({"the head": here, "the other": there}, 1e9)
    one.close()
    watch.check("the other")
    assert watch.gone is None
    watch.check()
    assert watch.gone is not None and watch.gone.startswith("the head")
    watch.close()
    two.close()
