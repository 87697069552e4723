"""Import path that copies of earlier examples use. The dialect `scripts` has what it names."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cli import dialects


def run(script: str, argv: Sequence[str]) -> int:
    """Run the weft command that replaces an Open-Assistant script, and return the exit code."""
    code: int = dialects.load("scripts").run(script, argv)
    return code
