"""Samples of a run as HTML: groups side by side, pairs with scores, rows with their loss.

Without the page's script all steps are listed one below the other. With it the reader can select a
step, search, and colour tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.metrics import finite, headline, number, title
from weft.observe.page import shown, visible
from weft.observe.run_files import RunFiles
from weft.observe.sample_rows import Group, groups

SHOWN = (
    "step",
    "id",
    "k",
    "prompt",
    "completion",
    "reward",
    "score",
    "answer",
    "tokens",
    "logprobs",
    "advantages",
    "trained",
    "rank",
    "comparison",
    "margin",
    "finished",
    "finish_reason",
    "advantage",
    "log_ratio",
    "loss",
)
# Keys that only rows of the dataset have.
TRAINED_ON = frozenset(("rank", "loss"))
DATASET_NOTE = "Rows of the dataset that were trained on, as the model reads them. None of this text was written by the model."
# Keys that answers of the model have, even if a graph ranks them.
WRITTEN = frozenset(("reward", "finished"))
ENDED = "ended with EOS or a stop text"
COLOURS = {"logprobs": "log-prob", "advantages": "advantage"}


def heading(run: RunFiles) -> str:
    """Return the section's title: completions of the model, or pairs or rows of the dataset."""
    rows = run.samples
    if not rows or any(not of_dataset(row) for row in rows):
        return "Completions"
    if any("rank" in row for row in rows):
        return "Pairs of the dataset"
    return "Rows of the dataset"


def of_dataset(row: Mapping[str, Any]) -> bool:
    """Return whether a sample is a row of the dataset, not written by the model."""
    return not TRAINED_ON.isdisjoint(row) and WRITTEN.isdisjoint(row)


def completions(run: RunFiles) -> tuple[str, list[dict[str, Any]]]:
    """Return (HTML of the samples of several steps, token data for the page's script)."""
    by_step = groups(run.samples)
    tokens: list[dict[str, Any]] = []
    rewards = [value for row in run.samples if (value := _worth(row)) is not None]
    span = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    told = _batch(run)
    tabs = "".join(_tab(step, told, chosen=step == max(by_step)) for step in by_step)
    panels = "".join(
        f'<div class="panel" data-step="{step:g}"><h3>Step {number(step)}{_beside(step, told)}</h3>'
        + "".join(group_html(group, span, tokens) for group in found)
        + "</div>"
        for step, found in by_step.items()
    )
    if run.samples and all(map(of_dataset, run.samples)):
        note = f'<p class="note">{DATASET_NOTE}</p>'
    else:
        note = ""
    return (
        f'{note}{_tools(tokens)}<div class="tabs" role="group" aria-label="Step">{tabs}</div>{panels}',
        tokens,
    )


def _tools(tokens: Sequence[Mapping[str, Any]]) -> str:
    """Render the search field and the menu of values by which tokens can be coloured."""
    choices = [
        f'<option value="{key}">{word}</option>'
        for key, word in COLOURS.items()
        if any(key in t for t in tokens)
    ]
    if choices:
        options = f'<option value="">nothing</option>{"".join(choices)}'
        colour = f'<label>Colour tokens by <select id="colour">{options}</select></label>'
    else:
        colour = ""
    return (
        '<div class="tools js" hidden><input id="search" class="filter" type="search" placeholder="Search prompts and answers" '
        f'aria-label="Search prompts and answers">{colour}<output id="found"></output></div>'
    )


def _batch(run: RunFiles) -> tuple[str, Mapping[float, float]]:
    """Return (title of the headline metric, step -> its mean over the batch).

    These are the numbers of the metric's chart.
    """
    name = headline(run.names)
    if name is None:
        return "", {}
    return title(name), dict(zip(*run.series(name), strict=True))


def _tab(step: float, told: tuple[str, Mapping[float, float]], *, chosen: bool) -> str:
    return (
        f'<button type="button" data-step="{step:g}" aria-pressed="{str(chosen).lower()}">Step {number(step)}'
        f"{_beside(step, told)}</button>"
    )


def _beside(step: float, told: tuple[str, Mapping[float, float]]) -> str:
    name, values = told
    if step in values:
        return f"<small>batch {escape(name)} {number(values[step])}</small>"
    return ""


def group_html(group: Group, span: tuple[float, float], tokens: list[dict[str, Any]]) -> str:
    """Render one prompt with all of its answers side by side."""
    if group.prompt:
        asked = f'<div class="prompt" tabindex="0" aria-label="prompt">{shown(group.prompt)}</div>'
    else:
        asked = ""
    right = ""
    if group.answer:
        right = f'<div class="reference" tabindex="0"><b>Reference</b> {shown(group.answer)}</div>'
    answers = "".join(_answer(group, place, span, tokens) for place in range(len(group.rows)))
    return (
        f'<article class="group-of" data-columns="{columns(len(group.rows))}"><header>{_about(group)}</header>{asked}{right}'
        f'<div class="answers">{answers}</div></article>'
    )


