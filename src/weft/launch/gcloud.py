"""gcloud's commands for one TPU pod: build, print and run them, and explain how they fail.

Every command is printed before it runs, with secrets masked. gcloud's words about a failure become
one `ConfigError` that says what to do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from weft.errors import ConfigError
from weft.launch.tpu_host import ENDED, FOLDER
from weft.redaction import MASK, is_secret, mask_words, redact

PYTHON = f"{FOLDER}/venv/bin/python"  # below the home directory, where ssh starts
WORKING_FOLDERS = ("PWD", "OLDPWD")  # variables that only look like passwords
MIN_SECRET = 6  # characters of a secret variable's value that is masked wherever it occurs
LONGEST_REASON = 300  # characters of gcloud's own words in a message
PROGRESS = re.compile(
    r"#####|(?:SSH|SCP): Attempting|Using (?:ssh|scp) batch|Retrying: ", re.IGNORECASE
)
ENDED_LINE = re.compile(ENDED.rstrip().format(r"(\S+)", r"(\d+)") + r"\n?")
BLANK = re.compile(r"[ \t\r\n]")  # what separates the words of a shell command
NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
CAPACITY = "no capacity"
# gcloud's words -> what is wrong, and what to do. The first match decides: a used-up quota and a
# zone without capacity have the same code, 8. {zone} and {pod} are flags of the pod.
FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"quota limit|quota.{0,80}exceed|QUOTA_EXCEEDED",
        "the quota is used up",
        "delete other TPUs, choose a smaller --accelerator-type, or ask for more quota",
    ),
    (
        r"no more capacity|insufficient (?:reserved )?capacity|stock.?out|RESOURCE_POOL_EXHAUSTED"
        r"|not enough resources|RESOURCE_EXHAUSTED|\"code\": 8\b",
        CAPACITY,
        "wait for it with --retry (--retry N for more attempts), or choose another --zone or "
        "--accelerator-type",
    ),
    (
        r"gcloud auth login|active account|reauthentication",
        "gcloud is not logged in",
        "run gcloud auth login",
    ),
    (
        r"permission denied \(publickey|not present in the SSH agent|host key verification"
        r"|return code \[?255|exit status 255|connection (?:refused|timed out|closed)",
        "ssh cannot reach the host",
        "run ssh-add ~/.ssh/google_compute_engine; weft launch tpu ssh {pod} --worker N shows why "
        "one host refuses; if it stays unreachable, delete and create the pod",
    ),
    (
        r"has not been used in project|SERVICE_DISABLED|API.{0,40}not enabled",
        "the project has no TPU API",
        "run gcloud services enable tpu.googleapis.com",
    ),
    (
        r"Permission denied on 'locations|location \S+ is not found|unsupported location|invalid zone"
        r"|attribute \[zone\]|zone.{0,40}(?:is required|must be specified)",
        "the zone is wrong or missing",
        "name one with --zone; gcloud compute tpus locations list lists them",
    ),
    (
        r"PERMISSION_DENIED|does not have permission|permission '|not authorized|\"code\": 7\b",
        "no permission",
        "check --project, and ask its owner for the role roles/tpu.admin",
    ),
    (
        r"accelerator.?type|accelerator \S+ was not found",
        "there is no such --accelerator-type",
        "gcloud compute tpus tpu-vm accelerator-types list {zone} lists those of the zone",
    ),
    (
        r"runtime.?version|software version",
        "there is no such --version",
        "gcloud compute tpus tpu-vm versions list {zone} lists those of the zone",
    ),
    (
        r"already exists|ALREADY_EXISTS|\"code\": 6\b",
        "the name is taken",
        "choose another --name, or delete the pod first",
    ),
    (
        r"state \"?PREEMPTED|terminal state|TERMINATED",
        "the pod was taken away",
        "delete it and create it again; a run with a fileroot in a bucket resumes",
    ),
    (
        r"attribute \[project\]|\[core/project\]|project.{0,40}(?:is required|must be specified)",
        "the project is wrong or missing",
        "name one with --project; gcloud projects list lists them",
    ),
    (
        r"not found|NOT_FOUND|\"code\": 5\b",
        "there is no such pod",
        "gcloud compute tpus tpu-vm list {zone} lists the pods of a zone",
    ),
)


@dataclass(frozen=True)
class TpuPod:
    """Name of a pod, and the project and zone that it is in; absent ones are gcloud's own defaults.

    With `print_only`, commands are printed and not run. `python` is the interpreter of the hosts.
    Raises `ConfigError` for a name that no pod can have.
    """

    name: str
    zone: str | None = None
    project: str | None = None
    print_only: bool = False
    python: str = PYTHON

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r}: must begin with a small letter and have only small "
                "letters, digits and hyphens, at most 63, such as tulu-1"
            )

    @property
    def flags(self) -> str:
        """Flags that name this pod in another `weft launch tpu` command."""
        return shlex.join([f"--name={self.name}", *self._build_place()])

    def _build_place(self) -> list[str]:
        place = {"zone": self.zone, "project": self.project}
        return [f"--{flag}={value}" for flag, value in place.items() if value is not None]

    def build_command(self, verb: str, *operands: str) -> list[str]:
        """Return the words of a gcloud command: a verb, its operands or flags, and the place."""
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *operands, *self._build_place()]

    def build_ssh(self, worker: str, command: str) -> list[str]:
        """Return the gcloud command that runs a shell command on one host, or on all.

        gcloud and ssh pass `command` on as it is, so the host's shell is the only one to parse it.
        """
        return self.build_command(
            "ssh", self.name, f"--worker={worker}", f"--command={command}", "--quiet"
        )

    def build_host_command(self, *words: str) -> str:
        """Return the shell command of `weft.launch.tpu_host` with `words`."""
        python = self.python.removeprefix("~/")
        return shlex.join([python, "-m", "weft.launch.tpu_host", *words])

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Print a gcloud command, run it and return its output.

        Returns empty output if `print_only`. Raises `ConfigError` if gcloud is missing.
        """
        if not self._print_command(words):
            return subprocess.CompletedProcess(list(words), 0, "", "")
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )

    def run_checked(self, words: Sequence[str], purpose: str) -> str:
        """Run a gcloud command and return its output; raise `ConfigError` if it fails.

        `purpose` completes the message, as in "cannot PURPOSE".
        """
        done = self.run(words)
        if done.returncode:
            raise self.build_error(purpose, done.stderr)
        return done.stdout

    def run_interactive(self, words: Sequence[str]) -> tuple[int, str]:
        """Run a gcloud command whose input and output are those of this process.

        Returns the exit code and the lines of standard error, which are shown as they come.
        """
        if not self._print_command(words):
            return 0, ""
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, errors="replace")
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=_copy_lines, args=(process.stderr, lines), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(timeout=5.0)
        return code, "".join(lines)

    def _print_command(self, words: Sequence[str]) -> bool:
        """Print a command without its secrets, and return whether it is to be run."""
        print(format_command(words), flush=True)
        if not self.print_only and shutil.which(words[0]) is None:
            raise ConfigError(
                "this machine has no gcloud; install the Google Cloud CLI, or add --print and run "
                "the printed commands elsewhere"
            )
        return not self.print_only

    def build_error(self, purpose: str, output: str, subject: str = "") -> ConfigError:
        """Return the error for a gcloud command that has failed with `output` on standard error."""
        kind, fix = self.explain_failure(output)
        reason = mask_environment(summarize_output(output))
        why = ": ".join(filter(None, (kind, reason))) or "gcloud gives no reason"
        return ConfigError(
            f"{subject or f'pod {self.name}'}: cannot {purpose}: {why}{f'; {fix}' if fix else ''}"
        )

    def explain_failure(self, output: str) -> tuple[str, str]:
        """Return what went wrong and how to fix it, both empty for an unknown failure."""
        for pattern, kind, fix in FAILURES:
            if re.search(pattern, output, re.IGNORECASE):
                zone = "" if self.zone is None else f"--zone={self.zone}"
                return kind, " ".join(fix.format(zone=zone, pod=self.flags).split())
        return "", ""


