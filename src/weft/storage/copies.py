"""Local copies of files and folders in buckets, shared by all processes of a machine.

    folder = copy_model("gs://b/model", "actor.path=gs://b/model")  # configuration and tokenizer
    complete(folder)                                                # and now the weights
    file = copy_file("gs://b/tokenizer.model")
    files = copy_data("s3://b/rows")

A copy is the folder `copies/gs/b/model@VERSION` in the cache. VERSION is a hash of the names, sizes
and versions of the remote files, so that a changed folder gets another copy, and each process that
is given the path of a copy reads the same version. `find_url` returns the URL of a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from weft.errors import CheckpointError, ConfigError, DataError, UserError
from weft.storage.buckets import (
    BucketFolder,
    FileStamp,
    explain_store_errors,
    is_remote,
)
from weft.writing import write

CACHE_VARIABLE = "WEFT_BUCKET_CACHE"
COPIES = "copies"
WORKING_COPIES = "runs"
CONVERTED = "converted"  # folder of models whose names, NAME@VERSION, say what is in them
LISTING = ".weft-copy.json"  # the URL, and the stamps of all files of a copy
LOCKS = ".locks"
VERSION_DIGITS = 12
COPY_NAME = re.compile(rf"(.*)@([0-9a-f]{{{VERSION_DIGITS}}})")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack")  # copied when they are read
SMALL = (".json", ".model", ".txt", ".jinja")
MODEL_FOLDERS = ("", "adapter")  # folders of a model's directory that are copied
MANIFEST = "weft_manifest.json"  # written last into a checkpoint, with the checksums of its files
CHECKPOINT = re.compile(r"/checkpoints/[^/]+/step\d+/?$")
WHOLE_CHECKPOINT = re.compile(rf"checkpoints/([^/]+)/step(\d+)/{re.escape(MANIFEST)}")
NAMED_CHECKPOINT = re.compile(r"(?P<run>[^@]+)@(?P<step>latest|best|step\d+)(?::(?P<role>[\w-]+))?")
BEST_RECORD = "checkpoints/best.json"
GIGABYTE = 1 << 30
NOTED_BYTES = 1 << 28  # copies of at least this size are announced


def find_cache_folder() -> Path:
    """Return the folder of everything that is copied from buckets, or is on its way to one."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft" / "buckets"


