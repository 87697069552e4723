"""Two answers compared by computer algebra: `math_verify` (Hugging Face), within bounds of size and time."""

from __future__ import annotations

import functools
import logging
import re
import threading
from typing import Any

MOST_CHARACTERS = 1000  # of an expression; longer ones are no answers
SECONDS = 2  # for one step of the library's
# What takes a computer algebra system for ever: towers of powers, powers and factorials of large numbers, deep nesting.
HUGE = re.compile(r"\^\s*\{?\s*-?\d{4,}|\d\s*\^\s*\{?\s*\(?\d+\s*\^|\d{4,}\s*!|!\s*!|\)\s*!\s*\)\s*!|[(\[{]{12}")


@functools.cache
def _library() -> Any:
    """The library, which takes a second to import; what it says of texts that are no mathematics is for nobody."""
    import math_verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify


@functools.cache
def _targets() -> tuple[Any, ...]:
    library = _library()
    return library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()


def _seconds() -> int | None:
    """The library's clock is an alarm signal, which the main thread alone may set."""
    return SECONDS if threading.current_thread() is threading.main_thread() else None


@functools.lru_cache(maxsize=4096)
def parsed(text: str) -> tuple[Any, ...]:
    """What a text says: its last boxed answer, or its last formula or number. Empty where there is none."""
    if len(text) > 100 * MOST_CHARACTERS or HUGE.search(text[-MOST_CHARACTERS:]):
        return ()
    return tuple(_library().parse(text, _targets(), parsing_timeout=_seconds()))


def formula(text: str) -> str:
    """The text with signs around it that say it is a formula, where it has none."""
    return text if any(sign in text for sign in ("$", r"\(", r"\[", r"\boxed")) else f"${text}$"


def same(reference: str, answer: str) -> bool:
    """Whether two texts say the same to the library: formulas, or sentences that hold one."""
    one, other = parsed(reference), parsed(answer)
    return bool(
        one
        and other
        and _library().verify(list(one), list(other), timeout_seconds=_seconds(), allow_set_relation_comp=True)
    )
