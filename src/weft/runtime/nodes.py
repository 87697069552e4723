"""Machines of a Ray cluster and the assignment of devices to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RayNode:
    """A machine of the cluster."""

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


def order_bundles(on: Mapping[int, str], nodes: Sequence[RayNode]) -> list[int]:
    """Return the placement group's bundles (one per device) in the order of their nodes.

    `on` maps each bundle to its node's id.
    """
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def count_threads(on: Mapping[int, str], nodes: Sequence[RayNode]) -> dict[str, int]:
    """Return node id -> CPU threads per device: the node's CPUs divided by its devices."""
    threads: dict[str, int] = {}
    for node in nodes:
        threads[node.id] = max(1, node.cpus // max(1, list(on.values()).count(node.id)))
    return threads
