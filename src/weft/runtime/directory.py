"""Directory of a run: its lock, configuration, status and processes, and atomic writing of its files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import yaml

from weft import __version__, writing
from weft.errors import ConfigError, RunError
from weft.experiment import Control
from weft.observe.jsonl import read_json
from weft.observe.run_files import RECORD, RunRecord, RunStart
from weft.reading import explain_read_errors, make_folder, read_text
from weft.redaction import mask_values, mask_words
from weft.storage.bucket_lock import LOCK
from weft.storage.buckets import find_bucket_problem
from weft.storage.copies import find_runs_folder
from weft.storage.views import STAMPS
from weft.writing import TEMPORARY, open_file, rename, sync

REPLACED = ".old"
CHUNK = 1 << 20
ENDING_SECONDS = 5.0


def sync_tree(directory: Path) -> None:
    """Flush `directory` and every file and directory below it to disk."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Raises `RunError` if the disk is full or fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with explain_disk_errors(f"{path} was not written"):
        writing.write(path, text)


def write_directory(target: Path, fill: Callable[[Path], None]) -> Path:
    """Create the directory `target` atomically; `fill` writes its contents.

    `fill` receives the path of an empty directory with a temporary name. An existing `target` is
    replaced once the new directory is complete. If anything fails, the temporary directory is
    removed and the old `target` remains. Raises `RunError` if the disk is full or fails.
    """
    temporary = target.with_name(target.name + TEMPORARY)
    remove(temporary)
    try:
        with explain_disk_errors(f"{target} was not saved; what was saved before it is intact"):
            temporary.mkdir(parents=True)
            fill(temporary)
            sync_tree(temporary)
    except BaseException:
        # If one device died, others may still be writing into it. An error here must not hide the
        # first one; `clean_up` removes the rest.
        with suppress(OSError):
            remove(temporary)
        raise
    replaced = target.with_name(target.name + REPLACED)
    if target.exists():
        rename(target, replaced)
    rename(temporary, target)
    remove(replaced)
    return target


def clean_up(folder: Path) -> None:
    """Remove what a killed process left behind while it was writing in `folder`.

    Temporary directories are removed, and so are old versions of directories that were replaced. If
    the replacement is missing, the old version is restored instead.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.name.endswith(TEMPORARY):
            remove(path)
        elif path.name.endswith(REPLACED):
            successor = path.with_name(path.name.removesuffix(REPLACED))
            if successor.exists():
                remove(path)
            else:
                rename(path, successor)


def remove(path: Path) -> None:
    """Remove a file or a directory, if it exists.

    The removal is retried for up to `ENDING_SECONDS` seconds, because a process that is being
    killed may still write into the directory.
    """
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    deadline = time.monotonic() + ENDING_SECONDS
    while path.is_dir():
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def compute_checksums(directory: Path) -> dict[str, str]:
    """Return the BLAKE2b hash of every file below `directory`, keyed by relative path."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return {str(p.relative_to(directory)): compute_checksum(p) for p in files}


def compute_checksum(path: Path) -> str:
    """Return the BLAKE2b hash of a file."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def explain_disk_errors(consequence: str) -> Iterator[None]:
    """Convert an `OSError` in the block into a `RunError` that begins with `consequence`.

    `consequence` says what the error means for the run, such as "the file was not written".
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full:
            reason = "the disk is full"
        else:
            reason = f"{error.strerror or error} ({error.filename or 'no file named'})"
        if full:
            fix = "; free some space and start the run again: it resumes from there"
        else:
            fix = ""
        raise RunError(f"{consequence}: {reason}{fix}") from error


Status = Literal["running", "stopped", "failed", "finished"]
LOGS = "logs"  # folder with the logs of the device processes
CONFIG = "config.yaml"
STATUS = "status.json"
COPIES = "copies.json"  # versions of the models in buckets that the run uses, by URL
MAX_DIFFERENCES = 3  # number of differing options that an error message lists
STEP = re.compile(r"step(\d+)")

# Entries that launchers write into a run's directory before the run starts.
LAUNCHERS = ("slurm", "logs")

# Options that may differ between a run and its continuation: they change the output, the files
# kept or the devices used, never the results.
FREE = (
    "mode",
    "env",
    "launch",
    "slurm",
    "recover_mode",
    "recover_freq_steps",
    "resume_from",
    "progress",
    "profile_steps",
    "log_freq_steps",
    "eval_at_start",
    "eval_prompts",
    "eval_prompts_max_new_tokens",
    "eval_suite",
    "logger",
    "fileroot",
    "imports",
    "ray_address",
    "n_nodes",
    "n_gpus_per_node",
)