def split_url(url: str) -> Path:
    """Return the path that stands for a URL below a folder of the cache: `gs/b/model`."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in PurePosixPath(rest).parts if part not in ("/", "..")]
    return Path(scheme.lower(), *parts)


def find_url(path: str | Path) -> str | None:
    """Return the URL of a copy, or of a file in one, or None if `path` is not in a copy."""
    root = find_cache_folder() / COPIES
    if not Path(path).is_relative_to(root):
        return None
    scheme, *parts = Path(path).relative_to(root).parts
    for index, part in enumerate(parts):
        match = COPY_NAME.fullmatch(part)
        if match is not None:
            named = [*parts[:index], match[1], *parts[index + 1 :]]
            return f"{scheme}://{'/'.join(filter(None, named))}"
    return None


def read_versions(paths: Iterable[str | None]) -> dict[str, str]:
    """Return the version of each copy among `paths`, by its URL. Other paths are left out."""
    versions = {}
    for path in paths:
        url = None if path is None else find_url(path)
        for part in Path(path or "").parts:
            match = COPY_NAME.fullmatch(part)
            if url is not None and match is not None:
                versions[url] = match[2]
    return versions


def find_converted_name(path: str) -> str | None:
    """Return `converted/NAME@VERSION` if `path` is the folder of a converted model, else None."""
    folder, _, name = path.rpartition("/")
    if folder.rpartition("/")[2] == CONVERTED and COPY_NAME.fullmatch(name):
        return f"{CONVERTED}/{name}"
    return None


def restore_urls(value: Any) -> Any:
    """Return nested options in which the paths of copies are replaced by their URLs.

    The paths of converted models are replaced by their names. So the options of a run are the same
    on each machine.
    """
    if isinstance(value, Mapping):
        return {key: restore_urls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [restore_urls(each) for each in value]
    if isinstance(value, str):
        url = find_url(value) if value.startswith("/") else None
        return url or find_converted_name(value) or value
    return value


# -- models and tokenizers


def copy_model(url: str, what: str = "") -> Path:
    """Return a copy of a model's directory, or of a tokenizer's directory or file.

    Everything but the weights is copied; `complete` copies them when they are needed. `what` is the
    beginning of error messages, by default the URL. Raises `CheckpointError` if there is nothing
    at the URL or it cannot be read, and if it is a checkpoint of a run that was not written to its
    end.
    """
    what = what or url
    bucket = BucketFolder.open(url, what, CheckpointError)
    with explain_store_errors(what, CheckpointError):
        listing = bucket.list_files()
    if "" in listing:
        return _copy_single(bucket, listing[""], what, CheckpointError)
    if not listing:
        raise CheckpointError(
            f"{what}: there is no such file or folder in the bucket; check the spelling"
        )
    files = {}
    for name, stamp in listing.items():
        folder, _, file = name.rpartition("/")
        if folder in MODEL_FOLDERS and file.endswith((*SMALL, *WEIGHTS)):
            files[name] = stamp
    if not files:
        raise CheckpointError(
            f"{what}: contains no model and no tokenizer; name the folder with config.json"
        )
    if any(name.endswith(".safetensors") for name in files):
        files = {name: each for name, each in files.items() if not name.endswith(WEIGHTS[1:])}
    copy = _copy_files(bucket, files, what, CheckpointError, lambda name: name.endswith(SMALL))
    _check_manifest(copy, bucket, files, what)
    return copy


def find_checkpoint_url(url: str, roles: Sequence[str]) -> str:
    """Return the URL of a whole checkpoint if `url` is a run, else `url`.

    This is the newest one, unless the URL ends with `@step40` or `@best`. `roles` are the roles
    whose checkpoints are suitable, best first; an end such as `@best:critic` names another one.
    Raises `CheckpointError` if there is no such checkpoint, or if the bucket cannot be read.
    """
    named = NAMED_CHECKPOINT.fullmatch(url)
    bucket = BucketFolder.open(named["run"] if named else url, url, CheckpointError)
    with explain_store_errors(url, CheckpointError):
        listing = bucket.list_files()
        best = bucket.read(BEST_RECORD) if BEST_RECORD in listing else b"{}"
    steps: dict[str, list[int]] = {}
    for name in listing:
        match = WHOLE_CHECKPOINT.fullmatch(name)
        if match is not None:
            steps.setdefault(match[1], []).append(int(match[2]))
    wanted_roles = [named["role"]] if named and named["role"] else roles
    role = next((role for role in wanted_roles if role in steps), None)
    if named is None:
        if role is None or "config.json" in listing:
            return url
        return f"{bucket.url}/checkpoints/{role}/step{max(steps[role])}"
    there = sorted(steps.get(role or "", []))
    choices = {f"step{step}": step for step in there}
    if there:
        choices["latest"] = there[-1]
    if (best_step := _read_step(best)) in there:
        choices["best"] = best_step
    if named["step"] not in choices:
        listed = ", ".join(f"@{name}" for name in choices) or "none"
        raise CheckpointError(
            f"{url}: there is no such checkpoint of {' or '.join(wanted_roles)}; the run has {listed}"
        )
    return f"{bucket.url}/checkpoints/{role}/step{choices[named['step']]}"


def _read_step(record: bytes) -> int:
    """Return the step of a run's record of its best checkpoint, or -1 if it has none."""
    try:
        return int(json.loads(record)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def complete(path: str | Path) -> None:
    """Copy the files that a copy lacks, such as the weights. Other folders are not changed.

    Raises `CheckpointError` if a file cannot be read, or has changed since the copy was begun.
    """
    copy = Path(path)
    url = find_url(copy)
    if url is None:
        return
    # The path can come from another machine, which has made the copy there.
    if not copy.exists() and copy_model(url) != copy:
        raise CheckpointError(f"{url}: has changed since the run was started; start it again")
    files = read_listing(copy)
    if any(not (copy / name).is_file() for name in files):
        bucket = BucketFolder.open(url, url, CheckpointError)
        _copy_files(bucket, files, url, CheckpointError, lambda _: True)


def read_listing(copy: str | Path) -> dict[str, FileStamp]:
    """Return the stamps of all files of a copy, also of those that are still to be copied.

    Returns an empty mapping for a folder that is not a copy.
    """
    file = Path(copy) / LISTING
    if not file.is_file():
        return {}
    stamps = json.loads(file.read_text())["files"]
    return {name: FileStamp(*stamp) for name, stamp in stamps.items()}


def _check_manifest(
    copy: Path,
    bucket: BucketFolder,
    files: Mapping[str, FileStamp],
    what: str,
) -> None:
    """Raise `CheckpointError` if a checkpoint that a run wrote to a bucket is not complete."""
    if MANIFEST not in files:
        if CHECKPOINT.search(bucket.url):
            raise CheckpointError(
                f"{what}: is not complete: {MANIFEST}, which a run writes last, is missing; wait "
                f"for the run, or name an earlier checkpoint"
            )
        return
    stated = json.loads((copy / MANIFEST).read_text())["sizes"]
    for name, size in stated.items():
        if name in files and files[name].size != size:
            raise CheckpointError(
                f"{what}: {name} has {files[name].size:,} bytes instead of {size:,}"
            )
    missing = [name for name in stated if name.endswith(WEIGHTS) and name not in files]
    if missing and not any("/" in name for name in missing):
        raise CheckpointError(f"{what}: is not complete: {missing[0]} is missing")


# -- files and data


def copy_file(url: str, what: str = "", kind: type[UserError] = ConfigError) -> Path:
    """Return a local copy of a file. Raises `kind` if the file is missing or cannot be read."""
    what = what or url
    bucket = BucketFolder.open(url, what, kind)
    with explain_store_errors(what, kind):
        listing = bucket.list_files()
    if "" not in listing:
        problem = "is a folder, not a file" if listing else "there is no such file in the bucket"
        raise kind(f"{what}: {problem}; check the spelling")
    return _copy_single(bucket, listing[""], what, kind)


def copy_data(url: str, suffixes: tuple[str, ...]) -> Path:
    """Return a copy of a data file, or of the folder with all data files below a URL.

    `suffixes` are the ends of the names of data files. A last part with `*`, `?` or `[` selects the
    files whose names match. Within a process, the copy of a URL stays the same until
    `forget_data_copies` is called. Raises `DataError`.
    """
    if url in _DATA_COPIES:
        return _DATA_COPIES[url]
    place, _, pattern = url.rpartition("/")
    has_pattern = any(sign in pattern for sign in "*?[")
    bucket = BucketFolder.open(place if has_pattern else url, url, DataError)
    with explain_store_errors(url, DataError):
        listing = bucket.list_files()
    if "" in listing:
        if not url.endswith(suffixes):
            raise DataError(
                f"{url}: weft reads {', '.join(suffixes)}; convert the file to one of them"
            )
        copy = _copy_single(bucket, listing[""], url, DataError)
    else:
        files = {}
        for name, stamp in listing.items():
            matches = not has_pattern or ("/" not in name and PurePosixPath(name).match(pattern))
            if name.endswith(suffixes) and matches:
                files[name] = stamp
        if not files:
            problem = "no data files in it" if listing else "there is no such file or folder"
            raise DataError(f"{url}: {problem}; weft reads {', '.join(suffixes)}")
        copy = _copy_files(bucket, files, url, DataError, lambda name: True)
    _DATA_COPIES[url] = copy
    return copy


# Copies of data that this process has chosen, so that a run reads one version throughout
_DATA_COPIES: dict[str, Path] = {}


def forget_data_copies() -> None:
    """Look up the version of every data URL again, when it is used next."""
    _DATA_COPIES.clear()


def check_data(url: str, what: str) -> None:
    """Raise `ConfigError`, beginning with `what`, if there are no data at a URL.

    Only names and sizes are read.
    """
    place, _, last = url.rpartition("/")
    has_pattern = any(sign in last for sign in "*?[")
    bucket = BucketFolder.open(place if has_pattern else url, what, ConfigError)
    with explain_store_errors(what, ConfigError):
        listing = bucket.list_files()
    if not listing:
        raise ConfigError(f"{what}: there is no such file or folder in the bucket")
    if "" in listing and listing[""].size == 0:
        raise ConfigError(f"{what}: the file is empty; it needs at least one row")


# -- the copying itself


def _copy_single(bucket: BucketFolder, stamp: FileStamp, what: str, kind: type[UserError]) -> Path:
    """Return a copy of the file that the bucket's URL names."""
    name = bucket.url.rpartition("/")[2]
    files = {name: stamp}
    return _copy_files(bucket.open_parent(), files, what, kind, lambda _: True, name="") / name


def _copy_files(
    bucket: BucketFolder,
    files: Mapping[str, FileStamp],
    what: str,
    kind: type[UserError],
    wanted: Callable[[str], bool],
    *,
    name: str | None = None,
) -> Path:
    """Copy the `wanted` ones of the given files, unless they are there, and return the copy's folder.

    `name` is the first part of the folder's name, by default the last part of the bucket's URL. One
    file is copied after the other. A lock lets one process copy, and others wait. Raises `kind`.
    """
    stamps = {name: [each.size, each.version, each.md5] for name, each in sorted(files.items())}
    digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:VERSION_DIGITS]
    place = find_cache_folder() / COPIES / split_url(bucket.url)
    copy = place.with_name(f"{place.name}@{digest}") if name is None else place / f"{name}@{digest}"
    try:
        with _lock(copy):
            if not (copy / LISTING).is_file():
                write(copy / LISTING, json.dumps({"url": bucket.url, "files": stamps}, indent=1))
            missing = []
            for name, stamp in files.items():
                target = copy / name
                if wanted(name) and not (target.is_file() and target.stat().st_size == stamp.size):
                    missing.append(name)
            _announce(bucket.url, sum(files[name].size for name in missing))
            for name in missing:
                with explain_store_errors(f"{what}: {name} cannot be copied", kind):
                    bucket.download(name, copy / name, files[name])
            if missing:
                _check_unchanged(bucket, {name: files[name] for name in missing}, what, kind)
    except OSError as error:
        raise kind(
            f"{what}: cannot be copied to {copy.parent}: {error.strerror or error}; free some "
            f"space, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return copy


def _check_unchanged(
    bucket: BucketFolder, files: Mapping[str, FileStamp], what: str, kind: type[UserError]
) -> None:
    """Raise `kind` if remote files were changed or removed while they were copied."""
    with explain_store_errors(what, kind):
        if len(files) == 1:  # a folder with one wanted file can have millions of others
            now = {name: bucket.read_stamp(name) for name in files}
        else:
            now = bucket.list_files()
    for name, stamp in files.items():
        if now.get(name) != stamp:
            raise kind(f"{what}: {name} was changed while it was copied; try again")


def _announce(url: str, num_bytes: int) -> None:
    if num_bytes >= NOTED_BYTES:
        print(
            f"note: copying {num_bytes / GIGABYTE:.1f} GB from {url} to {find_cache_folder()}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _lock(copy: Path) -> Iterator[None]:
    """Create the folder of a copy, and let no other process of this machine change it."""
    copy.mkdir(parents=True, exist_ok=True)
    folder = find_cache_folder() / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(copy).encode()).hexdigest()[:24]
    with (folder / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_if_remote(path: str, what: str = "") -> str:
    """Return the path of a copy if `path` is the URL of a model or a tokenizer, else `path`.

    If `path` is a copy that another machine has made, it is made on this machine as well.
    """
    if is_remote(path):
        return str(copy_model(path, what))
    if not Path(path).exists():
        complete(path)
    return path


def find_runs_folder(fileroot: str) -> Path:
    """Return the local folder of the runs in `fileroot`.

    If `fileroot` is a URL, this is the folder of the working copies of its runs on this machine.
    """
    if is_remote(fileroot):
        return find_cache_folder() / WORKING_COPIES / split_url(fileroot)
    return Path(fileroot).expanduser()
