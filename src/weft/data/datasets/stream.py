"""Dataset type `stream`: rows that are read and tokenized during training, in file order.

    dataset.type=stream dataset.path=gs://B/rows dataset.args='{form: text, batch: 32, steps: 1000}'

The files are neither copied to this machine nor shuffled. An epoch is `steps` batches of `batch`
samples. The next epoch continues after the last row that was read. After the last row of the files,
reading begins again with the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.data.columns import rename_columns
from weft.data.datasets.base import DatasetUtility, TableDataset, split_options
from weft.data.lengths import EncodedSample
from weft.data.row_stream import RowStream
from weft.data.sample import SequenceSample
from weft.data.sources import RowLocation
from weft.data.table import TokenTable, cast_to_edge_dtypes
from weft.data.tokenizing import encode_rows, format_reports, make_job
from weft.errors import ConfigError, DataError
from weft.registry import datasets, register_dataset

MAX_SKIPPED = 100_000  # maximum number of consecutive rows that are too long


@register_dataset("stream")
class StreamedRows:
    """Dataset of whole batches, encoded by another dataset type, `form`.

    `batch` is the number of samples of a batch, and `steps` the number of batches of an epoch. The
    other options are the options of `form`. Raises `ConfigError` for other forms and numbers.
    """

    def __init__(
        self,
        util: DatasetUtility,
        path: str,
        form: str = "prompt_answer",
        batch: int = 8,
        steps: int = 0,
        **options: Any,
    ) -> None:
        for name, value in (("batch", batch), ("steps", steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"dataset.args.{name}={value!r}: must be a number, at least 1")
        kind = datasets.get(form)
        if not (isinstance(kind, type) and issubclass(kind, TableDataset)):
            raise ConfigError(
                f"dataset.args.form={form}: must be a dataset type whose rows weft tokenizes, such "
                f"as prompt_answer, chat or text"
            )
        set_options = {name: value for name, value in options.items() if value is not None}
        parts = split_options(kind.form, {**kind.default_options, **set_options})
        self._job = make_job(*parts, util.tokenizer)
        self._job.form.check(util.tokenizer)
        self._rows = RowStream(path)
        self._columns = util.columns
        self._batch = batch
        self._steps = steps
        self._number = 0  # number of rows read so far

    @property
    def num_ids(self) -> int:
        """Number of samples of an epoch."""
        return self._batch * self._steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[SequenceSample]:
        """Yield batches without end, beginning at the current position."""
        while True:
            yield self._build_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position before the next batch."""
        return {"number": self._number, "rows": self._rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a position. Raises `DataError` if the data have changed."""
        self._rows.load_state_dict(state["rows"])
        self._number = state["number"]

    def _build_batch(self) -> SequenceSample:
        ids: list[str] = []
        encoded: list[EncodedSample] = []
        numbers: list[int] = []
        skipped = 0
        while len(encoded) < self._batch:
            place, row = self._rows.read_next()
            renamed = rename_columns([(RowLocation(place, 0), row)], self._columns, self._rows.path)
            ((_, row),) = renamed
            samples, report, problems = encode_rows(self._job, [(place, row)])
            if problems:
                raise DataError(format_reports([place], problems))
            if len(samples) > 1:
                raise DataError(
                    f"{place}: gives {len(samples)} samples, and a stream takes forms with one "
                    f"sample a row; leave dataset.type=stream out"
                )
            skipped = 0 if samples else skipped + 1
            if skipped > MAX_SKIPPED:
                raise DataError(f"{place}: the last {skipped:,} rows are longer than the limits")
            for _, own_id, sample in samples:
                ids.append(f"{self._number}" if own_id is None else f"{self._number}-{own_id}")
                encoded.append(sample)
                numbers.append(self._number)
            self._number += 1
        table = TokenTable.from_rows(ids, encoded, numbers, report)
        return cast_to_edge_dtypes(table.sample)
