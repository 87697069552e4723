"""What the runs of docs/results.md learn: `python -m benchmarks.learning --data DIR` runs them with
several seeds and prints the page's table. Minutes a seed on two cores; nothing is written outside a
temporary folder.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

PAIRS = 800


@dataclass(frozen=True)
class Run:
    """One row of the table or several: a quickstart's words, and the metrics that are shown."""

    name: str
    words: tuple[str, ...]
    metrics: tuple[str, ...]


SOURCES = (
    "dataset.sources=[{path: dolly.jsonl, type: prompt_answer}, {path: t0.jsonl, type: "
    "prompt_answer, fraction: 0.5}]",
    "dataset.max_seqlen=256",
)
CHOICES = (
    "dataset.train_path=hh.jsonl",
    "dataset.type=preference",
    "dataset.max_seqlen=384",
    "dataset.train_bs_n_seqs=32",
)
RUNS = (
    Run(
        "sft",
        (
            "sft",
            "model.path=stories",
            "model.optimizer.lr=1e-3",
            *SOURCES,
            "dataset.train_bs_n_seqs=16",
            "max_steps=100",
        ),
        ("train/loss", "train/accuracy"),
    ),
    Run(
        "rw",
        ("rw", "model.path=stories", "model.optimizer.lr=1e-3", *CHOICES, "total_train_epochs=2"),
        ("train/accuracy", "train/margin"),
    ),
    Run(
        "dpo",
        ("dpo", "actor.path=stories", "actor.optimizer.lr=1e-4", *CHOICES),
        ("actor_train/loss", "actor_train/rewards/accuracies"),
    ),
    Run(
        "ppo",
        (
            "ppo",
            "actor.path=stories",
            "actor.optimizer.lr=3e-4",
            "critic.optimizer.lr=1e-3",
            "rew.path=runs/{seed}/rw/checkpoints/model/step50",
            "dataset.path=prompts.jsonl",
            "dataset.max_prompt_len=128",
            "dataset.overlong=truncate",
            "dataset.train_bs_n_seqs=32",
            "ppo.gen.max_new_tokens=24",
            "ppo.ppo_n_minibatches=2",
            "max_steps=20",
        ),
        ("rew_inf/reward", "actor_train/kl"),
    ),
)


def prepare(data: Path, folder: Path) -> None:
    """The model and the rows of all runs."""
    source = data / "weights" / "stories260K"
    words = [
        "convert",
        "llama2c",
        str(source / "stories260K.bin"),
        "--tokenizer",
        str(source / "tok512.bin"),
    ]
    weft([*words, "--output", "stories"], folder)
    (folder / "dolly.jsonl").write_text(
        (data / "dolly_sample" / "dolly_151_prompted.jsonl").read_text()
    )
    (folder / "t0.jsonl").write_text((data / "t0_p3_sample" / "t0_p3_sample.jsonl").read_text())
    with gzip.open(data / "hh_rlhf" / "harmless-base_test.jsonl.gz", "rt") as lines:
        rows = list(islice(lines, PAIRS))
    (folder / "hh.jsonl").write_text("".join(rows))
    mark = "\n\nAssistant:"
    texts = [json.loads(row)["chosen"] for row in rows]
    prompts = [
        json.dumps({"prompt": text[: text.rindex(mark) + len(mark)]}) + "\n" for text in texts
    ]
    (folder / "prompts.jsonl").write_text("".join(prompts))


def weft(words: Iterable[str], folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "weft.cli.main", *words],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def fifths(path: Path, metric: str) -> tuple[float, float]:
    """The metric's mean over the first fifth of the steps and over the last."""
    values = [json.loads(line)[metric] for line in path.read_text().splitlines()]
    many = max(1, len(values) // 5)
    return sum(values[:many]) / many, sum(values[-many:]) / many


def rows(found: dict[tuple[str, str], list[tuple[float, float]]]) -> Iterator[str]:
    yield "| run | metric | first fifth | last fifth |"
    yield "|---|---|---|---|"
    for (run, metric), pairs in found.items():
        first, last = (sorted(side) for side in zip(*pairs, strict=True))
        yield f"| {run} | `{metric}` | {first[0]:.2f} to {first[-1]:.2f} | {last[0]:.2f} to {last[-1]:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="the folder that WEFT_TEST_DATA names"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(given.data.resolve(), folder)
        for seed in given.seeds:
            for run in RUNS:
                words = [word.replace("{seed}", str(seed)) for word in run.words]
                names = [
                    f"experiment_name={seed}",
                    f"trial_name={run.name}",
                    f"seed={seed}",
                    "progress=false",
                ]
                weft(["quickstart", *words, *names], folder)
                for metric in run.metrics:
                    pair = fifths(folder / "runs" / str(seed) / run.name / "metrics.jsonl", metric)
                    found.setdefault((run.name, metric), []).append(pair)
                    print(
                        f"seed {seed}: {run.name} {metric} {pair[0]:.3f} -> {pair[1]:.3f}",
                        flush=True,
                    )
    print("\n".join(rows(found)))


if __name__ == "__main__":
    main()
