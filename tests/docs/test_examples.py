"""The smallest examples of docs/ stay small: what a user writes for one new thing, counted in lines
that are not blank.

That they work is seen by `test_pages.py`, which runs the commands of their pages.
"""

from __future__ import annotations

import pytest

from tests.docs.test_pages import ROOT, read_page

# what is new -> (page, file, most lines)
SMALLEST = {
    "loss": ("new-algorithm.md", "dft.py", 15),
    "advantage": ("host-functions.md", "median.py", 10),
    "reward": ("new-reward.md", "short.py", 3),
    "dataset": ("new-dataset.md", "riddles.py", 12),
    "experiment that swaps one node": ("host-functions.md", "median_grpo.py", 10),
}


def count_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("what", SMALLEST)
def test_the_smallest_example_is_within_its_lines(what: str) -> None:
    name, file, most = SMALLEST[what]
    page = read_page(ROOT / "docs" / name)
    assert count_lines(page.files[file]) <= most
    stem = file.removesuffix(".py")
    users = [*page.commands, *(body for other, body in page.files.items() if other != file)]
    assert any(stem in each for each in users), f"no command of docs/{name} uses {file}"


def test_lines_are_counted_without_blank_ones() -> None:
    assert count_lines("import json\n\n\ndef f():\n    return 1\n\n") == 3
