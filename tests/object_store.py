"""A file system over a local folder that behaves like an object store, for tests with processes.

There is no rename, a file appears whole when its writer closes it, and a conditional create is one
operation. `objects://BUCKET/NAME` is a file in the folder that the variable WEFT_TEST_OBJECTS names;
a bucket is a folder that exists there. Operations that write can be slow, or fail, by two more
variables, so that the processes of a run can be given them as well.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

ROOT = "WEFT_TEST_OBJECTS"
SECONDS = "WEFT_TEST_OBJECTS_SECONDS"  # duration of each operation that writes
FAILS_FROM = "WEFT_TEST_OBJECTS_FAIL"  # number of the first write of a process that fails
SIGN = "%2F"  # stands for a slash, so that a name is one file of the local folder


class ObjectStore(AbstractFileSystem):
    """Files by name in buckets."""

    protocol = "objects"
    root_marker = ""
    num_writes = 0

    def _get_file(self, path: str) -> Path:
        bucket, _, name = self._strip_protocol(path).partition("/")
        folder = Path(os.environ[ROOT], bucket)
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such bucket", bucket)
        return folder / (name.replace("/", SIGN) or ".none")

    def _write(self, path: str, contents: bytes, *, only_new: bool) -> None:
        ObjectStore.num_writes += 1
        if ObjectStore.num_writes >= int(os.environ.get(FAILS_FROM, 1 << 60)):
            raise OSError(errno.EIO, "the store is on fire")
        target = self._get_file(path)
        partial = target.with_name(f".{secrets.token_hex(8)}")
        partial.write_bytes(contents)
        time.sleep(float(os.environ.get(SECONDS, 0)))
        if only_new:
            try:
                os.link(partial, target)
            finally:
                partial.unlink()
        else:
            os.replace(partial, target)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        self._write(path, value, only_new=mode == "create")

    def put_file(self, lpath: str, rpath: str, callback: Any = None, **more: Any) -> None:
        self._write(rpath, Path(lpath).read_bytes(), only_new=False)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **more: Any
    ) -> bytes:
        return self._get_file(path).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        self._get_file(path).unlink()

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        file = self._get_file(path)
        contents = file.read_bytes()
        etag = hashlib.md5(contents).hexdigest()
        name = self._strip_protocol(path)
        return {"name": name, "size": len(contents), "type": "file", "ETag": etag}

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, **more: Any) -> Any:
        root = self._strip_protocol(path)
        bucket = root.partition("/")[0]
        names = {}
        self._get_file(root)
        for file in sorted(Path(os.environ[ROOT], bucket).iterdir()):
            name = f"{bucket}/{file.name.replace(SIGN, '/')}"
            if not file.name.startswith(".") and (name == root or name.startswith(f"{root}/")):
                names[name] = self.info(name)
        return names

    def mv(self, *args: Any, **more: Any) -> None:
        raise NotImplementedError("an object store has no rename")

    mv_file = rename = move = cp_file = mv

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        return

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        raise NotImplementedError


def register() -> None:
    """Let fsspec know `objects://`."""
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
