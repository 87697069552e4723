"""Rows of states that are shared among ranks between attention and MLP (sequence parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowShare(Protocol):
    """Rows of a tensor that this rank has. Every rank must call each method."""

    @property
    def own_rows(self) -> Tensor:
        """int64 [n]: the rows of this rank."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return all rows, given this rank's [n, ...]; in the backward pass, gradients are summed.

        Used if each rank computes a different part of the result from the rows.
        """
        ...

    def gather_replicated(self, x: Tensor) -> Tensor:
        """Return all rows, given this rank's [n, ...]; gradients are not summed.

        Used if all ranks compute the same result from the rows.
        """
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """Sum all rows over the ranks and return this rank's rows [n, ...] of the sum."""
        ...


@dataclass(frozen=True)
class SharedRows:
    """Row shares of one pass.

    `wanted_tokens` int64 are the indices of this rank's tokens whose output is wanted.
    """

    token_share: RowShare  # of all tokens of the pack
    wanted_share: RowShare  # of the rows whose output is wanted after the last block
    wanted_tokens: Tensor


class RowSharing(Protocol):
    """Factory of row shares: how the ranks share the rows of each pass."""

    def __call__(self, tokens: Tensor, rows: Tensor | None) -> SharedRows:
        """Return the shares of a pack of `tokens` [T] whose states at `rows` int64 [N] are wanted.

        With None, the states at all tokens are wanted.
        """
        ...

    def count(self, length: int) -> int:
        """Return the number of tokens that this rank has of a pack of `length` tokens."""
        ...


def gather_inputs(
    x: Tensor, share: RowShare | None, enter: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return the states that a split layer reads: all rows, with gradients summed over the ranks.

    `share` gathers the rows; without it, all rows are already here and `enter` sums the gradients.
    If both are None, this rank has the whole layer.
    """
    if share is not None:
        return share.gather(x)
    return x if enter is None else enter(x)
