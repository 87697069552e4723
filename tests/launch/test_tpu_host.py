"""What a host of a pod does: start one run, find and stop its processes, look at the devices."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.launch import tpu_host
from weft.launch.tpu_host import HostReport

# A run that says what it was started with, and waits. It ends at SIGTERM after its "step".
WAITING = """
import json, os, signal, sys, time
def end(*_):
    print("stopped after the step", flush=True)
    os._exit(143)
signal.signal(signal.SIGTERM, end if "stubborn" not in " ".join(sys.argv) else signal.SIG_IGN)
names = ("WEFT_JAX_COORDINATOR", "LIBTPU_INIT_ARGS", "GREETING")
print(json.dumps([os.getcwd(), {name: os.environ.get(name) for name in names}]), flush=True)
time.sleep(60)
"""
FAKE_JAX = """
class Device: device_kind, platform = "TPU v4", "tpu"
class distributed: initialize = staticmethod(lambda: None)
local_devices = lambda: [Device()] * 4
device_count, process_count = lambda: 8, lambda: 2
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home directory; processes that a test leaves there are killed."""
    (tmp_path / "wait.py").write_text(WAITING)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tpu_host.tempfile, "tempdir", None)
    monkeypatch.setenv("TPU_WORKER_ID", "3")
    monkeypatch.setattr(tpu_host, "START_SECONDS", 0.3)
    monkeypatch.setattr(tpu_host, "DEVICE_FILES", (f"{tmp_path}/accel[0-9]*",))
    monkeypatch.setattr(tpu_host, "run_sudo", lambda *_: None)
    yield tmp_path
    for pid in tpu_host.list_run_processes(tmp_path / "weft-tpu"):
        os.kill(pid, signal.SIGKILL)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> HostReport:
    """Run a command and return its report."""
    assert tpu_host.main(list(words)) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("worker 3: ")
    return HostReport(**json.loads(line.removeprefix("worker 3: ")))


def start(capsys: pytest.CaptureFixture[str], *words: str, log: str = "a.log") -> HostReport:
    """Start `weft quickstart --import wait.py`, which waits while the file is imported."""
    return run(
        capsys, "start", "--log", log, "--", "quickstart", "--import", "wait.py", "sft", *words
    )


def wait_for(path: Path, text: str) -> str:
    end = time.monotonic() + 30
    while text not in (path.read_text() if path.exists() else "") and time.monotonic() < end:
        time.sleep(0.02)
    return path.read_text()


def test_a_run_is_started_once_logged_and_stopped(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "weft-tpu").mkdir()
    (home / "weft-tpu" / "environment").write_text("# names\nexport GREETING='good day'\n\n")
    assert run(capsys, "status").text == "no run"
    first = run(
        capsys, "start", "--log", "a.log", "--libtpu", "guide", "--",
        *("quickstart", "--import", "wait.py", "sft", "a=b"),
    )  # fmt: skip
    log = home / "weft-tpu" / "logs" / "a.log"
    assert not first.problem and str(log) in first.text
    folder, variables = json.loads(wait_for(log, "\n").splitlines()[0])
    assert folder == str(home)
    assert variables == {
        "WEFT_JAX_COORDINATOR": "auto",
        "LIBTPU_INIT_ARGS": tpu_host.LIBTPU_SETTINGS["guide"],
        "GREETING": "good day",
    }
    assert (home / "weft-tpu" / "environment").stat().st_mode & 0o777 == 0o600
    # A second start changes nothing.
    second = start(capsys, log="b.log")
    assert "was started before; stop it first" in second.problem
    assert not (home / "weft-tpu" / "logs" / "b.log").exists()
    running = run(capsys, "status").facts["running"]
    assert running.startswith("process ") and "(quickstart --import ...)" in running
    # It ends with SIGTERM, and its log remains.
    stopped = run(capsys, "stop")
    assert not stopped.problem and stopped.text.startswith("stopped process")
    assert log.read_text().endswith("stopped after the step\n")
    assert run(capsys, "stop").text == "no run to stop"


def test_a_run_that_does_not_stop_is_killed_only_with_now(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not start(capsys, "stubborn=true").problem
    wait_for(home / "weft-tpu" / "logs" / "a.log", "\n")
    slow = run(capsys, "stop", "--timeout", "0.3")
    assert "still run after 0.3 s; --now kills them" in slow.problem
    assert not run(capsys, "stop", "--now").problem
    assert tpu_host.list_run_processes(home / "weft-tpu") == []


def test_a_run_that_ends_at_once_is_a_problem(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_host, "START_SECONDS", 30.0)
    report = run(capsys, "start", "--log", "a.log", "--", "quickstrat", "sft")
    assert report.problem == (
        "the run ended at once with exit code 2: error: unknown command 'quickstrat'; did you mean "
        "quickstart?"
    )


def test_a_log_is_never_overwritten(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = home / "weft-tpu" / "logs" / "a.log"
    log.parent.mkdir(parents=True)
    log.write_text("earlier")
    assert f"{log} exists already" in start(capsys).problem
    assert log.read_text() == "earlier"


def write_state(home: Path, pid: int, begun: str, log: Path | None = None) -> None:
    (home / "weft-tpu").mkdir(exist_ok=True)
    state = {"pid": pid, "begun": begun, "log": str(log), "words": ["quickstart", "sft"]}
    (home / "weft-tpu" / "run.json").write_text(json.dumps(state))


def test_a_process_with_the_id_of_an_ended_run_is_left_alone(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        write_state(home, other.pid, "1")
        assert run(capsys, "stop", "--now").text == "no run to stop"
        assert other.poll() is None
        # With its own time of start it is the run.
        write_state(home, other.pid, tpu_host.read_start_time(other.pid))
        assert tpu_host.list_run_processes(home / "weft-tpu") == [other.pid]
    finally:
        other.kill()
        other.wait()
    assert tpu_host.list_run_processes(home / "weft-tpu") == []


def test_processes_without_their_parent_belong_to_the_run(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-IS", "-c", code],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    begun = tpu_host.read_start_time(parent.pid)
    child = int(parent.communicate()[0])
    write_state(home, parent.pid, begun)
    assert tpu_host.list_run_processes(home / "weft-tpu") == [child]
    assert run(capsys, "stop").text == f"stopped process {parent.pid}"
    assert tpu_host.list_run_processes(home / "weft-tpu") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "1"}', "null"])
def test_a_damaged_state_is_no_run(text: str, home: Path) -> None:
    (home / "weft-tpu").mkdir()
    (home / "weft-tpu" / "run.json").write_text(text)
    assert tpu_host.describe_run(home / "weft-tpu") == ""


@pytest.mark.parametrize("line", ["TOKEN", "1A=b", "a b=c", "=x"])
def test_a_wrong_environment_file_names_the_line_and_not_the_text(
    line: str, tmp_path: Path
) -> None:
    path = tmp_path / "environment"
    path.write_text(f"A=1\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2: must be NAME=VALUE$"):
        tpu_host.read_environment(path)


def test_logs_show_the_end_and_follow_a_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tpu_host.main(["logs"]) == 0
    assert capsys.readouterr().out == "worker 3: no log: nothing was started on this host\n"
    log = home / "a.log"
    log.write_text("one\ntwo\nthree\n")
    code = f"import time; time.sleep(0.4); open({str(log)!r}, 'a').write('four\\n')"
    writer = subprocess.Popen([sys.executable, "-IS", "-c", code], start_new_session=True)
    write_state(home, writer.pid, tpu_host.read_start_time(writer.pid), log)
    assert tpu_host.main(["logs", "--lines", "2"]) == 0
    assert capsys.readouterr().out == "worker 3: two\nworker 3: three\n"
    assert tpu_host.main(["logs", "--lines", "1", "--follow"]) == 0
    assert capsys.readouterr().out == "worker 3: three\nworker 3: four\n"
    assert tpu_host.main(["logs", "--lines", "0"]) == 0
    assert capsys.readouterr().out == ""
    writer.wait()


@pytest.mark.parametrize(
    ("host", "number", "worker"),
    [
        ("t1v-n-0f996b37-w-3", "", "3"),
        ("t1v-n-0f996b37-w-12.zone.internal", "", "12"),
        ("laptop", "", "laptop"),
        ("w-x", "", "w-x"),
        ("laptop", "5", "5"),
        ("t1v-n-1-w-3", "x", "3"),
    ],
)
def test_the_number_of_a_worker(
    host: str, number: str, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_WORKER_ID", number)
    assert tpu_host.name_worker(host) == worker


def test_clean_removes_only_what_nobody_uses(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "tpu_logs").mkdir()
    (home / "tpu_logs" / "x.INFO").touch()
    (home / "libtpu_lockfile").touch()
    (home / "other").touch()
    with (home / "libtpu_lockfile").open():
        report = run(capsys, "clean")
    assert f"process {os.getpid()} (" in report.problem and "nothing was removed" in report.problem
    assert (home / "libtpu_lockfile").exists()
    report = run(capsys, "clean")
    assert report.text == f"removed {home}/libtpu_lockfile, {home}/tpu_logs" and not report.problem
    assert (home / "other").exists() and not (home / "tpu_logs").exists()
    assert run(capsys, "clean").text == "nothing to remove"


def test_stop_shows_what_still_holds_a_device(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = home / "accel0"
    device.touch()
    with device.open():
        report = run(capsys, "stop")
    assert report.text == "no run to stop"
    assert f"process {os.getpid()} (" in report.problem and f"holds {device}" in report.problem


def test_check_shows_files_versions_and_the_devices_of_jax(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (home / f"accel{number}").touch()
    (home / "modules").mkdir()
    (home / "modules" / "jax.py").write_text(FAKE_JAX)
    monkeypatch.setenv("PYTHONPATH", str(home / "modules"))
    report = run(capsys, "check")
    assert report.facts["device files"] == 4 and "kind" not in report.facts
    assert {"python", "weft", "jax", "jaxlib", "libtpu"} <= set(report.facts)
    report = run(capsys, "check", "--jax")
    assert report.facts | {
        "kind": "TPU v4",
        "platform": "tpu",
        "local_devices": 4,
        "devices": 8,
        "hosts": 2,
    } == (report.facts)
    assert "kind TPU v4" in report.text and not report.problem


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise RuntimeError('the TPU is already in use')", "RuntimeError: the TPU is already in"),
        ("import time; time.sleep(9)", "did not open the devices in 0.3 s; it waits for all hosts"),
        ("raise SystemExit(0)", "no reason given"),
    ],
)
def test_check_says_why_jax_does_not_open_the_devices(
    code: str,
    problem: str,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (home / "jax.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(home))
    seconds = "0.3" if "sleep" in code else "30"
    assert problem in run(capsys, "check", "--jax", "--timeout", seconds).problem


def test_the_module_runs_without_a_framework(home: Path) -> None:
    code = (
        "import sys; from weft.launch import tpu_host; tpu_host.main(['status']); "
        "print([m for m in ('torch', 'transformers', 'jax') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- a command in the foreground


def test_a_command_has_the_variables_of_the_hosts(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (home / "weft-tpu").mkdir()
    (home / "weft-tpu" / "environment").write_text("GREETING='good day'\n")
    script = 'pwd; echo "$GREETING"; echo "${PATH%%:*}"; echo "[$WEFT_JAX_COORDINATOR]"'
    assert tpu_host.main(["run", "--", "sh", "-c", script]) == 0
    captured = capfd.readouterr()
    own = str(Path(sys.executable).parent)
    assert captured.out.splitlines() == [str(home), "good day", own, "[]"]
    assert captured.err == "weft-tpu: worker 3 ended with exit code 0\n"
    (home / "weft-tpu" / "environment").write_text("GREETING good day\n")
    assert tpu_host.main(["run", "--", "true"]) == 2
    shown = capfd.readouterr().err
    assert "line 1: must be NAME=VALUE" in shown and "good" not in shown


@pytest.mark.parametrize(
    ("script", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
@pytest.mark.parametrize("mark", [[], ["--mark"]])
def test_exit_codes_of_commands(
    script: str, code: int, mark: list[str], home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tpu_host.main(["run", *mark, "--", "sh", "-c", script]) == code
    assert capfd.readouterr().err == f"weft-tpu: worker 3 ended with exit code {code}\n"


def test_programs_that_cannot_be_run(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert tpu_host.main(["run", "--", "no-such-program"]) == 127
    assert tpu_host.main(["run", "--", str(home / "wait.py")]) == 126
    assert capfd.readouterr().err.count("worker 3: ") == 2
    with pytest.raises(SystemExit):
        tpu_host.main(["run"])
    assert "run: nothing follows --" in capfd.readouterr().err


def test_a_command_ends_with_its_connection(home: Path) -> None:
    """Here a shell is in the place of ssh's process on the host."""
    host = shlex.join([sys.executable, "-m", "weft.launch.tpu_host", "run", "--", "sh", "-c"])
    script = shlex.quote(
        "trap 'echo done > ended; exit' TERM; echo > begun; while :; do sleep 0.05; done"
    )
    with subprocess.Popen(["sh", "-c", f"{host} {script} & wait"], cwd=home) as ssh:
        wait_for(home / "begun", "\n")
        ssh.kill()
    assert wait_for(home / "ended", "done") == "done\n"


def test_a_marked_command_ends_when_nobody_reads(home: Path) -> None:
    words = [sys.executable, "-m", "weft.launch.tpu_host", "run", "--mark", "--", "yes"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"worker 3: y\n"
        process.stdout.close()
        assert process.wait(timeout=30) == 128 + signal.SIGPIPE
