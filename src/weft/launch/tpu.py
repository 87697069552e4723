"""`weft launch tpu`: make a TPU pod, install weft on its hosts, and start one run on all of them.

Every step is a gcloud command of `weft.launch.gcloud`. What happens on the hosts is in
`weft.launch.tpu_host`, which these commands call over ssh. All functions raise `ConfigError` if a
command fails or a host does not answer.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.extras import find_sources
from weft.launch.gcloud import (
    CAPACITY,
    ENDED_LINE,
    PYTHON,
    TpuPod,
    mask_environment,
    summarize_output,
)
from weft.launch.tpu_host import ENVIRONMENT, FOLDER, HostReport, read_environment
from weft.redaction import mask_words

ALL = "all"
ARCHIVE = "weft-tpu-source.tar.gz"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
PYTHON_VERSION = "3.12"  # of the hosts' environment; their own Python may be too old for weft
LONGEST_WAIT = 600.0  # seconds between two attempts
# commands that may follow `start ... --`
RUN_COMMANDS = ("quickstart", "start", "easylm")
REPORT_LINE = re.compile(r"^worker ([^\s:]+): (.*)$", re.MULTILINE)
FAILED_WORKER = re.compile(
    r"Command execution on worker (\d+) failed with (?:exit status|return code) (\d+)"
)
NOT_INSTALLED = re.compile(
    r"no module named '?weft|(?:command not found|no such file or directory)$"
    r"|(?:exit status|return code) 127",
    re.IGNORECASE | re.MULTILINE,
)
INSTALLING = "install weft"

# -- the pod itself


@dataclass(frozen=True)
class RetryPlan:
    """Number of times `create` tries again without capacity, and seconds before the first retry.

    The wait doubles after each attempt, up to `LONGEST_WAIT`.
    """

    count: int = 0
    wait_s: float = 30.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError(f"--retry {self.count}: must be at least 0, the number of retries")
        if not 0 <= self.wait_s < float("inf"):
            raise ConfigError(
                f"--retry-wait {self.wait_s}: must be a number of seconds, such as 30"
            )

    def list_waits(self) -> list[float]:
        """Return the seconds to wait before each retry."""
        waits = []
        wait = self.wait_s
        for _ in range(self.count):
            waits.append(min(wait, LONGEST_WAIT))
            wait = min(2 * wait, LONGEST_WAIT)
        return waits


def create(
    pod: TpuPod,
    accelerator_type: str,
    version: str,
    retry: RetryPlan,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Create the pod; if the zone has no capacity, try again as `retry` says.

    Returns a message for the user. Every other failure ends the attempts at once.
    """
    words = pod.build_command(
        "create",
        pod.name,
        f"--accelerator-type={accelerator_type}",
        f"--version={version}",
        "--quiet",
    )
    waits = retry.list_waits()
    for attempt, wait in enumerate([*waits, None], 1):
        done = pod.run(words)
        if pod.print_only:
            return ""
        if done.returncode == 0:
            return f"created {pod.name}; install weft on it: weft launch tpu install {pod.flags}"
        kind, _ = pod.explain_failure(done.stderr)
        if kind != CAPACITY or wait is None:
            break
        print(
            f"attempt {attempt} of {len(waits) + 1}: no capacity; next attempt in {wait:g} s",
            flush=True,
        )
        sleep(wait)
    times = f" in {attempt} attempts" if attempt > 1 else ""
    raise pod.build_error(f"create it{times}", done.stderr)


def delete(pod: TpuPod) -> str:
    """Delete the pod and all files on its hosts; the caller has asked for confirmation."""
    pod.run_checked(pod.build_command("delete", pod.name, "--quiet"), "delete it")
    return "" if pod.print_only else f"deleted {pod.name}"


def open_ssh(pod: TpuPod, worker: str, command: str | None) -> int:
    """Open a shell on one host, or run a shell command on one or all, and return the exit code."""
    if command is not None:
        words = pod.build_ssh(worker, command)
    elif worker == ALL:
        raise ConfigError(
            "--worker all: a shell can be opened on one host only; add --command TEXT"
        )
    else:
        words = pod.build_command("ssh", pod.name, f"--worker={worker}")
    code, output = pod.run_interactive(words)
    failed_workers = FAILED_WORKER.findall(output)
    if failed_workers:
        listed = ", ".join(f"{number} (exit code {status})" for number, status in failed_workers)
        raise ConfigError(f"pod {pod.name}: the command failed on worker {listed}")
    if code and "ERROR: (gcloud" in output:
        raise pod.build_error("run ssh", output)
    return code


