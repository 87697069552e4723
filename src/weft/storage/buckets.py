"""Read and write files below a URL such as `gs://BUCKET/FOLDER`, with the library fsspec.

    bucket = BucketFolder.open("gs://b/model")   # s3://, memory:// and everything that fsspec knows
    bucket.list_files()                          # {"config.json": FileStamp(...), ...}
    bucket.create("run.lock", b"...")            # only if the file does not exist

Object stores have no folders and cannot rename files: a file appears, with its full contents, when
its writer closes it. Each error is reported in one line that names the URL, as a subclass of
`UserError` while input is read, and as `RunError` while a run writes.
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
LOCAL_SCHEMES = ("file", "local", "hf")  # schemes that weft refuses: such files have shorter names
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}  # URL scheme -> extra of weft
PACKAGES = {"gcs": "gcsfs", "s3": "s3fs"}
# Fields of fsspec's file descriptions that change with the contents, most reliable first
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
RANGE_BYTES = 1 << 26  # maximum bytes per read of a download
DENIED = (401, 403)  # HTTP status codes


def is_remote(path: object) -> bool:
    """Return whether `path` is a URL of files that weft reads with fsspec, such as `gs://b/x`."""
    match = REMOTE.fullmatch(str(path)) if isinstance(path, str) else None
    return match is not None and match[1].lower() not in LOCAL_SCHEMES


def find_bucket_problem(path: str) -> str | None:
    """Return an error message for a URL that weft cannot read, or None for other URLs and paths."""
    if not is_remote(path):
        return find_url_problem(path)
    match = REMOTE.fullmatch(path)
    assert match is not None, "is_remote says so"
    from fsspec.registry import known_implementations, registry

    scheme = match[1].lower()
    if scheme not in known_implementations and scheme not in registry:
        return f"is a URL of a kind that fsspec does not know: {scheme}://; write gs:// or s3://"
    return None


@dataclass(frozen=True)
class FileStamp:
    """Size and version of a remote file.

    `size` is in bytes. `version` is a text that changes with the contents. `md5` is the MD5 of the
    contents in base64, or None if the store does not report it.
    """

    size: int
    version: str
    md5: str | None = None

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> FileStamp:
        """Return the stamp of a file from `info`, fsspec's description of the file."""
        versions = [str(info[name]) for name in VERSION_FIELDS if info.get(name) is not None]
        md5 = info.get("md5Hash")
        return cls(
            int(info["size"] or 0),
            versions[0] if versions else "",
            md5 if isinstance(md5, str) else None,
        )


class BucketFolder:
    """Folder in a bucket, or a single file, with operations on its files.

    File names are relative to the URL, with `/` between their parts. If the URL is a file, the name
    of that file is "".
    """

    def __init__(self, url: str, system: Any, root: str) -> None:
        self.url = url.rstrip("/")
        self._system = system
        self._root = root.rstrip("/")

    @classmethod
    def open(cls, url: str, subject: str = "", kind: type[UserError] = ConfigError) -> BucketFolder:
        """Return the folder at `url`, without reading anything.

        Error messages begin with `subject`, such as the option with its value; the default is the
        URL. Raises `kind` if fsspec does not know the scheme of the URL, if a package is missing,
        or if there are no credentials.
        """
        subject = subject or url
        problem = find_bucket_problem(url)
        if problem is not None:
            raise kind(f"{subject}: {problem}")
        import fsspec

        scheme = url.partition("://")[0].lower()
        try:
            system, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise kind(f"{subject}: {_explain_missing_package(scheme, error)}") from error
        except Exception as error:  # any error of the file system's library
            raise kind(f"{subject}: {_describe_failure(error)}") from error
        return cls(url, system, str(root))

    def open_parent(self) -> BucketFolder:
        """Return the folder that contains this file or folder."""
        return BucketFolder(
            self.url.rpartition("/")[0], self._system, self._root.rpartition("/")[0]
        )

    def list_files(self) -> dict[str, FileStamp]:
        """Return the stamps of all files below the URL, by name.

        If the URL is a file, the result is `{"": stamp}`. If nothing exists at the URL, the result
        is empty.
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
            files.pop("", None)  # an empty object that marks the folder
        return files

    def read_stamp(self, name: str) -> FileStamp:
        """Return the stamp of a file. Raises `FileNotFoundError` if the file does not exist.

        The stamp equals the one in `list_files`: both are read from a listing, because some file
        systems describe a file differently in other calls.
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
        """Return the bytes of a file from `start` up to, but not including, `end`."""
        contents: bytes = self._system.cat_file(self._get_path(name), start=start, end=end)
        return contents

    def write(self, name: str, contents: bytes) -> None:
        """Write a file, replacing an earlier one."""
        self._make_parent(name)
        self._system.pipe_file(self._get_path(name), contents)

    def create(self, name: str, contents: bytes) -> bool:
        """Write a file if it does not exist, and return whether it was written.

        The store does this in one atomic operation.
        """
        self._make_parent(name)
        try:
            self._system.pipe_file(self._get_path(name), contents, mode="create")
        except FileExistsError:
            return False
        return True

    def upload(self, path: Path, name: str) -> None:
        """Upload the local file `path` as the file `name`, in parts if it is large."""
        self._make_parent(name)
        self._system.put_file(str(path), self._get_path(name))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files in the given order; skip those that do not exist."""
        for name in names:
            try:
                self._system.rm_file(self._get_path(name))
            except FileNotFoundError:
                continue

    def download(self, name: str, target: Path, stamp: FileStamp) -> None:
        """Copy a file to the local path `target`, which appears when the copy is complete.

        If a download of the same version was interrupted, it is continued. Raises `OSError` if the
        copy does not have the size and the MD5 in `stamp`.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        version = hashlib.sha256(f"{stamp.size} {stamp.version}".encode()).hexdigest()[:12]
        partial = target.with_name(f".{target.name}.{version}{TEMPORARY}")
        start = partial.stat().st_size if partial.exists() else 0
        with partial.open("ab") as file:
            while start < stamp.size:
                end = min(start + RANGE_BYTES, stamp.size)
                contents = self.read_range(name, start, end)
                if len(contents) != end - start:
                    raise OSError(f"bytes {start:,} to {end:,} came as {len(contents):,} bytes")
                file.write(contents)
                start = end
        if start != stamp.size or (stamp.md5 is not None and _compute_md5(partial) != stamp.md5):
            partial.unlink()
            raise OSError("the copy differs from the file in the bucket; try again")
        sync(partial)
        rename(partial, target)

    def _get_path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        """Create the folder of a file, unless the file system has no folders."""
        protocols = self._system.protocol
        if OBJECT_STORES.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
            self._system.makedirs(self._get_path(name).rpartition("/")[0], exist_ok=True)


@contextmanager
def explain_store_errors(subject: str, kind: type[WeftError], fix: str = "") -> Iterator[None]:
    """Convert errors of file systems in the `with` block to `kind`, with a one-line message.

    The message consists of `subject` (which names the URL), the cause and `fix`. weft's own errors
    pass unchanged.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # each file system defines its own error classes
        suffix = f"; {fix}" if fix else ""
        raise kind(f"{subject}: {_describe_failure(error)}{suffix}") from error


def _describe_failure(error: Exception) -> str:
    """Return a one-line description of an error of a file system."""
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
    """Return a message that names the package missing for `scheme`, and says how to install it."""
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
