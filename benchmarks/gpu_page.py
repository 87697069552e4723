"""The page of a run of `benchmarks/gpu.py`, made of its record alone, for a reader who was not
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu_plan import BARS, EVERY

Record = Mapping[str, Any]
GPU = "H100"  # that the bars are for
# How figures of other GPUs compare with those of one for which the bars are.
COMPARED = {
    "H200": "An H200 has the compute units of an H100 and 1.43 times its memory bandwidth: shares "
    "of the data sheet can be compared with those of an H100, tokens a second of decoding cannot."
}
ABOUT = (
    "weft trains language models after pretraining. This page holds what one run of its GPU "
    "benchmark found. A *goal* that "
    "begins with `<=` is a bound of correctness and holds on every device. One that begins with "
    "`>=` is a bar of speed for one "
    f"{GPU}"
)
WORDS = (
    "*MFU* is the rate of floating-point operations of a training step, *memory roofline* the "
    "rate at which a decode step "
    "reads the bytes that it must read; both are shares of what this run measured, for products "
    "of random matrices and for "
    "copies, or of what the GPU's data sheet promises. The last column names the kernel that "
    "computes attention."
)
TINY = "**This was a trial on tiny sizes: no figure says how fast anything is.**"
KERNELS = 12  # lines of a profile


def page(record: Record) -> str:
    """Markdown: the device, what is wrong, what did not run and why, every figure with its goal,
    and profiles.
    """
    first = record.get("first") or {}
    lines = [f"# weft on {record['device'] or 'this device'}", "", *_head(record), ""]
    lines += _body(record)
    if first:
        lines += ["", "# The run before", "", *_head(first), "", *_body(first)]
    return "\n".join(lines).rstrip() + "\n"


def _head(record: Record) -> list[str]:
    gpu = record.get("gpu")
    judged = (
        "."
        if gpu == GPU
        else f": on {gpu or 'this device'} such a figure is given without a verdict."
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items() if version
    )
    dirty = " with changes that are not committed" if record.get("dirty") else ""
    lines = [" ".join(filter(None, [ABOUT + judged, COMPARED.get(gpu or "")])), "", WORDS, ""]
    if record.get("tiny"):
        lines += [TINY, ""]
    lines.append(f"- Command: `{record['command']}`")
    lines += [f"- When: {record['when']}"] if record.get("when") else []
    lines.append(f"- Commit: {record['commit'] or 'unknown'}{dirty}")
    lines.append(f"- Device: {record['device'] or 'unknown'}{f', model {gpu}' if gpu else ''}")
    facts = ", ".join(f"{name} {value}" for name, value in record.get("gpu_facts", {}).items())
    lines += [f"- The GPU by its driver: {facts}"] if facts else []
    machine = record.get("machine")
    if machine:
        lines.append(
            f"- Machine: {machine['cores']} cores, {machine['memory_gib']} GiB of memory, "
            f"{machine['system']}"
        )
    lines.append(f"- Software: {versions}")
    if record.get("stand_ins"):
        lines.append(f"- Not installed, a part stood in for: {', '.join(record['stand_ins'])}")
    return lines


def _body(record: Record) -> list[str]:
    lines = ["## What is wrong", ""]
    lines += [f"- **wrong**: {each}" for each in record["wrong"]]
    lines += [f"- **{name} failed**: {why}" for name, why in record["why"].items()]
    lines += [] if record["wrong"] or record["why"] else ["Nothing that ran."]
    lines += ["", "## What did not run", "", *(_absent(record) or ["Everything ran."])]
    lines += ["", "## The bars", "", *_bars(record)]
    for name in _sections(record):
        rows = [row for row in record["rows"] if row.get("section", name) == name]
        details = record["details"].get(name, {})
        lines += ["", f"## {name}", ""]
        took = f" It took {details['section_s']:.0f} s." if "section_s" in details else ""
        lines += [f"{EVERY[name].about if name in EVERY else ''}{took}".strip(), ""]
        profiles, notes = details.get("profiles", {}), details.get("notes", ())
        lines += _table(rows, record.get("gpu")) if rows or not profiles else []
        lines += ["", *(f"- {note}" for note in notes)] if notes else []
        for profile, kernels in profiles.items():
            lines += ["", *_profile(profile, kernels)]
    return lines


def _bars(record: Record) -> list[str]:
    """Every bar with its figure of this run or of the one before, or that there is none."""
    before = record.get("first") or {"rows": []}
    found: dict[str, tuple[Mapping[str, Any], Record, str]] = {}
    for run, which in ((before, " (the run before)"), (record, "")):
        found |= {row["what"]: (row, run, which) for row in run["rows"]}
    lines = [f"For one {GPU}.", "", "| what | bar | this run | |", "|---|---|---|---|"]
    for what, goal in BARS.items():
        value, judged = "not measured", ""
        if what in found:
            row, run, which = found[what]
            value, judged = f"{row['value']:.4g}{which}", verdict(row, run.get("gpu"))
        lines.append(f"| {what} | {goal} | {value} | {judged} |")
    return lines


def _sections(record: Record) -> list[str]:
    """Those with figures or notes, in the order in which they ran."""
    found = [name for name in record["details"] if name in record.get("ran", record["details"])]
    named = [row.get("section") for row in record["rows"]]
    return list(dict.fromkeys([*found, *(name for name in named if name)]))


def _absent(record: Record) -> list[str]:
    """Sections that were not started or did not end, and parts that were left out."""
    lines = [f"- {name}: not started, {why}" for name, why in record.get("not_started", {}).items()]
    lines += [f"- the end of {name}: {why}" for name, why in record["why"].items()]
    for name, details in record["details"].items():
        lines += [f"- {name}: {part}" for part in details.get("left_out", ())]
    return lines


def _table(rows: Iterable[Mapping[str, Any]], gpu: str | None) -> list[str]:
    lines = ["| what | value | unit | goal | | attention |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (
            row["what"],
            f"{row['value']:.4g}",
            row["unit"],
            row["goal"],
            verdict(row, gpu),
            row.get("by", ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines if len(lines) > 2 else ["It left no figure."]


def verdict(row: Mapping[str, Any], gpu: str | None) -> str:
    """Whether a figure reaches its goal; empty where it has none, or has a bar that is for another
    GPU.
    """
    if not row["goal"]:
        return ""
    sign, bound = row["goal"].split()
    if sign == ">=" and gpu != GPU:
        return ""
    reached = row["value"] >= float(bound) if sign == ">=" else row["value"] <= float(bound)
    return "reached" if reached else "**missed**"


def _profile(name: str, kernels: list[Mapping[str, Any]]) -> list[str]:
    total = sum(kernel["ms"] for kernel in kernels) or 1.0
    lines = [
        f"Profile of {name}, {total:.3g} ms of kernels:",
        "",
        "| ms | share | calls | kernel |",
        "|---|---|---|---|",
    ]
    for kernel in kernels[:KERNELS]:
        called = kernel["kernel"].replace("|", "/")[:90]
        lines.append(
            f"| {kernel['ms']:.3g} | {kernel['ms'] / total:.0%} | {kernel['calls']} | `{called}` |"
        )
    return lines