# -- commands on the hosts


@dataclass(frozen=True)
class PodStatus:
    """State of a pod, such as READY, its type, and its number of hosts (None: only printed)."""

    state: str
    accelerator_type: str
    hosts: int | None


def describe(pod: TpuPod) -> PodStatus:
    """Return the state of a pod; raise `ConfigError` unless it is ready for ssh."""
    text = pod.run_checked(
        pod.build_command("describe", pod.name, "--format=json", "--quiet"), "describe it"
    )
    if pod.print_only:
        return PodStatus("", "", None)
    try:
        node = json.loads(text)
        state = str(node.get("state", "unknown"))
        hosts = len(node.get("networkEndpoints", [])) or 1
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(
            f"pod {pod.name}: gcloud describe --format=json did not print a mapping: "
            f"{summarize_output(text)}"
        ) from None
    if state != "READY":
        raise ConfigError(
            f"pod {pod.name} is {state} and not READY; wait while it is CREATING, or delete and "
            "create it"
        )
    return PodStatus(state, str(node.get("acceleratorType", "TPU")), hosts)


def call_hosts(
    pod: TpuPod, status: PodStatus, worker: str, command: str, purpose: str
) -> list[HostReport]:
    """Run a command of `weft.launch.tpu_host` on one host or on all, and return their reports.

    The reports are sorted by worker. Raises `ConfigError` if a host does not report: gcloud's exit
    code alone does not say so, since not all of its versions set it if one of several hosts fails.
    """
    expected = _list_workers(pod, status, worker)
    done = pod.run(pod.build_ssh(worker, command))
    if pod.print_only:
        return []
    reports = parse_reports(done.stdout)
    if len(reports) < len(expected):
        silent = set(expected) - {report.worker for report in reports}
        raise _build_silence_error(pod, silent, done.stderr or done.stdout, purpose)
    return reports


def _list_workers(pod: TpuPod, status: PodStatus, worker: str) -> list[str]:
    """Return the numbers of the hosts that --worker names; none if commands are only printed."""
    if status.hosts is None:
        return []
    if worker == ALL:
        return [str(number) for number in range(status.hosts)]
    if int(worker) >= status.hosts:
        raise ConfigError(f"--worker {worker}: pod {pod.name} has workers 0 to {status.hosts - 1}")
    return [worker]


def _build_silence_error(
    pod: TpuPod, silent: Collection[str], output: str, purpose: str
) -> ConfigError:
    """Return the error for hosts that have not reported, with gcloud's `output` about them."""
    listed = f"worker {', '.join(sorted(silent, key=int))} of pod {pod.name}"
    if purpose != INSTALLING and NOT_INSTALLED.search(output):
        return ConfigError(
            f"{listed}: cannot {purpose}: weft is not installed there "
            f"({mask_environment(summarize_output(output))}); run weft launch tpu install "
            f"{pod.flags}"
        )
    return pod.build_error(purpose, output, listed)


def run_command(pod: TpuPod, worker: str, words: Sequence[str]) -> int:
    """Run a command on one host or on all, in the foreground, and return its exit code.

    Output comes as it is written; with several hosts, each line begins with the host's number. If
    the command fails, the exit code is that of the host on which it failed first.
    """
    if not words:
        raise ConfigError("run: nothing follows --; name a program, such as -- weft --version")
    if any("\0" in word for word in words):
        raise ConfigError("run: a word of the command contains a null character; remove it")
    status = describe(pod)
    expected = _list_workers(pod, status, worker)
    marks = worker == ALL and status.hosts != 1
    options = [*(["--mark"] * marks), *(["--jax"] * (worker == ALL))]
    command = pod.build_host_command("run", *options, "--", *words)
    _, output = pod.run_interactive(pod.build_ssh(worker, command))
    if pod.print_only:
        return 0
    codes = {number: int(code) for number, code in ENDED_LINE.findall(output)}  # in order of time
    failed = {number: code for number, code in codes.items() if code}
    if failed and marks:
        listed = ", ".join(f"{number} (exit code {code})" for number, code in failed.items())
        print(f"pod {pod.name}: the command failed on worker {listed}", file=sys.stderr)
    if len(codes) < len(expected):
        rest = ENDED_LINE.sub("", output)
        raise _build_silence_error(pod, set(expected) - set(codes), rest, "run the command")
    return next(iter(failed.values()), 0)


