"""Settings of a decoder, and types of the inputs and results of its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from weft.models.network.config import TransformerConfig
from weft.models.network.transformer import Head, Pooling

Kernel = Literal["xla", "splash", "cudnn"]  # attention kernels (`weft.engine.jax.attention`)


class TokenRows(NamedTuple):
    """Tokens of a pass in rows of equal length, as arrays of JAX or numpy.

    Attributes:
        tokens: Token ids, int32 [R, L].
        positions: Position of each token in its sequence, int32 [R, L].
        segments: Number of each token's sequence in the pass, from 1, or 0 for padding, int32
            [R, L].
        cos: Cosines of the rotation angles, [R, L, dim / 2], or None without rotation.
        sin: Sines of the rotation angles, [R, L, dim / 2], or None without rotation.
    """

    tokens: Any
    positions: Any
    segments: Any
    cos: Any = None
    sin: Any = None


class HeadInputs(NamedTuple):
    """Rows of hidden states that a head reads, as arrays of JAX or numpy.

    Attributes:
        rows: Indices into the flattened tokens [R * L], int32 [N]. For averaged scores, these are
            the indices of all tokens.
        count: Number of rows that are used, which come first; outputs at later rows are undefined.
        labels: Token whose log-prob is computed at each row, int32 [N]. For averaged scores, the
            index of each token's sequence, or N for unused rows.
        ids: Further ids whose log-probs are computed at each row, int32 [N, K], or None.
        support: Ids that sampling kept at each row, as a bit mask uint8 [N, V / 8]: bit i % 8 of
            byte i // 8 is set if id i was kept. None if no sampling limit is set.
    """

    rows: Any
    count: Any
    labels: Any = None
    ids: Any = None
    support: Any = None


@dataclass(frozen=True)
class DecoderSettings:
    """Architecture of a network, and settings of its computation.

    Attributes:
        config: Sizes and variants of the network.
        head: Kind of head.
        pooling: Hidden states from which a score is computed.
        dtype: dtype of the computation; log-probs, values and scores have at least float32.
        adapter_scale: Factor of low-rank adapters.
        policy: Policy that selects which activations of a block are saved for the backward pass,
            one of `weft.engine.spec.RECOMPUTE_POLICIES`; None saves all.
        row_sharding: Sharding of hidden states [R, L, hidden] over devices; None for one device.
        attention: Implementation of attention within rows (`weft.engine.jax.attention`).
    """

    config: TransformerConfig
    head: Head
    pooling: Pooling
    dtype: Any
    adapter_scale: float = 1.0
    policy: str | None = None
    row_sharding: NamedSharding | None = None
    attention: Kernel = "xla"

    def shard_rows(self, x: Array) -> Array:
        """Return hidden states [R, L, hidden] divided over the devices by `row_sharding`.

        The compiler chooses the sharding of other values.
        """
        if self.row_sharding is None:
            return x
        return lax.with_sharding_constraint(x, self.row_sharding)

    def gather_table(self, table: Array) -> Array:
        """Return an embedding matrix [V, width], gathered on every device.

        Otherwise, the compiler would gather the embeddings of the whole batch on every device.
        """
        if self.row_sharding is None:
            return table
        return lax.with_sharding_constraint(table, NamedSharding(self.row_sharding.mesh, P()))

    @property
    def matmul_precision(self) -> str | None:
        """Precision of matrix products: the highest, or JAX's default (None) for bfloat16.

        By default, GPUs and TPUs round float32 inputs to fewer bits.
        """
        return None if self.dtype == jnp.bfloat16 else "highest"

    @property
    def wide(self) -> Any:
        """dtype of log-probs, values, scores and the statistics of norms: float32 or wider."""
        return jnp.promote_types(self.dtype, jnp.float32)


class KeysValues(NamedTuple):
    """Keys and values of a stack of blocks.

    For new tokens, the arrays are [layers, R, L, kv_heads, head_dim]. For a cache, they are
    [layers, slots, kv_heads, capacity, head_dim].
    """

    keys: Array
    values: Array