@dataclass(frozen=True)
class RunDirectory:
    """Directory of a run, which gives access to the files in it.

    Its path is `{fileroot}/{experiment_name}/{trial_name}`.
    """

    path: Path

    @classmethod
    def from_control(cls, control: Control) -> RunDirectory:
        """Return the directory of the run with the options `control`.

        For a run in a bucket, this is its working copy on this machine (`runtime/mirror.py`).
        """
        problem = find_bucket_problem(control.fileroot)
        if problem is not None:
            raise ConfigError(f"fileroot={control.fileroot}: {problem}")
        root = find_runs_folder(control.fileroot)
        return cls(root / control.experiment_name / control.trial_name)

    @property
    def checkpoints_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def recovery_folder(self) -> Path:
        return self.path / "recover"

    def has_run(self) -> bool:
        """Return whether the directory contains a run, indicated by a file `config.yaml`."""
        return (self.path / CONFIG).is_file()

    def read_status(self) -> Status | None:
        """Return the recorded status of the run, or None if the directory has no run.

        The status of a run that was killed before it could record its end is "running".
        """
        status = read_json(self.path / STATUS).get("status")
        if status in get_args(Status):
            return cast(Status, status)
        return "running" if self.has_run() else None

    def set_status(self, status: Status, step: int) -> None:
        """Write the status and the number of completed steps to `status.json`."""
        write_text(
            self.path / STATUS,
            json.dumps({"status": status, "step": step, "time": time.time()}) + "\n",
        )

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the run's options to `config.yaml`."""
        write_text(
            self.path / CONFIG, yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        )

    def read_config(self) -> dict[str, Any]:
        """Return the run's options from `config.yaml`.

        Raises `ConfigError` if the file cannot be read or has no options.
        """
        path = str(self.path / CONFIG)
        text = read_text(path, path, ConfigError)
        with explain_read_errors(path, ConfigError):
            config = yaml.safe_load(text)
        if not isinstance(config, dict):
            raise ConfigError(f"{path}: contains no options; choose another trial_name")
        return config

    def list_saved_steps(self, role: str) -> list[int]:
        """Return the steps of the role's complete checkpoints, in ascending order."""
        matches = (STEP.fullmatch(p.name) for p in (self.checkpoints_folder / role).glob("step*"))
        return sorted(int(match[1]) for match in matches if match)


def admit(
    directory: RunDirectory,
    control: Control,
    config: Mapping[str, Any],
    left_at_default: Collection[str] = (),
) -> bool:
    """Return True to resume the run in the directory, or False to start a new one.

    The decision depends on `recover_mode` and on the files in the directory. `left_at_default`
    lists the options that the user did not set. If one of them is missing from the run's
    `config.yaml`, it does not count as changed, because the file was written by a version of weft
    without this option.

    Raises `ConfigError` if the run can be neither resumed nor started: for example, because the
    configuration differs, the run is finished, or the directory has files that belong to no run.
    Nothing is changed on disk.
    """
    mode = control.recover_mode
    path = directory.path
    advice = "choose another trial_name, or remove that directory"
    # A new run needs a directory without foreign files.
    if not directory.has_run():
        names = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
        foreign = []
        for name in names:
            if name not in (LOCK, STAMPS, *LAUNCHERS) and not name.endswith(TEMPORARY):
                foreign.append(name)
        if foreign:
            raise ConfigError(
                f"{path} contains files that do not belong to a run ({', '.join(foreign[:5])}); "
                f"{advice}"
            )
        if mode == "resume" and control.resume_from is None:
            raise ConfigError(
                f"recover_mode=resume: there is no run in {path}; leave the option out to start one"
            )
        return False
    # An unfinished run is resumed with the same configuration, or with any by `resume_from`.
    if mode == "disabled":
        raise ConfigError(
            f"{path} contains a run already, and recover_mode=disabled does not resume it; {advice}"
        )
    if control.resume_from is not None:
        return True
    changed = list_differences(
        mask_values(directory.read_config()), mask_values(to_plain(config)), unset=left_at_default
    )
    if changed:
        more = f"; {len(changed) - MAX_DIFFERENCES} more" if len(changed) > MAX_DIFFERENCES else ""
        raise ConfigError(
            f"{path} contains a run with another configuration "
            f"({'; '.join(changed[:MAX_DIFFERENCES])}{more}); "
            f"{advice}, "
            f"or resume it with these options: resume_from={path}"
        )
    if directory.read_status() == "finished":
        raise ConfigError(f"{path} contains a finished run of this configuration; {advice}")
    return True


