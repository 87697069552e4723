"""Estimated training speed next to published rows: tokens per second and GPU, in bfloat16.

    python -m benchmarks.gpu_training

The rows are those of the systems named, with their kernels and layouts, as far as weft has these
layouts. One constant was adjusted to four of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks import results
from benchmarks.gpu_rates import MODELS, Model, build_sizes
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.devices import find_gpu_rates
from weft.planner.plan_file import format_layout
from weft.topology import Layout, Mesh

TITAN_8B = "torchtitan, 2024-12, tables 1 and 3"
TITAN_TENSOR = "torchtitan, 2025-06, async TP page"
TITAN_A100 = "torchtitan, 2024, docs/performance.md"
AUTOMODEL = "NeMo AutoModel, performance summary"

LLAMA_8B = Model(32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_7B = Model(32, 4096, 32, 32, 128, 11008, 32000)
QWEN_7B = Model(28, 3584, 28, 4, 128, 18944, 152064)
QWEN_06B = Model(28, 1024, 16, 8, 128, 3072, 151936)


class Row(NamedTuple):
    """A published training speed.

    `sequences` of `length` tokens are a micro-batch of a data-parallel rank, which has `parts` of
    them in a step. `published` is in tokens per second and GPU. `recompute` is 1 if all layers are
    recomputed, and `rank` that of LoRA adapters, or 0. The constant `SUSTAINED_SHARE` was adjusted to
    the rows with `fits`, the others are held out.
    """

    name: str
    model: Model
    gpu: str
    layout: Layout
    sequences: int
    length: int
    parts: int
    published: float
    source: str
    recompute: int = 0
    rank: int = 0
    fits: bool = False


ROWS = [
    Row("8B", LLAMA_8B, "H100", Layout(8, 8), 2, 8192, 1, 5762, TITAN_8B),
    Row("8B, compiled", LLAMA_8B, "H100", Layout(8, 8), 2, 8192, 1, 6667, TITAN_8B, fits=True),
    Row("8B", LLAMA_8B, "H100", Layout(128, 128), 2, 8192, 1, 5605, TITAN_8B),
    Row("8B, compiled", LLAMA_8B, "H100", Layout(128, 128), 2, 8192, 1, 6514, TITAN_8B),
    Row("8B, compiled", LLAMA_8B, "H100", Layout(8, 8, 8), 12, 8192, 1, 4378, TITAN_TENSOR),
    Row(
        "70B, recomputed",
        MODELS["70B"],
        "H100",
        Layout(32, 32, 8),
        16,
        8192,
        1,
        597.3,
        TITAN_TENSOR,
        recompute=1,
    ),
    Row("8B, LoRA", LLAMA_8B, "H100", Layout(), 2, 4096, 16, 12473, AUTOMODEL, rank=8, fits=True),
    Row("Qwen2.5 7B, LoRA", QWEN_7B, "H100", Layout(), 2, 4096, 16, 14110, AUTOMODEL, rank=8),
    Row("7B", LLAMA_7B, "H100", Layout(8, 8), 2, 4096, 1, 11400, "MaxText, JAX-Toolbox", fits=True),
    Row("0.6B", QWEN_06B, "H100", Layout(), 1, 8192, 8, 26000, "prime-rl, baselines, 2026-01"),
    Row("8B", LLAMA_8B, "A100", Layout(64, 64), 1, 8192, 1, 2973, TITAN_A100, fits=True),
    Row(
        "70B, recomputed",
        MODELS["70B"],
        "A100",
        Layout(64, 64),
        1,
        8192,
        1,
        331,
        TITAN_A100,
        recompute=1,
    ),
]


def estimate_row(row: Row) -> float:
    """Return the estimated tokens per second and GPU."""
    network = build_sizes(row.model)
    shape = network.shape
    settings = replace(network.settings, trained=True, recompute=row.recompute)
    if row.rank:
        ends = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.key)
        ends += 3 * (shape.hidden + shape.inner)
        shape = replace(shape, trainable=row.rank * ends * shape.layers)
    network = replace(network, shape=shape, settings=settings)
    sequences = row.sequences * row.parts * row.layout.data
    tokens = row.sequences * row.length
    # All tokens are trained; micro-batches have whole sequences.
    load = CallWorkload("train_step", sequences, 0, row.length, microbatch=tokens)
    mesh = Mesh.on_first_devices(row.layout)
    rates = find_gpu_rates(row.gpu, "bfloat16")
    seconds = estimate_call(network, load, mesh, rates).seconds
    return sequences * row.length / seconds / row.layout.num_devices


def main(words: Sequence[str] | None = None) -> None:
    """Estimate the rows, and print and write the table and its median errors."""
    parser = results.parser("gpu_training", str(__doc__), repeats=1)
    arguments = parser.parse_args(words)
    results.start(arguments)
    rows = []
    for row in ROWS:
        found = estimate_row(row)
        rows.append(
            {
                "model": row.name,
                "GPUs": f"{row.layout.num_devices} x {row.gpu}",
                "layout": format_layout(row.layout),
                "published": float(row.published),
                "weft": found,
                "error, %": 100 * (found / row.published - 1),
                "fit": "*" * row.fits,
                "source": row.source,
            }
        )
    notes = []
    for mark, name in (("*", "fit"), ("", "held-out")):
        errors = [abs(row["error, %"]) for row in rows if row["fit"] == mark]
        notes.append(f"median error of {name} rows {statistics.median(errors):.1f}%")
    report = results.Results("gpu_training", rows, notes=notes)
    results.report(report, arguments)


if __name__ == "__main__":
    main()
