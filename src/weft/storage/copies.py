"""Local copies of files and folders in buckets, shared by all processes of a machine.

    folder = copy_model("gs://b/model", "actor.path=gs://b/model")  # configuration and tokenizer
    complete(folder)                                                # weights
    file = copy_file("gs://b/tokenizer.model")
    files = copy_data("s3://b/rows")

A copy is a folder in the cache, such as `copies/gs/b/model@VERSION`. VERSION is a hash of the
names, sizes and versions of the remote files. So a changed folder gets another copy, and all
processes that use the path of a copy read the same version. `find_url` returns the URL of a copy.
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
CONVERTED = "converted"  # folder of converted models, which are named NAME@VERSION
LISTING = ".weft-copy.json"  # URL of a copy, and stamps of all its files
LOCKS = ".locks"
VERSION_DIGITS = 12
COPY_NAME = re.compile(rf"(.*)@([0-9a-f]{{{VERSION_DIGITS}}})")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".msgpack")  # copied by `complete`
SMALL = (".json", ".model", ".txt", ".jinja")  # copied by `copy_model`
MODEL_FOLDERS = ("", "adapter")  # folders that are copied from a model directory
MANIFEST = "weft_manifest.json"  # written last into a checkpoint, with the checksums of its files
CHECKPOINT = re.compile(r"/checkpoints/[^/]+/step\d+/?$")
WHOLE_CHECKPOINT = re.compile(rf"checkpoints/([^/]+)/step(\d+)/{re.escape(MANIFEST)}")
NAMED_CHECKPOINT = re.compile(r"(?P<run>[^@]+)@(?P<step>latest|best|step\d+)(?::(?P<role>[\w-]+))?")
BEST_RECORD = "checkpoints/best.json"
GIGABYTE = 1 << 30
ANNOUNCED_BYTES = 1 << 28  # minimum size of a copy that is announced to the user


def find_cache_folder() -> Path:
    """Return the cache folder for copies and views of buckets, and for runs that are uploaded."""
    folder = os.environ.get(CACHE_VARIABLE)
    if folder:
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "weft" / "buckets"


def split_url(url: str) -> Path:
    """Return the relative path in the cache for a URL: `gs/b/model` for `gs://b/model`."""
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
            url_parts = [*parts[:index], match[1], *parts[index + 1 :]]
            return f"{scheme}://{'/'.join(filter(None, url_parts))}"
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
    """Return nested options with the paths of copies replaced by their URLs.

    The paths of converted models are replaced by `converted/NAME@VERSION`. So the options of a run
    do not depend on the machine.
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


def copy_model(url: str, subject: str = "") -> Path:
    """Return a copy of a model directory without the weights, or of a tokenizer directory or file.

    `complete` copies the weights when they are needed. Error messages begin with `subject`; the
    default is the URL. Raises `CheckpointError` if the URL cannot be read, if it has no model and
    no tokenizer, or if it is an incomplete checkpoint of a run.
    """
    subject = subject or url
    bucket = BucketFolder.open(url, subject, CheckpointError)
    with explain_store_errors(subject, CheckpointError):
        listing = bucket.list_files()
    if "" in listing:
        return _copy_single(bucket, listing[""], subject, CheckpointError)
    if not listing:
        raise CheckpointError(
            f"{subject}: there is no such file or folder in the bucket; check the spelling"
        )
    files = {}
    for name, stamp in listing.items():
        folder, _, file = name.rpartition("/")
        if folder in MODEL_FOLDERS and file.endswith((*SMALL, *WEIGHTS)):
            files[name] = stamp
    if not files:
        raise CheckpointError(
            f"{subject}: contains no model and no tokenizer; name the folder with config.json"
        )
    if any(name.endswith(".safetensors") for name in files):
        files = {name: each for name, each in files.items() if not name.endswith(WEIGHTS[1:])}
    copy = _copy_files(bucket, files, subject, CheckpointError, lambda name: name.endswith(SMALL))
    _check_manifest(copy, bucket, files, subject)
    return copy


