"""weft's engine as `limit` and `scale` use it: built from a model directory, fed with random
tokens, timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any


def each(run: Callable[[], object], times: int, warm: int = 1) -> list[float]:
    """Seconds of `times` calls, after `warm` others."""
    found = []
    for _ in range(warm + times):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found[warm:]


def batch_of(lengths: list[int]) -> Any:
    """Sequences of random tokens: a prompt of one token, and a completion."""
    import torch

    from weft.data.sample import SequenceSample

    random = torch.Generator().manual_seed(0)
    data = {
        "prompt": torch.ones(len(lengths), dtype=torch.int64),
        "completion": torch.randint(3, 1000, (sum(lengths) - len(lengths),), generator=random),
    }
    sizes = {"prompt": [[1] for _ in lengths], "completion": [[length - 1] for length in lengths]}
    return SequenceSample.from_groups([str(i) for i in range(len(lengths))], sizes, data)


@cache
def trained(path: str) -> Any:
    from weft.engine.backends.torch import torch_backend
    from weft.engine.spec import ModelSpec, Schedule
    from weft.topology import Layout

    return torch_backend(
        ModelSpec(path=path, device="cpu", trained=True, schedule=Schedule(10_000, 0)), Layout()
    )


@cache
def frozen(path: str) -> Any:
    from weft.engine.backends.torch import torch_backend
    from weft.engine.spec import ModelSpec
    from weft.topology import Layout

    return torch_backend(ModelSpec(path=path, device="cpu"), Layout())
