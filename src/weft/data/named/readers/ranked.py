"""Readers of compared replies: pairs, answers with scores, pairwise choices and ranked lists."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TypedDict, Unpack

from weft.data import columns
from weft.data.messages import REASONING, Message, normalize_messages
from weft.data.named.example import (
    Example,
    ReaderContext,
    fill_template,
    make_alternating_messages,
    make_assistant_message,
    make_user_message,
    pick_value,
)
from weft.data.named.readers.dialogues import check_list
from weft.data.rows import Row, read_number
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
    use: ReaderContext,
    *,
    prompt: str | None = None,
    chosen: str = "chosen",
    rejected: str = "rejected",
    system: str | None = None,
) -> Iterator[Example]:
    """Read rows that each have a chosen and a rejected reply.

    `prompt` and `system` are the columns of the prompt and the system message. The replies are
    texts or lists of messages. A list contains only the reply, or a whole conversation. The two
    conversations of a row must differ only in their last turn.
    """
    for index, row in enumerate(rows):
        random = use.make_random(index)
        better = pick_value(chosen, row, random)
        worse = pick_value(rejected, row, random)
        if isinstance(better, str):
            context = make_alternating_messages(
                [fill_template(prompt or "prompt", row, random)],
                fill_template(system, row, random) if system else None,
            )
            replies = [
                make_assistant_message(better),
                make_assistant_message(fill_template(rejected, row, random)),
            ]
        else:
            conversations = [normalize_messages(better), normalize_messages(worse)]
            context = conversations[0][:-1]
            replies = [conversation[-1] for conversation in conversations]
            if not context and prompt:
                context = [make_user_message(fill_template(prompt, row, random))]
            if conversations[1][:-1] not in ([], conversations[0][:-1]):
                use.skip("conversations that differ before the last turn")
                continue
        yield from _build_comparison(context, replies, use)


def _build_comparison(
    context: Sequence[Message],
    replies: Sequence[Message],
    use: ReaderContext,
    group: str | None = None,
) -> Iterator[Example]:
    """Yield one example with the non-empty replies. `replies` are sorted best first.

    Yields nothing and counts the row as left out if `context` does not end with a non-empty user
    message, or if fewer than two different replies remain.
    """
    nonempty_replies = [reply for reply in replies if reply["content"].strip()]
    if not context or context[-1]["role"] != "user" or not context[-1]["content"].strip():
        use.skip("an empty question")
    elif len({reply["content"] for reply in nonempty_replies}) < 2:
        use.skip("replies that are empty or alike")
    else:
        use.cut["tool calls of a reply"] += any("tool_calls" in reply for reply in nonempty_replies)
        use.cut["thoughts of a reply"] += any(REASONING in reply for reply in nonempty_replies)
        if not group:
            # The first user message identifies a conversation; many share a system message.
            prompts = (message["content"] for message in context if message["role"] == "user")
            group = str(next(prompts))
        yield Example(context, nonempty_replies, group=group)


@register_reader("hh")
def hh(rows: Iterable[Row], use: ReaderContext) -> Iterator[Example]:
    r"""Read Anthropic's pairs of a chosen and a rejected dialogue.

    The dialogues are in the `\n\nHuman:`/`\n\nAssistant:` format, and differ in the last turn.
    Pairs of dialogues with different numbers of turns are left out.
    """
    for row in rows:
        conversations = [_split_turns(str(row[key])) for key in ("chosen", "rejected")]
        if not all(
            conversation and conversation[-1]["role"] == "assistant"
            for conversation in conversations
        ) or len(conversations[0]) != len(conversations[1]):
            use.skip("dialogues of different length, or without a reply")
        else:
            yield from _build_comparison(
                conversations[0][:-1], [conversation[-1] for conversation in conversations], use
            )


def _split_turns(text: str) -> list[Message]:
    """Split a dialogue into messages, and join consecutive turns of one speaker."""
    joined: list[Message] = []
    for message in columns.split_messages(text):
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
    use: ReaderContext,
    *,
    prompt: str,
    answers: Sequence[Sequence[str]],
    group: str | None = None,
    **options: Unpack[ScoreOptions],
) -> Iterator[Example]:
    """Read answers with scores, and rank the answers to each question by score.

    Each item of `answers` is a list: the column of an answer, followed by the columns of its
    scores. If an answer has several scores, they are added up. All rows with the same question, or
    with the same value in the column `group`, make one example.
    """
    groups: dict[str, tuple[str, dict[str, float]]] = {}
    for index, row in enumerate(rows):
        random = use.make_random(index)
        question = fill_template(prompt, row, random)
        answer_scores = {}
        for answer, *scores in answers:
            text = fill_template(answer, row, random)
            text = text if options.get("references", True) else REFERENCE.sub("", text)
            answer_scores[text] = sum(
                read_number(pick_value(score, row, random), score) for score in scores
            )
        if "" in answer_scores or len(answer_scores) < len(answers):
            use.skip("answers that are empty or alike")
            continue
        key = fill_template(group, row, random) if group else question
        groups.setdefault(key, (question, {}))[1].update(answer_scores)
    for key, (question, replies) in groups.items():
        best: list[str] = []
        for text in sorted(replies, key=lambda text: -replies[text]):
            if not best or replies[best[-1]] - replies[text] >= options.get("least_gap", 0.0):
                best.append(text)
        reply_messages = [
            make_assistant_message(text, lang=options.get("lang"))
            for text in best[: options.get("max_answers", 5)]
        ]
        yield from _build_comparison(
            [make_user_message(question, lang=options.get("lang"))], reply_messages, use, key
        )


@register_reader("comparisons")
def comparisons(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    grouped: bool = True,
    max_answers: int = 5,
    least_confidence: float | None = None,
) -> Iterator[Example]:
    """Read OpenAI's comparisons of two summaries of a post.

    With `grouped`, there is one example per post, with the `max_answers` summaries that won the
    most comparisons, best first. Without `grouped`, each row makes one pair. Rows whose confidence
    is below `least_confidence` are left out.
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
        texts = [str(summary["text"]).strip() for summary in row["summaries"]]
        choice = 0 if row["choice"] == 0 else 1
        if grouped:
            wins.setdefault(post, Counter()).update({texts[choice]: 1, texts[1 - choice]: 0})
        else:
            yield from _build_summaries(post, [texts[choice], texts[1 - choice]], use, index)
    for index, (post, counts) in enumerate(wins.items()):
        yield from _build_summaries(
            post, [text for text, _ in counts.most_common(max_answers)], use, index
        )


