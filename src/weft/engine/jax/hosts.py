"""Start of JAX on several hosts, with one process per host, and communication between the hosts.

Each process can use the devices of all hosts. The processes are defined by environment variables,
which `weft launch tpu start` sets:

    WEFT_JAX_COORDINATOR   host:port of the first process, or auto if JAX can find the processes
                           itself (TPU pods, Slurm, Kubernetes)
    WEFT_JAX_PROCESSES     number of processes; not with auto
    WEFT_JAX_PROCESS       this process, from 0; not with auto
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from weft.engine.spec import JAX_COORDINATOR as COORDINATOR
from weft.errors import ConfigError, RunError

PROCESSES = "WEFT_JAX_PROCESSES"
PROCESS = "WEFT_JAX_PROCESS"
TEXT_BYTES = 8192  # size of the buffer in which the first host shares a text, such as a path
STORE_SECONDS = 300  # time limit for connecting to the store on the first host


@dataclass(frozen=True)
class JaxHosts:
    """Hosts of a run."""

    index: int  # index of this host
    count: int  # number of hosts
    num_devices: int  # number of devices of all hosts
    store: Any  # `torch.distributed.TCPStore` on the first host
    secret: bytes  # random key, known to all hosts of the run


def connect_hosts(environ: Mapping[str, str]) -> JaxHosts | None:
    """Start JAX on all hosts and connect them; return None if this is the only host.

    Waits for the other hosts. Must be called before any JAX device is used. Raises `ConfigError`
    for invalid environment variables, and if the other hosts cannot be reached.
    """
    coordinator = environ[COORDINATOR]
    options: dict[str, Any] = {}
    if coordinator != "auto":
        count, index = (_read_number(environ, name) for name in (PROCESSES, PROCESS))
        if not 0 <= index < count:
            raise ConfigError(f"{PROCESS}={index}: must be from 0 to {PROCESSES} - 1 = {count - 1}")
        if ":" not in coordinator:
            raise ConfigError(f"{COORDINATOR}={coordinator}: write host:port, or auto")
        options = {
            "coordinator_address": coordinator,
            "num_processes": count,
            "process_id": index,
        }
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{COORDINATOR}={coordinator}: jax cannot reach the other hosts "
            f"({str(error).splitlines()[0]}); start the same command on all hosts"
        ) from error
    if jax.process_count() == 1:
        return None
    return _open_store(coordinator)


def find_shared_folder(folder: Path) -> Path | None:
    """Return the first host's `folder` if it is on a file system that all hosts share.

    Otherwise, and with a single host, returns None. All hosts must call this.
    """
    if jax.process_count() == 1:
        return None
    is_first = jax.process_index() == 0
    token = secrets.token_hex(8)
    # Let the first host create a file, and check whether the others can see it.
    first_folder, token = json.loads(_share_text(json.dumps([str(folder.resolve()), token])))
    mark = Path(first_folder) / f".{token}"
    try:
        if is_first:
            mark.touch()
        multihost_utils.sync_global_devices(token)
        is_visible = multihost_utils.process_allgather(np.bool_(mark.exists()))
    finally:
        if is_first:
            mark.unlink(missing_ok=True)
    return Path(first_folder) if is_visible.all() else None


@contextmanager
def wait_for_all_hosts(failure: str) -> Iterator[None]:
    """Wait at the end of the `with` block until all hosts have reached it.

    If the block fails on a host, this host then raises its error, and the other hosts raise
    `RunError` with the message `failure`. All hosts must call this.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    succeeded = multihost_utils.process_allgather(np.bool_(error is None))
    if error is not None:
        raise error
    if not succeeded.all():
        raise RunError(f"{failure}; its log says why")


def _share_text(text: str) -> str:
    """Return the first host's text on all hosts; it must not exceed `TEXT_BYTES` bytes."""
    values = np.zeros(TEXT_BYTES, np.uint8)
    encoded = text.encode()
    values[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    shared = np.asarray(multihost_utils.broadcast_one_to_all(values))
    # Early versions of JAX return wider integers.
    return bytes(shared.astype(np.uint8)).rstrip(b"\0").decode()


def _read_number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a whole number, because {COORDINATOR} is set")
    return int(text)


def _open_store(coordinator: str) -> JaxHosts:
    """Open a store on the first host, and broadcast its address to the other hosts."""
    from torch.distributed import TCPStore

    index = jax.process_index()
    timeout = timedelta(seconds=STORE_SECONDS)
    text = ""
    store = None
    if index == 0:
        host = coordinator.rpartition(":")[0]
        if coordinator == "auto":
            host = socket.gethostbyname(socket.gethostname())
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        text = json.dumps([host, store.port, secrets.token_hex(32)])
    host, port, secret = json.loads(_share_text(text))
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return JaxHosts(index, jax.process_count(), jax.device_count(), store, bytes.fromhex(secret))
