"""Runs the default tests without `weft.compat`, to show that weft does not need it.

    python tools/without_compat.py                # all tests, as `make test-without-compat`
    python tools/without_compat.py tests/cli -x   # these paths and options of pytest

Works in a copy in a temporary folder, without the package, its tests, its pages and its examples.
Exits with pytest's code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REMOVED = (
    "src/weft/compat",
    "tests/compat",
    "examples/open_assistant",
    "examples/easylm",
    "docs/open-assistant.md",
    "docs/easylm-files.md",
    "docs/coming-from",
    "tests/docs/test_coming_from.py",
    "tests/e2e/test_open_assistant.py",
)
# compares all of weft, with compat, with a table of names
DESELECTED = "tests/test_names.py::test_the_table_of_renamed_names_has_the_names_of_today"


def copy_tree(target: Path) -> None:
    """Copy the files of the working tree, without those that git ignores, except `REMOVED`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        removed = any(name == each or name.startswith(f"{each}/") for each in REMOVED)
        if removed or not os.path.lexists(ROOT / name):
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def remove_links(target: Path) -> None:
    """Leave only the text of links to removed pages, and take the pages out of the site's menu."""
    pages = "|".join(re.escape(Path(each).name) for each in REMOVED if each.startswith("docs/"))
    for page in [*target.glob("*.md"), *target.glob("docs/**/*.md")]:
        text = page.read_text()
        page.write_text(re.sub(rf"\[([^]]*)\]\([^)]*\b(?:{pages})[^)]*\)", r"\1", text))
    site = target / "mkdocs.yml"
    menu = re.sub(rf"^.*: (?:{pages})\b.*\n", "", site.read_text(), flags=re.MULTILINE)
    site.write_text(menu.replace("  - Coming from:\n", ""))


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="weft-without-compat-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        remove_links(copy)
        environment = {**os.environ, "PYTHONPATH": str(copy / "src")}
        options = subprocess.run(
            [sys.executable, "-m", "weft.cli.reference"],
            cwd=copy,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        (copy / "docs" / "options.md").write_text(options)
        # Tests ask git for its files and its commit.
        author = ["-c", "user.name=weft", "-c", "user.email=weft@localhost"]
        for words in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "copy"]):
            subprocess.run(["git", *words], cwd=copy, check=True)
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile"]
        command += ["-m", "not slow", "--deselect", DESELECTED, *arguments]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
