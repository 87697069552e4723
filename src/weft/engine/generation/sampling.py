"""Sampling of tokens from logits.

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
from dataclasses import dataclass

import torch
from torch import Tensor

from weft import kernels
from weft.engine.spec import GenerationSpec

CDF_BLOCK = 128  # ids per block of the two-level search in the CDF
RANKED_IDS = 1024  # likeliest ids examined before a whole row is sorted
MAX_PROBABILITIES = (
    1 << 19
)  # probabilities that a CPU processes at once: 2 MB, which fit into its caches


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
        if banned is None:
            banned = None
        else:
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
        if banned is None:
            banned = None
        else:
            banned = TokenBan(banned.rows.cpu(), banned.ids.cpu())
    scores = _scale_logits(logits, spec)
    allowed = scores if banned is None else banned.apply(scores)
    if restricts_vocabulary(spec, logits.shape[-1]):
        scores = allowed = scores.masked_fill(~select_support(allowed.double(), spec), -math.inf)
    best, ids = allowed.topk(min(spec.top_logprobs, logits.shape[-1]), dim=-1)
    return ids, _compute_logprobs(scores, ids).masked_fill(best == -math.inf, -math.inf)


def sample_rows(logits: Tensor, uniforms: Tensor, temperatures: Tensor | None) -> SampledTokens:
    """Sample from the whole vocabulary as `sample` does, but with one temperature per row.

    `temperatures` is [R]; rows with temperature 0 are padding. If `temperatures` is None, the
    likeliest ids are returned. The computation does not depend on the host, so a CUDA graph can
    capture it.
    """
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
    among = scores.masked_fill(~support_mask, -math.inf)
    return SampledTokens(*_sample_tokens(among, among, uniforms), support_mask)


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
    wanted = count.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    return mask & (above | (level & (level.cumsum(dim=-1) <= wanted)))


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
