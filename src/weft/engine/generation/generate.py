"""Generator with continuous batching on the engine's weights: one token per sequence and step.

    with open_generator(network, spec, device=..., version=..., eos_ids=...) as generator:
        generator.submit(requests)
        while not generator.idle:
            for event in generator.step(): ...

A completion depends only on its prompt, its id and index (`k`), the step and the seed, and not on
other sequences: random numbers are hashes (`weft.randomness`), and rows are computed independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, reduce
from itertools import repeat
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from weft import randomness
from weft.data.tokenizer import StreamDecoder, Tokenizer
from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.device import use_device
from weft.engine.generation.caches import (
    CacheProvider,
    ReusablePageCaches,
    SequenceCache,
    choose_default_budget,
)
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.passes import DeferringDecoder, LanguageNetwork
from weft.engine.generation.sampling import (
    SampledRows,
    SettingsTable,
    TokenAgreement,
    concatenate_rows,
    sample_locally,
)
from weft.engine.generation.scheduler import (
    GenerationBudget,
    Prefill,
    PrefillChunk,
    PromptPrefix,
    Scheduler,
)
from weft.engine.generation.scheduler import Sequence as Live
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError, DataError, NotFinite
from weft.kernels import prepare_wide, put


@contextmanager
def open_generator(
    network: LanguageNetwork,
    spec: GenerationSpec,
    *,
    device: torch.device,
    version: int,
    eos_ids: Iterable[int],
    budget: GenerationBudget | None = None,
    agree_on_tokens: TokenAgreement = sample_locally,
    reusable_caches: CacheProvider | None = None,
) -> Iterator[BatchGenerator]:
    """Open a generator on `network`, which is in evaluation mode until the generator is closed.

    `version` is the weight version that is recorded with each token. A completion ends with one of
    `eos_ids`, `spec.stop_ids` or `spec.stop`. Stop texts require the spec's tokenizer; without one,
    `ConfigError` is raised. The default of `budget` depends on the device's memory.
    `reusable_caches` stores pages and graphs for the network's next generator.

    Ranks that generate together run the same steps. They need equal budgets, and a function
    `agree_on_tokens` that returns the same tokens on all these ranks.
    """
    if spec.stop and spec.tokenizer is None:
        raise ConfigError(
            f"gen.stop={spec.stop}: stop texts need a tokenizer, and this role has none"
        )
    mode = network.training
    network.train(False)
    try:
        stop_ids = frozenset([*eos_ids, *spec.stop_ids])
        is_provided = reusable_caches is not None
        reusable_caches = reusable_caches or ReusablePageCaches()
        dtype = next(network.parameters()).dtype
        budget = budget or choose_default_budget(
            network.config, device, dtype, spec.kv_cache_gb, reusable_caches.num_bytes
        )
        generator = BatchGenerator(
            network, spec, device, version, stop_ids, budget, agree_on_tokens, reusable_caches
        )
        try:
            yield generator
        finally:
            generator.close()
            if not is_provided:
                reusable_caches.drop()
    finally:
        network.train(mode)


class LogitsHead:
    """Output layer of a network, which computes logits from hidden states.

    If the device needs a float32 copy of the output matrix, the copy is made once and kept.
    """

    def __init__(self, network: LanguageNetwork) -> None:
        self._network = network

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits [R, V] of hidden states [R, hidden]."""
        return self._network.next_token_logits(states, self._float32_matrix)

    @cached_property
    def _float32_matrix(self) -> Tensor | None:
        matrix = self._network.output_matrix
        return None if matrix is None else prepare_wide(matrix)


