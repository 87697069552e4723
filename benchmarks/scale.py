"""Time and memory of weft against sequence length, batch, vocabulary and group size: straight
lines, or the reason why not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import model, results
from benchmarks.pairs import Measured, Side, SideFailed

# a straight line's least R squared, and its last slope over its first
STRAIGHT, BEND = 0.99, (0.67, 1.5)
MIB = 2**20


@dataclass(frozen=True)
class Axis:
    """Two curves. The reasons say what bends time, or memory, where it is not straight."""

    name: str
    values: tuple[int, ...]
    side: str
    reason: str
    memory_reason: str = "small runs fit into what reading the model took"

    def settings(self, value: int) -> dict[str, Any]:
        """What the point at `value` measures; other sizes stay as they are."""
        lengths = {"sequence length": [value], "batch": [256] * value, "vocabulary": [256] * 4}.get(
            self.name
        )
        return {"lengths": lengths, "group": value, "prompt": 128, "new_tokens": 32}


AXES = (
    Axis(
        "sequence length",
        (512, 1024, 2048, 4096),
        "train",
        "attention takes the square of the length",
    ),
    Axis(
        "batch",
        (2, 4, 8, 16),
        "train",
        "the optimizer's part does not grow with the batch, and small products are slower",
    ),
    Axis(
        "vocabulary",
        (32_000, 64_000, 96_000, 128_000),
        "train",
        "chunks of logits have fewer rows, and each packs the matrix anew",
    ),
    Axis(
        "group size",
        (16, 32, 64, 128),
        "sample",
        "a decode step has a cost of its own besides that of its rows",
    ),
)
QUICK = {
    "sequence length": (32, 64, 96),
    "batch": (1, 2),
    "vocabulary": (32_000, 33_000),
    "group size": (2, 4),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("scale", str(__doc__), repeats=3)
    arguments = parser.parse_args(words)
    results.start(arguments)
    axes = [replace(axis, values=QUICK[axis.name]) for axis in AXES] if arguments.quick else AXES
    shape, times = model.SHAPES["tiny" if arguments.quick else "12.7M"], 1 if arguments.quick else 3
    points: dict[str, dict[int, list[Measured]]] = {
        axis.name: {value: [] for value in axis.values} for axis in axes
    }
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        work, tokenizer = Path(folder), arguments.data / "tokenizers" / "llama2"
        try:
            for axis in axes:
                for _ in range(arguments.repeats):
                    for value in axis.values:
                        size = value if axis.name == "vocabulary" else shape.vocabulary
                        path = work / f"model{size}"
                        if not path.exists():
                            model.write_model(path, replace(shape, vocabulary=size), tokenizer)
                        settings = {**axis.settings(value), "model": str(path), "times": times}
                        with Side(
                            f"benchmarks.scale_backends:{axis.side}",
                            work / "log",
                            rest=arguments.rest,
                        ) as side:
                            points[axis.name][value].append(side.begin(settings))
        except SideFailed as error:
            raise SystemExit(str(error)) from error
    rows = [row for axis in axes for row in axis_rows(axis, points[axis.name])]
    notes = [note for axis in axes for note in axis_notes(axis, points[axis.name])]
    results.report(
        results.Results("scale", rows, {"shape": shape, "rest": arguments.rest}, points, notes),
        arguments,
    )


def axis_rows(axis: Axis, points: dict[int, list[Measured]]) -> list[dict[str, Any]]:
    return [
        {
            "axis": axis.name,
            "value": value,
            "ms": 1e3 * median(run["seconds"] for run in runs),
            "peak MiB": median(run["peak_bytes"] for run in runs) / MIB,
        }
        for value, runs in points.items()
    ]


def axis_notes(axis: Axis, points: dict[int, list[Measured]]) -> list[str]:
    """For time and memory: the fit of a straight line, and how much steeper the last part is than
    the first.
    """
    notes = []
    xs = [float(value) for value in points]
    for what, key, reason in (
        ("time", "seconds", axis.reason),
        ("memory", "peak_bytes", axis.memory_reason),
    ):
        ys = [median(run[key] for run in runs) for runs in points.values()]
        fit = r_squared(xs, ys)
        bend = slope_ratio(xs, ys)
        verdict = "a straight line" if is_straight(fit, bend) else f"not a straight line: {reason}"
        notes.append(
            f"{what} against {axis.name}: R2 {fit:.3f}, last slope / first slope {bend:.2f}: "
            f"{verdict}"
        )
    return notes


def is_straight(fit: float, bend: float) -> bool:
    """Whether `r_squared` and `slope_ratio` both speak for a line: a parabola over a short range
    fits one well too.
    """
    return fit >= STRAIGHT and BEND[0] <= bend <= BEND[1]


def r_squared(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Of the least-squares line; 1 where all values are the same."""
    import numpy as np

    x, y = np.asarray(xs), np.asarray(ys)
    spread = float(((y - y.mean()) ** 2).sum())
    if spread == 0:
        return 1.0
    slope, base = np.polyfit(x, y, 1)
    return 1.0 - float(((y - (slope * x + base)) ** 2).sum()) / spread


def slope_ratio(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Slope between the last two points over that between the first two; NaN where the first one is
    flat.
    """
    first = (ys[1] - ys[0]) / (xs[1] - xs[0])
    last = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return last / first if first else float("nan")


if __name__ == "__main__":
    main()
