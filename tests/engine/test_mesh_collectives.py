"""Layouts of several processes compute what one process computes: scores, two steps, checkpoints,
tokens, resumed runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

import pytest
import torch.distributed as dist
from torch.torch_version import TorchVersion

from tests.engine import layouts
from tests.engine.layouts import Case
from tests.ranks import Ranks
from weft.checkpoints import hf_io
from weft.engine.spec import ModelSpec, PrefixSpec
from weft.engine.torch.network_source import check_layout
from weft.errors import ConfigError
from weft.parallel.schedule import Kind
from weft.registry import families
from weft.topology import Layout

TWO = ("d2", "d2f1", "t2", "p2", "c2")
FOUR = ("d2t2", "d2f1t2", "d4f2", "d4", "t4", "d2p2", "d2f1p2", "t2p2", "d2c2", "d2f1c2", "t2c2")
CASES = {
    "llama": Case(),
    "tied": Case(changes={"tie_word_embeddings": True}),
    "lora": Case(lora=True),
    "dropout": Case("gpt2", lora=True, dropout=0.2),
    "gpt2": Case("gpt2"),
    "gemma2": Case("gemma2"),
    "mixtral": Case("mixtral"),
    "balanced": Case("mixtral", options={"router_aux_loss_coef": 0.1}),
    "recomputed": Case(options={"gradient_checkpointing": True}),
}


def pairs(more: Mapping[str, str] = MappingProxyType({}), **layouts: str) -> list[Any]:
    """Return (case, layout) of each.

    Every case meets every degree and every layout meets a plain case: full products repeat what
    these, and two processes, check already. The slow tier has each case and each layout at least
    once; the other pairs are exhaustive.
    """
    found = [
        (name, layout) for name, each in {**layouts, **more}.items() for layout in each.split()
    ]
    # First the pairs of a new case and a new layout, then those of what is left.
    seen: set[str] = set()
    chosen = set()
    for news in (2, 1):
        for pair in found:
            if len({*pair} - seen) == news:
                chosen.add(pair)
                seen.update(pair)
    return [
        pytest.param(*pair, marks=() if pair in chosen else pytest.mark.exhaustive)
        for pair in found
    ]


Compare = Callable[[Case, str, Ranks], None]


@dataclass(frozen=True)
class Reference:
    """The model of a case and the results of one process, shared by all layouts of the module;
    nothing writes to it.
    """

    model: Path
    found: layouts.Found
    folder: Path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Reference]:
    """Return the function that computes the reference of a case, once per case."""
    made: dict[str, Reference] = {}

    def of(case: Case) -> Reference:
        if repr(case) not in made:
            folder = tmp_path_factory.mktemp("alone")
            path = layouts.write_model(case, folder / "hf")
            found = layouts.run(path, "d1", case, folder)
            assert found is not None
            made[repr(case)] = Reference(path, found, folder)
        return made[repr(case)]

    return of


@pytest.fixture
def compare(reference: Callable[[Case], Reference], tmp_path: Path) -> Compare:
    """Return the function that runs a case on a layout and compares it with one process."""

    def run(case: Case, layout: str, ranks: Ranks) -> None:
        one = reference(case)
        layouts.check(
            ranks.run(layouts.run, one.model, layout, case, tmp_path),
            one.found,
            tmp_path,
            one.folder,
        )

    return run


@pytest.mark.default_cases(
    "llama-c2",
    "llama-d2",
    "llama-p2",
    "llama-t2",
    "lora-t2",
    "lora-p2",
    "mixtral-d2f1",
    "mixtral-t2",
)
@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("name", ["llama", "lora", "mixtral"])
def test_two_processes_are_as_one(name: str, layout: str, ranks: Ranks, compare: Compare) -> None:
    compare(CASES[name], layout, ranks)


@pytest.mark.parametrize("layout", ["d2", "t2", "p2"])
def test_a_prefix_of_two_processes(layout: str, ranks: Ranks, compare: Compare) -> None:
    compare(Case(prefix=3), layout, ranks)


@pytest.mark.slow_cases("t4", "t2p2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["t4", "d2t2", "t2p2"])
def test_a_prefix_of_four_processes(layout: str, four_ranks: Ranks, compare: Compare) -> None:
    """Of t4 two ranks each hold one head of the keys."""
    compare(Case(prefix=3), layout, four_ranks)


@pytest.mark.slow
def test_a_prefix_beside_experts(ranks: Ranks, compare: Compare) -> None:
    compare(Case("mixtral", prefix=3), "d2e2", ranks)


def test_ranks_that_share_tokens_have_no_prefix(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path)
    spec = ModelSpec(path=str(path), prefix=PrefixSpec(num_tokens=3), trained=True)
    config = replace(hf_io.read_config(path)[1], prefix_tokens=3)
    with pytest.raises(
        ConfigError, match=r"\(c\) have no prefix, and .* has a prefix of 3 tokens; write c1"
    ):
        check_layout(spec, Layout.parse("c2"), config)


WHOLE = Case(options={"sequence_parallel": False})


def test_tensor_ranks_that_share_no_rows(ranks: Ranks, compare: Compare) -> None:
    compare(WHOLE, "t2", ranks)


@pytest.mark.slow_cases("t4", "t2c2", "t2p2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in FOUR if "t" in layout])
def test_tensor_ranks_that_share_no_rows_more(
    layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    compare(WHOLE, layout, four_ranks)


EXPERTS = {
    "mixtral": Case("mixtral"),
    "qwen3_moe": Case("qwen3_moe", changes={"num_experts": 8}),
    "balanced": Case("mixtral", options={"router_aux_loss_coef": 0.1}),
    "lora": Case("mixtral", lora=True, dropout=0.2),
    "recomputed": Case("mixtral", options={"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_of_two_processes(name: str, ranks: Ranks, compare: Compare) -> None:
    compare(EXPERTS[name], "d2e2", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", "lora", "recomputed"])
def test_experts_of_two_processes_more(name: str, ranks: Ranks, compare: Compare) -> None:
    compare(EXPERTS[name], "d2e2", ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(
        mixtral="d4e2 d4e4 d2t2e2 d2c2e2",
        qwen3_moe="d4e4 d2t2e2",
        balanced="d2c2e2 d4e2",
        lora="d2t2e2 d4e4",
        recomputed="d2c2e2 d4e2",
    ),
)
def test_experts_of_four_processes(
    name: str, layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    compare(EXPERTS[name], layout, four_ranks)


@pytest.mark.default_cases("d2p2e2")
@pytest.mark.parametrize("layout", ["c2p2", "d2p2e2", "d4f4e2"])
def test_combinations_of_four_processes(layout: str, four_ranks: Ranks, compare: Compare) -> None:
    compare(CASES["balanced"], layout, four_ranks)


def test_ranks_that_share_packs_sample_the_same(
    ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    for found in (
        ranks.run(layouts.parted, path, "c2"),
        four_ranks.run(layouts.parted, path, "c2p2"),
    ):
        assert all(tokens == found[0] for tokens in found)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(8, tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.slow_cases("d2f2p2c2e2", "d2f2t2p2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2f2p2c2e2", "d4f4p2e2", "d4f4c2e2", "d2f2t2p2"])
def test_eight_processes_are_as_one(layout: str, eight_ranks: Ranks, compare: Compare) -> None:
    compare(CASES["balanced"], layout, eight_ranks)


@pytest.mark.slow_cases("tied", "dropout", "balanced")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_stages_that_share_packs(name: str, four_ranks: Ranks, compare: Compare) -> None:
    compare(CASES[name], "c2p2", four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(
        mixtral="d2p2e2 d4f2e2 d4f4e2 d4f4e4 d4f2e4 d2f2c2e2 d2f2t2e2",
        qwen3_moe="d2p2e2 d4f4e4 d2f2t2e2",
        balanced="d4f2e2 d2f2c2e2 d4f2e4",
        lora="d2p2e2 d4f4e2 d2f2t2e2",
        recomputed="d4f4e4 d2f2c2e2 d4f2e4",
    ),
)
def test_experts_in_stages_and_shards(
    name: str, layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    compare(EXPERTS[name], layout, four_ranks)


@pytest.mark.slow_cases("gpipe-c2p2", "zero_bubble-d2p2e2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["c2p2", "d2p2e2"])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_schedules_of_combinations(
    schedule: str, layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    case = Case("mixtral", options={"pipeline_schedule": schedule, "router_aux_loss_coef": 0.1})
    compare(case, layout, four_ranks)


@pytest.mark.slow_cases("0", "1", "3")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages_with_experts(stage: int, ranks: Ranks, compare: Compare) -> None:
    layout = "d2f2e2" if stage else "d2f1e2"
    compare(Case("mixtral", options={"zero_stage": stage}), layout, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(
        {
            name: " ".join(TWO)
            for name in ("tied", "gpt2", "gemma2", "dropout", "recomputed", "balanced")
        }
    ),
)
def test_two_processes_are_as_one_more(
    name: str, layout: str, ranks: Ranks, compare: Compare
) -> None:
    compare(CASES[name], layout, ranks)


def staged(schedule: str, layers: int = 5, family: str = "llama", **case: Any) -> Case:
    """Of several stages a rank, some with more layers than others."""
    options = {"pipeline_schedule": schedule, **case.pop("options", {})}
    name = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return Case(family, changes={name: layers, **case.pop("changes", {})}, options=options, **case)


@pytest.mark.parametrize(
    "case", [staged("interleaved_1f1b"), staged("zbv", changes={"tie_word_embeddings": True})]
)
def test_several_stages_on_each_of_two_processes(
    case: Case, ranks: Ranks, compare: Compare
) -> None:
    compare(case, "p2", ranks)


@pytest.fixture(scope="module")
def spawned_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks"), spawned=True) as started:
        yield started


@pytest.mark.slow_cases("family='gpt2'", "family='mixtral'", "zbv")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        (Case(), "d2"),
        (Case("gpt2"), "t2"),
        (Case(), "t2"),
        (Case("mixtral"), "d2e2"),
        (staged("interleaved_1f1b"), "p2"),
        (staged("zbv"), "p2"),
    ],
    ids=str,
)
def test_processes_with_their_own_imports_and_hashes_are_as_one(
    case: Case, layout: str, spawned_ranks: Ranks, compare: Compare
) -> None:
    """Forked ranks have the imports and the hash seed of one process: they could agree by accident."""
    compare(case, layout, spawned_ranks)


TIED = {"tie_word_embeddings": True}
SEVERAL = {
    "tied": staged("interleaved_1f1b", changes=TIED),
    "three": staged("interleaved_1f1b", 7, options={"pipeline_stages_per_rank": 3}),
    "zero bubble": staged("interleaved_zero_bubble"),
    "zbv": staged("zbv"),
    "lora": staged("zbv", lora=True),
    "dropout": staged("interleaved_1f1b", family="gpt2", lora=True, dropout=0.2),
    "balanced": staged("zbv", family="mixtral", options={"router_aux_loss_coef": 0.1}),
    "gemma2": staged("interleaved_1f1b", family="gemma2"),
    "recomputed": staged("zbv", options={"gradient_checkpointing": True}),
    "some recomputed": staged("interleaved_1f1b", options={"recompute_every": 2}),
}


@pytest.mark.slow_cases("three", "dropout", "balanced", "zero bubble")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(SEVERAL))
def test_several_stages_on_each_of_two_processes_more(
    name: str, ranks: Ranks, compare: Compare
) -> None:
    compare(SEVERAL[name], "p2", ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(
        {"zero bubble": "d2p2 c2p2", "some recomputed": "d2f1p2 t2p2"},
        tied="d2p2 t2p2",
        three="d2f1p2 c2p2",
        zbv="d2p2 d2f1p2 t2p2 c2p2",
        lora="d2f1p2 t2p2",
        dropout="d2p2 c2p2",
        balanced="t2p2 d2f1p2",
        gemma2="c2p2 t2p2",
        recomputed="d2p2 d2f1p2",
    ),
)
def test_several_stages_beside_other_degrees(
    name: str, layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    compare(SEVERAL[name], layout, four_ranks)


HALVED = {
    "gpt2": Case("gpt2", options={"pipeline_schedule": "zero_bubble"}),
    "lora": Case(lora=True, options={"pipeline_schedule": "zero_bubble"}),
    "tied": staged("zbv", changes=TIED),
    "gemma2": staged("zbv", family="gemma2"),
    "interleaved": staged("interleaved_zero_bubble", changes=TIED),
    "recomputed": Case(
        options={"pipeline_schedule": "zero_bubble", "gradient_checkpointing": True}
    ),
    "some recomputed": staged("zbv", options={"recompute_every": 2}),
    "not shared out": staged("zbv", options={"zero_stage": 1}),
}


@pytest.mark.slow_cases("gpt2", "lora", "tied", "gemma2", "some recomputed", "not shared out")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(HALVED))
def test_halved_passes_of_sharded_stages(name: str, four_ranks: Ranks, compare: Compare) -> None:
    compare(HALVED[name], "d2p2", four_ranks)


@pytest.mark.slow_cases("d2f2t2p2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d4f2p2", "d2f2t2p2"])
def test_halved_passes_of_eight_processes(
    layout: str, eight_ranks: Ranks, compare: Compare
) -> None:
    compare(HALVED["tied"], layout, eight_ranks)


@pytest.mark.slow_cases("zbv")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_halved_passes_of_sharded_experts(
    schedule: str, four_ranks: Ranks, compare: Compare
) -> None:
    case = staged(schedule, family="mixtral", options={"router_aux_loss_coef": 0.1})
    compare(case, "d2f2p2e2", four_ranks)


@pytest.mark.slow_cases("interleaved_1f1b")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
def test_several_stages_whose_experts_are_spread(
    schedule: str, four_ranks: Ranks, compare: Compare
) -> None:
    case = staged(schedule, family="mixtral", options={"router_aux_loss_coef": 0.1})
    compare(case, "d2p2e2", four_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    pairs(
        llama=" ".join(FOUR),
        tied="d2p2 t2p2 d4f2 d2t2",
        lora="d2t2 t2p2 d2f1c2 d4",
        dropout="d2f1t2 d2p2 t2c2 d4f2",
        gpt2="t4 d2f1p2 d2c2 d4f2",
        gemma2="d2t2 t2p2 t2c2 d4",
        mixtral="d2f1t2 d2p2 d2c2 t4",
        balanced="d4f2 d2f1p2 t2c2 t2p2",
        recomputed="d2f1t2 d2p2 d2c2 d4",
    ),
)
def test_four_processes_are_as_one(
    name: str, layout: str, four_ranks: Ranks, compare: Compare
) -> None:
    compare(CASES[name], layout, four_ranks)


@pytest.mark.slow
def test_a_transformers_module_on_two_processes(ranks: Ranks, compare: Compare) -> None:
    compare(Case(options={"backend": "hf"}), "d2f1", ranks)


@pytest.mark.slow_cases("1", "2")  # 0 and 3 are the layouts d2f1 and d2 above
@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stages(stage: int, ranks: Ranks, compare: Compare) -> None:
    compare(Case(options={"zero_stage": stage}), "d2", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", get_args(Kind))
def test_four_ranks_of_a_pipeline(schedule: str, four_ranks: Ranks, compare: Compare) -> None:
    compare(staged(schedule, 9), "p4", four_ranks)


@pytest.mark.slow_cases("gpt2-zero_bubble", "recomputed-gpipe")
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.parametrize("name", ["gpt2", "recomputed"])
def test_stages_of_tensor_ranks(
    name: str, schedule: str, four_ranks: Ranks, compare: Compare
) -> None:
    case = replace(CASES[name], options={**CASES[name].options, "pipeline_schedule": schedule})
    compare(case, "d1t2p2", four_ranks)


@pytest.mark.default_cases("c2-d1", "d2-t2", "t2-p2")
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("d2", "t2"), ("t2", "p2"), ("p2", "c2"), ("c2", "d1"), ("d1", "d2"), ("d2f1", "d2")],
)
def test_a_run_goes_on_in_another_layout(
    saved: str, resumed: str, ranks: Ranks, tmp_path: Path
) -> None:
    go_on(CASES["llama"], saved, resumed, ranks, tmp_path)


@pytest.mark.slow_cases("d4f4e2-d2p2e2", "d4f2e4-d1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("d4f4e2", "d2p2e2"), ("d2p2e2", "c2p2"), ("c2p2", "d4f2e2"), ("d4f2e4", "d1")],
)
def test_a_mixture_goes_on_in_another_layout(
    saved: str, resumed: str, four_ranks: Ranks, tmp_path: Path
) -> None:
    go_on(CASES["mixtral"], saved, resumed, four_ranks, tmp_path)


def go_on(case: Case, saved: str, resumed: str, ranks: Ranks, tmp_path: Path) -> None:
    """Two steps in one layout, and one in another that takes up their state."""
    path = layouts.write_model(case, tmp_path / "hf")

    def on(layout: str, function: object, *arguments: object) -> object:
        if layout == "d1":
            return function(path, layout, case, *arguments)  # type: ignore[operator]
        return ranks.run(function, path, layout, case, *arguments)[0]  # type: ignore[arg-type]

    layouts.run(path, "d1", case, tmp_path / "alone")
    wanted = layouts.resumed(path, "d1", case, tmp_path / "alone" / "state")
    on(saved, layouts.run, tmp_path / "many")
    found = on(resumed, layouts.resumed, tmp_path / "many" / "state")
    assert wanted is not None and isinstance(found, list)
    for name in ("loss", "grad_norm"):
        assert found[0][name] == pytest.approx(wanted[0][name], rel=1e-9)


@pytest.mark.default_cases("interleaved_1f1b-d2-p2")
@pytest.mark.parametrize(("saved", "resumed"), [("p2", "t2"), ("d2", "p2")])
@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b"])
def test_several_stages_save_and_take_up_points(
    schedule: str, saved: str, resumed: str, ranks: Ranks, tmp_path: Path
) -> None:
    case = staged(schedule, changes={"tie_word_embeddings": True})
    path = layouts.write_model(case, tmp_path / "hf")
    layouts.run(path, "d1", case, tmp_path / "alone")
    wanted = layouts.resumed(path, "d1", case, tmp_path / "alone" / "state")
    ranks.run(layouts.run, path, saved, case, tmp_path / "many")
    assert wanted is not None
    for found in ranks.run(layouts.resumed, path, resumed, case, tmp_path / "many" / "state"):
        for name in ("loss", "grad_norm"):
            assert found[0][name] == pytest.approx(wanted[0][name], rel=1e-9)


@pytest.mark.parametrize(
    ("layout", "family"), [("d2", "llama"), ("d2f1", "llama"), ("d2e2", "mixtral")]
)
def test_ranks_without_an_id_work_on(
    layout: str, family: str, ranks: Ranks, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(family), tmp_path / "hf")
    steps, scored, ids = layouts.few(path, "d1")
    assert ids == ["id1"]
    (first, own, known), (second, none, others) = ranks.run(layouts.few, path, layout)
    for found in (first, second):
        for step, wanted in zip(found, steps, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)
    assert (known, others, none) == (["id1"], [], [])
    assert own[0] == pytest.approx(scored[0], rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2t2", "d2f1t2"])
def test_tensor_ranks_without_an_id_work_on(layout: str, four_ranks: Ranks, tmp_path: Path) -> None:
    """Where a rank runs one token, and shares it with another that has none."""
    path = layouts.write_model(Case(), tmp_path / "hf")
    steps, *_ = layouts.few(path, "d1")
    for found, *_ in four_ranks.run(layouts.few, path, layout):
        for step, wanted in zip(found, steps, strict=True):
            assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
            assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-10)


def test_a_broken_loss_of_one_rank_stops_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    assert len(set(ranks.run(layouts.broken, path, "d2"))) == 1


@pytest.mark.default_cases("c2-full", "d2-lora", "p2-full", "t2-lora")
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("layout", ["d2", "t2", "p2", "c2"])
def test_bfloat16_on_two_processes(layout: str, lora: bool, ranks: Ranks, tmp_path: Path) -> None:
    case = Case(lora=lora, options={"dtype": "bfloat16"})
    path = layouts.write_model(case, tmp_path / "hf")
    wanted = layouts.half(path, "d1", case)
    for found in ranks.run(layouts.half, path, layout, case):
        assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.slow_cases("full-p2", "lora-d2p2")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["p2", "d2p2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bfloat16_with_several_stages(
    layout: str, lora: bool, four_ranks: Ranks, tmp_path: Path
) -> None:
    """With d2 also sharded."""
    case = staged("interleaved_1f1b", lora=lora, options={"dtype": "bfloat16"})
    path = layouts.write_model(case, tmp_path / "hf")
    wanted = layouts.half(path, "d1", case)
    for found in four_ranks.run(half_of_some, path, layout, case):
        assert found is None or found == pytest.approx(wanted, rel=5e-3)


def half_of_some(path: Path, layout: str, case: Case) -> list[float] | None:
    return (
        layouts.half(path, layout, case)
        if dist.get_rank() < Layout.parse(layout).num_devices
        else None
    )


@pytest.mark.default_cases("d2p2e2")
@pytest.mark.parametrize("layout", ["c2p2", "d2p2e2", "d4f4e2"])
def test_bfloat16_on_four_processes(layout: str, four_ranks: Ranks, tmp_path: Path) -> None:
    case = Case("mixtral", lora=layout == "d4f4e2", options={"dtype": "bfloat16"})
    path = layouts.write_model(case, tmp_path / "hf")
    wanted = layouts.half(path, "d1", case)
    for found in four_ranks.run(layouts.half, path, layout, case):
        assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.parametrize(
    ("layout", "family", "words"),
    [
        ("d2e2", "llama", "has no experts"),
        ("d3e3", "mixtral", "does not divide the model's 4 experts"),
    ],
)
def test_layouts_that_cannot_be(layout: str, family: str, words: str) -> None:
    config = families.get(family).config(families.get(family).tiny)
    with pytest.raises(ConfigError, match=words):
        check_layout(ModelSpec(), Layout.parse(layout), config)


@pytest.mark.parametrize(("version", "refused"), [("2.12.1", True), ("2.13.0", False)])
def test_a_backward_pass_in_two_halves_needs_a_torch_that_keeps_its_nodes(
    version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.12 frees the nodes of a `torch.autograd.Function` that only Python refers to."""
    monkeypatch.setattr("torch.__version__", TorchVersion(version))
    spec = ModelSpec(pipeline_schedule="zero_bubble")
    config = families.get("llama").config(families.get("llama").tiny)
    with pytest.raises(ConfigError, match=r"needs torch 2\.13") if refused else nullcontext():
        check_layout(replace(spec, trained=True), Layout.parse("p2"), config)
    check_layout(replace(spec, trained=True), Layout.parse("d2"), config)