def _build_summaries(
    post: str, texts: Sequence[str], use: ReaderContext, index: int
) -> Iterator[Example]:
    if post.strip():
        prompt = use.make_random(index).choice(SUMMARIZE).format(post)
    else:
        prompt = ""
    yield from _build_comparison(
        [make_user_message(prompt)], [make_assistant_message(text) for text in texts], use, post
    )


@register_reader("ranked_list")
def ranked_list(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    prompt: str = "prompt",
    answers: str = "answers",
    text: str = "answer",
    rank: str = "rank",
    max_answers: int = 7,
) -> Iterator[Example]:
    r"""Read lists of answers with ranks, and keep the best `max_answers`. A lower rank is better.

    The prompt is a question, or a dialogue in the `\n\nHuman:` format.
    """
    for index, row in enumerate(rows):
        prompt_text = fill_template(prompt, row, use.make_random(index))
        turns = (
            _split_turns(prompt_text)
            if columns.HUMAN in prompt_text
            else [make_user_message(prompt_text)]
        )
        asked_last = max(
            (number for number, turn in enumerate(turns, 1) if turn["role"] != "assistant"),
            default=0,
        )
        use.cut["replies in the prompt after the last question"] += asked_last < len(turns)
        turns = turns[:asked_last]
        entries = sorted(
            check_list(row[answers], answers), key=lambda entry: read_number(entry[rank], rank)
        )
        yield from _build_comparison(
            turns,
            [make_assistant_message(str(entry[text])) for entry in entries[:max_answers]],
            use,
        )


@register_reader("endings")
def endings(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    text: str = "ctx",
    endings: str = "endings",
    label: str = "label",
) -> Iterator[Example]:
    """Read HellaSwag rows: a beginning with its correct ending and a random wrong one.

    The beginning and the endings are plain texts, not conversations.
    """
    for index, row in enumerate(rows):
        choices = list(check_list(row[endings], endings))
        correct_index = row[label]
        if correct_index in ("", None):
            use.skip("no right ending is known")
            continue
        correct_ending = choices.pop(int(correct_index))
        wrong_ending = use.make_random(index).choice(choices)
        yield Example(
            text=str(row[text]),
            replies=[make_assistant_message(correct_ending), make_assistant_message(wrong_ending)],
            group=str(row[text]),
        )


@register_reader("augmented")
def augmented(rows: Iterable[Row], use: ReaderContext) -> Iterator[Example]:
    """Read Open-Assistant's ranked replies with additional bad replies made by a model.

    In training, one of the bad replies is drawn at random and ranked last. Rows have the form
    `{prefixes, responses, augmented, split}`, where `split` is "train" for training rows and
    `augmented` lists the bad replies.
    """
    for index, row in enumerate(rows):
        if (row.get("split", "train") == "train") != use.training:
            continue
        replies = list(check_list(row["responses"], "responses"))
        bad_replies = check_list(row.get("augmented") or [], "augmented")
        if bad_replies and use.training:
            replies.append(use.make_random(index).choice(bad_replies))
        yield from _build_comparison(
            make_alternating_messages(list(row["prefixes"])),
            [make_assistant_message(reply) for reply in replies],
            use,
        )
