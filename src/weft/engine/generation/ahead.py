"""Decode steps that sample on a GPU, and are launched before the tokens of the last step are read.

Between two steps, the host reads the tokens, finds the sequences that ended, and prepares the next
step. If the next step is launched before this work, the GPU need not wait for it. The step's input
tokens are then read on the device, from `SampledSteps.last_tokens`. Some of these tokens can end
their sequences; what the step computes for such a sequence is discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.device import record_event
from weft.engine.generation.blocks import PageManager
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.sampling import SampledRows, SettingsTable
from weft.models.kv.pages import TOKEN, PagedCache, PagePool
from weft.models.network.packed import Packed

# Columns of a step's input, before those of `PagedCache.step`: the bytes of the row's random number
# and of its temperature, both float64, and the index of its token among `last_tokens` and the
# tokens of the input.
NUMBERS = slice(0, 4)
SOURCE = 4
SAMPLING_COLUMNS = 5

RunStep = Callable[[str, npt.NDArray[np.int32]], Tensor]


@dataclass(frozen=True)
class LaunchedStep:
    """Decode step that the device computes or has computed.

    After `wait`, `results` [R, 2] contains the token and the log-prob of each row, as float64 in
    host memory.
    """

    cache: PagedCache
    results: Tensor
    wait: Callable[[], None]


class SampledSteps:
    """Runner of decode steps that sample on the device, at most one of which is launched ahead.

    Args:
        device: Device of the network.
        max_rows: Maximum number of rows of a step, padding included.
        run: Function that launches a step, given its kind ("greedy" or "sampled") and its input. It
            returns tokens and log-probs, float64 [R, 2] on the device.
        can_go_ahead: False if `run` waits for the device. Then a step ahead would only delay the
            tokens of the step before.

    Attributes:
        last_tokens: Tokens that the last step sampled, int64 [max_rows] on the device.
    """

    def __init__(
        self, device: torch.device, max_rows: int, run: RunStep, *, can_go_ahead: bool = True
    ) -> None:
        self._device = device
        self._run = run
        self._can_go_ahead = can_go_ahead
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        # While the results of one step are read, the next step writes to the other buffer.
        self._results, self._next_results = (
            torch.zeros(max_rows, 2, dtype=torch.float64, pin_memory=device.type == "cuda")
            for _ in range(2)
        )
        self._ahead: LaunchedStep | None = None

    def sample(
        self, cache: PagedCache, pages: PageManager, rows: DecodeBatch, settings: SettingsTable
    ) -> Callable[[], SampledRows] | None:
        """Append the last tokens of all rows to `cache`, and sample the next tokens.

        Returns a function that waits for the tokens. Before it waits, it launches the next step, if
        this is possible. Returns None and computes nothing if these rows cannot be sampled in this
        way (see `SettingsTable.build_graph_sampling`).
        """
        count = len(rows)
        step = self._ahead
        if step is not None and step.cache is cache:
            self._ahead = None
            cache.used[:count] += 1
            order = rows.launch_rows[:count].copy()
        else:
            self.drop()
            step = self._launch(cache, rows, settings)
            order = np.arange(count)
        if step is None:
            return None

        def wait_for_tokens() -> SampledRows:
            # Rows that were added since then are not part of this step.
            if self._can_go_ahead and settings.decodes_ahead and len(rows) == count:
                self._launch_ahead(cache, pages, rows, settings, order)
            step.wait()
            tokens, logprobs = step.results.numpy()[order].T
            return tokens.astype(np.int64), logprobs.copy(), None

        return wait_for_tokens

    def drop(self) -> None:
        """Discard the step that was launched ahead, after waiting for it."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None

    def build_packed(self, pool: PagePool, step: Tensor) -> tuple[Packed, Tensor, Tensor]:
        """Return the network's input for a step, and uniforms and temperatures, both float64 [R].

        `step` is the input of the step, int32 [R, C] on the device.
        """
        numbers = step[:, NUMBERS].clone(memory_format=torch.contiguous_format)
        uniforms, temperatures = numbers.view(torch.float64).unbind(1)
        columns = step[:, SAMPLING_COLUMNS:]
        candidates = torch.cat([self.last_tokens, columns[:, TOKEN].long()])
        tokens = candidates.index_select(0, step[:, SOURCE])
        return pool.build_packed(columns, tokens), uniforms, temperatures

    def _launch_ahead(
        self,
        cache: PagedCache,
        pages: PageManager,
        rows: DecodeBatch,
        settings: SettingsTable,
        order: npt.NDArray[np.int64],
    ) -> None:
        """Launch the step after the current one, whose tokens are not known yet.

        `order[r]` is the row of the current step whose token belongs to row r. Nothing is launched
        if all sequences end at their limits, or if the pages are not yet reserved.
        """
        count = len(rows)
        is_last = (rows.count[:count] + 1 >= rows.limit[:count]).all()
        num_pages = cache.pool.pages.num_used + _count_new_pages(cache, count)
        if not is_last and num_pages <= pages.num_used:
            self._ahead = self._launch(cache, rows, settings, order)
        if self._ahead is not None:
            rows.launch_rows[:count] = np.arange(count)
            cache.used[:count] -= 1  # counted when the result is used

    def _launch(
        self,
        cache: PagedCache,
        rows: DecodeBatch,
        settings: SettingsTable,
        order: npt.NDArray[np.int64] | None = None,
    ) -> LaunchedStep | None:
        """Launch a step for all rows, and return it.

        If `order` is given, the step is launched ahead, and reads the token of row r at
        `last_tokens[order[r]]`. Returns None and launches nothing if a graph cannot sample these
        rows.
        """
        count = len(rows)
        sampling = settings.build_graph_sampling(rows.settings[:count], rows.count[:count])
        if sampling is None:
            return None
        unknown = 0 if order is None else 1  # tokens of each row that are not known yet
        uniforms = rows.compute_uniforms(1, skip=unknown)[0]
        numbers = np.stack([uniforms, sampling.temperatures], axis=1).view(np.int32)
        sources = len(self.last_tokens) + np.arange(count) if order is None else order
        columns = cache.step(range(count), rows.last[:count])
        inputs = np.concatenate([numbers, sources[:, None].astype(np.int32), columns], axis=1)
        output = self._run("greedy" if sampling.greedy else "sampled", inputs)
        self._results, self._next_results = self._next_results, self._results
        results = self._results[:count]
        results.copy_(output, non_blocking=True)
        return LaunchedStep(cache, results, record_event(self._device))


def _count_new_pages(cache: PagedCache, count: int) -> int:
    """Return how many pages one more token in each of the first `count` rows takes.

    Each row has decoded a token, so it shares its last page with no other row: no page is copied.
    """
    num_tokens = cache.before[:count] + cache.used[:count]
    num_places = cache.tables.page_counts[:count] * cache.tables.pages.page_size
    return int((num_tokens == num_places).sum())
