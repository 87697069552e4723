"""Submit an evaluation job: upload its model, write its job file, and run the system's client.

Each step prints what it does, is recorded when it has ended, and is skipped by the next run. A
client that is not installed is not run; its command is printed instead.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError, build_unknown_name_error
from weft.launch.eval_job import CLIENTS, UNKNOWN_DATASET, EvalJob
from weft.launch.gcloud import format_command, mask_environment
from weft.launch.job_steps import StepRecord, describe_files
from weft.launch.job_template import SYSTEMS, JobTemplate
from weft.launch.slurm import QUEUE_SECONDS
from weft.reading import make_folder
from weft.redaction import redact
from weft.writing import write

UPLOAD = "upload"
REASON_LINES = 3  # last lines of a client's output in a message
REASON_CHARACTERS = 500
TRACEBACK = "Traceback (most recent call last):"  # its last line is the reason
MAX_FILES = 1000
# Beaker prints "Uploading NAME to ID", and older versions "Uploading NAME (ID)...".
UPLOADED = re.compile(r"Uploading \S+ (?:to )?\(?([A-Za-z0-9][\w/.-]*\w)")
# system -> the id of a job in the output of its client
JOB_IDS = {
    "slurm": re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE),
    "ray": re.compile(r"Job '([^']+)' submitted"),
    "beaker": re.compile(r"/ex/(\w+)|Experiment (\S+) submitted"),
}


@dataclass(frozen=True)
class ClientResult:
    """Exit code and output (both streams) of a client."""

    code: int
    output: str


@dataclass(frozen=True)
class JobFile:
    """Path and text of a job file; `exists` if there is a file with this text already."""

    path: Path
    text: str
    exists: bool

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass
class JobSubmission:
    """A job, its template and the record of its steps.

    With `resubmit`, a submitted job is submitted again. `identity` identifies the contents of a
    model that may not exist yet; if it is None, sizes and times of the model's files identify them.
    """

    job: EvalJob
    template: JobTemplate
    record: StepRecord
    resubmit: bool = False
    identity: str | None = None

    def check(self) -> None:
        """Raise `ConfigError` if the job file cannot be made, or would contain a secret."""
        self._render(self.job)

    def print_plan(self) -> None:
        """Print the job file and the commands of the steps that are left. Nothing is written."""
        job = self.job
        if job.needs_upload:
            dataset = self._find_dataset()
            if dataset is None:
                print(f"$ {format_command(self.build_upload())}")
            else:
                print(f"{UPLOAD}: finished, dataset {dataset}")
                job = job.with_dataset(dataset)
        file = self._choose_file(self._render(job))
        print(f"# {file.path}\n{file.text.rstrip()}")
        earlier = None if self.resubmit else self._describe_submission(file)
        print(earlier or f"$ {format_command(self.build_submit(file.path))}")

    def run(self) -> int:
        """Run the steps that are left, and return the exit code: that of a client that failed."""
        job = self.job
        installed = shutil.which(CLIENTS[job.system]) is not None
        if job.needs_upload:
            code, dataset = self._upload(installed)
            if code:
                return code
            if dataset is not None:
                job = job.with_dataset(dataset)
        return self._submit(job, installed)

    # -- the upload to Beaker

    def build_upload(self) -> list[str]:
        """Return the command that uploads the model to Beaker."""
        job = self.job
        words = ["beaker", "dataset", "create", job.place.text, "--name", job.model_name]
        return [*words, "--workspace", str(job.workspace)]

    def _list_upload_inputs(self) -> dict[str, object]:
        contents: object = self.identity
        if contents is None:
            contents = describe_files(Path(self.job.place.text))
        return {"name": self.job.model_name, "workspace": self.job.workspace, "model": contents}

    def _find_dataset(self) -> str | None:
        """Return the id of the dataset that has this model already, or None."""
        step = self.record.find_finished(UPLOAD, self._list_upload_inputs())
        return None if step is None else str(step.get("dataset"))

    def _upload(self, installed: bool) -> tuple[int, str | None]:
        """Upload the model. Returns (exit code, id of the dataset, None without a client)."""
        words = self.build_upload()
        dataset = self._find_dataset()
        if dataset is not None:
            print(f"{UPLOAD}: skipped, dataset {dataset} has this model")
            return 0, dataset
        if not installed:
            print(f"$ {format_command(words)}")
            return 0, None
        self.record.begin(UPLOAD, self._list_upload_inputs())
        result = run_client(words, live=True)
        if result.code:
            print_failure(
                words,
                result,
                f"the same command begins again with this step; if a dataset "
                f"{self.job.model_name} exists already, delete it, choose another --model_name, or "
                f"use it by --location ID",
            )
            return result.code, None
        match = UPLOADED.search(result.output)
        if match is None:
            print_failure(
                words,
                result,
                "its output names no dataset; find the id on Beaker and continue by --location ID",
            )
            return 1, None
        self.record.finish(UPLOAD, dataset=match[1])
        return 0, match[1]

    # -- the job

    def build_submit(self, file: Path) -> list[str]:
        """Return the command that submits a job file."""
        job = self.job
        path = str(file)
        if job.system == "slurm":
            return ["sbatch", "--parsable", path]
        if job.system == "beaker":
            return ["beaker", "experiment", "create", path, "--workspace", str(job.workspace)]
        words = ["ray", "job", "submit", "--no-wait"]
        words += [f"--submission-id=weft-eval-{file.name.removesuffix('.ray.sh')}"]
        words += [f"--address={address}" for address in job.clusters if address != "auto"]
        words += [f"--entrypoint-num-gpus={job.num_gpus}"] if job.num_gpus else []
        return [*words, "--", "bash", str(file.absolute())]

    def _submit(self, job: EvalJob, installed: bool) -> int:
        file = self._choose_file(self._render(job))
        earlier = self._describe_submission(file)
        if earlier is not None and not self.resubmit:
            print(earlier)
            return 0
        if file.exists:
            print(f"job file: skipped, {file.path} has this job")
        else:
            make_folder(file.path.parent, f"--output {file.path.parent.parent}", ConfigError)
            write(file.path, file.text)
            if file.path.suffix == ".sh":
                file.path.chmod(0o755)
            print(f"wrote {file.path}")
        words = self.build_submit(file.path)
        if not installed:
            self._print_manual(file, words)
            return 0
        result = run_client(words)
        if result.code:
            print_failure(words, result, f"the job file is {file.path}")
            return result.code
        match = JOB_IDS[job.system].search(result.output)
        number = next(filter(None, match.groups()), "") if match else ""
        self.record.add_submission(file.path, file.digest, number)
        print(f"submitted {number or file.path}; {describe_results(job, number)}")
        return 0

    def _print_manual(self, file: JobFile, words: Sequence[str]) -> None:
        """Print the command that submits a job file, on a machine without the client."""
        print(f"$ {format_command(words)}")
        if UNKNOWN_DATASET in file.text:
            print(
                f"write the id that the first command prints in place of {UNKNOWN_DATASET} in "
                f"{file.path}"
            )
        print(
            f"not submitted: this machine has no {words[0]}; run the commands above where there is "
            "one"
        )

    def _render(self, job: EvalJob) -> str:
        """Return the text of the job file. Raises `ConfigError` for a secret in it."""
        text = self.template.render(job.build_values())
        lines = zip(text.splitlines(), mask_environment(text).splitlines(), strict=True)
        for number, (line, masked) in enumerate(lines, 1):
            if line != masked:
                raise ConfigError(
                    f"{self.template.label}: line {number} of the job file would contain the value "
                    f"of a secret variable; name it by --secret NAME instead"
                )
        return text

    def _choose_file(self, text: str) -> JobFile:
        """Return the job file for a text: the one that has it, or the first free name.

        A file with another text is never overwritten. With `resubmit`, neither is a file that was
        submitted.
        """
        stem = self.job.model_name
        for number in range(1, MAX_FILES):
            ending = f"{self.job.system}.{SYSTEMS[self.job.system]}"
            name = f"{stem}.{ending}" if number == 1 else f"{stem}-{number}.{ending}"
            file = JobFile(self.job.folder / name, text, False)
            if not file.path.exists():
                return file
            same = file.path.is_file() and file.path.read_bytes() == text.encode()
            submitted = self.record.find_submission(file.path, file.digest) is not None
            if same and not (self.resubmit and submitted):
                return JobFile(file.path, text, True)
        raise ConfigError(f"{self.job.folder}: has {MAX_FILES} job files; remove old ones")

    def _describe_submission(self, file: JobFile) -> str | None:
        """Return the message about an earlier submission of a job file, or None."""
        earlier = self.record.find_submission(file.path, file.digest) if file.exists else None
        if earlier is None:
            return None
        job = f"job {earlier.get('job')}" if earlier.get("job") else "the job"
        return (
            f"submit: skipped, {job} was submitted at {earlier.get('time')} UTC by {file.path}; "
            f"--resubmit submits it again"
        )


def describe_results(job: EvalJob, number: str) -> str:
    """Return where the results of a submitted job will be, and how to look at it."""
    if job.system == "beaker":
        return f"beaker experiment get {number or 'ID'} shows its result dataset"
    results = job.folder / "results"
    if job.system == "slurm":
        log = job.folder / f"{job.model_name}-{number or '*'}.log"
        return f"its log is {log}; weft eval table {results} shows its results"
    return f"ray job logs {number or 'ID'} shows its log, weft eval table {results} its results"


def check_partitions(job: EvalJob) -> None:
    """Raise `ConfigError` for a partition that sinfo does not list; without sinfo, do nothing."""
    if job.system != "slurm" or not job.clusters or shutil.which("sinfo") is None:
        return
    try:
        result = subprocess.run(
            ["sinfo", "--noheader", "--format=%R"],
            capture_output=True,
            text=True,
            check=False,
            timeout=QUEUE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return
    known = result.stdout.split()
    for name in job.clusters if known and result.returncode == 0 else ():
        if name not in (*known, "all"):
            raise build_unknown_name_error("--cluster", name, known)


def run_client(words: Sequence[str], *, live: bool = False) -> ClientResult:
    """Print a command, run it, and show its output unless it fails.

    With `live`, the output is shown as it comes, for a command that takes long.
    """
    print(f"$ {format_command(words)}", flush=True)
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if live:
            print(mask_environment(line), end="", flush=True)
    code = process.wait()
    if code == 0 and not live:
        print(mask_environment("".join(lines)), end="", flush=True)
    return ClientResult(code if code >= 0 else 128 - code, "".join(lines))


def print_failure(words: Sequence[str], result: ClientResult, fix: str) -> None:
    """Print the last lines of a failed client's output, as the reason, to standard error."""
    lines = [line.strip() for line in result.output.splitlines() if line.strip()]
    most = 1 if TRACEBACK in lines else REASON_LINES
    reason = "; ".join(lines[-most:])[-REASON_CHARACTERS:] or "no reason given"
    program = " ".join(words[: 1 if words[0] == "sbatch" else 3])
    message = f"error: {program} failed with exit code {result.code}: {reason}; {fix}"
    print(mask_environment(redact(message)), file=sys.stderr)
