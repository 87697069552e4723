"""A run in a bucket: its lock, its working copy on this machine, and the uploads to the bucket.

A run with `fileroot=gs://...` works in a local folder, its working copy. `RunMirror` takes the run's
lock in the bucket, makes the working copy equal to the bucket, and then uploads what the run writes:

1. small files (the configuration first, then metrics, logs, report), if they have changed;
2. new checkpoints, each file by file and its manifest last; then records such as `best.json`;
3. new recovery points, likewise; then the older ones that the run has removed leave the bucket;
4. `status.json`, as it was before the other files were listed: it never claims more than they show.

A run resumes from the state in the bucket, so work that a killed process had not uploaded is
repeated. As an object store has no rename, a checkpoint or a recovery point counts only if its
manifest is there, and every other file of it is written before and removed after the manifest.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from weft.errors import ConfigError, RunError
from weft.runtime.directory import CONFIG, REPLACED, STATUS, compute_checksums, remove
from weft.storage.bucket_lock import LOCK, BucketLock
from weft.storage.buckets import BucketFolder, FileStamp, explain_store_errors
from weft.storage.copies import MANIFEST
from weft.writing import TEMPORARY, write

INTERVAL_SECONDS = 30.0  # time between uploads of files that grow
ATTEMPTS = 4  # of an upload
FIRST_PAUSE_SECONDS = 1.0  # pause after the first failed attempt; doubled after each further one
RECOVER = "recover"
CHECKPOINTS = "checkpoints"
LARGE_BYTES = 1 << 26  # growing files above this size are uploaded with recovery points only
UnitState = frozenset[tuple[str, int, int]]  # (name, size, modification time in ns) of files


def find_unit(name: str) -> str | None:
    """Return the checkpoint or recovery point that a file belongs to, or None.

    For example, `recover/step2/rank0/x.bin` and `recover/step2.json` belong to `recover/step2`.
    """
    parts = name.split("/")
    if parts[0] == RECOVER and len(parts) > 1:
        return f"{RECOVER}/{parts[1].removesuffix('.json')}"
    if parts[0] == CHECKPOINTS and len(parts) > 3:
        return "/".join(parts[:3])
    return None


def get_manifest(unit: str) -> str:
    """Return the name of the manifest of a checkpoint or recovery point."""
    return f"{unit}.json" if unit.startswith(f"{RECOVER}/") else f"{unit}/{MANIFEST}"


def read_manifest(
    bucket: BucketFolder, unit: str, listing: Mapping[str, FileStamp]
) -> bytes | None:
    """Return the manifest of a unit in a bucket, or None if the unit is not complete."""
    name = get_manifest(unit)
    if name not in listing:
        return None
    contents = bucket.read(name)
    try:
        files = json.loads(contents)["files"]
    except (ValueError, KeyError, TypeError):
        return None
    return contents if all(f"{unit}/{file}" in listing for file in files) else None


def is_mirrored(name: str) -> bool:
    """Return whether a file of a working copy belongs into the bucket.

    Locks, files that are being written and old versions of replaced folders do not.
    """
    parts = name.split("/")
    return name != LOCK and not any(part.endswith((TEMPORARY, REPLACED)) for part in parts)


def list_local_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (size, modification time in ns) of each mirrored file in a working copy, by name."""
    files = {}
    for place, _, names in os.walk(folder):
        for file_name in names:
            path = Path(place, file_name)
            name = path.relative_to(folder).as_posix()
            try:
                status = path.stat()
            except FileNotFoundError:  # removed by the run in the meantime
                continue
            if is_mirrored(name):
                files[name] = (status.st_size, status.st_mtime_ns)
    return files


@dataclass(frozen=True)
class UploadPlan:
    """Changes that make a bucket equal to a working copy, in the order of their fields.

    `small` are names of files to upload. `units` are checkpoints and recovery points to upload,
    each with the names of its files, without the manifest. `records` are small files that name
    checkpoints, such as `best.json`. `lost_units` are units, and `removed` are small files, that the
    working copy does not have any more.
    """

    small: list[str]
    units: dict[str, list[str]]
    records: list[str]
    lost_units: list[str]
    removed: list[str]


