"""States of which each of several ranks has some rows: between attention and MLP, where a row needs
no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowShare(Protocol):
    """Rows of a tensor that this rank has. Every rank must call each method."""

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
        """Gather rows as `gather` does, if all ranks compute the same result from them."""
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """All rows, each a sum of which every rank has a part -> those of this rank [n, ...],
        summed.
        """
        ...


@dataclass(frozen=True)
class SharedRows:
    """Row shares of one pass.

    `kept` int64 are the indices of this rank's tokens whose output is wanted.
    """

    tokens: RowShare  # of all tokens of the pack
    wanted: RowShare  # of the rows that are wanted after the last block
    kept: Tensor


class RowSharing(Protocol):
    """Factory of row shares: how the ranks share the rows of each pass."""

    def __call__(self, tokens: Tensor, rows: Tensor | None) -> SharedRows:
        """Return the shares of a pack of `tokens` [T] whose states at `rows` int64 [N] are wanted.

        None: the states at every token.
        """
        ...

    def count(self, length: int) -> int:
        """Return the number of tokens that this rank has of a pack of `length` tokens."""
        ...


def entered(x: Tensor, share: RowShare | None, enter: Callable[[Tensor], Tensor] | None) -> Tensor:
    """States as a layer reads them of which ranks hold a part each: all rows, the ranks' gradients
    summed. `enter` does it where all rows are here; None: one rank has the whole layer.
    """
    if share is not None:
        return share.gather(x)
    return x if enter is None else enter(x)
