"""Streams of rows: every position can be continued, from disk, buckets and the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.data import row_stream
from weft.data.row_stream import RowStream, StreamPosition
from weft.data.sources import UnreadableRow
from weft.errors import DataError
from weft.storage.buckets import BucketFolder

FILES = {
    "a.jsonl": b'{"n": 0}\n\n{"n": 1}\r\n{"n": 2}',
    "b.jsonl": b"",
    "c/d.jsonl": b'\xef\xbb\xbf{"n": 3}\n'
    + json.dumps({"n": 4, "text": "\u00e9" * 40}).encode()
    + b"\n",
    "e.txt": b'{"n": 5}',
}


@pytest.fixture(params=["disk", "bucket", "hub"])
def stream(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> RowStream:
    return open_files(request.param, FILES, tmp_path, monkeypatch)


def open_files(
    kind: str, files: dict[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> RowStream:
    monkeypatch.setattr(row_stream, "BLOCK_BYTES", 7)
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    bucket = BucketFolder("memory://datasets/owner/name", memory, "/datasets/owner/name")
    for name, contents in files.items():
        path = folder / "rows" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
        bucket.write(name, contents)
    if kind == "disk":
        return RowStream(str(folder / "rows"))
    if kind == "bucket":
        return RowStream("memory://datasets/owner/name")
    monkeypatch.setattr("huggingface_hub.HfFileSystem", lambda: memory)
    return RowStream("owner/name")


def read_numbers(stream: RowStream, count: int) -> list[int]:
    return [stream.read_next()[1]["n"] for _ in range(count)]


def test_rows_follow_each_other_and_begin_again(stream: RowStream) -> None:
    assert read_numbers(stream, 7) == [0, 1, 2, 3, 4, 0, 1]
    assert stream.position == StreamPosition(0, len(b'{"n": 0}\n\n{"n": 1}\r\n'), 3, 1)
    place, row = stream.read_next()
    assert place.endswith("a.jsonl:4") and row == {"n": 2}


def test_every_position_is_continued(stream: RowStream) -> None:
    expected = read_numbers(stream, 14)
    for count in range(12):
        first = RowStream(stream.path)
        read_numbers(first, count)
        state = json.loads(json.dumps(first.state_dict()))
        stream.load_state_dict(state)
        assert read_numbers(stream, 2) == expected[count : count + 2]


def test_a_changed_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_files("disk", FILES, tmp_path, monkeypatch)
    read_numbers(stream, 2)
    state = stream.state_dict()
    (tmp_path / "rows" / "a.jsonl").write_bytes(FILES["a.jsonl"].replace(b"1", b"7"))
    with pytest.raises(DataError, match="has changed since the recovery point"):
        RowStream(stream.path).load_state_dict(state)
    (tmp_path / "rows" / "a.jsonl").write_bytes(FILES["a.jsonl"])
    RowStream(stream.path).load_state_dict(state)
    (tmp_path / "rows" / "a0.jsonl").write_bytes(b"{}\n")
    with pytest.raises(DataError, match="has changed since the recovery point"):
        RowStream(stream.path).load_state_dict(state)


def test_a_stream_holds_a_line_and_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b"".join(b'{"n": %d}\n' % number for number in range(1000))
    stream = open_files("bucket", {"a.jsonl": rows}, tmp_path, monkeypatch)
    reads: list[tuple[int, int]] = []
    read = BucketFolder.read_range

    def record(self: BucketFolder, name: str, start: int, end: int) -> bytes:
        reads.append((start, end))
        return read(self, name, start, end)

    monkeypatch.setattr(BucketFolder, "read_range", record)
    assert read_numbers(stream, 1000) == list(range(1000))
    assert max(end - start for start, end in reads) <= 7
    assert sum(end - start for start, end in reads) == len(rows), "each byte is read once"


def test_lines_that_are_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_files("disk", {"a.jsonl": b'{"a"\n\xff\n{"n": 1}\n'}, tmp_path, monkeypatch)
    wrong = [stream.read_next() for _ in range(2)]
    assert [place.rpartition(":")[2] for place, _ in wrong] == ["1", "2"]
    assert [isinstance(row, UnreadableRow) for _, row in wrong] == [True, True]
    assert read_numbers(stream, 1) == [1]


def test_what_is_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("disk", "bucket"):
        with pytest.raises(DataError, match=r"there are no files \.jsonl"):
            open_files(kind, {"a.json": b"[]"}, tmp_path / kind, monkeypatch)
        empty = open_files(
            kind, {"a.jsonl": b"\n \n", "b.jsonl": b""}, tmp_path / kind, monkeypatch
        )
        with pytest.raises(DataError, match="the files have no rows"):
            empty.read_next()
    monkeypatch.setattr(row_stream, "MAX_LINE_BYTES", 20)
    long = open_files("disk", {"a.jsonl": b"1" * 99}, tmp_path / "long", monkeypatch)
    with pytest.raises(DataError, match=r"a\.jsonl:1: has more than 20 bytes"):
        long.read_next()


@given(
    rows=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=9),
    block=st.integers(1, 40),
    cut=st.integers(0, 20),
)
def test_any_rows_in_blocks_of_any_size(rows: list[str], block: int, cut: int) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    memory.pipe_file("/b/x.jsonl", text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_stream, "BLOCK_BYTES", block)
        stream = RowStream("memory://b/x.jsonl")
        values: list[Any] = [stream.read_next()[1] for _ in range(cut)]
        other = RowStream("memory://b/x.jsonl")
        other.load_state_dict(stream.state_dict())
        values += [other.read_next()[1] for _ in range(2 * len(rows))]
    assert values == [rows[number % len(rows)] for number in range(len(values))]
