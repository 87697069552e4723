"""Dataset type `text`: plain texts, trained on every token.

When mixed with conversations, such texts keep a model from forgetting general language.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.data.datasets.base import TableDataset, encode_with_eos
from weft.data.lengths import EncodedSample
from weft.data.rows import BadRow, Row, read_text, require_key
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset


@dataclass(frozen=True)
class TextEncoder:
    """Row encoder for plain text in one column, followed by EOS.

    The first token is the prompt, since there is no earlier token to predict it from.
    """

    text_key: str = "text"
    id_key: str = "id"

    def check(self, tokenizer: Tokenizer) -> None:
        tokenizer.require_eos()

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        return read_text(row, require_key(row, (self.text_key,), "text"))

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        ids = encode_with_eos(tokenizer, self.render_text(row, tokenizer))
        if len(ids) < 2:
            raise BadRow(f"{self.text_key!r} has no token to learn")
        return [EncodedSample(ids[:1], [ids[1:]], [[True] * (len(ids) - 1)])]


@register_dataset("text")
class TextDataset(TableDataset):
    """Dataset of rows `{text}`, trained on every token except the first.

    A sample has the keys `prompt` (the first token), `completion` and `loss_mask`. The options are
    text_key, id_key, max_seqlen, overlong and truncate_side.
    """

    form = TextEncoder
