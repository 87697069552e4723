"""Dataset type `prompt_answer`: a prompt and the answer to train on.

It also reads rows in the formats of alpaca, `prompt/completion` and `question/answer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.data.columns import require_prompt_key
from weft.data.datasets.base import TableDataset, check_form, encode_replies, render_reply
from weft.data.lengths import EncodedSample
from weft.data.rows import ANSWER_KEYS, BadRow, Row, find_answer_messages, read_text, require_key
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset


@dataclass(frozen=True)
class PromptAnswerEncoder:
    """Row encoder for a prompt with one answer. The model is trained on the answer and its EOS.

    With `as_chat`, the prompt is rendered as the user's message and the answer as the assistant's.
    """

    prompt_key: str | None = None
    answer_key: str | None = None
    id_key: str = "id"
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        check_form(tokenizer, as_chat=self.as_chat)

    def render_text(self, row: Row, tokenizer: Tokenizer) -> str:
        prompt_key, answer = self._read_parts(row)
        return render_reply(tokenizer, row, prompt_key, answer, as_chat=self.as_chat)

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        prompt_key, answer = self._read_parts(row)
        return [encode_replies(tokenizer, row, prompt_key, [answer], as_chat=self.as_chat)]

    def _read_parts(self, row: Row) -> tuple[str, str]:
        """Return (name of the prompt column, text of the answer)."""
        prompt_key = require_prompt_key(row, self.prompt_key, "prompt_answer")
        answer_key = require_key(
            row, (self.answer_key,) if self.answer_key else ANSWER_KEYS, "prompt_answer"
        )
        if find_answer_messages(row) == answer_key:
            raise BadRow(
                f"{answer_key!r} holds messages, not text; such rows are of dataset.type=chat"
            )
        return prompt_key, read_text(row, answer_key)


@register_dataset("prompt_answer")
class PromptAnswerDataset(TableDataset):
    """Dataset of rows `{prompt, answer}`. Each row becomes a sample with one completion.

    A sample has the keys `prompt`, `completion` and `loss_mask`. The options are prompt_key,
    answer_key, id_key, as_chat, max_seqlen, max_prompt_len, overlong and truncate_side.
    """

    form = PromptAnswerEncoder
