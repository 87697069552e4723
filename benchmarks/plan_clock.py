"""What runs on every device of `benchmarks.plan`: a hook after the training call, which writes down
the processor time of the device's process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from weft.registry import register_function

HOOK = "benchmark_plan_clock"
FOLDER = "WEFT_BENCH_PLAN"  # where each rank writes


def write_time(model: object) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    with (Path(os.environ[FOLDER]) / f"rank{rank}.txt").open("a", encoding="utf-8") as file:
        file.write(f"{time.process_time()}\n")


register_function(HOOK, write_time)
