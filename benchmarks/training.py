"""What `sft`, `rw`, `dpo`, `grpo` and `ppo` share: one model, one file of rows, weft and TRL in
turn after every step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import data, model, results
from benchmarks.pairs import Measured, Side, SideFailed, Spread, ratios

SIDES = {"weft": "benchmarks.weft_side:train", "trl": "benchmarks.trl_side:train"}
CLOCKS = ("seconds", "cpu_seconds")
WARM = 1  # steps before the clock starts


@dataclass(frozen=True)
class Case:
    """One benchmark.

    `batch` counts rows a step; `completions` those of each prompt where `new_tokens` are sampled.
    """

    name: str
    about: str
    rows: str  # a name in data.SOURCES
    batch: int
    longest: int  # tokens of a sequence, or of a prompt where completions are sampled
    steps: int  # timed ones
    target: str  # the figure to reach, for the table
    completions: int = 1
    new_tokens: int = 0
    passes: int = 1  # over each batch
    shape: str = "12.7M"
    trl: str = "1.16"

    def quick(self) -> Case:
        return replace(
            self,
            shape="tiny",
            batch=min(self.batch, 2),
            longest=96,
            steps=1,
            completions=min(self.completions, 2),
            new_tokens=min(self.new_tokens, 4),
        )


def main(case: Case, words: Sequence[str] | None = None, trl_path: Path | None = None) -> None:
    parser = results.parser(case.name, case.about, repeats=1)
    parser.add_argument(
        "--shape",
        choices=sorted(model.SHAPES),
        default=case.shape,
        help="model (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=case.steps, help="timed steps of a run (default: %(default)s)"
    )
    if case.passes > 1:
        about = "passes over a batch, on both sides (default: %(default)s, TRL's own)"
        parser.add_argument("--passes", type=int, default=case.passes, help=about)
    if trl_path is not None:
        parser.add_argument(
            "--trl", type=Path, default=trl_path, help=f"folder that holds TRL {case.trl}"
        )
    arguments = parser.parse_args(words)
    results.start(arguments)
    case = replace(
        case,
        shape=arguments.shape,
        steps=arguments.steps,
        passes=getattr(arguments, "passes", case.passes),
    )
    case = case.quick() if arguments.quick else case
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        work = Path(folder)
        settings = {
            **prepare(case, arguments.data, work, arguments.threads),
            "rest": arguments.rest,
        }
        try:
            runs = measure(settings, arguments.repeats, work, getattr(arguments, "trl", None))
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    results.report(summary(case, settings, runs), arguments)


def prepare(case: Case, source: Path, work: Path, threads: int) -> dict[str, Any]:
    """Write model and rows; returns what both sides are told."""
    tokenizer, shape = source / "tokenizers" / "llama2", model.SHAPES[case.shape]
    model.write_model(work / "model", shape, tokenizer)
    if case.name == "ppo":
        model.write_model(work / "reward", shape, tokenizer, score=True, seed=1)
    lengths = data.Lengths(tokenizer / "tokenizer.json")
    count = case.batch * (case.steps + WARM)
    rows, tokens = data.take(data.SOURCES[case.rows](source), lengths, count, case.longest)
    per_row = [case.completions * (size + case.new_tokens) for size in tokens]
    steps = [sum(per_row[at : at + case.batch]) for at in range(0, count, case.batch)]
    return {
        **asdict(case),
        "threads": threads,
        "work": str(work),
        "rows": str(data.write(work / "rows.jsonl", rows)),
        "tokens": steps[WARM:],
        "warm_tokens": steps[:WARM],
        "all_steps": case.steps + WARM,
    }


def measure(
    settings: dict[str, Any], repeats: int, work: Path, trl_path: Path | None
) -> dict[str, list[Measured]]:
    """The timed steps of each side.

    Both runs are alive at once and take turns; a repetition starts new processes.
    """
    steps: dict[str, list[Measured]] = {name: [] for name in SIDES}
    for repeat in range(repeats):
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(
                    Side(
                        target,
                        work / f"{name}.log",
                        trl_path if name == "trl" else None,
                        rest=settings["rest"],
                    )
                )
                for name, target in SIDES.items()
            }
            for name, side in sides.items():
                side.begin({**settings, "work": str(work / f"{name}{repeat}")})
                for _ in range(WARM - 1):
                    side.advance()
            for number, tokens in enumerate(settings["tokens"]):
                for name, side in sides.items():
                    steps[name].append({**side.advance(), "tokens": tokens})
                each = ", ".join(
                    f"{name} {done[-1]['seconds']:.2f} s" for name, done in steps.items()
                )
                print(f"step {number + 1} of {len(settings['tokens'])}: {each}", flush=True)
            ends = {name: side.advance() for name, side in sides.items()}
            check_tokens(settings, ends["trl"])
    return steps


def check_tokens(settings: Mapping[str, Any], last: Measured) -> None:
    """Compare TRL's own count of tokens that are no padding, in the `last` line of its log, with
    what this side counts.

    A row that TRL cut or left out would make it look faster. Sampled completions are counted by
    their options alone. Raises `SystemExit`.
    """
    expected = sum(settings["warm_tokens"]) + sum(settings["tokens"])
    if not settings["new_tokens"] and last["num_tokens"] != expected:
        raise SystemExit(
            f"TRL trained on {last['num_tokens']:.0f} tokens, not on the {expected} of "
            f"{settings['rows']}: "
            "it cut rows or left some out, so its times say nothing"
        )


def summary(
    case: Case, settings: dict[str, Any], steps: dict[str, list[Measured]]
) -> results.Results:
    """The table: a line a side, and the medians of the pairs' ratios."""
    rows = []
    for name, done in steps.items():
        seconds = Spread.of([step["seconds"] for step in done])
        rows.append(
            {
                "side": name,
                "tokens/s": Spread.of([step["tokens"] / step["seconds"] for step in done]).median,
                "s a step": seconds.median,
                "least": seconds.least,
                "most": seconds.most,
                "CPU s a step": Spread.of([step["cpu_seconds"] for step in done]).median,
                "stolen CPU s": fmean(step["stolen_seconds"] for step in done),
                "peak GiB": max(step["peak_bytes"] for step in done) / results.GIB,
            }
        )
    speed, cpu = (
        ratios([s[key] for s in steps["trl"]], [s[key] for s in steps["weft"]]) for key in CLOCKS
    )
    memory = rows[0]["peak GiB"] / rows[1]["peak GiB"]
    count = len(steps["weft"])
    notes = [
        f"weft is {speed} times as fast (median of {count} pairs of steps, least to most) and "
        f"takes {memory:.2f} of the "
        f"memory; to reach: {case.target}",
        f"by CPU time, which other work on the machine hardly lengthens, it is {cpu} times as fast",
        "stolen CPU s: what the host of a virtual machine took from all its processors meanwhile, "
        "a mean over the steps",
        f"{sum(settings['tokens']) / len(settings['tokens']):.0f} real tokens a step; {WARM} step "
        f"before the clock starts",
    ]
    # Folders are of one machine and one day.
    kept = {name: value for name, value in settings.items() if name != "work"} | {"rows": case.rows}
    settings = {
        **kept,
        "speed_ratio": asdict(speed),
        "cpu_ratio": asdict(cpu),
        "memory_ratio": memory,
    }
    return results.Results(case.name, rows, settings, steps, notes)
