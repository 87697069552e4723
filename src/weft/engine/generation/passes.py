"""Forward passes of a network over cached sequences, and the interface of such networks.

If the CPU kernel supports the network, a pass is one call of the kernel; otherwise, the network's
modules run one after another. The results are bitwise equal. The kernel can also take several
decode steps in one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from weft import kernels
from weft.engine.generation import sampling
from weft.engine.generation.decode_batch import DecodeBatch
from weft.engine.generation.sampling import SampledRows, SettingsTable
from weft.kernels import (
    BlockWeights,
    CachedForward,
    CachedPass,
    DrawParameters,
    LinearWeights,
    NetworkWeights,
    PrefixRows,
)
from weft.models.kv.slots import Cached, KVCache, PrefixGroup
from weft.models.network import rope
from weft.models.network.block import MLP, Attention, Block, Norm
from weft.models.network.config import TransformerConfig
from weft.models.network.fused_sums import has_hooks
from weft.models.network.linear import Linear
from weft.models.network.packed import Packed
from weft.models.network.transformer import Embedding, Transformer


class LanguageNetwork(Protocol):
    """Interface of a network whose next tokens a generator samples."""

    config: TransformerConfig
    # size of the whole network's vocabulary; `config` can describe only a shard
    vocab_size: int
    training: bool

    @property
    def prefix_tokens(self) -> int:
        """Number of placeholder tokens for a trained prefix at the start of each sequence.

        Trained prefixes are explained in `weft.models.network.prefix`.
        """
        ...

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states.

        `wide` is the float32 copy of `output_matrix` that `kernels.prepare_wide` returns.
        """
        ...

    @property
    def output_matrix(self) -> Tensor | None:
        """Matrix that maps hidden states to logits, or None if torch does not have it here."""
        ...

    def parameters(self) -> Iterator[Tensor]: ...
    def train(self, mode: bool = True) -> object: ...


class Decoder(LanguageNetwork, Protocol):
    """Interface of a network of torch that generates text, such as `Transformer`."""

    held_layers: Sequence[int]  # numbers of its blocks in the whole network

    def can_share_prefixes(self, longest: int) -> bool:
        """Return whether sequences can read a shared prefix that is stored separately from them.

        `longest` is the maximum number of tokens in a sequence.
        """
        ...

    @property
    def can_read_pages(self) -> bool:
        """True if keys and values can be stored in pages, which requires weft's own attention."""
        ...

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class DeferringDecoder(Protocol):
    """Decoder that can defer the work of forward passes, as pipeline stages do.

    `compute_hidden(x)` without `rows` may return a tensor whose values are not computed yet. They
    are filled in by later passes, or by `catch_up`.
    """

    def catch_up(self) -> None:
        """Complete the forward passes whose work was deferred.

        Must be called before the keys and values that these passes write are copied or moved.
        """
        ...


# Values of configuration fields that the kernel supports; None: all values. A field that is not
# listed must have its default value.
FIELD_RULES: Mapping[str, Callable[[TransformerConfig], bool] | None] = {
    "family": None,
    "vocab_size": None,
    "hidden_size": None,
    "num_layers": None,
    "num_heads": None,
    "num_kv_heads": None,
    "head_dim": lambda config: config.head_dim <= kernels.MAX_HEAD_DIM,
    "intermediate_size": None,
    "max_positions": None,
    "norm": lambda config: config.norm != "layer",
    "norm_eps": None,
    "placement": lambda config: config.placement == "pre",
    "activation": lambda config: config.activation == "silu",
    "gated": lambda config: config.gated,
    "rope": None,
    "qkv_bias": None,
    "o_bias": None,
    "mlp_bias": None,
    "head_bias": None,
    "qk_norm": lambda config: config.qk_norm in (None, "head"),
    "attention_scale": None,
    "layer_scaled_attention": None,
    "final_softcap": None,  # applied by the head, after the kernel's pass
    "windows": None,
    "tied": None,
    "prefix_tokens": None,  # supported once the prefix is in the cache
    "initializer_range": None,
    "embed_dropout": None,  # nothing is dropped while text is generated
    "hidden_dropout": None,
    "attention_dropout": None,
    "extra": None,  # without effect on the computation
}


def supports_config(config: TransformerConfig) -> bool:
    """Return whether the CPU kernel supports networks of this configuration."""
    for field in fields(config):
        if field.name not in FIELD_RULES:
            if getattr(config, field.name) != field.default:
                return False
        elif (rule := FIELD_RULES[field.name]) is not None and not rule(config):
            return False
    return True


