"""Readers of compared replies: pairs, scored answers, wins, ranked lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from weft.data import dialogue
from weft.data.messages import REASONING, Message, normalise
from weft.data.named.example import Example, Use, alternating, assistant, user
from weft.data.named.fields import fill, pick
from weft.data.named.readers.dialogues import checked
from weft.data.rows import Row, number
from weft.registry import register_reader

REFERENCE = re.compile(r"\[\d+(?:,\s*\d+)*?\]")
SUMMARIZE = (
    "Please summarize the following content:\n{}",
    "Write me a summary for the following article:\n{}",
    "Kindly sum up the following information: {}",
    "Please summarize the following text for me:\n{}",
    "Give me a summary of the following text:\n\n{}",
    "Describe the following information in brief: {}",
    "Will you kindly summarize the following paragraph for me?\n{}",
    "Summarize this: {}",
    "TLDR this: {}",
    "{}\nTLDR;",
    "{}\n\nTL;DR",
    "{} tl;dr:",
    "{}\nPlease summarize the content above",
    "{} Please summarize the preceding statements.",
)


@register_reader("pairs")
def pairs(
    rows: Iterable[Row],
    use: Use,
    *,
    prompt: str | None = None,
    chosen: str = "chosen",
    rejected: str = "rejected",
    system: str | None = None,
) -> Iterator[Example]:
    """Make examples of two replies per row.

    They are texts, or lists of messages: replies, or whole conversations that differ in their last
    turn.
    """
    for index, row in enumerate(rows):
        random = use.random(index)
        better = pick(chosen, row, random)
        worse = pick(rejected, row, random)
        if isinstance(better, str):
            asked = alternating(
                [fill(prompt or "prompt", row, random)],
                fill(system, row, random) if system else None,
            )
            replies = [assistant(better), assistant(fill(rejected, row, random))]
        else:
            talks = [normalise(better), normalise(worse)]
            asked = talks[0][:-1]
            replies = [talk[-1] for talk in talks]
            if not asked and prompt:
                asked = [user(fill(prompt, row, random))]
            if talks[1][:-1] not in ([], talks[0][:-1]):
                use.skip("conversations that differ before the last turn")
                continue
        yield from _compared(asked, replies, use)


def _compared(
    context: Sequence[Message], replies: Sequence[Message], use: Use, group: str | None = None
) -> Iterator[Example]:
    """Yield an example of replies, best first; skip the row if they are empty or equal."""
    kept = [reply for reply in replies if reply["content"].strip()]
    if not context or context[-1]["role"] != "user" or not context[-1]["content"].strip():
        use.skip("an empty question")
    elif len({reply["content"] for reply in kept}) < 2:
        use.skip("replies that are empty or alike")
    else:
        use.cut["tool calls of a reply"] += any("tool_calls" in reply for reply in kept)
        use.cut["thoughts of a reply"] += any(REASONING in reply for reply in kept)
        yield Example(context, kept, group=group or _opening(context))


def _opening(context: Sequence[Message]) -> str:
    """Return the first user message; a system message is not used, as many rows share it."""
    return str(next(message["content"] for message in context if message["role"] == "user"))


@register_reader("hh")
def hh(rows: Iterable[Row], use: Use) -> Iterator[Example]:
    """Make examples of Anthropic's dialogues, one chosen and one rejected.

    They have the `\\n\\nHuman:`/`\\n\\nAssistant:` form, equally many turns, and differ in the
    last.
    """
    for row in rows:
        talks = [_turns(str(row[key])) for key in ("chosen", "rejected")]
        if not all(talk and talk[-1]["role"] == "assistant" for talk in talks) or len(
            talks[0]
        ) != len(talks[1]):
            use.skip("dialogues of different length, or without a reply")
        else:
            yield from _compared(talks[0][:-1], [talk[-1] for talk in talks], use)


def _turns(text: str) -> list[Message]:
    """Split a dialogue into messages; consecutive turns of one speaker are joined."""
    joined: list[Message] = []
    for message in dialogue.messages(text):
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**joined[-1], "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append(dict(message))
    return joined


class ScoreOptions(TypedDict, total=False):
    """Options for converting scored answers to a ranking."""

    max_answers: int  # maximum number of answers; default 5
    references: bool  # false: remove references such as `[1]` from the answers
    least_gap: float  # minimum difference to the next better answer; others are left out
    lang: str


@register_reader("scored")
def scored(
    rows: Iterable[Row],
    use: Use,
    *,
    prompt: str,
    answers: Sequence[Sequence[str]],
    group: str | None = None,
    **options: Unpack[ScoreOptions],
) -> Iterator[Example]:
    """Make examples of scored answers, best first.

    `answers` lists [column of an answer, columns of its scores, ...]; the scores are added. All
    rows with the same question, or the same value of the column `group`, make one example.
    """
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for index, row in enumerate(rows):
        random = use.random(index)
        question = fill(prompt, row, random)
        said = {}
        for answer, *scores in answers:
            text = fill(answer, row, random)
            text = text if options.get("references", True) else REFERENCE.sub("", text)
            said[text] = sum(number(pick(score, row, random), score) for score in scores)
        if "" in said or len(said) < len(answers):
            use.skip("answers that are empty or alike")
            continue
        key = fill(group, row, random) if group else question
        found.setdefault(key, (question, {}))[1].update(said)
    for key, (question, replies) in found.items():
        best: list[str] = []
        for text in sorted(replies, key=lambda text: -replies[text]):
            if not best or replies[best[-1]] - replies[text] >= options.get("least_gap", 0.0):
                best.append(text)
        made = [
            assistant(text, lang=options.get("lang"))
            for text in best[: options.get("max_answers", 5)]
        ]
        yield from _compared([user(question, lang=options.get("lang"))], made, use, key)


@register_reader("comparisons")
def comparisons(
    rows: Iterable[Row],
    use: Use,
    *,
    grouped: bool = True,
    max_answers: int = 5,
    least_confidence: float | None = None,
) -> Iterator[Example]:
    """Make examples of OpenAI's comparisons of two summaries.

    `grouped`: one example per post, with its summaries ordered by their number of wins. Otherwise
    one pair per row.
    """
    wins: dict[str, Counter[str]] = {}
    for index, row in enumerate(rows):
        info = row["info"]
        confidence = (row.get("extra") or {}).get("confidence")
        if (
            least_confidence is not None
            and confidence is not None
            and confidence < least_confidence
        ):
            use.skip("less confidence than asked for")
            continue
        post = info.get("article") or info.get("post") or ""
        texts = [str(each["text"]).strip() for each in row["summaries"]]
        choice = 0 if row["choice"] == 0 else 1
        if grouped:
            wins.setdefault(post, Counter()).update({texts[choice]: 1, texts[1 - choice]: 0})
        else:
            yield from _summaries(post, [texts[choice], texts[1 - choice]], use, index)
    for index, (post, counts) in enumerate(wins.items()):
        yield from _summaries(
            post, [text for text, _ in counts.most_common(max_answers)], use, index
        )


def _summaries(post: str, texts: Sequence[str], use: Use, index: int) -> Iterator[Example]:
    if post.strip():
        asked = use.random(index).choice(SUMMARIZE).format(post)
    else:
        asked = ""
    yield from _compared([user(asked)], [assistant(text) for text in texts], use, post)


@register_reader("ranked_list")
def ranked_list(
    rows: Iterable[Row],
    use: Use,
    *,
    prompt: str = "prompt",
    answers: str = "answers",
    text: str = "answer",
    rank: str = "rank",
    max_answers: int = 7,
) -> Iterator[Example]:
    """Make examples of lists of answers with ranks; a lower rank is better.

    The prompt is a question, or a dialogue in the `\\n\\nHuman:` form.
    """
    for index, row in enumerate(rows):
        asked = fill(prompt, row, use.random(index))
        turns = _turns(asked) if dialogue.HUMAN in asked else [user(asked)]
        asked_last = max(
            (number for number, turn in enumerate(turns, 1) if turn["role"] != "assistant"),
            default=0,
        )
        use.cut["replies in the prompt after the last question"] += asked_last < len(turns)
        turns = turns[:asked_last]
        entries = sorted(
            checked(row[answers], answers), key=lambda entry: number(entry[rank], rank)
        )
        yield from _compared(
            turns, [assistant(str(entry[text])) for entry in entries[:max_answers]], use
        )


@register_reader("endings")
def endings(
    rows: Iterable[Row],
    use: Use,
    *,
    text: str = "ctx",
    endings: str = "endings",
    label: str = "label",
) -> Iterator[Example]:
    """Make examples of HellaSwag: a beginning with its right ending and a random wrong one.

    The texts are plain, without a dialogue.
    """
    for index, row in enumerate(rows):
        choices = list(checked(row[endings], endings))
        right = row[label]
        if right in ("", None):
            use.skip("no right ending is known")
            continue
        best = choices.pop(int(right))
        wrong = use.random(index).choice(choices)
        yield Example(
            text=str(row[text]), replies=[assistant(best), assistant(wrong)], group=str(row[text])
        )


@register_reader("augmented")
def augmented(rows: Iterable[Row], use: Use) -> Iterator[Example]:
    """Make examples of Open-Assistant's ranked replies with bad ones made by a model.

    In training, a random one of the bad replies is ranked last. Rows are
    `{prefixes, responses, augmented, split}`; `split` is "train" for training rows.
    """
    for index, row in enumerate(rows):
        if _for_training(row) != use.training:
            continue
        replies = list(checked(row["responses"], "responses"))
        bad = checked(row.get("augmented") or [], "augmented")
        if bad and use.training:
            replies.append(use.random(index).choice(bad))
        yield from _compared(
            alternating(list(row["prefixes"])), [assistant(reply) for reply in replies], use
        )


def _for_training(row: Mapping[str, Any]) -> bool:
    return row.get("split", "train") == "train"
