"""Evaluation of a reward model: agreement of its scores with rankings of replies by people.

The results are the accuracy and Kendall's tau, over all rows and by category.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.algorithms.base import to_host_array
from weft.data.datasets.base import DatasetUtility, TableDataset
from weft.data.sources import UnreadableRow, find_files, read_rows
from weft.errors import ConfigError, DataError
from weft.evaluation.models import OpenedModel
from weft.registry import datasets

ORDERED_TYPES = ("preference", "paired_comparison", "ranking")  # dataset types with ranked replies
MAX_IDS_PER_PASS = 32


@dataclass(frozen=True)
class PairCounts:
    """Counts of the reply pairs in one row, by whether a reward model orders them correctly.

    Attributes:
        category: category of the row, or "" if rows have no categories
        right: number of pairs whose better reply has the higher score
        wrong: number of pairs whose better reply has the lower score
        tied: number of pairs with equal scores
        gap: mean score of the best-ranked replies minus mean score of the worst-ranked ones
    """

    category: str
    right: int
    wrong: int
    tied: int
    gap: float

    @property
    def num_pairs(self) -> int:
        """Total number of pairs."""
        return self.right + self.wrong + self.tied


@dataclass(frozen=True)
class AgreementSummary:
    """Agreement of a reward model's scores with the ranking of replies, over several rows.

    Attributes:
        rows: number of rows
        pairs: number of pairs of replies in all rows
        accuracy: fraction of pairs that the scores order correctly; ties count as incorrect
        error: standard error of `accuracy` over rows
        best_accuracy: fraction of rows whose best reply scores higher than the worst reply
        kendalltau: mean over rows of (correctly - incorrectly ordered pairs) / all pairs
        margin: mean over rows of the best reply's score minus the worst reply's score
    """

    rows: int
    pairs: int
    accuracy: float
    error: float
    best_accuracy: float
    kendalltau: float
    margin: float

    @classmethod
    def from_counts(cls, groups: Sequence[PairCounts]) -> AgreementSummary:
        """Return the summary of several rows, given the pair counts of each."""
        pairs = np.array([group.num_pairs for group in groups], dtype=np.float64)
        right = np.array([group.right for group in groups], dtype=np.float64)
        wrong = np.array([group.wrong for group in groups], dtype=np.float64)
        gaps = np.array([group.gap for group in groups])
        accuracy = float(right.sum() / pairs.sum())
        error = np.sqrt(((right - accuracy * pairs) ** 2).sum()) / pairs.sum()
        best_accuracy = float((gaps > 0).mean())
        tau = float(((right - wrong) / pairs).mean())
        return cls(
            rows=len(groups),
            pairs=int(pairs.sum()),
            accuracy=accuracy,
            error=float(error),
            best_accuracy=best_accuracy,
            kendalltau=tau,
            margin=float(gaps.mean()),
        )


def evaluate(
    opened: OpenedModel,
    path: str,
    kind: str,
    *,
    category: str | None = None,
    split: str | None = None,
    args: Mapping[str, Any] | None = None,
    name: str = "",
    progress: Callable[[int, int], None] | None = None,
) -> list[PairCounts]:
    """Score the rows of `path`, a dataset of type `kind`, and return each row's pair counts.

    Rows without two replies of different rank are omitted. `category` is the column by which rows
    are grouped, `args` are further options of the dataset, and `name` is the name of the dataset in
    messages. `progress` is called with the number of scored rows and the number of all rows. Raises
    `ConfigError` for a type without ordered replies, and `DataError` for rows that cannot be used.
    """
    if kind not in ORDERED_TYPES:
        raise ConfigError(
            f"--type {kind}: a reward model is evaluated on ordered replies; use "
            f"{', '.join(ORDERED_TYPES)}"
        )
    # Read and tokenize the rows.
    dataset_class: type[TableDataset] = datasets.get(kind)
    limits = {} if opened.context is None else {"max_seqlen": opened.context}
    table = dataset_class(
        DatasetUtility(opened.tokenizer, name=name),
        path=path,
        split=split,
        **limits,
        **(args or {}),
    ).table
    categories = _read_categories(path, split, category)
    # Score the rows in batches, and compare the scores within each row.
    groups = list[PairCounts]()
    for start in range(0, len(table), MAX_IDS_PER_PASS):
        indices = range(start, min(start + MAX_IDS_PER_PASS, len(table)))
        batch = table.take(indices)
        output = opened.engine.forward(batch, frozenset({"scores"}))
        scores = to_host_array(output.data["scores"]).astype(np.float64)
        row_indices = batch.group_of("rank")
        ranks = to_host_array(batch.data["rank"])
        comparisons = to_host_array(batch.data["comparison"])
        for index_in_batch, index in enumerate(indices):
            in_row = row_indices == index_in_batch
            row_category = categories[int(table.rows[index])] if categories else ""
            groups += _count_pairs(row_category, scores[in_row], ranks[in_row], comparisons[in_row])
        if progress is not None:
            progress(indices[-1] + 1, len(table))
    if not groups:
        raise DataError(f"{path}: no row has two replies of different rank")
    return groups


def _count_pairs(
    category: str,
    scores: npt.NDArray[np.float64],
    ranks: npt.NDArray[np.int64],
    comparisons: npt.NDArray[np.int64],
) -> list[PairCounts]:
    """Return a list with the pair counts of one row, or an empty list if the row has no pairs.

    A pair consists of two replies of the same comparison that differ in rank. The three arrays have
    one element per reply, [replies]: its score, its rank (0 is the best), and the index of its
    comparison.
    """
    is_better = (ranks[:, None] < ranks[None, :]) & (comparisons[:, None] == comparisons[None, :])
    if not is_better.any():
        return []
    gaps = (scores[:, None] - scores[None, :])[is_better]
    end_gap = scores[ranks == ranks.min()].mean() - scores[ranks == ranks.max()].mean()
    return [
        PairCounts(
            category,
            int((gaps > 0).sum()),
            int((gaps < 0).sum()),
            int((gaps == 0).sum()),
            float(end_gap),
        )
    ]


def _read_categories(path: str, split: str | None, column: str | None) -> list[str]:
    """Return the value of `column` in every row, or an empty list if `column` is None.

    Raises `DataError` if no row has the column.
    """
    if column is None:
        return []
    rows = []
    for file in find_files(path, split):
        for _, row in read_rows(file):
            rows.append(row)
    values = [None if isinstance(row, UnreadableRow) else row.get(column) for row in rows]
    if all(value is None for value in values):
        columns = sorted({str(key) for row in rows if isinstance(row, Mapping) for key in row})
        raise DataError(
            f"{path}: no row has a column {column!r}; the rows have {', '.join(columns)}"
        )
    return ["none" if value is None else str(value) for value in values]


def summarize_by_category(groups: Sequence[PairCounts]) -> dict[str, AgreementSummary]:
    """Return the summary of each category, sorted by name.

    If rows have no categories, there is one summary with the key "".
    """
    names = sorted({group.category for group in groups})
    by_category: dict[str, AgreementSummary] = {}
    for name in names:
        by_category[name] = AgreementSummary.from_counts(
            [group for group in groups if group.category == name]
        )
    return by_category