def has_slot_kernel(network: object) -> bool:
    """Return whether the network's attention reads only the occupied part of a KV-cache slot."""
    if not isinstance(network, Transformer):
        return False
    config = network.config
    weight = next(network.parameters())
    heads = weight.detach().new_empty(0, 1, config.head_dim)
    return config.attention_softcap is None and kernels.serves_attention(heads, heads, heads)


@dataclass
class _PreparedForward:
    """CPU kernel that is set up for one key-value cache.

    Passes reuse the kernel until the weights or the cache move in memory. `prefixes` describes
    shared prefixes to the kernel; decode steps that read the same prefixes reuse it.
    """

    forward: CachedForward
    num_moves: int  # `KVCache.num_moves` at the time of preparation
    groups: tuple[PrefixGroup, ...] = ()  # groups of the decode step that `prefixes` belongs to
    prefixes: tuple[PrefixRows, ...] = ()


class DecoderPasses:
    """Runner of a network's forward passes over cached sequences, without gradients.

    If the CPU kernel supports the network, the kernel computes the passes. The addresses of weights
    and caches are stored for the kernel, so `forget` must be called when weights change or move.
    """

    def __init__(self, network: Decoder) -> None:
        self._network = network
        self._prepared: WeakKeyDictionary[KVCache, _PreparedForward | None] = WeakKeyDictionary()
        # (cos, sin) of the positions used so far
        self._rotations: tuple[Tensor, Tensor] | None = None
        self._is_supported = _supports_network(network)

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor:
        """Return hidden states as `Transformer.compute_hidden` does."""
        context = x.attention
        prepared = None
        if isinstance(context, Cached) and not context.has_prefix_tokens(
            self._network.prefix_tokens
        ):
            prepared = self._prepare(context.cache)
        if prepared is None:
            return self._network.compute_hidden(x, rows)
        return prepared.forward.run(self._build_pass(prepared, x), rows)

    def run_ahead(self, x: Packed, draws: kernels.DrawParameters) -> tuple[Tensor, Tensor]:
        """Compute several decode steps in one call, and return their tokens and log-probs.

        Both are [n, R] for n steps and R rows, as described in `CachedForward.run_ahead`.
        `can_sample` must return True for the cache.
        """
        assert isinstance(x.attention, Cached)
        prepared = self._prepare(x.attention.cache)
        assert prepared is not None
        return prepared.forward.run_ahead(self._build_pass(prepared, x, len(draws.uniforms)), draws)

    @property
    def supports_multi_step(self) -> bool:
        """True if several decode steps can be computed in one call."""
        settings = self._network.config.rope
        return self._is_supported and (
            settings is None or settings.scaling not in rope.LENGTH_DEPENDENT_SCALINGS
        )

    def can_sample(self, cache: KVCache) -> bool:
        """Return whether the CPU kernel can sample tokens in decode steps that use the cache."""
        prepared = self._prepare(cache)
        return prepared is not None and prepared.forward.weights.head is not None

    def is_ready(self, cache: KVCache) -> bool:
        """Return whether weights and cache are still at the addresses that the last pass used."""
        prepared = self._prepared.get(cache)
        return prepared is not None and prepared.num_moves == cache.num_moves

    def forget(self) -> None:
        """Discard the addresses of weights and caches.

        Must be called when weights change or move.
        """
        self._prepared.clear()
        self._is_supported = _supports_network(self._network)

    def _prepare(self, cache: KVCache) -> _PreparedForward | None:
        if not self._is_supported:
            return None
        prepared = self._prepared.get(cache)
        if prepared is None or prepared.num_moves != cache.num_moves:
            assert isinstance(self._network, Transformer)
            weights = _collect_weights(self._network, cache)
            if kernels.serves_network(weights):
                prepared = _PreparedForward(CachedForward(weights), cache.num_moves)
            else:
                prepared = None
            if prepared is None:
                self._is_supported = False
                return None
            self._prepared[cache] = prepared
        return prepared

    def _build_pass(self, prepared: _PreparedForward, x: Packed, steps: int = 1) -> CachedPass:
        context = x.attention
        assert isinstance(context, Cached)
        rotation = self._compute_rotation(x, context, steps)
        after = context.used + context.new
        prefixes = self._build_prefixes(prepared, context)
        return CachedPass(x.tokens, context.slots, context.new, after, rotation, prefixes)

    def _build_prefixes(
        self, prepared: _PreparedForward, context: Cached
    ) -> tuple[PrefixRows, ...]:
        """Return the kernel's description of the shared prefixes that a pass reads.

        Decode steps that read the same prefixes reuse the description.
        """
        if context.max_len > 1:
            return tuple(
                _build_prefix_rows(cache, rows) for cache, rows in context.tokens_by_prefix
            )
        if context.groups is not prepared.groups:
            prepared.groups = context.groups
            prepared.prefixes = tuple(
                _build_prefix_rows(cache, rows) for cache, rows in context.tokens_by_prefix
            )
        return prepared.prefixes

    def _compute_rotation(
        self, x: Packed, context: Cached, steps: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the rotation tables cos and sin, and the index of each token's row in both tables.

        `cos` and `sin` are [P, 1, half]. The P rows are enough for `steps` decode steps, and `half`
        is half the number of rotated dimensions. The row indices are int64 [T] for T tokens.
        Returns None for a network without rotary positions.
        """
        settings = self._network.config.rope
        dtype = context.cache.dtype
        if settings is None:
            return None
        if settings.scaling in rope.LENGTH_DEPENDENT_SCALINGS:
            cos, sin = rope.compute_rotation(settings, x.positions, context.token_lengths, dtype)
            return cos.contiguous(), sin.contiguous(), torch.arange(len(x.positions))
        end = max(context.cache.capacity, context.max_used + steps) + int(context.before.max())
        if self._rotations is None or len(self._rotations[0]) < end:
            positions = torch.arange(end)
            cos, sin = rope.compute_rotation(settings, positions, positions, dtype)
            self._rotations = cos.contiguous(), sin.contiguous()
        return *self._rotations, x.positions


def _supports_network(network: Decoder) -> bool:
    """Return whether the CPU kernel can compute whole forward passes of the network.

    Returns False for a network with hooks, replaced modules, adapters or quantized layers.
    """
    if not isinstance(network, Transformer) or not supports_config(network.config):
        return False
    for module in network.modules():
        if has_hooks(module):
            return False
        if isinstance(module, Linear) and (len(module.adapters) or module.is_quantized):
            return False
    is_whole = network.is_first_stage and network.is_last_stage
    return is_whole and type(network.embed) is Embedding


def _collect_weights(network: Transformer, cache: KVCache) -> NetworkWeights:
    config = network.config
    head = None
    if network.kind == "lm" and config.final_softcap is None:
        projection = network.projection
        if projection.weight.shape == network.embed.weight.shape:
            head = LinearWeights(projection.weight, projection.bias)
    blocks = [block for block in network.blocks if isinstance(block, Block)]
    stored = zip(blocks, cache.keys, cache.values, strict=True)
    return NetworkWeights(
        embedding=network.embed.weight,
        blocks=[_collect_block_weights(*block_parts) for block_parts in stored],
        norm=_get_norm_weight(network.norm),
        head=head,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        eps=config.norm_eps,
        offset=0.0 if config.norm == "rms" else 1.0,
    )


def _collect_block_weights(block: Block, keys: Tensor, values: Tensor) -> BlockWeights:
    attention = block.attention
    mlp = block.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    q_norm, k_norm = (
        (_get_norm_weight(attention.q_norm), _get_norm_weight(attention.k_norm))
        if attention.qk_norm
        else (None, None)
    )
    return BlockWeights(
        _get_norm_weight(block.norm1),
        _get_norm_weight(block.norm2),
        q_norm,
        k_norm,
        _collect_linear_weights(attention.qkv),
        _collect_linear_weights(attention.o),
        _collect_linear_weights(mlp.gate_up),
        _collect_linear_weights(mlp.down),
        keys,
        values,
        attention.spec.scale,
        attention.spec.window,
    )


def _collect_linear_weights(layer: Linear) -> LinearWeights:
    return LinearWeights(layer.weight, layer.bias)


def _get_norm_weight(norm: Norm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def _build_prefix_rows(prefix: KVCache, rows: Tensor) -> PrefixRows:
    stored = []
    for keys, values in zip(prefix.keys, prefix.values, strict=True):
        stored += [keys, values]
    return PrefixRows(rows, int(prefix.used[0]), prefix.capacity, stored)


MAX_SECONDS = 0.04  # maximum duration of a call, by which tokens are delayed
MAX_CREDIT = 64.0
CREDIT_PER_STEP = 0.125  # discarded steps allowed per step; `MAX_CREDIT` are allowed at first


class MultiStepDecoder:
    """Decoder that computes several steps per call and returns their tokens one step at a time."""

    def __init__(self, passes: DecoderPasses, rows: DecodeBatch, settings: SettingsTable) -> None:
        self._passes = passes
        self._rows = rows
        self._settings = settings
        # tokens of the steps that are not returned yet, the next one last
        self._pending_tokens: list[SampledRows] = []
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
        # Discard computed steps if the memory of the cache or of the weights has moved.
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
