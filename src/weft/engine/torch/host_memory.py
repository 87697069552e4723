"""Tensors of a device whose values can lie in pinned host memory instead, in groups that come back
one after the other.

memory = HostMemory([[embedding], [weights of block 0], ...], lane)
memory.leave()         # the device's memory is free
memory.fetch()         # copies begin, in order of the groups
memory.hold(0)         # what the device is given from now on finds group 0
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.kernels import Lane, Mark, resize_storage, storage_of


@dataclass
class _Block:
    """A storage: the values of one tensor or more, all of which `tensor`'s is one."""

    tensor: Tensor
    group: int
    size: int  # bytes
    constant: bool
    host: Tensor | None = None  # flat; made when it is first needed, then kept

    @property
    def flat(self) -> Tensor:
        """All of the storage, padding too, on the device."""
        return self.tensor.detach().as_strided((self.size // self.tensor.itemsize,), (1,), 0)

    def resize(self, size: int) -> None:
        resize_storage(self.tensor, size)


class HostMemory:
    """A tensor stays the object it is.

    Its storage gives up its memory and gets other memory later, as FSDP2's gathered parameters do,
    so views, optimizers and hooks keep what they refer to. Values of `constant` tensors are copied
    to the host once, until `changed` is called; host memory is taken once and kept.

    While a group is away, or its copy is on its way, nothing may read it on the device: `hold` and
    `wait` say when.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        lane: Lane,
        constant: Collection[Tensor] = frozenset(),
    ) -> None:
        self._lane = lane
        self._blocks: dict[int, _Block] = {}  # by the tensor's identity
        found: dict[int, _Block] = {}  # by the storage's address
        self._groups: list[list[_Block]] = [[] for _ in groups]
        still = {id(each) for each in constant}
        for number, tensors in enumerate(groups):
            for tensor in tensors:
                address, size = storage_of(tensor)
                if not size:
                    continue
                block = found.get(address)
                if block is None:
                    block = found[address] = _Block(tensor, number, size, True)
                    self._groups[number].append(block)
                block.constant &= id(tensor) in still
                self._blocks[id(tensor)] = block
        self._away: set[int] = set()
        self._arriving: dict[int, Mark] = {}
        self._left: Mark | None = None  # until the host has waited for it

    @property
    def away(self) -> bool:
        """Whether anything is."""
        return bool(self._away)

    def changed(self) -> None:
        """Constant tensors have other values than before."""
        for group in self._groups:
            for block in group:
                block.constant = False

    def leave(self) -> None:
        """Free the device's memory of what is there, when its values have been copied.

        The host does not wait for that.
        """
        here = [number for number in range(len(self._groups)) if number not in self._away]
        if not here:
            return
        blocks = [block for number in here for block in self._groups[number]]
        self._lane.follow()
        for block in blocks:
            if block.host is None or not block.constant:
                if block.host is None:
                    block.host = self._lane.buffer(
                        block.size // block.tensor.itemsize, block.tensor.dtype
                    )
                self._lane.copy(block.host, block.flat)
        self._left = self._lane.mark()
        self._left.hold()  # the memory is given to others, whose work comes after the copies
        for block in blocks:
            block.resize(0)
        self._away.update(here)
        self._arriving.clear()

    def fetch(self, *numbers: int) -> None:
        """Begin to copy these groups back, or all; nothing happens for those that are there."""
        wanted = [number for number in numbers or range(len(self._groups)) if number in self._away]
        if not wanted:
            return
        for number in wanted:
            for block in self._groups[number]:
                block.resize(block.size)
        self._lane.follow()  # the memory may have been another's until now
        for number in wanted:
            for block in self._groups[number]:
                assert block.host is not None, "what is away has left"
                self._lane.copy(block.flat, block.host)
            self._arriving[number] = self._lane.mark()
        self._away.difference_update(wanted)

    def hold(self, *numbers: int) -> None:
        """What the device is given from now on, on the stream in force, finds these groups, or all,
        which were fetched.
        """
        for number in numbers or list(self._arriving):
            if (mark := self._arriving.pop(number, None)) is not None:
                mark.hold()

    def wait(self, number: int) -> None:
        """The host waits for a group: work on any stream finds it from now on."""
        if (mark := self._arriving.pop(number, None)) is not None:
            mark.wait()

    def on_host(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor that is away; None of one that is there, is empty, or is not among
        these.
        """
        block = self._blocks.get(id(tensor))
        if block is None or block.group not in self._away:
            return None
        if self._left is not None:
            self._left.wait()
            self._left = None
        assert block.host is not None, "what is away has left"
        return block.host.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class BlockByBlock:
    """A network's tensors: of `memory`'s groups the first is what a pass needs before the blocks,
    then comes one a block, then what no pass needs. A block's first pass after `come` waits for its
    own group alone.

    Where whole parameters are `gathered` on a stream of their own, ahead of the pass, the host
    waits in place of the device, which is at the blocks before.
    """

    def __init__(self, memory: HostMemory, blocks: Sequence[nn.Module], *, gathered: bool) -> None:
        self.memory = memory
        self._blocks = blocks
        self._gathered = gathered
        self._hooks: list[RemovableHandle] = []

    def come(self) -> None:
        """Begin to bring all back."""
        if not self.memory.away:
            return
        self.memory.fetch()
        self._needs(0)
        for number, block in enumerate(self._blocks, 1):
            self._hooks.append(
                block.register_forward_pre_hook(partial(self._before, number), prepend=True)
            )

    def ready(self) -> None:
        """All of it is there for what comes next."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.memory.hold()

    def _before(self, number: int, *_: object) -> None:
        self._hooks[number - 1].remove()
        self._needs(number)

    def _needs(self, number: int) -> None:
        if self._gathered:
            self.memory.wait(number)
        else:
            self.memory.hold(number)
