"""Decode steps of a CPU, several in one call, where none of them needs the host before the last.

Between two calls of a kernel the host's work takes as long as a tenth to a quarter of a small
network's step, most of it because the weights went through the caches. So the kernel goes on by
itself with the tokens that it draws, up to the first that ends a completion; the generator books a
step at a time. What was computed and is not booked yet is forgotten where anything else comes in
between: nothing knows of it but the cache's memory beyond what its slots hold.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from weft.engine.generation import sampling
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.passes import Passes
from weft.engine.generation.settings import Drawn, SettingsTable
from weft.kernels import Drawing
from weft.models.kv.slots import KVCache

SECONDS = 0.04  # that steps ahead may take: tokens are seen that much later
CREDIT = 64.0
SHARE = 0.125  # steps that may be computed in vain at first, and as a share of all


class MultiStepDecoder:
    def __init__(self, passes: Passes, rows: DecodeBatch, settings: SettingsTable) -> None:
        self._passes = passes
        self._rows = rows
        self._settings = settings
        self._drawn: list[Drawn] = []  # of the steps that are not taken yet, the next one last
        self._credit = CREDIT
        self._seconds = SECONDS  # of a step

    def drop(self) -> None:
        """Forget what was not taken."""
        self._credit -= len(self._drawn)
        self._drawn = []

    def take(self, cache: Any, joined: bool) -> Drawn | None:
        """The tokens [n] and log-probs [n] of the next step of all rows, slots 0 .. n - 1 of the
        `KVCache`, which counts the step's keys and values from now on; None where this step must be
        computed on its own, as where other rows have `joined`.
        """
        # the cache's memory is another, or the weights are
        if joined or not self._passes.is_ready(cache):
            self.drop()
        self._credit = min(CREDIT, self._credit + SHARE)
        if self._drawn:
            cache.used[: len(self._rows)] += 1
            return self._drawn.pop()
        kinds = self._rows.settings[: len(self._rows)]
        if joined or (kinds != kinds[0]).any() or not self._draws_plainly(int(kinds[0])):
            return None
        most = self._reach(cache)
        if not most or not self._passes.draws(cache):
            return None
        self._compute(cache, most)
        return self._drawn.pop()

    def _reach(self, cache: KVCache) -> int:
        """Steps that are computed in one call; one at least, where the cache has room for it."""
        most = min(
            int(SECONDS / max(self._seconds, 1e-6)), int(self._credit), self._rows.fewest_left
        )
        return min(max(1, most), cache.capacity - int(cache.used[: len(self._rows)].max()))

    def _draws_plainly(self, kind: int) -> bool:
        """Return whether rows are sampled from the whole vocabulary, except ends not allowed yet.

        They also must end by their tokens or their number alone.
        """
        spec = self._settings.specs[kind]
        needs_more = spec.greedy or spec.stop or spec.record_support or spec.top_logprobs
        return not needs_more and not sampling.limits(spec, self._settings.vocab_size)

    def _compute(self, cache: KVCache, most: int) -> None:
        rows = self._rows
        count = len(self._rows)
        kind = int(rows.settings[0])
        uniforms = torch.from_numpy(np.ascontiguousarray(rows.uniforms(most)))
        packed = cache.extend(np.arange(count), torch.from_numpy(rows.last[:count]))
        settings = self._settings
        temperature = self._settings.specs[kind].temperature
        is_stop = torch.from_numpy(settings.is_stop[kind])
        early = torch.from_numpy(settings.least[kind] - rows.count[:count])
        started = time.perf_counter()
        tokens, logprobs = self._passes.ahead(
            packed, Drawing(uniforms, is_stop, early, temperature)
        )
        self._seconds = (time.perf_counter() - started) / len(tokens)
        for token, logprob in zip(
            tokens.numpy()[::-1], logprobs.numpy().astype(np.float64)[::-1], strict=True
        ):
            self._drawn.append((token, logprob, None))
