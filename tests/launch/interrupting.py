"""Imported by a run: float64 throughout, and new weights that come after the same token of all
completions in every layout.

Each sampling but the first is held at its `WEFT_TEST_TOKEN`-th token until new weights wait, and
takes up nothing else. What it made is written into the folder `WEFT_TEST_DUMP`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from weft.engine.backends import common
from weft.interfaces.base import PendingUpdates
from weft.interfaces.generate import GenerateInterface

TOKEN, SECONDS = int(os.environ["WEFT_TEST_TOKEN"]), 300.0
RUN, GENERATE = GenerateInterface._run, GenerateInterface.generate


@dataclass
class AtToken:
    """Updates that are there at one moment."""

    updates: PendingUpdates
    asks: int | None  # the moment; None: none are there any more
    asked: int = 0

    def are_waiting(self) -> bool:
        self.asked += 1
        end = time.monotonic() + SECONDS
        while self.asked == self.asks:
            if self.updates.are_waiting():
                return True
            assert time.monotonic() < end, "no weights come"
            time.sleep(0.005)
        return False


@dataclass
class AllOf:
    """In one process what waits is done one by one: until the weights are new."""

    updates: Any
    engine: Any

    def are_waiting(self) -> bool:
        return bool(self.updates.are_waiting())

    def take(self, *, left: bool) -> bool:
        version, end = self.engine.version, time.monotonic() + SECONDS
        continues: bool = self.updates.take(left=left)
        while left and self.engine.version == version:
            assert time.monotonic() < end, "no weights come"
            self.updates.take(left=left)
            time.sleep(0.005)
        return continues


def run(self: GenerateInterface, model: Any, generator: Any, progress: Any) -> Any:
    """A generator of several turns gives one turn's tokens a step: the others' are under way."""
    turns = len(getattr(generator, "_generators", [None]))
    fresh = model.step > 0 and not any(progress.rows.values())
    asks = turns * TOKEN - (turns - 1) if fresh else None
    updates: Any = AtToken(model.updates, asks)
    return RUN(self, replace(model, updates=updates), generator, progress)


def generate(self: GenerateInterface, model: Any, batch: Any) -> Any:
    updates: Any = model.updates
    alone = updates is not None and updates._process.is_driver
    made = GENERATE(
        self, replace(model, updates=AllOf(updates, model.engine)) if alone else model, batch
    )
    count, found = self.samples_per_prompt, {}
    tokens, versions = (made.outputs.sequences(key) for key in ("completion", "versions"))
    for at, id in enumerate(made.outputs.ids):
        for k in range(count):
            found[f"{id} {k}"] = [each[at * count + k].tolist() for each in (tokens, versions)]
    folder = Path(os.environ["WEFT_TEST_DUMP"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{model.step}-{os.getpid()}.json").write_text(json.dumps(found))
    return made


GenerateInterface._run, GenerateInterface.generate = run, generate
common.choose_reading_dtype = lambda spec: torch.float64
