"""A profile with numbers that a hand can follow, and its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.planner.profile import ProfileMachine, ShapeKey, build_contents

MACHINE = ProfileMachine("hand, 2 cores", "2.13.0")
KEY = ShapeKey(
    hidden=100, query=100, key=50, inner=400, embedding=100_000, gated=True, experts=False
)
TOKENS = [100, 400, 400]
LENGTHS = [100, 100, 400]


def passes(factor: float, *, trains: bool, trained: int = 0) -> dict[str, Any]:
    """A layer takes `factor` us per token and as much again for sequences of 400, backward twice."""
    times = {
        "tokens": TOKENS,
        "lengths": LENGTHS,
        "begin": [1e-3, 1e-3, 1e-3],
        "blocks": [factor * 1e-4, factor * 4e-4, factor * 8e-4],
        "head": [2e-3, 8e-3, 8e-3],
        "trained": trained,
    }
    if trains:
        times["blocks_backward"] = [2 * each for each in times["blocks"]]
        times["embedding_backward"] = [3e-3, 3e-3, 3e-3]
        times["update"] = [1e-3 + 1e-8 * trained] * 3
    return times


def decoding(factor: float) -> dict[str, Any]:
    """A step takes 1 ms and, for each sequence, 0.1 ms and 1 us per token before; the rest 2 ms."""
    grid = [(batch, context) for batch in (1, 10) for context in (100, 200)]
    return {
        "batches": [batch for batch, _ in grid],
        "contexts": [context for _, context in grid],
        "block": [factor * (1e-3 + batch * (1e-4 + 1e-6 * context)) for batch, context in grid],
        "rest": [2e-3 for _ in grid],
        "prefill_block": [1e-6 * batch * context for batch, context in grid],
        "prefill_rest": [1e-3 for _ in grid],
    }


def links() -> dict[str, Any]:
    """Messages of 1 GB/s and 0.1 ms; computing together takes a quarter longer."""
    sizes = [1000, 1_000_000]
    seconds = [1e-4 + size / 1e9 for size in sizes]
    names = ("sum", "gather", "scatter", "send")
    return {
        **{name: [sizes, seconds] for name in names},
        "contention": 1.25,
        "startup_seconds": 5.0,
        "joined": {},
    }


def contents(**changes: Any) -> dict[str, Any]:
    """Contents of a profile's file for `KEY`, changed at the top level."""
    made = build_contents(
        KEY,
        MACHINE,
        dtype="float32",
        tensor=1,
        threads=1,
        created="2026-01-02T03:04:05+00:00",
        measured=measured(),
    )
    return {**made, **changes}


def measured() -> Mapping[str, Any]:
    return {
        "passes": {
            "score": passes(1.0, trains=False),
            "full": passes(1.5, trains=True, trained=1_000_000),
            "adapters": passes(1.2, trains=True, trained=10_000),
        },
        "decoding": {
            "plain": decoding(1.0),
            "modules": decoding(1.5),
            "adapters": decoding(2.0),
        },
        "links": links(),
        "waits": {},
    }