def to_plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as it would be read back from a YAML file."""
    return yaml.safe_load(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)) or {}


def list_differences(
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    prefix: str = "",
    *,
    unset: Collection[str] = (),
) -> list[str]:
    """Return one line for each option that differs, with its dotted name and both values.

    `one` and `other` are nested mappings of options, and `prefix` is put before option names. Two
    kinds of options are ignored: those in `FREE`, which may differ when a run is resumed, and those
    in `unset` that are missing from `one`.
    """
    differences: list[str] = []
    for key in dict.fromkeys([*one, *other]):
        if not prefix and key in FREE:
            continue
        a = one.get(key)
        b = other.get(key)
        name = f"{prefix}{key}"
        if isinstance(b, Mapping) and (isinstance(a, Mapping) or (key not in one and b)):
            differences += list_differences(a or {}, b, f"{name}.", unset=unset)
        elif key not in one and name in unset:
            continue
        elif a != b:
            differences.append(f"{name}: {_format_short(a)} there, {_format_short(b)} here")
    return differences


def _format_short(value: Any) -> str:
    """Return the value as it is written on the command line, shortened to 60 characters."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "set"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class RunLock:
    """File lock that keeps other processes from writing to a run's directory.

    The operating system releases the lock when the process ends, even if it is killed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path / LOCK
        self._file: IO[str] | None = None
        self._created_folders: list[Path] = []

    def take(self) -> None:
        """Acquire the lock, creating the run's directory if needed.

        Raises `ConfigError` naming the process that holds the lock, if there is one.
        """
        folders = [self._path.parent, *self._path.parent.parents]
        self._created_folders = [folder for folder in folders if not folder.exists()]
        make_folder(self._path.parent, f"fileroot: {self._path.parent}", ConfigError)
        while self._file is None:
            file = open_file(self._path, "a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = find_owner(self._path.parent)
                file.close()
                raise ConfigError(
                    f"{self._path.parent} is being written by process {holder or 'unknown'}; wait "
                    f"for it, stop it with "
                    "`weft stop`, or choose another trial_name"
                ) from None
            if self._path.exists() and os.path.samestat(os.fstat(file.fileno()), self._path.stat()):
                self._file = file
            else:
                file.close()  # another process removed the file between our opening and locking it
        self._file.truncate(0)
        self._file.write(
            json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()})
            + "\n"
        )
        self._file.flush()

    def release(self) -> None:
        """Release the lock and remove the directories created by `take` that are still empty."""
        if self._file is None:
            return
        self._path.unlink(missing_ok=True)
        self._file.close()
        self._file = None
        for folder in self._created_folders:
            if any(folder.iterdir()):
                break
            folder.rmdir()


def find_owner(run: Path) -> int | None:
    """Return the pid of the process that is writing to a run's directory.

    Returns None if the run's lock is free or its holder cannot be determined.
    """
    path = run / LOCK
    if not path.is_file():
        return None
    try:
        with path.open("r+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return int(read_json(path)["pid"])
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None


LIBRARIES = ("torch", "transformers")
GIT_SECONDS = 5.0


def record_process(
    run: Path,
    *,
    step: int,
    total_steps: int | None,
    hardware: str,
    forecast: str = "",
    chosen: Sequence[str] = (),
) -> None:
    """Add this process to the run's file `run.json`.

    `step` is the number of completed steps, `forecast` describes the basis of the predicted
    duration of a step, and `chosen` lists the options whose values weft chose. Secrets in the
    command are masked.
    """
    earlier = RunRecord.read(run)
    command = build_command(sys.argv, sys.orig_argv)
    start = RunStart(
        time=time.time(),
        step=step,
        command=mask_words(command),
        folder=str(Path.cwd()),
        host=socket.gethostname(),
        hardware=hardware,
        forecast=forecast,
        commit=read_commit(Path(__file__).resolve().parents[3]),
        versions=read_versions(),
    )
    record = replace(
        earlier,
        algorithm=parse_quickstart(command) or earlier.algorithm,
        total_steps=total_steps,
        chosen=list(chosen),
        starts=[*earlier.starts, start],
    )
    write_text(run / RECORD, json.dumps(record.to_plain(), indent=1, ensure_ascii=False) + "\n")


def build_command(words: Sequence[str], original: Sequence[str]) -> list[str]:
    """Return the command that starts this process again, beginning with `weft` or `python`.

    `words` is `sys.argv`, and `original` is `sys.orig_argv`. A program given by `python -c` is
    replaced by "...".
    """
    if words and Path(words[0]).name == "weft":
        return ["weft", *words[1:]]
    arguments = list(original[1:])
    if "-c" in arguments:  # leave out a program on the command line: it can be long
        return ["python", *arguments[: arguments.index("-c") + 1], "..."]
    return ["python", *arguments]


def parse_quickstart(command: Sequence[str]) -> str | None:
    """Return NAME if the command is `weft quickstart NAME`, otherwise None."""
    words = list(command)
    if words[:1] == ["weft"] and words[1:2] == ["quickstart"]:
        rest = words[2:]
    elif words[1:3] == ["-m", "weft.apps.quickstart"]:
        rest = words[3:]
    else:
        return None
    names = []
    while rest:
        word = rest.pop(0)
        if word in ("--import", "--config", "--config-dir", "--cfg"):
            rest = rest[1:]
        elif not word.startswith("-") and "=" not in word:
            names.append(word)
    return names[0] if names else None


def read_versions() -> dict[str, str]:
    """Return the versions of Python, weft, torch and transformers."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def read_commit(folder: Path) -> str:
    """Return the abbreviated git commit of the checkout at `folder`, or "" if it cannot be read.

    A `+` is appended if tracked files are modified.
    """
    if not (folder / ".git").exists():
        return ""
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(folder), *words],
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                check=True,
            ).stdout.strip()
            for words in (
                ["rev-parse", "--short=12", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{commit}+" if changes else commit
