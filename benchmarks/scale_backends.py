"""One point of a scaling curve: seconds of a step and peak memory, in a process that does nothing
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.engines import batch_of, each, frozen, trained
from benchmarks.memory import PeakMemory
from benchmarks.pairs import Pause

Settings = Mapping[str, Any]


def train(settings: Settings, pause: Pause) -> dict[str, Any]:
    """Optimizer steps on sequences of `lengths` tokens."""
    import weft.engine.backends.torch  # noqa: F401 - before memory is counted
    from weft.algorithms.sft import SFTLoss

    memory = PeakMemory()
    engine, batch = trained(settings["model"]), batch_of(settings["lengths"])
    seconds = each(lambda: engine.train([batch], SFTLoss()), settings["times"])
    return {"seconds": median(seconds), "peak_bytes": memory.bytes}


def sample(settings: Settings, pause: Pause) -> dict[str, Any]:
    """`group` completions of one prompt, sampled to `new_tokens` each."""
    import weft.engine.backends.torch  # noqa: F401 - before memory is counted
    from weft.engine.base import Request
    from weft.engine.spec import GenerationSpec

    memory = PeakMemory()
    engine = frozen(settings["model"])
    prompt = [5 + i for i in range(settings["prompt"])]
    requests = [Request(id="prompt", k=k, prompt=prompt) for k in range(settings["group"])]

    def run() -> None:
        with engine.generating(GenerationSpec(max_new_tokens=settings["new_tokens"])) as generator:
            generator.submit(requests)
            while not generator.idle:
                generator.step()

    return {"seconds": median(each(run, settings["times"])), "peak_bytes": memory.bytes}