def _copy_lines(stream: TextIO, lines: list[str]) -> None:
    """Copy a stream to standard error, without reports on the end of a command."""
    for line in stream:
        lines.append(line)
        text = ENDED_LINE.sub("", line)
        if text and not text.startswith(("ERROR: (gcloud", "#####")):
            print(mask_environment(text), end="", file=sys.stderr, flush=True)


# -- printed commands and messages


def format_command(words: Sequence[str]) -> str:
    """Return a command as it can be pasted into a shell, with secrets masked."""
    parts = []
    for word in mask_words(words):
        flag, equals, text = word.partition("=")
        if flag == "--command" and equals:
            word = f"{flag}={_mask_shell_text(text)}"
        parts.append(mask_environment(word))  # before quotes are added, which may divide a value
    return shlex.join(parts)


def _mask_shell_text(text: str) -> str:
    """Mask secrets in a shell command, both `NAME=value` and `--name value`.

    Words with blanks, such as the TEXT of `sh -c TEXT`, are masked as separate commands.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return redact(text)
    masked_words = []
    for word, masked in zip(words, mask_words(words), strict=True):
        is_nested = word == masked and BLANK.search(word)
        masked_words.append(_mask_shell_text(word) if is_nested else masked)
    if shlex.join(words) == text:
        return redact(shlex.join(masked_words))
    # Text that a user has written keeps its own quotes, pipes and variables.
    for word, masked in zip(words, masked_words, strict=True):
        if word != masked:
            text = text.replace(shlex.quote(word), masked).replace(word, masked)
    return redact(text)


def mask_environment(text: str) -> str:
    """Mask the values of this process's secret environment variables wherever they occur."""
    for name, value in os.environ.items():
        if name in WORKING_FOLDERS:
            continue
        if is_secret(name) and len(value) >= MIN_SECRET:
            text = text.replace(value, MASK)
    return text


def summarize_output(output: str) -> str:
    """Return the reason in gcloud's output on one line: its error, or else its last line.

    Returns "" if there is nothing but reports of progress.
    """
    _, mark, error = output.rpartition("ERROR: ")
    text = re.sub(r"^\(gcloud[\w.\-]*\)\s*", "", error) if mark else ""
    message = re.search(r"\"message\": (\"(?:[^\"\\]|\\.)*\")", text)
    if message:
        with suppress(ValueError):  # not JSON after all
            text = json.loads(message[1], strict=False)
    lines = [line.strip() for line in (text or output).splitlines()]
    lines = [line for line in lines if line and not PROGRESS.match(line)]
    reason = " ".join(lines) if mark else "".join(lines[-1:])
    return f"{reason[:LONGEST_REASON]} ..." if len(reason) > LONGEST_REASON else reason