class BatchGenerator:
    """Generator with continuous batching; implements `weft.engine.base.Generator`.

    The n running sequences are rows 0 to n - 1 of the KV cache.
    """

    def __init__(
        self,
        network: LanguageNetwork,
        spec: GenerationSpec,
        device: torch.device,
        version: int,
        stop_ids: frozenset[int],
        budget: GenerationBudget,
        agree_on_tokens: TokenAgreement,
        reusable_caches: CacheProvider,
    ) -> None:
        self._network = network
        self._device = device
        self._version = version
        self._agree_on_tokens = agree_on_tokens
        self._reusable_caches = reusable_caches
        self._caches = reusable_caches.take(network, device, budget)
        self._head = LogitsHead(network)
        self._scheduler = Scheduler(budget, self._caches.blocks)
        self._min_rows = self._caches.min_rows
        # A step ahead starts from this rank's own tokens, but the ranks may agree on others.
        if agree_on_tokens is not sample_locally:
            spec = replace(spec, decode_ahead=False)
        self._settings = SettingsTable(spec, stop_ids, network.vocab_size)
        self._batch = DecodeBatch()
        self._multi_step = self._caches.build_multi_step_decoder(self._batch, self._settings)
        self._cache: SequenceCache | None = None
        # waits for the tokens of the step in progress
        self._wait_for_tokens: Callable[[], SampledRows] | None = None
        # caches of shared prefixes and of unfinished prompts
        self._prefill_caches: dict[PromptPrefix | Prefill, SequenceCache] = {}
        # sequence -> (index of its settings, key of its random numbers)
        self._sampling_keys: dict[tuple[str, int], tuple[int, randomness.Key]] = {}
        self._stop_texts: dict[tuple[str, int], StopTextDetector] = {}

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def close(self) -> None:
        """Free all memory except what the next generator can reuse.

        `step` cannot be called afterwards.
        """
        self._close_caches(list(self._prefill_caches))
        if self._cache is not None:
            self._cache.close()
            self._cache = None
        self._reusable_caches.give_back(self._caches)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises `DataError` if a prompt is empty, too long or has unknown ids, or if sampling cannot
        continue from the tokens in `generated` (see `scheduler.Sequence.continue_from`). Raises
        `ConfigError` if the sampling settings of a request are invalid, and `RunError` if a request
        is submitted twice or does not fit in the KV cache.
        """
        for request in requests:
            spec = self._settings.specs[settings := self._settings.find_index(request.sampling)]
            limit = _compute_limit(self._network, request, spec.new_token_limit)
            placeholders = (0,) * self._network.prefix_tokens  # of the trained prefix
            prompt = (*placeholders, *map(int, request.prompt))
            live = Live(request.id, request.k, prompt, limit)
            if request.generated is not None:
                live.continue_from(request.generated)
            self._scheduler.submit(live)
            key = randomness.derive_key(
                self._settings.seed,
                "sample",
                request.step,
                request.draws_as or request.id,
                request.k,
            )
            self._sampling_keys[live.key] = (settings, key)
            if spec.stop:
                self._stop_texts[live.key] = StopTextDetector(spec.stop, spec.tokenizer)
                for token in live.tokens:
                    self._stop_texts[live.key].feed(token)

    def step(self) -> list[TokenEvent]:
        """Sample one token for each running sequence.

        A sequence starts to run in the step that computes the last tokens of its prompt. Returns no
        events if the generator is idle, or if the step computes only a part of a long prompt.
        """
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """Start computing a step; until `finish` is called, only `submit` may be called."""
        with torch.no_grad(), use_device(self._device):
            self._begin_step()

    def _begin_step(self) -> None:
        plan = self._scheduler.plan_step()
        for sequence in plan.preempted:
            self._remove_row(self._batch.row_by_key[sequence.key])
        self._close_unused_caches(plan.chunks)
        if self._cache is not None:
            self._caches.resize(self._cache)
        multi_step = self._multi_step
        count = len(self._batch)
        if multi_step and count:
            next_rows = multi_step.take(self._get_cache(), joined=bool(plan.chunks))
        else:
            next_rows = None
        if next_rows:
            self._wait_for_tokens = sample_locally(lambda: next_rows, count)
            return
        if count:
            first = self._caches.decode_and_sample(self._get_cache(), self._batch, self._settings)
        else:
            first = None
        if count and first is None:
            states = [self._caches.decode(self._get_cache(), self._batch.last[:count])]
        else:
            states = []
        if plan.chunks and isinstance(self._network, DeferringDecoder):
            self._network.catch_up()
        states += self._prefill(plan.chunks)
        self._close_unused_caches()
        self._wait_for_tokens = self._sample_rows(first, states) if first or states else None

    def finish(self) -> list[TokenEvent]:
        """Record the tokens of the step that `begin` started, and return their events."""
        drawn = self._wait_for_tokens
        self._wait_for_tokens = None
        events = [] if drawn is None else self._record_tokens(*drawn())
        self._close_unused_caches()
        return events

    def abort(self, ids: Iterable[str]) -> list[Partial]:
        """Stop all unfinished completions of these ids, and return the tokens sampled so far.

        A `Request(generated=partial)` continues a completion exactly where it stopped.
        """
        partials = []
        for live in self._scheduler.abort(ids):
            if live.key in self._batch.row_by_key:
                self._remove_row(self._batch.row_by_key[live.key])
            self._forget(live)
            partials.append(
                Partial(live.id, live.k, live.tokens, live.logprobs, live.versions, live.supports)
            )
        self._close_unused_caches()
        return partials

    def weights_changed(self, version: int, *, keep_kv: bool = False) -> None:
        """Use the new weights, and record `version` with the tokens sampled from now on.

        Keys and values are computed again with the new weights, unless `keep_kv` is set.
        """
        self._version = version
        self._caches.on_weights_changed()
        self._head = LogitsHead(self._network)
        if not keep_kv:
            while len(self._batch):
                self._remove_row(len(self._batch) - 1)
            self._scheduler.restart()
            self._close_caches(list(self._prefill_caches))

    # -- one step

    def _prefill(self, chunks: list[PrefillChunk]) -> list[Tensor]:
        """Compute chunks of prompts, and add a row for each sequence whose prompt is complete.

        The added rows are the last rows of the batch. Returns the hidden state of the prompt's last
        token for each added row, in row order, as a list of tensors [rows, hidden] to concatenate.
        """
        states = []
        leaders = []
        whole_chunks = []
        for chunk in chunks:
            if chunk.is_whole and chunk.prefill.new_prefix is None:
                whole_chunks.append(chunk)
        for chunk in chunks:
            if chunk.is_whole and chunk.prefill.new_prefix is None:
                continue
            last = self._prefill_chunk(chunk)
            if chunk.is_last and chunk.prefill.new_prefix is None:
                states.append(last)
                leaders.append(
                    (self._get_cache().take(self._prefill_caches[chunk.prefill]), chunk.prefill)
                )
        if whole_chunks:
            slots, last = self._prefill_whole([chunk.prefill for chunk in whole_chunks])
            states.append(last)
            leaders += zip(slots, (chunk.prefill for chunk in whole_chunks), strict=True)
        for _, fill in leaders:
            self._add_row(fill.sequences[0])
        ends = list(states)
        for (slot, fill), end in zip(leaders, torch.cat(ends) if ends else (), strict=True):
            others = fill.sequences[1:]
            if others:
                self._get_cache().fork(slot, len(others))
                states.append(end.expand(len(others), -1))
            for live in others:
                self._add_row(live)
        return states

    def _prefill_chunk(self, chunk: PrefillChunk) -> Tensor:
        """Compute a chunk of a shared prefix, or of a prompt that takes several steps.

        Returns the hidden state [1, hidden] of the chunk's last token.
        """
        fill = chunk.prefill
        holder = fill.new_prefix or fill
        if holder not in self._prefill_caches:
            cache = self._prefill_caches[holder] = self._caches.create_cache(
                len(fill.tokens) + self._min_rows
            )
            cache.link(
                cache.allocate(),
                self._prefill_caches[fill.parent_prefix] if fill.parent_prefix else None,
            )
        return self._caches.prefill(
            self._prefill_caches[holder],
            [0],
            [torch.tensor(fill.tokens[chunk.start : chunk.stop])],
            start=chunk.start,
        )

    def _prefill_whole(self, fills: list[Prefill]) -> tuple[list[int], Tensor]:
        """Compute whole prompts in one pass, each in a new slot.

        Returns the slots, and the hidden states [m, hidden] of the prompts' last tokens.
        """
        cache = self._get_cache()
        slots = cache.allocate(len(fills))
        for slot, fill in zip(slots, fills, strict=True):
            cache.link(
                [slot], self._prefill_caches[fill.parent_prefix] if fill.parent_prefix else None
            )
        tokens = [torch.tensor(fill.tokens) for fill in fills]
        return slots, self._caches.prefill(cache, slots, tokens)

    def _sample_rows(
        self, first: Callable[[], SampledRows] | None, states: list[Tensor]
    ) -> Callable[[], SampledRows]:
        """Sample one token per row, and return a function that waits for the tokens.

        The function returns the sampled tokens. If `first` is given, the decode step has already
        sampled tokens for the first rows of the batch, and `first` waits for these. The other rows
        are sampled from their hidden states, `states`.
        """

        def draw() -> SampledRows:
            drawn = [self._sample(torch.cat(states))] if states else []
            return reduce(concatenate_rows, [first(), *drawn] if first else drawn)

        return self._agree_on_tokens(draw, len(self._batch))

    def _sample(self, states: Tensor) -> SampledRows:
        """Sample one token for each of the batch's last m rows, given `states` [m, hidden]."""
        rows = self._batch
        count = len(states)
        last_rows = slice(len(rows) - count, len(rows))
        missing = max(0, self._min_rows - count)
        numbers = np.ascontiguousarray(rows.compute_uniforms(1)[0, last_rows])
        logits = self._head.compute_logits(pad(states, (0, 0, 0, missing)) if missing else states)[
            :count
        ]
        return self._settings.sample(
            logits, put(numbers, self._device), rows.settings[last_rows], rows.count[last_rows]
        )

    def _record_tokens(
        self,
        tokens: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float64],
        supports: list[tuple[int, ...]] | None,
    ) -> list[TokenEvent]:
        """Record one token for every row, remove finished rows, and return the token events."""
        rows = self._batch
        count = len(self._batch)
        _check_finite(logprobs, rows, self._version)
        rows.append_tokens(tokens, logprobs, self._version, supports)
        stopped = self._settings.is_stop[rows.settings[:count], tokens]
        if self._stop_texts:
            stopped |= _find_text_stops(
                tokens, rows, self._stop_texts, self._settings.min_new_tokens
            )
        finished = (stopped | (rows.count[:count] >= rows.limit[:count])).nonzero()[0].tolist()
        ends: list[Literal["stop", "length"] | None] = [None] * count
        for row in finished:
            ends[row] = "stop" if stopped[row] else "length"
        columns = (
            tokens.tolist(),
            logprobs.tolist(),
            repeat(self._version),
            ends,
            supports or repeat(()),
        )
        events = list(
            map(TokenEvent, rows.ids, rows.ks, *columns, self._settings.take_top_logprobs(count))
        )
        for row in reversed(finished):
            live = self._remove_row(row)
            self._scheduler.finish(live)
            self._forget(live)
        return events

    # -- memory

    def _get_cache(self) -> SequenceCache:
        if self._cache is None:
            self._cache = self._caches.create_cache()
        return self._cache

    def _close_caches(self, holders: list[PromptPrefix | Prefill]) -> None:
        """Close the caches of `holders`, which are shared prefixes and unfinished prompts."""
        for holder in holders:
            self._prefill_caches.pop(holder).close()

    def _close_unused_caches(self, chunks: Iterable[PrefillChunk] = ()) -> None:
        """Close the caches that neither the scheduler nor the remaining `chunks` need."""
        if not self._prefill_caches:
            return
        in_use = {
            *self._scheduler.prefixes.values(),
            *self._scheduler.prefilling,
            *(chunk.prefill for chunk in chunks),
        }
        self._close_caches([holder for holder in self._prefill_caches if holder not in in_use])

    def _add_row(self, live: Live) -> None:
        """Add a row for the sequence `live` to the batch."""
        settings, key = self._sampling_keys[live.key]
        self._batch.add(live, settings, key, live.key in self._stop_texts)

    def _remove_row(self, row: int) -> Live:
        """Remove a row, release its slot, and return its sequence.

        The last row is moved to the index of the removed row.
        """
        assert self._cache is not None
        if self._multi_step is not None:
            self._multi_step.drop()
        self._cache.release(row)
        live = self._batch.remove(row)
        if not len(self._batch):
            self._cache = None
        return live

    def _forget(self, live: Live) -> None:
        del self._sampling_keys[live.key]
        self._stop_texts.pop(live.key, None)


