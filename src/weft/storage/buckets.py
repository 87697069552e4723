"""Read and write files below a URL such as `gs://BUCKET/FOLDER`, with the library fsspec.

    bucket = BucketFolder.open("gs://b/model")      # s3://, memory:// and everything that fsspec knows
    bucket.list_files()                       # {"config.json": FileStamp(...), ...}
    bucket.create("run.lock", b"...")         # only if there is no such file yet

An object store has no folders and no rename: a file appears whole when its writer closes it. All
problems are reported as one line that names the URL: `UserError` subclasses while input is read,
`RunError` while a run writes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, UserError, WeftError
from weft.extras import install
from weft.reading import describe_cause, find_url_problem
from weft.writing import TEMPORARY, rename, sync

REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)", re.DOTALL)
LOCAL_KINDS = ("file", "local", "hf")  # URLs for which there is a plainer name
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # extra of weft by kind of URL
PACKAGES = {"gcs": "gcsfs", "s3": "s3fs"}
# Fields in which file systems state the version of a file, the most reliable first
VERSION_FIELDS = (
    "generation",
    "ETag",
    "etag",
    "md5Hash",
    "crc32c",
    "Content-MD5",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "mtime",
    "created",
)
# Stores without folders. Creating one there is needless, and could create a misspelled bucket.
OBJECT_STORES = {
    *EXTRAS,
    "abfs",
    "abfss",
    "az",
    "adl",
    "oci",
    "oss",
    "tos",
    "memory",
    "http",
    "https",
}
RANGE_BYTES = 1 << 26  # bytes that are read at once
DENIED = (401, 403)


def is_remote(path: object) -> bool:
    """Return whether `path` is a URL of files that weft reads with fsspec, such as `gs://b/x`."""
    match = REMOTE.fullmatch(str(path)) if isinstance(path, str) else None
    return match is not None and match[1].lower() not in LOCAL_KINDS


def find_bucket_problem(path: str) -> str | None:
    """Return an error message for a URL that weft cannot read, or None for other URLs and paths."""
    if not is_remote(path):
        return find_url_problem(path)
    match = REMOTE.fullmatch(path)
    assert match is not None, "is_remote says so"
    from fsspec.registry import known_implementations, registry

    kind = match[1].lower()
    if kind not in known_implementations and kind not in registry:
        return f"is a URL of a kind that fsspec does not know: {kind}://; write gs:// or s3://"
    return None


@dataclass(frozen=True)
class FileStamp:
    """Size of a remote file in bytes, and a text that changes with its contents.

    `md5` is the base64 MD5 of the contents if the store states it, else None.
    """

    size: int
    version: str
    md5: str | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> FileStamp:
        """Return the stamp of a file that fsspec describes by `info`."""
        stated = [str(info[name]) for name in VERSION_FIELDS if info.get(name) is not None]
        md5 = info.get("md5Hash")
        return cls(
            int(info["size"] or 0),
            stated[0] if stated else "",
            md5 if isinstance(md5, str) else None,
        )


class BucketFolder:
    """Files below one URL.

    Names of files are relative to the URL, with `/` between their parts. The name "" is the URL
    itself, if it is a file.
    """

    def __init__(self, url: str, system: Any, root: str) -> None:
        self.url = url.rstrip("/")
        self._system = system
        self._root = root.rstrip("/")

    @classmethod
    def open(cls, url: str, what: str = "", kind: type[UserError] = ConfigError) -> BucketFolder:
        """Return the files below `url`, without reading anything.

        `what` is the beginning of error messages, such as the option with its value; by default the
        URL. Raises `kind` if fsspec does not know this kind of URL, if a package is missing, or if
        there are no credentials.
        """
        what = what or url
        problem = find_bucket_problem(url)
        if problem is not None:
            raise kind(f"{what}: {problem}")
        import fsspec

        scheme = url.partition("://")[0].lower()
        try:
            system, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise kind(f"{what}: {_explain_missing_package(scheme, error)}") from error
        except Exception as error:  # any error of the file system's library
            raise kind(f"{what}: {_describe_failure(error)}") from error
        return cls(url, system, str(root))

    def open_parent(self) -> BucketFolder:
        """Return the files in the folder that contains the URL."""
        return BucketFolder(
            self.url.rpartition("/")[0], self._system, self._root.rpartition("/")[0]
        )

    def list_files(self) -> dict[str, FileStamp]:
        """Return the stamps of all files below the URL, by name; without files, an empty mapping.

        If the URL is a file, the result is `{"": stamp}`.
        """
        self._system.invalidate_cache()
        try:
            entries = self._system.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        files = {}
        root = self._root.lstrip("/")  # file systems differ in the slash before a path
        for path, info in sorted(entries.items()):
            if info.get("type") != "directory":
                files[str(path).lstrip("/")[len(root) :].lstrip("/")] = FileStamp.from_info(info)
        if len(files) > 1:
            files.pop("", None)  # an empty object that stands for the folder
        return files

    def read_stamp(self, name: str) -> FileStamp:
        """Return the stamp of a file. Raises `FileNotFoundError` if the file does not exist.

        It is the same as in `list_files`: some file systems describe a file otherwise if it is
        asked for alone.
        """
        stamps = BucketFolder(f"{self.url}/{name}", self._system, self._get_path(name)).list_files()
        if "" not in stamps:
            raise FileNotFoundError(name)
        return stamps[""]

    def read(self, name: str) -> bytes:
        """Return the contents of a file. Raises `FileNotFoundError` if it does not exist."""
        contents: bytes = self._system.cat_file(self._get_path(name))
        return contents

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes `start` to `end` (excluded) of a file."""
        part: bytes = self._system.cat_file(self._get_path(name), start=start, end=end)
        return part

    def write(self, name: str, contents: bytes) -> None:
        """Write a file, replacing an earlier one."""
        self._make_parent(name)
        self._system.pipe_file(self._get_path(name), contents)

    def create(self, name: str, contents: bytes) -> bool:
        """Write a file unless its name is taken, in one operation of the store.

        Returns False, and changes nothing, if there is one.
        """
        self._make_parent(name)
        try:
            self._system.pipe_file(self._get_path(name), contents, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, path: Path, name: str) -> None:
        """Write the contents of the local file `path` to a file, in parts if it is large."""
        self._make_parent(name)
        self._system.put_file(str(path), self._get_path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order. Files that do not exist are skipped."""
        for name in names:
            try:
                self._system.rm_file(self._get_path(name))
            except FileNotFoundError:
                continue

    def download(self, name: str, target: Path, stamp: FileStamp) -> None:
        """Copy a file to the local path `target`, which appears when the copy is complete.

        Bytes that an interrupted download of the same version has left are not read again. Raises
        `OSError` if the file has another size, or another MD5, than `stamp`.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        version = hashlib.sha256(f"{stamp.size} {stamp.version}".encode()).hexdigest()[:12]
        partial = target.with_name(f".{target.name}.{version}{TEMPORARY}")
        start = partial.stat().st_size if partial.exists() else 0
        with partial.open("ab") as file:
            while start < stamp.size:
                end = min(start + RANGE_BYTES, stamp.size)
                part = self.read_range(name, start, end)
                if len(part) != end - start:
                    raise OSError(f"bytes {start:,} to {end:,} came as {len(part):,} bytes")
                file.write(part)
                start = end
        if start != stamp.size or (stamp.md5 is not None and _compute_md5(partial) != stamp.md5):
            partial.unlink()
            raise OSError("the copy differs from the file in the bucket; try again")
        sync(partial)
        rename(partial, target)

    def _get_path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        """Create the folder of a file, on file systems that have folders."""
        kinds = self._system.protocol
        if OBJECT_STORES.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
            self._system.makedirs(self._get_path(name).rpartition("/")[0], exist_ok=True)


@contextmanager
def explain_store_errors(what: str, kind: type[WeftError], fix: str = "") -> Iterator[None]:
    """Turn an error of a file system in the context into `kind`, with a one-line message.

    The message consists of `what`, which names the URL, the cause and `fix`. weft's own errors are
    not changed.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # each file system has its own kinds of errors
        tail = f"; {fix}" if fix else ""
        raise kind(f"{what}: {_describe_failure(error)}{tail}") from error


def _describe_failure(error: Exception) -> str:
    """Return a description of the error of a file system, without line breaks."""
    text = describe_cause(error)
    name = type(error).__name__
    code = getattr(error, "code", None) or getattr(error, "status", None)
    if isinstance(error, FileNotFoundError):
        return "there is no such bucket or file"
    if "Credentials" in name or ("credentials" in text.lower() and "invalid" not in text.lower()):
        return f"there are no credentials for it ({text}); log in, or set them in the environment"
    if isinstance(error, PermissionError) or str(code) in map(str, DENIED):
        return f"access is denied ({text}); check the credentials and the permissions"
    if isinstance(error, NotImplementedError):
        return "this kind of storage does not support the operation"
    return f"the storage does not answer as expected ({text})"


def _explain_missing_package(scheme: str, error: ImportError) -> str:
    """Return a message that names the missing package of a kind of URL and how to install it."""
    extra = EXTRAS.get(scheme)
    if extra is None:
        return f"{scheme}:// needs another package: {describe_cause(error)}"
    return (
        f"{scheme}:// needs the package {PACKAGES[extra]}, which is not installed; {install(extra)}"
    )


def _compute_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return base64.b64encode(digest.digest()).decode()