def parse_reports(text: str) -> list[HostReport]:
    """Return the reports in the output of hosts, sorted by worker; other lines are skipped."""
    reports = {}
    for worker, rest in REPORT_LINE.findall(text):
        try:
            reports[worker] = HostReport(**json.loads(rest))
        except (ValueError, TypeError):  # a line of the login shell
            continue
    return sorted(reports.values(), key=lambda report: _sort_key(report.worker))


def _sort_key(worker: str) -> tuple[int, str]:
    return (int(worker), "") if worker.isdecimal() else (sys.maxsize, worker)


def raise_problems(pod: TpuPod, reports: Sequence[HostReport], ending: str = "") -> None:
    """Raise `ConfigError` if hosts report problems; hosts with the same problem share a line."""
    workers: dict[str, list[str]] = {}
    for report in reports:
        if report.problem:
            workers.setdefault(report.problem, []).append(report.worker)
    if not workers:
        return
    parts = []
    for problem, numbers in workers.items():
        parts.append(f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {problem}")
    raise ConfigError(f"pod {pod.name}: {'; '.join(parts)}{f'; {ending}' if ending else ''}")


def print_reports(reports: Sequence[HostReport]) -> None:
    """Print a line for each host."""
    for report in reports:
        print(f"worker {report.worker} ({report.host}): {report.problem or report.text}")


def install(pod: TpuPod, worker: str, source: str | None, extras: str = "") -> str:
    """Install weft[jax] and jax[tpu] into a separate environment on each host.

    `extras` names other extras of weft, such as "wandb,tensorboard". Without `source`, the sources
    of this weft are copied to the hosts. `source` is a requirement such as `git+https://...` or
    `weft==0.1.0`, which the hosts fetch themselves. Returns a message for the user.
    """
    names = ",".join(dict.fromkeys(["jax", *filter(None, extras.replace(" ", "").split(","))]))
    if not re.fullmatch(r"[a-z0-9\-,]+", names):
        raise ConfigError(f"--extras {extras}: must be names of weft's extras, such as wandb,ray")
    if source is not None:
        requirement = build_requirement(source, names)
        status = describe(pod)
    else:
        sources = find_sources()
        if sources is None:
            raise ConfigError(
                "install: this weft was not installed from its sources, so there is nothing to "
                "copy; name a requirement with --source, such as git+https://..."
            )
        requirement = f"./{FOLDER}/source[{names}]"
        status = describe(pod)
        _copy_sources(pod, worker, sources)
    reports = call_hosts(
        pod, status, worker, _build_install_script(pod, requirement, source is None), INSTALLING
    )
    raise_problems(pod, reports)
    if pod.print_only:
        return ""
    hosts = f"{len(reports)} host{'' if len(reports) == 1 else 's'}"
    return f"installed weft on {hosts}; check the devices: weft launch tpu check {pod.flags}"


def _copy_sources(pod: TpuPod, worker: str, sources: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / ARCHIVE
        if pod.print_only:
            archive = Path(ARCHIVE)
            present = [name for name in SOURCES if (sources / name).exists()]
            print(shlex.join(["tar", "-czf", ARCHIVE, "-C", str(sources), *present]))
        else:
            write_archive(sources, archive)
        pod.run_checked(
            pod.build_command(
                "scp", str(archive), f"{pod.name}:{ARCHIVE}", f"--worker={worker}", "--quiet"
            ),
            "copy weft's sources",
        )


def write_archive(sources: Path, archive: Path) -> None:
    """Write what pip needs of weft's sources to a .tar.gz file."""

    def skip_compiled(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        folder = Path(member.name).name
        return None if folder == "__pycache__" or folder.endswith(".egg-info") else member

    with tarfile.open(archive, "w:gz") as file:
        for name in SOURCES:
            if (sources / name).exists():
                file.add(sources / name, name, filter=skip_compiled)


def build_requirement(source: str, extras: str) -> str:
    """Return the requirement `weft[EXTRAS]` from an address, or with a version as in `==0.1.0`."""
    if mask_words([source]) != [source]:
        raise ConfigError(
            "--source: contains a password or a token, which other users of the hosts could see; "
            "store it with git's credential helper on the hosts, or leave --source out to copy the "
            "sources of this machine"
        )
    if "://" in source:
        return f"weft[{extras}] @ {source}"
    match = re.fullmatch(r"weft\s*((?:[=<>!~]=?=?\s*[\w.*+!]+\s*,?\s*)*)", source)
    if match is None:
        raise ConfigError(
            f"--source {source}: must be an address such as git+https://... or a version such as "
            "weft==0.1.0"
        )
    return f"weft[{extras}]{match[1]}"


def _build_install_script(pod: TpuPod, requirement: str, from_archive: bool) -> str:
    """Return the shell command that installs weft, and ends with a host's report.

    uv brings a Python that is new enough, and torch without CUDA.
    """
    source = f"{FOLDER}/source"
    steps = [f"mkdir -p {source}"]
    if from_archive:
        steps = [
            f"rm -rf {source}",
            f"mkdir -p {source}",
            f"tar -xzf {ARCHIVE} -C {source}",
            f"rm {ARCHIVE}",
        ]
    pip = "python3 -m pip install --quiet --user"
    steps += [
        f"{{ python3 -m uv --version || {pip} uv || {pip} --break-system-packages uv; }}",
        f"python3 -m uv venv --quiet --allow-existing --python {PYTHON_VERSION} {FOLDER}/venv",
        f"python3 -m uv pip install --quiet --python {PYTHON} --torch-backend cpu --upgrade "
        f"--reinstall-package weft {shlex.quote(requirement)} 'jax[tpu]'",
        pod.build_host_command("status"),
    ]
    return " && ".join(steps)


def check(pod: TpuPod, worker: str, timeout_s: float) -> str:
    """Show the devices of each host, and raise `ConfigError` naming the hosts that differ.

    First compares device files and versions and looks for processes that hold the devices. If all
    hosts agree, JAX opens the devices on all of them at once; on one host of several it cannot.
    Returns a message for the user.
    """
    status = describe(pod)
    everywhere = worker == ALL or status.hosts == 1
    reports = call_hosts(pod, status, worker, pod.build_host_command("check"), "check it")
    if not pod.print_only:
        _raise_unless_alike(pod, reports)
    if everywhere:
        command = pod.build_host_command("check", "--jax", "--timeout", f"{timeout_s:g}")
        reports = call_hosts(pod, status, worker, command, "open the devices")
    if pod.print_only:
        return ""
    _raise_unless_alike(pod, reports)
    print_reports(reports)
    if not everywhere:
        return (
            "JAX was not asked: it opens the devices of a pod on all hosts together (--worker all)"
        )
    count = len(reports)
    return (
        f"pod {pod.name}: {status.accelerator_type}, {count} host{'' if count == 1 else 's'} with "
        f"the same devices and versions"
    )


def _raise_unless_alike(pod: TpuPod, reports: Sequence[HostReport]) -> None:
    differences = find_differences(reports)
    if not differences and not any(report.problem for report in reports):
        return
    print_reports(reports)
    for report in reports:
        notes = [*filter(None, [report.problem]), *differences.get(report.worker, ())]
        report.problem = ", ".join(notes)
    raise_problems(pod, reports)


def find_differences(reports: Sequence[HostReport]) -> Mapping[str, list[str]]:
    """Return the facts in which a host differs from most others, by worker.

    If no value has a majority, all hosts are listed with their own. Hosts with a problem are left
    out, since their facts are incomplete.
    """
    healthy = [report for report in reports if not report.problem]
    differences: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for report in healthy for name in report.facts):
        values = [report.facts.get(name) for report in healthy]
        usual, count = Counter(values).most_common(1)[0]
        for report, value in zip(healthy, values, strict=True):
            if count == len(healthy):
                continue
            if 2 * count <= len(healthy):
                differences.setdefault(report.worker, []).append(f"{name} {value}")
            elif value != usual:
                differences.setdefault(report.worker, []).append(
                    f"{name} {value}, the others have {usual}"
                )
    return differences


def clean(pod: TpuPod, worker: str) -> str:
    """Remove libtpu's lock files and logs in the hosts' temporary folder, unless they are in use."""
    reports = call_hosts(pod, describe(pod), worker, pod.build_host_command("clean"), "clean it")
    print_reports(reports)
    raise_problems(pod, reports)
    return ""


@dataclass(frozen=True)
class PodRun:
    """Command to run on all hosts: the words after `weft`, and how the hosts are set up for it."""

    words: Sequence[str]
    libtpu: str | None = None
    env_file: Path | None = None
    log_name: str = field(default_factory=lambda: time.strftime("%Y-%m-%d-%H%M%S.log"))


def start(pod: TpuPod, run: PodRun) -> str:
    """Start a command in the background on all hosts, with one log per host.

    Nothing starts if a run is on any of the hosts. Returns a message for the user.
    """
    words = list(run.words[1:] if run.words[:1] == ["weft"] else run.words)
    _check_words(words)
    if run.env_file is not None:
        _check_environment(run.env_file)
    status = describe(pod)
    # All hosts are asked before any of them starts.
    reports = call_hosts(pod, status, ALL, pod.build_host_command("status"), "start a run")
    for report in reports:
        if report.facts.get("running"):
            report.problem = f"{report.facts['running']} runs already"
    raise_problems(
        pod, reports, f"end it with weft launch tpu stop {pod.flags}; nothing was started"
    )
    if run.env_file is not None:
        target = f"{pod.name}:{FOLDER}/{ENVIRONMENT}"
        pod.run_checked(
            pod.build_command("scp", str(run.env_file), target, "--worker=all", "--quiet"),
            "copy --env-file",
        )
    options = ["--log", run.log_name]
    if run.libtpu is not None:
        options += ["--libtpu", run.libtpu]
    stop_hint = f"weft launch tpu stop {pod.flags}"
    command = pod.build_host_command("start", *options, "--", *words)
    try:
        reports = call_hosts(pod, status, ALL, command, "start the run")
    except ConfigError as error:
        raise ConfigError(f"{error}; other hosts may have started and wait: {stop_hint}") from None
    if any(report.problem for report in reports):
        print_reports([report for report in reports if not report.problem])
    raise_problems(pod, reports, f"end the other hosts' processes with {stop_hint}")
    print_reports(reports)
    if pod.print_only:
        return ""
    return (
        f"started on {len(reports)} host{'' if len(reports) == 1 else 's'}; weft launch tpu logs "
        f"{pod.flags} --follow shows what it does, {stop_hint} ends it"
    )


def _check_words(words: Sequence[str]) -> None:
    if not words or words[0] not in RUN_COMMANDS:
        raise ConfigError(
            f"start: {shlex.join(words[:1]) or 'nothing'} follows --; it must be a weft command "
            f"that trains ({', '.join(RUN_COMMANDS)}), such as -- quickstart sft experiment_name=e "
            "trial_name=t ..."
        )
    masked_words = mask_words(words)
    text = "\n".join(words)
    if masked_words != list(words) or mask_environment(text) != text:
        raise ConfigError(
            f"start: the command would show a secret to all users of the hosts: "
            f"{mask_environment(shlex.join(masked_words))}; write ${{oc.env:NAME}} as its value "
            "and put NAME=VALUE into the file of --env-file"
        )
    if any("\0" in word for word in words):
        raise ConfigError("start: a word of the command contains a null character; remove it")


def _check_environment(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"--env-file {path}: there is no such file")
    try:
        read_environment(path)
    except ValueError as error:
        raise ConfigError(f"--env-file {error}") from None


def show_logs(pod: TpuPod, worker: str, lines: int, *, follow: bool) -> str:
    """Print the last lines of the log of each host, or with `follow` new lines of all as they come.

    Without `follow`, the lines of each host are printed together.
    """
    command = pod.build_host_command("logs", "--lines", str(lines), *(["--follow"] * follow))
    words = pod.build_ssh(worker, command)
    if follow:
        code, output = pod.run_interactive(words)
        if code or FAILED_WORKER.search(output):
            raise pod.build_error("follow the logs", output)
        return ""
    done = pod.run(words)
    if done.returncode and not REPORT_LINE.search(done.stdout):
        raise pod.build_error("read the logs", done.stderr)
    texts: dict[str, list[str]] = {}
    for number, line in REPORT_LINE.findall(done.stdout):
        texts.setdefault(number, []).append(line)
    for number in sorted(texts, key=_sort_key):
        print("\n".join([f"== worker {number}", *texts[number]]))
    if done.returncode or FAILED_WORKER.search(done.stderr):
        raise pod.build_error("read all logs", done.stderr)
    return ""


def stop(pod: TpuPod, worker: str, timeout_s: float, *, now: bool) -> str:
    """Stop this run's processes on the hosts, and show what still holds the devices.

    The run finishes its step and writes a recovery point; with `now` it is killed. Processes that
    `start` did not start are named and left alone.
    """
    options = ["--timeout", f"{timeout_s:g}", *(["--now"] * now)]
    command = pod.build_host_command("stop", *options)
    reports = call_hosts(pod, describe(pod), worker, command, "stop the run")
    for report in reports:
        print(f"worker {report.worker} ({report.host}): {report.text}")
    raise_problems(pod, reports)
    return "" if pod.print_only else "nothing holds the devices"
