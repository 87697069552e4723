"""`weft report RUN_DIR`: build the page of a run anew from its files."""

from __future__ import annotations

from pathlib import Path

from weft.observe.report import build_report


def report(run_dir: str | Path) -> int:
    """Write `RUN_DIR/report.html` and say where. Raises `UserError` where the directory holds no run."""
    print(build_report(Path(run_dir).expanduser()))
    return 0
