"""Interface of the networks that generate text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed


class Decoder(Protocol):
    """Interface of a network that generates text, such as `Transformer`."""

    config: TransformerConfig
    # size of the whole network's vocabulary; `config` can describe only a shard
    vocab_size: int
    training: bool
    held_layers: Sequence[int]  # numbers of its blocks in the whole network

    def can_share_prefixes(self, longest: int) -> bool:
        """Return whether sequences can read a shared prefix that is stored separately from them.

        `longest` is the maximum number of tokens in a sequence.
        """
        ...

    @property
    def prefix_tokens(self) -> int:
        """Number of placeholder tokens for a trained prefix at the start of each sequence.

        Trained prefixes are explained in `weft.models.network.prefix`.
        """
        ...

    @property
    def can_read_pages(self) -> bool:
        """True if keys and values can be stored in pages, which requires weft's own attention."""
        ...

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor: ...
    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states.

        `wide` is the float32 copy of `output_matrix` that `kernels.prepare_wide` returns.
        """
        ...

    @property
    def output_matrix(self) -> Tensor | None:
        """Matrix that maps hidden states to logits, or None if this rank does not have it."""
        ...

    def parameters(self) -> Iterator[Tensor]: ...
    def train(self, mode: bool = True) -> object: ...


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
