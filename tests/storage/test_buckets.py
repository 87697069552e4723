"""Files in buckets: accepted URLs, conditional creation, continued downloads, and messages."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from weft.errors import ConfigError, DataError, RunError
from weft.storage import buckets
from weft.storage.buckets import (
    BucketFolder,
    FileStamp,
    explain_store_errors,
    find_bucket_problem,
    is_remote,
)


@pytest.fixture
def bucket() -> BucketFolder:
    fsspec.filesystem("memory").store.clear()
    return BucketFolder.open("memory://b/folder/")


@pytest.fixture(params=["memory", "local"])
def any_bucket(request: pytest.FixtureRequest, tmp_path: Path) -> BucketFolder:
    if request.param == "local":
        return BucketFolder("file://x", LocalFileSystem(), str(tmp_path / "bucket"))
    fsspec.filesystem("memory").store.clear()
    return BucketFolder.open("memory://b/folder")


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("gs://b/x", True),
        ("S3://b/x", True),
        ("memory://x", True),
        ("http://host/x.jsonl", True),
        ("gs:/b/x", False),
        ("gs://", False),
        ("file:///x", False),
        ("hf://owner/name", False),
        ("./x", False),
        ("owner/name:folder", False),
        ("C:\\x", False),
        (Path("gs://b/x"), False),
        (None, False),
    ],
)
def test_urls_of_buckets_are_recognized(path: object, remote: bool) -> None:
    assert is_remote(path) is remote


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("gs://b/x", None),
        ("x/y", None),
        ("gs:/b/x", "is a URL"),
        ("hf://owner/name", "write owner/name"),
        ("file:///data/x", "write /data/x"),
        ("gcp://b/x", "does not know: gcp://; write gs:// or s3://"),
    ],
)
def test_messages_for_other_urls_name_the_fix(path: str, problem: str | None) -> None:
    said = find_bucket_problem(path)
    assert said is None if problem is None else problem in str(said)


def test_files_are_written_listed_and_removed(any_bucket: BucketFolder) -> None:
    assert any_bucket.list_files() == {}
    any_bucket.write("a/b.txt", b"one")
    any_bucket.write("c.txt", b"")
    stamps = any_bucket.list_files()
    assert {name: stamp.size for name, stamp in stamps.items()} == {"a/b.txt": 3, "c.txt": 0}
    any_bucket.write("a/b.txt", b"two")
    assert any_bucket.list_files()["a/b.txt"] != stamps["a/b.txt"], "another version"
    assert any_bucket.list_files()["c.txt"] == stamps["c.txt"]
    assert any_bucket.read_range("a/b.txt", 1, 3) == b"wo"
    any_bucket.remove(["none", "a/b.txt", "c.txt"])
    assert any_bucket.list_files() == {}
    with pytest.raises(FileNotFoundError):
        any_bucket.read("c.txt")


def test_only_one_creates(any_bucket: BucketFolder) -> None:
    assert any_bucket.create("run.lock", b"mine")
    assert not any_bucket.create("run.lock", b"yours")
    assert any_bucket.read("run.lock") == b"mine"
    any_bucket.remove(["run.lock"])
    assert any_bucket.create("run.lock", b"yours")


def test_a_file_itself_has_no_name(bucket: BucketFolder) -> None:
    bucket.write("x.jsonl", b"12345")
    file = BucketFolder.open("memory://b/folder/x.jsonl")
    assert {name: stamp.size for name, stamp in file.list_files().items()} == {"": 5}
    assert file.read("") == b"12345"
    assert list(file.open_parent().list_files()) == ["x.jsonl"]


def test_an_object_that_marks_a_folder_is_not_listed() -> None:
    folder = BucketFolder("memory://b/folder/x", MarkedFolder(), "/b/folder/x")
    assert list(folder.list_files()) == ["a"]


class MarkedFolder:
    """File system with an empty object that marks the folder, as web consoles create it."""

    def invalidate_cache(self) -> None:
        return

    def find(self, path: str, detail: bool) -> dict[str, dict[str, object]]:
        return {name: {"size": 0, "type": "file"} for name in (f"{path}/", f"{path}/a")}


def test_an_interrupted_download_is_continued(
    bucket: BucketFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "RANGE_BYTES", 10)
    contents = bytes(range(64))
    bucket.write("x", contents)
    stamp = bucket.list_files()["x"]
    read = BucketFolder.read_range
    ranges: list[tuple[int, int]] = []

    def fail_after_three(self: BucketFolder, name: str, start: int, end: int) -> bytes:
        ranges.append((start, end))
        if len(ranges) == 4:
            raise ConnectionError("cut")
        return read(self, name, start, end)

    monkeypatch.setattr(BucketFolder, "read_range", fail_after_three)
    target = tmp_path / "copy" / "x"
    with pytest.raises(ConnectionError):
        bucket.download("x", target, stamp)
    assert not target.exists()
    bucket.download("x", target, stamp)
    assert target.read_bytes() == contents
    assert ranges == [(0, 10), (10, 20), (20, 30), (30, 40), (30, 40), (40, 50), (50, 60), (60, 64)]
    assert [path.name for path in target.parent.iterdir()] == ["x"]


def test_the_rest_of_another_version_is_not_used(bucket: BucketFolder, tmp_path: Path) -> None:
    bucket.write("x", b"new!")
    (tmp_path / ".x.0123456789ab.tmp").write_bytes(b"ol")
    bucket.download("x", tmp_path / "x", bucket.list_files()["x"])
    assert (tmp_path / "x").read_bytes() == b"new!"


@pytest.mark.parametrize("wrong", [FileStamp(5, "1"), FileStamp(4, "1", "AAAA")])
def test_a_copy_that_differs_is_not_taken(
    bucket: BucketFolder, tmp_path: Path, wrong: FileStamp
) -> None:
    bucket.write("x", b"1234")
    with pytest.raises(OSError, match=r"came as 4 bytes|differs from the file"):
        bucket.download("x", tmp_path / "x", wrong)
    assert not (tmp_path / "x").exists()
    right = FileStamp(4, "1", base64.b64encode(hashlib.md5(b"1234").digest()).decode())
    bucket.download("x", tmp_path / "x", right)
    assert (tmp_path / "x").read_bytes() == b"1234"


@pytest.mark.parametrize(
    ("url", "extra", "package"), [("gs://b/x", "gcs", "gcsfs"), ("s3://b", "s3", "s3fs")]
)
def test_a_missing_package_is_named_with_its_extra(
    url: str, extra: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(url: str) -> None:
        raise ImportError("Please install it")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    with pytest.raises(DataError, match=rf"^dataset.path={url}: .*{package}.*\[{extra}\]"):
        BucketFolder.open(url, f"dataset.path={url}", DataError)


class DefaultCredentialsError(Exception):
    """Error with the name of one in Google's library."""