def plan_uploads(
    local: Mapping[str, tuple[int, int]],
    known: Mapping[str, tuple[int, int]],
    known_units: Mapping[str, UnitState],
    *,
    whole: bool,
) -> UploadPlan:
    """Plan the uploads of the files `local`.

    `known` has the states of the small files that the bucket has, and `known_units` those of
    checkpoints and recovery points (see `compute_state`). Unless `whole` is True, large files that
    grow are left for later. A recovery point without its manifest is still being written.
    """
    groups: dict[str, list[str]] = {}
    small: list[str] = []
    records: list[str] = []
    for name, state in local.items():
        unit = find_unit(name)
        if unit is not None:
            groups.setdefault(unit, []).append(name)
        elif known.get(name) != state and (whole or state[0] < LARGE_BYTES):
            names = records if name.startswith(f"{CHECKPOINTS}/") else small
            names.append(name)
    units = {}
    for unit, names in sorted(groups.items()):
        is_complete = unit.startswith(f"{CHECKPOINTS}/") or get_manifest(unit) in names
        # Files of a unit that the run is removing disappear one by one, and do not change.
        known_files = known_units.get(unit)
        has_changed = known_files is None or not known_files.issuperset(compute_state(unit, local))
        if is_complete and has_changed:
            units[unit] = [name for name in names if name != get_manifest(unit)]
    return UploadPlan(
        # without its configuration, a folder is not a run that can be resumed
        sorted(small, key=lambda name: name != CONFIG),
        units,
        records,
        [unit for unit in known_units if unit not in groups],
        [name for name in known if name not in local],
    )


def compute_state(unit: str, local: Mapping[str, tuple[int, int]]) -> UnitState:
    """Return (name, size, modification time) of the files of a checkpoint or recovery point."""
    return frozenset(
        (name, *state)
        for name, state in local.items()
        if find_unit(name) == unit and name != get_manifest(unit)
    )


