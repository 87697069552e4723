"""States of which each of several ranks has some rows: between attention and MLP, where a row needs
no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowShare(Protocol):
    """Which of some rows are here. Every rank calls each method."""

    @property
    def own(self) -> Tensor:
        """int64 [n]: the rows of this rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[n, ...] -> all rows, where each rank makes another part of the result of them: gradients
        are summed.
        """
        ...

    def gather_alike(self, x: Tensor) -> Tensor:
        """As `gather`, where every rank goes on to the same result."""
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """All rows, each a sum of which every rank has a part -> those of this rank [n, ...],
        summed.
        """
        ...


@dataclass(frozen=True)
class SharedRows:
    """Of one pass.

    `kept` int64 says which of this rank's tokens, numbered here, are its wanted ones.
    """

    tokens: RowShare  # of all tokens of the pack
    wanted: RowShare  # of the rows that are wanted after the last block
    kept: Tensor


class RowSharing(Protocol):
    """How the ranks share rows, pass by pass."""

    def __call__(self, tokens: Tensor, rows: Tensor | None) -> SharedRows:
        """Of a pack of `tokens` [T] whose states at `rows` int64 [N] are wanted; None: at every
        token.
        """
        ...

    def count(self, length: int) -> int:
        """Of a pack of `length` tokens how many this rank has."""
        ...


def entered(x: Tensor, share: RowShare | None, enter: Callable[[Tensor], Tensor] | None) -> Tensor:
    """States as a layer reads them of which ranks hold a part each: all rows, the ranks' gradients
    summed. `enter` does it where all rows are here; None: one rank has the whole layer.
    """
    if share is not None:
        return share.gather(x)
    return x if enter is None else enter(x)
