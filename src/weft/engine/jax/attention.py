"""Attention of packed rows: by XLA everywhere, splash attention on a TPU, cuDNN on a GPU.

A token attends to earlier tokens of its own sequence, as far as its layer's window reaches. XLA and
splash attention read from `segments` which tokens are of one sequence. cuDNN reads nothing but the
number of tokens in a row, so it serves rows of one sequence each: `weft.engine.jax.packing` makes
such rows for it, and refuses others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from weft.engine.jax.decoder import DecoderSettings, Kernel, KeysValues, TokenRows
from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig

SCORES = 1 << 27  # attention scores of a layer that XLA has in memory at once
UNLIMITED = 1 << 30  # window of a layer whose attention has none
MASKED = -1e30  # attention score of a key that a query cannot see; finite, so no row is all NaN
LANES = 128  # splash attention divides rows into blocks of a multiple of this
BLOCK = 512  # tokens of the largest block
CUDNN_HEAD_DIM = 128  # largest head of which cuDNN computes gradients on every GPU


class LayerWindow(NamedTuple):
    """Window of a layer: each of the stack's `sizes` (None: no limit), and the index of its `own`."""

    sizes: Sequence[int | None]
    own: Array


def choose_kernel(option: str, platform: str, config: TransformerConfig, dtype: Any) -> Kernel:
    """Return the implementation for a network on a platform of JAX (`cpu`, `gpu` or `tpu`).

    `option` is `ROLE.attention`. With `auto` it is splash attention on a TPU if the dtype allows,
    else XLA. Raises `ConfigError` for a kernel that cannot serve the network here.
    """
    # of this role, or of another one in this process
    has_float64 = jnp.dtype(dtype).itemsize > 4 or bool(jax.config.read("jax_enable_x64"))
    if option == "auto":
        option = "splash" if platform == "tpu" and not has_float64 else "xla"
    problem = None
    if option == "splash":
        if platform != "tpu":
            problem = f"splash attention is for a TPU, and jax computes on {platform}"
        elif has_float64:
            problem = "splash attention does not work in a process with float64"
    elif option == "cudnn":
        if platform != "gpu":
            problem = f"cuDNN is for a GPU, and jax computes on {platform}"
        elif jnp.dtype(dtype).itemsize != 2:
            problem = f"cuDNN's attention has no {jnp.dtype(dtype)}; write dtype=bfloat16"
        elif config.attention_softcap is not None:
            problem = "cuDNN's attention has no soft cap, and this model has one"
        elif config.head_dim > CUDNN_HEAD_DIM or config.head_dim % 8:
            problem = (
                f"cuDNN's attention has heads of a multiple of 8 up to {CUDNN_HEAD_DIM}, and this "
                f"model has {config.head_dim}"
            )
    if problem is not None:
        raise ConfigError(f"attention={option}: {problem}; leave it out, or write attention=xla")
    return cast(Kernel, option)


def attend_to_rows(
    q: Array,
    k: Array,
    v: Array,
    window: LayerWindow,
    scale: Array,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> Array:
    """Return the attention of each token over its sequence in the same row, [R, L, k, g, d].

    `q` is [R, L, k, g, d], with g query heads for each of k heads of keys and values. What padding
    attends to is undefined.
    """
    kernel = decoder.attention
    if kernel == "xla" or (kernel == "splash" and q.shape[1] % LANES):
        return _attend_with_xla(q, k, v, window, scale, rows, decoder)
    attend = partial(_attend_with_splash if kernel == "splash" else _attend_with_cudnn, decoder)
    scaled = (q * scale.astype(q.dtype)).reshape(*q.shape[:2], -1, q.shape[-1])
    # Windows are compiled into these kernels, so each has a branch.
    branches = [partial(attend, size) for size in window.sizes]
    mixed = lax.switch(window.own, branches, scaled, k, v, rows.segments)
    return mixed.reshape(q.shape)


def _attend_with_splash(
    decoder: DecoderSettings, window: int | None, q: Array, k: Array, v: Array, segments: Array
) -> Array:
    """Return the attention [R, L, heads, d] by splash attention, which JAX interprets on a CPU.

    `q` is [R, L, heads, d] and scaled, `k` and `v` are [R, L, kv_heads, d].
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # takes a while

    head_dim, length = q.shape[-1], q.shape[1]
    lanes = (0, -head_dim % LANES)
    q, k, v = (jnp.pad(each.swapaxes(1, 2), ((0, 0),) * 3 + (lanes,)) for each in (q, k, v))

    def attend(q: Array, k: Array, v: Array, segments: Array) -> Array:
        shape = (length, length)
        mask: Any = splash.CausalMask(shape)
        if window is not None:
            mask = splash.LocalMask(shape, (window - 1, 0), 0)
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * q.shape[1]),
            block_sizes=_choose_blocks(length),
            attn_logits_soft_cap=decoder.config.attention_softcap,
            head_shards=1,
            q_seq_shards=1,
            interpret=jax.default_backend() == "cpu",
        )
        return jax.vmap(kernel)(q, k, v, splash.SegmentIds(segments, segments))

    if decoder.row_sharding is not None:
        # The compiler cannot divide a kernel over devices.
        mesh, (batch,) = decoder.row_sharding.mesh, decoder.row_sharding.spec
        heads = "mp" if k.shape[1] % mesh.shape["mp"] == 0 else None
        own = P(batch, heads)
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=(own, own, own, P(batch)), out_specs=own, check_vma=False
        )
    return attend(q, k, v, segments)[..., :head_dim].swapaxes(1, 2)


def _choose_blocks(length: int) -> Any:
    """Return the sizes of splash attention's blocks, which divide rows of `length` tokens."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    size = max(size for size in (LANES, 2 * LANES, BLOCK) if length % size == 0)
    sizes: dict[str, Any] = {}
    for field in fields(splash.BlockSizes):
        if field.name.startswith("block_"):
            sizes[field.name] = size
    return splash.BlockSizes(**sizes)


def _attend_with_cudnn(
    decoder: DecoderSettings, window: int | None, q: Array, k: Array, v: Array, segments: Array
) -> Array:
    """Return the attention [R, L, heads, d] of rows with one sequence each, by cuDNN on a GPU.

    `q` is [R, L, heads, d] and scaled, `k` and `v` are [R, L, kv_heads, d].
    """
    lengths = jnp.maximum((segments > 0).sum(axis=1, dtype=jnp.int32), 1)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if jax.default_backend() == "gpu" else "xla",
    )


