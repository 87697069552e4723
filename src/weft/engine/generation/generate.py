"""Generator with continuous batching on the engine's weights: one token per sequence and step.

    with open_generator(network, spec, device=..., version=..., eos_ids=...) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step(): ...

A completion depends on its prompt, its (id, k), the step and the seed, and not on the other
sequences: random numbers are hashes (`weft.randomness`), and rows are computed independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from itertools import repeat
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft import randomness
from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.device import using
from weft.engine.generation.budgets import default_budget
from weft.engine.generation.caches import Cache, KeptPages
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.decoder import Decoder, PutsOff
from weft.engine.generation.prefixes import Prefix
from weft.engine.generation.requests import check_partial, limit_of, prompt_of
from weft.engine.generation.scheduler import Budget, Chunk, Fill, Scheduler
from weft.engine.generation.scheduler import Sequence as Live
from weft.engine.generation.settings import Drawn, SettingsTable, Settle, drawn_here, joined
from weft.engine.generation.stops import StopText
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, NotFinite
from weft.kernels import kept_wide, put


@contextmanager
def open_generator(
    network: Decoder,
    spec: GenerationSpec,
    *,
    device: torch.device,
    version: int,
    eos_ids: Iterable[int],
    budget: Budget | None = None,
    settle: Settle = drawn_here,
    kept: KeptPages | None = None,
) -> Iterator[BatchGenerator]:
    """Open a generator on `network`, which is in evaluation mode until it is closed.

    `version` is the weight version that tokens carry. A completion ends with one of `eos_ids`,
    `spec.stop_ids` or `spec.stop`; the latter needs the spec's tokenizer (`ConfigError` without
    it). `budget` defaults to what the device's memory allows. `kept` has the pages and graphs that
    generators of one network pass on to the next.

    Ranks that generate together run the same steps: they need equal budgets, and a `settle` that
    returns the same tokens on all of them.
    """
    if spec.stop and spec.tokenizer is None:
        raise ConfigError(
            f"gen.stop={spec.stop}: stop texts need a tokenizer, and this role has none"
        )
    mode = network.training
    network.train(False)
    try:
        stop_ids = frozenset([*eos_ids, *spec.stop_ids])
        kept_outside = kept is not None
        kept = kept or KeptPages()
        dtype = next(network.parameters()).dtype
        budget = budget or default_budget(
            network.config, device, dtype, spec.kv_cache_gb, kept.num_bytes
        )
        generator = BatchGenerator(network, spec, device, version, stop_ids, budget, settle, kept)
        try:
            yield generator
        finally:
            generator.close()
            if not kept_outside:
                kept.drop()
    finally:
        network.train(mode)


class Head:
    """Output layer of a network.

    On devices where each product would copy the matrix to float32, the copy is made once.
    """

    def __init__(self, network: Decoder) -> None:
        self._network = network

    def logits(self, states: Tensor) -> Tensor:
        """Return logits [R, V] of hidden states [R, hidden]."""
        return self._network.next_token_logits(states, self._wide)

    @cached_property
    def _wide(self) -> Tensor | None:
        matrix = self._network.output_matrix
        return None if matrix is None else kept_wide(matrix)


class BatchGenerator:
    """Generator with continuous batching; implements `weft.engine.base.Generator`.

    Running sequences are rows 0 to n - 1 of the KV cache.
    """

    def __init__(
        self,
        network: Decoder,
        spec: GenerationSpec,
        device: torch.device,
        version: int,
        stop_ids: frozenset[int],
        budget: Budget,
        settle: Settle,
        kept: KeptPages,
    ) -> None:
        self._network = network
        self._device = device
        self._version = version
        self._settle = settle
        self._kept = kept
        self._caches = kept.take(network, device, budget)
        self._head = Head(network)
        self._scheduler = Scheduler(budget, self._caches.blocks)
        self._least_rows = self._caches.least_rows
        self._settings = SettingsTable(spec, stop_ids, network.vocab_size)
        self._rows = DecodeBatch()
        self._multi_step = self._caches.multi_step(self._rows, self._settings)
        self._cache: Cache | None = None
        self._drawn: Callable[[], Drawn] | None = (
            None  # waits for the tokens of the step in progress
        )
        self._held: dict[Prefix | Fill, Cache] = {}  # of prefixes and unfinished prompts
        self._draws: dict[tuple[str, int], tuple[int, randomness.Key]] = {}  # settings and key
        self._stops: dict[tuple[str, int], StopText] = {}

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def close(self) -> None:
        """Free all memory, except what is passed on to the next generator.

        No step is possible afterwards.
        """
        self._let_go(list(self._held))
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._kept.give_back(self._caches)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises `DataError` for a prompt that is empty, too long or has unknown ids, and for
        `generated` tokens that belong to another completion or leave nothing to sample; `RunError`
        for a request submitted twice; `ConfigError` for invalid sampling settings of a request.
        """
        for request in requests:
            spec = self._settings.specs[settings := self._settings.index(request.sampling)]
            limit = limit_of(self._network, request, spec.most_new_tokens)
            live = Live(request.id, request.k, prompt_of(self._network, request), limit)
            if request.generated is not None:
                done = request.generated
                check_partial(done, live)
                live.tokens = list(done.tokens)
                live.logprobs = list(done.logprobs)
                live.versions = list(done.versions)
                live.supports = [tuple(s) for s in done.supports]
            self._scheduler.submit(live)
            key = randomness.key(
                self._settings.seed,
                "sample",
                request.step,
                request.draws_as or request.id,
                request.k,
            )
            self._draws[live.key] = (settings, key)
            if spec.stop:
                self._stops[live.key] = StopText(spec.stop, spec.tokenizer)
                for token in live.tokens:
                    self._stops[live.key].feed(token)

    def step(self) -> list[TokenEvent]:
        """Sample one token of every running sequence and of each completed prompt.

        Returns no events if the generator is idle, or if the step computes only a part of a long
        prompt.
        """
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Start the passes of a step; only `submit` can be called before `finish`."""
        with torch.no_grad(), using(self._device):
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self._scheduler.plan()
        for sequence in plan.preempted:
            self._take_out(self._rows.places[sequence.key])
        self._let_go_unused(plan.chunks)
        if self._cache is not None:
            self._caches.fit(self._cache)
        ahead = self._multi_step
        count = len(self._rows)
        if ahead and count:
            taken = ahead.take(self._kv(), joined=bool(plan.chunks))
        else:
            taken = None
        if taken:
            self._drawn = drawn_here(lambda: taken, count)
            return
        if count:
            first = self._caches.draw(self._kv(), self._rows, self._settings)
        else:
            first = None
        if count and first is None:
            states = [self._caches.decode(self._kv(), self._rows.last[:count])]
        else:
            states = []
        if plan.chunks and isinstance(self._network, PutsOff):
            self._network.catch_up()
        states += self._prefill(plan.chunks)
        self._let_go_unused()
        self._drawn = self._settled(first, states) if first or states else None

    def finish(self) -> list[TokenEvent]:
        """Record the tokens of the step that `begin` started, and return their events."""
        drawn = self._drawn
        self._drawn = None
        events = [] if drawn is None else self._book(*drawn())
        self._let_go_unused()
        return events

    def abort(self, ids: Iterable[str]) -> list[Partial]:
        """Stop all unfinished completions of these ids.

        A `Request(generated=partial)` continues a completion exactly where it stopped.
        """
        partials = []
        for live in self._scheduler.abort(ids):
            if live.key in self._rows.places:
                self._take_out(self._rows.places[live.key])
            self._forget(live)
            partials.append(
                Partial(live.id, live.k, live.tokens, live.logprobs, live.versions, live.supports)
            )
        self._let_go_unused()
        return partials

    def weights_changed(self, version: int, *, keep_kv: bool = False) -> None:
        """Use new weights; tokens carry `version` from now on.

        Keys and values are computed again with the new weights, unless `keep_kv` is set.
        """
        self._version = version
        self._caches.weights_changed()
        self._head = Head(self._network)
        if not keep_kv:
            while len(self._rows):
                self._take_out(len(self._rows) - 1)
            self._scheduler.restart()
            self._let_go(list(self._held))

    # -- one step

    def _prefill(self, chunks: list[Chunk]) -> list[Tensor]:
        """Compute chunks of prompts.

        Returns the hidden states [m, hidden] of the last tokens of the sequences that start in this
        step. These sequences are the last rows.
        """
        states = []
        leaders = []
        fresh = [chunk for chunk in chunks if chunk.whole and chunk.fill.makes is None]
        for chunk in chunks:
            if chunk.whole and chunk.fill.makes is None:
                continue
            last = self._hold(chunk)
            if chunk.last and chunk.fill.makes is None:
                states.append(last)
                leaders.append((self._kv().take(self._held[chunk.fill]), chunk.fill))
        if fresh:
            slots, last = self._prefill_whole([chunk.fill for chunk in fresh])
            states.append(last)
            leaders += zip(slots, (chunk.fill for chunk in fresh), strict=True)
        for _, fill in leaders:
            self._begin(fill.sequences[0])
        ends = list(states)
        for (slot, fill), end in zip(leaders, torch.cat(ends) if ends else (), strict=True):
            others = fill.sequences[1:]
            if others:
                self._kv().fork(slot, len(others))
                states.append(end.expand(len(others), -1))
            for live in others:
                self._begin(live)
        return states

    def _hold(self, chunk: Chunk) -> Tensor:
        """Compute a chunk of a shared prefix, or of a prompt that takes several steps.

        Returns the hidden state [1, hidden] of its last token.
        """
        fill = chunk.fill
        count = chunk.stop - chunk.start
        holder = fill.makes or fill
        if holder not in self._held:
            cache = self._held[holder] = self._caches.new(len(fill.tokens) + self._least_rows)
            cache.link(cache.allocate(), self._held[fill.after] if fill.after else None)
        cache = self._held[holder]
        tokens = torch.zeros(max(count, self._least_rows), dtype=torch.int64)
        tokens[:count] = torch.tensor(fill.tokens[chunk.start : chunk.stop])
        states = self._caches.passes.hidden(
            cache.extend([0], [tokens]), put(np.array([count - 1]), self._device)
        )
        cache.truncate(0, chunk.stop)
        return states

    def _prefill_whole(self, fills: list[Fill]) -> tuple[list[int], Tensor]:
        """Compute whole prompts in one pass, each in a new slot.

        Returns (slots, hidden states [m, hidden] of their last tokens).
        """
        cache = self._kv()
        count = len(fills)
        slots = cache.allocate(count)
        for slot, fill in zip(slots, fills, strict=True):
            cache.link([slot], self._held[fill.after] if fill.after else None)
        tokens = [torch.tensor(fill.tokens) for fill in fills]
        lengths = [len(own) for own in tokens]
        missing = max(0, self._least_rows - sum(lengths))
        tokens[-1] = torch.nn.functional.pad(tokens[-1], (0, missing))
        packed = cache.extend(slots, tokens)
        last = self._caches.passes.hidden(packed, put(np.cumsum(lengths) - 1, self._device))
        if missing:
            cache.truncate(slots[-1], lengths[-1])
        return slots, last

    def _settled(
        self, first: Callable[[], Drawn] | None, states: list[Tensor]
    ) -> Callable[[], Drawn]:
        """Sample one token for every row, and return a function that waits for the tokens.

        The last rows are sampled from `states`; `first` returns the tokens of the rows before them.
        """

        def draw() -> Drawn:
            drawn = [self._draw(torch.cat(states))] if states else []
            return reduce(joined, [first(), *drawn] if first else drawn)

        return self._settle(draw, len(self._rows))

    def _draw(self, states: Tensor) -> Drawn:
        """Sample one token for each of the last rows from its hidden state."""
        rows = self._rows
        count = len(states)
        own = slice(len(rows) - count, len(rows))
        missing = max(0, self._least_rows - count)
        numbers = np.ascontiguousarray(rows.uniforms(1)[0, own])
        logits = self._head.logits(pad(states, (0, 0, 0, missing)) if missing else states)[:count]
        return self._settings.draw(
            logits, put(numbers, self._device), rows.settings[own], rows.count[own]
        )

    def _book(
        self,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float64],
        supports: list[tuple[int, ...]] | None,
    ) -> list[TokenEvent]:
        """Record one token of every row, and remove the rows that are finished."""
        rows = self._rows
        count = len(self._rows)
        _check_finite(logprobs, rows, self._version)
        rows.book(tokens, logprobs, self._version, supports)
        stopped = self._settings.is_stop[rows.settings[:count], tokens]
        if self._stops:
            stopped |= _stopped_by_text(tokens, rows, self._stops, self._settings.least)
        finished = (stopped | (rows.count[:count] >= rows.limit[:count])).nonzero()[0].tolist()
        ends: list[Literal["stop", "length"] | None] = [None] * count
        for row in finished:
            ends[row] = "stop" if stopped[row] else "length"
        said = (
            tokens.tolist(),
            logprobs.tolist(),
            repeat(self._version),
            ends,
            supports or repeat(()),
        )
        events = list(map(TokenEvent, rows.ids, rows.ks, *said, self._settings.take_likely(count)))
        for row in reversed(finished):
            live = self._take_out(row)
            self._scheduler.finish(live)
            self._forget(live)
        return events

    # -- memory

    def _kv(self) -> Cache:
        if self._cache is None:
            self._cache = self._caches.new()
        return self._cache

    def _let_go(self, holders: list[Prefix | Fill]) -> None:
        """Close the caches of these prefixes and prefills."""
        for holder in holders:
            self._held.pop(holder).close()

    def _let_go_unused(self, chunks: Iterable[Chunk] = ()) -> None:
        """Close the caches that neither the scheduler nor the remaining `chunks` need."""
        if not self._held:
            return
        in_use = {
            *self._scheduler.prefixes.values(),
            *self._scheduler.filling,
            *(chunk.fill for chunk in chunks),
        }
        self._let_go([holder for holder in self._held if holder not in in_use])

    def _begin(self, live: Live) -> None:
        """Add a row for this sequence."""
        settings, key = self._draws[live.key]
        self._rows.add(live, settings, key, live.key in self._stops)

    def _take_out(self, row: int) -> Live:
        """Remove a row and release its slot; the last row takes its place."""
        assert self._cache is not None
        if self._multi_step is not None:
            self._multi_step.drop()
        self._cache.release(row)
        live = self._rows.remove(row)
        if not len(self._rows):
            self._cache = None
        return live

    def _forget(self, live: Live) -> None:
        del self._draws[live.key]
        self._stops.pop(live.key, None)


def _check_finite(logprobs: npt.NDArray[np.float64], rows: DecodeBatch, version: int) -> None:
    """Raise `NotFinite` for a row whose log-prob is NaN or infinite."""
    if not math.isfinite(logprobs.sum()):
        row = int(np.isfinite(logprobs).argmin())
        raise NotFinite(
            f"the network's logits are not finite for completion {rows.ks[row]} of "
            f"{rows.ids[row]!r} "
            f"at token {rows.count[row]} (weight version {version}); the weights have diverged"
        )


def _stopped_by_text(
    tokens: npt.NDArray[np.int64],
    rows: DecodeBatch,
    stops: Mapping[tuple[str, int], StopText],
    least: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Return whether each row's new token completes one of the row's stop texts.

    Rows with fewer than `least` tokens, the minimum of their settings, never stop.
    """
    count = len(rows)
    stopped = np.zeros(count, bool)
    for row in np.flatnonzero(rows.watched[:count]).tolist():
        stopped[row] = stops[rows.sequences[row].key].feed(int(tokens[row]))
    return stopped & (rows.count[:count] >= least[rows.settings[:count]])
