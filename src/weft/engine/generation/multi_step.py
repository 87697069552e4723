"""Decoding on a CPU, with several steps per call of the kernel.

With one call per step, the host's work between calls would take 10% to 25% of the time of a step in
a small network. The main reason is that the step's weights displace the host's data from the CPU's
caches. Therefore the kernel continues with the tokens that it samples itself, up to the first token
that ends a completion. The generator fetches the results one step at a time. If something else must
be computed in between, such as a prompt, steps that were not fetched are discarded. This is safe
because they have only written to parts of the KV cache that no slot uses yet.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from weft.engine.generation import sampling
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.passes import DecoderPasses
from weft.engine.generation.settings import SampledRows, SettingsTable
from weft.kernels import DrawParameters
from weft.models.kv.slots import KVCache

MAX_SECONDS = 0.04  # maximum duration of a call, by which tokens are delayed
MAX_CREDIT = 64.0
CREDIT_PER_STEP = 0.125  # discarded steps allowed per step; `MAX_CREDIT` are allowed at first


class MultiStepDecoder:
    """Decoder that computes several steps per call and returns their tokens one step at a time."""

    def __init__(self, passes: DecoderPasses, rows: DecodeBatch, settings: SettingsTable) -> None:
        self._passes = passes
        self._rows = rows
        self._settings = settings
        self._pending_tokens: list[
            SampledRows
        ] = []  # tokens of the steps not yet returned, the next one last
        self._credit = MAX_CREDIT
        self._seconds = MAX_SECONDS  # seconds of one step

    def drop(self) -> None:
        """Discard the steps that were computed but not returned."""
        self._credit -= len(self._pending_tokens)
        self._pending_tokens = []

    def take(self, cache: Any, joined: bool) -> SampledRows | None:
        """Return the next step's tokens [n] and log-probs [n] for all n rows.

        Row i is slot i of `cache`, a `KVCache`. If tokens are returned, the step's keys and values
        are in the cache. Returns None if the caller must compute the step itself. This is always
        the case if `joined` is True, which means that the step also computes prompts.
        """
        # the memory of the cache or of the weights has changed
        if joined or not self._passes.is_ready(cache):
            self.drop()
        self._credit = min(MAX_CREDIT, self._credit + CREDIT_PER_STEP)
        if self._pending_tokens:
            cache.used[: len(self._rows)] += 1
            return self._pending_tokens.pop()
        kinds = self._rows.settings[: len(self._rows)]
        if joined or (kinds != kinds[0]).any() or not self._samples_whole_vocabulary(int(kinds[0])):
            return None
        most = self._choose_num_steps(cache)
        if not most or not self._passes.can_sample(cache):
            return None
        self._compute_steps(cache, most)
        return self._pending_tokens.pop()

    def _choose_num_steps(self, cache: KVCache) -> int:
        """Return the number of steps to compute in one call.

        It is 0 if the cache has no room for a step, otherwise at least 1.
        """
        most = min(
            int(MAX_SECONDS / max(self._seconds, 1e-6)), int(self._credit), self._rows.min_remaining
        )
        return min(max(1, most), cache.capacity - int(cache.used[: len(self._rows)].max()))

    def _samples_whole_vocabulary(self, kind: int) -> bool:
        """Return whether the kernel can sample with the settings that have index `kind`.

        The kernel can only sample from the whole vocabulary. It does not support greedy decoding,
        sampling limits, stop texts, `record_support` or `top_logprobs`. It supports a minimum
        length: until that is reached, it excludes the stop ids.
        """
        spec = self._settings.specs[kind]
        needs_more = spec.greedy or spec.stop or spec.record_support or spec.top_logprobs
        return not needs_more and not sampling.restricts_vocabulary(spec, self._settings.vocab_size)

    def _compute_steps(self, cache: KVCache, most: int) -> None:
        rows = self._rows
        count = len(self._rows)
        kind = int(rows.settings[0])
        uniforms = torch.from_numpy(np.ascontiguousarray(rows.compute_uniforms(most)))
        packed = cache.extend(np.arange(count), torch.from_numpy(rows.last[:count]))
        settings = self._settings
        temperature = self._settings.specs[kind].temperature
        is_stop = torch.from_numpy(settings.is_stop[kind])
        early = torch.from_numpy(settings.min_new_tokens[kind] - rows.count[:count])
        started = time.perf_counter()
        tokens, logprobs = self._passes.run_ahead(
            packed, DrawParameters(uniforms, is_stop, early, temperature)
        )
        self._seconds = (time.perf_counter() - started) / len(tokens)
        for token, logprob in zip(
            tokens.numpy()[::-1], logprobs.numpy().astype(np.float64)[::-1], strict=True
        ):
            self._pending_tokens.append((token, logprob, None))
