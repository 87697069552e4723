"""One of several processes of JAX with four devices each, for `test_hosts.py`.

    python -m tests.engine.jax.processes COORDINATOR PROCESS FOLDER

Each trains, scores, samples, saves and loads with one mesh over all devices. The first writes what
it found into the folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests import environment

MESH = "2,2,2"
COUNT = 2


def measure(folder: Path, backend: str, mesh: str | None = None) -> dict[str, Any]:
    """What an engine computes in three steps."""
    from tests.engine import layouts
    from tests.engine.common import Nll, engine_of
    from tests.engine.jax.test_engine import ADAMW, METRICS, WANT, parameters
    from tests.engine.jax.test_generation import PLAIN, requests, sample

    more = {} if mesh is None else {"layout": mesh}
    options: Any = {"dtype": "float64", "dropout": 0.0, "optimizer": ADAMW, **more}
    engine: Any = engine_of(folder / "hf", **options, backend=backend)
    scores = engine.forward(layouts.batch(0), WANT).data
    steps = engine.train([layouts.batch(seed) for seed in range(3)], Nll())
    events = sample(engine, PLAIN, requests(5, copies=2))
    # All processes write their parts of the state where the first one writes, and read all of it.
    state = folder / f"state-{backend}"
    state.mkdir(exist_ok=True)
    engine.save_state(state)
    engine.save_model(folder / f"saved-{backend}", engine_tokenizer(folder))
    if backend == "jax":
        from jax.experimental import multihost_utils

        from weft.engine.jax import engine as module

        # Without a folder that all of them see, the first one writes everything.
        module.find_shared_folder = lambda d: None
        whole = folder / "state-whole"
        whole.mkdir(exist_ok=True)
        engine.save_state(whole)
        multihost_utils.sync_global_devices("written")
    again: Any = engine_of(folder / "hf", **options, backend=backend)
    again.load_state(state)
    return {
        "scores": dict(scores),
        "steps": [[step.metrics[key] for key in METRICS] for step in steps],
        "tokens": {f"{id}/{k}": [e.token for e in own] for (id, k), own in events.items()},
        "parameters": parameters(engine),
        "loaded": parameters(again),
    }


def engine_tokenizer(folder: Path) -> Any:
    from weft.data.tokenizer import Tokenizer
    from weft.engine.spec import TokenizerSpec

    return Tokenizer.load(TokenizerSpec(), str(folder / "hf"))


def main() -> None:
    environment.prepare()
    coordinator, process, folder = sys.argv[1:]
    os.environ["XLA_FLAGS"] = environment.build_xla_flags(4)
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(coordinator, COUNT, int(process))
    assert jax.device_count() == 8 and jax.local_device_count() == 4
    found = measure(Path(folder), "jax", MESH)
    torch.save(found, Path(folder) / f"found-{process}.pt")


if __name__ == "__main__":
    main()
