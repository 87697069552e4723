"""Comparison of the answers that several runs gave to the same prompts, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.charts import css
from weft.observe.completions import COLOURS, facts, marked
from weft.observe.metrics import finite, number
from weft.observe.page import shown
from weft.observe.palette import Hue
from weft.observe.run_files import RunFiles
from weft.observe.sample_rows import Group, groups

PROMPTS = 12

Shown = tuple[str, Hue, RunFiles]  # (name on the page, colour, run)


def answers(listed: Sequence[Shown]) -> tuple[str, list[dict[str, Any]]]:
    """Return (HTML of the shared prompts with each run's latest answer, token data).

    A prompt is shown if at least two runs answered it; at most `PROMPTS` prompts are shown, those
    answered by the most runs first. The token data lets the page's script colour tokens.
    """
    latest = [_latest(run) for _, _, run in listed]
    counts: dict[str, int] = {}
    for found in latest:
        for prompt in found:
            counts[prompt] = counts.get(prompt, 0) + 1
    shared = [prompt for prompt, number_of in counts.items() if number_of > 1]
    shared.sort(
        key=lambda prompt: (
            -counts[prompt],
            -max(found[prompt].step for found in latest if prompt in found),
        )
    )
    tokens: list[dict[str, Any]] = []
    blocks = "".join(_block(prompt, listed, latest, tokens) for prompt in shared[:PROMPTS])
    if not blocks:
        return "", []
    choices = "".join(
        f'<option value="{k}">{word}</option>'
        for k, word in COLOURS.items()
        if any(k in t for t in tokens)
    )
    tools = (
        '<div class="tools js" hidden><input id="search" class="filter" type="search" placeholder="Search prompts and answers" '
        'aria-label="Search prompts and answers"><label>Colour tokens by <select id="colour"><option value="">nothing</option>'
        f'{choices}</select></label><output id="found"></output></div>'
    )
    note = '<p class="note">From the last steps with saved samples. Of several answers to a prompt, the first is shown.</p>'
    return f'{note}{tools}<div class="panel single">{blocks}</div>', tokens


def _latest(run: RunFiles) -> dict[str, Group]:
    """Return the run's last group for each prompt, without ranked pairs of the dataset."""
    found: dict[str, Group] = {}
    for listed in groups(run.samples, most=1000).values():
        found |= {group.prompt: group for group in listed if group.prompt and not group.pair}
    return found


def _block(
    prompt: str,
    listed: Sequence[Shown],
    latest: Sequence[Mapping[str, Group]],
    tokens: list[dict[str, Any]],
) -> str:
    there = [
        (shown_run, found[prompt])
        for shown_run, found in zip(listed, latest, strict=True)
        if prompt in found
    ]
    right = next((group.answer for _, group in there if group.answer), None)
    if right:
        reference = f'<div class="reference" tabindex="0"><b>Reference</b> {shown(right)}</div>'
    else:
        reference = ""
    cells = "".join(_cell(label, hue, group, tokens) for (label, hue, _), group in there)
    return (
        f'<article class="group-of" data-columns="{min(len(there), 4)}"><div class="prompt" tabindex="0" aria-label="prompt">'
        f'{shown(prompt)}</div>{reference}<div class="answers">{cells}</div></article>'
    )


def _cell(label: str, hue: Hue, group: Group, tokens: list[dict[str, Any]]) -> str:
    row = group.rows[0]
    said = shown(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    worth = group.values("reward")
    if len(worth) > 1:
        mean = f", mean reward of {len(worth)}: {number(sum(worth) / len(worth))}"
    else:
        mean = ""
    reward = float(row["reward"]) if finite(row.get("reward")) else 0.0
    return (
        f'<div class="answer"><p class="verdict"><i class="pick" style="{css(hue)}"></i>{escape(label)}, step '
        f"{number(group.step)}{mean}</p>"
        f'<div class="completion" tabindex="0" aria-label="answer"{marked(row, tokens)}>{said}</div>'
        f"<footer>{facts(row, (0.0, max(reward, 1.0)))}</footer></div>"
    )
