"""State per id, stored once for all ids that share it, so that cost grows with groups of ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class StateBlock(Generic[T]):
    """Ids that share the state `state`."""

    ids: dict[str, None]
    state: T


class StateBlocks(Generic[T]):
    """Map from ids to shared states.

    `new` makes the state of new ids, `copy` that of ids split off from their block.
    """

    def __init__(self, new: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._new = new
        self._copy = copy
        self._block_of_id: dict[str, StateBlock[T]] = {}
        self._all_blocks: dict[StateBlock[T], None] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in order of arrival."""
        return iter(self._block_of_id)

    def __contains__(self, id: object) -> bool:
        return id in self._block_of_id

    def __len__(self) -> int:
        return len(self._block_of_id)

    def __getitem__(self, id: str) -> T:
        return self._block_of_id[id].state

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over (id, state) in order of arrival."""
        return ((id, block.state) for id, block in self._block_of_id.items())

    @property
    def blocks(self) -> Collection[StateBlock[T]]:
        """All blocks."""
        return self._all_blocks.keys()

    def list_ids(self, blocks: Collection[StateBlock[T]]) -> list[str]:
        """Return the ids in these blocks, in order of arrival."""
        if len(blocks) == 1:
            result: list[str] = []
            for block in blocks:
                for id in block.ids:
                    result.append(id)
            return result
        held = set(blocks)
        if held:
            return [id for id, block in self._block_of_id.items() if block in held]
        return []

    def group_by_block(self, ids: Sequence[str]) -> dict[StateBlock[T] | None, list[str]]:
        """Group these ids by block, keeping their order; unknown ids are under None."""
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
        """Return the states of exactly these ids, splitting blocks where needed; may be modified."""
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
        """Remove these ids; yield (state, removed ids, whether the block is empty)."""
        for block, chosen in self.group_by_block(
            [id for id in ids if id in self._block_of_id]
        ).items():
            assert block is not None
            for id in chosen:
                del self._block_of_id[id], block.ids[id]
            if not block.ids:
                del self._all_blocks[block]
            yield block.state, chosen, not block.ids
