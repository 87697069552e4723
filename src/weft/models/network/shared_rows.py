"""Sequence parallelism: outside attention and MLP, each rank has the hidden states of some tokens.

Hidden states have one row per token, so the ranks divide the rows among them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class RowShare(Protocol):
    """Interface for gathering and scattering tensor rows that are divided among the ranks.

    The methods communicate: when one rank calls a method, all ranks must call it.
    """

    @property
    def own_rows(self) -> Tensor:
        """Indices of the rows that this rank has, int64 [n]."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return all rows, given this rank's rows [n, ...].

        The backward pass sums the gradients over the ranks. Use this if each rank computes a
        different part of a result from the rows.
        """
        ...

    def gather_replicated(self, x: Tensor) -> Tensor:
        """Return all rows, given this rank's rows [n, ...], without summing gradients over ranks.

        Use this if all ranks compute the same result from the rows.
        """
        ...

    def scatter(self, x: Tensor) -> Tensor:
        """Sum all rows over the ranks and return this rank's rows [n, ...] of the sum."""
        ...


@dataclass(frozen=True)
class SharedRows:
    """Division of a pass's tokens among the ranks, as seen by this rank.

    Attributes:
        token_share: This rank's share of all tokens of the pack.
        wanted_share: This rank's share of the tokens whose final hidden states the pass returns.
        wanted_tokens: Indices of the tokens of `wanted_share` in this rank's hidden states, int64.
    """

    token_share: RowShare  # this rank's share of all tokens
    wanted_share: RowShare  # this rank's share of the tokens whose final states are returned
    wanted_tokens: Tensor


class RowSharing(Protocol):
    """Interface of objects that divide the rows of each pass among the ranks."""

    def __call__(self, tokens: Tensor, rows: Tensor | None) -> SharedRows:
        """Assign the packed `tokens` [T] to the ranks.

        `rows`, int64 [N], are the tokens whose final hidden states the pass returns. None means all
        tokens.
        """
        ...

    def count(self, length: int) -> int:
        """Return the number of this rank's tokens in a pass of `length` tokens."""
        ...


def gather_inputs(
    x: Tensor, share: RowShare | None, enter: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """Return all input rows of a layer that is split over ranks.

    If the rows are divided among the ranks (`share`), x has only this rank's rows, and the others
    are gathered. Otherwise x has all rows. In both cases, the backward pass sums the gradients over
    the ranks; without `share`, the function `enter` does this. If `share` and `enter` are both
    None, the layer is not split, and x is returned unchanged.
    """
    if share is not None:
        return share.gather(x)
    return x if enter is None else enter(x)
