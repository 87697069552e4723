"""Find the run that a command line refers to, and generate names for runs without a name."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path

from weft.cli.parsing import add_fileroot
from weft.errors import ConfigError
from weft.experiment import Experiment
from weft.experiments.checks import check_names
from weft.experiments.common import RunConfig, build_experiment
from weft.observe.logs import RUN_LOG as LOG
from weft.observe.run_list import find_runs, is_run, list_runs
from weft.reading import refuse_url
from weft.runtime.directory import RunDirectory, admit, find_owner
from weft.storage.bucket_lock import LockOwner
from weft.storage.buckets import is_remote
from weft.storage.copies import find_runs_folder
from weft.storage.views import find_view_url, view_runs

RUNS = "./runs"
LATEST = "latest"
# lock held by a working process, and files written by launchers
LOCK = "run.lock"
LAUNCHERS = ("logs", "slurm")
MAX_LISTED_RUNS = 6
MAX_SUGGESTIONS = 3
MIN_SIMILARITY = 0.6  # minimum similarity of each part of a name to suggest a run


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a run: its name, or -e EXPERIMENT -f TRIAL."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="folder of a run, EXPERIMENT/TRIAL, or latest"
    )
    parser.add_argument(
        "-e",
        "--experiment",
        "--experiment_name",
        metavar="EXPERIMENT",
        help="experiment of the run, in place of RUN",
    )
    parser.add_argument(
        "-f", "--trial", "--trial_name", metavar="TRIAL", help="trial of the run, in place of RUN"
    )
    add_fileroot(parser, None)


def find_given_run(given: argparse.Namespace, command: str) -> Path:
    """Return the directory of the run that the command line selects.

    The run need not have finished a step. `given` has the arguments that `add_run` defines.
    `command` is the command's name, for error messages. Raises `ConfigError` if the run does not
    exist, or if the arguments do not select exactly one run.
    """
    in_bucket = is_remote(given.fileroot or "") or is_remote(given.run or "")
    if in_bucket and (command != "logs" or getattr(given, "follow", False)):
        action = "logs --follow" if command == "logs" else command
        raise ConfigError(
            f"weft {action}: works with runs of this machine, and "
            f"{given.run or given.fileroot} is a URL; use the machine that runs it"
        )
    root = open_root(given.fileroot or RUNS)
    named = (given.experiment, given.trial)
    if given.run is not None:
        if named != (None, None):
            raise ConfigError(
                f"weft {command} {given.run}: names a run, and so do -e and -f; leave one out"
            )
        path = open_root(given.run)
        for directory in (path, root / path):
            # A run that has not finished a step has no metrics yet.
            if any((directory / mark).exists() for mark in (LOCK, LOG, *LAUNCHERS)):
                return directory
        return find_run(given.run, root)
    if None in named:
        if named == (None, None):
            raise ConfigError(
                f"weft {command}: which run? Write weft {command} RUN, such as weft {command} "
                f"latest"
            )
        flag = "-f TRIAL" if given.trial is None else "-e EXPERIMENT"
        raise ConfigError(
            f"{flag} is missing; write weft {command} -e EXPERIMENT -f TRIAL, or weft {command} RUN"
        )
    check_names(experiment_name=given.experiment, trial_name=given.trial)
    from weft.launch.stop import find_run_directory

    return find_run_directory(given.experiment, given.trial, str(root))


def open_root(root: str) -> Path:
    """Return a folder of runs, or a view of its runs if it is a URL of a bucket.

    Raises `ConfigError` for a URL that cannot be read.
    """
    if is_remote(root):
        return view_runs(root)
    refuse_url(root, root, ConfigError)
    return Path(root).expanduser()


def name_place(path: Path) -> str:
    """Return how the user names a path: the URL if it is in a view of a bucket."""
    return find_view_url(path) or str(path)


def with_names(config: RunConfig, asked_for: str) -> tuple[RunConfig, str | None]:
    """Return the configuration with experiment and trial names, and a note on the chosen trial.

    An unnamed experiment is named after `asked_for`, the name of a config file or a quickstart. If
    the trial has no name, the newest unfinished numbered trial with the same configuration is
    continued. If there is no such trial, if recovery is disabled, or if `resume_from` is set, a new
    trial gets the next free number as its name. The note is None if the user named the trial.
    """
    if config.experiment_name and config.trial_name:
        return config, None
    experiment = config.experiment_name or re.sub(r"[^A-Za-z0-9.-]+", "-", asked_for).strip(".-")
    config = replace(config, experiment_name=experiment)
    if config.trial_name:
        return config, None
    folder = find_runs_folder(config.fileroot) / experiment
    place = str(folder)
    if is_remote(config.fileroot):
        place = f"{config.fileroot.rstrip('/')}/{experiment}"
        folder = view_runs(place, missing_ok=True)
    numbers = sorted(
        (int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()), reverse=True
    )
    following = replace(config, trial_name=str(max(numbers, default=0) + 1))
    if config.recover_mode == "disabled" or config.resume_from is not None:
        return following, f"this run is {place}/{following.trial_name}"
    following_experiment = build_experiment(following)
    for number in numbers:
        if _is_resumable(RunDirectory(folder / str(number)), following_experiment):
            return replace(
                config, trial_name=str(number)
            ), f"continuing {place}/{number}, an unfinished run of this configuration"
    return following, f"this run is {place}/{following.trial_name}"


def _is_resumable(directory: RunDirectory, experiment: Experiment) -> bool:
    """Return whether `directory` has an unfinished run of `experiment` that can be resumed.

    A run cannot be resumed while another process is working on it.
    """
    if (
        not directory.has_run()
        or directory.read_status() == "finished"
        or find_owner(directory.path) is not None
        or _is_locked_in_bucket(directory)
    ):
        return False
    config = {**experiment.resolve(), "trial_name": directory.path.name}
    control = replace(experiment.control, trial_name=directory.path.name)
    try:
        return admit(directory, control, config, experiment.left_at_default)
    except ConfigError:
        return False


def _is_locked_in_bucket(directory: RunDirectory) -> bool:
    """Return whether a view of a run has a lock whose owner may still run."""
    lock = directory.path / LOCK
    owner = LockOwner.from_bytes(lock.read_bytes()) if lock.is_file() else None
    return owner is not None and not owner.has_ended()


def find_run(word: str, root: Path) -> Path:
    """Return the directory of the run with the name or path `word`.

    `word` is a path, `EXPERIMENT/TRIAL` in `root`, or `latest` for the newest run in `root`. Raises
    `ConfigError` if there is no such run.
    """
    given = open_root(word)
    for path in (given, root / given):
        if is_run(path):
            return path
    if word == LATEST:
        runs = list_runs(root)
        if runs:
            return runs[0].path
        raise ConfigError(f"latest: there is no run in {name_place(root)}")
    if given.is_dir():
        inside = [name_place(path) for path in find_runs(given)][:MAX_LISTED_RUNS]
    else:
        inside = []
    if inside:
        raise ConfigError(
            f"{word} is not a run, but contains runs: {', '.join(inside)}; name one of them"
        )
    if given.exists():
        raise ConfigError(
            f"{word} is not the directory of a run; weft ls lists the runs in a folder"
        )
    close = _find_similar_runs(given, root)
    listing = f"weft ls {name_place(root)}" if root != Path(RUNS) else "weft ls"
    if close:
        hint = f"did you mean {' or '.join(map(name_place, map(Path, close)))}?"
    else:
        hint = f"{listing} lists the runs"
    raise ConfigError(f"{word}: there is no such run; {hint}")


def _find_similar_runs(given: Path, root: Path) -> list[str]:
    """Return up to `MAX_SUGGESTIONS` runs with names similar to `given`, most similar first.

    If `given` is EXPERIMENT/TRIAL, the two parts are compared separately. A single word is compared
    with the names of trials.
    """
    given_parts = (given.relative_to(root) if given.is_relative_to(root) else given).parts

    def compute_similarity(run: Path) -> float:
        name = run.relative_to(root).parts[-len(given_parts) :] if given_parts else ()
        pairs = zip(given_parts, name, strict=True) if len(given_parts) == len(name) else ()
        return min((SequenceMatcher(None, one, other).ratio() for one, other in pairs), default=0.0)

    alike = {str(run): compute_similarity(run) for run in find_runs(root)}
    return sorted(
        (run for run in alike if alike[run] >= MIN_SIMILARITY), key=lambda run: -alike[run]
    )[:MAX_SUGGESTIONS]
