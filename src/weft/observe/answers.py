"""HTML that compares the answers of several runs to the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.charts import format_hue
from weft.observe.completions import COLOURS, append_tokens, render_facts
from weft.observe.metrics import format_number, is_finite
from weft.observe.page import ColourPair, escape_text
from weft.observe.run_files import RunFiles
from weft.observe.sample_rows import SampleGroup, group_rows

PROMPTS = 12

ComparedRun = tuple[str, ColourPair, RunFiles]  # (name on the page, colour, run)


def render_answers(listed: Sequence[ComparedRun]) -> tuple[str, list[dict[str, Any]]]:
    """Return HTML with each run's latest answers to shared prompts, and the per-token data.

    A prompt is shared if at least two runs answered it. At most `PROMPTS` prompts are included;
    prompts that more runs answered come first. The page's script uses the per-token data to colour
    the tokens of the answers.
    """
    latest = [_find_latest_groups(run) for _, _, run in listed]
    counts: dict[str, int] = {}
    for groups in latest:
        for prompt in groups:
            counts[prompt] = counts.get(prompt, 0) + 1
    shared = [prompt for prompt, number_of in counts.items() if number_of > 1]
    shared.sort(
        key=lambda prompt: (
            -counts[prompt],
            -max(groups[prompt].step for groups in latest if prompt in groups),
        )
    )
    tokens: list[dict[str, Any]] = []
    blocks = "".join(_render_prompt(prompt, listed, latest, tokens) for prompt in shared[:PROMPTS])
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


def _find_latest_groups(run: RunFiles) -> dict[str, SampleGroup]:
    """Return the latest group of answers that the run sampled for each prompt.

    Ranked pairs that come from the dataset are left out.
    """
    latest_groups: dict[str, SampleGroup] = {}
    for listed in group_rows(run.samples, most=1000).values():
        for group in listed:
            if group.prompt and not group.is_ranked:
                latest_groups[group.prompt] = group
    return latest_groups


def _render_prompt(
    prompt: str,
    listed: Sequence[ComparedRun],
    latest: Sequence[Mapping[str, SampleGroup]],
    tokens: list[dict[str, Any]],
) -> str:
    there = []
    for shown_run, groups in zip(listed, latest, strict=True):
        if prompt in groups:
            there.append((shown_run, groups[prompt]))
    right = next((group.answer for _, group in there if group.answer), None)
    if right:
        reference = (
            f'<div class="reference" tabindex="0"><b>Reference</b> {escape_text(right)}</div>'
        )
    else:
        reference = ""
    cells = "".join(_render_answer(label, hue, group, tokens) for (label, hue, _), group in there)
    return (
        f'<article class="group-of" data-columns="{min(len(there), 4)}"><div class="prompt" tabindex="0" aria-label="prompt">'
        f'{escape_text(prompt)}</div>{reference}<div class="answers">{cells}</div></article>'
    )


def _render_answer(
    label: str, hue: ColourPair, group: SampleGroup, tokens: list[dict[str, Any]]
) -> str:
    row = group.rows[0]
    completion = (
        escape_text(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    )
    worth = group.read_values("reward")
    if len(worth) > 1:
        mean = f", mean reward of {len(worth)}: {format_number(sum(worth) / len(worth))}"
    else:
        mean = ""
    reward = float(row["reward"]) if is_finite(row.get("reward")) else 0.0
    return (
        f'<div class="answer"><p class="verdict"><i class="pick" style="{format_hue(hue)}"></i>{escape(label)}, step '
        f"{format_number(group.step)}{mean}</p>"
        f'<div class="completion" tabindex="0" aria-label="answer"{append_tokens(row, tokens)}>{completion}</div>'
        f"<footer>{render_facts(row, (0.0, max(reward, 1.0)))}</footer></div>"
    )
