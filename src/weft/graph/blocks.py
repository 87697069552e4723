"""State per sample id, stored once for each block (group of ids that share the same state).

The cost of storing and updating states therefore depends on the number of blocks, not on the number
of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class StateBlock(Generic[T]):
    """Group of sample ids that share one state, for example because they have the same keys.

    Attributes:
        ids: Ids in the block, as the keys of a dict, which keeps their order.
        state: State of every id in the block.
    """

    ids: dict[str, None]
    state: T


class StateBlocks(Generic[T]):
    """Mapping from sample ids to states, which stores one state per block of ids.

    A block is a group of ids with the same state. `new()` creates the state of newly added ids.
    When a block is split, `copy(state)` copies its state.
    """

    def __init__(self, new: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._new = new
        self._copy = copy
        self._block_of_id: dict[str, StateBlock[T]] = {}
        self._all_blocks: dict[StateBlock[T], None] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in the order in which they were added."""
        return iter(self._block_of_id)

    def __contains__(self, id: object) -> bool:
        return id in self._block_of_id

    def __len__(self) -> int:
        return len(self._block_of_id)

    def __getitem__(self, id: str) -> T:
        return self._block_of_id[id].state

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over (id, state) in the order in which the ids were added."""
        return ((id, block.state) for id, block in self._block_of_id.items())

    @property
    def blocks(self) -> Collection[StateBlock[T]]:
        """All blocks, in the order in which they were created."""
        return self._all_blocks.keys()

    def list_ids(self, blocks: Collection[StateBlock[T]]) -> list[str]:
        """Return the ids in these blocks, in the order in which the ids were added."""
        if len(blocks) == 1:
            (block,) = blocks
            return list(block.ids)
        held = set(blocks)
        if held:
            return [id for id, block in self._block_of_id.items() if block in held]
        return []

    def group_by_block(self, ids: Sequence[str]) -> dict[StateBlock[T] | None, list[str]]:
        """Group the ids by block, keeping their given order.

        Ids without a block are grouped under None.
        """
        get = self._block_of_id.get
        parts = dict[StateBlock[T] | None, list[str]]()
        first = get(ids[0]) if ids else None
        if first is None:
            together = self._block_of_id.keys().isdisjoint(ids)
        else:
            together = first.ids.keys() >= set(ids)
        if ids and together:
            return {first: list(ids)}
        for id in ids:
            block = get(id)
            if block in parts:
                parts[block].append(id)
            else:
                parts[block] = [id]
        return parts

    def separate_states(self, ids: Sequence[str]) -> list[T]:
        """Return the states of these ids, one per block, so that the caller can modify them in
        place.

        A block that also contains other ids is split first, so that changes to the returned states
        affect only `ids`. New ids get a new block.
        """
        states = []
        for block, chosen in self.group_by_block(ids).items():
            if block is not None and len(chosen) == len(block.ids):
                states.append(block.state)
                continue
            own = StateBlock(
                dict.fromkeys(chosen), self._new() if block is None else self._copy(block.state)
            )
            self._all_blocks[own] = None
            self._block_of_id.update(dict.fromkeys(chosen, own))
            if block is not None:
                for id in chosen:
                    del block.ids[id]
            states.append(own.state)
        return states

    def discard(self, ids: Iterable[str]) -> Iterator[tuple[T, list[str], bool]]:
        """Remove the ids, and yield a tuple for each block that contained some of them.

        Each tuple has the state of the block, the ids removed from it, and whether the block is now
        empty. A block is changed only when the iterator reaches it, so the caller must exhaust the
        iterator.
        """
        for block, chosen in self.group_by_block(
            [id for id in ids if id in self._block_of_id]
        ).items():
            assert block is not None
            for id in chosen:
                del self._block_of_id[id], block.ids[id]
            if not block.ids:
                del self._all_blocks[block]
            yield block.state, chosen, not block.ids
