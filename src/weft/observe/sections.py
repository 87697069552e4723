"""HTML of a report's first screen, which shows the headline metrics, and of its log section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.observe import trend
from weft.observe.diagnosis import RunDiagnosis
from weft.observe.metrics import (
    EVAL,
    ROWS,
    compute_tokens_per_second,
    find_evaluation,
    find_headline,
    find_title,
    format_duration,
    format_number,
    get_last_part,
    is_finite,
)
from weft.observe.page import escape_text
from weft.observe.run_files import RunFiles


def render_lede(run: RunFiles) -> str:
    """Return a few sentences on the length of the run and the change of its headline metrics."""
    if not run.lines:
        return "No step has been written yet."
    last = run.lines[-1]
    seconds = sum(run.get_series("step_seconds")[1])
    parts = [format_count(last["step"], "step")]
    if epochs := run.get_series("epoch")[1]:
        parts.append(f"{format_count(round(epochs[-1], 3), 'epoch')} of data")
    text = ", ".join(parts) + (f", {format_duration(seconds)} of training." if seconds else ".")
    sentences = [describe_course(run, name) for name in choose_headlines(run)]
    return " ".join([escape(text), *sentences])


def choose_headlines(run: RunFiles) -> list[str]:
    """Return the names of the headline metrics: the validation metric and the training metric.

    A metric that the run does not have is left out.
    """
    name = find_headline(run.metric_names, run.record.get("algorithm"))
    evaluated = find_evaluation(name, run.metric_names)
    return [each for each in (evaluated, name) if each is not None]


def describe_course(run: RunFiles, name: str) -> str:
    """Return a sentence on how a metric developed: first, last and best value, and the noise.

    The values are means over several steps.
    """
    steps, values = run.get_series(name)
    what = escape(find_title(name))
    what = what[0].upper() + what[1:]
    if len(values) == 1:
        return f"{what} is <b>{format_number(values[0])}</b>."
    rows = run.get_series(ROWS)[1]
    course = trend.compute_change(values, name, rows[-1] if rows else None)
    good, at = trend.find_best(name, values)
    return (
        f"{what} went from {format_number(course.first)} to <b>{format_number(course.last)}</b> "
        f"({escape(course.format_text())}); best "
        f"{format_number(good)} at step {format_number(steps[at])}."
    )


def render_status(word: str, *, flagged: bool = False) -> str:
    """Render a run's status. With `flagged`, a mark shows that a metric is out of range."""
    kind = f"{word} flagged" if flagged else word
    return f'<span class="status {escape(kind)}">{escape(word)}{" !" if flagged else ""}</span>'


def render_verdict(diagnosis: RunDiagnosis | None) -> str:
    """Render a diagnosis as a line at the top of the report; "" if `diagnosis` is None."""
    if diagnosis is None:
        return ""
    kind, word = ("fine", "Check") if diagnosis.is_sound else ("wrong", "Look at this")
    return f'<p class="diagnosis {kind}"><b>{word}:</b> {escape(diagnosis.summary)}</p>'


def format_count(value: float, word: str) -> str:
    """Format a number with a noun in singular or plural, such as `1 step` or `2 steps`."""
    return f"{format_number(value)} {word if value == 1 else f'{word}s'}"


def render_tiles(run: RunFiles) -> str:
    """Render the most important numbers of the run, each in a tile."""
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for name, value, note in _list_facts(run)
    )


def _list_facts(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    if not run.lines:
        return
    # Headline metrics and KL.
    for name in choose_headlines(run):
        _, values = run.get_series(name)
        good, _ = trend.find_best(name, values)
        yield (
            find_title(name),
            format_number(values[-1] if name.startswith(EVAL) else trend.compute_end_mean(values)),
            f"best {format_number(good)}",
        )
    kl = next((metric for metric in run.metric_names if get_last_part(metric) == "kl"), None)
    if kl is not None:
        _, values = run.get_series(kl)
        yield (
            "KL",
            format_number(trend.compute_end_mean(values)),
            f"highest {format_number(max(values))}",
        )
    # Progress and time.
    epochs = run.get_series("epoch")[1]
    yield (
        "steps",
        format_number(run.lines[-1]["step"]),
        format_count(round(epochs[-1], 3), "epoch") if epochs else "",
    )
    if seconds := run.get_series("step_seconds")[1]:
        yield (
            "training time",
            format_duration(sum(seconds)),
            f"{format_number(sum(seconds) / len(seconds))} s per step",
        )
    # Throughput and memory.
    names = []
    for name in run.metric_names:
        if get_last_part(name) in ("step_seconds", "num_tokens", "tokens_per_second"):
            names.append(name)
    measurements = (
        {name: line[name] for name in names if is_finite(line.get(name))} for line in run.lines
    )
    rates = [rate for line in measurements if (rate := compute_tokens_per_second(line))]
    if rates:
        yield (
            "tokens per second",
            format_number(round(sum(rates) / len(rates))),
            f"highest {format_number(round(max(rates)))}",
        )
    if memory := run.get_series("peak_memory_gb")[1]:
        yield "peak memory", f"{max(memory):.2f} GB", ""


def render_log(lines: Sequence[str]) -> str:
    """Render the lines of a run's log."""
    return (
        f'<pre class="log" tabindex="0" aria-label="log">{escape_text(chr(10).join(lines))}</pre>'
    )
