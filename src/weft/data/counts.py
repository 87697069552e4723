"""Table with the number of training, evaluation, truncated and dropped rows of each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.data.background_table import BackgroundTokenTable
from weft.data.chat import UNTRAINED_MESSAGES
from weft.data.table import TokenizationReport

COLUMNS = ("source", "type", "train", "eval", "epoch", "prompts cut", "answers cut", "dropped")


@dataclass(frozen=True)
class SourceCount:
    """Numbers of samples of one source, and the report on their tokenization.

    If the rows are tokenized during training, `ahead` is set, and there is no report yet. If weft
    does not tokenize the rows itself, `report` and `ahead` are both None.

    Attributes:
        name: name of the source
        type: dataset type of its rows
        train: number of training samples
        evaluation: number of validation samples
        per_epoch: number of training samples drawn in each epoch
        report: report on the tokenized rows, or None
        ahead: table of the rows that are tokenized during training, or None
    """

    name: str
    type: str
    train: int
    evaluation: int
    per_epoch: int
    report: TokenizationReport | None = None
    ahead: BackgroundTokenTable | None = None

    @property
    def label(self) -> str:
        """Name of the source, followed by "(valid)" if it has only validation rows."""
        if self.train or not self.evaluation:
            return self.name
        return f"{self.name} (valid)"

    def format_cells(self) -> tuple[str, ...]:
        report = self.report
        if report is not None:
            cut = (f"{report.prompts_cut:,}", f"{report.answers_cut:,}", f"{report.dropped:,}")
        elif self.ahead is not None:
            cut = ("later", "later", "later")
        else:
            cut = ("", "", "")
        return (
            self.label,
            self.type,
            f"{self.train:,}",
            f"{self.evaluation:,}",
            f"{self.per_epoch:,}",
            *cut,
        )

    def build_notes(self, limits: str) -> list[str]:
        """Return notes on truncated and dropped rows, omitted parts of turns, and unused columns.

        `limits` describes the options that limit the length of rows. It is copied into the notes.
        """
        if self.ahead is not None:
            return [f"{self.label}: {len(self.ahead):,} samples are tokenized during training"]
        if self.report is None:
            omission_notes = []
        else:
            omission_notes = [f"{self.label}: {omission}" for omission in self.report.cut]
        return [*self._build_length_notes(limits), *omission_notes, *self.build_unused_notes()]

    def build_unused_notes(self) -> list[str]:
        """Return notes on unused columns, and on messages that follow a row's last reply."""
        if self.report is None:
            return []
        columns = []
        for name in self.report.unused:
            if name != UNTRAINED_MESSAGES:
                columns.append(name)
        if columns:
            notes = [
                f"{self.label}: columns that rows of type {self.type} do not use: "
                f"{', '.join(columns)}"
            ]
        else:
            notes = []
        if UNTRAINED_MESSAGES in self.report.unused:
            notes.append(f"{self.label}: messages after the last reply of a row are not used")
        return notes

    def _build_length_notes(self, limits: str) -> list[str]:
        report = self.report
        if report is None:
            return []
        parts = []
        for count, effect in (
            (report.prompts_cut, "with the prompt cut"),
            (report.answers_cut, "with the end of the answer cut"),
            (report.dropped, "left out"),
        ):
            if count:
                parts.append(f"{count:,} {effect}")
        if parts:
            return [f"{self.label}: of {report.rows:,} rows, {', '.join(parts)} ({limits})"]
        return []


def render_table(counts: Sequence[SourceCount]) -> str:
    """Format the counts as a plain-text table with a line per source.

    A line with the total is added if there are several sources.
    """
    counts = _merge_by_source(counts)
    rows = [COLUMNS, *(count.format_cells() for count in counts)]
    if len(counts) > 1:
        sums = []
        for name in ("train", "evaluation", "per_epoch"):
            sums.append(sum(getattr(count, name) for count in counts))
        report = sum(
            (count.report for count in counts if count.report is not None), TokenizationReport()
        )
        numbers = [*sums, report.prompts_cut, report.answers_cut, report.dropped]
        rows.append(("total", "", *(f"{number:,}" for number in numbers)))
    widths = []
    for column in range(len(COLUMNS)):
        widths.append(max(len(row[column]) for row in rows))
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if column < 2 else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _merge_by_source(counts: Sequence[SourceCount]) -> list[SourceCount]:
    """Add up the counts that belong to the same source, such as training and validation rows."""
    counts_by_source: dict[str, SourceCount] = {}
    for count in counts:
        before = counts_by_source.get(count.name)
        if before is None:
            counts_by_source[count.name] = count
            continue
        reports = []
        for part in (before, count):
            if part.report is not None:
                reports.append(part.report)
        counts_by_source[count.name] = replace(
            before,
            train=before.train + count.train,
            evaluation=before.evaluation + count.evaluation,
            per_epoch=before.per_epoch + count.per_epoch,
            report=sum(reports, TokenizationReport()) if reports else None,
            ahead=before.ahead or count.ahead,
        )
    return list(counts_by_source.values())
