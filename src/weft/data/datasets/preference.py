"""Dataset type `preference`: a chosen and a rejected reply, or a single labelled reply.

The replies are texts, message lists or whole conversations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.data import columns
from weft.data.columns import (
    list_prompt_keys,
    prepend_system,
    read_conversation,
    read_message_list,
    read_messages,
    require_prompt_key,
)
from weft.data.datasets.base import (
    TableDataset,
    build_group,
    check_form,
    encode_continuations,
    encode_replies,
)
from weft.data.lengths import EncodedSample
from weft.data.messages import Message, normalize_messages
from weft.data.rows import (
    ANSWER_KEYS,
    LABEL_KEYS,
    MESSAGE_KEYS,
    BadRow,
    Row,
    find_first_key,
    read_number,
    read_text,
    require_key,
)
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset

CHOSEN = ("chosen", "chosen_messages")
REJECTED = ("rejected", "rejected_messages")
REPLY_ROLES = ("assistant", "tool")  # roles that messages of a reply can have
PAIR = {"rank": [0.0, 1.0], "comparison": [0.0, 0.0], "label": [1.0, 0.0]}

Values = Mapping[str, list[float]]


@dataclass(frozen=True)
class PreferenceEncoder:
    r"""Row encoder for a chosen and a rejected reply, or for a single labelled reply.

    The chosen and the rejected reply usually answer the same prompt, in the column `prompt`,
    `instruction`, `question` or `messages`. If the prompt is a conversation that ends with a reply,
    this reply is ignored.

    Alternatively, both columns contain whole conversations: lists that begin with a user or system
    message, or texts in the `\n\nHuman:` format. The prompt is then the common prefix of the two
    conversations. For texts, this prefix ends with `\n\nAssistant:`.

    A row `{prompt, completion, label}` has a single reply, labelled as good (true or 1) or bad
    (false or 0). In a row `{messages, label}`, the reply is the assistant's last turn. `kto_tag` is
    another name for `label`.

    With `as_chat`, prompts and replies that are texts are rendered with the chat template too.
    """

    prompt_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    id_key: str = "id"
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        check_form(tokenizer, as_chat=self.as_chat)

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        if row.get("margin") is None:
            margin = 0.0
        else:
            margin = read_number(row["margin"], "margin")
        chosen_keys = (self.chosen_key,) if self.chosen_key else CHOSEN
        rejected_keys = (self.rejected_key,) if self.rejected_key else REJECTED
        # A single labelled reply. A null label is found too, and reported as invalid.
        tag = find_first_key(row, LABEL_KEYS) or next(
            (key for key in LABEL_KEYS if key in row), None
        )
        if find_first_key(row, (*chosen_keys, *rejected_keys)) is None and tag is not None:
            values = {
                "rank": [0.0],
                "comparison": [0.0],
                "margin": [margin],
                "label": [_read_label(row[tag], tag)],
            }
            return [self._encode_single(row, tokenizer, values)]
        # Two texts.
        keys = (
            require_key(row, chosen_keys, "preference"),
            require_key(row, rejected_keys, "preference"),
        )
        chosen, rejected = (row[key] for key in keys)
        values = {**PAIR, "margin": [margin] * 2}
        if isinstance(chosen, str) and isinstance(rejected, str):
            return [self._encode_texts(row, tokenizer, chosen, rejected, values)]
        # Two message lists: whole conversations, or replies to the row's prompt.
        conversations = [read_messages(row, key, "assistant") for key in keys]
        are_whole = [conversation[0]["role"] not in REPLY_ROLES for conversation in conversations]
        if all(are_whole):
            shared = _count_shared(conversations)
            context = prepend_system(row, conversations[0][:shared])
            conversations = [conversation[shared:] for conversation in conversations]
        elif any(are_whole):
            raise BadRow(
                "one of the two answers is a whole conversation and the other a reply alone; give "
                "both in the same form"
            )
        else:
            key = find_first_key(row, (*list_prompt_keys(self.prompt_key), *MESSAGE_KEYS))
            context = [] if key is None else read_conversation(row, key)
        return [
            encode_continuations(tokenizer, context, conversations, row.get("tools"), values=values)
        ]

    def _encode_texts(
        self, row: Row, tokenizer: Tokenizer, chosen: str, rejected: str, values: Values
    ) -> EncodedSample:
        """Encode two texts, which are either replies to the row's prompt or whole dialogues."""
        replies = [
            read_text({"chosen": chosen}, "chosen"),
            read_text({"rejected": rejected}, "rejected"),
        ]
        key = find_first_key(row, (*list_prompt_keys(self.prompt_key), *MESSAGE_KEYS))
        prompt = None if key is None else row[key]
        are_dialogues = all(columns.HUMAN in reply for reply in replies)
        if (
            isinstance(prompt, str)
            and are_dialogues
            and all(reply.startswith(prompt) for reply in replies)
        ):
            prompt = None  # the dialogues contain the prompt already
        if key is not None and prompt is not None:
            return encode_replies(tokenizer, row, key, replies, as_chat=self.as_chat, values=values)
        if self.as_chat:
            if are_dialogues:
                conversations = [
                    normalize_messages(columns.split_messages(reply)) for reply in replies
                ]
            else:
                conversations = []
            if not conversations or any(
                conversation[-1]["role"] != "assistant" for conversation in conversations
            ):
                raise BadRow(
                    "as_chat needs a prompt, or dialogues that end with the assistant's turn"
                )
            shared = _count_shared(conversations)
            context = prepend_system(row, conversations[0][:shared])
            continuations = [conversation[shared:] for conversation in conversations]
            return encode_continuations(
                tokenizer, context, continuations, None, may_be_empty=True, values=values
            )
        return _encode_dialogues(tokenizer, replies, values)

    def _encode_single(self, row: Row, tokenizer: Tokenizer, values: Values) -> EncodedSample:
        key = find_first_key(row, MESSAGE_KEYS)
        if key is not None and find_first_key(row, ANSWER_KEYS) is None:
            messages = prepend_system(row, read_message_list(row, key))
            last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=0)
            return encode_continuations(
                tokenizer, messages[:last], [messages[last:]], row.get("tools"), values=values
            )
        key = require_prompt_key(row, self.prompt_key, "preference")
        answer_key = require_key(row, ANSWER_KEYS, "preference")
        if isinstance(row[answer_key], str):
            return encode_replies(
                tokenizer,
                row,
                key,
                [read_text(row, answer_key)],
                as_chat=self.as_chat,
                values=values,
            )
        reply = read_messages(row, answer_key, "assistant")
        return encode_continuations(
            tokenizer, read_conversation(row, key), [reply], row.get("tools"), values=values
        )


