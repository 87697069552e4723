"""Programs that a job of the Slurm tests runs in place of weft: `python -m tests.launch.on_nodes
NAME`.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def count(out: Path) -> int:
    """What Ray sees: its nodes, and what a task on each of them has in its environment."""
    ray = importlib.import_module("ray")
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]

    @ray.remote(num_cpus=0)
    def look() -> tuple[str, str, str | None]:
        node = ray.get_runtime_context().get_node_id()
        return node, os.environ.get("GREETING", ""), os.environ.get("HF_TOKEN")

    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    seen = ray.get(
        [look.options(scheduling_strategy=strategy(node, soft=False)).remote() for node in nodes]
    )
    out.write_text(json.dumps({"nodes": len(nodes), "seen": seen, "cwd": str(Path.cwd())}))
    return 7


def wait(out: Path) -> int:
    """Runs until SIGTERM, takes a second to end, and says so."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    out.write_text("waits")
    while not told:
        time.sleep(0.05)
    time.sleep(1)
    out.write_text("ended")
    return 128 + told[0]


if __name__ == "__main__":
    sys.exit({"count": count, "wait": wait}[sys.argv[1]](Path(sys.argv[2])))
