"""What is known of ids, kept once for all ids that come together: bookkeeping costs as much as
there are blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Block(Generic[T]):
    """Ids of which the same is known."""

    ids: dict[str, None]
    known: T


class Blocks(Generic[T]):
    """Every id in one block.

    `new` makes what is known of ids at first, `copy` what is known of those that go their own way.
    """

    def __init__(self, new: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._new = new
        self._copy = copy
        self._of: dict[str, Block[T]] = {}
        self._all: dict[Block[T], None] = {}

    def __iter__(self) -> Iterator[str]:
        """The ids, in the order in which they came."""
        return iter(self._of)

    def __contains__(self, id: object) -> bool:
        return id in self._of

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, id: str) -> T:
        return self._of[id].known

    def items(self) -> Iterator[tuple[str, T]]:
        """Every id with what is known of it, in the order in which they came."""
        return ((id, block.known) for id, block in self._of.items())

    @property
    def blocks(self) -> Collection[Block[T]]:
        return self._all.keys()

    def ids_of(self, blocks: Collection[Block[T]]) -> list[str]:
        """The ids that these blocks hold, in the order in which they came."""
        if len(blocks) == 1:
            return [id for block in blocks for id in block.ids]
        held = set(blocks)
        if held:
            return [id for id, block in self._of.items() if block in held]
        return []

    def parts(self, ids: Sequence[str]) -> dict[Block[T] | None, list[str]]:
        """The blocks that hold these ids, each with those that it holds, in their order; under None
        those that none holds.
        """
        get = self._of.get
        parts = dict[Block[T] | None, list[str]]()
        first = get(ids[0]) if ids else None
        if first is None:
            together = self._of.keys().isdisjoint(ids)
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

    def apart(self, ids: Sequence[str]) -> list[T]:
        """What is known of these ids and of no others, to be changed."""
        found = []
        for block, chosen in self.parts(ids).items():
            if block is not None and len(chosen) == len(block.ids):
                found.append(block.known)
                continue
            own = Block(
                dict.fromkeys(chosen), self._new() if block is None else self._copy(block.known)
            )
            self._all[own] = None
            self._of.update(dict.fromkeys(chosen, own))
            if block is not None:
                for id in chosen:
                    del block.ids[id]
            found.append(own.known)
        return found

    def discard(self, ids: Iterable[str]) -> Iterator[tuple[T, list[str], bool]]:
        """Forget these ids.

        What was known of them, which they are, and whether no other id is left of which it is.
        """
        for block, chosen in self.parts([id for id in ids if id in self._of]).items():
            assert block is not None
            for id in chosen:
                del self._of[id], block.ids[id]
            if not block.ids:
                del self._all[block]
            yield block.known, chosen, not block.ids
