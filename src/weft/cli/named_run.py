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
from weft.storage.bucket_lock import LOCK, LockOwner
from weft.storage.buckets import is_remote
from weft.storage.copies import find_runs_folder
from weft.storage.views import find_view_url, view_runs

RUNS = "./runs"
LATEST = "latest"
LAUNCHERS = ("logs", "slurm")  # folders that launchers create in a run
MAX_LISTED_RUNS = 6
MAX_SUGGESTIONS = 3
MIN_SIMILARITY = 0.6  # minimum similarity of each part of a name to the name of a suggested run


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


def find_given_run(arguments: argparse.Namespace, command: str) -> Path:
    """Return the directory of the run that the command line selects.

    The run need not have finished a step. `arguments` are those that `add_run` defines, and
    `command` is the name of the command, for messages. Raises `ConfigError` if the run does not
    exist, or if the arguments do not select exactly one run.
    """
    in_bucket = is_remote(arguments.fileroot or "") or is_remote(arguments.run or "")
    if in_bucket and (command != "logs" or getattr(arguments, "follow", False)):
        action = "logs --follow" if command == "logs" else command
        raise ConfigError(
            f"weft {action}: works with runs of this machine, and "
            f"{arguments.run or arguments.fileroot} is a URL; use the machine that runs it"
        )
    root = open_root(arguments.fileroot or RUNS)
    selected = (arguments.experiment, arguments.trial)
    if arguments.run is not None:
        if selected != (None, None):
            raise ConfigError(
                f"weft {command} {arguments.run}: names a run, and so do -e and -f; leave one out"
            )
        path = open_root(arguments.run)
        for directory in (path, root / path):
            # A run that has not finished a step has no metrics yet.
            if any((directory / mark).exists() for mark in (LOCK, LOG, *LAUNCHERS)):
                return directory
        return find_run(arguments.run, root)
    if None in selected:
        if selected == (None, None):
            raise ConfigError(
                f"weft {command}: which run? Write weft {command} RUN, such as weft {command} "
                f"latest"
            )
        flag = "-f TRIAL" if arguments.trial is None else "-e EXPERIMENT"
        raise ConfigError(
            f"{flag} is missing; write weft {command} -e EXPERIMENT -f TRIAL, or weft {command} RUN"
        )
    check_names(experiment_name=arguments.experiment, trial_name=arguments.trial)
    from weft.launch.stop import find_run_directory

    return find_run_directory(arguments.experiment, arguments.trial, str(root))


def open_root(root: str) -> Path:
    """Return the local path of a folder of runs; for the URL of a bucket, a view of its runs.

    Raises `ConfigError` for a URL that cannot be read.
    """
    if is_remote(root):
        return view_runs(root)
    refuse_url(root, root, ConfigError)
    return Path(root).expanduser()


def name_place(path: Path) -> str:
    """Return the name of a path for messages: its URL if it is in a view of a bucket."""
    return find_view_url(path) or str(path)


def with_names(config: RunConfig, asked_for: str) -> tuple[RunConfig, str | None]:
    """Return the configuration with experiment and trial names, and a note on the chosen trial.

    An experiment without a name is named after `asked_for`, the name of a config file or a
    quickstart. If the trial has no name, the newest unfinished numbered trial with the same
    configuration is continued. If there is no such trial, if recovery is disabled, or if
    `resume_from` is set, a new trial is named by the next free number. The note is None if the user
    has named the trial.
    """
    if config.experiment_name and config.trial_name:
        return config, None
    experiment = config.experiment_name or re.sub(r"[^A-Za-z0-9.-]+", "-", asked_for).strip(".-")
    config = replace(config, experiment_name=experiment)
    if config.trial_name:
        return config, None
    folder = find_runs_folder(config.fileroot) / experiment
    experiment_place = str(folder)
    if is_remote(config.fileroot):
        experiment_place = f"{config.fileroot.rstrip('/')}/{experiment}"
        folder = view_runs(experiment_place, missing_ok=True)
    numbers = sorted(
        (int(each.name) for each in folder.glob("[0-9]*") if each.name.isdecimal()), reverse=True
    )
    following = replace(config, trial_name=str(max(numbers, default=0) + 1))
    if config.recover_mode == "disabled" or config.resume_from is not None:
        return following, f"this run is {experiment_place}/{following.trial_name}"
    following_experiment = build_experiment(following)
    for number in numbers:
        if _is_resumable(RunDirectory(folder / str(number)), following_experiment):
            return replace(
                config, trial_name=str(number)
            ), f"continuing {experiment_place}/{number}, an unfinished run of this configuration"
    return following, f"this run is {experiment_place}/{following.trial_name}"


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
    """Return whether a run in a view of a bucket has a lock whose owner may still run."""
    lock = directory.path / LOCK
    owner = LockOwner.from_bytes(lock.read_bytes()) if lock.is_file() else None
    return owner is not None and not owner.has_ended()


def find_run(word: str, root: Path) -> Path:
    """Return the directory of the run with the name or path `word`.

    `word` is a path, `EXPERIMENT/TRIAL` in `root`, or `latest` for the newest run in `root`. Raises
    `ConfigError` if there is no such run.
    """
    path = open_root(word)
    for directory in (path, root / path):
        if is_run(directory):
            return directory
    if word == LATEST:
        runs = list_runs(root)
        if runs:
            return runs[0].path
        raise ConfigError(f"latest: there is no run in {name_place(root)}")
    if path.is_dir():
        contained_runs = [name_place(run) for run in find_runs(path)][:MAX_LISTED_RUNS]
    else:
        contained_runs = []
    if contained_runs:
        raise ConfigError(
            f"{word} is not a run, but contains runs: {', '.join(contained_runs)}; name one of them"
        )
    if path.exists():
        raise ConfigError(
            f"{word} is not the directory of a run; weft ls lists the runs in a folder"
        )
    similar = _find_similar_runs(path, root)
    listing = f"weft ls {name_place(root)}" if root != Path(RUNS) else "weft ls"
    if similar:
        hint = f"did you mean {' or '.join(map(name_place, map(Path, similar)))}?"
    else:
        hint = f"{listing} lists the runs"
    raise ConfigError(f"{word}: there is no such run; {hint}")


def _find_similar_runs(path: Path, root: Path) -> list[str]:
    """Return up to `MAX_SUGGESTIONS` runs with names similar to `path`, most similar first.

    The parts of a name EXPERIMENT/TRIAL are compared separately. A single word is compared with the
    names of trials.
    """
    given_parts = (path.relative_to(root) if path.is_relative_to(root) else path).parts

    def compute_similarity(run: Path) -> float:
        run_parts = run.relative_to(root).parts[-len(given_parts) :] if given_parts else ()
        pairs = (
            zip(given_parts, run_parts, strict=True) if len(given_parts) == len(run_parts) else ()
        )
        return min(
            (SequenceMatcher(None, part, run_part).ratio() for part, run_part in pairs), default=0.0
        )

    similarities = {str(run): compute_similarity(run) for run in find_runs(root)}
    return sorted(
        (run for run in similarities if similarities[run] >= MIN_SIMILARITY),
        key=lambda run: -similarities[run],
    )[:MAX_SUGGESTIONS]
