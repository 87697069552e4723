"""Commands that `weft launch tpu` runs on each host of a TPU pod, over ssh.

`python -m weft.launch.tpu_host start -- quickstart sft ...` starts the run of this host in the
background; `status`, `check`, `stop`, `clean` and `logs` look after it. `run -- COMMAND` runs any
command, shows its output as it comes, and returns its exit code. All files are in
`~/weft-tpu`: `run.json` names the process, `logs/` has a log for each start, and variables in
`environment` (lines `NAME=VALUE`) are set for the run. A command prints one line, `worker N: ` and
a `HostReport` as JSON; `logs` and `run --mark` print lines of text with the same prefix.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from weft.engine.spec import JAX_COORDINATOR

FOLDER = "weft-tpu"  # below the home directory
ENVIRONMENT = "environment"
DEVICE_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
LEFTOVERS = ("libtpu_lockfile*", "tpu_logs*")  # in the folder of temporary files
# LIBTPU_INIT_ARGS by name. `guide` is what EasyLM's guide sets for Tulu 2, megacore setting included.
LIBTPU_SETTINGS: Mapping[str, str] = {
    "guide": (
        "--xla_jf_spmd_threshold_for_windowed_einsum_mib=0 "
        "--xla_tpu_spmd_threshold_for_allgather_cse=10000 "
        "--xla_tpu_spmd_rewrite_einsum_with_reshape=true "
        "--xla_tpu_enable_latency_hiding_scheduler=true TPU_MEGACORE=MEGACORE_DENSE"
    )
}
PACKAGES = ("weft", "jax", "jaxlib", "libtpu")
# last line of `run` on standard error, by which the other machine knows how the command ended
ENDED = "weft-tpu: worker {} ended with exit code {}\n"
POLL_SECONDS = 0.2
START_SECONDS = 5.0  # a run that ends within this time has not started
KILL_SECONDS = 10.0  # after SIGKILL, until the kernel has removed the processes
# Run by another process, because opening the devices may hang until every host of the pod does it.
OPEN_DEVICES = """
import json, jax
jax.distributed.initialize()
own = jax.local_devices()
print(json.dumps({
    "kind": own[0].device_kind, "platform": own[0].platform, "local_devices": len(own),
    "devices": jax.device_count(), "hosts": jax.process_count(),
}))
"""


@dataclass
class HostReport:
    """Result of a command on one host.

    `problem` is empty if the command has succeeded. `facts` are properties that all hosts of a pod
    must have in common.
    """

    worker: str
    host: str
    text: str = ""
    problem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceHolder:
    """Process that has a file of a TPU open."""

    pid: int
    user: str
    command: str
    path: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}, user {self.user}) holds {self.path}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command on this host, and print its report.

    Returns 0, except that `run` returns the exit code of what it runs.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Words after the first -- belong to the command to run, which may itself contain --.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[end + 1 :]
    parser = argparse.ArgumentParser(prog="python -m weft.launch.tpu_host")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("status", "clean", "holders"):
        commands.add_parser(name)
    check = commands.add_parser("check")
    check.add_argument("--jax", action="store_true")
    check.add_argument("--timeout", type=float, default=180.0)
    start = commands.add_parser("start")
    start.add_argument("--log", required=True)
    start.add_argument("--libtpu", choices=LIBTPU_SETTINGS)
    run = commands.add_parser("run")
    run.add_argument("--mark", action="store_true")
    run.add_argument("--jax", action="store_true")
    stop = commands.add_parser("stop")
    stop.add_argument("--timeout", type=float, default=600.0)
    stop.add_argument("--now", action="store_true")
    logs = commands.add_parser("logs")
    logs.add_argument("--lines", type=int, default=20)
    logs.add_argument("--follow", action="store_true")
    options = parser.parse_args(arguments[:end])
    if options.command in ("start", "run") and not words:
        parser.error(f"{options.command}: nothing follows --")
    folder = Path.home() / FOLDER
    host = socket.gethostname()
    report = HostReport(worker=name_worker(host), host=host)
    if options.command == "holders":
        print(json.dumps([asdict(holder) for holder in list_visible_holders()]))
        return 0
    if options.command == "logs":
        print_log(folder, report.worker, options.lines, follow=options.follow)
        return 0
    if options.command == "run":
        code = run_command(folder, report.worker, words, mark=options.mark, with_jax=options.jax)
        sys.stdout.flush()
        sys.stderr.write(ENDED.format(report.worker, code))
        sys.stderr.flush()
        return code
    if options.command == "status":
        report.facts = {"running": describe_run(folder)}
        report.text = describe_run(folder) or "no run"
    elif options.command == "check":
        check_host(report, options.timeout, with_jax=options.jax)
    elif options.command == "start":
        start_run(folder, report, words, options.log, options.libtpu)
    elif options.command == "stop":
        stop_run(folder, report, options.timeout, now=options.now)
    else:
        clean_up(report)
    # One write below the size of a pipe's buffer, so that lines of several hosts do not mix.
    sys.stdout.write(f"worker {report.worker}: {json.dumps(asdict(report))}\n")
    sys.stdout.flush()
    return 0


def name_worker(host: str) -> str:
    """Return the worker's number in the pod, such as "3" for the host `t1v-n-0f99-w-3`.

    TPU_WORKER_ID, which libtpu reads too, overrides it. Returns the host's name if neither has a
    number.
    """
    worker_id = os.environ.get("TPU_WORKER_ID", "")
    if worker_id.isdecimal():
        return worker_id
    _, mark, number = host.split(".")[0].rpartition("-w-")
    return number if mark and number.isdecimal() else host


# -- the run of this host


def start_run(
    folder: Path, report: HostReport, words: Sequence[str], log_name: str, libtpu: str | None
) -> None:
    """Start `weft` with `words` in the background, with its output in `logs/LOG_NAME`.

    Refuses if a run that was started earlier still has processes. Waits `START_SECONDS`, and
    reports the last line of the log if the process has ended by then.
    """
    log = folder / "logs" / log_name
    log.parent.mkdir(parents=True, exist_ok=True)
    with (folder / "run.lock").open("w") as lock:
        # Of two simultaneous starts, the second sees the run of the first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = describe_run(folder)
        if running:
            report.problem = f"{running} was started before; stop it first"
            return
        if log.exists():
            report.problem = (
                f"{log} exists already, and is not overwritten; start again in a second"
            )
            return
        try:
            environment = os.environ | read_environment(folder / ENVIRONMENT)
        except ValueError as error:
            report.problem = str(error)
            return
        environment[JAX_COORDINATOR] = "auto"
        if libtpu is not None:
            environment["LIBTPU_INIT_ARGS"] = LIBTPU_SETTINGS[libtpu]
        with log.open("xb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "weft.cli.main", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=Path.home(),
                env=environment,
            )
        state = {
            "pid": process.pid,
            "begun": read_start_time(process.pid),
            "log": str(log),
            "words": list(words),
        }
        partial = folder / "run.json.partial"
        partial.write_text(json.dumps(state))
        partial.replace(folder / "run.json")
    try:
        code = process.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        report.text = f"started process {process.pid}, log {log}"
        return
    last = (log.read_text(errors="replace").strip().splitlines() or ["its log is empty"])[-1]
    if code:
        report.problem = f"the run ended at once with exit code {code}: {last}"
    else:
        report.text = f"the run has already finished, log {log}"


def read_environment(path: Path) -> dict[str, str]:
    """Return the variables in a file of lines `NAME=VALUE`, or none if there is no file.

    Empty lines and lines that begin with # are skipped. The file may hold secrets, so it is made
    unreadable for others. Raises `ValueError`, which shows the number of a wrong line and not its
    contents.
    """
    if not path.is_file():
        return {}
    path.chmod(0o600)
    variables = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        if not equals or not name.strip().isidentifier():
            raise ValueError(f"{path}, line {number}: must be NAME=VALUE")
        variables[name.strip()] = value.strip().strip("\"'")
    return variables


def stop_run(folder: Path, report: HostReport, timeout_s: float, *, now: bool) -> None:
    """Stop the processes of this host's run, and report what still holds the devices.

    SIGTERM lets the run finish its step and write a recovery point. With `now`, its processes get
    SIGKILL instead.
    """
    session = read_state(folder).get("pid")
    members = list_run_processes(folder)
    for pid in members:
        if now or pid == session or session not in members:
            send_signal(pid, signal.SIGKILL if now else signal.SIGTERM)
    end = time.monotonic() + (min(timeout_s, KILL_SECONDS) if now else timeout_s)
    while (remaining := list_run_processes(folder)) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    report.text = f"stopped process {session}" if members else "no run to stop"
    problems = []
    if remaining:
        problems.append(
            f"processes {', '.join(map(str, remaining))} still run after {timeout_s:g} s; "
            "--now kills them"
        )
    problems.extend(str(holder) for holder in find_holders())
    report.problem = "; ".join(problems)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended in the meantime."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def describe_run(folder: Path) -> str:
    """Return a phrase such as "process 12 (quickstart sft ...)", or "" if no run has processes."""
    if not list_run_processes(folder):
        return ""
    state = read_state(folder)
    return f"process {state['pid']} ({' '.join(state['words'][:2])} ...)"


def read_state(folder: Path) -> dict[str, Any]:
    """Return the contents of `run.json`, or an empty mapping if nothing was started."""
    try:
        state = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) and isinstance(state.get("pid"), int) else {}


def list_run_processes(folder: Path) -> list[int]:
    """Return the ids of this run's processes: all processes in the session that `start` made.

    Returns none if the session's id now belongs to another process.
    """
    state = read_state(folder)
    if not state:
        return []
    leader = read_process(state["pid"])
    if leader is not None and leader[19] != state["begun"]:
        return []
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            fields = read_process(int(entry.name))
            if fields is not None and fields[0] != "Z" and fields[3] == str(state["pid"]):
                members.append(int(entry.name))
    return sorted(members)


def read_process(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on (the state), or None if it has ended.

    Field 3 of the result is the session, and field 19 the time at which the process started.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def read_start_time(pid: int) -> str:
    """Return the time at which a process started, which tells it from a later one with this id."""
    fields = read_process(pid)
    return "" if fields is None else fields[19]


def print_log(folder: Path, worker: str, lines: int, *, follow: bool) -> None:
    """Print the last lines of the run's log, and with `follow` new lines until the run ends."""
    path = Path(read_state(folder).get("log", ""))
    if not path.is_file():
        print(f"worker {worker}: no log: nothing was started on this host", flush=True)
        return
    with path.open(errors="replace") as log:
        earlier = log.read().splitlines()
        for line in earlier[len(earlier) - lines :] if lines < len(earlier) else earlier:
            print(f"worker {worker}: {line}", flush=True)
        while follow:
            running = list_run_processes(folder)
            added = log.read()
            for line in added.splitlines():
                print(f"worker {worker}: {line}", flush=True)
            if not running and not added:
                return
            time.sleep(POLL_SECONDS)


