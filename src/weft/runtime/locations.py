"""Which devices hold which tensors, by id and key; and from where a device gets what it lacks.

Pure bookkeeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.graph.blocks import Blocks
from weft.runtime.device_process import Want

DRIVER = -1  # the driver's own store: the loader's rows, and what host functions made


@dataclass(eq=False)
class _Where:
    """Key -> the ranks that hold it, and those to which a copy is on its way: they have it before
    they need it next.
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
    """Not for several threads at once; who shares it takes care."""

    def __init__(self) -> None:
        self._ids = Blocks(_Where, _Where.copy)

    def made(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """A rank has made these keys anew; what others hold of them counts no more.

        A rank that had them already (it announced them before its call was over) has made the same
        ones.
        """
        for where in self._ids.apart(ids):
            for key in keys:
                if rank not in where.holders.get(key, ()):
                    where.holders[key] = {rank}
                    where.coming.pop(key, None)

    def expect(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """A copy is on its way to a rank: it need not be sent again, and nobody can have it from
        there yet.
        """
        for where in self._ids.apart(ids):
            for key in keys:
                where.coming.setdefault(key, set()).add(rank)

    def copied(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """A rank has a copy, or made the same."""
        for where in self._ids.apart(ids):
            for key in keys:
                where.holders.setdefault(key, set()).add(rank)

    def everywhere(self, ids: Sequence[str], keys: Iterable[str]) -> list[str]:
        """Those of `keys` that every id has, somewhere."""
        parts = self._ids.parts(ids)
        return [
            key
            for key in keys
            if all(block is not None and key in block.known.holders for block in parts)
        ]

    def lacking(self, rank: int, ids: Sequence[str], keys: Iterable[str]) -> list[Want]:
        """What a rank must get from where: all keys of an id that one holder has together, from a
        device before the driver.

        A key that nobody holds is left out; reading it says so.
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
        """Forget these ids; by rank, which of them it held."""
        gone: dict[int, list[str]] = {}
        for where, chosen, _ in self._ids.discard(ids):
            for rank in set().union(*where.holders.values(), *where.coming.values()):
                gone.setdefault(rank, []).extend(chosen)
        return gone


def _nearest(holders: set[int]) -> int:
    """A device, where one holds it: the driver has the least to give away."""
    devices = holders - {DRIVER}
    return min(devices) if devices else DRIVER
