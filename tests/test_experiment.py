"""What an experiment asks of the machines."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.experiment import Scheduling, Workers


def test_without_groups_the_nodes_say_it() -> None:
    asked = Scheduling(n_nodes=2, n_gpus_per_node=4, memory_gb=8.0)
    assert (asked.num_devices, asked.gpus_per_node, asked.cpus_per_node, asked.memory_per_node_gb) == (8, 4, None, 8.0)
    assert asked.ignored_on_one_machine() == ["memory_gb"] and asked.env == {} and asked.common("nodelist") is None
    assert Scheduling().num_devices == 1


def test_groups_are_added_up_and_spread_over_the_nodes() -> None:
    asked = Scheduling(
        n_nodes=2,
        workers={
            "actor": Workers(count=5, gpus=1, cpus=3, memory_gb=10.0, env={"A": "1"}),
            "reward": Workers(count=2, gpus=0, cpus=1, nodelist="n[1-2]", env={"A": "1", "B": "2"}),
        },
    )
    assert (asked.num_devices, asked.gpus_per_node, asked.cpus_per_node, asked.memory_per_node_gb) == (7, 3, 9, 25.0)
    assert asked.env == {"A": "1", "B": "2"} and asked.common("nodelist") == "n[1-2]"
    assert asked.ignored_on_one_machine() == ["actor.cpus", "actor.memory_gb", "reward.cpus", "reward.nodelist"]


def test_groups_that_differ_where_a_job_has_one_answer_are_refused() -> None:
    asked = Scheduling(
        workers={"a": Workers(container="x", env={"A": "1"}), "b": Workers(container="y", env={"A": "2"})}
    )
    with pytest.raises(ConfigError, match=r"the groups differ in container \(a: 'x', b: 'y'\)"):
        asked.common("container")
    with pytest.raises(ConfigError, match="b sets A='2', another group '1'"):
        _ = asked.env


@pytest.mark.parametrize(("field", "value"), [("count", 0), ("gpus", -1), ("cpus", 0), ("memory_gb", -1.0)])
def test_sizes_have_a_least(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Workers: {field}={value}: must be at least"):
        Workers(**{field: value})  # type: ignore[arg-type]
