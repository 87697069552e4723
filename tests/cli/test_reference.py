"""docs/options.md equals the page generated from the source."""

from __future__ import annotations

from pathlib import Path

from weft import registry
from weft.cli.reference import SHIPPED, format_page
from weft.options import iterate_options


def test_the_page_is_up_to_date(repo: Path) -> None:
    assert (repo / "docs" / "options.md").read_text() == format_page(), (
        "run: python -m weft.cli.reference > docs/options.md"
    )


def test_every_option_is_on_the_page_by_its_last_names() -> None:
    text = format_page()
    for name in SHIPPED:
        for leaf in iterate_options(registry.quickstarts.get(name)()):
            parts = leaf.name.split(".")
            endings = [".".join(parts[start:]) for start in range(len(parts))]
            assert any(f"| `{ending}` |" in text for ending in endings), leaf.name