def columns(count: int) -> int:
    """Return the number of columns for `count` answers, such that no row is nearly empty."""
    if count <= 4:
        return count
    if count in (5, 6, 9):
        return 3
    return 4


def _about(group: Group) -> str:
    """Render a line about the group: its id, and the margin or the range of its rewards."""
    facts = [f"id {group.id}"] if group.id is not None else []
    worth = [value for row in group.rows if (value := _worth(row)) is not None]
    if group.pair and len(worth) > 1:
        gap = worth[0] - worth[-1]
        facts.append(f"margin {number(gap)}, {'right' if gap > 0 else 'wrong'} order")
    elif len(worth) > 1:
        facts.append(f"mean reward of these {len(worth)}: {number(sum(worth) / len(worth))}")
        low = number(min(worth))
        high = number(max(worth))
        facts.append(f"all {low}" if low == high else f"from {low} to {high}")
    return "".join(f"<span>{escape(fact)}</span>" for fact in facts)


def _worth(row: Mapping[str, Any]) -> float | None:
    """Return an answer's reward, score, or log-ratio if it is ranked; None without any of them."""
    found = next((row[name] for name in ("reward", "score") if finite(row.get(name))), None)
    if found is None and finite(row.get("log_ratio")) and "rank" in row:
        found = row["log_ratio"]
    return None if found is None else float(found)


def _answer(
    group: Group, place: int, span: tuple[float, float], tokens: list[dict[str, Any]]
) -> str:
    row = group.rows[place]
    said = shown(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    return (
        f'<div class="answer">{_verdict(group, place)}<div class="completion" tabindex="0" aria-label="answer"'
        f"{marked(row, tokens)}>{said}</div><footer>{facts(row, span)}</footer></div>"
    )


def _verdict(group: Group, place: int) -> str:
    """Render an answer's place in a pair or ranking: chosen, rejected, or its rank."""
    if not group.pair:
        return ""
    best = place == 0
    worst = place == len(group.rows) - 1
    if best:
        word = "chosen"
    elif worst:
        word = "rejected"
    else:
        word = f"rank {place + 1}"
    return f'<p class="verdict {"good" if best else "bad" if worst else ""}">{word}</p>'


def marked(row: Mapping[str, Any], tokens: list[dict[str, Any]]) -> str:
    """Append the answer's tokens to `tokens` and return an attribute with their index.

    Returns "" if the tokens are not known.
    """
    pieces = row.get("tokens")
    if not isinstance(pieces, list):
        return ""
    kept: dict[str, Any] = {"t": [visible(str(piece)) for piece in pieces]}
    for name in ("logprobs", "advantages", "trained"):
        values = row.get(name)
        if (
            isinstance(values, list)
            and len(values) == len(pieces)
            and all(finite(each) for each in values)
        ):
            kept[name] = values
    if "advantages" not in kept and finite(row.get("advantage")):
        kept["advantages"] = [round(float(row["advantage"]), 4)] * len(pieces)
    tokens.append(kept)
    return f' data-tokens="{len(tokens) - 1}"'


def facts(row: Mapping[str, Any], span: tuple[float, float]) -> str:
    """Render the known values of an answer, most important first.

    `span` is the (lowest, highest) reward of the page, for the reward's meter.
    """
    told = ""
    reward = row.get("reward", row.get("score"))
    name = "reward" if "reward" in row else "score"
    if isinstance(reward, int | float) and finite(reward):
        low, high = span
        share = 100 * (float(reward) - low) / (high - low) if high > low else 100.0
        told += (
            f'<span class="reward">{name} <b>{number(float(reward))}</b>'
            f'<i class="meter" aria-hidden="true"><i style="width:{share:.0f}%"></i></i></span>'
        )
    for key, word in (("loss", "loss"), ("advantage", "advantage")):
        if finite(row.get(key)):
            told += f"<span>{word} <b>{number(float(row[key]))}</b></span>"
    if finite(row.get("log_ratio")):
        told += f"<span>log-prob minus reference <b>{number(float(row['log_ratio']))}</b></span>"
    values = row.get("logprobs")
    if (
        isinstance(values, list)
        and values
        and all(finite(each) for each in values)
        and "loss" not in row
    ):
        told += f"<span>log-prob per token {number(sum(values) / len(values))}</span>"
    return (
        told
        + _finish(row)
        + "".join(_fact(key, value) for key, value in row.items() if key not in SHOWN)
    )


def _finish(row: Mapping[str, Any]) -> str:
    reason = row.get("finish_reason")
    if reason is None and finite(row.get("finished")):
        reason = "stop" if row["finished"] else "length"
    if reason not in ("stop", "length"):
        return ""
    if reason == "stop":
        return f"<span>{ENDED}</span>"
    return '<span class="warn">cut by length</span>'


def _fact(name: str, value: Any) -> str:
    if not finite(value) and not isinstance(value, str):
        return ""
    text = number(float(value)) if finite(value) else str(value)
    if len(text) <= 40:
        return f"<span>{escape(name.replace('_', ' '))} {escape(text)}</span>"
    return ""