def find_checkpoint_url(url: str, roles: Sequence[str]) -> str:
    """Return the URL of a complete checkpoint of a run, or `url` if it is not a run.

    The newest checkpoint is chosen, unless the URL ends with, for example, `@step40` or `@best`.
    `roles` are the acceptable roles, best first; a URL that ends with, for example, `@best:critic`
    names another role. Raises `CheckpointError` if there is no such checkpoint, or if the bucket
    cannot be read.
    """
    url_match = NAMED_CHECKPOINT.fullmatch(url)
    bucket = BucketFolder.open(url_match["run"] if url_match else url, url, CheckpointError)
    with explain_store_errors(url, CheckpointError):
        listing = bucket.list_files()
        best_record = bucket.read(BEST_RECORD) if BEST_RECORD in listing else b"{}"
    steps: dict[str, list[int]] = {}
    for name in listing:
        match = WHOLE_CHECKPOINT.fullmatch(name)
        if match is not None:
            steps.setdefault(match[1], []).append(int(match[2]))
    wanted_roles = [url_match["role"]] if url_match and url_match["role"] else roles
    role = next((role for role in wanted_roles if role in steps), None)
    if url_match is None:
        if role is None or "config.json" in listing:
            return url
        return f"{bucket.url}/checkpoints/{role}/step{max(steps[role])}"
    available_steps = sorted(steps.get(role or "", []))
    choices = {f"step{step}": step for step in available_steps}
    if available_steps:
        choices["latest"] = available_steps[-1]
    best_step = _read_step(best_record)
    if best_step in available_steps:
        choices["best"] = best_step
    if url_match["step"] not in choices:
        listed = ", ".join(f"@{name}" for name in choices) or "none"
        raise CheckpointError(
            f"{url}: there is no such checkpoint of {' or '.join(wanted_roles)}; the run has "
            f"{listed}"
        )
    return f"{bucket.url}/checkpoints/{role}/step{choices[url_match['step']]}"


