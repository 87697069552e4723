"""Which devices hold which tensors, by id and key; and from where a device gets what it lacks. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.runtime.device_process import Want

DRIVER = -1  # the driver's own store: the loader's rows, and what host functions made


class Locations:
    """Not for several threads at once; who shares it takes care."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[str, set[int]]] = {}  # id -> key -> ranks
        self._coming: dict[str, dict[str, set[int]]] = {}  # the same, of those that have it before they need it next

    def made(self, rank: int, ids: Iterable[str], keys: Sequence[str]) -> None:
        """A rank has made these keys anew; what others hold of them counts no more. A rank that had them already (it announced
        them before its call was over) has made the same ones."""
        for id in ids:
            held, coming = self._holders.setdefault(id, {}), self._coming.setdefault(id, {})
            for key in keys:
                if rank not in held.get(key, ()):
                    held[key] = {rank}
                    coming.pop(key, None)

    def expect(self, rank: int, ids: Iterable[str], keys: Sequence[str]) -> None:
        """A copy is on its way to a rank: it need not be sent again, and nobody can have it from there yet."""
        for id in ids:
            coming = self._coming.setdefault(id, {})
            for key in keys:
                coming.setdefault(key, set()).add(rank)

    def copied(self, rank: int, ids: Iterable[str], keys: Sequence[str]) -> None:
        """A rank has a copy, or made the same."""
        for id in ids:
            held = self._holders.setdefault(id, {})
            for key in keys:
                held.setdefault(key, set()).add(rank)

    def everywhere(self, ids: Sequence[str], keys: Iterable[str]) -> list[str]:
        """Those of `keys` that every id has, somewhere."""
        return [key for key in keys if all(key in self._holders.get(id, ()) for id in ids)]

    def lacking(self, rank: int, ids: Sequence[str], keys: Iterable[str]) -> list[Want]:
        """What a rank must get from where: all keys of an id that one holder has together, from a device before the driver.

        A key that nobody holds is left out; reading it says so.
        """
        found: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        for id in ids:
            by_holder: dict[int, list[str]] = {}
            for key in keys:
                holders = self._holders.get(id, {}).get(key, set())
                if holders and rank not in holders and rank not in self._coming.get(id, {}).get(key, ()):
                    by_holder.setdefault(_nearest(holders), []).append(key)
            for holder, wanted in by_holder.items():
                found.setdefault((holder, tuple(wanted)), []).append(id)
        return [Want(holder, tuple(ids), keys) for (holder, keys), ids in found.items()]

    def discard(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Forget these ids; by rank, which of them it held."""
        gone: dict[int, list[str]] = {}
        for id in ids:
            held, coming = self._holders.pop(id, {}), self._coming.pop(id, {})
            for rank in set().union(*held.values(), *coming.values()):
                gone.setdefault(rank, []).append(id)
        return gone


def _nearest(holders: set[int]) -> int:
    """A device, where one holds it: the driver has the least to give away."""
    devices = holders - {DRIVER}
    return min(devices) if devices else DRIVER