# -- a command in the foreground


def run_command(
    folder: Path, worker: str, words: Sequence[str], *, mark: bool, with_jax: bool
) -> int:
    """Run a command in the home directory, with weft's Python first on its PATH.

    With `mark`, `worker N: ` precedes each line of its output, and it has no input. `with_jax` says
    that all hosts of the pod run it, so that JAX may open their devices together. The command ends
    if the connection is lost. Returns its exit code, 128 + N if signal N ended it, and 127 or 126
    if there is no such program or it cannot be run.
    """
    try:
        environment = os.environ | read_environment(folder / ENVIRONMENT)
    except ValueError as error:
        print(f"worker {worker}: {error}", file=sys.stderr)
        return 2
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    )
    if with_jax:
        environment[JAX_COORDINATOR] = "auto"
    output = subprocess.PIPE if mark else None
    parent = os.getppid()
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if mark else None,
            stdout=output,
            stderr=output,
            cwd=Path.home(),
            env=environment,
        )
    except OSError as error:
        print(f"worker {worker}: {words[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    relays = []
    for stream, target in ((process.stdout, 1), (process.stderr, 2)):
        if stream is not None:
            relay = threading.Thread(target=mark_lines, args=(stream, target, worker), daemon=True)
            relay.start()
            relays.append(relay)
    code = None
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECONDS)
        if os.getppid() != parent:
            process.terminate()
    for relay in relays:
        relay.join(timeout=KILL_SECONDS)  # a background process may hold the stream open
    return 128 - code if code < 0 else code


