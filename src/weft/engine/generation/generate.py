"""The generator: continuous batching on the engine's own weights, one token a sequence a step.

    with open_generator(network, spec, device=..., version=..., eos_ids=...) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step(): ...

A completion depends on its prompt, its (id, k), the step and the seed, never on what else runs:
draws come from the hash of `weft.randomness`, and every row is computed by itself.
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
    """A generator on `network`, which is in evaluation mode while it is open.

    `version` is what the tokens carry.

    A completion ends with one of `eos_ids`, `spec.stop_ids` or `spec.stop`, which needs the spec's
    tokenizer (`ConfigError` without it). `budget` defaults to what the device's memory allows.
    Ranks that generate together do so in step: with equal budgets, and a `settle` that gives all of
    them the same tokens. What generators of one network leave to the next lies in `kept`.
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
    """A network's output layer.

    Where each product would make a float32 copy of its matrix, it makes one and keeps it.
    """

    def __init__(self, network: Decoder) -> None:
        self._network = network

    def logits(self, states: Tensor) -> Tensor:
        """[R, hidden] -> [R, V]"""
        return self._network.next_token_logits(states, self._wide)

    @cached_property
    def _wide(self) -> Tensor | None:
        matrix = self._network.output_matrix
        return None if matrix is None else kept_wide(matrix)


class BatchGenerator:
    """Implements `weft.engine.base.Generator`.

    Sequences that run are rows 0 .. n - 1 of the key-value cache.
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
        self._drawn: Callable[[], Drawn] | None = None  # the tokens of a step that has begun
        self._held: dict[Prefix | Fill, Cache] = {}  # prefixes, and prompts that take several steps
        self._draws: dict[tuple[str, int], tuple[int, randomness.Key]] = {}  # settings and key
        self._stops: dict[tuple[str, int], StopText] = {}

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def close(self) -> None:
        """Give all memory back, to the next generator what is kept for it.

        No step comes after it.
        """
        self._let_go(list(self._held))
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._kept.give_back(self._caches)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises `DataError` for a prompt that is empty, leaves no room or has unknown ids and for
        `generated` that is another completion's or leaves nothing to sample, `RunError` for one
        given twice, `ConfigError` for settings of its own that cannot be.
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
        """One token for everything that runs, and for each prompt that is computed now.

        Empty when idle, and where a step computes no more than a part of a long prompt.
        """
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """A step's passes; nothing but `submit` may come before its `finish`."""
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
        """Book the tokens of the step that has begun."""
        drawn = self._drawn
        self._drawn = None
        events = [] if drawn is None else self._book(*drawn())
        self._let_go_unused()
        return events

    def abort(self, ids: Iterable[str]) -> list[Partial]:
        """Stop every unfinished completion of these ids; `Request(generated=partial)` goes on
        exactly where it was.
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
        """Tokens from now on carry `version`.

        Keys and values of the old weights are computed again, or kept as they are.
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
        """Compute parts of prompts; the hidden states [m, hidden] from which the sequences that
        begin now, the last rows, draw.
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
        """Compute a part of a prefix, or of a prompt that takes several steps; the hidden state [1,
        hidden] of its end.
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
        """Compute fills in one pass, each in a new slot: (slots, hidden states [m, hidden] of their
        ends).
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
        """One token for every row: the last ones are drawn from `states`, those before them are
        `first`.
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
        """One token more for every row; rows that end go."""
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
        """Give back what prefixes and prompts in the making hold."""
        for holder in holders:
            self._held.pop(holder).close()

    def _let_go_unused(self, chunks: Iterable[Chunk] = ()) -> None:
        """Give back what neither the scheduler nor the `chunks` still to be computed need."""
        if not self._held:
            return
        in_use = {
            *self._scheduler.prefixes.values(),
            *self._scheduler.filling,
            *(chunk.fill for chunk in chunks),
        }
        self._let_go([holder for holder in self._held if holder not in in_use])

    def _begin(self, live: Live) -> None:
        """The next row is this sequence's."""
        settings, key = self._draws[live.key]
        self._rows.add(live, settings, key, live.key in self._stops)

    def _take_out(self, row: int) -> Live:
        """Give a row's slot back; the last row moves into its place."""
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
    """Raises `NotFinite` for a row that nothing can be drawn of."""
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

    Not before the row has the `least` tokens of its settings.
    """
    count = len(rows)
    stopped = np.zeros(count, bool)
    for row in np.flatnonzero(rows.watched[:count]).tolist():
        stopped[row] = stops[rows.sequences[row].key].feed(int(tokens[row]))
    return stopped & (rows.count[:count] >= least[rows.settings[:count]])
