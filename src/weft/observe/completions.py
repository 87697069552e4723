"""Samples of one run, and answers of several runs to the same prompts, as HTML.

Samples are sampled groups of answers, pairs with scores, or rows with losses. Without the page's
script, all steps are listed one below the other. With the script, the reader can select a step,
search, and colour the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.observe.charts import format_hue
from weft.observe.metrics import find_headline, find_title, format_number, is_finite
from weft.observe.page import ColourPair, escape_text, replace_control_characters
from weft.observe.run_files import RunFiles
from weft.observe.sample_rows import SampleGroup, group_rows

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


def choose_heading(run: RunFiles) -> str:
    """Return the title of the page's section, depending on what the samples are.

    The samples can be completions of the model, or pairs or other rows of the dataset.
    """
    rows = run.samples
    if not rows or any(not is_dataset_row(row) for row in rows):
        return "Completions"
    if any("rank" in row for row in rows):
        return "Pairs of the dataset"
    return "Rows of the dataset"


def is_dataset_row(row: Mapping[str, Any]) -> bool:
    """Return whether a sample is a row of the dataset rather than a completion of the model."""
    return not TRAINED_ON.isdisjoint(row) and WRITTEN.isdisjoint(row)


def render_completions(run: RunFiles) -> tuple[str, list[dict[str, Any]]]:
    """Return HTML of the samples of several steps, and the per-token data for the page's script."""
    by_step = group_rows(run.samples)
    tokens: list[dict[str, Any]] = []
    rewards = [value for row in run.samples if (value := _read_score(row)) is not None]
    span = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    headline = _read_headline(run)
    tabs = "".join(
        f'<button type="button" data-step="{step:g}" aria-pressed="{str(step == max(by_step)).lower()}">'
        f"Step {format_number(step)}{_format_batch_mean(step, headline)}</button>"
        for step in by_step
    )
    panels = "".join(
        f'<div class="panel" data-step="{step:g}"><h3>Step {format_number(step)}{_format_batch_mean(step, headline)}</h3>'
        + "".join(render_group(group, span, tokens) for group in groups)
        + "</div>"
        for step, groups in by_step.items()
    )
    if run.samples and all(map(is_dataset_row, run.samples)):
        note = f'<p class="note">{DATASET_NOTE}</p>'
    else:
        note = ""
    return (
        f'{note}{_render_tools(tokens)}<div class="tabs" role="group" aria-label="Step">{tabs}</div>{panels}',
        tokens,
    )


def _render_tools(tokens: Sequence[Mapping[str, Any]]) -> str:
    """Render a search field, and a menu that selects the values by which tokens are coloured.

    `tokens` are the per-token data of the answers.
    """
    choices = []
    for key, word in COLOURS.items():
        if any(key in t for t in tokens):
            choices.append(f'<option value="{key}">{word}</option>')
    if choices:
        options = f'<option value="">nothing</option>{"".join(choices)}'
        colour = f'<label>Colour tokens by <select id="colour">{options}</select></label>'
    else:
        colour = ""
    return (
        '<div class="tools js" hidden><input id="search" class="filter" type="search" placeholder="Search prompts and answers" '
        f'aria-label="Search prompts and answers">{colour}<output id="found"></output></div>'
    )


def _read_headline(run: RunFiles) -> tuple[str, Mapping[float, float]]:
    """Return the title of the headline metric, and a mapping from step to the metric's value.

    The values are means over the batch, as in the metric's chart.
    """
    name = find_headline(run.metric_names)
    if name is None:
        return "", {}
    return find_title(name), dict(zip(*run.get_series(name), strict=True))


def _format_batch_mean(step: float, headline: tuple[str, Mapping[float, float]]) -> str:
    name, values = headline
    if step in values:
        return f"<small>batch {escape(name)} {format_number(values[step])}</small>"
    return ""


def render_group(
    group: SampleGroup, span: tuple[float, float], tokens: list[dict[str, Any]]
) -> str:
    """Render one prompt with all of its answers side by side.

    `span` has the lowest and the highest reward on the page. The per-token data of the answers are
    appended to `tokens`.
    """
    if group.prompt:
        prompt = f'<div class="prompt" tabindex="0" aria-label="prompt">{escape_text(group.prompt)}</div>'
    else:
        prompt = ""
    right = ""
    if group.answer:
        right = f'<div class="reference" tabindex="0"><b>Reference</b> {escape_text(group.answer)}</div>'
    answers = "".join(
        _render_answer(group, place, span, tokens) for place in range(len(group.rows))
    )
    return (
        f'<article class="group-of" data-columns="{choose_num_columns(len(group.rows))}">'
        f"<header>{_render_group_line(group)}</header>{prompt}{right}"
        f'<div class="answers">{answers}</div></article>'
    )


def choose_num_columns(count: int) -> int:
    """Return the number of columns for `count` answers, so that few places in the last row are
    empty.
    """
    if count <= 4:
        return count
    if count in (5, 6, 9):
        return 3
    return 4


def _render_group_line(group: SampleGroup) -> str:
    """Render the line above a group of answers, with its id and a summary of its rewards.

    For ranked answers, the summary is the margin between the best and the worst answer. For sampled
    answers, it is the mean and range.
    """
    facts = [f"id {group.id}"] if group.id is not None else []
    worth = [value for row in group.rows if (value := _read_score(row)) is not None]
    if group.is_ranked and len(worth) > 1:
        gap = worth[0] - worth[-1]
        facts.append(f"margin {format_number(gap)}, {'right' if gap > 0 else 'wrong'} order")
    elif len(worth) > 1:
        facts.append(f"mean reward of these {len(worth)}: {format_number(sum(worth) / len(worth))}")
        low = format_number(min(worth))
        high = format_number(max(worth))
        facts.append(f"all {low}" if low == high else f"from {low} to {high}")
    return "".join(f"<span>{escape(fact)}</span>" for fact in facts)


