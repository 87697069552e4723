"""Comparison of predicted with measured values of steps, at the end of a run and in its report.

Each line of metrics.jsonl has both. Their medians over all steps except the first are compared: the
first step is longer, because libraries are loaded and memory is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import median
from typing import Any

from weft.observe.memory import GIB, format_size
from weft.observe.metrics import PREDICTED, TIME, format_duration, format_number, is_finite
from weft.observe.run_files import RunFiles
from weft.observe.shown_plan import ShownPlan

STEP_SECONDS = "step_seconds"
PEAK_MEMORY = "peak_memory_gb"
PEAK = "peak_bytes"
WEIGHTS = "num_weight_bytes"
NONE = "–"  # in place of an unknown value


@dataclass(frozen=True)
class PredictedStep:
    """Values that are predicted for each step of a run.

    Attributes:
        metrics: Predicted values by their names in metrics.jsonl.
        basis: Basis of the predicted seconds, as a phrase; "" if there are none.
        left_out: Roles whose calls are not part of the predicted seconds.
        reason: Reason why the duration of a step is not predicted; "" if it is.
        plan: Simulated steps, or None if their duration is not predicted.
        predict_again: Function that returns `metrics` for measured expert loads by role, or None
            if the prediction does not depend on them.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    basis: str = ""
    left_out: Sequence[str] = ()
    reason: str = ""
    plan: ShownPlan | None = None
    predict_again: Callable[[Mapping[str, float]], Mapping[str, float]] | None = None

    @property
    def scope(self) -> str:
        """Phrase with the roles that are left out; "" if there are none."""
        return f" without {', '.join(self.left_out)}" if self.left_out else ""

    @property
    def description(self) -> str:
        """Basis and scope of the predicted seconds as a phrase; "" if there are none."""
        return f"{self.basis}{self.scope}"


@dataclass(frozen=True)
class ComparedValue:
    """Median of a predicted value and of the measured value; None if a value is not known."""

    predicted: float | None
    measured: float | None


def select_compared(lines: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines of all timed steps except the first; if there is only one, its line."""
    steps = []
    for line in lines:
        if is_finite(line.get(STEP_SECONDS)):
            steps.append(line)
    return steps[1:] or steps


def compare_values(
    lines: Sequence[Mapping[str, Any]], predicted: str, measured: str
) -> ComparedValue:
    """Return the medians of two metrics over the lines that have them.

    If some lines have both, the medians are those of these lines.
    """
    both = []
    for line in lines:
        if is_finite(line.get(predicted)) and is_finite(line.get(measured)):
            both.append(line)
    compared = both or lines
    return ComparedValue(_compute_median(compared, predicted), _compute_median(compared, measured))


def _compute_median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(line[name]) for line in lines if is_finite(line.get(name))]
    return median(values) if values else None


def format_end_line(lines: Iterable[Mapping[str, Any]], prediction: PredictedStep) -> str | None:
    """Return a line such as `predicted 14.1 s a step, measured 15.0`.

    `lines` are the rows of metrics.jsonl. Returns None if nothing was predicted or measured.
    """
    step = compare_values(select_compared(lines), f"{PREDICTED}{STEP_SECONDS}", STEP_SECONDS)
    if step.predicted is None or step.measured is None:
        return None
    predicted, predicted_unit = _format_seconds(step.predicted)
    measured, measured_unit = _format_seconds(step.measured)
    shown_unit = "" if predicted_unit == measured_unit else measured_unit
    return f"predicted {predicted}{predicted_unit} a step{prediction.scope}, measured {measured}{shown_unit}"


def _format_seconds(seconds: float) -> tuple[str, str]:
    """Return a duration with three significant digits, and its unit.

    From 100 s on, returns a duration such as `4:05`, and "" as its unit.
    """
    if seconds >= 100:
        return format_duration(seconds), ""
    return f"{seconds:#.3g}", " s"


# -- the report


def render_comparison(run: RunFiles) -> str:
    """Render a table of predicted and measured values for each call and for the whole step.

    Returns "" if the run has no predicted values.
    """
    names = run.metric_names
    lines = select_compared(run.lines)
    if not lines or not any(name.startswith(PREDICTED) for name in names):
        return ""
    columns: dict[str, Callable[[float], str]] = {
        "seconds": _format_time,
        "peak memory": format_size,
        "weights moved": format_size,
    }
    rows = [(call, _compare_call(lines, call)) for call in _list_calls(names)]
    rows.append(("whole step", _compare_step(lines)))
    shown_columns = []
    for column in range(len(columns)):
        if any(values[column].predicted is not None for _, values in rows):
            shown_columns.append(column)
    titles = list(columns)
    formatters = list(columns.values())
    headings = "".join(
        f'<th scope="colgroup" colspan="2">{titles[column]}</th>' for column in shown_columns
    )
    subheadings = '<th scope="col">predicted</th><th scope="col">measured</th>' * len(shown_columns)
    body = []
    for name, values in rows:
        cells = []
        for column in shown_columns:
            for value in (values[column].predicted, values[column].measured):
                cells.append(
                    f"<td>{NONE if value is None else escape(formatters[column](value))}</td>"
                )
        body.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    return (
        f'<p class="note">{escape(_describe_basis(run, lines))}</p>'
        '<div class="scroll"><table class="shares compared"><thead>'
        f'<tr><th scope="col" rowspan="2">call</th>{headings}</tr><tr>{subheadings}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _list_calls(names: Sequence[str]) -> list[str]:
    """Return the names of the calls of a step, in the order of metrics.jsonl."""
    calls = [name.removeprefix(TIME) for name in names if name.startswith(TIME)]
    for name in names:
        if name.startswith(PREDICTED) and name.endswith(f"/{PEAK}"):
            calls.append(name.removeprefix(PREDICTED).removesuffix(f"/{PEAK}"))
    return list(dict.fromkeys(calls))


def _compare_call(lines: Sequence[Mapping[str, Any]], call: str) -> list[ComparedValue]:
    seconds = compare_values(lines, f"{PREDICTED}{call}", f"{TIME}{call}")
    others = []
    for name in (PEAK, WEIGHTS):
        others.append(compare_values(lines, f"{PREDICTED}{call}/{name}", f"{call}/{name}"))
    return [seconds, *others]


def _compare_step(lines: Sequence[Mapping[str, Any]]) -> list[ComparedValue]:
    seconds = compare_values(lines, f"{PREDICTED}{STEP_SECONDS}", STEP_SECONDS)
    memory = compare_values(lines, f"{PREDICTED}{PEAK_MEMORY}", PEAK_MEMORY)
    num_bytes = []
    for value in (memory.predicted, memory.measured):
        num_bytes.append(None if value is None else value * GIB)
    return [seconds, ComparedValue(*num_bytes), ComparedValue(None, None)]


def _format_time(seconds: float) -> str:
    return "".join(_format_seconds(seconds))


def _describe_basis(run: RunFiles, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences on the compared steps and on the basis of the predicted values."""
    starts = run.record.get("starts")
    last_start = starts[-1] if isinstance(starts, list) and starts else {}
    basis = str(last_start.get("forecast") or "") if isinstance(last_start, Mapping) else ""
    first_step, last_step = (format_number(line["step"]) for line in (lines[0], lines[-1]))
    if len(lines) == 1:
        steps = f"Step {first_step}"
    else:
        steps = f"Medians of steps {first_step} to {last_step}"
    seconds = f" Predicted seconds are from {basis}." if basis else ""
    return f"{steps}.{seconds} Predicted memory is that of the largest batches."
