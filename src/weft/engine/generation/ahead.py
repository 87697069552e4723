"""Decode steps of a CPU, several in one call, where none of them needs the host before the last.

Between two calls of a kernel the host's work takes as long as a tenth to a quarter of a small network's step, most of it
because the weights went through the caches. So the kernel goes on by itself with the tokens that it draws, up to the first that
ends a completion; the generator books a step at a time. What was computed and is not booked yet is forgotten where anything
else comes in between: nothing knows of it but the cache's memory beyond what its slots hold.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.engine.generation import sampling
from weft.engine.generation.rows import Rows
from weft.engine.generation.settings import SettingsTable
from weft.models.kv_cache import KVCache
from weft.models.native import decode
from weft.models.rope import CHANGING
from weft.models.transformer import Transformer

SECONDS = 0.04  # that steps ahead may take: tokens are seen that much later
Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


class Ahead:
    def __init__(self, network: Transformer, rows: Rows, settings: SettingsTable) -> None:
        self._network, self._rows, self._settings = network, rows, settings
        self._drawn: list[Drawn] = []  # of the steps that are not taken yet, the next one last
        self._reach = 1  # steps at once, at most: fewer after some were forgotten
        self._seconds = 0.0  # of a step

    @classmethod
    def over(cls, network: object, rows: Rows, settings: SettingsTable) -> Ahead | None:
        """None where the kernel does not draw this network's tokens."""
        if not isinstance(network, Transformer) or network.config.final_softcap is not None:
            return None
        rope = network.config.rope
        fits = decode.fits(network.config) and (rope is None or rope.scaling not in CHANGING)
        return cls(network, rows, settings) if fits else None

    def drop(self) -> None:
        """Forget what was not taken."""
        if self._drawn:
            self._drawn, self._reach = [], 1

    def take(self, cache: Any) -> Drawn | None:
        """The tokens [n] and log-probs [n] of the next step of all rows, slots 0 .. n - 1 of the `KVCache`, which counts the
        step's keys and values from now on; None where that step is to be computed by itself."""
        if cache.prepared is None:  # its memory is another, or the weights are
            self.drop()
        if self._drawn:
            cache.used[: len(self._rows)] += 1
            return self._drawn.pop()
        if not self._draws_plainly():
            return None
        rows, count = self._rows, len(self._rows)
        most = min(self._reach, rows.fewest_left, cache.capacity - int(cache.used[:count].max()))
        if self._seconds:
            most = min(most, int(SECONDS / self._seconds))
        at = decode.prepared(self._network, cache, count) if most > 1 else None
        if at is None:
            self._reach = max(self._reach, 2)
            return None
        self._compute(at, cache, most)
        return self._drawn.pop()

    def _draws_plainly(self) -> bool:
        """Whether all rows are drawn from the whole vocabulary, and end by their tokens or their number."""
        [spec, *others] = self._settings.specs
        if others or spec.greedy or spec.stop or spec.min_new_tokens or spec.record_support:
            return False
        return not sampling.limits(spec, self._network.config.vocab_size)

    def _compute(self, at: decode.Prepared, cache: KVCache, most: int) -> None:
        rows, count, spec = self._rows, len(self._rows), self._settings.specs[0]
        uniforms = torch.from_numpy(rows.uniforms(most))
        packed = cache.extend(np.arange(count), torch.from_numpy(rows.last[:count]))
        is_stop = torch.from_numpy(self._settings.is_stop[0])
        started = time.perf_counter()
        tokens, logprobs = decode.run_ahead(at, packed, uniforms, is_stop, spec.temperature)
        self._seconds, self._reach = (time.perf_counter() - started) / len(tokens), 2 * self._reach
        self._drawn = list(zip(tokens.numpy(), logprobs.numpy().astype(np.float64), strict=True))[::-1]
