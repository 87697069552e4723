"""HTML frame of all pages, and their colours.

A page is a self-contained file with a content security policy. Roles have the same colours in the
graph, the timeline and the report.
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

# Visible symbols of control characters, except line feed and tab.
CONTROL_SYMBOLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
FOLDER = Path(__file__).parent
# Scripts of a page, concatenated in this order in one scope.
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

    `top` is the HTML above the sections, and `home` is the target of the logo's link. Sections
    without content are left out. `live` is empty for a page that never changes. Otherwise it is a
    tag that identifies the page's version: the page polls its server, and reloads its content when
    the server has another tag.
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
        sections = [section for section in self.sections if section.content]
        scripts = "\n".join(_read(name) for name in SCRIPTS)
        code = f'(() => {{\n"use strict";\n{scripts}\n}})();'
        body = "".join(
            f'<section id="{section.name}" aria-labelledby="{section.name}-heading"><h2 id="{section.name}-heading">'
            f"{escape(section.heading)}</h2>{section.content}</section>"
            for section in sections
        )
        return Template(_read("report.html")).substitute(
            title=escape(self.title),
            css=_read("report.css"),
            home=escape(self.home),
            nav="".join(
                f'<a href="#{section.name}">{escape(section.heading)}</a>' for section in sections
            ),
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
    return text.translate(CONTROL_SYMBOLS)


@cache
def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


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
ROLE_HUES = {
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
    used_hues = [ROLE_HUES[name] for name in names if name in ROLE_HUES]
    free_hues = [hue for hue in HUES if hue not in used_hues] or list(HUES)
    other_roles = [name for name in names if name not in ROLE_HUES]
    assigned_hues = {
        name: free_hues[index % len(free_hues)] for index, name in enumerate(other_roles)
    }
    return {name: ROLE_HUES.get(name) or assigned_hues[name] for name in names}
