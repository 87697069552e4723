"""Machines of a Ray cluster and the assignment of devices to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    host: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def of(cls, listed: Mapping[str, Any]) -> Node:
        """Build a machine from an entry of `ray.nodes()`."""
        return cls(
            id=listed["NodeID"],
            host=listed["NodeManagerHostname"],
            address=listed["NodeManagerAddress"],
            cpus=int(listed["Resources"].get("CPU", 0)),
            gpus=int(listed["Resources"].get("GPU", 0)),
        )


def in_order(nodes: Iterable[Node], here: str) -> list[Node]:
    """Return the node with id `here` first, the others by address.

    Device 0 is then on the machine where the run was started.
    """
    return sorted(
        nodes,
        key=lambda node: (
            node.id != here,
            [int(part) for part in re.findall(r"\d+", node.address)],
        ),
    )


def by_rank(on: Mapping[int, str], nodes: Sequence[Node]) -> list[int]:
    """Return the placement group's bundles (one per device) in the order of their nodes.

    `on` maps each bundle to its node's id.
    """
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def threads_of(on: Mapping[int, str], nodes: Sequence[Node]) -> dict[str, int]:
    """Return node id -> CPU threads per device: the node's CPUs divided by its devices."""
    return {
        node.id: max(1, node.cpus // max(1, list(on.values()).count(node.id))) for node in nodes
    }
