"""`weft launch tpu` on the command line, with a stand-in for gcloud.

Which commands run, what they print, and how failures read: exit code 2 and one message.
"""

from __future__ import annotations

import io
import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.gcloud_stand_in import QUOTA, STOCKOUT, StandInPod
from weft.cli import launch
from weft.cli import main as weft
from weft.launch import tpu
from weft.launch.tpu_host import ENDED

PLACE = ["--zone", "us-central2-b", "--project", "ours"]
SAME_PLACE = ["--zone=us-central2-b", "--project=ours"]
TYPE = ["--accelerator-type", "v4-32", "--version", "tpu-ubuntu2204-base"]
NO_PERMISSION = (
    "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.get' denied on resource\n"
)
NO_POD = (
    "ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource "
    "'projects/ours/locations/us-central2-b/nodes/tulu' was not found\n"
)
TRAINING = ["--", "quickstart", "sft", "experiment_name=e", "trial_name=t"]


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInPod:
    """Return a pod of two hosts; the stand-in for gcloud is the only gcloud on the PATH."""
    stand_in = StandInPod(tmp_path, hosts=2)
    monkeypatch.setenv("PATH", stand_in.path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return stand_in


def tpu_command(verb: str, *words: str) -> list[str]:
    return ["launch", "tpu", verb, "--name", "tulu", *PLACE, *words]


def answer(pod: StandInPod, *reports: dict[str, object], verb: str = "ssh") -> None:
    """Let the next ssh print reports of workers 0, 1, ..."""
    lines = []
    for number, report in enumerate(reports):
        whole = {"worker": str(number), "host": f"w-{number}", **report}
        lines.append(f"worker {number}: {json.dumps(whole)}\n")
    pod.plan(verb, output="".join(reversed(lines)))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only message on standard error."""
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.splitlines()) == 1, message
    return message


# -- command lines of newcomers


def test_alone_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(["launch"]) == 2
    assert "weft launch" in capsys.readouterr().out
    assert weft.main(["launch", "tpu"]) == 2
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        weft.main(["launch", "tpu", "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == alone
    assert all(f"\n    {name} " in alone for name in launch.SUBCOMMANDS)


@pytest.mark.parametrize("name", launch.SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        weft.main(["launch", "tpu", name, "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0 and f"weft launch tpu {name}" in text and "--print" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tpo"], "unknown kind of machine 'tpo'; did you mean tpu?"),
        (["tpu", "creat"], "unknown command of weft launch tpu 'creat'; did you mean create?"),
        (
            ["tpu", "reboot"],
            "known: check, clean, create, delete, install, logs, run, ssh, start, stop",
        ),
        (["tpu", "check"], "the following arguments are required: --name"),
        (["tpu", "create", "--name", "a"], "required: --accelerator-type, --version"),
        (["tpu", "check", "--name", "A"], "--name 'A': must begin with a small letter"),
        (
            ["tpu", "check", "--name", "a", "--worker", "x"],
            "x: must be a number, such as 0, or all",
        ),
        (["tpu", "check", "--name", "a", "--timeout", "-1"], "must be a number of seconds"),
        (["tpu", "check", "--name", "a", "--wroker", "1"], "unrecognized arguments: --wroker"),
        (["tpu", "stop", "--name", "a", "--", "x"], "only run and start take a command after --"),
        (["tpu", "run", "--name", "a"], "run: nothing follows --; name a program, such as"),
        (["tpu", "run", "--name", "a", "hostname"], "unrecognized arguments: hostname"),
        (["tpu", "run", "--name", "a", "--", "a\0b"], "run: a word of the command contains a null"),
        (["tpu", "start", "--name", "a"], "nothing follows --; it must be a weft command"),
        (["tpu", "start", "--name", "a", "quickstart"], "unrecognized arguments: quickstart"),
        (["tpu", "start", "--name", "a", "--libtpu", "x", *TRAINING], "invalid choice: 'x'"),
        (["tpu", "logs", "--name", "a", "--lines", "-1"], "--lines -1: must be at least 0"),
        (["tpu", "create", "--name", "a", *TYPE, "--retry", "-2"], "--retry -2: must be at least"),
        (["tpu", "ssh", "--name", "a", "--worker", "all"], "on one host only; add --command TEXT"),
        (["tpu", "install", "--name", "a", "--extras", "a b]"], "--extras a b]: must be names"),
        (["tpu", "install", "--name", "a", "--source", "x"], "--source x: must be an address"),
        (["tpu", "delete", "--name", "a"], "nobody can be asked here; add --yes"),
        (["tpu", "start", "--name", "a", "--env-file", "no", *TRAINING], "no: there is no such"),
    ],
)
def test_wrong_words_are_one_message_and_run_nothing(
    words: list[str], message: str, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    assert weft.main(["launch", *words]) == 2
    assert message in error_of(capsys)
    assert pod.calls == []


# -- printing


@pytest.mark.parametrize(
    ("words", "verbs"),
    [
        (["create", *TYPE, "--retry"], ["create"]),
        (["ssh"], ["ssh"]),
        (["ssh", "--command", "ls | wc -l", "--worker", "all"], ["ssh"]),
        (["run", "--", "echo", "a b"], ["describe", "ssh"]),
        (["install"], ["describe", "scp", "ssh"]),
        (["install", "--source", "weft==0.1.0"], ["describe", "ssh"]),
        (["check"], ["describe", "ssh", "ssh"]),
        (["check", "--worker", "1"], ["describe", "ssh"]),
        (["clean"], ["describe", "ssh"]),
        (["start", *TRAINING], ["describe", "ssh", "ssh"]),
        (["logs"], ["ssh"]),
        (["stop"], ["describe", "ssh"]),
        (["delete"], ["delete"]),
    ],
)
def test_print_only_prints(
    words: list[str],
    verbs: list[str],
    pod: StandInPod,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The commands are also printed on a machine without gcloud."""
    monkeypatch.setenv("PATH", str(pod.folder))
    assert weft.main(tpu_command(words[0], "--print", *words[1:])) == 0
    captured = capsys.readouterr()
    commands = [shlex.split(line) for line in captured.out.splitlines()]
    commands = [command for command in commands if command[0] != "tar"]
    assert [command[4] for command in commands] == verbs and captured.err == ""
    for command in commands:
        assert command[:4] == ["gcloud", "compute", "tpus", "tpu-vm"]
        assert command[-2:] == SAME_PLACE
        assert "tulu" in " ".join(command[5:])
    assert pod.calls == []


def test_printed_commands_equal_executed_ones(
    pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(pod, {}, {})
    assert weft.main(tpu_command("clean")) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = [shlex.split(line)[1:] for line in lines if line.startswith("gcloud ")]
    assert printed == pod.calls and pod.verbs == ["describe", "ssh"]
    assert pod.calls[1] == [
        *("compute", "tpus", "tpu-vm", "ssh", "tulu", "--worker=all"),
        "--command=weft-tpu/venv/bin/python -m weft.launch.tpu_host clean",
        "--quiet",
        *SAME_PLACE,
    ]


# -- the pod


def test_create(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(tpu_command("create", *TYPE)) == 0
    flags = ["--accelerator-type=v4-32", "--version=tpu-ubuntu2204-base", "--quiet"]
    assert pod.calls == [["compute", "tpus", "tpu-vm", "create", "tulu", *flags, *SAME_PLACE]]
    assert "weft launch tpu install --name=tulu --zone=us-central2-b" in capsys.readouterr().out


def test_retry_waits_for_capacity(
    pod: StandInPod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan("create", code=1, error=STOCKOUT)
    pod.plan("create", code=1, error=STOCKOUT)
    assert weft.main(tpu_command("create", *TYPE, "--retry", "5", "--retry-wait", "0.001")) == 0
    assert pod.verbs == ["create"] * 3
    assert "attempt 2 of 6: no capacity; next attempt in 0.002 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "retry", "attempts", "message"),
    [
        (
            STOCKOUT,
            [],
            1,
            'cannot create it: no capacity: There is no more capacity in the zone "us',
        ),
        (STOCKOUT, ["--retry", "2"], 3, "cannot create it in 3 attempts: no capacity"),
        (QUOTA, ["--retry", "2"], 1, "the quota is used up: Quota limit 'TPUV4s"),
        (NO_PERMISSION, ["--retry"], 1, "no permission"),
    ],
)
def test_only_capacity_is_tried_again(
    error: str,
    retry: list[str],
    attempts: int,
    message: str,
    pod: StandInPod,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(attempts):
        pod.plan("create", code=1, error=error)
    assert weft.main(tpu_command("create", *TYPE, *retry, "--retry-wait", "0")) == 2
    assert message in error_of(capsys)
    assert pod.verbs == ["create"] * attempts


def test_delete_asks(
    pod: StandInPod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for typed in ("", "n", "no", "tulu"):
        monkeypatch.setattr("builtins.input", lambda prompt, typed=typed: typed)
        assert weft.main(tpu_command("delete")) == 0
        assert "tulu was not deleted" in capsys.readouterr().out
    assert pod.calls == []
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    assert weft.main(tpu_command("delete")) == 0
    assert weft.main(tpu_command("delete", "--yes")) == 0
    assert pod.verbs == ["delete", "delete"]


def test_ssh_runs_a_shell_command_on_all_hosts(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        weft.main(tpu_command("ssh", "--worker", "all", "--command", 'echo "$TPU_WORKER_ID" a'))
        == 0
    )
    assert capfd.readouterr().out.splitlines()[1:] == ["0 a", "1 a"]
    assert weft.main(tpu_command("ssh", "--command", "exit 3", "--worker", "all")) == 2
    message = capfd.readouterr().err
    assert message == (
        "error: pod tulu: the command failed on worker 0 (exit code 3), 1 (exit code 3)\n"
    )


def test_the_exit_code_of_a_shell_is_passed_on(pod: StandInPod) -> None:
    pod.plan("ssh", code=7)
    assert weft.main(tpu_command("ssh")) == 7
    assert pod.calls[0][4:] == ["tulu", "--worker=0", *SAME_PLACE]


# -- programs in the foreground


def test_run_passes_words_on_and_marks_lines(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    script = 'for word in "$@"; do echo "$word"; done; echo "to err" >&2; printf end'
    given = ["a  b", "$HOME", "it's", "--", "*"]
    words = ["--", "sh", "-c", script, "sh", *given]
    assert weft.main(tpu_command("run", *words)) == 0
    captured = capfd.readouterr()
    lines = captured.out.splitlines()[2:]
    for number in range(2):
        own = [line for line in lines if line.startswith(f"worker {number}: ")]
        assert own == [f"worker {number}: {text}" for text in (*given, "end")]
    assert len(lines) == 12
    assert captured.err.splitlines() == ["worker 0: to err", "worker 1: to err"]
    assert pod.verbs == ["describe", "ssh"] and "--worker=all" in pod.calls[1]
    printed = shlex.split(captured.out.splitlines()[1])[1:]
    assert printed == pod.calls[1]
    assert printed[6] == "--command=" + shlex.join(
        ["weft-tpu/venv/bin/python", "-m", "weft.launch.tpu_host", "run", "--mark", "--jax", *words]
    )


def test_run_on_one_host_is_not_marked(pod: StandInPod, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--", "sh", "-c", 'echo "$TPU_WORKER_ID $WEFT_JAX_COORDINATOR"; echo e >&2; exit 5']
    assert weft.main(tpu_command("run", "--worker", "1", *words)) == 5
    captured = capfd.readouterr()
    assert captured.out.splitlines()[2:] == ["1 "] and captured.err == "e\n"
    assert weft.main(tpu_command("run", "--worker", "2", "--", "true")) == 2
    assert "--worker 2: pod tulu has workers 0 to 1" in capfd.readouterr().err


def test_the_only_host_of_a_pod_is_not_marked(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(pod.home(1))
    words = ["--", "sh", "-c", 'echo "$WEFT_JAX_COORDINATOR"; cat']
    assert weft.main(tpu_command("run", *words)) == 0
    assert capfd.readouterr().out.splitlines()[2:] == ["auto"]


def test_the_exit_code_of_run_is_that_of_the_first_host_that_fails(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    # The hosts of the stand-in run one after the other.
    assert weft.main(tpu_command("run", "--", "sh", "-c", "exit $((4 - TPU_WORKER_ID))")) == 4
    assert capfd.readouterr().err == (
        "pod tulu: the command failed on worker 0 (exit code 4), 1 (exit code 3)\n"
    )
    ends = [ENDED.format(worker, code) for worker, code in (("1", 3), ("0", 4))]
    pod.plan("ssh", error="".join(ends))
    assert weft.main(tpu_command("run", "--", "x")) == 3, "the first in time"
    pod.plan("ssh", error=ENDED.format("1", 3) + ENDED.format("0", 0))
    capfd.readouterr()
    assert weft.main(tpu_command("run", "--", "x")) == 3
    assert capfd.readouterr().err == "pod tulu: the command failed on worker 1 (exit code 3)\n"


def test_run_without_such_a_program(pod: StandInPod, capfd: pytest.CaptureFixture[str]) -> None:
    assert weft.main(tpu_command("run", "--worker", "0", "--", "no-such-program")) == 127
    assert capfd.readouterr().err == "worker 0: no-such-program: No such file or directory\n"


def test_run_prints_no_secret(pod: StandInPod, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--", "sh", "-c", "test $1 = topsecret1 && echo same", "sh", "HF_TOKEN=topsecret1"]
    assert weft.main(tpu_command("run", "--print", *words)) == 0
    captured = capfd.readouterr()
    assert "topsecret1 && echo" in captured.out and "HF_TOKEN=topsecret1" not in captured.out
    assert "HF_TOKEN=***" in captured.out and pod.calls == []


def test_hosts_that_run_nothing_are_named(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.lose(1)
    assert weft.main(tpu_command("run", "--", "sh", "-c", "exit 4")) == 2
    shown = capfd.readouterr().err
    assert "the command failed on worker 0 (exit code 4)" in shown
    assert "error: worker 1 of pod tulu: cannot run the command: ssh cannot reach" in shown
    assert "ended with exit code" not in shown
    pod.lose()
    pod.python(0).unlink()
    assert weft.main(tpu_command("run", "--", "true")) == 2
    shown = capfd.readouterr().err
    assert "worker 0 of pod tulu: cannot run the command: weft is not installed there" in shown


# -- commands on hosts


@pytest.mark.parametrize("verb", ["install", "check", "clean", "start", "stop"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NO_POD, "there is no such pod"),
        (NO_PERMISSION, "no permission"),
    ],
)
def test_a_pod_that_cannot_be_read(
    verb: str, error: str, message: str, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan("describe", code=1, error=error)
    assert weft.main(tpu_command(verb, *(TRAINING if verb == "start" else []))) == 2
    assert f"pod tulu: cannot describe it: {message}" in error_of(capsys)
    assert pod.verbs == ["describe"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ('{"state": "PREEMPTED"}', "pod tulu is PREEMPTED and not READY"),
        ('{"state": "CREATING"}', "wait while it is CREATING"),
        ("[]", "did not print a mapping"),
        ("hello", "did not print a mapping: hello"),
    ],
)
def test_a_pod_that_is_not_ready(
    output: str, message: str, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan("describe", output=output)
    assert weft.main(tpu_command("check")) == 2
    assert message in error_of(capsys) and pod.verbs == ["describe"]


def test_gcloud_is_missing(
    pod: StandInPod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(pod.folder))
    assert weft.main(tpu_command("check")) == 2
    assert "this machine has no gcloud; install the Google Cloud CLI" in error_of(capsys)


@pytest.mark.parametrize("verb", ["check", "clean", "start", "stop"])
def test_a_worker_that_ssh_does_not_reach_is_named(
    verb: str, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code of gcloud is 0, as in some of its versions."""
    pod.lose(1)
    assert weft.main(tpu_command(verb, *(TRAINING if verb == "start" else []))) == 2
    message = error_of(capsys)
    assert "worker 1 of pod tulu: cannot" in message and "ssh cannot reach the host" in message
    assert "weft launch tpu ssh --name=tulu" in message
    if verb == "start":
        assert not any("tpu_host start" in word for call in pod.calls for word in call)


def test_a_host_without_weft(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.python(1).unlink()
    assert weft.main(tpu_command("clean")) == 2
    assert "worker 1 of pod tulu: cannot clean it: weft is not installed there" in error_of(capsys)


def test_a_worker_that_the_pod_lacks(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    assert weft.main(tpu_command("clean", "--worker", "2")) == 2
    assert "--worker 2: pod tulu has workers 0 to 1" in error_of(capsys)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace weft's sources by a small tree."""
    (tmp_path / "tree" / "src" / "weft").mkdir(parents=True)
    (tmp_path / "tree" / "src" / "weft" / "new.py").touch()
    (tmp_path / "tree" / "pyproject.toml").touch()
    monkeypatch.setattr(tpu, "find_sources", lambda: tmp_path / "tree")


def test_install_copies_the_sources(
    pod: StandInPod, sources: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hosts run the script; a stand-in for uv records what it would install."""
    for number in range(2):
        pod.write_program(
            pod.folder / "bin" / "python3",
            'case "$*" in *install*) printf "%s\\n" "$@" > uv;; esac',
        )
        (pod.home(number) / "weft-tpu" / "source").mkdir()
        (pod.home(number) / "weft-tpu" / "source" / "stale.py").touch()
    assert weft.main(tpu_command("install")) == 0
    assert pod.verbs == ["describe", "scp", "ssh"]
    for number in range(2):
        source = pod.home(number) / "weft-tpu" / "source"
        assert (source / "src" / "weft" / "new.py").is_file()
        assert not (source / "stale.py").exists()
        assert not (pod.home(number) / tpu.ARCHIVE).exists()
        words = (pod.home(number) / "uv").read_text().splitlines()
        assert {"./weft-tpu/source[jax]", "jax[tpu]", "weft-tpu/venv/bin/python"} <= set(words)
    shown = capsys.readouterr().out
    assert "installed weft on 2 hosts; check the devices: weft launch tpu check" in shown


def test_install_from_an_address(pod: StandInPod) -> None:
    answer(pod, {}, {})
    assert (
        weft.main(
            tpu_command(
                "install", "--source", "git+https://example.org/w.git", "--extras", "wandb,ray"
            )
        )
        == 0
    )
    assert pod.verbs == ["describe", "ssh"]
    assert "'weft[jax,wandb,ray] @ git+https://example.org/w.git'" in pod.calls[1][6]


def test_weft_without_sources_cannot_be_copied(
    pod: StandInPod, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tpu, "find_sources", lambda: None)
    assert weft.main(tpu_command("install")) == 2
    assert "name a requirement with --source" in error_of(capsys) and pod.verbs == []


def test_an_installation_that_fails_is_in_its_own_words(
    pod: StandInPod, sources: None, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.write_program(
        pod.folder / "bin" / "python3", 'echo "No solution: no such file" >&2; exit 1'
    )
    assert weft.main(tpu_command("install")) == 2
    message = error_of(capsys)
    assert "workers" not in message and "worker 0, 1 of pod tulu: cannot install weft: " in message
    assert "No solution" in message and "run weft launch tpu install" not in message


ALIKE = {"facts": {"device files": 4, "jax": "0.10.2"}, "text": "device files 4, jax 0.10.2"}


def test_check_shows_each_host(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    answer(pod, ALIKE, ALIKE)
    answer(pod, ALIKE, ALIKE)
    assert weft.main(tpu_command("check")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "worker 0 (w-0): device files 4, jax 0.10.2",
        "worker 1 (w-1): device files 4, jax 0.10.2",
        "pod tulu: v4-32, 2 hosts with the same devices and versions",
    ]


@pytest.mark.parametrize("stage", [0, 1])
def test_check_names_the_host_that_differs(
    stage: int, tmp_path: Path, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (2, 3):
        pod.home(number).mkdir()
    odd = {"facts": {"device files": 0, "jax": "0.10.2"}, "text": "device files 0"}
    if stage:
        answer(pod, ALIKE, ALIKE, ALIKE, ALIKE)
    answer(pod, ALIKE, ALIKE, odd, ALIKE)
    assert weft.main(tpu_command("check")) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: pod tulu: worker 2: device files 0, the others have 4\n"
    assert "worker 2 (w-2): device files 0" in captured.out
    # JAX runs only if the hosts agree so far, since it would wait for the broken host.
    assert pod.verbs == ["describe", *["ssh"] * (1 + stage)]


def test_check_of_one_host_does_not_ask_jax(
    pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.plan("ssh", output=f"worker 1: {json.dumps({'worker': '1', 'host': 'h', **ALIKE})}\n")
    assert weft.main(tpu_command("check", "--worker", "1")) == 0
    assert "JAX was not asked" in capsys.readouterr().out and pod.verbs == ["describe", "ssh"]


# -- a run


def test_start_asks_all_hosts_before_it_starts_any(
    pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(
        pod, {"facts": {"running": ""}}, {"facts": {"running": "process 7 (quickstart sft ...)"}}
    )
    assert weft.main(tpu_command("start", *TRAINING)) == 2
    message = error_of(capsys)
    assert "worker 1: process 7 (quickstart sft ...) runs already; end it with" in message
    assert "nothing was started" in message and pod.verbs == ["describe", "ssh"]


def test_start_passes_the_words_on(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    answer(pod, {}, {})
    answer(pod, {"text": "started process 1"}, {"text": "started process 2"})
    Path("variables").write_text("HF_TOKEN=topsecret1\n")
    words = ["weft", "quickstart", "sft", "dataset.columns={prompt: a b}", "x='$HOME'", "--debg"]
    given = ["--libtpu", "guide", "--env-file", "variables", "--", *words]
    assert weft.main(tpu_command("start", *given)) == 0
    shown = capsys.readouterr().out
    assert "topsecret1" not in shown and pod.verbs == ["describe", "ssh", "scp", "ssh"]
    for number in range(2):
        copied = pod.home(number) / "weft-tpu" / "environment"
        assert copied.read_text() == "HF_TOKEN=topsecret1\n"
    command = shlex.split(pod.calls[3][6].removeprefix("--command="))
    assert command[:4] == ["weft-tpu/venv/bin/python", "-m", "weft.launch.tpu_host", "start"]
    assert command[6:] == ["--libtpu", "guide", "--", *words[1:]]
    assert "worker 1 (w-1): started process 2" in shown
    assert "started on 2 hosts; weft launch tpu logs --name=tulu" in shown


def test_start_on_a_part_of_the_hosts_is_a_failure(
    pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(pod, {}, {})
    answer(
        pod, {"text": "started process 1"}, {"problem": "the run ended at once with exit code 2"}
    )
    assert weft.main(tpu_command("start", *TRAINING)) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "error: pod tulu: worker 1: the run ended at once with exit code 2; end the other hosts' "
        "processes with weft launch tpu stop --name=tulu --zone=us-central2-b --project=ours\n"
    )
    assert "worker 0 (w-0): started process 1" in captured.out


def test_a_worker_lost_while_starting(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    answer(pod, {}, {})
    pod.lose(1)
    answer(pod, {"text": "started process 1"})
    assert weft.main(tpu_command("start", *TRAINING)) == 2
    message = error_of(capsys)
    assert "worker 1 of pod tulu: cannot start the run" in message
    assert "other hosts may have started and wait: weft launch tpu stop" in message


@pytest.mark.parametrize("line", ["HF_TOKEN topsecret1", "9=topsecret1"])
def test_a_wrong_environment_file(
    line: str, pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("variables").write_text(f"A=b\n{line}\n")
    assert weft.main(tpu_command("start", "--env-file", "variables", *TRAINING)) == 2
    message = error_of(capsys)
    assert "--env-file variables, line 2: must be NAME=VALUE" in message
    assert "topsecret1" not in message and pod.calls == []


def test_logs_of_a_host_stand_together(pod: StandInPod, capsys: pytest.CaptureFixture[str]) -> None:
    pod.plan("ssh", output="worker 1: a\nworker 0: b\nworker 1: c: d\n")
    assert weft.main(tpu_command("logs", "--lines", "2")) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        *("== worker 0", "b", "== worker 1", "a", "c: d")
    ]
    assert "tpu_host logs --lines 2" in pod.calls[0][6]


@pytest.mark.parametrize("follow", [[], ["--follow"]])
def test_logs_of_a_lost_worker(
    follow: list[str], pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.lose(1)
    assert weft.main(tpu_command("logs", *follow)) == 2
    captured = capfd.readouterr()
    assert "worker 0: no log" in captured.out or "== worker 0" in captured.out
    assert "ssh cannot reach the host" in captured.err


def test_stop_shows_processes_that_still_hold_the_devices(
    pod: StandInPod, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(pod, {"text": "stopped process 1"}, {"text": "stopped process 2"})
    assert weft.main(tpu_command("stop", "--timeout", "30")) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing holds the devices"
    assert pod.calls[1][6].endswith("tpu_host stop --timeout 30")
    held = "process 9 (python3, user eve) holds /dev/accel0"
    answer(pod, {"text": "stopped process 1"}, {"text": "no run to stop", "problem": held})
    assert weft.main(tpu_command("stop", "--now")) == 2
    captured = capsys.readouterr()
    assert captured.err == f"error: pod tulu: worker 1: {held}\n"
    assert "worker 0 (w-0): stopped process 1" in captured.out


@pytest.mark.slow
def test_a_run_on_two_hosts_from_start_to_stop(
    pod: StandInPod, capfd: pytest.CaptureFixture[str]
) -> None:
    """Run the commands of the hosts here, each with another home directory."""
    for number in range(2):
        (pod.home(number) / "wait.py").write_text(
            "import os, time\nprint('coordinator', os.environ['WEFT_JAX_COORDINATOR'], flush=True)\n"
            "time.sleep(60)\n"
        )
    words = ["--", "quickstart", "--import", "wait.py", "sft", "x='a b'"]
    assert weft.main(tpu_command("start", *words)) == 0
    try:
        assert weft.main(tpu_command("start", *words)) == 2
        assert "runs already" in capfd.readouterr().err
        assert weft.main(tpu_command("logs")) == 0
        shown = capfd.readouterr().out
        assert shown.count("coordinator auto") == 2 and "== worker 1" in shown
    finally:
        assert weft.main(tpu_command("stop", "--now")) == 0
    assert capfd.readouterr().out.count("stopped process") == 2
