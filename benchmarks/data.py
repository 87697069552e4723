"""Rows of real data in weft's forms, chosen so that no side has to cut one: what both train on is
the same, token for token.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "\n\nAssistant:"
Row = dict[str, Any]


class Lengths:
    """Counts tokens as both sides make them: one beginning-of-sequence token, the text, one end
    token.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def text(self, text: str) -> int:
        """Tokens of `text` with the beginning-of-sequence token."""
        return len(self._tokenizer.encode(text).ids)

    def row(self, row: Row) -> list[int]:
        """Tokens of every sequence of a row: of the one answer, or of chosen and rejected."""
        if "answer" in row:
            return [self.text(row["prompt"] + row["answer"]) + 1]
        if "pos_answers" in row:
            return [
                self.text(row["prompt"] + row[key][0]) + 1 for key in ("pos_answers", "neg_answers")
            ]
        return [self.text(row["prompt"])]


def instructions(data: Path) -> Iterator[Row]:
    """Prompts with answers (Dolly)."""
    for line in _lines(data / "dolly_sample" / "dolly_151_prompted.jsonl"):
        row = json.loads(line)
        yield {"prompt": row["prompt"], "answer": "\n" + row["answer"].lstrip()}


def pairs(data: Path) -> Iterator[Row]:
    """Harmless pairs of hh-rlhf whose sides share all but the last answer."""
    for line in _lines(data / "hh_rlhf" / "harmless-base_test.jsonl.gz"):
        row = json.loads(line)
        (prompt, chosen), (other, rejected) = (_split(row[key]) for key in ("chosen", "rejected"))
        if prompt == other and chosen.strip() and rejected.strip() and chosen != rejected:
            yield {"prompt": prompt, "pos_answers": [chosen], "neg_answers": [rejected]}


def questions(data: Path) -> Iterator[Row]:
    """Prompts alone (GSM8K)."""
    for line in _lines(data / "gsm8k" / "train.jsonl"):
        yield {"prompt": f"Question: {json.loads(line)['question']}\nAnswer:"}


SOURCES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "instructions": instructions,
    "pairs": pairs,
    "questions": questions,
}


def take(
    rows: Iterator[Row], lengths: Lengths, count: int, longest: int
) -> tuple[list[Row], list[int]]:
    """(rows of at most `longest` tokens a sequence, tokens of each row).

    Begins anew where the file is too short.
    """
    fitting = [(row, sizes) for row in rows if max(sizes := lengths.row(row)) <= longest]
    if not fitting:
        raise ValueError(f"no row has at most {longest} tokens")
    chosen = [fitting[i % len(fitting)] for i in range(count)]
    return [row for row, _ in chosen], [sum(sizes) for _, sizes in chosen]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _split(dialogue: str) -> tuple[str, str]:
    at = dialogue.rindex(MARK) + len(MARK)
    return dialogue[:at], dialogue[at:]


def _lines(path: Path) -> Iterator[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        yield from file
