"""Phrases that reveal that an answer was copied from a language model.

Catalogue entries with the option `filter_words` leave out rows that contain such a phrase.
"""

from __future__ import annotations

PHRASES = (
    "as a language model",
    "as an ai language model",
    "as a large language model",
    "as an ai ",
    "an ai language model you don't have",
    "i am an ai language model and do not",
    "ai language model and i do not",
    "i know as an ai language model you don't have",
    "i'm an ai ",
    "i am an ai ",
    "as your dedicated ai language model",
    "as a hypothetical ai",
    "as a neutral ai",
    "my knowledge cutoff",
    "my knowledge cut off",
    "as a machine",
    "i cannot assist",
    "i do not have personal preferences",
    "i don't have personal preferences",
    "unfortunately, i cannot provide",
    "i'm sorry, i cannot",
    "ai cannot create or program",
    "i'm afraid i cannot create",
    "openai",
)


def find_unwanted_phrase(text: str) -> str | None:
    """Return an unwanted phrase that a text contains, or None if it contains none.

    The phrases are listed in `PHRASES`, and the first one found is returned. Case is ignored.
    """
    low = text.lower()
    return next((phrase for phrase in PHRASES if phrase in low), None)
