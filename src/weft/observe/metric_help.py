"""Descriptions of metrics: meaning, unit, healthy range, and bounds for warnings.

They are in `metric_help.toml`. `python -m weft.observe.metric_help` prints them as Markdown tables.
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
# The first pattern that matches is used. A name ending in one of `ENDS` is also tried without it.
HELP = tuple(MetricHelp(group=group, **row) for group, rows in _TABLE.items() for row in rows)
ENDS = {"_max": "largest", "_min": "smallest"}  # suffix -> which value of the step


@cache
def find(name: str) -> MetricHelp | None:
    """Return the description of a metric of metrics.jsonl; None if the metric has no description."""
    if name.startswith(("time/", "predicted/")):
        return next((one for one in HELP if fnmatchcase(name, one.pattern)), None)
    if "/" not in name:
        rest = name
    else:
        rest = name.partition("/")[2]
    parts = rest.split("/")
    if name.startswith("eval/"):  # eval/{source}/{metric}, eval/{metric}
        if parts[-2:-1] in (["rewards"], ["logps"]):
            parts = parts[-2:]
        else:
            parts = parts[-1:]
    for tried in ("/".join(parts), parts[-1]):
        ends = [tried, *(tried.removesuffix(end) for end in ENDS if tried.endswith(end))]
        for each in ends:
            known = next((one for one in HELP if fnmatchcase(each, one.pattern)), None)
            if known is not None:
                return known
    return None


def render_markdown() -> str:
    """Return all descriptions as Markdown, with one table per group."""
    groups = list(dict.fromkeys(one.group for one in HELP))
    parts = []
    for group in groups:
        rows = [one for one in HELP if one.group == group]
        lines = [f"## {group}", "", "| metric | unit | what it is | healthy |", "|---|---|---|---|"]
        for one in rows:
            lines.append(f"| `{one.pattern}` | {one.unit} | {one.what} | {one.healthy} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
