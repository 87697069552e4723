"""Readers of multi-turn conversations, in the formats of public datasets.

Among them are Open-Assistant's exports: threads, ranked replies or prompts of message trees.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from weft.data import message_trees
from weft.data.messages import normalize_messages
from weft.data.named.example import (
    Example,
    ReaderContext,
    fill_template,
    make_alternating_messages,
    make_example,
    pick_value,
)
from weft.data.rows import MESSAGE_KEYS, BadRow, Row, require_key
from weft.errors import ConfigError
from weft.registry import register_reader

MAX_CHARS = 32 * 1024
REFERENCE = re.compile(r"\[\s?\d+\s?\]")
CONTINUE_TEXTS = ("...", "Please continue", "Go on")  # replacements of an empty turn of the user


@register_reader("messages")
def messages(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    column: str | None = None,
    lang: str | None = None,
    filter_words: bool = False,
) -> Iterator[Example]:
    """Read conversations given as lists of messages, up to the assistant's last turn.

    The messages have the keys `role`/`content` or `from`/`value`. They are in `column` or, by
    default, in the first column that has a usual name, such as `messages`. If `lang` is given, it
    is recorded as the language of all messages. With `filter_words`, rows that contain unwanted
    phrases are left out.
    """
    for index, row in enumerate(rows):
        turns = normalize_messages(
            pick_value(
                column or require_key(row, MESSAGE_KEYS, "chat"), row, use.make_random(index)
            )
        )
        last = max(
            (number for number, turn in enumerate(turns, 1) if turn["role"] == "assistant"),
            default=0,
        )
        if last < 2:
            use.skip("no turn of the assistant")
        elif not filter_words or use.accept_texts(*(turn["content"] for turn in turns[:last])):
            use.note_columns(row, "system", "tools")
            use.cut["turns after the last reply"] += last < len(turns)
            turns = turns[:last]
            yield make_example([{**turn, **({"lang": lang} if lang else {})} for turn in turns])


@register_reader("sharegpt")
def sharegpt(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    column: str = "conversations",
    max_chars: int = MAX_CHARS,
    lang: str | None = None,
) -> Iterator[Example]:
    """Read conversations given as `from`/`value` turns that were copied from web pages.

    Backslash escapes and references such as `[1]` are removed, consecutive turns of one speaker are
    joined, and turns are truncated to `max_chars` characters. A conversation is left out if the bot
    speaks first, if the user speaks last, or if a bot turn is empty. If `lang` is given, it is
    recorded as the language of all messages.
    """
    for index, row in enumerate(rows):
        turns = _join_turns(_read_turns(row[column], use.make_random(index)))
        if turns is None or not turns or turns[0][0] != "human":
            use.skip("begun by the bot, or with an empty turn of the bot")
        elif len(turns) % 2:
            use.skip("no reply to the last turn")
        else:
            use.note_columns(row, "system", "tools")
            yield make_example(
                make_alternating_messages(
                    use.truncate_turns([text for _, text in turns], max_chars), lang=lang
                )
            )


def _read_turns(turns: Sequence[Row], random: Random) -> Iterator[tuple[str, str] | None]:
    """Yield (speaker, text) for each turn. If a turn of the bot is empty, yield None and stop.

    The text of an empty user turn is one of `CONTINUE_TEXTS`, drawn at random.
    """
    for turn in turns:
        speaker = turn["from"]
        text = turn["value"]
        if not text and speaker == "gpt":
            yield None
            return
        text = REFERENCE.sub(
            "", (text or random.choice(CONTINUE_TEXTS)).replace(r"\_", "_").replace(r"\*", "*")
        )
        yield speaker, text.strip()


def _join_turns(turns: Iterable[tuple[str, str] | None]) -> list[tuple[str, str]] | None:
    """Join consecutive turns of one speaker with newlines.

    Each turn is (speaker, text). Returns None if one of the turns is None.
    """
    joined_turns: list[tuple[str, str]] = []
    for turn in turns:
        if turn is None:
            return None
        if joined_turns and joined_turns[-1][0] == turn[0]:
            joined_turns[-1] = turn[0], f"{joined_turns[-1][1]}\n{turn[1]}"
        else:
            joined_turns.append(turn)
    return joined_turns


@register_reader("gpt4all")
def gpt4all(rows: Iterable[Row], use: ReaderContext) -> Iterator[Example]:
    """Read rows `{prompt, response}` and `{conversation: [{User, Bot}]}`.

    Each entry of a conversation has only one of the keys `User` and `Bot`.
    """
    for row in rows:
        if row.get("conversation") is None:
            turns = [("User", str(row["prompt"])), ("Bot", str(row["response"]))]
        else:
            if any(line.get("User") and line.get("Bot") for line in row["conversation"]):
                raise BadRow(
                    "'conversation' has an entry of both User and Bot; each is of one of them"
                )
            utterances = []
            for line in row["conversation"]:
                for speaker in ("User", "Bot"):
                    if line.get(speaker):
                        utterances.append((speaker, line[speaker].strip()))
            turns = _join_turns(utterances) or []
        if len(turns) < 2 or turns[0][0] != "User":
            use.skip("begun by the bot, or no reply")
        elif use.accept_texts(*(text for _, text in turns)):
            use.cut["turns after the last reply"] += len(turns) % 2
            yield make_example(
                make_alternating_messages([text for _, text in turns][: len(turns) // 2 * 2])
            )


@register_reader("soda")
def soda(
    rows: Iterable[Row], use: ReaderContext, *, input_max_length: int = MAX_CHARS
) -> Iterator[Example]:
    """Read dialogues of two people. The second speaker becomes the assistant.

    The narrative of the row is put before the first turn. Turns are truncated to `input_max_length`
    characters.
    """
    for row in rows:
        speakers = list(row["speakers"])
        lines = list(row["dialogue"])
        are_alternating = len(set(speakers)) == 2 and all(
            speaker == speakers[i % 2] for i, speaker in enumerate(speakers)
        )
        if not are_alternating or not lines or len(lines) % 2:
            use.skip("not two speakers in turn")
            continue
        lines[0] = f"{row['narrative']} You are {speakers[1]}. {lines[0]}"
        yield make_example(make_alternating_messages(use.truncate_turns(lines, input_max_length)))


@register_reader("marked")
def marked(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    column: str = "text",
    user: str = "User:",
    bot: str = "Assistant:",
    min_length: int | None = None,
    max_count: int | None = None,
    lang: str | None = None,
) -> Iterator[Example]:
    """Read dialogues given as one text, in which `user` or `bot` marks the beginning of each turn.

    With `min_length`, dialogues are shuffled and joined until they have that many characters. With
    `max_count`, at most that many dialogues are drawn at random. If `lang` is given, it is recorded
    as the language of all messages.
    """
    marks = re.compile(rf"\s*({re.escape(user)}|{re.escape(bot)})\s*")
    dialogues = []
    for row in rows:
        pieces = marks.split(str(row[column] or ""))
        turns = (
            _join_turns(zip(pieces[1::2], (piece.strip() for piece in pieces[2::2]), strict=True))
            or []
        )
        if (
            len(turns) < 2
            or turns[0][0] != user
            or len(turns) % 2
            or not all(text for _, text in turns)
        ):
            use.skip("turns that do not alternate, or an empty one")
        else:
            dialogues.append([text for _, text in turns])
    if min_length is not None or max_count is not None:
        use.make_random("order").shuffle(dialogues)
    yield from (
        make_example(make_alternating_messages(turns, lang=lang))
        for turns in _merge_dialogues(dialogues, min_length)[:max_count]
    )


def _merge_dialogues(dialogues: list[list[str]], min_length: int | None) -> list[list[str]]:
    """Join consecutive dialogues until each has at least `min_length` characters.

    The last one can be shorter. Returns the dialogues unchanged if `min_length` is None.
    """
    if min_length is None:
        return dialogues
    merged: list[list[str]] = []
    for turns in dialogues:
        if merged and sum(map(len, merged[-1])) < min_length:
            merged[-1] += turns
        else:
            merged.append(list(turns))
    return merged


@register_reader("rounds")
def rounds(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    column: str,
    human: str,
    answer: str,
    system: str | None = None,
    skip_where: dict[str, str] | None = None,
) -> Iterator[Example]:
    """Read conversations given as lists of question-answer pairs in `column`.

    `human` and `answer` are the keys of the question and the answer. `system` is the column with
    the system message. `skip_where` maps columns to texts; a row is left out if one of these
    columns contains the given text.
    """
    for index, row in enumerate(rows):
        if any(text in str(row[name]) for name, text in (skip_where or {}).items()):
            use.skip("other than asked for")
            continue
        turns = []
        for part in row[column] or ():
            for key in (human, answer):
                turns.append(str(part[key]))
        if not turns or not all(turn.strip() for turn in turns):
            use.skip("an empty turn")
            continue
        yield make_example(
            make_alternating_messages(
                turns, fill_template(system, row, use.make_random(index)) if system else None
            )
        )


@register_reader("by_system")
def by_system(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    system: str = "instruction",
    prompt: str = "input",
    answer: str = "output",
    num_samples: int | None = None,
    max_char_len: int = 8000,
    seed: int = 42,
) -> Iterator[Example]:
    """Join rows with the same system message into conversations of about `max_char_len` characters.

    Each row is a question with its answer. `num_samples` is the number of rows to draw at random;
    None uses all.
    """
    chosen = list(rows)
    Random(seed).shuffle(chosen)
    unfinished: dict[str, list[str]] = {}  # turns by system message
    for row in chosen[:num_samples]:
        turns = [str(row[prompt] or ""), str(row[answer] or "")]
        if not all(turn.strip() for turn in turns):
            use.skip("an empty question or answer")
            continue
        head = str(row[system] or "")
        conversation = unfinished.setdefault(head, [])
        conversation += turns
        if len(head) + sum(map(len, conversation)) >= max_char_len:
            yield make_example(make_alternating_messages(conversation, head))
            del unfinished[head]
    for head, conversation in unfinished.items():
        yield make_example(make_alternating_messages(conversation, head))


def check_list(value: Any, column: str) -> Sequence[Any]:
    """Return `value` if it is a list; otherwise raise `BadRow` with the name of the column."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRow(f"{column!r} must be a list")
    return value


