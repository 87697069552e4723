"""Sampling against `transformers`: `generate` on padded prompts, and its continuous batching.

Useful tokens a second.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import data, model, results
from benchmarks.pairs import Measured, Side, SideFailed, Spread, alternate, ratios

SIDES = {name: f"benchmarks.generate_backends:{name}" for name in ("weft", "padded", "continuous")}


@dataclass(frozen=True)
class Work:
    """Requests: prompts of real text of these many tokens, new tokens of each, completions of each
    prompt.
    """

    name: str
    prompts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    samples: int = 1
    target: str = ""


def works(quick: bool) -> list[Work]:
    """Equal lengths at batch 1, 16 and 64; mixed lengths; one prompt with sixteen completions."""
    scale = 16 if quick else 1
    drawn = random.Random(0)
    mixed = [
        (drawn.randint(16, 256) // scale + 1, drawn.randint(16, 128) // scale)
        for _ in range(32 // min(4, scale))
    ]
    equal = {1: "", 16: "5x", 64: "5x"}
    made = [
        Work(f"batch {size}", (64 // scale,) * size, (64 // scale,) * size, target=target)
        for size, target in equal.items()
        if not quick or size < 64
    ]
    prompts, new_tokens = zip(*mixed, strict=True)
    made.append(Work("mixed lengths", prompts, new_tokens, target="8x padded, 7x continuous"))
    return [
        *made,
        Work("1 prompt x 16", (128 // scale,), (64 // scale,), samples=4 if quick else 16),
    ]


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("generate", str(__doc__), repeats=3)
    parser.add_argument(
        "--shape",
        choices=sorted(model.SHAPES),
        default="12.7M",
        help="model (default: %(default)s)",
    )
    parser.add_argument("--only", default="", help="works whose name contains this")
    arguments = parser.parse_args(words)
    results.start(arguments)
    shape = model.SHAPES["tiny" if arguments.quick else arguments.shape]
    chosen = [work for work in works(arguments.quick) if arguments.only in work.name]
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        tokenizer = arguments.data / "tokenizers" / "llama2"
        directory = model.write_model(Path(folder) / "model", shape, tokenizer)
        ids = _text(arguments.data, tokenizer / "tokenizer.json")
        sides = {
            name: stack.enter_context(Side(target, Path(folder) / name, rest=arguments.rest))
            for name, target in SIDES.items()
        }
        runs, rows = {}, []
        try:
            for work in chosen:
                runs[work.name] = measure(work, sides, str(directory), ids, arguments.repeats)
                rows.append(row(work, runs[work.name]))
                print(results.table(rows[-1:]), flush=True)
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    notes = [
        "tokens/s: medians; ratios: medians of the pairs (least to most); the first run of each "
        "side is left out"
    ]
    settings = {
        "shape": asdict(shape),
        "works": [asdict(work) for work in chosen],
        "rest": arguments.rest,
    }
    results.report(results.Results("generate", rows, settings, runs, notes), arguments)


def measure(
    work: Work, sides: dict[str, Side], directory: str, ids: list[int], repeats: int
) -> dict[str, list[Measured]]:
    """The sides stay alive between runs: the first one of each loads, warms up and is left out."""
    starts = [
        random.Random(i).randrange(len(ids) - max(work.prompts)) for i in range(len(work.prompts))
    ]
    prompts = [ids[at : at + size] for at, size in zip(starts, work.prompts, strict=True)]
    settings = {
        "model": directory,
        "prompts": prompts,
        "new_tokens": work.new_tokens,
        "samples": work.samples,
    }
    runs = alternate(sides, settings, repeats + 1)
    wanted = work.samples * sum(work.new_tokens)
    for name, measured in runs.items():
        counts = {run["tokens"] for run in measured}
        if counts != {wanted}:
            raise SystemExit(f"{work.name}: {name} made {counts} tokens, not {wanted}")
    return {name: measured[1:] for name, measured in runs.items()}


def row(work: Work, runs: dict[str, list[Measured]]) -> dict[str, Any]:
    seconds = {name: [run["seconds"] for run in measured] for name, measured in runs.items()}
    tokens = runs["weft"][0]["tokens"]
    line: dict[str, Any] = {"work": work.name, "tokens": tokens}
    line |= {f"{name} tokens/s": tokens / Spread.of(each).median for name, each in seconds.items()}
    cpu = {name: [run["cpu_seconds"] for run in measured] for name, measured in runs.items()}
    for name in ("padded", "continuous"):
        line[f"to {name}"] = str(ratios(seconds[name], seconds["weft"]))
        line[f"by CPU time to {name}"] = ratios(cpu[name], cpu["weft"]).median
    return line | {"to reach": work.target}


def _text(source: Path, tokenizer: Path) -> list[int]:
    """Token ids of real text, long enough to cut prompts from."""
    from tokenizers import Tokenizer

    text = "\n".join(row["prompt"] + row["answer"] for row in data.instructions(source))
    return Tokenizer.from_file(str(tokenizer)).encode(text).ids


if __name__ == "__main__":
    main()
