"""`backend=jax` against the torch engine without weft's own kernels, and against `transformers`.

An SFT step on sequences with the lengths of real rows, and completions of one batch of prompts.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import data, model, results
from benchmarks.pairs import Measured, Side, SideFailed, Spread, alternate, ratios

SIDES = {name: f"benchmarks.jax_backends:{name}" for name in ("jax", "torch", "transformers")}
TARGET = "within 2x of torch without its kernels"
BATCH, LONGEST = 8, 512  # sequences of an SFT step, and tokens of the longest
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 64


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("jax_engine", str(__doc__), repeats=9)
    parser.add_argument(
        "--shape",
        choices=sorted(model.SHAPES),
        default="12.7M",
        help="model (default: %(default)s)",
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    shape = model.SHAPES["tiny" if arguments.quick else arguments.shape]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        tokenizer = arguments.data / "tokenizers" / "llama2"
        directory = model.write_model(Path(folder) / "model", shape, tokenizer)
        works = build_works(arguments.data, tokenizer / "tokenizer.json", quick=arguments.quick)
        sides = {
            name: stack.enter_context(Side(target, Path(folder) / name, rest=arguments.rest))
            for name, target in SIDES.items()
        }
        runs: dict[str, dict[str, list[Measured]]] = {}
        try:
            for name, work in works.items():
                settings = {**work, "work": name, "model": str(directory)}
                # the first run of each side loads and compiles
                measured = alternate(sides, settings, arguments.repeats + 1)
                runs[name] = {side: each[1:] for side, each in measured.items()}
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    notes = [
        "ratios are times as fast as the side, medians of the pairs (least to most)",
        f"to reach: {TARGET}, a ratio of 0.5",
        "the first run of each side, which compiles, is left out",
    ]
    rows = [build_row(name, each) for name, each in runs.items()]
    settings = {"shape": asdict(shape), "works": works, "rest": arguments.rest}
    results.report(results.Results("jax_engine", rows, settings, runs, notes), arguments)


def build_works(source: Path, tokenizer: Path, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Return what each side does, by name."""
    count, longest = (2, 96) if quick else (BATCH, LONGEST)
    rows = data.instructions(source)
    _, lengths = data.take(rows, data.Lengths(tokenizer), count, longest)
    drawn = random.Random(0)
    size, new, batch = (8, 4, 2) if quick else (PROMPT_TOKENS, NEW_TOKENS, PROMPTS)
    prompts = [[drawn.randrange(3, 1000) for _ in range(size)] for _ in range(batch)]
    return {
        "sft": {"lengths": lengths},
        "decode": {"prompts": prompts, "new_tokens": [new] * batch, "samples": 1},
    }


def build_row(name: str, runs: Mapping[str, list[Measured]]) -> dict[str, Any]:
    """Return one line of the table: tokens per second of each side, and their ratios."""
    seconds = {side: [run["seconds"] for run in each] for side, each in runs.items()}
    cpu = {side: [run["cpu_seconds"] for run in each] for side, each in runs.items()}
    row: dict[str, Any] = {"work": name}
    for side, each in runs.items():
        row[f"{side} tokens/s"] = each[0]["tokens"] / Spread.of(seconds[side]).median
    for side in ("torch", "transformers"):
        row[f"jax to {side}"] = str(ratios(seconds[side], seconds["jax"]))
        row[f"by CPU time to {side}"] = ratios(cpu[side], cpu["jax"]).median
    return row


if __name__ == "__main__":
    main()
