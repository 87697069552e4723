"""An SFT step of one model over layouts of simulated devices, a process of one thread each, and
where the time goes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import layout_clock, model, results, sft, weft_side
from benchmarks.training import WARM, prepare
from weft.launch import run
from weft.topology import Layout

LAYOUTS = ("d1", "d2", "t2", "p2", "d4", "t4", "d2t2", "d8", "d2t2p2")
QUICK = ("d1", "p2")
MICROBATCHES = 4  # of a step on one device
BYTES = 4  # float32

Step = Mapping[str, float]


def main(words: Sequence[str] | None = None) -> None:
    parser = results.parser("layouts", str(__doc__), repeats=1)
    parser.set_defaults(threads=1)
    parser.add_argument(
        "--steps", type=int, default=8, help="timed steps of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--shape",
        choices=sorted(model.SHAPES),
        default="12.7M",
        help="model (default: %(default)s)",
    )
    parser.add_argument(
        "--only", default="", help="layouts, with commas between; d1 comes first in any case"
    )
    arguments = parser.parse_args(words)
    results.start(arguments)
    case = replace(sft.CASE, steps=arguments.steps, shape=arguments.shape)
    if arguments.quick:
        case = replace(case.quick(), batch=MICROBATCHES, steps=2)
    chosen = arguments.only.split(",") if arguments.only else QUICK if arguments.quick else LAYOUTS
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        work = Path(name)
        settings = prepare(case, arguments.data, work, arguments.threads)
        timed = {each: measure(each, settings, work) for each in dict.fromkeys(("d1", *chosen))}
    shape, cores = model.SHAPES[case.shape], len(os.sched_getaffinity(0))
    rows = [row(each, timed, shape, cores) for each in timed]
    notes = [
        f"ideal: the step of d1, shared by as many processes as there are cores ({cores})",
        "exchange: in collectives and messages, on the rank that spends least there, so that "
        "waiting for others is left out",
        "waiting: in them, on the mean of ranks, beyond that; more CPU: of all ranks together, "
        "than that of d1",
        *(f"{each}: {reason(each, timed, shape, cores)}" for each in timed),
    ]
    kept = {
        "shape": case.shape,
        "batch": case.batch,
        "steps": case.steps,
        "microbatches": MICROBATCHES,
        "cores": cores,
    }
    results.report(results.Results("layouts", rows, kept, timed, notes), arguments)


def measure(layout: str, settings: Mapping[str, Any], work: Path) -> list[list[Step]]:
    """The timed steps of each rank."""
    folder = work / f"times-{layout}"
    folder.mkdir()
    os.environ[layout_clock.FOLDER] = str(folder)
    config = weft_side.sft({**settings, "work": str(work / layout)})
    config.model.layout, config.imports = layout, ["benchmarks.layout_clock"]
    config.train.pre_hooks, config.train.post_hooks = [layout_clock.BEGIN], [layout_clock.END]
    biggest = max(settings["tokens"] + settings["warm_tokens"])
    config.max_tokens_per_microbatch = max(settings["longest"], -(-biggest // MICROBATCHES))
    config.dataset.cache_dir = str(work / "rows")
    run(config)
    files = sorted(folder.iterdir(), key=lambda path: int(path.stem.removeprefix("rank")))
    return [[json.loads(line) for line in path.read_text().splitlines()][WARM:] for path in files]


def seconds(ranks: Sequence[Sequence[Step]]) -> float:
    """Of a step, until its last rank is through."""
    return median(max(each["seconds"] for each in step) for step in zip(*ranks, strict=True))


def parts(ranks: Sequence[Sequence[Step]], alone: Sequence[Sequence[Step]]) -> dict[str, float]:
    """Where the time of a step goes, as percents of it; `more CPU` as percents of that of one
    device.
    """
    steps = list(zip(*ranks, strict=True))
    whole = mean(max(each["seconds"] for each in step) for step in steps)
    least = mean(min(each["waited"] for each in step) for step in steps)
    waited = mean(mean(each["waited"] for each in step) for step in steps)
    spent, once = (
        mean(sum(each["cpu_seconds"] for each in step) for step in zip(*r, strict=True))
        for r in (ranks, alone)
    )
    return {
        "exchange, %": 100 * least / whole,
        "waiting, %": 100 * (waited - least) / whole,
        "more CPU, %": 100 * (spent / once - 1),
    }


def row(layout: str, timed: Mapping[str, Any], shape: model.Shape, cores: int) -> dict[str, Any]:
    devices = Layout.parse(layout).num_devices
    took, alone = seconds(timed[layout]), seconds(timed["d1"])
    ideal = alone / min(devices, cores)
    return {
        "layout": layout,
        "devices": devices,
        "s a step": took,
        "ideal": ideal,
        "% of it": 100 * ideal / took,
        **parts(timed[layout], timed["d1"]),
    }


def reason(layout: str, timed: Mapping[str, Any], shape: model.Shape, cores: int) -> str:
    """What a layout makes its ranks do beside the work of one device."""
    at = Layout.parse(layout)
    if at.num_devices == 1:
        return "nothing is exchanged"
    found = []
    if at.data > 1:
        mib = num_parameters(shape) * BYTES / at.tensor / 2**20
        found.append(
            f"the parameters, {mib:.0f} MiB, are gathered for each forward and each backward pass "
            f"and the gradients summed "
            "after each micro-batch, block by block; the rank with fewer tokens waits"
        )
    if at.tensor > 1:
        found.append(
            f"hidden states are summed twice a block each way, {4 * shape.layers} times a "
            f"micro-batch, with nothing to do "
            "meanwhile; norms are computed by every rank, and products are narrower"
        )
    if at.pipeline > 1:
        bubble = (at.pipeline - 1) / (MICROBATCHES + at.pipeline - 1)
        found.append(
            f"a stage waits for the first and last of {MICROBATCHES} micro-batches, "
            f"{100 * bubble:.0f}% where stages are "
            "alike, and the last has the output matrix"
        )
    if at.num_devices > cores:
        found.append(
            f"{at.num_devices} processes share {cores} cores: who is waited for may be off them"
        )
    return "; ".join(found)


def num_parameters(shape: model.Shape) -> int:
    block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * block + shape.vocabulary * shape.hidden + shape.hidden


if __name__ == "__main__":
    main()
