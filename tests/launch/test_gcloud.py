"""gcloud's commands: quoting, secrets, and what its failures become."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gcloud_stand_in import QUOTA, STOCKOUT, StandInPod
from weft.errors import ConfigError
from weft.launch.gcloud import CAPACITY, TpuPod, format_command, summarize_output

# Any argument a program can have: no null character, no lone surrogate.
ARGUMENTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
AWKWARD = [
    "a b",
    "",
    "'",
    '"',
    "$HOME",
    "`id`",
    "a  b",
    "\n",
    "*",
    "\\",
    "é",
    "-x",
    "~",
    "a;b",
    "!",
]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `gcloud` hands the command to a local shell, as gcloud and ssh do."""
    folder = tmp_path_factory.mktemp("recorder")
    programs = {
        "gcloud": 'for word in "$@"; do case "$word" in --command=*) '
        f'cd {folder}; exec sh -c "${{word#--command=}}";; esac; done',
        "python": f"printf '%s\\0' \"$@\" > {folder}/words",
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


@given(st.lists(ARGUMENTS | st.sampled_from(AWKWARD), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_argument_arrives_on_the_host_as_it_was_typed(recorder: Path, words: list[str]) -> None:
    pod = TpuPod("tulu", zone="us-central2-b", python="./python")
    command = pod.build_ssh("all", pod.build_host_command("start", "--", *words))
    # The words are the same after one shell, and the printed command after two.
    text = next(word for word in command if word.startswith("--command="))
    assert shlex.split(text.removeprefix("--command="))[5:] == words
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{recorder}:{os.environ['PATH']}")
        assert pod.run(command).returncode == 0
    arrived = (recorder / "words").read_bytes().decode().split("\0")[:-1]
    assert arrived == ["-m", "weft.launch.tpu_host", "start", "--", *words]


def test_a_printed_command_can_be_pasted(recorder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{recorder}:{os.environ['PATH']}")
    pod = TpuPod("tulu", python="./python")
    printed = format_command(pod.build_ssh("0", pod.build_host_command(*AWKWARD)))
    subprocess.run(["sh", "-c", printed], check=True)
    assert (recorder / "words").read_bytes().decode().split("\0")[2:-1] == AWKWARD


@pytest.mark.parametrize(
    "text",
    [
        "WANDB_API_KEY=topsecret1 python3 x.py",
        "export HF_TOKEN='topsecret1'; python3 x.py",
        "wandb login --api_key topsecret1",
        "bash -c 'export HF_TOKEN=topsecret1; python3 x.py'",
        "git clone https://me:topsecret1@example.org/x.git",
        "wandb login from-the-environment",
        "curl -H 'Authorization: Bearer topsecret1' example.org",
    ],
)
def test_secrets_are_masked_in_printed_commands(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "from-the-environment")
    pod = TpuPod("tulu", print_only=True)
    pod.run(pod.build_ssh("0", text))
    printed = capsys.readouterr().out
    assert "topsecret1" not in printed and "from-the-environment" not in printed
    assert "***" in printed and "gcloud compute tpus tpu-vm ssh tulu --worker=0" in printed


def test_a_secret_with_quotes_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "it's secret")
    printed = format_command(TpuPod("tulu").build_ssh("0", "login it's secret"))
    assert "secret" not in printed and "***" in printed


def test_ordinary_words_are_printed_as_they_are() -> None:
    pod = TpuPod("tulu")
    words = pod.build_ssh("0", "python3 -m weft.cli.main quickstart sft seed=1 | tail")
    assert shlex.split(format_command(words)) == words


@pytest.mark.parametrize(
    ("output", "kind", "fix"),
    [
        (QUOTA, "the quota is used up", "ask for more quota"),
        (STOCKOUT, CAPACITY, "wait for it with --retry"),
        ("ERROR: (gcloud.x) Insufficient reserved capacity.", CAPACITY, "--retry"),
        (
            "ERROR: (gcloud.x) NOT_FOUND: Resource 'projects/p/locations/us-central2-b/nodes/tulu' "
            "was not found",
            "there is no such pod",
            "tpu-vm list --zone=us-central2-b",
        ),
        (
            "ERROR: (gcloud.x) INVALID_ARGUMENT: the accelerator v9-8 was not found in zone z",
            "there is no such --accelerator-type",
            "accelerator-types list --zone=us-central2-b",
        ),
        (
            'ERROR: (gcloud.x) {"code": 3, "message": "invalid runtime version tpu-x"}',
            "there is no such --version",
            "versions list --zone=us-central2-b",
        ),
        (
            "ERROR: (gcloud.x) PERMISSION_DENIED: Permission 'tpu.nodes.create' denied",
            "no permission",
            "roles/tpu.admin",
        ),
        (
            "ERROR: (gcloud.x) PERMISSION_DENIED: Permission denied on 'locations/moon' (or it may "
            "not exist).",
            "the zone is wrong or missing",
            "--zone",
        ),
        (
            "Failed to find attribute [zone]. x --project y",
            "the zone is wrong or missing",
            "--zone",
        ),
        ("Failed to find attribute [project].", "the project is wrong or missing", "--project"),
        ("ERROR: (gcloud.x) ALREADY_EXISTS: nodes/tulu", "the name is taken", "delete"),
        (
            "ERROR: (gcloud.x) You do not currently have an active account selected.",
            "gcloud is not logged in",
            "gcloud auth login",
        ),
        (
            "ERROR: (gcloud.x) Cloud TPU API has not been used in project 1 before (403)",
            "the project has no TPU API",
            "services enable",
        ),
        ("me@1.2.3.4: Permission denied (publickey).", "ssh cannot reach the host", "ssh-add"),
        (
            'ERROR: (gcloud.x) This TPU has terminal state "PREEMPTED", so it cannot be used',
            "the pod was taken away",
            "create it again",
        ),
    ],
)
def test_a_failure_says_what_is_wrong_and_what_to_do(output: str, kind: str, fix: str) -> None:
    pod = TpuPod("tulu", zone="us-central2-b")
    message = str(pod.build_error("create it", output))
    assert message.startswith(f"pod tulu: cannot create it: {kind}: ")
    assert fix in message and "\n" not in message and "ERROR" not in message


def test_an_unknown_failure_is_in_gclouds_own_words() -> None:
    message = str(TpuPod("tulu").build_error("delete it", "ERROR: (gcloud.x) the moon is full\n"))
    assert message == "pod tulu: cannot delete it: the moon is full"
    assert str(TpuPod("tulu").build_error("delete it", "")).endswith(": gcloud gives no reason")
    assert summarize_output('ERROR: (gcloud.x) {"message": "a \\x b"}') == '{"message": "a \\x b"}'
    progress = (
        "SSH: Attempting to connect to worker 1...\n"
        "##### Command execution on worker 1 failed with exit status 255. Continuing.\n"
    )
    assert summarize_output(progress) == "" and summarize_output(f"why\n{progress}") == "why"
    message = str(TpuPod("tulu").build_error("clean it", progress))
    assert message.startswith("pod tulu: cannot clean it: ssh cannot reach the host; run ssh-add")
    assert len(summarize_output("ERROR: (gcloud.x) " + "word " * 500)) < 310


@pytest.mark.parametrize("name", ["", "A", "1a", "a_b", "-x", "a" * 64, "a b", "--zone=x", "a-"])
def test_names_that_no_pod_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        TpuPod(name)


def test_gcloud_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pod = TpuPod("tulu")
    with pytest.raises(ConfigError, match="has no gcloud; install"):
        pod.run(pod.build_command("describe", "tulu"))
    # Printing needs no gcloud.
    assert TpuPod("tulu", print_only=True).run(["gcloud", "x"]).returncode == 0


def test_input_and_output_of_a_shell_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in = StandInPod(tmp_path)
    monkeypatch.setenv("PATH", stand_in.path)
    pod = TpuPod("tulu")
    code, errors = pod.run_interactive(pod.build_ssh("1", "echo out; echo err >&2; exit 3"))
    captured = capfd.readouterr()
    assert captured.out.endswith("out\n") and "err\n" in captured.err
    assert code == 0 and "failed with exit status 3" in errors and "#####" not in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ["env", "API_KEY=top secret1", "x"],
        ["tool", "--api-key", "top secret1"],
        ["tool", "--password=it's secret1"],
        ["sh", "-c", "tool --token secret1 | cat"],
        ["sh", "-c", "export HF_TOKEN='top secret1'; x"],
        ["sh", "-c", "sh -c 'tool --token secret1'"],
        ["sh", "-c", "curl -H 'Authorization: Bearer secret1'"],
    ],
)
def test_secrets_in_words_with_blanks_are_masked(words: list[str]) -> None:
    pod = TpuPod("tulu")
    printed = format_command(pod.build_ssh("0", pod.build_host_command("run", "--", *words)))
    assert "secret1" not in printed and "***" in printed and words[0] in printed
    shlex.split(printed)  # quotes stay in pairs
