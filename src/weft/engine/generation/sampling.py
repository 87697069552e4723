"""Sampling of tokens from logits, and the settings of each sequence as tensors.

Each token is drawn with one uniform random number, by inverting the CDF over the ids in vocabulary
order. Only the n likeliest ids can be drawn; among equally likely ids, lower ids are preferred. n
is limited by top-k, then by top-p over the ids that top-k kept, then by min-p (the order of
`transformers`).

Log-probs are those of the distribution that training recomputes: at `temperature`, normalized over
the kept ids if a limit is set, and over the whole vocabulary otherwise. Ids that `min_new_tokens`
bans can neither be drawn nor kept, but they count in the normalization over the whole vocabulary.
With `greedy`, log-probs are those of the model at temperature 1: if they were normalized over the
one id that is kept, all of them would be 0.
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

from weft import kernels
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError
from weft.kernels import put
from weft.options import validate

CDF_BLOCK = 128  # ids per block of the two-level search in the CDF
RANKED_IDS = 1024  # likeliest ids examined before a whole row is sorted
# probabilities that a CPU processes at once: 2 MB, which fit into its caches
MAX_PROBABILITIES = 1 << 19


@dataclass(frozen=True)
class SampledTokens:
    """Sampled tokens of R rows.

    `tokens` is int64 [R] and `logprobs` float32 [R]. `support_mask` is a bool mask [R, V] of the
    ids left by sampling limits such as top-k, or None without limits.
    """

    tokens: Tensor
    logprobs: Tensor
    support_mask: Tensor | None = None

    @property
    def stacked(self) -> Tensor:
        """Tokens and log-probs in one float64 tensor [R, 2], to be copied to the host together."""
        return torch.stack([self.tokens.double(), self.logprobs.double()], dim=1)


@dataclass(frozen=True)
class TokenBan:
    """Ids that must not be sampled in some rows.

    `ids` is int64 [B]. `rows` is a bool mask [R] of the rows in which the ids are banned.
    """

    rows: Tensor
    ids: Tensor

    def __getitem__(self, part: slice) -> TokenBan:
        return TokenBan(self.rows[part], self.ids)

    def apply(self, scores: Tensor) -> Tensor:
        """Return `scores` [R, V] with minus infinity for the ids that are banned in a row."""
        allowed = scores.clone()
        allowed[:, self.ids] = scores[:, self.ids].masked_fill(self.rows.unsqueeze(-1), -math.inf)
        return allowed


def restricts_vocabulary(spec: GenerationSpec, vocab_size: int) -> bool:
    """Return whether the spec's sampling limits exclude ids of a vocabulary of this size.

    A top_k of at least the size of the vocabulary excludes nothing.
    """
    return not spec.greedy and (spec.top_p < 1.0 or 0 < spec.top_k < vocab_size or spec.min_p > 0.0)


def sample(
    logits: Tensor, uniforms: Tensor, spec: GenerationSpec, banned: TokenBan | None = None
) -> SampledTokens:
    """Sample one token per row of `logits` [R, V] with random numbers `uniforms` [R] in [0, 1).

    Logits may have any float dtype. Probabilities are float32 (float64 for float64 logits) and are
    summed in float64 row by row, so that a row's token does not depend on the other rows. Log-probs
    are float32. Apple's MPS has no float64, so its rows are sampled on the CPU.
    """
    if logits.is_mps:
        logits = logits.cpu()
        uniforms = uniforms.cpu()
        if banned is not None:
            banned = TokenBan(banned.rows.cpu(), banned.ids.cpu())
    copies = (
        banned is not None
        or restricts_vocabulary(spec, logits.shape[-1])
        or not kernels.serves(logits)
    )
    if not logits.is_cpu or not copies:
        return _sample_part(logits, uniforms, spec, banned)
    size = max(1, MAX_PROBABILITIES // logits.shape[-1])
    parts = []
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        parts.append(
            _sample_part(
                logits[rows], uniforms[rows], spec, None if banned is None else banned[rows]
            )
        )
    support_masks = []
    for part in parts:
        if part.support_mask is not None:
            support_masks.append(part.support_mask)
    return SampledTokens(
        torch.cat([part.tokens for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat(support_masks) if support_masks else None,
    )


def find_top_logprobs(
    logits: Tensor, spec: GenerationSpec, banned: TokenBan | None = None
) -> tuple[Tensor, Tensor]:
    """Return the `spec.top_logprobs` likeliest ids of each row and their log-probs, best first.

    Ids are int64 [R, n]. Log-probs are float32 [R, n] and belong to the distribution that `sample`
    samples from. Ids that cannot be sampled have log-prob minus infinity.
    """
    if logits.is_mps:
        logits = logits.cpu()
        if banned is not None:
            banned = TokenBan(banned.rows.cpu(), banned.ids.cpu())
    scores = _scale_logits(logits, spec)
    allowed = scores if banned is None else banned.apply(scores)
    if restricts_vocabulary(spec, logits.shape[-1]):
        scores = allowed = scores.masked_fill(~select_support(allowed.double(), spec), -math.inf)
    best, ids = allowed.topk(min(spec.top_logprobs, logits.shape[-1]), dim=-1)
    return ids, _compute_logprobs(scores, ids).masked_fill(best == -math.inf, -math.inf)


def sample_rows(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> SampledTokens:
    """Sample from the whole vocabulary as `sample` does, but with one temperature per row.

    `uniforms` and `temperatures` are float64 [R]; rows with temperature 0 are padding. If
    `temperatures` is None, the likeliest ids are returned. The computation does not depend on the
    host, so a CUDA graph can capture it.
    """
    if kernels.fused.serves("draw", logits):
        return SampledTokens(*kernels.fused.draw(logits, uniforms, temperatures))
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperatures is None:
        return SampledTokens(tokens := scores.argmax(dim=-1), _compute_logprobs(scores, tokens))
    scores = scores / temperatures.where(temperatures > 0.0, 1.0).to(scores.dtype)[:, None]
    return SampledTokens(*_sample_tokens(scores, scores, uniforms))


def _sample_part(
    logits: Tensor, uniforms: Tensor, spec: GenerationSpec, banned: TokenBan | None
) -> SampledTokens:
    scores = _scale_logits(logits, spec)
    allowed = scores if banned is None else banned.apply(scores)
    if spec.greedy:
        return SampledTokens(tokens := allowed.argmax(dim=-1), _compute_logprobs(scores, tokens))
    if not restricts_vocabulary(spec, logits.shape[-1]):
        return SampledTokens(*_sample_tokens(allowed, scores, uniforms))
    support_mask = select_support(allowed.double(), spec)
    kept_scores = scores.masked_fill(~support_mask, -math.inf)
    return SampledTokens(*_sample_tokens(kept_scores, kept_scores, uniforms), support_mask)


def _scale_logits(logits: Tensor, spec: GenerationSpec) -> Tensor:
    """Return logits divided by the temperature, in float32 or wider."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperature = 1.0 if spec.greedy else spec.temperature
    return scores if temperature == 1.0 else scores / temperature


