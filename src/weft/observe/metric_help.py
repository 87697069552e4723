"""Descriptions of metrics: meaning, unit, healthy range, and bounds for warnings.

`metric_help.toml` contains them. `python -m weft.observe.metric_help` prints them as Markdown.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class MetricHelp:
    """Description of a metric, or of all metrics whose names match a pattern.

    Attributes:
        pattern: glob pattern of the metric's name without the node
        group: heading under which the metric is listed
        what: meaning of the metric
        unit: unit of the values, such as "s" or "share", or ""
        healthy: description of the healthy range, or ""
        least: values below this bound are reported as a problem of the run
        most: values above this bound are reported as a problem of the run

    To avoid false reports, the bounds are wider than the healthy range.
    """

    pattern: str
    group: str
    what: str
    unit: str = ""
    healthy: str = ""
    least: float | None = None
    most: float | None = None


# Groups that other modules name.
REWARD = "Rewards"
CRITIC = "Critic"
PREFERENCES = "Preferences"

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
# The first matching pattern is used. Names with a suffix in `SUFFIXES` are also tried without it.
HELP = tuple(MetricHelp(group=group, **row) for group, rows in _TABLE.items() for row in rows)
SUFFIXES = ("_max", "_min")


@cache
def find(name: str) -> MetricHelp | None:
    """Return the description of a metric of metrics.jsonl; None if the metric has no description."""
    if name.startswith(("time/", "predicted/")):
        return _match_pattern(name)
    parts = name.split("/")
    if len(parts) > 1:
        parts = parts[1:]  # without the node
    if name.startswith("eval/"):  # eval/{source}/{metric}, eval/{metric}
        if parts[-2:-1] in (["rewards"], ["logps"]):
            parts = parts[-2:]
        else:
            parts = parts[-1:]
    for tried in ("/".join(parts), parts[-1]):
        stems = [tried.removesuffix(suffix) for suffix in SUFFIXES if tried.endswith(suffix)]
        for candidate in [tried, *stems]:
            metric_help = _match_pattern(candidate)
            if metric_help is not None:
                return metric_help
    return None


def _match_pattern(name: str) -> MetricHelp | None:
    return next((entry for entry in HELP if fnmatchcase(name, entry.pattern)), None)


def render_markdown() -> str:
    """Return all descriptions as Markdown, with one table per group."""
    groups = list(dict.fromkeys(entry.group for entry in HELP))
    parts = []
    for group in groups:
        rows = [entry for entry in HELP if entry.group == group]
        lines = [f"## {group}", "", "| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        for row in rows:
            lines.append(f"| `{row.pattern}` | {row.unit} | {row.what} | {row.healthy} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
