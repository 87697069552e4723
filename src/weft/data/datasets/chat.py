"""Dataset type `chat`: conversations, trained on the assistant's turns.

It also reads Open-Assistant trees and trains on all of their threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.data import trees
from weft.data.columns import prepend_system, read_message_list, read_messages
from weft.data.datasets.base import TableDataset, build_group, check_replies
from weft.data.lengths import EncodedSample
from weft.data.messages import Message, normalize_messages
from weft.data.rows import (
    MESSAGE_KEYS,
    PROMPT_KEYS,
    Row,
    find_answer_messages,
    find_first_key,
    is_tree,
    require_key,
)
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.registry import register_dataset


@dataclass(frozen=True)
class ChatEncoder:
    """Row encoder for conversations.

    If `train_on` is "last", the model is trained only on the assistant's last turn; if it is "all",
    on every assistant turn. The text in a `system` column is prepended to conversations without a
    system message.

    A row can also have the form `{prompt, completion}`, where `completion` is a list of messages,
    and `prompt` is a text or a list of messages. The model is not trained on the prompt.
    """

    messages_key: str | None = None
    id_key: str = "id"
    train_on: str = "all"

    def __post_init__(self) -> None:
        if self.train_on not in ("all", "last"):
            raise ConfigError(f"dataset.args.train_on={self.train_on!r}: must be all or last")

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.check_template()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        if is_tree(row):
            return [self._encode_thread(path, tokenizer) for path in trees.iterate_threads(row)]
        return [
            self._encode_conversation(
                prepend_system(row, self._read_messages(row)), row.get("tools"), tokenizer, ""
            )
        ]

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        return tokenizer.render_with_additions(
            prepend_system(row, self._read_messages(row)), row.get("tools")
        )

    def encode_part(self, row: Row, tokenizer: Tokenizer, id: str) -> EncodedSample:
        """Encode only the sample `id` of a row that may have several samples."""
        if not is_tree(row):
            return self.encode(row, tokenizer)[0]
        path = next(
            path for path in trees.iterate_threads(row) if id.endswith(f"/{path[-1]['message_id']}")
        )
        return self._encode_thread(path, tokenizer)

    def _encode_thread(self, path: Sequence[trees.Node], tokenizer: Tokenizer) -> EncodedSample:
        return self._encode_conversation(
            normalize_messages(trees.to_messages(path)), None, tokenizer, path[-1]["message_id"]
        )

    def _read_messages(self, row: Row) -> list[Message]:
        keys = (self.messages_key,) if self.messages_key else MESSAGE_KEYS
        prompt = find_first_key(row, PROMPT_KEYS)
        completion = find_answer_messages(row)
        if find_first_key(row, keys) is not None or prompt is None or completion is None:
            return read_message_list(row, require_key(row, keys, "chat"))
        context = [{**message, "train": False} for message in read_messages(row, prompt, "user")]
        return [*context, *read_messages(row, completion, "assistant")]

    def _encode_conversation(
        self, messages: Sequence[Message], tools: Any, tokenizer: Tokenizer, part: str
    ) -> EncodedSample:
        check_replies(messages)
        if self.train_on == "last":
            last = max(
                index for index, message in enumerate(messages) if message["role"] == "assistant"
            )
            messages = [
                m if index == last else {**m, "train": False} for index, m in enumerate(messages)
            ]
        conversation = tokenizer.mask_chat(messages, tools)
        return build_group(
            [conversation.ids],
            [conversation.mask],
            part=part,
            unused=conversation.unused,
            cut=conversation.cut,
        )


@register_dataset("chat")
class ChatDataset(TableDataset):
    """Dataset of conversations: rows `{messages[{role, content}]}` or `{prompt, completion}`.

    The column `completion` contains a list of messages. A sample has the keys `prompt`,
    `completion` and `loss_mask`. The completion begins with the first trained token and ends with
    the last one. The loss mask is 1 on trained tokens and 0 on the other tokens of the completion.

    The options are messages_key, id_key, train_on, max_seqlen, max_prompt_len, overlong and
    truncate_side.
    """

    form = ChatEncoder
