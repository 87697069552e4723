"""First screen and log of a report: the headline metrics of a run as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.observe import trend
from weft.observe.diagnosis import Diagnosis
from weft.observe.metrics import (
    EVAL,
    ROWS,
    duration,
    evaluation_of,
    finite,
    headline,
    last_part,
    number,
    title,
    tokens_per_second,
)
from weft.observe.page import shown
from weft.observe.run_files import RunFiles


def lede(run: RunFiles) -> str:
    """Summarize the run in a few sentences: its length, and the course of its headline metrics."""
    if not run.lines:
        return "No step has been written yet."
    last = run.lines[-1]
    seconds = sum(run.series("step_seconds")[1])
    parts = [count(last["step"], "step")]
    if epochs := run.series("epoch")[1]:
        parts.append(f"{count(round(epochs[-1], 3), 'epoch')} of data")
    text = ", ".join(parts) + (f", {duration(seconds)} of training." if seconds else ".")
    told = [moved(run, name) for name in shown_metrics(run)]
    return " ".join([escape(text), *told])


def shown_metrics(run: RunFiles) -> list[str]:
    """Return the headline metrics: of the validation rows, if any, then of training."""
    name = headline(run.names, run.record.get("algorithm"))
    evaluated = evaluation_of(name, run.names)
    return [each for each in (evaluated, name) if each is not None]


def moved(run: RunFiles, name: str) -> str:
    """Return a sentence about a metric: its first, last and best value, and the noise.

    The values are means over several steps.
    """
    steps, values = run.series(name)
    what = escape(title(name))
    what = what[0].upper() + what[1:]
    if len(values) == 1:
        return f"{what} is <b>{number(values[0])}</b>."
    rows = run.series(ROWS)[1]
    course = trend.change(values, name, rows[-1] if rows else None)
    good, at = trend.best(name, values)
    return (
        f"{what} went from {number(course.first)} to <b>{number(course.last)}</b> "
        f"({escape(course.text())}); best "
        f"{number(good)} at step {number(steps[at])}."
    )


def status(word: str, *, flagged: bool = False) -> str:
    """Render a run's status; `flagged` marks a run with a metric out of range."""
    kind = f"{word} flagged" if flagged else word
    return f'<span class="status {escape(kind)}">{escape(word)}{" !" if flagged else ""}</span>'


def verdict(found: Diagnosis | None) -> str:
    """Render a diagnosis as a line of the first screen; "" without one."""
    if found is None:
        return ""
    kind, word = ("fine", "Check") if found.sound else ("wrong", "Look at this")
    return f'<p class="diagnosis {kind}"><b>{word}:</b> {escape(found.text)}</p>'


def count(value: float, word: str) -> str:
    """Format a number with its noun: `1 step`, `2 steps`."""
    return f"{number(value)} {word if value == 1 else f'{word}s'}"


def tiles(run: RunFiles) -> str:
    """Render the most important numbers of the run."""
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for name, value, note in _facts(run)
    )


def _facts(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    if not run.lines:
        return
    # Headline metrics and KL.
    for name in shown_metrics(run):
        _, values = run.series(name)
        good, _ = trend.best(name, values)
        yield (
            title(name),
            number(values[-1] if name.startswith(EVAL) else trend.end(values)),
            f"best {number(good)}",
        )
    kl = next((metric for metric in run.names if last_part(metric) == "kl"), None)
    if kl is not None:
        _, values = run.series(kl)
        yield "KL", number(trend.end(values)), f"highest {number(max(values))}"
    # Progress and time.
    epochs = run.series("epoch")[1]
    yield (
        "steps",
        number(run.lines[-1]["step"]),
        count(round(epochs[-1], 3), "epoch") if epochs else "",
    )
    if seconds := run.series("step_seconds")[1]:
        yield (
            "training time",
            duration(sum(seconds)),
            f"{number(sum(seconds) / len(seconds))} s per step",
        )
    # Throughput and memory.
    names = [
        name
        for name in run.names
        if last_part(name) in ("step_seconds", "num_tokens", "tokens_per_second")
    ]
    told = ({name: line[name] for name in names if finite(line.get(name))} for line in run.lines)
    rates = [rate for line in told if (rate := tokens_per_second(line))]
    if rates:
        yield (
            "tokens per second",
            number(round(sum(rates) / len(rates))),
            f"highest {number(round(max(rates)))}",
        )
    if memory := run.series("peak_memory_gb")[1]:
        yield "peak memory", f"{max(memory):.2f} GB", ""


def log(lines: Sequence[str]) -> str:
    """Render the lines of the log."""
    return f'<pre class="log" tabindex="0" aria-label="log">{shown(chr(10).join(lines))}</pre>'
