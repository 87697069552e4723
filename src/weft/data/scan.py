"""Scan of a file for problems before training: unwanted phrases, duplicates and empty answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.data import columns
from weft.data.rows import ANSWER_KEYS, MESSAGE_KEYS, Row
from weft.data.sources import UnreadableRow

PHRASES = (
    "as an ai language model",
    "as a language model",
    "as an ai model",
    "as an ai assistant",
    "as an artificial intelligence",
    "as a machine learning model",
    "as a large language model",
    "i am an ai",
    "i'm an ai",
    "i am just an ai",
    "i'm just an ai",
    "my knowledge cutoff",
    "my training data",
    "as of my last update",
    "i was trained by openai",
    "developed by openai",
    "i am chatgpt",
    "i'm chatgpt",
    "i don't have personal opinions",
    "i do not have personal opinions",
    "i don't have feelings",
    "i do not have feelings",
    "i cannot browse the internet",
    "i don't have access to real-time",
    "i'm sorry, but i can't assist",
    "i'm sorry, but i cannot",
    "i cannot fulfill",
    "i'm unable to assist",
    "it is not appropriate for me",
    "against my programming",
    "against my guidelines",
)
ANSWERS = (*ANSWER_KEYS, "pos_answers", "neg_answers", "chosen", "rejected", "replies")
ASSISTANTS = ("assistant", "gpt", "bot", "model", "chatgpt")
CONTEXT = 50  # characters shown on each side of a phrase


@dataclass
class ScanFindings:
    """Problems that a scan found.

    Attributes:
        rows: number of rows scanned
        phrases: maps each unwanted phrase to its occurrences, as (location, surrounding text)
        duplicates: locations of rows that are equal except for their ids, one list per group
        empty: locations of rows with an empty answer
        unreadable: rows that cannot be read, as `LOCATION: REASON`
    """

    rows: int = 0
    phrases: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    duplicates: list[list[str]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def scan(
    rows: Iterable[tuple[str, Row | UnreadableRow]], phrases: Sequence[str] = PHRASES
) -> ScanFindings:
    """Scan rows for unwanted phrases, duplicates and empty answers.

    `rows` yields (location, row). Phrases are searched for in the answers, ignoring case and the
    difference between straight and curly apostrophes.
    """
    findings = ScanFindings()
    pattern = re.compile(
        "|".join(re.escape(_normalize_text(p)) for p in sorted(phrases, key=len, reverse=True))
    )
    places_by_content: dict[str, list[str]] = {}
    for place, row in rows:
        findings.rows += 1
        if isinstance(row, UnreadableRow):
            findings.unreadable.append(f"{place}: {row.reason}")
            continue
        answers = list(iterate_answers(row))
        if any(not text.strip() for text in answers):
            findings.empty.append(place)
        for text in answers:
            for hit in pattern.finditer(_normalize_text(text)):
                findings.phrases.setdefault(hit.group(), []).append(
                    (place, _extract_context(text, hit.start(), hit.end()))
                )
        content = {key: value for key, value in row.items() if key != "id"}
        places_by_content.setdefault(json.dumps(content, sort_keys=True, default=str), []).append(
            place
        )
    findings.duplicates = [places for places in places_by_content.values() if len(places) > 1]
    return findings


def iterate_answers(row: Row) -> Iterator[str]:
    """Iterate over the texts of a row that a model would be trained on.

    These are answers, replies and assistant turns.
    """
    for key in (*ANSWERS, *MESSAGE_KEYS):
        if key in row:
            yield from _iterate_replies(row[key], messages=key in MESSAGE_KEYS)
    if isinstance(row.get("prompt"), Mapping):
        yield from _iterate_tree(row["prompt"])


def _iterate_replies(value: Any, *, messages: bool) -> Iterator[str]:
    if isinstance(value, str):
        if not messages:
            # A text that is not a dialogue is one answer.
            spans = columns.find_assistant_spans(value) or [(0, len(value))]
            yield from (value[start:stop] for start, stop in spans)
    elif isinstance(value, Mapping):
        content = value.get("content", value.get("value"))
        if value.get("role", value.get("from")) in ASSISTANTS and not value.get("tool_calls"):
            yield from [content] if isinstance(content, str) else _iterate_parts(content)
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _iterate_replies(entry, messages=messages)


def _iterate_parts(content: Any) -> Iterator[str]:
    """Yield the texts in a message's content, which is a list of parts.

    Parts that are not texts are skipped.
    """
    for part in content if isinstance(content, Sequence) else ():
        if isinstance(part, Mapping) and part.get("type") == "text":
            yield str(part.get("text", part.get("value", "")))


def _iterate_tree(node: Mapping[str, Any]) -> Iterator[str]:
    if node.get("role") in ASSISTANTS:
        yield str(node.get("text", ""))
    for reply in node.get("replies") or ():
        yield from _iterate_tree(reply)


def _normalize_text(text: str) -> str:
    """Return the text in lower case with straight apostrophes. Its length does not change.

    A character is left as it is if its lower case form consists of several characters.
    """
    return "".join(low if len(low := c.lower()) == 1 else c for c in text).replace("\u2019", "'")


def _extract_context(text: str, start: int, stop: int) -> str:
    before = max(0, start - CONTEXT)
    after = stop + CONTEXT
    excerpt = " ".join(text[before:after].split())
    return f"{'...' if before else ''}{excerpt}{'...' if after < len(text) else ''}"
