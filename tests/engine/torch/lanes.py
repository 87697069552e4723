"""A lane as late as a real one may be, on the CPU: it shows who reads, or writes, before a copy is
done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(repr=False)
class Late:
    """Implements `Lane`.

    A copy is made when a mark after it is held or waited for, and not before. Until then its target
    is spoilt; whoever has written to its source meanwhile, or freed it, is told. What comes to the
    host is there for the host when the host has waited. `log` has what was asked for, in order,
    with the bytes of copies.
    """

    has_separate_memory: bool = True
    log: list[str] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    _asked: list[_Copy] = field(default_factory=list)
    _read: int = 0  # of what was asked for, how much has been read by the device's order
    _made: int = 0  # and how much is there for everyone

    def follow_device(self) -> None:
        self.log.append("follow")

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape and target.dtype == source.dtype and target.numel()
        down = self._is_buffer(target)
        assert down != self._is_buffer(source), "a copy is between a buffer and the device"
        self.log.append(f"{'down' if down else 'up'} {target.nbytes}")
        coming = self._asked[self._made :]
        unread = self._asked[self._read :]
        in_use = any(
            _same_storage(x, target)
            for x in [c.target for c in coming] + [c.source for c in unread]
        )
        if not in_use:
            target.view(torch.uint8).fill_(255)  # NaN of every float
        late = any(_same_storage(each.target, source) for each in coming)
        self._asked.append(
            _Copy(target, source, down, not in_use, None if late else source.clone())
        )

    def mark(self) -> _LateMark:
        return _LateMark(self, len(self._asked))

    def allocate_buffer(self, count: int, dtype: torch.dtype) -> Tensor:
        self.buffers.append(torch.empty(count, dtype=dtype))
        return self.buffers[-1]

    @property
    def pinned(self) -> int:
        """Bytes of host memory that were ever taken."""
        return sum(each.nbytes for each in self.buffers)

    def _is_buffer(self, x: Tensor) -> bool:
        return any(_same_storage(x, each) for each in self.buffers)

    def reach(self, number: int, *, host: bool) -> None:
        for each in self._asked[self._read : number]:
            if not each.down:
                self._show()  # in the lane's order
            each.read()
            self._read += 1
            if not each.down:
                self._show()
        if host:
            self._show()

    def _show(self) -> None:
        for each in self._asked[self._made : self._read]:
            each.show()
        self._made = self._read


@dataclass(repr=False)
class _Copy:
    target: Tensor
    source: Tensor
    down: bool
    spoilt: bool
    expected: Tensor | None
    values: Tensor | None = None

    def read(self) -> None:
        there = self.source.untyped_storage().nbytes()  # what is freed cannot be shown either
        assert there, "freed while it was copied"
        self.values = self.source.clone()
        if self.expected is not None:
            same = torch.equal(self.values.view(torch.uint8), self.expected.view(torch.uint8))
            assert same, "written to while it was copied"

    def show(self) -> None:
        assert self.values is not None
        there = self.target.untyped_storage().nbytes()
        assert there, "freed before a copy came"
        assert not self.spoilt or self.target.view(torch.uint8).eq(255).all(), (
            "written to before a copy came"
        )
        self.target.copy_(self.values)


@dataclass(frozen=True)
class _LateMark:
    lane: Late
    number: int

    def make_device_wait(self) -> None:
        self.lane.log.append("hold")
        self.lane.reach(self.number, host=False)

    def wait(self) -> None:
        self.lane.log.append("wait")
        self.lane.reach(self.number, host=True)


def _same_storage(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() != 0


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages of these."""
    return sum({id(each): each.untyped_storage().nbytes() for each in tensors}.values())