class RunMirror:
    """Link between a run's working copy and its folder in a bucket.

    mirror = RunMirror.open("gs://b/runs/e/t", folder, note)  # lock the run, and copy it here
    mirror.start()
    ...            # the run; `request` after a checkpoint, and `wait` before the next one
    mirror.close() # wait for the uploads, and remove the lock
    """

    def __init__(self, bucket: BucketFolder, folder: Path, note: Callable[[str], None]) -> None:
        self._bucket = bucket
        self._folder = folder
        self._note = note
        self._lock = BucketLock(bucket)
        self._known: dict[str, tuple[int, int]] = {}
        self._known_status: bytes | None = None
        self._known_units: dict[str, UnitState] = {}
        self._remote: set[str] = set()  # names of the files in the bucket
        # complete recovery points in the bucket that are older than the one that is restored
        self._older_points: list[str] = []
        self._condition = threading.Condition()
        self._requested = self._done = 0  # numbers of synchronizations
        self._is_closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run_uploads, name="weft-mirror", daemon=True)

    @property
    def url(self) -> str:
        """URL of the run."""
        return self._bucket.url

    @classmethod
    def open(cls, url: str, folder: Path, note: Callable[[str], None]) -> RunMirror:
        """Lock a run in a bucket and make its working copy `folder` equal to the bucket.

        Only the newest intact recovery point is copied, and only the manifests of checkpoints.
        `note` is called with messages for the user. Raises `ConfigError` if the bucket cannot be
        read and written, or if another process runs this run; nothing is changed then.
        """
        bucket = BucketFolder.open(url, f"fileroot: {url}", ConfigError)
        with explain_store_errors(f"fileroot: {url}", ConfigError):
            bucket.list_files()  # a clear message if it cannot even be read
        mirror = cls(bucket, folder, note)
        mirror._lock.take()
        try:
            with explain_store_errors(f"fileroot: {url}", ConfigError):
                mirror._download()
        except BaseException:
            mirror._lock.release()
            raise
        return mirror

    def start(self) -> None:
        """Start to upload in the background."""
        self._thread.start()

    def release(self) -> None:
        """Remove the lock without uploading anything, for a run that does not start."""
        try:
            self._lock.release()
        except Exception as error:  # the caller raises a more important error
            self._note(f"{self.url}: the lock of the run was not removed ({error})")

    def request(self) -> None:
        """Upload everything soon. Raises `RunError` if an earlier upload has failed."""
        with self._condition:
            self.check()
            self._requested += 1
            self._condition.notify_all()

    def wait(self) -> None:
        """Wait until everything that was requested is uploaded. Raises `RunError` if that failed."""
        with self._condition:
            number = self._requested
            while self._done < number and self._error is None:
                self._condition.wait()
            self.check()

    def close(self) -> None:
        """Upload everything, wait for it, and remove the lock. Raises `RunError` if that failed."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join()
        self.release()
        self.check()

    def check(self) -> None:
        """Raise `RunError` if an upload has failed."""
        if self._error is not None:
            raise self._error

    # -- from the bucket

    def _download(self) -> None:
        """Make the working copy equal to the bucket, and remove incomplete parts from the bucket."""
        listing = self._bucket.list_files()
        listing.pop(LOCK, None)
        self._remote = set(listing)
        valid = {
            unit: manifest
            for unit in {find_unit(name) for name in listing} - {None}
            if unit is not None
            and (manifest := read_manifest(self._bucket, unit, listing)) is not None
        }
        incomplete = [
            name for name in listing if (unit := find_unit(name)) is not None and unit not in valid
        ]
        self._remove_remote(sorted(incomplete, key=lambda name: not name.endswith(".json")))
        for name in list_local_files(self._folder):
            unit = find_unit(name)
            if (unit is None and name not in listing) or (unit is not None and unit not in valid):
                remove(self._folder / name)
        for name, stamp in listing.items():
            if find_unit(name) is None and is_mirrored(name):
                self._bucket.download(name, self._folder / name, stamp)
        for unit, manifest in valid.items():
            if unit.startswith(f"{CHECKPOINTS}/"):
                self._place_checkpoint(unit, manifest)
        self._download_point(valid, listing)
        local = list_local_files(self._folder)
        for name, state in local.items():
            if find_unit(name) is None and name != STATUS:
                self._known[name] = state
        self._known_status = self._read_status()
        for unit in valid:
            self._known_units[unit] = compute_state(unit, local)

    def _place_checkpoint(self, unit: str, manifest: bytes) -> None:
        """Replace a checkpoint here by its manifest alone, unless it is the one in the bucket."""
        target = self._folder / get_manifest(unit)
        if target.is_file() and target.read_bytes() == manifest:
            return
        remove(target.parent)
        target.parent.mkdir(parents=True)
        write(target, manifest)

    def _download_point(self, valid: dict[str, bytes], listing: Mapping[str, FileStamp]) -> None:
        """Copy the newest intact recovery point, and remove the other ones here.

        A damaged one is removed from `valid` and from the bucket.
        """
        points = [unit for unit in valid if unit.startswith(f"{RECOVER}/")]
        points.sort(key=lambda unit: -int(unit.rpartition("step")[2]))
        chosen = None
        for unit in points:
            folder = self._folder / unit
            manifest = self._folder / get_manifest(unit)
            expected = json.loads(valid[unit])["files"]
            if chosen is not None or compute_checksums(folder) != expected:
                remove(manifest)
                remove(folder)
            if chosen is not None:
                continue
            for name in expected:
                if not (folder / name).is_file():  # those that are here were verified above
                    self._bucket.download(
                        f"{unit}/{name}", folder / name, listing[f"{unit}/{name}"]
                    )
            for name in json.loads(valid[unit]).get("folders", []):
                (folder / name).mkdir(parents=True, exist_ok=True)
            if compute_checksums(folder) == expected:
                write(manifest, valid[unit])
                chosen = unit
                continue
            self._note(f"{self.url}/{unit} is damaged; using the recovery point before")
            remove(folder)
            del valid[unit]
            self._remove_remote([get_manifest(unit), *(f"{unit}/{name}" for name in expected)])
        # The bucket keeps an older one until the run has written a newer one.
        for unit in points:
            if unit != chosen and unit in valid:
                self._older_points.append(unit)
                del valid[unit]

    # -- to the bucket

    def _run_uploads(self) -> None:
        """Synchronize at every request, and at intervals, until the mirror is closed."""
        while self._error is None:
            with self._condition:
                if self._done == self._requested and not self._is_closing:
                    self._condition.wait(INTERVAL_SECONDS)
                number = self._requested
                is_last = self._is_closing
                whole = is_last or number != self._done
            try:
                with explain_store_errors(f"{self.url} cannot be written", RunError):
                    self._synchronize(whole=whole)
            except Exception as error:  # raised in the run's own thread by `check`
                self._error = error
            with self._condition:
                self._done = number
                self._condition.notify_all()
            if is_last:
                return

    def _synchronize(self, *, whole: bool) -> None:
        """Bring the bucket to the state of the working copy."""
        # The status is read before the files are listed, and uploaded after them. They are listed
        # before they are read, so that metrics are at least as new as recovery points.
        status = self._read_status()
        local = list_local_files(self._folder)
        local.pop(STATUS, None)
        plan = plan_uploads(local, self._known, self._known_units, whole=whole)
        status_changed = status is not None and status != self._known_status
        if status_changed or any(vars(plan).values()):
            self._lock.check()
        for name in plan.small:
            self._upload_small(name, local[name])
        for unit, names in plan.units.items():
            self._upload_unit(unit, names, compute_state(unit, local))
        for name in plan.records:
            self._upload_small(name, local[name])
        has_new_point = any(unit.startswith(f"{RECOVER}/") for unit in plan.units)
        for unit in plan.lost_units:
            self._remove_unit(unit)
            del self._known_units[unit]
        while has_new_point and self._older_points:
            self._remove_unit(self._older_points.pop())
        self._remove_remote(plan.removed)
        for name in plan.removed:
            del self._known[name]
        if status is not None and status_changed:
            retry(lambda: self._bucket.write(STATUS, status))
            self._known_status = status

    def _read_status(self) -> bytes | None:
        path = self._folder / STATUS
        return path.read_bytes() if path.is_file() else None

    def _upload_small(self, name: str, state: tuple[int, int]) -> None:
        path = self._folder / name
        try:
            if state[0] < LARGE_BYTES:
                contents = path.read_bytes()
                retry(lambda: self._bucket.write(name, contents))
            else:  # a copy that does not grow during the upload
                copy = path.with_name(f".{path.name}.upload{TEMPORARY}")
                shutil.copyfile(path, copy)
                retry(lambda: self._bucket.upload(copy, name))
                copy.unlink()
        except FileNotFoundError:
            if path.exists():
                raise
            return  # the run has removed it
        self._known[name] = state
        self._remote.add(name)

    def _upload_unit(self, unit: str, names: list[str], state: UnitState) -> None:
        """Upload a checkpoint or a recovery point, and its manifest last."""
        manifest = get_manifest(unit)
        if not (self._folder / unit).is_dir():
            return  # the run has removed it
        contents = self._build_manifest(unit)
        self._remove_remote([manifest])
        for name in names:
            path = self._folder / name
            self._remote.add(name)
            try:
                retry(partial(self._bucket.upload, path, name))
            except FileNotFoundError:
                if path.exists():
                    raise
                self._remove_unit(unit)  # the run has removed it
                self._known_units.pop(unit, None)
                return
        self._lock.check()
        retry(lambda: self._bucket.write(manifest, contents))
        self._remote.add(manifest)
        self._known_units[unit] = state
        stored = [name for name in self._remote if find_unit(name) == unit]
        self._remove_remote([name for name in stored if name not in (*names, manifest)])

    def _build_manifest(self, unit: str) -> bytes:
        """Return the manifest of a unit; also write that of a checkpoint into the working copy."""
        path = self._folder / get_manifest(unit)
        if unit.startswith(f"{RECOVER}/"):
            # A restart reads empty folders as well, which an object store does not have.
            values = json.loads(path.read_bytes())
            folder = self._folder / unit
            folders = [entry for entry in folder.rglob("*") if entry.is_dir()]
            values["folders"] = sorted(entry.relative_to(folder).as_posix() for entry in folders)
            return json.dumps(values, indent=1).encode()
        path.unlink(missing_ok=True)
        files = compute_checksums(path.parent)
        sizes = {name: (path.parent / name).stat().st_size for name in files}
        text = json.dumps({"files": files, "sizes": sizes}, indent=1)
        write(path, text)
        return text.encode()

    def _remove_unit(self, unit: str) -> None:
        manifest = get_manifest(unit)
        names = [name for name in self._remote if find_unit(name) == unit]
        self._remove_remote([manifest, *(name for name in sorted(names) if name != manifest)])

    def _remove_remote(self, names: list[str]) -> None:
        present = [name for name in names if name in self._remote]
        retry(lambda: self._bucket.remove(present))
        self._remote.difference_update(present)


def fetch_point(url: str, folder: Path) -> None:
    """Download a recovery point of a run in a bucket, whose working copy another host has.

    `url` is that of the recovery point, and `folder` is new.
    """
    bucket = BucketFolder.open(url)
    with explain_store_errors(url, RunError, "check that all hosts may read the bucket"):
        for name, stamp in bucket.list_files().items():
            bucket.download(name, folder / name, stamp)


@contextmanager
def upload_after(mirror: RunMirror | None) -> Iterator[None]:
    """Request an upload at the end of the context, and wait for earlier ones at its beginning.

    A checkpoint or recovery point is therefore in the bucket before the next one is written, and
    before it can be removed here. Without a mirror, nothing is done.
    """
    if mirror is not None:
        mirror.wait()
    yield
    if mirror is not None:
        mirror.request()


def retry(operation: Callable[[], None]) -> None:
    """Call an operation of a bucket until it succeeds, at most `ATTEMPTS` times."""
    pause = FIRST_PAUSE_SECONDS
    for number in range(1, ATTEMPTS + 1):
        try:
            return operation()
        except FileNotFoundError:
            raise
        except Exception:  # each file system has its own kinds of errors
            if number == ATTEMPTS:
                raise
            time.sleep(pause)
            pause *= 2
