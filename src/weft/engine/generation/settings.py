"""Sampling settings of the rows of a batch, which can differ from row to row.

Rows with equal settings are sampled together. Each row refers to its settings by an index; index 0
belongs to the generator's own settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.generation import sampling
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.kernels import put
from weft.options import validate

SampledRows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], "list[tuple[int, ...]] | None"]
TopLogprobs = tuple[tuple[int, float], ...]  # ids and their log-probs, the likeliest first
# Function by which the ranks of one network agree on the tokens of a step. Its arguments are a
# function that samples them on this rank, and the number of rows; it returns a function that waits
# for the agreed tokens. Whether it samples on this rank is decided immediately.
TokenAgreement = Callable[[Callable[[], SampledRows], int], Callable[[], SampledRows]]


def sample_locally(draw: Callable[[], SampledRows], rows: int) -> Callable[[], SampledRows]:
    """Call `draw` to sample tokens on this rank, and return a function that returns them.

    This is the `TokenAgreement` to use if no other rank has to sample the same tokens. `rows` is
    ignored.
    """
    drawn = draw()
    return lambda: drawn


@dataclass(frozen=True)
class GraphSampling:
    """Sampling parameters of a captured graph.

    If `greedy` is True, the likeliest token of each row is chosen. Otherwise each row is sampled
    from the whole vocabulary at its temperature in `temperatures` [R].
    """

    greedy: bool
    temperatures: npt.NDArray[np.float64]


def concatenate_rows(first: SampledRows, second: SampledRows) -> SampledRows:
    """Return the sampled rows of `first`, followed by those of `second`."""
    supports = [[()] * len(drawn[0]) if drawn[2] is None else drawn[2] for drawn in (first, second)]
    recorded = first[2] is not None or second[2] is not None
    return (
        np.concatenate([first[0], second[0]]),
        np.concatenate([first[1], second[1]]),
        [*supports[0], *supports[1]] if recorded else None,
    )


class SettingsTable:
    """Table of the sampling settings of a generator and of its requests.

    Each entry has an index i, which `find_index` returns. `specs[i]` contains all settings of the
    entry, `is_stop[i]` is a bool mask [V] of the ids that end a completion, and `min_new_tokens[i]`
    is the minimum length of a completion in tokens.
    """

    def __init__(self, spec: GenerationSpec, stop_ids: frozenset[int], vocab_size: int) -> None:
        self._default_spec = spec
        self.vocab_size = vocab_size
        # by id(), so that each object is compared only once
        self._index_by_id: dict[int, tuple[GenerationSpec, int]] = {}
        self.specs: list[GenerationSpec] = []
        self.is_stop = np.zeros((0, vocab_size), bool)
        self.min_new_tokens = np.zeros(0, np.int64)
        self._stop_ids = stop_ids
        self._top_logprobs: list[TopLogprobs] | None = None
        self._add(_convert_stop_texts(spec))

    @property
    def seed(self) -> int:
        return self._default_spec.seed

    def find_index(self, given: GenerationSpec | None) -> int:
        """Return the index of a request's settings in this table, and add them if they are new.

        If `given` is None, the result is 0, the index of the generator's own settings. A request's
        values of `seed`, `tokenizer`, `record_support`, `max_support` and `kv_cache_gb` are
        replaced by the generator's. The generator's stop ids apply to all requests. Raises
        `ConfigError` for values out of range, and for stop texts without a tokenizer.
        """
        if given is None:
            return 0
        if id(given) not in self._index_by_id:
            validate(given, "sampling.")
            own = self._default_spec
            spec = replace(
                given,
                seed=own.seed,
                tokenizer=own.tokenizer,
                record_support=own.record_support,
                max_support=own.max_support,
                kv_cache_gb=own.kv_cache_gb,
            )
            if spec.stop and spec.tokenizer is None:
                raise ConfigError(
                    f"sampling.stop={spec.stop}: stop texts need a tokenizer, and this role has "
                    f"none"
                )
            spec = _convert_stop_texts(spec)
            index = self.specs.index(spec) if spec in self.specs else self._add(spec)
            self._index_by_id[id(given)] = (given, index)
        return self._index_by_id[id(given)][1]

    def sample(
        self,
        logits: Tensor,
        uniforms: Tensor,
        settings: npt.NDArray[np.int64],
        done: npt.NDArray[np.int64],
    ) -> SampledRows:
        """Sample one token for each row of `logits` [R, V].

        `settings` [R] contains the index of each row's settings, and `done` [R] the number of
        tokens already sampled for each row. Returns (tokens, log-probs, ids that the sampling
        limits allowed); the ids are None unless `record_support` is set. If any settings request
        likely alternatives, call `take_top_logprobs` afterwards to get them.
        """
        self._top_logprobs = self._find_top_logprobs(logits, settings, done)
        if (settings == settings[0]).all():
            return self._sample_kind(logits, uniforms, int(settings[0]), done)
        tokens = np.zeros(len(settings), np.int64)
        logprobs = np.zeros(len(settings))
        supports: list[tuple[int, ...]] = [()] * len(settings)
        for kind in np.unique(settings).tolist():
            rows = np.flatnonzero(settings == kind)
            where = put(rows, logits.device)
            tokens[rows], logprobs[rows], row_supports = self._sample_kind(
                logits[where], uniforms[where], kind, done[rows]
            )
            for row, support in zip(rows.tolist(), row_supports or [()] * len(rows), strict=True):
                supports[row] = support
        return tokens, logprobs, supports if self._default_spec.record_support else None

    def _sample_kind(
        self, logits: Tensor, uniforms: Tensor, kind: int, done: npt.NDArray[np.int64]
    ) -> SampledRows:
        """Sample one token for each row, where all rows have the settings with index `kind`."""
        spec = self.specs[kind]
        supports = None
        drawn = sampling.sample(logits, uniforms, spec, self._build_ban(kind, done, logits.device))
        if spec.record_support:
            id_lists: Sequence[Sequence[int]] = [()] * len(logits)
            if drawn.support_mask is not None:
                id_lists = sampling.list_supports(drawn.support_mask)
            supports = [tuple(ids) for ids in id_lists]
        if drawn.tokens.is_cpu:
            return drawn.tokens.numpy(), drawn.logprobs.numpy().astype(np.float64), supports
        tokens, logprobs = drawn.stacked.cpu().numpy().T
        return tokens.astype(np.int64), logprobs.copy(), supports

    def take_top_logprobs(self, count: int) -> Iterable[TopLogprobs]:
        """Return, for each row of the batch, a tuple of the likeliest ids with their log-probs.

        `count` is the number of rows. The previous call of `sample` stored tuples for the rows that
        it sampled, which are at the end of the batch. Rows before these get an empty tuple, as do
        rows whose settings do not request likely alternatives (`top_logprobs`). The stored tuples
        are deleted, so a second call would return only empty tuples.
        """
        top_logprobs = self._top_logprobs
        self._top_logprobs = None
        return (
            repeat(())
            if top_logprobs is None
            else [()] * (count - len(top_logprobs)) + top_logprobs
        )

    def _find_top_logprobs(
        self, logits: Tensor, settings: npt.NDArray[np.int64], done: npt.NDArray[np.int64]
    ) -> list[TopLogprobs] | None:
        """Return, for each row of `logits` [R, V], the likeliest ids with their log-probs.

        The tuple of a row is empty if the row's settings do not request likely alternatives. If no
        row requests them, None is returned instead of a list.
        """
        kinds = []
        for kind in np.unique(settings).tolist():
            if self.specs[kind].top_logprobs:
                kinds.append(kind)
        if not kinds:
            return None
        top_logprobs: list[TopLogprobs] = [()] * len(settings)
        for kind in kinds:
            rows = np.flatnonzero(settings == kind)
            banned = self._build_ban(kind, done[rows], logits.device)
            ids, logprobs = sampling.find_top_logprobs(
                logits[put(rows, logits.device)], self.specs[kind], banned
            )
            for row, own, values in zip(
                rows.tolist(), ids.tolist(), logprobs.tolist(), strict=True
            ):
                top_logprobs[row] = tuple(
                    (id, value) for id, value in zip(own, values, strict=True) if value > -math.inf
                )
        return top_logprobs

    def build_graph_sampling(
        self, settings: npt.NDArray[np.int64], done: npt.NDArray[np.int64]
    ) -> GraphSampling | None:
        """Return the parameters for sampling rows in a captured graph, or None if unsupported.

        A graph does not support top-k, top-p and min-p limits, the options `record_support` and
        `top_logprobs`, rows below their minimum length, or a mixture of greedy and sampled rows.
        """
        if self._default_spec.record_support or (done < self.min_new_tokens[settings]).any():
            return None
        specs = {kind: self.specs[kind] for kind in np.unique(settings).tolist()}
        greedy = {spec.greedy for spec in specs.values()}
        beyond = any(
            sampling.restricts_vocabulary(spec, self.vocab_size) or spec.top_logprobs
            for spec in specs.values()
        )
        if len(greedy) > 1 or beyond:
            return None
        temperatures = np.ones(len(self.specs))
        for kind, spec in specs.items():
            temperatures[kind] = spec.temperature
        return GraphSampling(greedy.pop(), temperatures[settings])

    def _build_ban(
        self, kind: int, done: npt.NDArray[np.int64], device: torch.device
    ) -> sampling.TokenBan | None:
        """Return a ban on the stop ids in rows that have not reached their minimum length.

        Returns None if there are no such rows or no stop ids.
        """
        early = done < self.min_new_tokens[kind]
        if not early.any():
            return None
        ends = np.flatnonzero(self.is_stop[kind])
        if len(ends):
            return sampling.TokenBan(put(early, device), put(ends, device))
        return None

    def _add(self, spec: GenerationSpec) -> int:
        stops = np.zeros((1, self.vocab_size), bool)
        stops[
            0, [id for id in self._stop_ids | set(spec.stop_ids) if 0 <= id < self.vocab_size]
        ] = True
        self.specs.append(spec)
        self.is_stop = np.concatenate([self.is_stop, stops])
        self.min_new_tokens = np.append(self.min_new_tokens, spec.min_new_tokens)
        return len(self.specs) - 1


def _convert_stop_texts(spec: GenerationSpec) -> GenerationSpec:
    """Replace stop texts that are single special tokens by stop ids, and return the new settings.

    For example, `<|im_end|>` is detected by its id, which needs no decoding of text.
    """
    if not spec.stop or spec.tokenizer is None:
        return spec
    special_ids = {text: spec.tokenizer.find_special_id(text) for text in spec.stop}
    ids = [id for id in special_ids.values() if id is not None]
    return replace(
        spec,
        stop=[text for text, id in special_ids.items() if id is None],
        stop_ids=[*spec.stop_ids, *ids],
    )
