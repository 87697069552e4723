"""The generator: continuous batching on the engine's own weights, one token a sequence a step.

    with open_generator(network, spec, device=..., version=..., eos_ids=...) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step(): ...

A completion depends on its prompt, its (id, k), the step and the seed, never on what else runs: draws come from the hash of
`weft.randomness`, and every row is computed by itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from weft import randomness
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.generation import sampling
from weft.engine.generation.blocks import Slots
from weft.engine.generation.scheduler import Budget, Prefill, Scheduler
from weft.engine.generation.scheduler import Sequence as Live
from weft.engine.generation.stops import StopText
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError, RunError
from weft.models.config import TransformerConfig
from weft.models.kv_cache import KVCache
from weft.models.packed import Packed

KV_SHARE = 0.25  # of the device's memory that keys and values may take
SEQUENCES = {"cpu": 128}  # rows of a decode step; more gain little on a CPU
DEFAULT_SEQUENCES = 256
LEAST_ROWS = {"cpu": 16}  # a CPU multiplies fewer rows by other kernels, whose sums differ in the last digit


class Decoder(Protocol):
    """What the generator needs of a network."""

    config: TransformerConfig
    training: bool

    def hidden(self, x: Packed) -> Tensor: ...
    def next_token_logits(self, hidden_rows: Tensor) -> Tensor: ...
    def parameters(self) -> Iterator[Tensor]: ...
    def train(self, mode: bool = True) -> object: ...


@contextmanager
def open_generator(
    network: Decoder,
    spec: GenerationSpec,
    *,
    device: torch.device,
    version: int,
    eos_ids: Iterable[int],
    tokenizer: Tokenizer | None = None,
    budget: Budget | None = None,
) -> Iterator[BatchGenerator]:
    """A generator on `network`, which is in evaluation mode while it is open. `version` is what the tokens carry.

    A completion ends with one of `eos_ids`, `spec.stop_ids` or `spec.stop`, which needs a `tokenizer` (that of the spec where
    none is given; `ConfigError` without any). `budget` defaults to what the device's memory allows.
    """
    tokenizer = tokenizer or spec.tokenizer
    if spec.stop and tokenizer is None:
        raise ConfigError(f"gen.stop={spec.stop}: stop texts need a tokenizer, and this role has none")
    mode = network.training
    network.train(False)
    try:
        stop_ids = frozenset([*eos_ids, *spec.stop_ids])
        with_budget = budget or default_budget(network.config, device, next(network.parameters()).dtype)
        yield BatchGenerator(network, spec, device, version, stop_ids, tokenizer, with_budget)
    finally:
        network.train(mode)


class BatchGenerator:
    """Implements `weft.engine.base.Generator`. Sequences that run are rows 0 .. n - 1 of the key-value cache."""

    def __init__(
        self, network: Decoder, spec: GenerationSpec, device: torch.device, version: int,
        stop_ids: frozenset[int], tokenizer: Tokenizer | None, budget: Budget,
    ) -> None:  # fmt: skip
        self._network, self._spec, self._device, self._tokenizer = network, spec, device, tokenizer
        self._version, self._stop_ids = version, stop_ids
        self._scheduler = Scheduler(budget, Slots(budget.max_sequences, budget.max_tokens))
        self._least_rows = LEAST_ROWS.get(device.type, 1)
        self._cache: KVCache | None = None
        self._rows: list[Live] = []  # by slot of the cache
        self._draws: dict[tuple[str, int], randomness.Key] = {}
        self._stops: dict[tuple[str, int], StopText] = {}
        vocab = network.config.vocab_size
        self._is_stop = torch.zeros(1, vocab, dtype=torch.bool, device=device)
        self._is_stop[:, [id for id in stop_ids if id < vocab]] = True

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises `DataError` for a prompt that is empty or leaves no room, `RunError` for one given twice."""
        for request in requests:
            live = Live(request.id, request.k, tuple(map(int, request.prompt)), self._limit(request))
            if request.generated is not None:
                done = request.generated
                live.tokens, live.logprobs = list(done.tokens), list(done.logprobs)
                live.versions, live.supports = list(done.versions), [tuple(s) for s in done.supports]
            self._scheduler.submit(live)
            self._draws[live.key] = randomness.key(self._spec.seed, "sample", request.step, request.id, request.k)
            if self._spec.stop:
                assert self._tokenizer is not None
                self._stops[live.key] = StopText(self._spec.stop, self._tokenizer)
                for token in live.tokens:
                    self._stops[live.key].feed(token)

    @torch.no_grad()
    def step(self) -> list[TokenEvent]:
        """One token for everything that runs, and for what is admitted now. Empty only when idle."""
        plan = self._scheduler.plan()
        for sequence in plan.preempted:
            self._free(sequence)
        events = self._decode() if plan.decodes else []
        return events + self._prefill(plan.prefills) if plan.prefills else events

    def abort(self, ids: Iterable[str]) -> list[Partial]:
        """Stop every unfinished completion of these ids; `Request(generated=partial)` goes on exactly where it was."""
        partials = []
        for live in self._scheduler.abort(ids):
            if live in self._rows:
                self._free(live)
            self._forget(live)
            partials.append(Partial(live.id, live.k, live.tokens, live.logprobs, live.versions, live.supports))
        return partials

    def weights_changed(self, version: int, *, keep_kv: bool = False) -> None:
        """Tokens from now on carry `version`. Keys and values of the old weights are computed again, or kept as they are."""
        self._version = version
        if not keep_kv:
            self._scheduler.restart()
            self._rows, self._cache = [], None

    # -- one step

    def _decode(self) -> list[TokenEvent]:
        cache, rows = self._kv(), list(self._rows)
        fillers = cache.allocate(max(0, self._least_rows - len(rows)))
        tokens = torch.tensor([live.tokens[-1] for live in rows] + [0] * len(fillers))
        packed = cache.extend(range(len(tokens)), tokens.to(self._device))
        logits = self._network.next_token_logits(self._network.hidden(packed))
        self._release(fillers)
        return self._draw(rows, logits[: len(rows)])

    def _prefill(self, prefills: list[Prefill]) -> list[TokenEvent]:
        """Compute each prompt once, then copy its keys and values for the others that begin with it."""
        cache, count, least = self._kv(), len(prefills), self._least_rows
        slots = cache.allocate(count)
        tokens = [torch.tensor(prefill.tokens) for prefill in prefills]
        missing = least - sum(map(len, tokens))
        fillers = cache.allocate(1) if missing > 0 else []
        packed = cache.extend([*slots, *fillers], tokens + [torch.zeros(missing, dtype=torch.int64) for _ in fillers])
        last = packed.rows[torch.arange(max(count, least), device=self._device).clamp(max=count - 1)]
        logits = self._network.next_token_logits(self._network.hidden(packed)[last])
        self._release(fillers)
        fresh, source = [prefill.sequences[0] for prefill in prefills], list(range(count))
        for index, prefill in enumerate(prefills):
            others = prefill.sequences[1:]
            if others:
                cache.fork(slots[index], len(others))
                fresh += others
                source += [index] * len(others)
        self._rows += fresh
        return self._draw(fresh, logits[torch.tensor(source, device=self._device)])

    def _release(self, fillers: list[int]) -> None:
        """Give back the last slots, which held rows that only fill a pass up."""
        for slot in reversed(fillers):
            self._kv().release(slot)

    def _draw(self, rows: list[Live], logits: Tensor) -> list[TokenEvent]:
        """Sample one token a row of `logits` [R, V] and book it."""
        spec = self._spec
        positions = np.array([len(live.tokens) for live in rows])
        uniforms = randomness.uniforms(np.array([self._draws[live.key] for live in rows]), positions)
        early = positions < spec.min_new_tokens
        banned = torch.from_numpy(early).to(self._device)[:, None] & self._is_stop if early.any() else None
        drawn = sampling.draw(logits, torch.from_numpy(uniforms).to(self._device), spec, banned)
        supports: list[list[int]] = [[]] * len(rows)
        if spec.record_support and drawn.kept is not None:
            supports = sampling.supports(drawn.kept, spec.max_support)
        values = zip(rows, drawn.tokens.tolist(), drawn.logprobs.tolist(), supports, strict=True)
        return [self._book(*value) for value in values]

    def _book(self, live: Live, token: int, logprob: float, support: list[int]) -> TokenEvent:
        if not math.isfinite(logprob):
            raise RunError(
                f"the network's logits are not finite for completion {live.k} of {live.id!r} "
                f"at token {len(live.tokens)} (weight version {self._version}); the weights have diverged"
            )
        live.tokens.append(token)
        live.logprobs.append(logprob)
        live.versions.append(self._version)
        live.supports.append(tuple(support))
        stopped = token in self._stop_ids
        if live.key in self._stops and self._stops[live.key].feed(token):
            stopped = stopped or len(live.tokens) >= self._spec.min_new_tokens
        finish: Literal["stop", "length"] | None = (
            "stop" if stopped else "length" if len(live.tokens) >= live.limit else None
        )
        if finish:
            self._scheduler.finish(live)
            self._free(live)
            self._forget(live)
        return TokenEvent(live.id, live.k, token, logprob, self._version, finish, tuple(support))

    # -- memory

    def _kv(self) -> KVCache:
        if self._cache is None:
            self._cache = KVCache(self._network.config, self._device, next(self._network.parameters()).dtype)
        return self._cache

    def _free(self, live: Live) -> None:
        """Give a row's slot back; the last row moves into its place."""
        assert self._cache is not None
        slot, last = self._rows.index(live), self._rows.pop()
        self._cache.release(slot)
        if last is not live:
            self._rows[slot] = last
        if not self._rows:
            self._cache = None

    def _forget(self, live: Live) -> None:
        del self._draws[live.key]
        self._stops.pop(live.key, None)

    def _limit(self, request: Request) -> int:
        """Most tokens of this completion. A table of learned positions has an end, and so has the completion there."""
        wanted = self._spec.max_new_tokens
        if request.max_new_tokens is not None:
            wanted = min(wanted, request.max_new_tokens)
        if len(request.prompt) == 0:
            raise DataError(
                f"id {request.id!r}: the prompt is empty, and a model needs a token to go on from; "
                "set tokenizer.add_bos_token=true or leave the row out"
            )
        config = self._network.config
        if config.learned_positions is None:
            return wanted
        room = config.learned_positions - config.position_offset - len(request.prompt)
        if room < 1:
            raise DataError(
                f"id {request.id!r}: a prompt of {len(request.prompt)} tokens leaves no room in the "
                f"{config.learned_positions - config.position_offset} positions of this model; lower dataset.max_prompt_len"
            )
        return min(wanted, room)


def default_budget(config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> Budget:
    """Keys and values in a quarter of the device's memory."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
    sequences = SEQUENCES.get(device.type, DEFAULT_SEQUENCES)
    return Budget(max_sequences=sequences, max_tokens=max(1, int(KV_SHARE * memory / per_token)))