def _read_score(row: Mapping[str, Any]) -> float | None:
    """Return an answer's reward or score; for a ranked answer with neither, return its log-ratio.

    Returns None if the answer has none of these.
    """
    score = next((row[name] for name in ("reward", "score") if is_finite(row.get(name))), None)
    if score is None and is_finite(row.get("log_ratio")) and "rank" in row:
        score = row["log_ratio"]
    return None if score is None else float(score)


def _render_answer(
    group: SampleGroup, place: int, span: tuple[float, float], tokens: list[dict[str, Any]]
) -> str:
    row = group.rows[place]
    completion = (
        escape_text(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    )
    return (
        f'<div class="answer">{_render_rank(group, place)}<div class="completion" tabindex="0" aria-label="answer"'
        f"{append_tokens(row, tokens)}>{completion}</div><footer>{render_facts(row, span)}</footer></div>"
    )


def _render_rank(group: SampleGroup, place: int) -> str:
    """Render the rank of an answer in a pair or ranking as chosen, rejected, or a number.

    `place` is the index of the answer in `group.rows`, where the best answer comes first. Returns
    "" if the answers are not ranked.
    """
    if not group.is_ranked:
        return ""
    if place == 0:
        word, style = "chosen", "good"
    elif place == len(group.rows) - 1:
        word, style = "rejected", "bad"
    else:
        word, style = f"rank {place + 1}", ""
    return f'<p class="verdict {style}">{word}</p>'


def append_tokens(row: Mapping[str, Any], tokens: list[dict[str, Any]]) -> str:
    """Append an answer's per-token data to `tokens`, and return an HTML attribute with its index.

    The index is the position of the answer's data in `tokens`, for the page's script. Returns "" if
    the answer's tokens are not known.
    """
    pieces = row.get("tokens")
    if not isinstance(pieces, list):
        return ""
    token_data: dict[str, Any] = {"t": [replace_control_characters(str(piece)) for piece in pieces]}
    for name in ("logprobs", "advantages", "trained"):
        values = row.get(name)
        if (
            isinstance(values, list)
            and len(values) == len(pieces)
            and all(is_finite(each) for each in values)
        ):
            token_data[name] = values
    if "advantages" not in token_data and is_finite(row.get("advantage")):
        token_data["advantages"] = [round(float(row["advantage"]), 4)] * len(pieces)
    tokens.append(token_data)
    return f' data-tokens="{len(tokens) - 1}"'


def render_facts(row: Mapping[str, Any], span: tuple[float, float]) -> str:
    """Render the known values of an answer, such as its reward, most important first.

    `span` has the lowest and the highest reward on the page, which are the ends of the bar that
    shows the reward.
    """
    facts = ""
    reward = row.get("reward", row.get("score"))
    name = "reward" if "reward" in row else "score"
    if isinstance(reward, int | float) and is_finite(reward):
        low, high = span
        share = 100 * (float(reward) - low) / (high - low) if high > low else 100.0
        facts += (
            f'<span class="reward">{name} <b>{format_number(float(reward))}</b>'
            f'<i class="meter" aria-hidden="true"><i style="width:{share:.0f}%"></i></i></span>'
        )
    for key, word in (("loss", "loss"), ("advantage", "advantage")):
        if is_finite(row.get(key)):
            facts += f"<span>{word} <b>{format_number(float(row[key]))}</b></span>"
    if is_finite(row.get("log_ratio")):
        facts += (
            f"<span>log-prob minus reference <b>{format_number(float(row['log_ratio']))}</b></span>"
        )
    values = row.get("logprobs")
    if (
        isinstance(values, list)
        and values
        and all(is_finite(each) for each in values)
        and "loss" not in row
    ):
        facts += f"<span>log-prob per token {format_number(sum(values) / len(values))}</span>"
    return (
        facts
        + _finish(row)
        + "".join(_render_fact(key, value) for key, value in row.items() if key not in SHOWN)
    )


def _finish(row: Mapping[str, Any]) -> str:
    reason = row.get("finish_reason")
    if reason is None and is_finite(row.get("finished")):
        reason = "stop" if row["finished"] else "length"
    if reason not in ("stop", "length"):
        return ""
    if reason == "stop":
        return f"<span>{ENDED}</span>"
    return '<span class="warn">cut by length</span>'


def _render_fact(name: str, value: Any) -> str:
    if not is_finite(value) and not isinstance(value, str):
        return ""
    text = format_number(float(value)) if is_finite(value) else str(value)
    if len(text) <= 40:
        return f"<span>{escape(name.replace('_', ' '))} {escape(text)}</span>"
    return ""


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
    cells = "".join(
        _render_run_answer(label, hue, group, tokens) for (label, hue, _), group in there
    )
    return (
        f'<article class="group-of" data-columns="{min(len(there), 4)}"><div class="prompt" tabindex="0" aria-label="prompt">'
        f'{escape_text(prompt)}</div>{reference}<div class="answers">{cells}</div></article>'
    )


def _render_run_answer(
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
