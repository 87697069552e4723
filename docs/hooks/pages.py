"""What the site needs beyond the pages: fences that mkdocs reads, tables from the code, pages that
live elsewhere in the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from weft.observe import metric_help

ROOT = Path(__file__).resolve().parent.parent.parent
ELSEWHERE = {
    "recipes/README.md": "recipes.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
    "benchmarks/README.md": "development/benchmarks.md",
}
FENCE = re.compile(r"^```(?P<language>\w+) (?P<rest>run|file=(?P<file>\S+))[^\n]*$", re.M)
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]"
    r"\((?P<target>(?!https?:|mailto:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
CELL = re.compile(r"<td>.*?</td>", re.S)
NAME = re.compile(r"<code>[\w.,/*?-]+</code>")
METRICS = "<!-- the tables of weft.observe.metric_help -->"
BLOCK = re.compile(r"(^```.*?^```$)", re.M | re.S)


def on_files(files: Files, *, config: Any) -> Files:
    for source, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    markdown = markdown.replace(METRICS, metric_help.render_markdown())
    return render(
        markdown, uri, {at: source for source, at in ELSEWHERE.items()}.get(uri, f"docs/{uri}")
    )


def on_post_page(output: str, **_: Any) -> str:
    return CELL.sub(lambda cell: NAME.sub(lambda name: _breaks(name[0]), cell[0]), output)


def _breaks(name: str) -> str:
    """A name in a table with the places where it may break: after dots, and after underscores where
    it is long.
    """
    return name.replace(".", ".<wbr>").replace(
        "_", "_<wbr>" if len(name) > 24 + len("<code></code>") else "_"
    )


def render(markdown: str, uri: str, source: str) -> str:
    """The text of the file `source` of the repository as the site shows it at `uri`."""
    shown = FENCE.sub(_fence, markdown)
    parts = BLOCK.split(shown)  # what stands in a block of code is no link
    parts[::2] = [LINK.sub(lambda link: _link(link, uri, source), part) for part in parts[::2]]
    return "".join(parts)


def _fence(fence: re.Match[str]) -> str:
    return f"```{fence['language']}" + (f' title="{fence["file"]}"' if fence["file"] else "")


def _link(link: re.Match[str], uri: str, source: str) -> str:
    """A link to a page leads to where the site has it; of a link to other files of the repository
    only the text stays.
    """
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
    at = ELSEWHERE.get(target) or (
        target.removeprefix("docs/") if target.startswith("docs/") else None
    )
    if at is None:
        return link["text"] if (ROOT / target).exists() else link[0]
    relative = posixpath.relpath(at, posixpath.dirname(uri) or ".")
    return f"{link['image']}[{link['text']}]({relative}{link['anchor'] or ''})"
