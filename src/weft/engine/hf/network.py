"""Network for the engine that computes log-probs, values and scores with a `transformers` decoder.

A decoder whose attention uses `AttentionInterface` computes whole packs with weft's attention.
Other decoders compute sequences of equal length as a batch without padding, which is exact for
every architecture. `weft.engine.hf.trial` determines which of these two methods a decoder needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from weft.algorithms.base import Output
from weft.engine.hf.imported import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from weft.errors import ConfigError
from weft.kernels import AttentionSpec
from weft.models.attention.contexts import AttentionContext, AttentionInputs, Dense
from weft.models.attention.dispatch import attend
from weft.models.kv.slots import Cached
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import DropoutKeys, TokenDropout
from weft.models.network.output_projection import OutputProjection
from weft.models.network.packed import Packed, SamplingSupport, pack
from weft.models.network.token_outputs import compute_outputs
from weft.models.network.transformer import (
    Head,
    Pooling,
    average_scores,
    check_outputs,
    compute_row_values,
    find_score_rows,
)

NAME = "weft_packed"
STATE = "weft_pass"  # attribute of an attention module
# arguments of attention functions that weft's attention doesn't support
UNKNOWN = ("s_aux", "position_bias")


class UnsupportedAttention(Exception):
    """Raised if a decoder's attention needs something that weft's attention does not compute."""


@dataclass(frozen=True)
class AttentionPass:
    """Data that an attention module needs about the current forward pass.

    `layer` is the index of the module among the attention modules, in call order.
    """

    context: AttentionContext
    dropout: TokenDropout | None
    layer: int


@dataclass
class AttentionRecorder:
    """Stand-in for an `AttentionPass` that records attention calls in the trial run of a decoder.

    `callers` are the attention modules in call order. For each module, `shapes` contains the
    numbers of query and key-value heads, and the sizes of key and value heads.
    """

    context: AttentionContext
    callers: list[nn.Module]
    shapes: list[tuple[int, int, int, int]]  # query heads, kv heads, key dim, value dim


def compute_packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute weft's attention with the signature of an attention function of `transformers`.

    `query` is `[1, heads, T, dim]`, `key` and `value` are `[1, kv_heads, T, dim]`, and the result
    is `[1, T, heads, dim]`.
    """
    state = vars(module).get(STATE)
    window = settings.get("sliding_window")
    if isinstance(state, AttentionRecorder):
        _record(state, module, (query, key, value), attention_mask, settings)
        state = AttentionPass(state.context, None, len(state.callers) - 1)
    assert isinstance(state, AttentionPass), "HFNetwork sets the pass before it calls the module"
    spec = AttentionSpec(
        scale=settings.get("scaling") or query.shape[-1] ** -0.5,
        window=window,
        softcap=settings.get("softcap"),
        dropout=settings.get("dropout") or 0.0,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    given = AttentionInputs(q, k, v, spec, state.layer, state.dropout)
    return attend(given, state.context)[None], None


def _record(
    recorder: AttentionRecorder,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    settings: Any,
) -> None:
    query, key, value = qkv
    for name in UNKNOWN:
        if settings.get(name) is not None:
            raise UnsupportedAttention(f"its attention has {name}")
    limit = None if mask is None else int(mask.flatten()[0])
    if limit is not None and limit != settings.get("sliding_window"):
        raise UnsupportedAttention("its attention mask is neither causal nor a sliding window")
    if module in recorder.callers:
        raise UnsupportedAttention("its attention runs several times a layer")
    recorder.callers.append(module)
    recorder.shapes.append((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))


def get_window_limit(
    *_: Any, local_size: int | None = None, device: Any = None, **__: Any
) -> Tensor | None:
    """Return the size of the attention window, or None if there is no window.

    `transformers` calls this function to build an attention mask. Weft's attention needs no mask,
    so the size is returned instead. `_record` checks that the attention function uses the same
    size.
    """
    if local_size is None:
        return None
    return torch.full((1, 1, 1, 1), float(local_size))


def register() -> None:
    """Register weft's attention in `transformers`; repeated calls change nothing."""
    AttentionInterface.register(NAME, compute_packed_attention)
    AttentionMaskInterface.register(NAME, get_window_limit)


DIGIT_BITS = 7
DIGITS = 4  # a token id as numbers below 128, which every float dtype holds exactly


@dataclass(frozen=True)
class HeadLayer:
    """Output layer, which maps a hidden state h to the logits cap(W (scale * h) + b).

    W and b are the weight and bias of `layer`. cap(x) is softcap * tanh(x / softcap), or x if
    `softcap` is None.
    """

    layer: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    @property
    def projection(self) -> OutputProjection:
        return OutputProjection(self.layer.weight, self.layer.bias, self.softcap)


class HFNetwork(nn.Module):
    """Network that runs a decoder of `transformers` for the engine.

    Args:
        module: An `AutoModelForCausalLM` (head "lm"), or an `AutoModelForSequenceClassification`
            with one label.
        head: Kind of head, which determines the outputs.
        head_layer: Output layer of the module.
        config: Description of the network for the generator and the cost estimate.
        pooling: How a sequence is scored: "last" is the score of its last token, "mean" is the
            mean score of all its tokens.
        callers: The module's attention modules in call order. If the decoder does not support
            packed sequences, this is empty, and only sequences of equal length are computed
            together.
        caches: True if weft's cache can store the decoder's keys and values. If not, the cache
            contains token ids, and the whole sequence is computed again for each new token.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        head: Head,
        head_layer: HeadLayer,
        config: TransformerConfig,
        *,
        pooling: Pooling = "last",
        callers: tuple[nn.Module, ...] = (),
        caches: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.kind = head
        self.pooling = pooling
        self.config = config
        self.vocab_size = config.vocab_size
        self.padding: int | None = None  # id of padding tokens; see `find_score_rows`
        self.held_layers = range(config.num_layers)
        # in a list, so that it is not registered as a submodule
        self._head = [head_layer]
        self._callers = callers
        self._caches = caches

    def forward(
        self,
        x: Packed,
        want: frozenset[Output],
        temperature: float = 1.0,
        support: SamplingSupport | None = None,
    ) -> dict[Output, Tensor]:
        """Compute the same outputs as `weft.models.network.transformer.Transformer`."""
        check_outputs(self.kind, want)
        with _hold_seed(x.dropout):
            mean = self.kind == "score" and self.pooling == "mean"
            rows = find_score_rows(x, self.padding) if self.kind == "score" else x.rows
            states = self.compute_hidden(x, None if mean else rows)
        layer = self._head[0].layer
        if self.kind == "lm":
            rows = states * self._head[0].scale
            projection = self._head[0].projection
            return compute_outputs(rows, x, projection, want, temperature, support)
        bias = 0.0 if layer.bias is None else layer.bias.float()
        if mean:
            return {
                "scores": average_scores(compute_row_values(states, layer.weight), x.attention)
                + bias
            }
        name: Output = "scores" if self.kind == "score" else "values"
        return {name: compute_row_values(states, layer.weight) + bias}

    def can_share_prefixes(self, longest: int) -> bool:
        """Return False, because the trial run of the decoder does not test shared prefixes."""
        return False

    @property
    def prefix_tokens(self) -> int:
        """Number of tokens of a trained prefix: 0, because only weft's own network can have one."""
        return 0

    @property
    def can_read_pages(self) -> bool:
        """True if the attention modules call weft's attention, which reads pages of the cache."""
        return self._caches

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states that are the head's input, `[T, hidden]`.

        With `rows`, int64 `[N]`, the result is `[N, hidden]` and contains only these rows.
        """
        states = self._compute_states(x)
        return states if rows is None else states[rows]

    def _compute_states(self, x: Packed) -> Tensor:
        if isinstance(x.attention, Cached) and not self._caches:
            return self._recompute_cached(x, x.attention)
        if self._callers:
            keys = None
            if x.dropout is not None:
                keys = TokenDropout.from_lengths(x.dropout, x.attention.dense.lengths, x.positions)
            for layer, caller in enumerate(self._callers):
                setattr(caller, STATE, AttentionPass(x.attention, keys, layer))
            return self.run(x.tokens[None], x.positions[None])[0]
        return self._compute_by_length(x)

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return float32 logits `[R, V]`, before temperature, of hidden states `[R, hidden]`.

        `wide` is the float32 copy of the output matrix, as in `Transformer.next_token_logits`.
        """
        return self._head[0].projection.compute_logits(hidden_rows * self._head[0].scale, wide)

    @property
    def output_matrix(self) -> Tensor | None:
        """Matrix that maps hidden states to logits, as in `Transformer.output_matrix`."""
        return self._head[0].layer.weight

    def run(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the decoder's hidden states `[B, L, hidden]` of unpadded tokens `[B, L]`."""
        return run(self.module, tokens, positions)

    def _compute_by_length(self, x: Packed) -> Tensor:
        starts = x.attention.dense.starts
        members: dict[int, list[int]] = {}
        for start, stop in pairwise(starts):
            members.setdefault(stop - start, []).append(start)
        members.pop(0, None)
        index = []
        for length, sequence_starts in members.items():
            index.append(
                torch.tensor(sequence_starts, device=x.tokens.device)[:, None]
                + torch.arange(length, device=x.tokens.device)
            )
        states = [self.run(x.tokens[cells]).flatten(0, 1) for cells in index]
        order = torch.cat([cells.flatten() for cells in index])
        return torch.cat(states)[torch.argsort(order)]

    def _recompute_cached(self, x: Packed, context: Cached) -> Tensor:
        """Return hidden states of new tokens for a decoder whose keys and values cannot be cached.

        The cache contains token ids instead. All tokens of the sequences are computed again from
        these ids.
        """
        shifts = torch.arange(DIGITS, device=x.tokens.device) * DIGIT_BITS
        digits = (x.tokens[:, None] >> shifts) & ((1 << DIGIT_BITS) - 1)
        stored = digits[:, None].to(context.cache.dtype)
        context.cache.write(0, context, stored, stored)
        cached_tokens = (context.cache.read(0, context)[0][:, 0].to(torch.int64) << shifts).sum(-1)
        new, totals = context.new.tolist(), (context.used + context.new).tolist()
        whole = pack(
            [tokens[:total] for tokens, total in zip(cached_tokens, totals, strict=True)],
            x.tokens.device,
        )
        states = self.compute_hidden(whole).split(totals)
        return torch.cat(
            [state[len(state) - count :] for state, count in zip(states, new, strict=True)]
        )


def run(module: PreTrainedModel, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Run the decoder without its head on tokens `[B, L]` without padding.

    Returns the hidden states `[B, L, hidden]`.
    """
    places = {} if positions is None else {"position_ids": positions}
    return _get_trunk(module)(input_ids=tokens, **places).last_hidden_state


def _get_trunk(module: PreTrainedModel) -> nn.Module:
    """Return the decoder without its head.

    This is normally the module's `base_model`. If a class does not define `base_model` correctly,
    the only child module that is a `PreTrainedModel` is used instead. Raises `ConfigError` if there
    is not exactly one.
    """
    if module.base_model is not module:
        return module.base_model
    inside = []
    for child in module.children():
        if isinstance(child, PreTrainedModel):
            inside.append(child)
    if len(inside) != 1:
        raise ConfigError(
            f"backend=hf: a {module.config.model_type} model is not one decoder and a head; weft "
            f"cannot use it"
        )
    return inside[0]


def record_attention(module: PreTrainedModel, x: Packed) -> tuple[Tensor, AttentionRecorder]:
    """Run the decoder on a pack with weft's attention, and record its attention calls.

    Returns the hidden states `[T, hidden]` and a recorder with the calls of the attention modules.
    Raises `UnsupportedAttention` if a module needs something that weft's attention does not
    support.
    """
    assert isinstance(x.attention, Dense)
    recorder = AttentionRecorder(x.attention, [], [])
    submodules = list(module.modules())
    for submodule in submodules:
        setattr(submodule, STATE, recorder)
    try:
        return run(module, x.tokens[None], x.positions[None])[0], recorder
    finally:
        for submodule in submodules:
            delattr(submodule, STATE)


@contextmanager
def _hold_seed(keys: DropoutKeys | None) -> Iterator[None]:
    """Seed torch's generator, which the module's dropout uses, from the dropout keys of the pack.

    The generator's state is restored at the end of the context.
    """
    if keys is None:
        yield
        return
    low, high = (int(word) & 0xFFFFFFFF for word in keys.keys[0].tolist())
    devices = [keys.keys.device] if keys.keys.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(low | high << 32)
        yield
