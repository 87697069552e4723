"""Dataset type `ranking`: several replies to one prompt, the best first.

Also Open-Assistant trees, for messages with ranked replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.data import trees
from weft.data.asked import need_prompt, prompt_keys
from weft.data.datasets.base import (
    BAD,
    TableDataset,
    answered,
    check_form,
    continued,
    ended,
    replied,
)
from weft.data.lengths import Encoded
from weft.data.messages import normalise
from weft.data.rows import MESSAGE_KEYS, Row, first_of, is_tree, need, texts
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.registry import register_dataset


@dataclass(frozen=True)
class Ranking:
    """Form of prompts with ranked replies.

    The prompt is text or messages, in the column `prompt`, `messages` or `prefix`; `replies` are
    sorted best first. `max_replies` keeps the best ones. If the prompt is null, replies are whole
    texts. The column `augmented` has deliberately bad replies; every epoch draws one of them and
    ranks it last.

    `as_chat`: a text is rendered as the user's message, and each reply as the assistant's.
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

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        if is_tree(row):
            return [self._branch(path, replies, tokenizer) for path, replies in trees.rankings(row)]
        replies = self._replies(row, tokenizer)
        values = _values(len(replies))
        keys = (*prompt_keys(self.prompt_key), "prefix")
        key = first_of(row, keys)
        # The prompt column is null: the replies are whole texts.
        if (
            key is None
            and first_of(row, MESSAGE_KEYS) is None
            and any(name in row for name in keys)
        ):
            return [answered([], [ended(tokenizer, reply) for reply in replies], values=values)]
        key = key or need_prompt(row, self.prompt_key, "ranking")
        return [replied(tokenizer, row, key, replies, as_chat=self.as_chat, values=values)]

    def _replies(self, row: Row, tokenizer: Tokenizer) -> list[str]:
        """Return the replies, best first, and after them one bad reply if the row has any.

        Without random numbers, the longest bad reply is taken.
        """
        bad = texts(row, BAD) if row.get(BAD) else []
        replies = texts(row, need(row, (self.replies_key,), "ranking"), at_least=1 if bad else 2)
        if not bad:
            return replies[: self.max_replies]
        if tokenizer.draw is not None:
            worst = bad[int(tokenizer.draw.integers(len(bad)))]
        else:
            worst = max(bad, key=lambda reply: len(tokenizer.encode(reply)))
        return [*replies[: None if self.max_replies is None else self.max_replies - 1], worst]

    def _branch(
        self, path: Sequence[trees.Node], replies: Sequence[trees.Node], tokenizer: Tokenizer
    ) -> Encoded:
        """Encode the ranked replies to one message of a tree."""
        kept = [
            [{"role": "assistant", "content": reply["text"]}]
            for reply in replies[: self.max_replies]
        ]
        context = normalise(trees.messages(path))
        part = path[-1]["message_id"]
        return continued(tokenizer, context, kept, None, values=_values(len(kept)), part=part)


def _values(count: int) -> dict[str, list[float]]:
    """Return the values of `count` ranked replies, which belong to one comparison."""
    zeros = [0.0] * count
    return {"rank": [float(rank) for rank in range(count)], "comparison": zeros, "margin": zeros}


@register_dataset("ranking")
class RankingDataset(TableDataset):
    """Rows `{prompt, replies[]}` as groups of K completions, the best first.

    Keys `prompt`, `completion`, `loss_mask`, `rank` (0 the best), `comparison`, `margin`.
    `options`: prompt_key, replies_key, id_key, max_replies, as_chat, max_seqlen, max_prompt_len,
    overlong, truncate_side.
    """

    form = Ranking