def _read_label(value: object, key: str) -> float:
    """Return the label as 1.0 (true or 1) or 0.0 (false or 0). Raises `BadRow` for other values."""
    if isinstance(value, bool) or value in (0, 1):
        return float(value)
    raise BadRow(
        f"{key!r} must be true or false (or 1 or 0), not {'null' if value is None else repr(value)}"
    )


def _count_shared(conversations: Sequence[Sequence[Message]]) -> int:
    """Return the number of leading messages that two conversations have in common.

    The last message of each conversation is never counted, since it is the reply.
    """
    shared = 0
    for first, second in zip(*conversations, strict=False):
        if first != second:
            break
        shared += 1
    return min(shared, *(len(conversation) - 1 for conversation in conversations))


def _encode_dialogues(
    tokenizer: Tokenizer, contents: Sequence[str], values: Values
) -> EncodedSample:
    r"""Encode two whole dialogues, given as texts in the `\n\nHuman:` format.

    The assistant's turns after the common prefix are trained. Texts without turns are trained from
    the first word in which they differ. If the last turn is empty, as in some rows of hh-rlhf, only
    its EOS is trained.
    """
    prompt = columns.find_shared_prompt(*contents)
    sequences = []
    masks = []
    for content in contents:
        spans = columns.find_assistant_spans(content)
        if spans == [(0, len(content))]:
            spans = [(columns.count_shared_characters(*contents), len(content))]
        after = [span for span in spans if span[0] >= len(prompt)]
        if not after or after[-1][1] < len(content):
            raise BadRow("one of the dialogues does not end with the assistant's turn")
        ids, mask = tokenizer.encode_with_spans(content, after)
        sequences.append([*ids, tokenizer.require_eos()])
        masks.append([*mask, True])
    return build_group(sequences, masks, values=values)


@register_dataset("preference")
class PreferenceDataset(TableDataset):
    """Dataset of rows `{chosen, rejected}`, or of rows with a single labelled reply.

    Each row becomes a sample with two completions, the chosen one first, or with the single reply.
    A sample has the keys `prompt`, `completion`, `loss_mask`, `rank` (0 chosen, 1 rejected),
    `comparison` (always 0), `margin` and `label` (1 for a good reply, 0 for a bad one).

    The options are prompt_key, chosen_key, rejected_key, id_key, as_chat, max_seqlen,
    max_prompt_len, overlong and truncate_side.
    """

    form = PreferenceEncoder
