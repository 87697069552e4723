"""The first screen of a report, and its log: headline numbers as HTML from a run's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.observe.metrics import direction, duration, finite, headline, last_part, number, title, tokens_per_second
from weft.observe.page import shown
from weft.observe.run_files import RunFiles


def lede(run: RunFiles) -> str:
    """The run in two sentences."""
    if not run.lines:
        return "No step has been written yet."
    last = run.lines[-1]
    seconds = sum(run.series("step_seconds")[1])
    parts = [count(last["step"], "step")]
    if epochs := run.series("epoch")[1]:
        parts.append(f"{count(round(epochs[-1], 3), 'epoch')} of data")
    text = ", ".join(parts) + (f", {duration(seconds)} of training." if seconds else ".")
    name = headline(run.names)
    if name is None:
        return escape(text)
    steps, values = run.series(name)
    what = title(name)
    good = best(name, values)
    at = steps[values.index(good)]
    moved = f"{what[0].upper()}{what[1:]} went from {number(values[0])} to <b>{number(values[-1])}</b>"
    return f"{escape(text)} {moved}; best {number(good)} at step {number(at)}."


def count(value: float, word: str) -> str:
    """1 step, 2 steps."""
    return f"{number(value)} {word if value == 1 else f'{word}s'}"


def best(name: str, values: Sequence[float]) -> float:
    return min(values) if direction(name) < 0 else max(values)


def tiles(run: RunFiles) -> str:
    """The numbers that one asks for first."""
    return "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>'
        for name, value, note in _facts(run)
    )


def _facts(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    if not run.lines:
        return
    name = headline(run.names)
    if name is not None:
        _, values = run.series(name)
        yield title(name), number(values[-1]), f"best {number(best(name, values))}"
    for word in (f"eval/{last_part(name or '')}", "eval/reward", "eval/accuracy", "eval/loss"):
        if word in run.names:
            _, values = run.series(word)
            yield f"eval {last_part(word)}", number(values[-1]), f"first {number(values[0])}"
            break
    kl = next((metric for metric in run.names if last_part(metric) == "kl"), None)
    if kl is not None:
        _, values = run.series(kl)
        yield "KL", number(values[-1]), f"highest {number(max(values))}"
    epochs = run.series("epoch")[1]
    yield "steps", number(run.lines[-1]["step"]), count(round(epochs[-1], 3), "epoch") if epochs else ""
    if seconds := run.series("step_seconds")[1]:
        yield "training time", duration(sum(seconds)), f"{number(sum(seconds) / len(seconds))} s per step"
    names = [name for name in run.names if last_part(name) in ("step_seconds", "num_tokens", "tokens_per_second")]
    told = ({name: line[name] for name in names if finite(line.get(name))} for line in run.lines)
    rates = [rate for line in told if (rate := tokens_per_second(line))]
    if rates:
        yield "tokens per second", number(round(sum(rates) / len(rates))), f"highest {number(round(max(rates)))}"
    if memory := run.series("peak_memory_gb")[1]:
        yield "peak memory", f"{max(memory):.2f} GB", ""


def log(lines: Sequence[str]) -> str:
    return f'<pre class="log" tabindex="0" aria-label="log">{shown(chr(10).join(lines))}</pre>'
