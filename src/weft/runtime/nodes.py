"""Machines of a Ray cluster, and the assignment of devices to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RayNode:
    """Machine of a Ray cluster, as listed by `ray.nodes()`.

    `id` is the id that Ray assigned to the machine, `host` is its host name, and `address` is its
    IP address. `cpus` and `gpus` are the numbers of CPUs and GPUs that Ray can use on it.
    """

    id: str
    host: str
    address: str
    cpus: int
    gpus: int

    @classmethod
    def from_listing(cls, listed: Mapping[str, Any]) -> RayNode:
        """Create a `RayNode` from an entry of `ray.nodes()`."""
        return cls(
            id=listed["NodeID"],
            host=listed["NodeManagerHostname"],
            address=listed["NodeManagerAddress"],
            cpus=int(listed["Resources"].get("CPU", 0)),
            gpus=int(listed["Resources"].get("GPU", 0)),
        )


def sort_nodes(nodes: Iterable[RayNode], here: str) -> list[RayNode]:
    """Return the machine with the id `here`, followed by the others sorted by address.

    With this order, device 0 is on the machine where the run was started.
    """
    return sorted(
        nodes,
        key=lambda node: (
            node.id != here,
            [int(part) for part in re.findall(r"\d+", node.address)],
        ),
    )


def order_bundles(on: Mapping[int, str], nodes: Sequence[RayNode]) -> list[int]:
    """Return the indices of the placement group's bundles, ordered by machine as in `nodes`.

    A bundle is what Ray reserves for one device. `on` maps the index of each bundle to the id of
    its machine.
    """
    order = [node.id for node in nodes]
    return sorted(on, key=lambda index: (order.index(on[index]), index))


def count_threads(on: Mapping[int, str], nodes: Sequence[RayNode]) -> dict[str, int]:
    """Return the number of CPU threads that each device on a machine uses, by machine id.

    It is the number of CPUs divided by the number of devices on the machine, but at least 1. `on`
    maps the index of each bundle (one per device) to the id of its machine.
    """
    threads: dict[str, int] = {}
    for node in nodes:
        threads[node.id] = max(1, node.cpus // max(1, list(on.values()).count(node.id)))
    return threads
