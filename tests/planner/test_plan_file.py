"""Plan files: what is written is read again, and each mistake is named with its line."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.errors import ConfigError
from weft.planner.plan_file import (
    PlacementPlan,
    PlanFacts,
    PlannedCall,
    find_differing_calls,
    format_devices,
    format_layout,
    format_plan,
    is_unchanged,
    parse_call_mesh,
    parse_plan,
    plan_call,
)
from weft.topology import Layout, Mesh, parse_mesh

FACTS = PlanFacts(8, 4, 64, None, {"actor": {"layers": 32, "hidden": 4096}})
CALLS = {
    "actor_gen": PlannedCall("d4t2", "0-7", {"seconds": 3.25, "bound": "memory"}),
    "actor_train": PlannedCall("d2f2t2", "4-7"),
}
PLAN = PlacementPlan(CALLS, FACTS, {"device": "H100", "step_seconds": 14.5, "basis": 'a "b": c'})
TEXT = format_plan(PLAN, "ppo")


def test_what_is_written_is_read_again() -> None:
    plan = parse_plan(TEXT, "p.yaml")
    assert plan.calls == CALLS and plan.facts == FACTS and plan.estimates == PLAN.estimates
    line = plan.lines["calls.actor_train.layout"]
    assert TEXT.splitlines()[line - 1] == "    layout: d2f2t2"
    assert plan.locate("calls.actor_train.layout") == f"p.yaml:{line}"
    assert plan.locate("elsewhere") == "p.yaml"
    assert format_plan(replace(plan, source="plan.yaml"), "ppo") == TEXT


def test_random_meshes_are_read_again() -> None:
    draw = random.Random(1)
    for _ in range(200):
        layout = Layout(draw.choice((1, 2, 4)), 1, draw.choice((1, 2)), draw.choice((1, 3)))
        layout = replace(layout, fsdp=draw.choice((1, layout.data)))
        ranks = tuple(sorted(draw.sample(range(40), layout.num_devices)))
        mesh = Mesh(layout, ranks)
        call = plan_call(mesh)
        plan = PlacementPlan({"train": call}, PlanFacts())
        for sharded in (True, False):
            assert parse_call_mesh(plan, "train", sharded=sharded) == mesh
        assert parse_mesh(call.devices, layout) == mesh


def test_devices_are_ranges() -> None:
    assert format_devices([0, 1, 2, 3]) == "0-3"
    assert format_devices([0, 2, 3, 9]) == "0,2-3,9"
    assert format_layout(Layout()) == "d1" and format_layout(Layout(tensor=2)) == "t2"
    assert format_layout(Layout(data=4, tensor=2)) == "d4f1t2"


def test_devices_may_be_a_number_or_a_list() -> None:
    text = (
        "weft_plan: 1\ncalls:\n  a: {layout: d1, devices: 3}\n  b: {layout: t2, devices: [4, 5]}\n"
    )
    plan = parse_plan(text, "p.yaml")
    assert [call.devices for call in plan.calls.values()] == ["3", "4-5"]
    assert parse_plan(
        '{"weft_plan": 1, "calls": {"a": {"layout": "d1", "devices": "0"}}}', "j"
    ).calls


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("weft_plan: 1", "weft_plan: 2", r"p.yaml:\d+: weft_plan: format 2 is newer"),
        ("weft_plan: 1", "weft_plan: x", "format 'x' is unknown"),
        ("weft_plan: 1", "other: 1", "is not a plan: it has no weft_plan"),
        (
            "layout: d4t2",
            "layuot: d4t2",
            r"p.yaml:11: calls.actor_gen.layuot: is unknown; .*layout",
        ),
        ("    layout: d4t2\n", "", r"calls.actor_gen: has no layout"),
        ("layout: d4t2", "layout: [1.5]", r"p.yaml:11: calls.actor_gen.layout: cannot be read"),
        ("devices: 8\n", "devices: no\n", r"run.devices: must be a whole number"),
        ("devices: 8\n", "device: 8\n", r"run.device: is unknown; did you mean devices\?"),
        ("layers: 32", "layer: 32", r"run.models.actor.layer: is unknown; did you mean layers\?"),
        ("layers: 32", "layers: -1", r"run.models.actor.layers: must be a whole number"),
        ("  actor_train:", "  actor_gen:", "'actor_gen' is repeated"),
        ("weft_plan: 1", "weft_plan: [", "is not YAML"),
    ],
)
def test_a_mistake_is_named_with_its_line(old: str, new: str, told: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=told):
        parse_plan(TEXT.replace(old, new, 1), "p.yaml")


def test_the_calls_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"p.yaml:2: calls: must be a mapping, not 3"):
        parse_plan("weft_plan: 1\ncalls: 3\n", "p.yaml")
    with pytest.raises(ConfigError, match="calls: has no calls"):
        parse_plan("weft_plan: 1\n", "p.yaml")
    with pytest.raises(ConfigError, match=r"p.yaml:3: calls.a: must have a layout and devices"):
        parse_plan("weft_plan: 1\ncalls:\n  a: d4\n", "p.yaml")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (PlannedCall("d2x", "0-1"), r"calls.train.layout=d2x: cannot be read"),
        (
            PlannedCall("d2", "0-2"),
            r"calls.train.devices='0-2': layout d2f1t1p1c1e1 needs 2 devices",
        ),
        (PlannedCall("d2", "x"), r"calls.train.devices='x' cannot be read"),
        (
            PlannedCall("d2", "7-8"),
            r"device 8 does not exist; the 8 devices of this plan are 0 to 7",
        ),
    ],
)
def test_an_invalid_mesh_is_named(call: PlannedCall, told: str) -> None:
    plan = PlacementPlan({"train": call}, FACTS, source="p.yaml", lines={"calls.train.layout": 3})
    with pytest.raises(ConfigError, match=told):
        parse_call_mesh(plan, "train", sharded=False)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        (replace(FACTS, devices=4), "for 8 devices, and this run has 4"),
        (replace(FACTS, devices_per_node=8), "for 4 devices per machine, and this run has 8"),
        (replace(FACTS, rows_per_step=32), "for 64 rows per step, and this run has 32"),
        (
            replace(FACTS, rows_per_step=None, tokens_per_step=100),
            "for batches of rows, and this run has batches of tokens",
        ),
        (
            replace(FACTS, models={"actor": {"layers": 16, "hidden": 4096}}),
            "for another model of actor: layers 32, and this run's has 16",
        ),
    ],
)
def test_a_plan_of_another_run_is_refused(facts: PlanFacts, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PLAN.check_facts(facts)


def test_values_that_are_not_known_are_not_compared() -> None:
    PLAN.check_facts(FACTS)
    PLAN.check_facts(PlanFacts(rows_per_step=64))
    PlacementPlan(CALLS, PlanFacts()).check_facts(FACTS)


def test_the_calls_are_those_of_the_run() -> None:
    PLAN.check_calls(["actor_train", "actor_gen"])
    with pytest.raises(
        ConfigError, match=r"calls.actor_gen: .* no such call; did you mean actor_gem"
    ):
        PLAN.check_calls(["actor_gem", "actor_train"])
    with pytest.raises(
        ConfigError, match="calls: critic_inf of this run is missing; add its layout"
    ):
        PLAN.check_calls([*CALLS, "critic_inf"])


def test_an_edited_file_is_recognized() -> None:
    assert is_unchanged(TEXT)
    assert not is_unchanged(TEXT.replace("d4t2", "d8"))
    assert not is_unchanged(TEXT.replace("3.25", "3.26"))
    assert not is_unchanged("weft_plan: 1\n")


def test_calls_that_differ_are_listed() -> None:
    other = {**CALLS, "actor_gen": PlannedCall("d8", "0-7")}
    plan = replace(PLAN, calls=other)
    assert find_differing_calls(PLAN, plan) == ["actor_gen: d4t2 on 0-7 there, d8 on 0-7 here"]
    assert find_differing_calls(PLAN, PLAN) == []
    assert PLAN.describe_calls() == "actor_gen d4t2 on 0-7; actor_train d2f2t2 on 4-7"
