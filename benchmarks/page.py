"""The table of docs/performance.md, made from the files in benchmarks/results: run it after new
measurements.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pairs import ratios
from benchmarks.results import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- made by `python -m benchmarks.page` -->\n", "<!-- end of what is made -->\n"
TRAINING = {
    "sft": ("SFT, instruction rows, batch 8, at most 512 tokens", "TRL `SFTTrainer`"),
    "rw": ("reward model, HH pairs, batch 8", "TRL `RewardTrainer`"),
    "dpo": ("DPO, HH pairs, batch 8", "TRL `DPOTrainer`"),
    "grpo": ("GRPO, 1 prompt x 8, 64 new tokens", "TRL `GRPOTrainer`"),
    "ppo": ("PPO, 8 prompts, 64 new tokens", "TRL 1.12 `PPOTrainer`"),
}
HEADER = (
    "work",
    "against",
    "at least",
    "times as fast (least to most)",
    "by CPU time",
    "share of its memory",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit code 1 where the page is not up to date",
    )
    arguments = parser.parse_args()
    old = PAGE.read_text()
    new = with_table(old, table(RESULTS))
    if arguments.check:
        raise SystemExit(int(old != new))
    PAGE.write_text(new)
    print(f"{PAGE.relative_to(ROOT)} {'is up to date' if old == new else 'written'}")


def with_table(page: str, made: str) -> str:
    """The page with `made` between its two marks. Raises `ValueError` where it has none."""
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    return page[:start] + made + page[end:]


def table(folder: Path) -> str:
    """Markdown: one line for each figure of the result files, and one that says where they were
    measured.
    """
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in (*TRAINING, "generate", "limit")
    }
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, (work, against) in TRAINING.items():
        lines.append((work, against, *_training(results[name])))
    lines += _generation(results["generate"])
    lines += _limits(results["limit"])
    return (
        "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n" + "".join(_measured(results))
    )


def _training(result: Mapping[str, Any]) -> tuple[str, ...]:
    ours, theirs = result["runs"]["weft"], result["runs"]["trl"]
    peaks = {row["side"]: row["peak GiB"] for row in result["rows"]}
    wall, cpu = (
        ratios([run[what] for run in theirs], [run[what] for run in ours])
        for what in ("seconds", "cpu_seconds")
    )
    target = result["settings"]["target"].replace(" tokens/s", "").replace(" a step", "")
    return (
        target,
        f"**{wall.median:.1f}** ({wall.least:.1f} to {wall.most:.1f})",
        f"{cpu.median:.1f}",
        f"{peaks['weft'] / peaks['trl']:.2f}",
    )


def _generation(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    targets = {work["name"]: work["target"] for work in result["settings"]["works"]}
    for work, runs in result["runs"].items():
        for side, against in (
            ("padded", "`transformers` `generate`"),
            ("continuous", "its continuous batching"),
        ):
            wall, cpu = (
                ratios([run[what] for run in runs[side]], [run[what] for run in runs["weft"]])
                for what in ("seconds", "cpu_seconds")
            )
            yield (
                f"generate, {work}",
                against,
                _target(targets[work], side),
                f"**{wall.median:.1f}** ({wall.least:.1f} to {wall.most:.1f})",
                f"{cpu.median:.1f}",
                "",
            )


def _target(words: str, side: str) -> str:
    """What is asked of one comparison: `8x padded, 7x continuous` names both, `5x` alone is the
    padded one's.
    """
    named = dict(reversed(part.split()) for part in words.split(", ") if " " in part)
    return str(named.get(side, "")) if named else words * (side == "padded")


def _limits(result: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in result["rows"]:
        if row["to reach"]:
            against = (
                "the rate of matrix products"
                if "SFT" in row["what"]
                else "its products, attention and draws, bare"
            )
            yield (
                row["what"].removesuffix(", weft"),
                against,
                row["to reach"],
                f"**{row['of the limit']}**",
                "",
                "",
            )


def _measured(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    cpus = sorted({result["hardware"]["cpu"] for result in results.values()})
    dates = sorted(result["date"][:10] for result in results.values())
    commits = sorted({result["commit"][:7] for result in results.values()})
    threads = sorted({str(result["threads"]) for result in results.values()})
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    yield f"Measured {days} at commit {', '.join(commits)}, {' and '.join(threads)} threads, on {'; '.join(cpus)}.\n"


if __name__ == "__main__":
    main()
