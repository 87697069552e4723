"""Lock the directory of a run, which is on this machine or in a bucket, and decide how it begins.

A run in a bucket works in a local copy of its directory (`runtime/mirror.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.errors import ConfigError, RunError
from weft.experiment import Control, Experiment
from weft.observe.jsonl import read_json
from weft.redaction import redact
from weft.runtime.directory import COPIES, RunDirectory, RunLock, admit
from weft.storage.buckets import BucketFolder, is_remote
from weft.storage.views import view_runs

if TYPE_CHECKING:
    from weft.runtime.mirror import RunMirror


@contextmanager
def lock_run(
    experiment: Experiment, directory: RunDirectory
) -> Iterator[tuple[RunMirror | None, bool]]:
    """Lock the experiment's run during the context.

    Yields the link to the bucket of a run in a bucket, else None, and whether the run is resumed.
    Raises `ConfigError` if another process runs it, if it can be neither resumed nor started, or if
    the bucket cannot be used; nothing is changed then.
    """
    in_bucket = is_remote(experiment.control.fileroot)
    resumes = not in_bucket and admit_run(experiment, directory)
    lock = RunLock(directory.path)
    lock.take()
    try:
        if not in_bucket:
            yield None, resumes
            return
        mirror = _open_mirror(experiment, directory)
        try:
            yield mirror, _admit_run_in_bucket(experiment, directory)
        finally:
            mirror.release()  # has no effect if the end of the uploads has removed the lock
    finally:
        lock.release()


def admit_run(experiment: Experiment, directory: RunDirectory) -> bool:
    """Return whether the run in the directory is resumed, as `admit` does.

    Also raises `ConfigError` if a model in a bucket has changed since the run was started.
    """
    options = experiment.resolve()
    resumes = admit(directory, experiment.control, options, experiment.left_at_default)
    if resumes and experiment.control.resume_from is None:
        recorded = read_json(directory.path / COPIES)
        for url, version in experiment.read_copy_versions().items():
            if recorded.get(url, version) != version:
                raise ConfigError(
                    f"{url}: has changed since the run in {directory.path} was started; restore "
                    f"it, or choose another trial_name"
                )
    return resumes


def find_refusal(experiment: Experiment) -> str | None:
    """Return why the experiment's run could be neither started nor resumed, or None if it could."""
    try:
        if is_remote(experiment.control.fileroot):
            view = view_runs(find_run_url(experiment.control), missing_ok=True)
            _admit_run_in_bucket(experiment, RunDirectory(view))
        else:
            admit_run(experiment, RunDirectory.from_control(experiment.control))
    except ConfigError as error:
        return str(error)
    return None


def check_bucket(control: Control, mode: str) -> None:
    """Raise `ConfigError` for a run in a bucket whose processes need a shared folder.

    Also raises `ConfigError` if the package for this kind of bucket is missing.
    """
    if not is_remote(control.fileroot):
        return
    if mode != "slurm" and control.n_nodes == 1:
        BucketFolder.open(control.fileroot, f"fileroot={control.fileroot}", ConfigError)
        return
    option = "mode=slurm" if mode == "slurm" else f"n_nodes={control.n_nodes}"
    raise ConfigError(
        f"fileroot={control.fileroot}: with {option}, the processes of all machines write into one "
        f"folder, and a run in a bucket has its working copy on one machine; name a folder that "
        f"the machines share"
    )


def find_run_url(control: Control) -> str:
    """Return the URL of a run whose `fileroot` is a URL."""
    return f"{control.fileroot.rstrip('/')}/{control.experiment_name}/{control.trial_name}"


@contextmanager
def upload_during(mirror: RunMirror | None) -> Iterator[None]:
    """Upload the files that a run writes in the context, and wait for the uploads at its end.

    If the run fails and the last upload fails as well, the run's own error is raised with a note.
    Without a mirror, nothing is done.
    """
    if mirror is None:
        yield
        return
    mirror.start()
    try:
        yield
    except BaseException as error:
        try:
            mirror.close()
        except RunError as trouble:
            if trouble is not error:
                error.add_note(str(trouble))
        raise
    mirror.close()


def _open_mirror(experiment: Experiment, directory: RunDirectory) -> RunMirror:
    """Lock the experiment's run in its bucket, and make the directory its working copy."""
    from weft.runtime.mirror import RunMirror

    def print_note(note: str) -> None:
        print(redact(f"note: {note}"), file=sys.stderr, flush=True)

    return RunMirror.open(find_run_url(experiment.control), directory.path, print_note)


def _admit_run_in_bucket(experiment: Experiment, directory: RunDirectory) -> bool:
    """Admit the run like `admit_run`, with its URL in messages."""
    try:
        return admit_run(experiment, directory)
    except ConfigError as error:
        url = find_run_url(experiment.control)
        raise ConfigError(str(error).replace(str(directory.path), url)) from error
