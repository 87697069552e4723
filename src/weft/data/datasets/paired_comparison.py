"""Dataset type `paired_comparison`: a prompt with pairs of a better and a worse answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.columns import require_prompt_key
from weft.data.datasets.base import TableDataset, check_form, encode_replies
from weft.data.lengths import EncodedSample
from weft.data.rows import BadRow, Row, read_number, read_texts, require_key
from weft.data.tokenizer import Tokenizer
from weft.registry import register_dataset


@dataclass(frozen=True)
class PairedComparisonEncoder:
    """Row encoder for prompts with pairs of answers.

    Answer j of the column `pos_answers` is better than answer j of `neg_answers`. The column
    `margin` has one number, or one number per pair.

    If a row has more than `max_pairs_per_prompt` pairs, only the first ones are kept. With
    `as_chat`, the prompt is rendered as the user's message and each answer as the assistant's.
    """

    prompt_key: str | None = None
    id_key: str = "id"
    max_pairs_per_prompt: int | None = None
    as_chat: bool = False

    def check(self, tokenizer: Tokenizer) -> None:
        check_form(tokenizer, as_chat=self.as_chat)

    def encode(self, row: Row, tokenizer: Tokenizer) -> list[EncodedSample]:
        prompt_key = require_prompt_key(row, self.prompt_key, "paired_comparison")
        better = read_texts(row, require_key(row, ("pos_answers",), "paired_comparison"))
        worse = read_texts(row, require_key(row, ("neg_answers",), "paired_comparison"))
        if len(better) != len(worse):
            raise BadRow(
                f"'pos_answers' has {len(better)} entries and 'neg_answers' {len(worse)}; they "
                f"come in pairs"
            )
        margins = _read_margins(row.get("margin"), len(better))
        pairs = list(zip(better, worse, margins, strict=True))[: self.max_pairs_per_prompt]
        answers = []
        for pair in pairs:
            for answer in pair[:2]:
                answers.append(answer)
        values = {
            "rank": [0.0, 1.0] * len(pairs),
            "comparison": [float(j) for j in range(len(pairs)) for _ in range(2)],
            "margin": [pair[2] for pair in pairs for _ in range(2)],
            "label": [1.0, 0.0] * len(pairs),
        }
        return [
            encode_replies(tokenizer, row, prompt_key, answers, as_chat=self.as_chat, values=values)
        ]


def _read_margins(value: Any, pairs: int) -> list[float]:
    if value is None:
        return [0.0] * pairs
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [read_number(value, "margin")] * pairs
    if len(value) != pairs:
        raise BadRow(f"'margin' has {len(value)} entries for {pairs} pairs")
    return [read_number(entry, "margin") for entry in value]


@register_dataset("paired_comparison")
class PairedComparisonDataset(TableDataset):
    """Dataset of rows `{prompt, pos_answers[], neg_answers[]}` with n pairs of answers.

    Each row becomes a sample with 2n completions: better, worse, better, worse, and so on.

    A sample has the keys `prompt`, `completion`, `loss_mask`, `rank` (0 better, 1 worse),
    `comparison` (index of the pair), `margin` (of the pair, 0 by default) and `label` (1 better, 0
    worse). The options are prompt_key, id_key, max_pairs_per_prompt, as_chat, max_seqlen,
    max_prompt_len, overlong and truncate_side.
    """

    form = PairedComparisonEncoder