def _compute_limit(network: LanguageNetwork, request: Request, most: int) -> int:
    """Return the maximum number of new tokens of a completion.

    This is the smaller of the request's own limit and `most`, the limit in its sampling settings.
    In a network with learned positions, it is at most the number of positions that the prompt
    leaves free. Raises `DataError` for a limit below 1, and for a prompt that is empty, too long or
    has ids that the model does not have.
    """
    config = network.config
    vocab_size = network.vocab_size
    if (unknown_id := max(request.prompt, default=0)) >= vocab_size or (
        unknown_id := min(request.prompt, default=0)
    ) < 0:
        raise DataError(
            f"id {request.id!r}: the prompt holds token {unknown_id}, and the model knows 0 to "
            f"{vocab_size - 1}; "
            "use the model's own tokenizer"
        )
    if request.max_new_tokens is None:
        limit = most
    else:
        limit = min(most, request.max_new_tokens)
    if limit < 1:
        raise DataError(
            f"id {request.id!r}: max_new_tokens={limit}; a completion has at least 1 token"
        )
    if len(request.prompt) == 0:
        raise DataError(
            f"id {request.id!r}: the prompt is empty, and a model needs a token to continue from; "
            "set tokenizer.add_bos_token=true or leave the row out"
        )
    if config.learned_positions is None:
        return limit
    positions = config.learned_positions - config.position_offset - network.prefix_tokens
    room = positions - len(request.prompt)
    if room < 1:
        raise DataError(
            f"id {request.id!r}: a prompt of {len(request.prompt)} tokens leaves no room in the "
            f"{positions} positions of this model; lower dataset.max_prompt_len"
        )
    return min(limit, room)