class HttpError(Exception):
    """Error with the name of one in gcsfs."""

    code = 403


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("b"), "there is no such bucket or file"),
        (PermissionError("Forbidden: b"), "access is denied (Forbidden: b)"),
        (HttpError("no\nstorage.objects.list"), "access is denied (no storage.objects.list)"),
        (DefaultCredentialsError("none"), "there are no credentials for it (none)"),
        (OSError(5, "Input/output error"), "does not answer as expected (input/output error)"),
        (NotImplementedError(), "does not support the operation"),
    ],
)
def test_errors_of_a_store_are_one_line(error: Exception, words: str) -> None:
    with pytest.raises(RunError) as said, explain_store_errors("gs://b/x", RunError, "try again"):
        raise error
    assert str(said.value).startswith("gs://b/x: ") and words in str(said.value)
    assert str(said.value).endswith("; try again") and "\n" not in str(said.value)


def test_errors_of_weft_are_not_changed() -> None:
    with pytest.raises(ConfigError, match=r"^mine$"), explain_store_errors("gs://b", RunError):
        raise ConfigError("mine")


def test_the_version_is_the_most_reliable_field() -> None:
    info = {"size": 3, "mtime": 1.0, "etag": "e", "md5Hash": "m"}
    assert FileStamp.from_info(info) == FileStamp(3, "e", "m")
    assert FileStamp.from_info(info | {"generation": 7}) == FileStamp(3, "7", "m")
    assert FileStamp.from_info({"size": None}) == FileStamp(0, "")
