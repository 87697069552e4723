"""What generation needs of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed


class Decoder(Protocol):
    """A network that text is generated with: `Transformer`, or another that gives the same."""

    config: TransformerConfig
    vocab_size: int  # ids in all; `config` may be that of a part
    training: bool
    held_layers: Sequence[int]  # numbers of its blocks in the whole network

    def shares_prefixes(self, longest: int) -> bool:
        """Return whether attention supports separately stored prefixes.

        `longest` is the largest number of tokens of a sequence.
        """
        ...

    @property
    def prefix_tokens(self) -> int:
        """So many tokens, whatever they are, stand before each sequence
        (`weft.models.network.prefix`).
        """
        ...

    @property
    def reads_pages(self) -> bool:
        """Return whether keys and values may be stored in pages: weft's attention reads them."""
        ...

    def hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor: ...
    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """`wide` is what `kernels.kept_wide` made of `output_matrix`."""
        ...

    @property
    def output_matrix(self) -> Tensor | None:
        """Matrix that maps states to logits; None if another rank has it."""
        ...

    def parameters(self) -> Iterator[Tensor]: ...
    def train(self, mode: bool = True) -> object: ...


@runtime_checkable
class PutsOff(Protocol):
    """A decoder whose passes without `rows` may return before all of what they compute is there."""

    def catch_up(self) -> None:
        """Compute what was put off; asked before anything that passes wrote to is copied or moved."""
        ...
