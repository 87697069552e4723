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

# Keys with a separate place on the page, or that are not shown.
PLACED_KEYS = (
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
DATASET_KEYS = frozenset(("rank", "loss"))
DATASET_NOTE = "Rows of the dataset that were trained on, as the model reads them. None of this text was written by the model."
# Keys that only completions of the model have. Ranked completions have a rank as well.
COMPLETION_KEYS = frozenset(("reward", "finished"))
STOPPED_TEXT = "ended with EOS or a stop text"
TOKEN_COLOURS = {"logprobs": "log-prob", "advantages": "advantage"}


def choose_heading(run: RunFiles) -> str:
    """Return the title of the section with the run's samples.

    It depends on the samples: completions of the model, pairs of the dataset, or other rows of the
    dataset.
    """
    rows = run.samples
    if not rows or any(not is_dataset_row(row) for row in rows):
        return "Completions"
    if any("rank" in row for row in rows):
        return "Pairs of the dataset"
    return "Rows of the dataset"


def is_dataset_row(row: Mapping[str, Any]) -> bool:
    """Return whether a sample is a row of the dataset rather than a completion of the model."""
    return not DATASET_KEYS.isdisjoint(row) and COMPLETION_KEYS.isdisjoint(row)


def render_completions(run: RunFiles) -> tuple[str, list[dict[str, Any]]]:
    """Return the HTML of a run's samples by step, and the per-token data for the page's script."""
    by_step = group_rows(run.samples)
    tokens: list[dict[str, Any]] = []
    rewards = [value for row in run.samples if (value := _read_score(row)) is not None]
    reward_range = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    headline = _read_headline(run)
    tabs = "".join(
        f'<button type="button" data-step="{step:g}" aria-pressed="{str(step == max(by_step)).lower()}">'
        f"Step {format_number(step)}{_format_batch_mean(step, headline)}</button>"
        for step in by_step
    )
    panels = "".join(
        f'<div class="panel" data-step="{step:g}"><h3>Step {format_number(step)}{_format_batch_mean(step, headline)}</h3>'
        + "".join(render_group(group, reward_range, tokens) for group in groups)
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
    for key, label in TOKEN_COLOURS.items():
        if any(key in token_data for token_data in tokens):
            choices.append(f'<option value="{key}">{label}</option>')
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
    group: SampleGroup, reward_range: tuple[float, float], tokens: list[dict[str, Any]]
) -> str:
    """Render one prompt with all of its answers side by side.

    `reward_range` is the lowest and the highest reward on the page. The per-token data of the
    answers are appended to `tokens`.
    """
    if group.prompt:
        prompt = f'<div class="prompt" tabindex="0" aria-label="prompt">{escape_text(group.prompt)}</div>'
    else:
        prompt = ""
    reference = ""
    if group.answer:
        reference = f'<div class="reference" tabindex="0"><b>Reference</b> {escape_text(group.answer)}</div>'
    answers = "".join(
        _render_answer(group, index, reward_range, tokens) for index in range(len(group.rows))
    )
    return (
        f'<article class="group-of" data-columns="{choose_num_columns(len(group.rows))}">'
        f"<header>{_render_group_line(group)}</header>{prompt}{reference}"
        f'<div class="answers">{answers}</div></article>'
    )


def choose_num_columns(count: int) -> int:
    """Return the number of columns for `count` answers; the last row has few empty places."""
    if count <= 4:
        return count
    if count in (5, 6, 9):
        return 3
    return 4


def _render_group_line(group: SampleGroup) -> str:
    """Render the line above a group of answers, with its id and a summary of its rewards.

    The summary is the margin between the best and the worst answer if they are ranked, else the
    mean and the range of their rewards.
    """
    facts = [f"id {group.id}"] if group.id is not None else []
    scores = [value for row in group.rows if (value := _read_score(row)) is not None]
    if group.is_ranked and len(scores) > 1:
        gap = scores[0] - scores[-1]
        facts.append(f"margin {format_number(gap)}, {'right' if gap > 0 else 'wrong'} order")
    elif len(scores) > 1:
        facts.append(
            f"mean reward of these {len(scores)}: {format_number(sum(scores) / len(scores))}"
        )
        low = format_number(min(scores))
        high = format_number(max(scores))
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
    group: SampleGroup, index: int, reward_range: tuple[float, float], tokens: list[dict[str, Any]]
) -> str:
    row = group.rows[index]
    completion = (
        escape_text(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    )
    return (
        f'<div class="answer">{_render_rank(group, index)}<div class="completion" tabindex="0" aria-label="answer"'
        f"{append_tokens(row, tokens)}>{completion}</div><footer>{render_facts(row, reward_range)}</footer></div>"
    )


def _render_rank(group: SampleGroup, index: int) -> str:
    """Render the rank of an answer in a pair or ranking as chosen, rejected, or a number.

    `index` is the position of the answer in `group.rows`, where the best answer comes first.
    Returns "" if the answers are not ranked.
    """
    if not group.is_ranked:
        return ""
    if index == 0:
        label, style = "chosen", "good"
    elif index == len(group.rows) - 1:
        label, style = "rejected", "bad"
    else:
        label, style = f"rank {index + 1}", ""
    return f'<p class="verdict {style}">{label}</p>'


def append_tokens(row: Mapping[str, Any], tokens: list[dict[str, Any]]) -> str:
    """Append an answer's per-token data to `tokens`, and return an HTML attribute with its index.

    The page's script finds the answer's data in `tokens` by this index. Returns "" if the answer's
    tokens are not known.
    """
    token_texts = row.get("tokens")
    if not isinstance(token_texts, list):
        return ""
    token_data: dict[str, Any] = {
        "t": [replace_control_characters(str(text)) for text in token_texts]
    }
    for name in ("logprobs", "advantages", "trained"):
        values = row.get(name)
        if (
            isinstance(values, list)
            and len(values) == len(token_texts)
            and all(is_finite(value) for value in values)
        ):
            token_data[name] = values
    if "advantages" not in token_data and is_finite(row.get("advantage")):
        token_data["advantages"] = [round(float(row["advantage"]), 4)] * len(token_texts)
    tokens.append(token_data)
    return f' data-tokens="{len(tokens) - 1}"'


def render_facts(row: Mapping[str, Any], reward_range: tuple[float, float]) -> str:
    """Render the known values of an answer, such as its reward, most important first.

    `reward_range` is the lowest and the highest reward on the page: the ends of the bar that shows
    the reward.
    """
    facts = ""
    reward = row.get("reward", row.get("score"))
    name = "reward" if "reward" in row else "score"
    if isinstance(reward, int | float) and is_finite(reward):
        low, high = reward_range
        share = 100 * (float(reward) - low) / (high - low) if high > low else 100.0
        facts += (
            f'<span class="reward">{name} <b>{format_number(float(reward))}</b>'
            f'<i class="meter" aria-hidden="true"><i style="width:{share:.0f}%"></i></i></span>'
        )
    for key, label in (("loss", "loss"), ("advantage", "advantage")):
        if is_finite(row.get(key)):
            facts += f"<span>{label} <b>{format_number(float(row[key]))}</b></span>"
    if is_finite(row.get("log_ratio")):
        facts += (
            f"<span>log-prob minus reference <b>{format_number(float(row['log_ratio']))}</b></span>"
        )
    values = row.get("logprobs")
    if (
        isinstance(values, list)
        and values
        and all(is_finite(number) for number in values)
        and "loss" not in row
    ):
        facts += f"<span>log-prob per token {format_number(sum(values) / len(values))}</span>"
    return (
        facts
        + _render_finish_reason(row)
        + "".join(_render_fact(key, value) for key, value in row.items() if key not in PLACED_KEYS)
    )


def _render_finish_reason(row: Mapping[str, Any]) -> str:
    """Render why an answer ended: by EOS or a stop text, or by its maximum length.

    Returns "" if the reason is unknown.
    """
    reason = row.get("finish_reason")
    if reason is None and is_finite(row.get("finished")):
        reason = "stop" if row["finished"] else "length"
    if reason not in ("stop", "length"):
        return ""
    if reason == "stop":
        return f"<span>{STOPPED_TEXT}</span>"
    return '<span class="warn">cut by length</span>'


def _render_fact(name: str, value: Any) -> str:
    """Render a number or a short text; "" for any other value."""
    if not is_finite(value) and not isinstance(value, str):
        return ""
    text = format_number(float(value)) if is_finite(value) else str(value)
    if len(text) <= 40:
        return f"<span>{escape(name.replace('_', ' '))} {escape(text)}</span>"
    return ""


MAX_PROMPTS = 12

ComparedRun = tuple[str, ColourPair, RunFiles]  # (name on the page, colour, run)


def render_answers(compared_runs: Sequence[ComparedRun]) -> tuple[str, list[dict[str, Any]]]:
    """Return HTML with each run's latest answers to shared prompts, and the per-token data.

    A prompt is shared if at least two runs answered it. At most `MAX_PROMPTS` prompts are included;
    prompts that more runs answered come first. The page's script uses the per-token data to colour
    the tokens of the answers.
    """
    groups_by_run = [_find_latest_groups(run) for _, _, run in compared_runs]
    counts: dict[str, int] = {}
    for groups in groups_by_run:
        for prompt in groups:
            counts[prompt] = counts.get(prompt, 0) + 1
    shared = [prompt for prompt, count in counts.items() if count > 1]
    shared.sort(
        key=lambda prompt: (
            -counts[prompt],
            -max(groups[prompt].step for groups in groups_by_run if prompt in groups),
        )
    )
    tokens: list[dict[str, Any]] = []
    blocks = "".join(
        _render_prompt(prompt, compared_runs, groups_by_run, tokens)
        for prompt in shared[:MAX_PROMPTS]
    )
    if not blocks:
        return "", []
    choices = "".join(
        f'<option value="{key}">{label}</option>'
        for key, label in TOKEN_COLOURS.items()
        if any(key in token_data for token_data in tokens)
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
    for groups in group_rows(run.samples, max_groups=1000).values():
        for group in groups:
            if group.prompt and not group.is_ranked:
                latest_groups[group.prompt] = group
    return latest_groups


def _render_prompt(
    prompt: str,
    compared_runs: Sequence[ComparedRun],
    groups_by_run: Sequence[Mapping[str, SampleGroup]],
    tokens: list[dict[str, Any]],
) -> str:
    """Render a prompt with the answers of all runs that have one."""
    answers = []
    for compared_run, groups in zip(compared_runs, groups_by_run, strict=True):
        if prompt in groups:
            answers.append((compared_run, groups[prompt]))
    reference_answer = next((group.answer for _, group in answers if group.answer), None)
    if reference_answer:
        reference = f'<div class="reference" tabindex="0"><b>Reference</b> {escape_text(reference_answer)}</div>'
    else:
        reference = ""
    cells = "".join(
        _render_run_answer(label, hue, group, tokens) for (label, hue, _), group in answers
    )
    return (
        f'<article class="group-of" data-columns="{min(len(answers), 4)}"><div class="prompt" tabindex="0" aria-label="prompt">'
        f'{escape_text(prompt)}</div>{reference}<div class="answers">{cells}</div></article>'
    )


def _render_run_answer(
    label: str, hue: ColourPair, group: SampleGroup, tokens: list[dict[str, Any]]
) -> str:
    """Render the first answer of one run to a prompt."""
    row = group.rows[0]
    completion = (
        escape_text(str(row.get("completion") or "")) or '<span class="quiet">(empty)</span>'
    )
    rewards = group.read_values("reward")
    if len(rewards) > 1:
        mean = f", mean reward of {len(rewards)}: {format_number(sum(rewards) / len(rewards))}"
    else:
        mean = ""
    reward = float(row["reward"]) if is_finite(row.get("reward")) else 0.0
    return (
        f'<div class="answer"><p class="verdict"><i class="pick" style="{format_hue(hue)}"></i>{escape(label)}, step '
        f"{format_number(group.step)}{mean}</p>"
        f'<div class="completion" tabindex="0" aria-label="answer"{append_tokens(row, tokens)}>{completion}</div>'
        f"<footer>{render_facts(row, (0.0, max(reward, 1.0)))}</footer></div>"
    )
