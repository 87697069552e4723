"""Colours of roles, which are the same in the graph, the timeline and the report.

Each colour has a variant for light and one for dark backgrounds, with a contrast of at least 3:1 to
the background. Consecutive colours can be distinguished with the common colour-vision deficiencies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ColourPair:
    """Colour of a line or a fill, with variants for light and for dark backgrounds."""

    light: str
    dark: str


INDIGO = ColourPair("#4a5bd4", "#93a0ff")
ORANGE = ColourPair("#c05d0c", "#f2a65e")
TEAL = ColourPair("#0b8074", "#52c7b8")
MAGENTA = ColourPair("#b0357f", "#ec8fc8")
SKY = ColourPair("#1f77b0", "#72b9ea")
OLIVE = ColourPair("#6f7212", "#c8c65c")
GREY = ColourPair("#646b78", "#a0a7b4")
HUES = (INDIGO, ORANGE, TEAL, MAGENTA, SKY, OLIVE)
# Media query in the graph's SVG that selects the colours for dark backgrounds.
DARK = "@media (prefers-color-scheme:dark)"
KNOWN = {
    "actor": INDIGO,
    "model": INDIGO,
    "critic": ORANGE,
    "ref": TEAL,
    "reward": MAGENTA,
    "rew": MAGENTA,
}


def assign_role_hues(roles: Iterable[str]) -> dict[str, ColourPair]:
    """Return the colour of each role.

    Roles without a fixed colour get the unused colours, in the order of `roles`.
    """
    names = list(dict.fromkeys(roles))
    taken = [KNOWN[name] for name in names if name in KNOWN]
    free = [hue for hue in HUES if hue not in taken] or list(HUES)
    others = [name for name in names if name not in KNOWN]
    chosen = {name: free[index % len(free)] for index, name in enumerate(others)}
    return {name: KNOWN.get(name) or chosen[name] for name in names}
