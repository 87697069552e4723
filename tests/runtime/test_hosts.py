"""Hosts that run one experiment: the first decides, the others follow."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from weft.errors import RunError
from weft.runtime.hosts import HostGroup

SECRET = b"k" * 32


class Store:
    """What is used of `TCPStore`, within a process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.is_closed = False

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        if self.is_closed:
            raise RuntimeError("Connection was likely closed.")
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def hosts(count: int = 3) -> tuple[Store, list[HostGroup]]:
    store = Store()
    return store, [HostGroup(index, count, store, SECRET) for index in range(count)]


def test_all_hosts_get_what_the_first_computes() -> None:
    store, group = hosts()

    def own(host: HostGroup) -> list[Any]:
        found = [host.decide(lambda step=step: [host.index, step, None]) for step in range(4)]
        return [*found, host.share("node/3", lambda: bytes([host.index, 255]))]

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(own, reversed(group)))
    assert found == [[[0, step, None] for step in range(4)] + [b"\x00\xff"]] * 3
    assert store.values == {}, "what every host has read is removed"


def test_an_error_of_the_first_host_is_that_of_all() -> None:
    _, (first, second) = hosts(2)

    def fail() -> bytes:
        raise ValueError("no reward for 'p3'")

    with pytest.raises(ValueError, match="no reward"):
        first.share("reward/1", fail)
    with pytest.raises(RunError, match=r"the first host of this run: no reward for 'p3'"):
        second.share("reward/1", fail)


def test_the_end_of_the_first_host_ends_the_others() -> None:
    store, (_, second) = hosts(2)
    store.is_closed = True
    with pytest.raises(RunError, match="the first host of this run has ended; its log"):
        second.decide(list)


def test_messages_of_others_are_refused() -> None:
    """Also those of another key, which somebody could have copied."""
    store, (first, second) = hosts(2)
    first.share("a", lambda: b"value")
    store.values["b"] = store.values["a"]
    store.values["c"] = b"\0" * 32 + b"shared:value"
    for key in "bc":
        with pytest.raises(RunError, match="not of this run's hosts"):
            second.share(key, lambda: b"")
    assert second.share("a", lambda: b"other") == b"value"


def test_a_signal_to_any_host_stops_all() -> None:
    for index in range(3):
        _, group = hosts()
        own = [15 if number == index else None for number in range(3)]
        with ThreadPoolExecutor() as pool:
            found = []
            for _ in range(2):  # that of another host counts from the next decision on
                turn = list(
                    pool.map(
                        lambda pair: pair[0].decide_signal(pair[1]), zip(group, own, strict=True)
                    )
                )
                assert len(set(turn)) == 1
                found.append(turn[0])
        assert found[1] == 15 and found[0] in ((15,) if index == 0 else (None, 15))
