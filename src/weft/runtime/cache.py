"""On-disk cache of a frozen role's outputs, so that reference log-probs are computed once per id.

Each combination of node and weights has two files. `values.bin` has one record per id.
`index.jsonl` has one line per call, which maps a hash of each id's inputs to the location of its
record. If a crash interrupts a call, none of its outputs are reused, because its line in the index
is missing or incomplete. After a restart, the call is repeated with the same batch, which gives
bitwise identical values.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.data.groups import Array
from weft.data.sample import SequenceSample
from weft.engine.base import Engine
from weft.graph.mfc import MFCDef
from weft.runtime.directory import explain_disk_errors
from weft.writing import open_file

VALUES = "values.bin"
INDEX = "index.jsonl"


@dataclass(frozen=True)
class CacheRecord:
    """Location of one id's outputs in `values.bin`: byte offset and size in bytes."""

    offset: int
    size: int


class OutputCache:
    """Cache of one node's outputs, stored in `folder`.

    Several processes can use the same cache: a file lock serializes their writes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._values = folder / VALUES
        self._index = folder / INDEX
        for path in (self._values, self._index):
            path.touch()
        self._records: dict[str, CacheRecord] = {}
        self._index_position = 0
        self._refresh()

    def get_or_compute(
        self, batch: SequenceSample, compute: Callable[[SequenceSample], SequenceSample]
    ) -> tuple[SequenceSample, int]:
        """Return the outputs for all ids of `batch`, and the number of ids that were in the cache.

        `compute` is called at most once, with the samples that are not cached.
        """
        names = dict(zip(batch.ids, map(_hash_content, batch.unpack()), strict=True))
        missing = []
        for id, name in names.items():
            if name not in self._records:
                missing.append(id)
        parts = []
        for id in batch.ids:
            if id not in set(missing):
                parts.append(self._load(id, names[id]))
        if missing:
            new_outputs = compute(
                batch if len(missing) == batch.num_ids else batch.select(ids=missing)
            )
            self._append({names[sample.ids[0]]: sample for sample in new_outputs.unpack()})
            parts.append(new_outputs)
        return SequenceSample.gather(parts).select(ids=batch.ids), batch.num_ids - len(missing)

    def _load(self, id: str, name: str) -> SequenceSample:
        record = self._records[name]
        with self._values.open("rb") as file:
            file.seek(record.offset)
            return replace(
                SequenceSample.from_bytes(file.read(record.size)), ids=(id,), metadata={}
            )

    def _append(self, outputs: dict[str, SequenceSample]) -> None:
        with (
            explain_disk_errors(f"{self._values.parent} does not take more cached outputs"),
            open_file(self._index, "a+b") as index,
        ):
            fcntl.flock(index, fcntl.LOCK_EX)
            index.seek(0, os.SEEK_END)
            has_partial_line = index.tell() and not self._index.read_bytes().endswith(b"\n")
            line: dict[str, list[int]] = {}
            with open_file(self._values, "ab") as values:
                for name, sample in outputs.items():
                    raw = sample.to_bytes()
                    line[name] = [values.seek(0, os.SEEK_END), len(raw)]
                    values.write(raw)
                values.flush()
                os.fsync(values.fileno())
            index.write((b"\n" if has_partial_line else b"") + json.dumps(line).encode() + b"\n")
            index.flush()
            os.fsync(index.fileno())
        self._refresh()

    def _refresh(self) -> None:
        """Read the complete lines that any process has added to the index since the last call."""
        with self._index.open("rb") as file:
            file.seek(self._index_position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._index_position += len(line)
                self._records.update(_parse_records(line))


def _parse_records(line: bytes) -> dict[str, CacheRecord]:
    """Return the records in a line of the index, keyed by hash, or {} if the line is incomplete.

    A process that is killed while it writes can leave an incomplete line.
    """
    try:
        entries = json.loads(line or b"{}")
    except json.JSONDecodeError:
        return {}
    return {name: CacheRecord(*place) for name, place in entries.items()}


def _hash_content(sample: SequenceSample) -> str:
    """Return a hash of the name, lengths, dtype and bytes of each key of the sample `sample`.

    The id itself is not hashed, so that ids with equal inputs share a record.
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(sample.data):
        digest.update(f"{key}|{sample.lengths[key].tolist()}|{sample.data[key].dtype}|".encode())
        digest.update(_to_bytes(sample.data[key]))
    return digest.hexdigest()


def compute_fingerprint(node: MFCDef, engine: Engine) -> str:
    """Return a hash of everything that determines a node's outputs, except its inputs.

    This includes the weights and the node's interface, method and arguments.
    """
    digest = hashlib.blake2b(
        f"{node.interface}|{node.method}|{sorted(node.args.items())!r}".encode(), digest_size=16
    )
    for name, where, values in engine.read(sorted(engine.slices())):
        digest.update(f"{name}|{where}|{values.dtype}|".encode())
        digest.update(_to_bytes(values))
    return digest.hexdigest()


def _to_bytes(values: Array) -> bytes:
    flat = torch.as_tensor(values).detach().cpu().contiguous().reshape(-1)  # numpy has no bfloat16
    if flat.numel():
        return bytes(flat.view(torch.uint8).numpy().tobytes())
    return b""
