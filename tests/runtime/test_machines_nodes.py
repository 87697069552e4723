"""Machines in order, and the devices on them."""

from __future__ import annotations

from weft.runtime.machines import RayNode, count_threads, order_bundles, sort_nodes


def node(id: str, address: str, cpus: int = 8) -> RayNode:
    return RayNode(id, f"host-{id}", address, cpus, 0)


def test_this_machine_is_first_and_addresses_count_as_numbers() -> None:
    nodes = [node("a", "10.0.0.10"), node("b", "10.0.0.9"), node("c", "10.0.0.11")]
    assert [each.id for each in sort_nodes(nodes, "c")] == ["c", "b", "a"]


def test_a_machine_is_what_ray_lists() -> None:
    listed = {
        "NodeID": "a",
        "NodeManagerHostname": "h",
        "NodeManagerAddress": "10.0.0.1",
        "Resources": {"CPU": 4.0, "memory": 1.0},
    }
    assert RayNode.from_listing(listed) == RayNode("a", "h", "10.0.0.1", 4, 0)


def test_neighbours_are_on_one_machine() -> None:
    nodes = [node("b", "10.0.0.2"), node("a", "10.0.0.1")]
    assert order_bundles({0: "a", 1: "b", 2: "a", 3: "b"}, nodes) == [1, 3, 0, 2]


def test_devices_share_the_cpus_of_their_machine() -> None:
    nodes = [node("a", "10.0.0.1", 8), node("b", "10.0.0.2", 1), node("c", "10.0.0.3", 6)]
    assert count_threads({0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}, nodes) == {
        "a": 2,
        "b": 1,
        "c": 6,
    }
