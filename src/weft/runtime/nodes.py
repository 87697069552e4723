"""The machines of a cluster, and which of them each device is on."""

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
        """A machine as Ray lists it."""
        return cls(
            id=listed["NodeID"],
            host=listed["NodeManagerHostname"],
            address=listed["NodeManagerAddress"],
            cpus=int(listed["Resources"].get("CPU", 0)),
            gpus=int(listed["Resources"].get("GPU", 0)),
        )


def in_order(nodes: Iterable[Node], here: str) -> list[Node]:
    """The node with the id `here` first, then by address, so that device 0 is where the run was
    started.
    """
    return sorted(
        nodes,
        key=lambda node: (
            node.id != here,
            [int(part) for part in re.findall(r"\d+", node.address)],
        ),
    )


def by_rank(on: Mapping[int, str], nodes: Sequence[Node]) -> list[int]:
    """The bundles of a placement group, one a device, in the order of the nodes that they are `on`."""
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def threads_of(on: Mapping[int, str], nodes: Sequence[Node]) -> dict[str, int]:
    """Node -> the share of its CPUs that each device on it has."""
    return {
        node.id: max(1, node.cpus // max(1, list(on.values()).count(node.id))) for node in nodes
    }
