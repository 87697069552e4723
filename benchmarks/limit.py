"""How near the hardware's limits weft is: matrix products in training, memory bandwidth and
overhead in decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import model, results
from benchmarks.model import Shape
from benchmarks.pairs import Measured, Side, SideFailed, alternate

SIDES = {
    name: f"benchmarks.limit_backends:{name}"
    for name in ("products", "train_weft", "train_transformers", "copies", "decode")
}
BYTES = 4  # float32


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("limit", str(__doc__), repeats=5)
    arguments = parser.parse_args(words)
    results.start(arguments)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Any] = {}
    quick = arguments.quick
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, ExitStack() as stack:
        work, tokenizer = Path(folder), arguments.data / "tokenizers" / "llama2"
        sides = {
            name: stack.enter_context(Side(target, work / "log", rest=arguments.rest))
            for name, target in SIDES.items()
        }
        try:
            large, small = ("tiny", "tiny") if quick else ("40M", "12.7M")
            path = model.write_model(work / "large", model.SHAPES[large], tokenizer)
            lengths = [16, 16] if quick else [256] * 8
            runs["training"] = training(sides, str(path), lengths, arguments.repeats)
            rows += training_rows(model.SHAPES[large], lengths, runs["training"])
            print(results.table(rows), flush=True)
            path = model.write_model(work / "small", model.SHAPES[small], tokenizer)
            for batch in (2,) if quick else (16, 64):
                settings = {
                    "model": str(path),
                    "batch": batch,
                    "context": 24 if quick else 192,
                    "times": 4 if quick else 16,
                }
                name = f"decode, batch {batch}"
                runs[name] = decoding(sides, settings, arguments.repeats)
                rows += (made := decode_rows(name, model.SHAPES[small], settings, runs[name]))
                print(results.table(made), flush=True)
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    notes = [
        "the limit is measured in turn with the work, with the same threads; medians over the "
        "rounds"
    ]
    settings = {"repeats": arguments.repeats, "rest": arguments.rest}
    results.report(results.Results("limit", rows, settings, runs, notes), arguments)


def training(
    sides: dict[str, Side], path: str, lengths: list[int], repeats: int
) -> dict[str, list[Measured]]:
    settings = {"model": path, "lengths": lengths, "times": 2}
    names = ("products", "train_weft", "train_transformers")
    return alternate({name: sides[name] for name in names}, settings, repeats)


def decoding(
    sides: dict[str, Side], settings: dict[str, Any], repeats: int
) -> dict[str, list[Measured]]:
    return alternate({name: sides[name] for name in ("copies", "decode")}, settings, repeats)


def training_rows(
    shape: Shape, lengths: list[int], runs: dict[str, list[Measured]]
) -> list[dict[str, Any]]:
    """Model FLOPs utilisation: operations that the model takes, over those that the products of the
    same round make.
    """
    work = training_flops(shape, lengths)
    rows = []
    for side in ("train_weft", "train_transformers"):
        seconds = [median(run["seconds"]) for run in runs[side]]
        target = "60%" if side == "train_weft" else ""
        what = f"SFT step, {sum(lengths)} tokens, {side.removeprefix('train_')}"
        shares = [_share(work, seconds, runs["products"], rate) for rate in ("rate", "torch_rate")]
        share = f"{shares[0]:.0f}% of the fastest product, {shares[1]:.0f}% of torch.mm"
        rows.append(_row(what, 1e3 * median(seconds), share, target))
    return rows


def _share(work: float, seconds: list[float], products: list[Measured], rate: str) -> float:
    """Percent of the products' rate in the same round."""
    return 100 * median(
        work / each / peak[rate] for each, peak in zip(seconds, products, strict=True)
    )


def decode_rows(
    name: str, shape: Shape, settings: dict[str, Any], runs: dict[str, list[Measured]]
) -> list[dict[str, Any]]:
    """A decode step over the copy bandwidth, and over the bare sum of its parts, which are timed in
    turn with it.
    """
    moved = decode_bytes(shape, settings["batch"], settings["context"])
    steps = [median(run["seconds"]) for run in runs["decode"]]
    shares = [moved / step / copy["rate"] for step, copy in zip(steps, runs["copies"], strict=True)]
    parts = {
        part: median(median(run["bare"][part]) for run in runs["decode"])
        for part in runs["decode"][0]["bare"]
    }
    over = median(
        step / sum(median(seconds) for seconds in run["bare"].values())
        for step, run in zip(steps, runs["decode"], strict=True)
    )
    rows = [
        _row(name, 1e3 * median(steps), f"{100 * median(shares):.0f}% of copy bandwidth", ""),
        _row(f"{name}, over its parts", 1e3 * sum(parts.values()), f"{over:.2f}x", "at most 1.6x"),
    ]
    return rows + [
        _row(f"  {part}, bare", 1e3 * seconds, "", "") for part, seconds in parts.items()
    ]


def training_flops(shape: Shape, lengths: list[int]) -> float:
    """Forward and backward: 6 a parameter and token, 12 a head entry and pair of positions under
    the causal mask.
    """
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return 6.0 * parameters(shape) * sum(lengths) + 12.0 * shape.layers * shape.hidden * pairs


def decode_bytes(shape: Shape, batch: int, context: int) -> float:
    """Weights and keys and values, each read once."""
    return BYTES * (parameters(shape) + 2.0 * shape.layers * shape.hidden * context * batch)


def parameters(shape: Shape) -> int:
    """Those that a token meets in matrix products: attention, MLP, and the output matrix, which is
    the tied embedding.
    """
    return (
        shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
        + shape.vocabulary * shape.hidden
    )


def _row(what: str, milliseconds: float, of_limit: str, target: str) -> dict[str, Any]:
    return {"what": what, "ms": milliseconds, "of the limit": of_limit, "to reach": target}


if __name__ == "__main__":
    main()
