"""Attention within packed rows: by XLA on any device, splash attention on a TPU, cuDNN on a GPU.

A token attends to itself and to earlier tokens of its sequence, within the window of the layer. XLA
and splash attention find the sequence of each token in `segments`. cuDNN is given only the number
of tokens in each row, so each row must contain a single sequence: `weft.engine.jax.packing` builds
such rows for cuDNN, and refuses other rows.
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

MAX_SCORES = 1 << 27  # most attention scores of a layer that XLA keeps in memory at a time
UNLIMITED = 1 << 30  # window size of a layer without a window
MASKED = -1e30  # score of a key that a query does not attend to; finite, so that no row is NaN
LANES = 128  # the block sizes of splash attention are multiples of this
BLOCK = 512  # tokens of the largest block
CUDNN_HEAD_DIM = 128  # largest head size for which cuDNN computes gradients on every GPU


class LayerWindow(NamedTuple):
    """Window of a layer.

    `sizes` are the distinct window sizes in the layer's stack, in tokens; None means no limit.
    `size_index` is the index of the layer's window in `sizes`, a scalar int32.
    """

    sizes: Sequence[int | None]
    size_index: Array


def choose_kernel(option: str, platform: str, config: TransformerConfig, dtype: Any) -> Kernel:
    """Return the implementation of attention for a network on a JAX platform (cpu, gpu or tpu).

    `option` is the value of `ROLE.attention`. "auto" selects splash attention on a TPU if the dtype
    allows it, else XLA. Raises `ConfigError` if the platform, the dtype or the network does not
    support the selected kernel.
    """
    # Another role of this process may also have switched on float64.
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

    `q` is [R, L, k, g, d], with g query heads for each of the k key-value heads. The results for
    padding are undefined.
    """
    kernel = decoder.attention
    if kernel == "xla" or (kernel == "splash" and q.shape[1] % LANES):
        return _attend_with_xla(q, k, v, window, scale, rows, decoder)
    attend = partial(_attend_with_splash if kernel == "splash" else _attend_with_cudnn, decoder)
    scaled = (q * scale.astype(q.dtype)).reshape(*q.shape[:2], -1, q.shape[-1])
    # The window size is compiled into these kernels, so each size needs a separate branch.
    branches = [partial(attend, size) for size in window.sizes]
    output = lax.switch(window.size_index, branches, scaled, k, v, rows.segments)
    return output.reshape(q.shape)


def _attend_with_splash(
    decoder: DecoderSettings, window: int | None, q: Array, k: Array, v: Array, segments: Array
) -> Array:
    """Return attention [R, L, heads, d] by splash attention, which JAX interprets on a CPU.

    `q` is [R, L, heads, d] and already scaled; `k` and `v` are [R, L, kv_heads, d].
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # a slow import

    head_dim, length = q.shape[-1], q.shape[1]
    head_padding = (0, -head_dim % LANES)
    q, k, v = (jnp.pad(x.swapaxes(1, 2), ((0, 0),) * 3 + (head_padding,)) for x in (q, k, v))

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
        # The compiler cannot divide a kernel over devices: divide the rows and heads explicitly.
        mesh = decoder.row_sharding.mesh
        (row_axes,) = decoder.row_sharding.spec
        head_axis = "mp" if k.shape[1] % mesh.shape["mp"] == 0 else None
        spec = P(row_axes, head_axis)
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(spec, spec, spec, P(row_axes)),
            out_specs=spec,
            check_vma=False,
        )
    return attend(q, k, v, segments)[..., :head_dim].swapaxes(1, 2)


def _choose_blocks(length: int) -> Any:
    """Return the block sizes of splash attention, which are divisors of `length`."""
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
    """Return attention [R, L, heads, d] of rows with one sequence each, by cuDNN on a GPU.

    `q` is [R, L, heads, d] and already scaled; `k` and `v` are [R, L, kv_heads, d].
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
    """Compute attention as `attend_to_rows` does, from scores [R, k, g, queries, L] in chunks."""
    window_size = _get_window_size(window)
    # Compare indices in the row, because a label without a position repeats the position before it.
    indices = jnp.broadcast_to(jnp.arange(q.shape[1], dtype=jnp.int32), q.shape[:2])

    def attend_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        """Return the attention of some of the queries of each row over all of its keys."""
        q, segments, query_indices = chunk
        scores = jnp.einsum("rqkgd,rskd->rkgqs", q, k, preferred_element_type=decoder.wide)
        scores = _apply_softcap(scores * scale, decoder)
        distance = query_indices[:, :, None] - indices[:, None, :]
        visible = (segments[:, :, None] == rows.segments[:, None, :]) & (distance >= 0)
        visible &= (distance < window_size) & (segments[:, :, None] > 0)
        scores = jnp.where(visible[:, None, None], scores, MASKED)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("rkgqs,rskd->rqkgd", weights, v)

    # Divide the queries into chunks. The scores of a chunk are computed again in the backward pass,
    # because they need more memory than all other values.
    length = q.shape[1]
    max_queries = max(1, MAX_SCORES // (q.shape[0] * decoder.config.num_heads * length))
    count = 1
    while length // count > max_queries and length % (2 * count) == 0:
        count *= 2
    if count == 1:
        return jax.checkpoint(attend_chunk)((q, rows.segments, indices))
    chunks = []
    for array in (q, rows.segments, indices):
        parts = array.reshape(array.shape[0], count, length // count, *array.shape[2:])
        chunks.append(jnp.moveaxis(parts, 1, 0))
    outputs = lax.map(jax.checkpoint(attend_chunk), tuple(chunks))
    return jnp.moveaxis(outputs, 0, 1).reshape(q.shape)


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

    `past` has the cached keys and values, each [R, kv_heads, capacity, head_dim].
    """
    query = q[:, 0]
    # Compute the scores of the cached keys, followed by that of the token's own key.
    old = jnp.einsum("rkgd,rksd->rkgs", query, past.keys, preferred_element_type=decoder.wide)
    new = jnp.einsum("rkgd,rkd->rkg", query, k[:, 0], preferred_element_type=decoder.wide)
    scores = _apply_softcap(jnp.concatenate([old, new[..., None]], axis=-1) * scale, decoder)
    # Mask unused cache entries and keys outside of the window.
    positions = jnp.arange(past.keys.shape[2])
    in_window = rows.positions - positions < _get_window_size(window)
    visible = (positions < rows.positions) & in_window
    own_key = jnp.ones((len(visible), 1), bool)
    visible = jnp.concatenate([visible, own_key], axis=1)[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1).astype(v.dtype)
    output = jnp.einsum("rkgs,rksd->rkgd", weights[..., :-1], past.values)
    return (output + weights[..., -1:] * v[:, 0, :, None])[:, None]


def _get_window_size(window: LayerWindow) -> Array:
    """Return the layer's window size as a scalar int32, `UNLIMITED` without a window."""
    sizes = [UNLIMITED if size is None else size for size in window.sizes]
    return jnp.asarray(sizes, jnp.int32)[window.size_index]


def _apply_softcap(scores: Array, decoder: DecoderSettings) -> Array:
    softcap = decoder.config.attention_softcap
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
