"""Augmentation of rankings with bad replies, which are ranked last.

The bad replies are sampled from a weak model, or made by degrading good replies. The output is
written in parts of `ROWS_PER_PART` rows, so that an interrupted command can resume with the same
result. The first line of the unfinished file contains the options. Random draws depend only on the
seed, and on the row or the index of its part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft import randomness, writing
from weft.data.bad_replies import PromptReplies, make_worse_reply, read_replies
from weft.data.rows import BadRow
from weft.data.sources import RowLocation, UnreadableRow, find_files, read_rows
from weft.errors import ConfigError, DataError
from weft.evaluation.answers import (
    MAX_REPORTED,
    EvaluationPrompt,
    Progress,
    SamplingSettings,
    sample_answers,
    score_replies,
)
from weft.evaluation.models import OpenedModel
from weft.writing import open_file, replace_file

ROWS_PER_PART = 64


@dataclass(frozen=True)
class AugmentationOptions:
    """Options for adding bad replies to rankings.

    Attributes:
        kinds: methods of degrading replies, by their names in `weft.data.bad_replies`
        samples: number of replies that the weak model samples for each row
        share: fraction of rows that get bad replies
        seed: seed of the random choices, except for the weak model's sampling
        pairs: True to write {chosen, rejected} rows instead of rankings
    """

    kinds: tuple[str, ...] = ()
    samples: int = 1
    share: float = 1.0
    seed: int = 1
    pairs: bool = False


@dataclass(frozen=True)
class WeakModel:
    """Model whose replies are ranked last, with its sampling settings.

    `reward`, if given, is a reward model that selects the best of several sampled replies.
    """

    opened: OpenedModel
    settings: SamplingSettings
    reward: OpenedModel | None = None


@dataclass
class AugmentationCounts:
    """Counts of rows that were written with bad replies, written without them, or left out."""

    augmented: int = 0
    plain: int = 0
    left_out: int = 0


def read(paths: Sequence[str]) -> list[PromptReplies]:
    """Read rows of prompts with replies from the files, and make the row ids unique.

    Raises `DataError` if there are no rows, or if some rows have no replies. The message lists
    these rows.
    """
    rows = list[PromptReplies]()
    problems = list[str]()
    num_uses = dict[str, int]()
    for place, row in _iterate_rows(paths):
        try:
            if isinstance(row, UnreadableRow):
                raise BadRow(row.reason)
            for prompt_replies in read_replies(row, len(rows)):
                count = num_uses[prompt_replies.id] = num_uses.get(prompt_replies.id, 0) + 1
                if count > 1:
                    prompt_replies = replace(prompt_replies, id=f"{prompt_replies.id}-{count}")
                rows.append(prompt_replies)
        except (BadRow, DataError) as error:
            problems.append(f"{place}: {error}")
            if len(problems) == MAX_REPORTED:
                break
    if problems:
        raise DataError("\n".join(["these rows have no replies to rank:", *problems]))
    if not rows:
        raise DataError(f"{', '.join(paths)}: it contains no replies")
    return rows


def _iterate_rows(paths: Sequence[str]) -> Iterator[tuple[RowLocation, Any]]:
    for path in paths:
        for file in find_files(path):
            yield from read_rows(file)


def write(
    rows: Sequence[PromptReplies],
    plan: AugmentationOptions,
    weak: WeakModel | None,
    file: Path,
    options: Mapping[str, Any],
    progress: Progress | None = None,
) -> AugmentationCounts:
    """Write the rows with the added bad replies to `file`, and return counts of the rows.

    The rows are processed in parts, and each finished part is appended to the unfinished file
    `{file}.part`. If an interrupted command has left such a file, its parts are reused. `options`
    are the command's options, which are written to the first line of the unfinished file. Raises
    `ConfigError` if `file` exists, or if the unfinished file was written with other options.
    """
    if file.exists():
        raise ConfigError(
            f"{file} already exists and is not overwritten; name another file, or remove it"
        )
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    options_line = json.dumps(dict(options), sort_keys=True)
    lines = _read_unfinished(unfinished, options_line)
    counts = AugmentationCounts()
    # Append each missing part to the unfinished file.
    for start in range(0, len(rows), ROWS_PER_PART):
        part = rows[start : start + ROWS_PER_PART]
        part_index = start // ROWS_PER_PART
        if part_index < len(lines):
            line = lines[part_index]
        else:
            line = json.dumps(_augment_part(part, rows, plan, weak, part_index), ensure_ascii=False)
            with open_file(unfinished, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
            lines.append(line)
        if progress is not None:
            progress(min(start + ROWS_PER_PART, len(rows)), len(rows))
    # Write the rows of all parts to the final file.
    with replace_file(file) as partial, partial.open("w", encoding="utf-8") as stream:
        for result in map(json.loads, lines):
            counts.left_out += result["left_out"]
            for row in result["rows"]:
                has_bad_replies = "augmented" in row or "rejected" in row
                counts.augmented += has_bad_replies
                counts.plain += not has_bad_replies
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.unlink()
    return counts


def _read_unfinished(unfinished: Path, options_line: str) -> list[str]:
    """Return the lines of the unfinished file, each with the result of one part of the rows.

    If the file does not exist, it is created with `options_line`, which contains the options of
    this command. If it exists, its first line must equal `options_line`; otherwise, `ConfigError`
    is raised. The first line is not returned, and an incomplete last line is removed from the file.
    """
    if not unfinished.exists():
        writing.write(unfinished, options_line + "\n")
        return []
    lines = unfinished.read_text(encoding="utf-8").split("\n")
    if lines[0] != options_line:
        raise ConfigError(
            f"{unfinished} was started with other options or rows; give those, remove it, or name "
            f"another file"
        )
    complete_lines = lines[1:-1]  # the last item is empty, or a line that was cut off
    writing.write(unfinished, "\n".join([options_line, *complete_lines, ""]))
    return complete_lines


def _augment_part(
    part: Sequence[PromptReplies],
    rows: Sequence[PromptReplies],
    plan: AugmentationOptions,
    weak: WeakModel | None,
    part_index: int,
) -> dict[str, Any]:
    """Return the augmented rows of one part of the output, and a count of the rows left out.

    The result is a mapping with the keys "rows" and "left_out". `part` has the input rows of the
    part, and `part_index` is its index. `rows` are the input rows of all parts, because some kinds
    of bad replies are taken from other rows.
    """
    is_chosen = []
    for row in part:
        key = randomness.derive_key(plan.seed, "augmented", id=row.id)
        is_chosen.append(float(randomness.draw_uniforms(key, [0])[0]) < plan.share)
    chosen_rows = [row for row, is_taken in zip(part, is_chosen, strict=True) if is_taken]
    replies: list[str | None] = [None] * len(chosen_rows)
    if weak is not None and chosen_rows:
        replies = _sample_weak_replies(chosen_rows, plan, weak, part_index)
    weak_replies = iter(replies)
    output_rows = list[dict[str, Any]]()
    left_out = 0
    for row, is_taken in zip(part, is_chosen, strict=True):
        bad_replies = [
            reply
            for kind in plan.kinds
            if is_taken and (reply := make_worse_reply(kind, row, rows, plan.seed)) is not None
        ]
        weak_reply = next(weak_replies) if is_taken else None
        if weak_reply is not None and not row.has_reply(weak_reply):
            bad_replies.append(row.match_whitespace(weak_reply))
        new_rows = list(_build_rows(row, bad_replies, plan.pairs))
        output_rows += new_rows
        left_out += not new_rows
    return {"left_out": left_out, "rows": output_rows}


def _build_rows(
    row: PromptReplies, bad_replies: Sequence[str], pairs: bool
) -> Iterator[dict[str, Any]]:
    """Yield one ranking that includes the bad replies or, with `pairs`, one pair per bad reply.

    Each pair consists of the best reply and a bad reply. Without bad replies, no pair is yielded,
    and a ranking is yielded only if the row has at least two replies.
    """
    if pairs:
        for index, reply in enumerate(bad_replies):
            yield {
                "id": f"{row.id}/{index}",
                **row.prompt_columns,
                "chosen": row.replies[0],
                "rejected": reply,
            }
    elif bad_replies or len(row.replies) > 1:
        yield {
            "id": row.id,
            **row.prompt_columns,
            "replies": list(row.replies),
            **({"augmented": list(bad_replies)} if bad_replies else {}),
        }


def _sample_weak_replies(
    rows: Sequence[PromptReplies], plan: AugmentationOptions, weak: WeakModel, part_index: int
) -> list[str | None]:
    """Return the weak model's reply to each row; None for a row without a usable reply.

    If there is a reward model, it selects the best of several replies. A row has no usable reply if
    all replies are empty, if the prompt does not fit in the context, or if there are no prompt
    messages. `part_index` is the index of these rows' part of the output; the seed depends on it.
    """
    prompts = {}
    for index, row in enumerate(rows):
        if row.messages:
            prompts[index] = _build_prompt(row)
    opened, context = weak.opened, weak.opened.context
    if context is not None:
        prompts = {
            index: prompt
            for index, prompt in prompts.items()
            if len(prompt.tokenize(opened.tokenizer)) < context
        }
    # Sample with a seed that depends on the part, so that a resumed command gives the same replies.
    spec = replace(weak.settings.spec, seed=weak.settings.spec.seed + part_index)
    if prompts:
        answers = sample_answers(
            opened,
            list(prompts.values()),
            [replace(weak.settings, spec=spec)],
            samples=plan.samples,
        )
    else:
        answers = []
    replies = {
        index: texts
        for index, prompt_answers in zip(prompts, answers, strict=True)
        if (texts := [answer.text for answer in prompt_answers[0] if answer.text.strip()])
    }
    if weak.reward is None:
        return [replies[index][0] if index in replies else None for index in range(len(rows))]
    # Select the best reply to each row by reward.
    scores = score_replies(
        weak.reward, [prompts[index] for index in replies], list(replies.values())
    )
    best = {
        index: texts[int(row_scores.argmax())]
        for (index, texts), row_scores in zip(replies.items(), scores, strict=True)
    }
    return [best.get(index) for index in range(len(rows))]


def _build_prompt(row: PromptReplies) -> EvaluationPrompt:
    """Return the row's prompt.

    If the row has messages but no text, the text of the last message is the prompt for models
    without a chat template.
    """
    return EvaluationPrompt(
        row.id, str(row.messages[-1]["content"]) if row.text is None else row.text, row.messages
    )
