"""Machines of a Ray cluster and the assignment of devices to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RayNode:
    """Machine of a Ray cluster."""

    id: str
    host: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def from_listing(cls, listed: Mapping[str, Any]) -> RayNode:
        """Build a machine from an entry of `ray.nodes()`."""
        return cls(
            id=listed["NodeID"],
            host=listed["NodeManagerHostname"],
            address=listed["NodeManagerAddress"],
            cpus=int(listed["Resources"].get("CPU", 0)),
            gpus=int(listed["Resources"].get("GPU", 0)),
        )


def sort_nodes(nodes: Iterable[RayNode], here: str) -> list[RayNode]:
    """Return all nodes: first the node with id `here`, then the others, sorted by address.

    Device 0 is then on the machine where the run was started.
    """
    return sorted(
        nodes,
        key=lambda node: (
            node.id != here,
            [int(part) for part in re.findall(r"\d+", node.address)],
        ),
    )


def order_bundles(on: Mapping[int, str], nodes: Sequence[RayNode]) -> list[int]:
    """Return the indices of the placement group's bundles in the order of their nodes.

    There is one bundle per device. `on` maps the index of each bundle to the id of its node.
    """
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def count_threads(on: Mapping[int, str], nodes: Sequence[RayNode]) -> dict[str, int]:
    """Return, for each node id, the number of CPU threads that each device on the node uses.

    This is the node's number of CPUs divided by its number of devices, but at least 1. `on` maps
    the index of each bundle to the id of its node.
    """
    threads: dict[str, int] = {}
    for node in nodes:
        threads[node.id] = max(1, node.cpus // max(1, list(on.values()).count(node.id)))
    return threads
