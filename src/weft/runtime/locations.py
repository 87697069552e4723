"""Bookkeeping of which devices have which tensors, and of the transfers that a device needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.graph.blocks import StateBlocks
from weft.runtime.device_process import TensorRequest

DRIVER = -1  # the driver's store: the loader's rows and outputs of host functions


@dataclass(eq=False)
class _KeyLocations:
    """Ranks that have the tensors of a group of sample ids, by key.

    All ids of the group have their tensors on the same ranks.

    Attributes:
        holders: Ranks that have the tensors of each key.
        incoming: Ranks to which the tensors of each key are already being sent.
    """

    holders: dict[str, set[int]] = field(default_factory=dict)
    incoming: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> _KeyLocations:
        return _KeyLocations(
            *(
                {key: set(ranks) for key, ranks in each.items()}
                for each in (self.holders, self.incoming)
            )
        )


class TensorLocations:
    """Record of which ranks have which tensors, by sample id and key.

    It is not thread-safe: callers must hold a lock.
    """

    def __init__(self) -> None:
        self._ids = StateBlocks(_KeyLocations, _KeyLocations.copy)

    def record_computed(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has computed new values of these keys for these ids.

        Copies on other ranks become invalid. A key that the rank has already announced early is
        left unchanged, because the announced values are the final ones, so copies of them stay
        valid.
        """
        for where in self._ids.separate_states(ids):
            for key in keys:
                if rank not in where.holders.get(key, ()):
                    where.holders[key] = {rank}
                    where.incoming.pop(key, None)

    def record_transfer(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a copy of these keys is being sent to a rank.

        The copy need not be sent again, but the rank cannot pass it on to others yet.
        """
        for where in self._ids.separate_states(ids):
            for key in keys:
                where.incoming.setdefault(key, set()).add(rank)

    def record_copy(self, rank: int, ids: Sequence[str], keys: Sequence[str]) -> None:
        """Record that a rank has valid values of these keys for these ids.

        Values on other ranks stay valid too.
        """
        for where in self._ids.separate_states(ids):
            for key in keys:
                where.holders.setdefault(key, set()).add(rank)

    def select_available(self, ids: Sequence[str], keys: Iterable[str]) -> list[str]:
        """Return those of `keys` that are available for all ids.

        A key is available for an id if at least one rank has the tensor.
        """
        parts = self._ids.group_by_block(ids)
        available: list[str] = []
        for key in keys:
            if all(block is not None and key in block.state.holders for block in parts):
                available.append(key)
        return available

    def find_missing(
        self, rank: int, ids: Sequence[str], keys: Iterable[str]
    ) -> list[TensorRequest]:
        """Return requests for the tensors of these ids and keys that the rank does not have yet.

        Tensors that are already being sent to the rank are not requested. All keys of an id that
        come from the same rank are in one request. If both a device and the driver have a tensor,
        it is requested from the device. A key that no rank has is left out; an error is raised when
        the key is read.
        """
        transfers: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        wanted = list(keys)
        for block, chosen in self._ids.group_by_block(ids).items():
            where = _KeyLocations() if block is None else block.state
            by_holder = dict[int, list[str]]()
            for key in wanted:
                holders = where.holders.get(key, set())
                if holders and rank not in holders and rank not in where.incoming.get(key, ()):
                    by_holder.setdefault(_choose_holder(holders), []).append(key)
            for holder, lacked in by_holder.items():
                transfers.setdefault((holder, tuple(lacked)), []).extend(chosen)
        return [
            TensorRequest(holder, tuple(ids), keys) for (holder, keys), ids in transfers.items()
        ]

    def discard(self, ids: Iterable[str]) -> dict[int, list[str]]:
        """Remove `ids` from the record, and return the removed ids by rank.

        A rank's list has the ids for which the rank has tensors or is being sent tensors.
        """
        ids_by_rank: dict[int, list[str]] = {}
        for where, chosen, _ in self._ids.discard(ids):
            for rank in set().union(*where.holders.values(), *where.incoming.values()):
                ids_by_rank.setdefault(rank, []).extend(chosen)
        return ids_by_rank


def _choose_holder(holders: set[int]) -> int:
    """Return the lowest rank of a device in `holders`, or the driver's rank if it has no device."""
    devices = holders - {DRIVER}
    return min(devices) if devices else DRIVER
