"""Dataset type `ranking`: several replies to one prompt, the best one first.

It also reads Open-Assistant trees and uses their messages with ranked replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.data import trees
from weft.data.columns import list_prompt_keys, require_prompt_key
from weft.data.datasets.base import (
    BAD_REPLIES_COLUMN,
    TableDataset,
    build_answer_group,
    check_form,
    encode_continuations,
    encode_replies,
    encode_with_eos,
)
from weft.data.lengths import EncodedSample
from weft.data.messages import normalize_messages
from weft.data.rows import MESSAGE_KEYS, Row, find_first_key, is_tree, read_texts, require_key
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.registry import register_dataset


@dataclass(frozen=True)
class RankingEncoder:
    """Row encoder for prompts with ranked replies.

    The prompt is text or messages, in the column `prompt`, `messages` or `prefix`. The replies are
    sorted best first, and at most `max_replies` of them are kept. If the prompt is null, each reply
    is encoded without a prompt. The column `augmented` contains deliberately bad replies; one of
    them is drawn at random and ranked last.

    With `as_chat`, a text prompt is rendered as the user's message and each reply as the
    assistant's.
    """

    prompt_key: str | None = None
    replies_key: str = "replies"
    id_key: str = "id"
    max_replies: int | None = None
    as_chat: bool = False

    def __post_init__(self) -> None:
        if self.max_replies is not None and self.max_replies < 2:
            raise ConfigError(
                f"dataset.args.max_replies={self.max_replies}: must be at least 2, or there is "
                f"nothing to rank"
            )

    def check(self, tokenizer: Tokenizer) -> None:
        check_form(tokenizer, as_chat=self.as_chat)

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        if is_tree(row):
            return [
                self._encode_branch(path, replies, tokenizer)
                for path, replies in trees.iterate_rankings(row)
            ]
        replies = self._read_replies(row, tokenizer)
        values = _build_values(len(replies))
        keys = (*list_prompt_keys(self.prompt_key), "prefix")
        key = find_first_key(row, keys)
        # The prompt column is null: the replies are whole texts.
        if (
            key is None
            and find_first_key(row, MESSAGE_KEYS) is None
            and any(name in row for name in keys)
        ):
            return [
                build_answer_group(
                    [], [encode_with_eos(tokenizer, reply) for reply in replies], values=values
                )
            ]
        key = key or require_prompt_key(row, self.prompt_key, "ranking")
        return [encode_replies(tokenizer, row, key, replies, as_chat=self.as_chat, values=values)]

    def _read_replies(self, row: Row, tokenizer: Tokenizer) -> list[str]:
        """Return the replies of a row, best first, followed by one bad reply if the row has any.

        The bad reply is drawn at random. If the tokenizer has no random generator, the longest bad
        reply is chosen.
        """
        bad = read_texts(row, BAD_REPLIES_COLUMN) if row.get(BAD_REPLIES_COLUMN) else []
        replies = read_texts(
            row, require_key(row, (self.replies_key,), "ranking"), at_least=1 if bad else 2
        )
        if not bad:
            return replies[: self.max_replies]
        if tokenizer.draw is not None:
            worst = bad[int(tokenizer.draw.integers(len(bad)))]
        else:
            worst = max(bad, key=lambda reply: len(tokenizer.encode(reply)))
        return [*replies[: None if self.max_replies is None else self.max_replies - 1], worst]

    def _encode_branch(
        self, path: Sequence[trees.Node], replies: Sequence[trees.Node], tokenizer: Tokenizer
    ) -> EncodedSample:
        """Encode the ranked replies to the last message of `path` in a message tree."""
        continuations = []
        for reply in replies[: self.max_replies]:
            continuations.append([{"role": "assistant", "content": reply["text"]}])
        context = normalize_messages(trees.to_messages(path))
        part = path[-1]["message_id"]
        return encode_continuations(
            tokenizer,
            context,
            continuations,
            None,
            values=_build_values(len(continuations)),
            part=part,
        )


def _build_values(count: int) -> dict[str, list[float]]:
    """Return the values of the keys `rank`, `comparison` and `margin` for a list of ranked replies.

    `count` is the number of replies, of which the first is the best. All replies belong to the same
    comparison, and their margins are 0.
    """
    zeros = [0.0] * count
    return {"rank": [float(rank) for rank in range(count)], "comparison": zeros, "margin": zeros}


@register_dataset("ranking")
class RankingDataset(TableDataset):
    """Dataset of rows `{prompt, replies[]}`, with replies sorted best first.

    Each row becomes a sample with one completion per reply. A sample has the keys `prompt`,
    `completion`, `loss_mask`, `rank` (0 is the best), `comparison` (always 0) and `margin` (always
    0). The options are prompt_key, replies_key, id_key, max_replies, as_chat, max_seqlen,
    max_prompt_len, overlong and truncate_side.
    """

    form = RankingEncoder
