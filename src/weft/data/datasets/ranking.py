"""`ranking`: several replies to one prompt, the best first. Also Open-Assistant trees, wherever replies were ranked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.data import trees
from weft.data.chat import normalise
from weft.data.datasets.base import TableDataset, answered, continued, ended, prompt_keys, prompt_text
from weft.data.lengths import Encoded
from weft.data.rows import MESSAGE_KEYS, Row, first_of, need, texts
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.registry import register_dataset


@dataclass(frozen=True)
class Ranking:
    """`prompt` as text or messages (or `messages`, `prefix`), `replies` best first; `max_replies` keeps the best ones."""

    prompt_key: str | None = None
    replies_key: str = "replies"
    id_key: str = "id"
    max_replies: int | None = None

    def __post_init__(self) -> None:
        if self.max_replies is not None and self.max_replies < 2:
            raise ConfigError(
                f"dataset.args.max_replies={self.max_replies}: must be at least 2, or there is nothing to rank"
            )

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        if trees.is_tree(row):
            return [
                self._chat(
                    trees.messages(path), [reply["text"] for reply in replies], None, tokenizer, path[-1]["message_id"]
                )
                for path, replies in trees.rankings(row)
            ]
        replies = texts(row, need(row, (self.replies_key,), "ranking"), at_least=2)
        key = first_of(row, prompt_keys(self.prompt_key)) or first_of(row, (*MESSAGE_KEYS, "prefix"))
        if key is None:
            key = need(row, prompt_keys(self.prompt_key), "ranking")
        if not isinstance(row[key], str):
            return [self._chat(row[key], replies, row.get("tools"), tokenizer)]
        prompt, replies = prompt_text(row, key), replies[: self.max_replies]
        sequences = [ended(tokenizer, prompt + reply) for reply in replies]
        return [answered(tokenizer.encode(prompt), sequences, values=_values(len(replies)))]

    def _chat(self, context: Any, replies: Sequence[str], tools: Any, tokenizer: Tokenizer, part: str = "") -> Encoded:
        kept = [[{"role": "assistant", "content": reply}] for reply in replies[: self.max_replies]]
        return continued(tokenizer, normalise(context), kept, tools, values=_values(len(kept)), part=part)


def _values(count: int) -> dict[str, list[float]]:
    """All replies belong to one comparison; every pair of them is one to learn from."""
    zeros = [0.0] * count
    return {"rank": [float(rank) for rank in range(count)], "comparison": zeros, "margin": zeros}


@register_dataset("ranking")
class RankingDataset(TableDataset):
    """Rows `{prompt, replies[]}` as groups of K completions, the best first.

    Keys `prompt`, `completion`, `loss_mask`, `rank` (0 the best), `comparison`, `margin`.
    `options`: prompt_key, replies_key, id_key, max_replies, max_seqlen, max_prompt_len, overlong, truncate_side.
    """

    form = Ranking