def mark_lines(stream: IO[bytes], target: int, worker: str) -> None:
    """Copy the lines of a stream to a file descriptor, with the worker's number before each.

    If nobody reads them any more, the stream is closed, so that its writer ends too.
    """
    with stream, suppress(BrokenPipeError):
        for line in stream:
            text = line if line.endswith(b"\n") else line + b"\n"
            # One write, so that lines of the two streams and of several hosts do not mix.
            os.write(target, f"worker {worker}: ".encode() + text)


# -- the devices of this host


def check_host(report: HostReport, timeout_s: float, *, with_jax: bool) -> None:
    """Report the host's device files, versions and, `with_jax`, the devices that JAX sees.

    JAX can open the devices of a pod only if all hosts do it at the same time.
    """
    devices = list_device_files()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "missing"
    report.facts = {
        "device files": len(devices),
        "python": ".".join(map(str, sys.version_info[:3])),
        **versions,
    }
    report.problem = "; ".join(str(holder) for holder in find_holders())
    if with_jax and not report.problem:
        facts = open_devices(timeout_s)
        report.problem = str(facts.pop("problem", ""))
        report.facts |= facts
    report.text = ", ".join(f"{name} {value}" for name, value in report.facts.items())


def open_devices(timeout_s: float) -> dict[str, Any]:
    """Return the devices that JAX sees, or {"problem": reason}."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", OPEN_DEVICES],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {
            "problem": f"JAX did not open the devices in {timeout_s:g} s; it waits for all hosts"
        }
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"problem": f"JAX cannot open the devices: {last}"}
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def list_device_files() -> list[str]:
    """Return the files of this host's TPU chips."""
    return sorted(path for pattern in DEVICE_FILES for path in glob.glob(pattern))


