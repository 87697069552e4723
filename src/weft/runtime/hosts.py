"""Several hosts that run the same experiment together, each with a separate master.

The masters read the same rows and start the same calls in the same order, because the devices of
all hosts must compute together. The first host decides everything that could differ from host to
host, and shares its decisions: which call ended first, the result of a host function such as a
reward, the actions that are due by the clock, whether a signal asks to stop, and the recovery point
to restore. Only the first host writes files of the run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

from weft.data.sample import SequenceSample
from weft.errors import RunError, WeftError
from weft.runtime.checkpoints import RecoveryPoint
from weft.runtime.mirror import RECOVER, RunMirror, fetch_point

LONGEST_PAUSE = 0.05  # seconds between two looks at what the first host shares
MAC_BYTES = 32
LENGTH_BYTES = 8
FAILED = b"failed:"
SHARED = b"shared:"
SIGNAL = "signal"  # key of a signal to another host than the first


class HostGroup:
    """Hosts of one run, of which this process is number `index`.

    `store` is a `torch.distributed.TCPStore` of the first host. Messages are signed with `secret`,
    because whoever reaches the store's port could write to it.
    """

    def __init__(self, index: int, count: int, store: Any, secret: bytes) -> None:
        self.index = index
        self.count = count
        self._store = store
        self._secret = secret
        self._decisions = 0

    @property
    def is_first(self) -> bool:
        """True on the host that decides and writes."""
        return self.index == 0

    def share(self, key: str, compute: Callable[[], bytes]) -> bytes:
        """Return, on all hosts, the result of `compute` on the first host, which alone calls it.

        Each key can be used once. Threads may share at the same time, under different keys. If
        `compute` raises an error, the other hosts raise `RunError` with its message.
        """
        if not self.is_first:
            return self._receive(key)
        try:
            value = compute()
        except Exception as error:
            self._send(key, FAILED + str(error).encode())
            raise
        self._send(key, SHARED + value)
        return value

    def decide(self, compute: Callable[[], Any]) -> Any:
        """Return, on all hosts, the result of `compute` on the first host, which is a JSON value.

        Must be called by one thread only, in the same order on all hosts.
        """
        self._decisions += 1
        shared = self.share(f"decision/{self._decisions}", lambda: json.dumps(compute()).encode())
        return json.loads(shared)

    def decide_signal(self, received: int | None) -> int | None:
        """Return the signal that stops the run, or None.

        `received` is the signal that this host has received. A signal that another host than the
        first has received takes effect with the next decision.
        """
        if received is not None and not self.is_first:
            self._send(SIGNAL, str(received).encode())
        signal: int | None = self.decide(
            lambda: received if received is not None else self._read_signal()
        )
        return signal

    def _read_signal(self) -> int | None:
        if not self._store.check([SIGNAL]):
            return None
        return int(self._open(SIGNAL, bytes(self._store.get(SIGNAL))))

    def share_outputs(
        self,
        key: str,
        compute: Callable[[], SequenceSample | None],
        metrics: MutableMapping[str, float],
    ) -> SequenceSample | None:
        """Return the first host's result of `compute` like `share`, and share its `metrics`."""
        result: SequenceSample | None = None

        def compute_and_encode() -> bytes:
            nonlocal result
            result = compute()
            head = json.dumps(dict(metrics)).encode()
            sample = b"" if result is None else result.to_bytes()
            return len(head).to_bytes(LENGTH_BYTES, "big") + head + sample

        shared = self.share(key, compute_and_encode)
        if self.is_first:
            return result
        end = LENGTH_BYTES + int.from_bytes(shared[:LENGTH_BYTES], "big")
        metrics.update(json.loads(shared[LENGTH_BYTES:end]))
        return SequenceSample.from_bytes(shared[end:]) if shared[end:] else None

    def _send(self, key: str, value: bytes) -> None:
        self._store.set(key, self._compute_signature(key, value) + value)

    def _receive(self, key: str) -> bytes:
        pause = 0.001
        try:
            while not self._store.check([key]):
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
            message = bytes(self._store.get(key))
            if self._store.add(f"{key}/read", 1) == self.count - 1:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/read")
        except WeftError:
            raise
        except RuntimeError as error:  # of torch.distributed: the connection was closed
            raise RunError("the first host of this run has ended; its log says why") from error
        value = self._open(key, message)
        if value.startswith(FAILED):
            raise RunError(f"the first host of this run: {value[len(FAILED) :].decode()}")
        return value[len(SHARED) :]

    def _open(self, key: str, message: bytes) -> bytes:
        """Return a message without its signature. Raises `RunError` if that is not of this run."""
        signature, value = message[:MAC_BYTES], message[MAC_BYTES:]
        if not hmac.compare_digest(signature, self._compute_signature(key, value)):
            raise RunError(f"a message that is not of this run's hosts: {key!r}")
        return value

    def _compute_signature(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + value, hashlib.sha256)


def agree_on_point(
    hosts: HostGroup, point: RecoveryPoint | None, mirror: RunMirror | None, folder: Path
) -> RecoveryPoint | None:
    """Return the recovery point that the first host continues with, or None.

    `point` is the recovery point that this host has found. For a run in a bucket, `mirror` is the
    link to the bucket, from which the other hosts download the recovery point into `folder`.
    Otherwise they read it at the path that the first host has.
    """

    def describe() -> list[Any] | None:
        if point is None:
            return None
        url = None if mirror is None else f"{mirror.url}/{RECOVER}/{point.directory.name}"
        return [point.step, str(point.directory.resolve()), url]

    chosen = hosts.decide(describe)
    if chosen is None or hosts.is_first:
        return point
    step, path, url = chosen
    if url is None:
        return RecoveryPoint(step, Path(path))
    copy = folder / f"of-first-host-{step}"
    fetch_point(url, copy)
    return RecoveryPoint(step, copy)
