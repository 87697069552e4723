"""Locations of tensors by id and key, and the transfers a device needs. Bookkeeping only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.graph.blocks import Blocks
from weft.runtime.device_process import Want

DRIVER = -1  # the driver's store: the loader's rows and outputs of host functions


@dataclass(eq=False)
class _Where:
    """Ranks that hold each key, and ranks to which a copy is being sent.

    A copy arrives before its rank needs it next.
    """

    holders: dict[str, set[int]] = field(default_factory=dict)
    coming: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> _Where:
        return _Where(
            *(
                {key: set(ranks) for key, ranks in each.items()}
                for each in (self.holders, self.coming)
            )
        )


class Locations:
    """Tensor locations. Not thread-safe; the caller must lock."""

    def __init__(self) -> None:
        self._ids = Blocks(_Where, _Where.copy)

    def made(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has computed these keys; copies on other ranks become invalid.

        Keys that the rank already has are unchanged: it announced them before the end of its call.
        """
        for where in self._ids.apart(ids):
            for key in keys:
                if rank not in where.holders.get(key, ()):
                    where.holders[key] = {rank}
                    where.coming.pop(key, None)

    def expect(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a copy is being sent to a rank.

        It need not be sent again, and cannot be fetched from there yet.
        """
        for where in self._ids.apart(ids):
            for key in keys:
                where.coming.setdefault(key, set()).add(rank)

    def copied(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has a copy, or has computed identical values."""
        for where in self._ids.apart(ids):
            for key in keys:
                where.holders.setdefault(key, set()).add(rank)

    def everywhere(self, ids: Sequence[str], keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that every id has on some rank."""
        parts = self._ids.parts(ids)
        return [
            key
            for key in keys
            if all(block is not None and key in block.known.holders for block in parts)
        ]

    def lacking(self, rank: int, ids: Sequence[str], keys: Iterable[str]) -> list[Want]:
        """Return the transfers that a rank needs to have all keys of the ids.

        All keys of an id on the same holder are one transfer; devices are preferred to the driver.
        A key that no rank holds is left out; reading it raises the error.
        """
        found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        wanted = list(keys)
        for block, chosen in self._ids.parts(ids).items():
            where = _Where() if block is None else block.known
            by_holder = dict[int, list[str]]()
            for key in wanted:
                holders = where.holders.get(key, set())
                if holders and rank not in holders and rank not in where.coming.get(key, ()):
                    by_holder.setdefault(_nearest(holders), []).append(key)
            for holder, lacked in by_holder.items():
                found.setdefault((holder, tuple(lacked)), []).extend(chosen)
        return [Want(holder, tuple(ids), keys) for (holder, keys), ids in found.items()]

    def discard(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget these ids; return the ids that each rank held."""
        gone: dict[int, list[str]] = {}
        for where, chosen, _ in self._ids.discard(ids):
            for rank in set().union(*where.holders.values(), *where.coming.values()):
                gone.setdefault(rank, []).extend(chosen)
        return gone


def _nearest(holders: set[int]) -> int:
    """Return the lowest device that holds a key, or the driver if none does."""
    devices = holders - {DRIVER}
    return min(devices) if devices else DRIVER
