"""The documentation site: it has every page, its links lead somewhere, and it asks no other machine
for anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.docs.test_pages import ROOT

FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link(?=[^>]*stylesheet))[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)


def in_navigation(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    assert hasattr(children, "__iter__")
    return [page for child in children for page in in_navigation(child)]


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = in_navigation(yaml.safe_load(text)["nav"])
    assert len(pages) == len(set(pages))
    written = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    missing = sorted(written - set(pages))
    assert missing == [], "add them to `nav` in mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(ROOT / "mkdocs.yml", folder)
    return folder


def build(config: Path, folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(config),
        "-d",
        str(folder),
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    assert [
        (page.name, found) for page in pages for found in FOREIGN.findall(page.read_text())
    ] == []


@pytest.mark.slow
def test_options_can_be_searched(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    options = " ".join(
        entry["text"] for entry in entries if entry["location"].startswith("options.html")
    )
    assert "grpo.dynamic_sampling" in options and "recover_freq_steps" in options


@pytest.mark.slow
def test_files_in_fences_keep_their_names_and_metrics_are_there(site: Path) -> None:
    assert (
        '<span class="filename">vowels.py</span>'
        in (site / "tutorials" / "own-reward.html").read_text()
    )
    assert "frac_reward_zero_std" in (site / "metrics.html").read_text()


@pytest.mark.slow
def test_a_broken_anchor_fails_the_build(tmp_path: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# One\n\n[two](#nowhere)\n")
    small = re.sub(r"^nav:.*", "nav: [index.md]\n", text, flags=re.M | re.S)
    small = re.sub(r"^hooks:.*?\n\n", "", small, flags=re.M | re.S).replace(
        "extra_css: [site.css]", ""
    )
    (tmp_path / "mkdocs.yml").write_text(small)
    with pytest.raises(AssertionError, match="nowhere"):
        build(tmp_path / "mkdocs.yml", tmp_path / "site")


def test_what_is_foreign() -> None:
    assert FOREIGN.search('<script src="https://cdn.example/x.js"></script>')
    assert FOREIGN.search('<link rel="stylesheet" href="//cdn.example/x.css">')
    assert not FOREIGN.search(
        '<a href="https://arxiv.org/abs/1"><script src="assets/x.js"></script>'
    )


def test_pictures_are_those_that_the_code_draws() -> None:
    module = hooks("pictures")
    drawn = module.pictures()
    assert {path.name for path in module.FOLDER.glob("*.svg")} == set(drawn)
    for name, svg in drawn.items():
        assert (module.FOLDER / name).read_text() == svg, "run: python docs/hooks/pictures.py"
        assert "prefers-color-scheme:dark" in svg and 'class="ground"' in svg


def hooks(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_and_fences_become_those_of_the_site() -> None:
    render = hooks("pages").render
    assert (
        render("[a](../benchmarks/README.md#on-a-gpu)", "x.md", "docs/x.md")
        == "[a](development/benchmarks.md#on-a-gpu)"
    )
    assert render("[the code](../src/weft/options.py)", "x.md", "docs/x.md") == "the code"
    assert (
        render("[a](docs/runs.md)", "development/changelog.md", "CHANGELOG.md") == "[a](../runs.md)"
    )
    assert render("[a](gone.md) [b](#here)", "x.md", "docs/x.md") == "[a](gone.md) [b](#here)"
    assert (
        render("```python file=a.py\n[a](runs.md)\n```\n", "x.md", "docs/x.md")
        == '```python title="a.py"\n[a](runs.md)\n```\n'
    )
    assert render("```bash run\nls\n```\n", "x.md", "docs/x.md") == "```bash\nls\n```\n"


def test_names_in_tables_break_after_dots() -> None:
    shown = hooks("pages").on_post_page("<td><code>a.b_c</code></td><p><code>a.b</code></p>")
    assert shown == "<td><code>a.<wbr>b_c</code></td><p><code>a.b</code></p>"
