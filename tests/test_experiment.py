"""What an experiment asks of the machines, and where its roles and calls are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.data.spec import DatasetSpec
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.experiment import Control, Evaluation, Experiment, Scheduling, Workers
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.topology import Layout, Mesh


def test_without_groups_the_nodes_say_it() -> None:
    asked = Scheduling(n_nodes=2, n_gpus_per_node=4, memory_gb=8.0)
    assert (
        asked.num_devices,
        asked.gpus_per_node,
        asked.cpus_per_node,
        asked.memory_per_node_gb,
    ) == (8, 4, None, 8.0)
    assert (
        asked.list_ignored_fields() == ["memory_gb"]
        and asked.env == {}
        and asked.get_common_value("nodelist") is None
    )
    assert Scheduling().num_devices == 1


def test_groups_are_added_up_and_spread_over_the_nodes() -> None:
    asked = Scheduling(
        n_nodes=2,
        workers={
            "actor": Workers(count=5, gpus=1, cpus=3, memory_gb=10.0, env={"A": "1"}),
            "reward": Workers(count=2, gpus=0, cpus=1, nodelist="n[1-2]", env={"A": "1", "B": "2"}),
        },
    )
    assert (
        asked.num_devices,
        asked.gpus_per_node,
        asked.cpus_per_node,
        asked.memory_per_node_gb,
    ) == (7, 3, 9, 25.0)
    assert asked.env == {"A": "1", "B": "2"} and asked.get_common_value("nodelist") == "n[1-2]"
    assert asked.list_ignored_fields() == [
        "actor.cpus",
        "actor.memory_gb",
        "reward.cpus",
        "reward.nodelist",
    ]


def test_groups_that_differ_where_a_job_has_one_answer_are_refused() -> None:
    asked = Scheduling(
        workers={
            "a": Workers(container="x", env={"A": "1"}),
            "b": Workers(container="y", env={"A": "2"}),
        }
    )
    with pytest.raises(ConfigError, match=r"the groups differ in container \(a: 'x', b: 'y'\)"):
        asked.get_common_value("container")
    with pytest.raises(ConfigError, match="b sets A='2', another group '1'"):
        _ = asked.env


@pytest.mark.parametrize(
    ("field", "value"), [("count", 0), ("gpus", -1), ("cpus", 0), ("memory_gb", -1.0)]
)
def test_sizes_have_a_least(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"Workers: {field}={value}: must be at least"):
        Workers(**{field: value})  # type: ignore[arg-type]


def ppo(**options: str) -> Experiment:
    """Of a graph in which the actor samples and is trained and the reference scores."""
    calls = {
        "gen": MFCDef("gen", "actor", "generate", "generate", 4, ["prompt"], ["completion"]),
        "ref_inf": MFCDef("ref_inf", "ref", "infer", "inference", 4, ["completion"], ["logprobs"]),
        "train": MFCDef("train", "actor", "train", "train_step", 4, ["logprobs"]),
    }
    roles = {"actor": ModelSpec(trained=True), "ref": ModelSpec()}
    for name, value in options.items():
        group, field = name.split("__")
        if group in roles:
            roles[group] = replace(roles[group], **{field: value})
        else:
            calls[group] = replace(calls[group], **{field: value})
    evaluation = replace(calls["train"], method="evaluate")
    return Experiment(
        control=Control("e", "t"),
        roles=roles,
        graph=DataflowGraph(list(calls.values()), ["prompt"]),
        dataset=DatasetSpec(),
        dataset_type="prompt",
        data_role="actor",
        steps_follow="train",
        evaluation=Evaluation(DataflowGraph([evaluation], ["logprobs"]), 4),
    )


@pytest.mark.parametrize(
    ("options", "places", "devices"),
    [
        ({}, {"actor": "d1 0", "gen": "d1 0", "train": "d1 0", "ref_inf": "d1 0"}, 1),
        ({"actor__layout": "d2"}, {"actor": "d2f2 0,1", "gen": "d2f2 0,1", "train": "d2f2 0,1"}, 2),
        ({"train__layout": "d2"}, {"actor": "d2f2 0,1", "gen": "d2f2 0,1", "eval": "d2f2 0,1"}, 2),
        (
            {"train__layout": "t2", "gen__layout": "d2"},
            {"actor": "t2 0,1", "gen": "d2 0,1", "ref": "d1 0"},
            2,
        ),
        ({"actor__layout": "d2", "gen__layout": "d1"}, {"actor": "d2f2 0,1", "gen": "d1 0"}, 2),
        ({"train__layout": "t2", "gen__layout": "d4"}, {"actor": "t2 0,1", "gen": "d4 0,1,2,3"}, 4),
        (
            {"train__layout": "t2", "train__device_mesh": "2-3", "gen__layout": "d2"},
            {"actor": "t2 2,3", "gen": "d2 2,3"},
            4,
        ),
        ({"gen__device_mesh": "5"}, {"actor": "d1 0", "gen": "d1 5"}, 6),
        (
            {"ref_inf__layout": "d2", "ref_inf__device_mesh": "1,3"},
            {"ref": "d2 1,3", "ref_inf": "d2 1,3"},
            4,
        ),
    ],
)
def test_where_roles_and_calls_are(
    options: dict[str, str], places: dict[str, str], devices: int
) -> None:
    made = ppo(**options)
    made.check()
    calls = {call.name: made.call_meshes[call.name] for call in made.graph.list_model_calls()}
    found = {
        **made.role_meshes,
        **calls,
        "eval": made.call_meshes["eval/" + made.evaluation.graph.list_model_calls()[0].name],
    }
    for name, place in places.items():
        layout, _, ranks = place.partition(" ")
        assert found[name] == Mesh(Layout.parse(layout), tuple(map(int, ranks.split(",")))), name
    assert made.num_devices == devices


def test_copies_are_wherever_a_role_works_beside_its_own_mesh() -> None:
    assert ppo().copies == []
    assert ppo(ref_inf__device_mesh="1").copies == [], "nothing else uses the reference"
    assert ppo(train__layout="t2", gen__layout="d2").copies == [
        ("actor", Mesh(Layout(data=2), (0, 1)))
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gen__layout": "d2x"}, "^gen.layout=d2x: cannot be read"),
        ({"actor__layout": "d0"}, "^actor.layout=d0: data is 0; every degree is at least 1"),
        (
            {"gen__device_mesh": "0-1"},
            "^gen.device_mesh='0-1': layout d1f1t1p1c1e1 needs one device, and 2 were given; name "
            "one",
        ),
        (
            {"gen__layout": "t2", "gen__device_mesh": "1,0"},
            "gen.device_mesh='1,0': device numbers must be in ascending order; write 0,1",
        ),
        (
            {"actor__device_mesh": "2", "gen__layout": "d4"},
            "gen: layout .* needs 4 .*; say which by gen.device_mesh",
        ),
        (
            {"actor__layout": "t2", "actor__device_mesh": "3"},
            "^actor.device_mesh='3': layout .* needs 2 devices, and 1 was",
        ),
    ],
)
def test_meshes_that_do_not_fit_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo(**options).check()