def _read_step(record: bytes) -> int:
    """Return the step recorded in the contents of `best.json`, or -1 if they are invalid."""
    try:
        return int(json.loads(record)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def complete(path: str | Path) -> None:
    """Copy the files that are missing in the copy `path`, such as the weights.

    Do nothing if `path` is not a copy. Raises `CheckpointError` if a file cannot be read, or has
    changed since the copy was begun.
    """
    copy = Path(path)
    url = find_url(copy)
    if url is None:
        return
    # The path may come from another machine, which has its own copy at this path.
    if not copy.exists() and copy_model(url) != copy:
        raise CheckpointError(f"{url}: has changed since the run was started; start it again")
    files = read_listing(copy)
    if any(not (copy / name).is_file() for name in files):
        bucket = BucketFolder.open(url, url, CheckpointError)
        _copy_files(bucket, files, url, CheckpointError, lambda _: True)


def read_listing(copy: str | Path) -> dict[str, FileStamp]:
    """Return the stamps of all files of a copy, including files that are not copied yet.

    The result is empty for a folder that is not a copy.
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
    subject: str,
) -> None:
    """Raise `CheckpointError` if a checkpoint that a run wrote to a bucket is not complete."""
    if MANIFEST not in files:
        if CHECKPOINT.search(bucket.url):
            raise CheckpointError(
                f"{subject}: is not complete: {MANIFEST}, which a run writes last, is missing; "
                "wait for the run, or name an earlier checkpoint"
            )
        return
    sizes = json.loads((copy / MANIFEST).read_text())["sizes"]
    for name, size in sizes.items():
        if name in files and files[name].size != size:
            raise CheckpointError(
                f"{subject}: {name} has {files[name].size:,} bytes instead of {size:,}"
            )
    missing = [name for name in sizes if name.endswith(WEIGHTS) and name not in files]
    if missing and not any("/" in name for name in missing):
        raise CheckpointError(f"{subject}: is not complete: {missing[0]} is missing")


# -- files and data


def copy_file(url: str, subject: str = "", kind: type[UserError] = ConfigError) -> Path:
    """Return a local copy of a file. Raises `kind` if the file is missing or cannot be read."""
    subject = subject or url
    bucket = BucketFolder.open(url, subject, kind)
    with explain_store_errors(subject, kind):
        listing = bucket.list_files()
    if "" not in listing:
        problem = "is a folder, not a file" if listing else "there is no such file in the bucket"
        raise kind(f"{subject}: {problem}; check the spelling")
    return _copy_single(bucket, listing[""], subject, kind)


def copy_data(url: str, suffixes: tuple[str, ...]) -> Path:
    """Return a copy of a data file, or of a folder with the data files below a URL.

    `suffixes` are the endings of the names of data files. If the last part of the URL contains `*`,
    `?` or `[`, only the files whose names match it are copied. Within a process, the copy of a URL
    stays the same until `forget_data_copies` is called. Raises `DataError` if there are no data
    files, or if they cannot be read.
    """
    if url in _DATA_COPIES:
        return _DATA_COPIES[url]
    parent_url, _, pattern = url.rpartition("/")
    has_pattern = any(sign in pattern for sign in "*?[")
    bucket = BucketFolder.open(parent_url if has_pattern else url, url, DataError)
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


# URL -> copy used by this process, so that a run reads the same version throughout
_DATA_COPIES: dict[str, Path] = {}


def forget_data_copies() -> None:
    """Forget the copies in use, so that `copy_data` looks up the version of every URL again."""
    _DATA_COPIES.clear()


def check_data(url: str, subject: str) -> None:
    """Raise `ConfigError` if there are no files at a data URL, or only an empty file.

    Only names and sizes are read. The error message begins with `subject`.
    """
    parent_url, _, pattern = url.rpartition("/")
    has_pattern = any(sign in pattern for sign in "*?[")
    bucket = BucketFolder.open(parent_url if has_pattern else url, subject, ConfigError)
    with explain_store_errors(subject, ConfigError):
        listing = bucket.list_files()
    if not listing:
        raise ConfigError(f"{subject}: there is no such file or folder in the bucket")
    if "" in listing and listing[""].size == 0:
        raise ConfigError(f"{subject}: the file is empty; it needs at least one row")


# -- copying


def _copy_single(
    bucket: BucketFolder, stamp: FileStamp, subject: str, kind: type[UserError]
) -> Path:
    """Return a copy of the single file at the bucket's URL, whose stamp is `stamp`."""
    name = bucket.url.rpartition("/")[2]
    files = {name: stamp}
    copy = _copy_files(bucket.open_parent(), files, subject, kind, lambda _: True, copy_name="")
    return copy / name


def _copy_files(
    bucket: BucketFolder,
    files: Mapping[str, FileStamp],
    subject: str,
    kind: type[UserError],
    should_copy: Callable[[str], bool],
    *,
    copy_name: str | None = None,
) -> Path:
    """Copy the files that `should_copy` selects by name, and return the folder of the copy.

    `files` are all files of the copy, which determine its version; files that are present already
    are skipped. `copy_name` is the part of the folder's name before `@`; the default is the last
    part of the bucket's URL. A lock makes other processes wait. Raises `kind` if copying fails.
    """
    stamps = {name: [each.size, each.version, each.md5] for name, each in sorted(files.items())}
    digest = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:VERSION_DIGITS]
    copy = find_cache_folder() / COPIES / split_url(bucket.url)
    if copy_name is None:
        copy = copy.with_name(f"{copy.name}@{digest}")
    else:
        copy = copy / f"{copy_name}@{digest}"
    try:
        with _lock(copy):
            if not (copy / LISTING).is_file():
                write(copy / LISTING, json.dumps({"url": bucket.url, "files": stamps}, indent=1))
            missing = []
            for name, stamp in files.items():
                if not should_copy(name):
                    continue
                target = copy / name
                if not target.is_file() or target.stat().st_size != stamp.size:
                    missing.append(name)
            _announce(bucket.url, sum(files[name].size for name in missing))
            for name in missing:
                with explain_store_errors(f"{subject}: {name} cannot be copied", kind):
                    bucket.download(name, copy / name, files[name])
            if missing:
                _check_unchanged(bucket, {name: files[name] for name in missing}, subject, kind)
    except OSError as error:
        raise kind(
            f"{subject}: cannot be copied to {copy.parent}: {error.strerror or error}; free some "
            f"space, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return copy


def _check_unchanged(
    bucket: BucketFolder, files: Mapping[str, FileStamp], subject: str, kind: type[UserError]
) -> None:
    """Raise `kind` if remote files were changed or removed during copying."""
    with explain_store_errors(subject, kind):
        if len(files) == 1:  # the folder may have millions of other files
            current = {name: bucket.read_stamp(name) for name in files}
        else:
            current = bucket.list_files()
    for name, stamp in files.items():
        if current.get(name) != stamp:
            raise kind(f"{subject}: {name} was changed while it was copied; try again")


def _announce(url: str, num_bytes: int) -> None:
    if num_bytes >= ANNOUNCED_BYTES:
        print(
            f"note: copying {num_bytes / GIGABYTE:.1f} GB from {url} to {find_cache_folder()}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _lock(copy: Path) -> Iterator[None]:
    """Create the folder of a copy, and lock it against other processes of this machine."""
    copy.mkdir(parents=True, exist_ok=True)
    folder = find_cache_folder() / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(copy).encode()).hexdigest()[:24]
    with (folder / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def copy_if_remote(path: str, subject: str = "") -> str:
    """Return the path of a copy if `path` is the URL of a model or a tokenizer, else `path`.

    If `path` is a copy that exists only on another machine, it is copied to this machine, too.
    """
    if is_remote(path):
        return str(copy_model(path, subject))
    if not Path(path).exists():
        complete(path)
    return path


def find_runs_folder(fileroot: str) -> Path:
    """Return the local folder of the runs in `fileroot`.

    If `fileroot` is a URL, the result is the folder with this machine's working copies of its runs.
    """
    if is_remote(fileroot):
        return find_cache_folder() / WORKING_COPIES / split_url(fileroot)
    return Path(fileroot).expanduser()
