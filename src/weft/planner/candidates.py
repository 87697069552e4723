"""Meshes that a search for placements may choose: ranges of devices, and layouts of each range.

A range is within one machine or consists of whole machines. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.topology import Layout, Mesh

# Fewest tokens of a sequence on each of the ranks that share it: with fewer, the exchange of keys
# and values takes longer than what it saves.
MIN_CONTEXT_TOKENS = 1024


@dataclass(frozen=True)
class PlacementUnit:
    """Group of calls that are placed on the same mesh.

    The group consists either of all calls that train a role, or of a single call that does not
    train. `meshes` are the candidate meshes from which the search chooses one.
    """

    role: str
    calls: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    trains: bool = False


def list_ranges(num_devices: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranges of adjacent devices on which a mesh can be placed, from small to large.

    A range within a machine has a power of two of devices, or a number that divides `per_node`, the
    number of devices per machine. Larger ranges consist of whole machines: a power of two, or a
    number that divides the number of machines. A range begins at a multiple of its size, counted
    from the machine's first device or from the first machine. The range of all devices is included
    even if the last machine has fewer devices than the others.
    """
    for size in _list_sizes(per_node):
        for first in range(0, num_devices, per_node):
            end = min(first + per_node, num_devices)
            for start in range(first, end - size + 1, size):
                yield tuple(range(start, start + size))
    num_nodes = num_devices // per_node
    for nodes in _list_sizes(num_nodes):
        size = nodes * per_node
        if nodes > 1:
            for start in range(0, num_nodes * per_node - size + 1, size):
                yield tuple(range(start, start + size))
    if num_devices % per_node and num_devices not in _list_sizes(per_node):
        yield tuple(range(num_devices))


def list_layouts(
    size: int, per_node: int, *, max_context: int = 1, num_experts: int = 1
) -> Iterator[Layout]:
    """Yield the layouts of `size` devices.

    The ranks that share the tensors or the tokens of a layer are at most `per_node`, the number of
    devices per machine. At most `max_context` ranks share the tokens of a sequence. Experts are
    distributed over a number of data-parallel ranks that divides `num_experts`. If there are
    several data-parallel ranks, each combination of degrees is yielded twice: once with weights
    that are sharded over all of these ranks, and once with unsharded weights.
    """
    for t in _list_divisors(size):
        for c in _list_divisors(size // t):
            if t * c > per_node or c > max_context:
                continue
            for p in _list_divisors(size // t // c):
                d = size // t // p // c
                for e in _list_divisors(d):
                    if num_experts % e:
                        continue
                    for f in dict.fromkeys((d, 1)):
                        yield Layout(data=d, fsdp=f, tensor=t, pipeline=p, context=c, expert=e)


def compute_max_context(sequence_length: int) -> int:
    """Return the largest number of ranks that may share the tokens of a sequence."""
    return max(1, sequence_length // MIN_CONTEXT_TOKENS)


def list_meshes(
    num_devices: int,
    per_node: int,
    allowed: Callable[[Layout], Layout | None],
    *,
    max_context: int = 1,
    num_experts: int = 1,
) -> list[Mesh]:
    """Return the meshes that can be placed on the devices, in all layouts that `allowed` accepts.

    `allowed` returns the layout to use, which can differ from its argument, or None to exclude the
    layout. The other arguments are those of `list_layouts`.
    """
    meshes = []
    layouts: dict[int, list[Layout]] = {}  # by number of devices
    for ranks in list_ranges(num_devices, per_node):
        size = len(ranks)
        if size not in layouts:
            candidates = list_layouts(
                size, per_node, max_context=max_context, num_experts=num_experts
            )
            usable = dict.fromkeys(allowed(layout) for layout in candidates)
            layouts[size] = [layout for layout in usable if layout is not None]
        meshes += [Mesh(layout, ranks) for layout in layouts[size]]
    return meshes


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _list_sizes(most: int) -> list[int]:
    """Return the divisors of `most` and the powers of two up to `most`."""
    sizes = []
    for size in range(1, most + 1):
        is_power_of_two = size & (size - 1) == 0
        if most % size == 0 or is_power_of_two:
            sizes.append(size)
    return sizes