def _attend_with_xla(
    q: Array,
    k: Array,
    v: Array,
    window: LayerWindow,
    scale: Array,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> Array:
    """Return what `attend_to_rows` does, from scores [R, k, g, L, L], or parts of them."""
    limit = _read_limit(window)
    # The order of the tokens in a row, since a label without a position repeats the one before.
    places = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])

    def attend_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        q, segments, own = chunk
        scores = jnp.einsum("rqkgd,rskd->rkgqs", q, k, preferred_element_type=decoder.wide)
        scores = _limit_scores(scores * scale, decoder)
        distance = own[:, :, None] - places[:, None, :]
        seen = (segments[:, :, None] == rows.segments[:, None, :]) & (distance >= 0)
        seen &= (distance < limit) & (segments[:, :, None] > 0)
        scores = jnp.where(seen[:, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rkgqs,rskd->rqkgd", weights, v)

    # Scores are computed again in the backward pass: they take more memory than all the rest.
    length = q.shape[1]
    most = max(1, SCORES // (q.shape[0] * decoder.config.num_heads * length))
    count = 1
    while length // count > most and length % (2 * count) == 0:
        count *= 2
    if count == 1:
        return jax.checkpoint(attend_chunk)((q, rows.segments, places))
    chunks = []
    for each in (q, rows.segments, places):
        parts = each.reshape(each.shape[0], count, length // count, *each.shape[2:])
        chunks.append(jnp.moveaxis(parts, 1, 0))
    mixed = lax.map(jax.checkpoint(attend_chunk), tuple(chunks))
    mixed = jnp.moveaxis(mixed, 0, 1)
    return mixed.reshape(q.shape)


def attend_to_past(
    q: Array,
    k: Array,
    v: Array,
    window: LayerWindow,
    scale: Array,
    past: KeysValues,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> Array:
    """Return the attention of each row's token over its cached tokens and itself, [R, 1, k, g, d].

    `past` has the cached keys and values [R, kv_heads, capacity, head_dim].
    """
    token = q[:, 0]
    old = jnp.einsum("rkgd,rksd->rkgs", token, past.keys, preferred_element_type=decoder.wide)
    new = jnp.einsum("rkgd,rkd->rkg", token, k[:, 0], preferred_element_type=decoder.wide)
    scores = _limit_scores(jnp.concatenate([old, new[..., None]], axis=-1) * scale, decoder)
    places = jnp.arange(past.keys.shape[2])
    seen = (places < rows.positions) & (rows.positions - places < _read_limit(window))
    itself = jnp.ones((len(seen), 1), bool)
    seen = jnp.concatenate([seen, itself], axis=1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("rkgs,rksd->rkgd", weights[..., :-1], past.values)
    return (mixed + weights[..., -1:] * v[:, 0, :, None])[:, None]


def _read_limit(window: LayerWindow) -> Array:
    sizes = [UNLIMITED if size is None else size for size in window.sizes]
    return jnp.asarray(sizes, jnp.int32)[window.own]


def _limit_scores(scores: Array, decoder: DecoderSettings) -> Array:
    limit = decoder.config.attention_softcap
    return scores if limit is None else limit * jnp.tanh(scores / limit)
