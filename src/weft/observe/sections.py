"""The parts of the report besides its curves: headline numbers, completions, configuration, log. HTML from a run's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.metrics import direction, duration, finite, headline, last_part, number, title, tokens_per_second
from weft.observe.run_files import RunFiles

STEPS, ROWS = 8, 6  # of completions: steps to choose from, completions of each
SHOWN = ("step", "id", "k", "prompt", "completion", "reward")


def pick(values: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of `values`, evenly spread, with the first and the last."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


# -- headline numbers


def lede(run: RunFiles) -> str:
    """The run in two sentences."""
    if not run.lines:
        return "No step has been written yet."
    last = run.lines[-1]
    seconds = sum(run.series("step_seconds")[1])
    epochs = run.series("epoch")[1]
    parts = [f"{number(last['step'])} {'step' if last['step'] == 1 else 'steps'}"]
    if epochs:
        parts.append(f"{number(round(epochs[-1], 3))} {'epoch' if epochs[-1] == 1 else 'epochs'} of data")
    text = ", ".join(parts) + (f", {duration(seconds)} of training." if seconds else ".")
    name = headline(run.names)
    if name is None:
        return escape(text)
    steps, values = run.series(name)
    what = title(name)
    good = min(values) if direction(name) < 0 else max(values)
    at = steps[values.index(good)]
    moved = f"{what[0].upper()}{what[1:]} went from {number(values[0])} to <b>{number(values[-1])}</b>"
    return f"{escape(text)} {moved}; best {number(good)} at step {number(at)}."


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
        good = min(values) if direction(name) < 0 else max(values)
        yield title(name), number(values[-1]), f"best {number(good)}"
    for word in (f"eval/{last_part(name or '')}", "eval/reward", "eval/accuracy", "eval/loss"):
        if word in run.names:
            _, values = run.series(word)
            yield f"eval {last_part(word)}", number(values[-1]), f"first {number(values[0])}"
            break
    kl = next((metric for metric in run.names if last_part(metric) == "kl"), None)
    if kl is not None:
        _, values = run.series(kl)
        yield "KL", number(values[-1]), f"highest {number(max(values))}"
    yield "steps", number(run.lines[-1]["step"]), _epochs(run)
    seconds = run.series("step_seconds")[1]
    if seconds:
        yield "training time", duration(sum(seconds)), f"{number(sum(seconds) / len(seconds))} s a step"
    rates = [rate for line in run.lines if (rate := tokens_per_second(_finite(line)))]
    if rates:
        yield "tokens a second", number(round(sum(rates) / len(rates))), f"highest {number(round(max(rates)))}"
    memory = run.series("peak_memory_gb")[1]
    if memory:
        yield "peak memory", f"{max(memory):.2f} GB", ""


def _epochs(run: RunFiles) -> str:
    epochs = run.series("epoch")[1]
    return f"{number(round(epochs[-1], 3))} epochs" if epochs else ""


def _finite(line: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in line.items() if finite(value)}


# -- completions


def completions(run: RunFiles) -> str:
    """Completions of several steps, one step at a time where the page's script runs, one under the other elsewhere."""
    by_step: dict[float, list[Mapping[str, Any]]] = {}
    for row in run.samples:
        by_step.setdefault(float(row["step"]), []).append(row)
    steps = pick(sorted(by_step), STEPS)
    rewards = [float(row["reward"]) for row in run.samples if finite(row.get("reward"))]
    span = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    tabs = "".join(_tab(step, by_step[step], chosen=step == steps[-1]) for step in steps)
    panels = "".join(
        f'<div class="panel" data-step="{step:g}"><h3>Step {number(step)}</h3><div class="samples">'
        + "".join(_sample(row, span) for row in by_step[step][:ROWS])
        + "</div></div>"
        for step in steps
    )
    return f'<div class="tabs" role="group" aria-label="Step">{tabs}</div>{panels}'


def _tab(step: float, rows: Sequence[Mapping[str, Any]], *, chosen: bool) -> str:
    rewards = [float(row["reward"]) for row in rows if finite(row.get("reward"))]
    mean = f"<small>reward {number(sum(rewards) / len(rewards))}</small>" if rewards else ""
    return f'<button type="button" data-step="{step:g}" aria-pressed="{str(chosen).lower()}">Step {number(step)}{mean}</button>'


def _sample(row: Mapping[str, Any], span: tuple[float, float]) -> str:
    facts = ""
    reward = row.get("reward")
    if finite(reward):
        low, high = span
        share = 100 * (float(reward) - low) / (high - low) if high > low else 100.0  # type: ignore[arg-type]
        facts += (
            f'<span class="reward">reward <b>{number(float(reward))}</b>'  # type: ignore[arg-type]
            f'<i class="meter" aria-hidden="true"><i style="width:{share:.0f}%"></i></i></span>'
        )
    facts += "".join(_fact(name, value) for name, value in row.items() if name not in SHOWN)
    name = escape(f"id {row['id']}") if row.get("id") is not None else ""
    prompt = str(row.get("prompt") or "")
    asked = f'<div class="prompt" tabindex="0" aria-label="prompt">{shown(prompt)}</div>' if prompt else ""
    said = shown(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    return (
        f'<article class="sample">{asked}<div class="completion" tabindex="0" aria-label="completion">{said}</div>'
        f'<footer>{facts}<span class="id">{name}</span></footer></article>'
    )


def _fact(name: str, value: Any) -> str:
    if name == "finished" and finite(value):
        return "<span>ended by itself</span>" if value else '<span class="warn">cut by length</span>'
    if not finite(value) and not isinstance(value, str):
        return ""
    text = number(float(value)) if finite(value) else str(value)
    return f"<span>{escape(name.replace('_', ' '))} {escape(text)}</span>" if len(text) <= 40 else ""


def shown(text: str) -> str:
    """Text that came from data, as HTML that shows it and nothing else; control signs become visible."""
    cleaned = "".join(sign if sign in "\n\t" or ord(sign) >= 32 else chr(0x2400 + ord(sign)) for sign in text)
    return escape(cleaned)


# -- configuration and log


def configuration(config: Mapping[str, Any]) -> str:
    """Every option under its dotted name; a block for each top-level group."""
    alone = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
    groups = {"run": alone} | {name: value for name, value in config.items() if isinstance(value, Mapping)}
    blocks = []
    for group, values in groups.items():
        rows = "".join(_option(name, value) for name, value in _flat(values))
        blocks.append(f'<section class="group"><h3>{escape(str(group))}</h3><dl>{rows}</dl></section>' if rows else "")
    return "".join(blocks)


def _option(name: str, value: Any) -> str:
    kind = "option unset" if _unset(value) else "option"
    return f'<div class="{kind}"><dt>{escape(name)}</dt><dd>{shown(_written(value))}</dd></div>'


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unset(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, list | Mapping) and not value)


def _written(value: Any) -> str:
    if _unset(value):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(_written(each) for each in value) if isinstance(value, list) else str(value)


def log(lines: Sequence[str]) -> str:
    return f'<pre class="log" tabindex="0" aria-label="log">{shown(chr(10).join(lines))}</pre>'
