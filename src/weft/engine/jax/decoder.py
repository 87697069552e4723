"""Settings of a decoder, and the arrays that its passes read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from weft.models.network.config import TransformerConfig
from weft.models.network.transformer import Head, Pooling

Kernel = Literal["xla", "splash", "cudnn"]  # of attention (`weft.engine.jax.attention`)


class TokenRows(NamedTuple):
    """Tokens of a pass in rows of equal length, as arrays of JAX or numpy.

    Attributes:
        tokens: Token ids, int32 [R, L].
        positions: Position of each token in its sequence, int32 [R, L].
        segments: Number of each token's sequence, from 1, and 0 for padding, int32 [R, L].
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
        rows: Indices into the flattened tokens [R * L], int32 [N]. For scores that are averaged
            over a sequence, the index of every token.
        count: Number of rows that are used, the first ones; outputs at the others have no meaning.
        labels: Token whose log-prob is computed at each row, int32 [N]. For averaged scores, the
            sequence of each token, or N.
        ids: Further ids whose log-probs are computed at each row, int32 [N, K], or None.
        support: Ids that sampling kept at each row, as bits: that of id i is bit i % 8 of byte
            i // 8. uint8 [N, V / 8], or None.
    """

    rows: Any
    count: Any
    labels: Any = None
    ids: Any = None
    support: Any = None


@dataclass(frozen=True)
class DecoderSettings:
    """Architecture of a network, and how it is computed.

    Attributes:
        config: Sizes and variants of the network.
        head: Kind of head.
        pooling: Hidden states that a score is computed from.
        dtype: dtype of the computation; log-probs, values and scores have at least float32.
        adapter_scale: Factor of low-rank adapters.
        policy: Activations of a block that the backward pass finds in memory, one of
            `weft.engine.spec.RECOMPUTE_POLICIES`, or None for all.
        attention: Implementation of attention within rows (`weft.engine.jax.attention`).
        row_sharding: How hidden states [R, L, hidden] are divided over devices, or None.
    """

    config: TransformerConfig
    head: Head
    pooling: Pooling
    dtype: Any
    adapter_scale: float = 1.0
    policy: str | None = None
    row_sharding: NamedSharding | None = None
    attention: Kernel = "xla"

    def divide(self, x: Array) -> Array:
        """Return hidden states divided over the devices; the compiler divides the rest."""
        if self.row_sharding is None:
            return x
        return lax.with_sharding_constraint(x, self.row_sharding)

    def gather_table(self, table: Array) -> Array:
        """Return an embedding matrix [V, width] of which each device has all rows.

        Otherwise the compiler would gather all embeddings of a batch on every device.
        """
        if self.row_sharding is None:
            return table
        return lax.with_sharding_constraint(table, NamedSharding(self.row_sharding.mesh, P()))

    @property
    def matmul_precision(self) -> str | None:
        """Precision of matrix products; by default a GPU or TPU rounds float32 to fewer bits."""
        return None if self.dtype == jnp.bfloat16 else "highest"

    @property
    def wide(self) -> Any:
        """dtype of log-probs, values, scores and norms' statistics."""
        return jnp.promote_types(self.dtype, jnp.float32)


class KeysValues(NamedTuple):
    """Keys and values of a stack of blocks.

    Those of new tokens are [layers, R, L, kv_heads, head_dim]; those of a cache are [layers, slots,
    kv_heads, capacity, head_dim].
    """

    keys: Array
    values: Array
