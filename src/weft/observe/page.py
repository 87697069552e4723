"""HTML frame of all pages: a self-contained file with a content security policy, and its colours.

Roles have the same colours in the graph, the timeline and the report.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from weft import writing

CONTROL = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
HERE = Path(__file__).parent
# Concatenated in this order, in one scope.
SCRIPTS = ("curves.js", "completions.js", "timeline.js", "page.js")


@dataclass(frozen=True)
class PageSection:
    """Section of a page, linked from the navigation bar at the top."""

    name: str
    heading: str
    content: str


@dataclass(frozen=True)
class Page:
    """Page with a title, sections, and data for the page's script.

    `top` is the HTML above the sections, and `home` is the target of the logo's link. `live` is
    empty for a page that never changes. Otherwise it is a tag that identifies the page's version:
    the page polls its server, and reloads its content when the server has another tag.
    """

    title: str
    top: str
    sections: Iterable[PageSection]
    footer: str
    data: Any = field(default_factory=dict)
    live: str = ""
    home: str = "#top"

    def render(self) -> str:
        """Render the whole page as HTML."""
        there = [section for section in self.sections if section.content]
        scripts = "\n".join(_read(name) for name in SCRIPTS)
        code = f'(() => {{\n"use strict";\n{scripts}\n}})();'
        body = "".join(
            f'<section id="{one.name}" aria-labelledby="{one.name}-heading"><h2 id="{one.name}-heading">'
            f"{escape(one.heading)}</h2>{one.content}</section>"
            for one in there
        )
        return Template(_read("report.html")).substitute(
            title=escape(self.title),
            css=_read("report.css"),
            home=escape(self.home),
            nav="".join(f'<a href="#{one.name}">{escape(one.heading)}</a>' for one in there),
            body=self.top + body,
            footer=self.footer,
            data=embed_json(self.data),
            live=f' data-live="{escape(self.live)}"' if self.live else "",
            js=code,
            connect="'self'" if self.live else "'none'",
            script_hash="sha256-"
            + base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
        )


def write(path: Path, text: str) -> Path:
    """Write the HTML of a page to `path` atomically, and return the path."""
    return writing.write(path, text, errors="replace")


def render_folded(summary: str, content: str, key: str) -> str:
    """Render `content` as a collapsed block that opens with a click on `summary`.

    `key` identifies the block, so that it stays open when a live page updates itself.
    """
    return f'<details data-key="{escape(key)}"><summary>{summary}</summary>{content}</details>'


def embed_json(value: Any) -> str:
    """Return `value` as JSON that is safe inside a script element.

    Every `<` is escaped, so that strings in the JSON cannot end the element.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def escape_text(text: str) -> str:
    """Escape untrusted text for HTML, and make control characters visible."""
    return escape(replace_control_characters(text))


def replace_control_characters(text: str) -> str:
    """Replace control characters with visible symbols."""
    return text.translate(CONTROL)


@cache
def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


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
