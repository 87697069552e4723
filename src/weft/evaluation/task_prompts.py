"""Prompts with examples from the subject, language or subtask of the item.

lm_eval draws examples from one pool for all items, so these prompts include their examples as text.
With a chat template, the whole prompt is one user message, as in the suite of open-instruct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.errors import DataError

Item = Mapping[str, Any]
BuildPrompt = Callable[[Item, Any, int], str]  # (item, examples of its subset, their number)

CONCLUSION = "So the answer is"


def build_choice_prompt(item: Item, shots: Sequence[Item] | None, count: int) -> str:
    """Return MMLU's prompt with the first `count` examples of the item's subject."""
    subject = f" about {item['subset'].replace('_', ' ')}" if item["subset"] else ""
    introduction = f"The following are multiple choice questions (with answers){subject}.\n\n"
    examples = []
    for shot in (shots or [])[:count]:
        examples.append(f"{_build_choices(shot)} {shot['letters'][shot['target']]}\n\n")
    return introduction + "".join(examples) + _build_choices(item)


def _build_choices(item: Item) -> str:
    lines = [item["question"].strip()]
    for letter, choice in zip(item["letters"], item["choices"], strict=True):
        lines.append(f"{letter}. {choice}")
    return "\n".join([*lines, "Answer:"])


def build_reasoned_prompt(item: Item, shots: str, count: int) -> str:
    """Return BIG-Bench Hard's prompt, whose examples reason before they answer."""
    return f"{shots}\n\nQ: {item['input']}\nA:"


def build_direct_prompt(item: Item, shots: str, count: int) -> str:
    """Return BIG-Bench Hard's prompt without the reasoning in its examples."""
    parts = []
    for part in shots.split("\n\n"):
        question, separator, _ = part.partition("\nA:")
        if part.startswith("Q:") and separator and CONCLUSION in part:
            part = f"{question.strip()}\nA: {part.rpartition(CONCLUSION)[2].strip()}"
        parts.append(part)
    return build_reasoned_prompt(item, "\n\n".join(parts), count)


def build_passage_prompt(item: Item, shots: Sequence[Item] | None, count: int) -> str:
    """Return a question about a passage, after the first examples of the item's language."""
    introduction = (
        "Answer the following question based on the information in the given passage.\n\n"
    )
    return introduction + _build_questions(item, shots, count, with_passage=True)


def build_question_prompt(item: Item, shots: Sequence[Item] | None, count: int) -> str:
    """Return a question without its passage, after the first examples of the item's language."""
    introduction = "Answer the following question.\n\n"
    return introduction + _build_questions(item, shots, count, with_passage=False)


def _build_questions(
    item: Item, shots: Sequence[Item] | None, count: int, *, with_passage: bool
) -> str:
    texts = []
    for question_item in [*(shots or [])[:count], item]:
        passage = f"Passage: {question_item['context']}\n" if with_passage else ""
        answer = "" if question_item is item else f" {question_item['answers'][0]}"
        texts.append(f"{passage}Question: {question_item['question']}\nAnswer:{answer}")
    return "\n\n".join(texts)


PROMPTS: dict[str, BuildPrompt] = {
    "choice": build_choice_prompt,
    "reasoned": build_reasoned_prompt,
    "direct": build_direct_prompt,
    "passage": build_passage_prompt,
    "question": build_question_prompt,
}


class ShotPrompt:
    """Callable that builds an item's prompt, in the form of lm_eval's `doc_to_text`."""

    def __init__(self, name: str, shots: Mapping[str, Any], count: int) -> None:
        self.name = name
        self.shots = shots
        self.count = count

    def __call__(self, item: Item) -> str:
        return PROMPTS[self.name](item, self.shots.get(item["subset"]), self.count)

    def __repr__(self) -> str:
        """Describe the prompt for result files."""
        return f"weft:{self.name}, {self.count} examples"

    def __deepcopy__(self, memo: object) -> ShotPrompt:
        """Return the prompt itself, which never changes; lm_eval copies configurations often."""
        return self

    def check(self, items: Sequence[Item], place: str) -> None:
        """Raise `DataError` if a subset has too few examples; its message begins with `place`."""
        if not self.count:
            return
        for subset in sorted({item["subset"] for item in items}):
            shots = self.shots.get(subset)
            if shots is None or (not isinstance(shots, str) and len(shots) < self.count):
                num_shots = 0 if shots is None else len(shots)
                raise DataError(
                    f"{place}: the prompt needs {self.count} examples of {subset or 'the data'!r}, "
                    f"and there are {num_shots}; add them to the development split"
                )