def _sample_tokens(allowed: Tensor, scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample tokens from the softmax of `allowed`, and return them with their log-probs.

    The log-probs are those of the softmax of `scores`. If ids are banned, `allowed` is minus
    infinity for these ids, but `scores` is not; otherwise, both are equal.
    """
    if not kernels.serves(allowed):
        return (tokens := invert_cdf(allowed.softmax(dim=-1), uniforms)), _compute_logprobs(
            scores, tokens
        )
    tokens, logprobs = kernels.draw(allowed, uniforms)
    return tokens, logprobs if allowed is scores else _compute_logprobs(scores, tokens)


def _compute_logprobs(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probs of `tokens`, [R] or [R, n], in the softmax of `scores`.

    The operations are those of `weft.models.network.token_outputs`, so that equal logits give
    bitwise equal log-probs.
    """
    if kernels.serves(scores):
        lse = kernels.statistics(scores).lse
        return _select(scores, tokens) - (lse if tokens.dim() == 1 else lse.unsqueeze(-1))
    return _select(scores.log_softmax(dim=-1), tokens).float()


def invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id per row with a probability proportional to its weight, and return ids int64 [R].

    `weights` [R, V] are float32 or float64. They must not be negative, and need not be normalized.
    `uniforms` [R] are random numbers in [0, 1). The result is the first id whose cumulative weight
    exceeds `uniform * total`. Cumulative weights are summed in float64: first over blocks of ids,
    and then within the block that contains the id, so that no row needs a running sum over the
    vocabulary.
    """
    rows, vocab = weights.shape
    if vocab % CDF_BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % CDF_BLOCK))
    blocks = weights.view(rows, -1, CDF_BLOCK)
    ends = _compute_running_sums(blocks.sum(dim=-1, dtype=torch.float64))
    target = uniforms.to(torch.float64) * ends[:, -1]
    block = _find_first_above(ends, target)
    before = torch.where(block > 0, _select(ends, (block - 1).clamp(min=0)), 0.0)
    inside = _compute_running_sums(
        blocks[torch.arange(rows, device=weights.device), block].double()
    )
    return block * CDF_BLOCK + _find_first_above(inside, target - before)


def select_support(scores: Tensor, spec: GenerationSpec) -> Tensor:
    """Return a bool mask [R, V] of the ids that top-k, top-p and min-p keep.

    `scores` [R, V] are logits divided by the temperature. If the kept ids are recorded
    (`record_support`), only the `max_support` most likely of them are kept, because a flat
    distribution could keep the whole vocabulary. The most likely id is always kept, and ids with a
    score of minus infinity never are.
    """
    possible = scores > -math.inf
    mask = possible
    if spec.min_p > 0.0:
        mask = mask & (scores >= scores.amax(dim=-1, keepdim=True) + math.log(spec.min_p))
    vocab = scores.shape[-1]
    limit = min(spec.top_k or vocab, spec.max_support if spec.record_support else vocab, vocab)
    if spec.top_p >= 1.0 and limit == vocab:
        return mask
    ranked, count = _rank_ids(scores, limit, spec.top_p)
    count = torch.minimum(count, possible.sum(dim=-1))
    threshold = _select(ranked, count - 1).unsqueeze(-1)
    above = scores > threshold
    level = scores == threshold
    num_of_level = count.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    return mask & (above | (level & (level.cumsum(dim=-1) <= num_of_level)))


def list_supports(mask: Tensor) -> list[list[int]]:
    """Return the ids that the mask keeps in each row, in vocabulary order."""
    counts = mask.sum(dim=-1).tolist()
    ids = mask.nonzero()[:, 1]
    return [part.tolist() for part in ids.split(counts)]


def _rank_ids(scores: Tensor, limit: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the scores of each row's likeliest ids, and how many of these ids are kept.

    The scores are [R, w], best first; the numbers of kept ids are [R]. A row keeps the smallest
    number of ids, at most `limit` (the value of top-k), whose total probability reaches `top_p`.

    If `top_p` is 1, w is `limit`. Otherwise, w is `RANKED_IDS` if this many ids reach `top_p` in
    every row, which is nearly always the case, and `limit` if not.
    """
    if top_p >= 1.0:
        ranked = scores.topk(limit, dim=-1).values
        return ranked, torch.full_like(ranked[:, 0], limit, dtype=torch.int64)
    log_total = (
        scores if limit == scores.shape[-1] else scores.topk(limit, dim=-1).values
    ).logsumexp(-1, keepdim=True)
    for width in sorted({min(RANKED_IDS, limit), limit}):
        ranked = scores.topk(width, dim=-1).values
        mass = _compute_running_sums((ranked - log_total).exp_())
        if bool((mass[:, -1] >= top_p).all()):
            break
    return ranked, ((mass < top_p).sum(dim=-1) + 1).clamp(max=ranked.shape[-1])


def _compute_running_sums(x: Tensor) -> Tensor:
    """Return running sums of x [R, n] along its last dimension.

    With deterministic algorithms on CUDA, torch does not allow `cumsum`, because its order of
    summation can vary. In this case, x is multiplied by a triangular matrix of ones.
    """
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
        return x @ x.new_ones(x.shape[-1], x.shape[-1]).triu_()
    return x.cumsum(dim=-1)


def _find_first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Return the first index [R] at which the running sums `ends` [R, n] exceed `target` [R].

    Rounding can leave all sums of a row too small. The result is then the first index of the
    largest sum.
    """
    return torch.minimum((ends <= target.unsqueeze(-1)).sum(dim=-1), ends.argmax(dim=-1))


def _select(values: Tensor, index: Tensor) -> Tensor:
    if index.dim() == 1:
        return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return values.gather(-1, index)


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

    @property
    def decodes_ahead(self) -> bool:
        """True if a step may be launched before the tokens of the last one are known."""
        return self._default_spec.decode_ahead

    def find_index(self, sampling: GenerationSpec | None) -> int:
        """Return the index of a request's settings in this table, and add them if they are new.

        If `sampling` is None, the result is 0, the index of the generator's own settings. A
        request's values of `seed`, `tokenizer`, `record_support`, `max_support`, `kv_cache_gb` and
        `decode_ahead` are replaced by the generator's. The generator's stop ids apply to all
        requests. Raises `ConfigError` for values out of range, and for stop texts without a
        tokenizer.
        """
        if sampling is None:
            return 0
        if id(sampling) not in self._index_by_id:
            validate(sampling, "sampling.")
            default = self._default_spec
            spec = replace(
                sampling,
                seed=default.seed,
                tokenizer=default.tokenizer,
                record_support=default.record_support,
                max_support=default.max_support,
                kv_cache_gb=default.kv_cache_gb,
                decode_ahead=default.decode_ahead,
            )
            if spec.stop and spec.tokenizer is None:
                raise ConfigError(
                    f"sampling.stop={spec.stop}: stop texts need a tokenizer, and this role has "
                    f"none"
                )
            spec = _convert_stop_texts(spec)
            index = self.specs.index(spec) if spec in self.specs else self._add(spec)
            self._index_by_id[id(sampling)] = (sampling, index)
        return self._index_by_id[id(sampling)][1]

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
            device_rows = put(rows, logits.device)
            tokens[rows], logprobs[rows], row_supports = self._sample_kind(
                logits[device_rows], uniforms[device_rows], kind, done[rows]
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
        drawn = sample(logits, uniforms, spec, self._build_ban(kind, done, logits.device))
        if spec.record_support:
            id_lists: Sequence[Sequence[int]] = [()] * len(logits)
            if drawn.support_mask is not None:
                id_lists = list_supports(drawn.support_mask)
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
        if top_logprobs is None:
            return repeat(())
        return [()] * (count - len(top_logprobs)) + top_logprobs

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
            ids, logprobs = find_top_logprobs(
                logits[put(rows, logits.device)], self.specs[kind], banned
            )
            for row, row_ids, values in zip(
                rows.tolist(), ids.tolist(), logprobs.tolist(), strict=True
            ):
                top_logprobs[row] = tuple(
                    (id, value)
                    for id, value in zip(row_ids, values, strict=True)
                    if value > -math.inf
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
        is_unsupported = any(
            restricts_vocabulary(spec, self.vocab_size) or spec.top_logprobs
            for spec in specs.values()
        )
        if len(greedy) > 1 or is_unsupported:
            return None
        temperatures = np.ones(len(self.specs))
        for kind, spec in specs.items():
            temperatures[kind] = spec.temperature
        return GraphSampling(greedy.pop(), temperatures[settings])

    def _build_ban(
        self, kind: int, done: npt.NDArray[np.int64], device: torch.device
    ) -> TokenBan | None:
        """Return a ban on the stop ids in rows that have not reached their minimum length.

        Returns None if there are no such rows or no stop ids.
        """
        early = done < self.min_new_tokens[kind]
        if not early.any():
            return None
        ends = np.flatnonzero(self.is_stop[kind])
        if len(ends):
            return TokenBan(put(early, device), put(ends, device))
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