# States of trees whose first message is an accepted prompt. Trees in the first state also have
# released replies.
PROMPT_TREE_STATES = ("ready_for_export", "prompt_lottery_waiting")


@register_reader("trees")
def trees(
    rows: Iterable[Row],
    use: ReaderContext,
    *,
    lang: str | list[str] = "",
    top_k: int | None = None,
    least: Mapping[str, float] | None = None,
    most: Mapping[str, float] | None = None,
) -> Iterator[Example]:
    """Read message trees as threads (mode sft), ranked replies (rm) or prompts (rl).

    All examples of a tree are used either for training or for validation.

    `lang` lists the allowed languages of the first message, such as "en,de". `top_k` keeps only
    replies with the k best ranks; it is ignored in mode rl. `least` and `most` map labels to their
    minimum and maximum values, such as `{quality: 0.5}`. Deleted and synthetic messages are left
    out, and so are trees that did not pass their review or were not released. Mode rl also accepts
    trees in the state `prompt_lottery_waiting`.
    """
    if top_k is not None and top_k < 1:
        raise ConfigError(f"{use.name}: top_k={top_k}: must be at least 1")
    langs = lang.split(",") if isinstance(lang, str) else lang
    tree_filter = message_trees.TreeFilter(
        langs=tuple(language.strip() for language in langs if language.strip()),
        states=PROMPT_TREE_STATES if use.mode == "rl" else PROMPT_TREE_STATES[:1],
        top_k=None if use.mode == "rl" else top_k,
        least=least or {},
        most=most or {},
    )
    for tree in message_trees.read_trees(rows):
        if not tree_filter.accepts_tree(tree):
            use.skip("other languages, or not released and reviewed")
        else:
            yield from _build_examples(tree, tree_filter, use.mode)


def _build_examples(
    tree: Row, tree_filter: message_trees.TreeFilter, mode: str
) -> Iterator[Example]:
    group = str(tree["message_tree_id"])
    if mode == "sft":
        for path in message_trees.iterate_threads(tree, tree_filter):
            yield make_example(
                message_trees.to_messages(path), id=path[-1]["message_id"], group=group
            )
    elif mode == "rm":
        for path, replies in message_trees.iterate_rankings(tree, tree_filter):
            context = message_trees.to_messages(path)
            reply_messages = message_trees.to_messages(replies)
            yield Example(context, reply_messages, id=path[-1]["message_id"], group=group)
    else:
        for path in message_trees.iterate_prompts(tree, tree_filter):
            yield Example(message_trees.to_messages(path), id=path[-1]["message_id"], group=group)
