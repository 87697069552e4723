"""Read rows of Parquet and Arrow files, without the null keys that these formats add to structs.

Arrow gives every struct the union of the keys of all rows: if another row has `{"zone": "CET"}`,
`{"city": "Paris"}` is stored as `{"city": "Paris", "zone": null}`. An added null cannot be
distinguished from one in the original data, so every struct key whose value is null is removed.
Nulls in top-level columns, list entries and map values are kept, since Arrow never adds those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import DataError
from weft.reading import explain_read_errors

if TYPE_CHECKING:
    import pyarrow

PARQUET = ".parquet"
ARROW = ".arrow"
BATCH = 1024  # number of rows of a Parquet file in memory at once
MAGIC = b"ARROW1"  # first bytes of the Arrow file format; other files use the stream format

Restore = Callable[[Any], Any]


def read_file(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, row) for each row of a Parquet or Arrow file.

    Row numbers begin at 1. Raises `DataError` if the file cannot be parsed.
    """
    batches, form = (
        (_read_parquet, "Parquet") if file.name.endswith(PARQUET) else (_read_arrow, "Arrow")
    )
    number = 0
    with explain_read_errors(f"{file}: not {form}, or damaged", DataError):
        for batch in batches(file):
            restored = {
                field.name: restore
                for field in batch.schema
                if (restore := _build_restorer(field.type)) is not None
            }
            for row in batch.to_pylist():
                for name, restore in restored.items():
                    row[name] = restore(row[name])
                number += 1
                yield number, row


def _read_parquet(file: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet  # takes 0.25 s, so imported only for Parquet files

    yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=BATCH)


def _read_arrow(file: Path) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.ipc

    with file.open("rb") as stream:
        begins = stream.read(len(MAGIC))
        stream.seek(0)
        if begins == MAGIC:
            reader = pyarrow.ipc.open_file(stream)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(stream)


def _build_restorer(kind: pyarrow.DataType) -> Restore | None:
    """Return a function that restores the original Python form of values of the Arrow type `kind`.

    In structs, the function removes keys with the value None, which Arrow adds to give all structs
    the same keys. It converts maps from lists of pairs to dicts. Returns None if the type contains
    neither structs nor maps, because its values then need no change.
    """
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _build_restorer(kind.storage_type)
    if types.is_struct(kind):
        inner = {}
        for index in range(kind.num_fields):
            inner[kind.field(index).name] = _build_restorer(kind.field(index).type)
        return lambda value: None if value is None else _restore_struct(value, inner)
    if types.is_map(kind):
        of_items = _build_restorer(kind.item_type)
        return lambda value: (
            None if value is None else {key: _restore_each(item, of_items) for key, item in value}
        )
    is_list = (
        types.is_list,
        types.is_large_list,
        types.is_fixed_size_list,
        types.is_list_view,
        types.is_large_list_view,
    )
    if any(check(kind) for check in is_list):
        of_entries = _build_restorer(kind.value_type)
        if of_entries is None:
            return None
        return lambda value: None if value is None else [of_entries(entry) for entry in value]
    return None


def _restore_struct(value: dict[str, Any], inner: dict[str, Restore | None]) -> dict[str, Any]:
    struct: dict[str, Any] = {}
    for key, item in value.items():
        if item is not None:
            struct[key] = _restore_each(item, inner[key])
    return struct


def _restore_each(value: Any, restore: Restore | None) -> Any:
    return value if restore is None else restore(value)
