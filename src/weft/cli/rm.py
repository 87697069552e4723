"""Remove runs, or only their checkpoints or recovery points.

The command shows what will be removed and asks for confirmation. It never follows a link.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.cli.ls import format_size
from weft.cli.named_run import find_run
from weft.cli.parsing import CommandParser, add_fileroot, print_help_if_empty
from weft.errors import ConfigError
from weft.observe.jsonl import read_config, read_json
from weft.observe.run_files import CONFIG, STATUS
from weft.observe.run_list import count_tree_bytes, find_runs
from weft.storage.bucket_lock import BucketLock
from weft.storage.buckets import BucketFolder, explain_store_errors, is_remote

CHECKPOINTS = "checkpoints"
RECOVER = "recover"
MAX_LISTED_ENTRIES = 6  # number of entries listed per run, largest first
EPILOG = """examples:
  weft rm runs/first/ppo
  weft rm runs/first/ppo --recover              keeps checkpoints, metrics and report; the run cannot be resumed
  weft rm runs/a/one runs/a/two --checkpoints --recover --yes
  weft rm gs://b/runs/first/ppo --lock          after its process was killed on another machine"""


@dataclass(frozen=True)
class RunRemoval:
    """Planned removal of a run, or of parts of it.

    `paths` are the folders or links to remove. `is_whole_run` is True if the run itself is removed.
    """

    run: Path
    paths: tuple[Path, ...]
    is_whole_run: bool

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the files to remove; links count as 0."""
        return sum(0 if path.is_symlink() else count_tree_bytes(path) for path in self.paths)


def main(argv: Sequence[str]) -> int:
    """Run `weft rm ...` and return the exit code, which is 1 if the user declines.

    Raises `ConfigError` for a path that is not a run, and for a run that a process is working on.
    """
    parser = CommandParser(
        prog="weft rm", description=__doc__, epilog=EPILOG, url_arguments=("fileroot",)
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, or EXPERIMENT/TRIAL"
    )
    add_fileroot(parser)
    parser.add_argument("--checkpoints", action="store_true", help="remove only the checkpoints")
    parser.add_argument("--recover", action="store_true", help="remove only the recovery points")
    parser.add_argument(
        "--lock",
        action="store_true",
        help="remove only the lock of a run in a bucket, whose process has ended",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    if print_help_if_empty(parser, argv):
        return 2
    arguments = parser.parse_args(list(argv))
    urls = list_run_urls(arguments.runs, arguments.fileroot)
    if arguments.lock:
        return remove_locks(arguments.runs, urls, is_confirmed=arguments.yes)
    if urls:
        raise ConfigError(
            f"{urls[0]}: is a URL, and weft rm removes runs of this machine; remove the folder "
            "with the program of the storage"
        )
    parts = []
    for name, is_requested in ((CHECKPOINTS, arguments.checkpoints), (RECOVER, arguments.recover)):
        if is_requested:
            parts.append(name)
    root = Path(arguments.fileroot).expanduser()
    runs = {}
    for run in (check_removable(find_run(word, root)) for word in arguments.runs):
        runs[run.resolve()] = run
    removals = []
    for run in runs.values():
        removal = plan_removal(run, parts)
        if removal.paths:
            removals.append(removal)
    if not removals:
        print(
            f"nothing to remove: there are no {' or '.join(parts)} in "
            f"{', '.join(map(str, runs.values()))}"
        )
        return 0
    for removal in removals:
        print("\n".join(describe_removal(removal)))
    if not arguments.yes and not confirm_removal(sum(removal.num_bytes for removal in removals)):
        print("nothing was removed")
        return 1
    for removal in removals:
        remove(removal)
    return 0


def list_run_urls(runs: Sequence[str], fileroot: str) -> list[str]:
    """Return the URLs of the runs that are in buckets; a name is relative to `fileroot`."""
    if is_remote(fileroot):
        return [f"{fileroot.rstrip('/')}/{run}" for run in runs if not is_remote(run)]
    return [run for run in runs if is_remote(run)]


def remove_locks(runs: Sequence[str], urls: Sequence[str], *, is_confirmed: bool) -> int:
    """Remove the locks of runs in buckets, and return the exit code: 1 if the user declines.

    `runs` are the names on the command line, and `urls` are the URLs of the runs in buckets. Raises
    `ConfigError` if a run is not in a bucket, or if its process still runs on this machine.
    """
    if len(urls) < len(runs):
        raise ConfigError(
            f"--lock: is for runs in buckets, and {runs[0]} is none; the lock of a run on this "
            f"machine ends with its process"
        )
    locks = {url: BucketLock(BucketFolder.open(url)) for url in urls}
    for url, lock in locks.items():
        with explain_store_errors(url, ConfigError):
            owner = lock.read_owner()
            if owner is None:
                print(f"{url} has no lock")
                continue
            if owner.is_alive():
                raise ConfigError(f"{url}: process {owner.pid} still runs here; stop it first")
            print(f"{url} is locked by process {owner.pid} on {owner.host}")
            if not is_confirmed and not confirm_removal(0):
                print("nothing was removed")
                return 1
            lock.discard()
    return 0


def check_removable(run: Path) -> Path:
    """Return `run` if it can be removed.

    Raises `ConfigError` for a link, for a folder that is not a run, for a run that is in use, and
    for a folder that is or contains the current folder, or contains another run.
    """
    if run.is_symlink():
        raise ConfigError(f"{run} is a link to {run.resolve()}; name that folder itself")
    if not _was_written_by_weft(run):
        raise ConfigError(
            f"{run} is not the directory of a run: a run has {CONFIG} and {STATUS}, and this "
            "folder has neither"
        )
    if run.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ConfigError(f"{run} contains the current folder; change to another folder first")
    from weft.launch.stop import format_status, is_alive

    if is_alive(run):
        raise ConfigError(
            f"{format_status(run)}; stop it first: weft stop -e {run.parent.name} -f {run.name}"
        )
    contained_runs = []
    for folder in _list_folders(run):
        for path in find_runs(folder):
            contained_runs.append(path)
    if contained_runs:
        raise ConfigError(
            f"{run} contains another run, {contained_runs[0]}; move or remove that one first"
        )
    return run


def _list_folders(run: Path) -> list[Path]:
    """Return the folders in `run` other than links, checkpoints and recovery points."""
    managed = (CHECKPOINTS, RECOVER)
    result: list[Path] = []
    for path in run.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in managed:
            result.append(path)
    return result


def _was_written_by_weft(run: Path) -> bool:
    """Return whether the folder has the status or the configuration of a run."""
    if "status" in read_json(run / STATUS):
        return True
    try:
        return {"experiment_name", "trial_name"} <= read_config(run / CONFIG).keys()
    except ConfigError:
        return False


def plan_removal(run: Path, parts: Sequence[str]) -> RunRemoval:
    """Plan the removal of a whole run, or only of the given `parts`.

    `parts` are the names of folders in the run, such as "checkpoints"; missing folders are left
    out. If `parts` is empty, the whole run is removed.
    """
    if not parts:
        return RunRemoval(run, (run,), is_whole_run=True)
    return RunRemoval(
        run, tuple(run / name for name in parts if os.path.lexists(run / name)), is_whole_run=False
    )


def describe_removal(removal: RunRemoval) -> Iterator[str]:
    """Yield lines that describe the files to remove, and the runs that depend on them."""
    status = read_json(removal.run / STATUS).get("status", "unfinished")
    if removal.is_whole_run:
        yield f"{removal.run} ({status}), {format_size(removal.num_bytes)}:"
    for path in [] if removal.is_whole_run else removal.paths:
        yield f"{path}, {format_size(0 if path.is_symlink() else count_tree_bytes(path))}:"
    entries: list[Path] = []
    for path in removal.paths:
        if not path.is_symlink():
            entries += path.iterdir()
    listed = sorted(entries, key=lambda entry: -_count_bytes(entry))
    for path in listed[:MAX_LISTED_ENTRIES]:
        link = f"  -> {os.readlink(path)}, which stays" if path.is_symlink() else ""
        yield f"  {path.name:24} {format_size(_count_bytes(path)):>8}{link}"
    if len(listed) > MAX_LISTED_ENTRIES:
        yield f"  and {len(listed) - MAX_LISTED_ENTRIES} more"
    for path in removal.paths:
        if path.is_symlink():
            yield f"  only the link: {os.readlink(path)} stays"
    if status != "finished" and any(path.name == RECOVER for path in removal.paths):
        yield "  the run cannot be resumed afterwards"
    users = [str(other) for other in _find_dependent_runs(removal)]
    if users:
        yield f"  its models are named in the configuration of {', '.join(users)}"


def _count_bytes(entry: Path) -> int:
    if entry.is_symlink():
        return 0
    return count_tree_bytes(entry) if entry.is_dir() else entry.stat().st_size


def _find_dependent_runs(removal: RunRemoval) -> Iterator[Path]:
    """Yield the runs in the same root folder whose configuration names a path in the removed run.

    If only recovery points are removed, no run depends on them.
    """
    if not any(path.name != RECOVER for path in removal.paths):
        return
    run = removal.run.absolute()
    name = f"{run.parent.name}/{run.name}"
    for other in find_runs(run.parent.parent):
        if other.absolute() != run and (other / CONFIG).is_file():
            words = (other / CONFIG).read_text(encoding="utf-8", errors="replace").split()
            if any(f"/{name}/" in f"/{word.strip(chr(39))}/" for word in words):
                yield other


def confirm_removal(num_bytes: int) -> bool:
    """Ask the user for confirmation, and return whether the user agrees.

    Raises `ConfigError` if the input is not a terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError("weft rm asks for confirmation, which needs a terminal; add --yes")
    try:
        answer = input(f"remove this, {format_size(num_bytes)}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def remove(removal: RunRemoval) -> None:
    """Remove the folders and links in `removal`, and print what was removed.

    The run is locked during the removal, so that no process starts to work on it. Raises
    `ConfigError` if a path cannot be removed.
    """
    from weft.runtime.directory import RunLock

    num_bytes = removal.num_bytes
    lock = RunLock(removal.run)
    lock.take()
    try:
        for path in removal.paths:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or removal.run} could not be removed: {error.strerror or error}"
        ) from error
    finally:
        lock.release()
    folder = removal.run.parent
    if removal.is_whole_run and not any(folder.iterdir()) and folder.resolve() != Path.cwd():
        folder.rmdir()  # the folder of an experiment without runs
    print(f"removed {', '.join(map(str, removal.paths))} ({format_size(num_bytes)})")