def _check_finite(logprobs: npt.NDArray[np.float64], rows: DecodeBatch, version: int) -> None:
    """Raise `NotFinite` if the log-prob of any row is NaN or infinite."""
    if not math.isfinite(logprobs.sum()):
        row = int(np.isfinite(logprobs).argmin())
        raise NotFinite(
            f"the network's logits are not finite for completion {rows.ks[row]} of "
            f"{rows.ids[row]!r} "
            f"at token {rows.count[row]} (weight version {version}); the weights have diverged"
        )


class StopTextDetector:
    """Detector of stop texts in one completion.

    A stop text or a character can span several tokens. Text is therefore decoded only when later
    tokens cannot change it. Special tokens are part of the text.
    """

    def __init__(self, stops: Iterable[str], tokenizer: Tokenizer) -> None:
        self._stops = [stop for stop in stops if stop]
        self._decoder = StreamDecoder(tokenizer, skip_special=False)
        # characters that may begin a stop text still to come
        self._keep = max(map(len, self._stops)) - 1
        self._tail = ""

    def feed(self, token: int) -> bool:
        """Append a token, and return whether it completes a stop text.

        Stop texts that earlier tokens completed are not reported again.
        """
        text = self._tail + self._decoder.feed([token])
        self._tail = text[max(0, len(text) - self._keep) :]
        return any(stop in text for stop in self._stops)


def _find_text_stops(
    tokens: npt.NDArray[np.int64],
    rows: DecodeBatch,
    stops: Mapping[tuple[str, int], StopTextDetector],
    least: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Return, for each row, whether the new token completes one of the row's stop texts.

    `stops` contains the detectors of the completions that have stop texts. `least[i]` is the
    minimum number of tokens of a completion whose sampling settings have index i. The result is
    False for rows with fewer tokens.
    """
    count = len(rows)
    stopped = np.zeros(count, bool)
    for row in np.flatnonzero(rows.watched[:count]).tolist():
        stopped[row] = stops[rows.sequences[row].key].feed(int(tokens[row]))
    return stopped & (rows.count[:count] >= least[rows.settings[:count]])