def clean_up(report: HostReport) -> None:
    """Remove libtpu's lock files and logs that earlier runs left in the temporary folder.

    Removes nothing while a process holds a device or a lock file: the files are then in use.
    Leftovers of other users are removed with sudo.
    """
    holders = find_holders()
    if holders:
        report.problem = f"{'; '.join(map(str, holders))}; stop it first, nothing was removed"
        return
    removed = []
    for path in list_leftovers():
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except PermissionError as error:
            done = run_sudo("rm", "-rf", "--", str(path))
            if done is None or done.returncode:
                report.problem = f"cannot remove {path}: {error.strerror}, and sudo is refused"
                return
        removed.append(str(path))
    report.text = f"removed {', '.join(removed)}" if removed else "nothing to remove"


def list_leftovers() -> list[Path]:
    """Return libtpu's lock files and folders of logs in the folder of temporary files."""
    folder = Path(tempfile.gettempdir())
    return sorted(path for pattern in LEFTOVERS for path in folder.glob(pattern))


def find_holders() -> list[DeviceHolder]:
    """Return the processes that have a device or libtpu's lock file open.

    Processes of other users are visible to root only, so the search runs with sudo where that needs
    no password. Otherwise it covers this user's processes.
    """
    if os.geteuid() != 0:
        done = run_sudo(sys.executable, "-m", "weft.launch.tpu_host", "holders")
        if done is not None and done.returncode == 0:
            return [DeviceHolder(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    return list(list_visible_holders())


def run_sudo(*words: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command as root, without asking for a password; returns None if there is no sudo."""
    if shutil.which("sudo") is None:
        return None
    return subprocess.run(
        ["sudo", "-n", *words],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def list_visible_holders() -> Iterator[DeviceHolder]:
    """Yield the holders among the processes whose open files this user may see."""
    lock = str(Path(tempfile.gettempdir()) / LEFTOVERS[0])
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            paths = list_open_files(entry / "fd")
            command = (entry / "comm").read_text().strip()
            user = get_user_name(entry.stat().st_uid)
        except OSError:  # another user's process, or one that has ended
            continue
        for path in paths:
            if any(fnmatch(path, pattern) for pattern in (*DEVICE_FILES, lock)):
                yield DeviceHolder(int(entry.name), user, command, path)
                break


def list_open_files(folder: Path) -> list[str]:
    """Return the paths of a process's open files, from its folder /proc/PID/fd."""
    paths = []
    for descriptor in folder.iterdir():
        try:
            paths.append(os.readlink(descriptor))
        except FileNotFoundError:  # closed in the meantime
            continue
    return sorted(set(paths))


def get_user_name(number: int) -> str:
    """Return the name of the user with this id, or the id if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


if __name__ == "__main__":
    sys.exit(main())
