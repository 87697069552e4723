"""`text`: plain text, every token of which is learned. It keeps a model from forgetting while it learns from dialogues."""

from __future__ import annotations

from dataclasses import dataclass

from weft.data.datasets.base import TableDataset, ended
from weft.data.lengths import Encoded
from weft.data.rows import Row, need, text
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset


@dataclass(frozen=True)
class Text:
    """The first token stands for itself, as nothing comes before it; all others and EOS are learned."""

    text_key: str = "text"
    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[Encoded]:
        ids = ended(tokenizer, text(row, need(row, (self.text_key,), "text")))
        return [Encoded(ids[:1], [ids[1:]], [[True] * (len(ids) - 1)])]


@register_dataset("text")
class TextDataset(TableDataset):
    """Rows `{text}` as keys `prompt` (the first token), `completion`, `loss_mask`.

    `options`: text_key, id_key, max_seqlen, overlong, truncate_side.
    """

    form = Text
