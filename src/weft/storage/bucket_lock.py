"""Lock of a run in a bucket: a file that only one process can create."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.errors import ConfigError, RunError
from weft.storage.buckets import BucketFolder, explain_store_errors

LOCK = "run.lock"  # name of the lock file in the folder of a run, in a bucket or on a disk
BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")  # changes with each start of the machine
PROCESS_NAMESPACE = Path("/proc/self/ns/pid")  # link that differs between containers


@dataclass(frozen=True)
class LockOwner:
    """Process that holds the lock of a run in a bucket.

    `machine` identifies a container, or a machine since its last start. `started` is the start time
    of the process, which distinguishes it from later processes with the same `pid`. `time` is in
    seconds since the epoch.
    """

    token: str
    pid: int
    started: str
    machine: str
    host: str
    time: float

    @classmethod
    def from_process(cls) -> LockOwner:
        """Return this process as an owner, with a new token."""
        return cls(
            token=secrets.token_hex(8),
            pid=os.getpid(),
            started=_read_start(os.getpid()),
            machine=_read_machine(),
            host=socket.gethostname(),
            time=time.time(),
        )

    @classmethod
    def from_bytes(cls, contents: bytes) -> LockOwner | None:
        """Return the owner in a lock's contents, or None if another program has written them."""
        try:
            return cls(**json.loads(contents))
        except (ValueError, TypeError):
            return None

    def has_ended(self) -> bool:
        """Return whether the process ran on this machine and has ended."""
        return self.machine == _read_machine() and _read_start(self.pid) != self.started

    def is_alive(self) -> bool:
        """Return whether the process runs on this machine."""
        return self.machine == _read_machine() and _read_start(self.pid) == self.started


def _read_machine() -> str:
    """Return a text that identifies this container, or this machine since its last start."""
    try:
        return f"{BOOT_FILE.read_text().strip()} {os.readlink(PROCESS_NAMESPACE)}"
    except OSError:  # not Linux
        return socket.gethostname()


def _read_start(pid: int) -> str:
    """Return the start time of a process, or "" if there is no such process or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class BucketLock:
    """Lock of a run in a bucket: a file that only one process can create.

    The lock remains if its owner is killed. A process of the same machine then replaces it. Other
    machines cannot find out whether the owner still runs, so there, a user has to remove the lock.
    """

    def __init__(self, bucket: BucketFolder) -> None:
        self._bucket = bucket
        self._owner = LockOwner.from_process()

    def take(self) -> None:
        """Create the lock. If another process holds it, raises `ConfigError` with its owner."""
        contents = json.dumps(asdict(self._owner)).encode()
        url = self._bucket.url
        with explain_store_errors(f"fileroot: {url}: cannot be locked", ConfigError):
            for _ in range(2):
                if self._bucket.create(LOCK, contents):
                    return
                owner = self.read_owner()
                if owner is None or not owner.has_ended():
                    break
                self._bucket.remove([LOCK])
        if owner is None:
            holder = "an unknown process"
        else:
            minutes = (time.time() - owner.time) / 60
            holder = f"process {owner.pid} on {owner.host}, started {minutes:,.0f} minutes ago"
        raise ConfigError(
            f"{url} is being written by {holder}; wait for it, or choose another trial_name. If "
            f"that process has ended without removing its lock: weft rm {url} --lock"
        )

    def read_owner(self) -> LockOwner | None:
        """Return the owner of the lock, or None if there is no lock or it cannot be read."""
        try:
            return LockOwner.from_bytes(self._bucket.read(LOCK))
        except FileNotFoundError:
            return None

    def discard(self) -> None:
        """Remove the lock, whoever holds it."""
        self._bucket.remove([LOCK])

    def check(self) -> None:
        """Raise `RunError` if this process does not hold the lock any more."""
        if self.read_owner() != self._owner:
            raise RunError(
                f"{self._bucket.url}: the lock of the run was removed or taken by another process; "
                f"this process writes nothing more there"
            )

    def release(self) -> None:
        """Remove the lock, if this process holds it."""
        if self.read_owner() == self._owner:
            self._bucket.remove([LOCK])
