"""Slurm with two nodes on this machine: one munged, one slurmctld, two slurmd, all in one folder.

    with SlurmCluster(folder) as cluster:
        subprocess.run(["sbatch", ...], env={**os.environ, **cluster.env})

Needs the distribution's packages `slurm-wlm` and `munge` (.ci/run installs them) and root, which
slurmd asks for.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "squeue",
    "scontrol",
    "sinfo",
)
START_SECONDS = 30.0
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIG = """
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
MinJobAge=300
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no job of weft can run on a cluster here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    if absent:
        return f"no {', '.join(absent)}; install the packages slurm-wlm and munge"
    if importlib.util.find_spec("ray") is None:
        return "no ray; install the extra ray"
    return None if os.geteuid() == 0 else "slurmd and munged are started as root here"


class SlurmCluster:
    """Two nodes n1 and n2 with two processors each.

    `env` is what Slurm's commands need to find it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": SEARCHED}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        reason = missing()
        if reason is not None:
            pytest.skip(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        text = CONFIG.format(host=socket.gethostname(), folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(text)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        socket_file = self.folder / "munge.sock"
        self._daemon(
            "munged",
            "--force",
            "--foreground",
            f"--key-file={self.folder}/munge.key",
            f"--socket={socket_file}",
            f"--pid-file={self.folder}/munged.pid",
            f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        self._until("munged has no socket", socket_file.exists)
        configured = ("-D", "-f", self.env["SLURM_CONF"])
        self._daemon("slurmctld", *configured)
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-N", node, *configured)
        self._until(
            "the nodes are not idle",
            lambda: self.run("sinfo", "-h", "-o", "%t %D").strip() == "idle 2",
        )

    def run(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, env={**os.environ, **self.env}
        )
        return done.stdout

    def stop(self) -> None:
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root")
            end = time.monotonic() + 300
            while self.run("squeue", "-h").strip() and time.monotonic() < end:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _daemon(self, name: str, *words: str) -> None:
        program = shutil.which(name, path=SEARCHED)
        assert program is not None
        with (self.folder / f"{name}-{len(self._daemons)}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, *words], stdout=output, stderr=output, env={**os.environ, **self.env}
                )
            )

    def _until(self, otherwise: str, there: object) -> None:
        end = time.monotonic() + START_SECONDS
        while not there():  # type: ignore[operator]
            tails = "\n".join(
                f"{p.name}: {p.read_text()[-500:]}" for p in self.folder.glob("*.out")
            )
            assert all(daemon.poll() is None for daemon in self._daemons), (
                f"a daemon of Slurm ended:\n{tails}"
            )
            assert time.monotonic() < end, f"{otherwise} after {START_SECONDS:g} s:\n{tails}"
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody uses now, told apart by holding all of them at once."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
