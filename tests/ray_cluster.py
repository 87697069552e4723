"""A Ray cluster on this machine for tests: nodes of one CPU under addresses of their own, lost and
added at will.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from tests.environment import copy as copy_environment

RAYLET, HEAD, WORKER = "raylet/raylet", "gcs/gcs_server", "ray::_Device"


class Nodes:
    """A head, which has the driver's raylet, and other nodes.

    `environment` is for the cluster's processes, and for a run that joins it.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._port = _draw_port()
        self.address = f"127.0.0.1:{self._port}"
        self.environment = {
            "RAY_AUTH_TOKEN": "weft" * 8,
            "RAY_AUTH_MODE": "token",
            **environment,
        }
        # in the environment of all that the cluster starts
        self.mark = f"cluster-{uuid.uuid4().hex}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._folder = folder

    def start_head(self) -> None:
        """The first, or another one at the address of one that is lost."""
        folder = tempfile.mkdtemp(prefix="h", dir=self._folder)
        self._start(
            "--head",
            f"--port={self._port}",
            "--node-ip-address=127.0.0.1",
            f"--temp-dir={folder}",
            "--include-dashboard=false",
            # Ray would serve clients at a port that all clusters share
            *([f"--ray-client-server-port={_draw_port()}"] if find_spec("grpc") else []),
        )

    def add(self, address: str | None = None) -> None:
        own = address or f"127.0.0.{1 + len(self.nodes)}"
        self._start(f"--address={self.address}", f"--node-ip-address={own}")

    def _start(self, *words: str) -> None:
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, "--block"]
        line += ["--num-cpus=1", "--num-gpus=0", "--disable-usage-stats"]
        line += ["--include-log-monitor=false"]  # a device writes a log of its own
        # ports that the system gives out; Ray takes the first free ones of a range, which another
        # cluster may take at the same moment
        line += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        log = self._folder / f"node{len(self.nodes)}.log"
        environment = {
            **copy_environment(),
            **self.environment,
            "WEFT_TEST_CLUSTER": self.mark,
            "OMP_NUM_THREADS": "1",
        }
        with log.open("wb") as file:
            self.nodes.append(
                subprocess.Popen(line, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
        end = time.monotonic() + 120.0
        while b"Ray runtime started" not in log.read_bytes():
            assert time.monotonic() < end and self.nodes[-1].poll() is None, (
                f"a node does not start:\n{log.read_text()}"
            )
            time.sleep(0.2)

    def processes(self, sign: str = "", node: int | None = None) -> list[int]:
        """Those of the cluster whose command line has the sign; of one node, or of all."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = self.mark.encode() in (folder / "environ").read_bytes()
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if (
                ours
                and sign in line
                and (node is None or self.nodes[node].pid in _ancestors(int(folder.name)))
            ):
                found.append(int(folder.name))
        return sorted(found)

    def lose(self, node: int) -> None:
        """The raylet of a node by SIGKILL, and with it the node; of the first one Ray's head too."""
        killed = [*self.processes(RAYLET, node), *(self.processes(HEAD, node) if node == 0 else [])]
        assert len(killed) == (2 if node == 0 else 1), killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    def no_workers(self, seconds: float = 120.0) -> bool:
        """Whether no device's process is there any more, soon at least."""
        end = time.monotonic() + seconds
        while self.processes(WORKER) and time.monotonic() < end:
            time.sleep(0.2)
        return not self.processes(WORKER)

    def close(self) -> None:
        for process in reversed(self.nodes):
            process.terminate()
        for process in self.nodes:
            process.wait(60)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def cluster(count: int = 2, **environment: str) -> Iterator[Nodes]:
    """A head and `count - 1` other nodes, whose processes have the `environment` too."""
    folder = Path(tempfile.mkdtemp(prefix="n-"))  # the name of a socket is short
    nodes = Nodes(folder, environment)
    try:
        nodes.start_head()
        for _ in range(count - 1):
            nodes.add()
        yield nodes
    finally:
        nodes.close()
        shutil.rmtree(folder, ignore_errors=True)


def _draw_port() -> int:
    """Return a free port below those of outgoing connections, so that none of them takes it before
    it is used, or used again; and above those of the jobs of `SlurmCluster`.
    """
    while True:
        port = random.randrange(22_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def _ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 1:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found
