"""Networks of which a part is trained, and dropout that grows with the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import layouts
from tests.engine.common import Nll, batch_of, engine_of, tiny
from tests.engine.layouts import Case
from tests.ranks import Ranks
from weft.engine.backends import common
from weft.engine.spec import LoRASpec, ModelSpec, OptimizerSpec
from weft.errors import ConfigError
from weft.models.network.transformer import count_frozen_layers

SGD = OptimizerSpec(type="sgd", lr=0.1, beta1=0.0, lr_scheduler_type="constant", max_grad_norm=0.0)
GROUPS = [(5, [4, 7]), (2, [6]), (3, [3])]


def values(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, _, value in engine.read(engine.slices())}


@pytest.mark.parametrize("options", [{"freeze_layers": 2}, {"train_last_layers": 1}])
def test_frozen_weights_stay_and_the_others_learn_as_before(
    options: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # in float64, where both train to the same weights whatever rounds otherwise
    monkeypatch.setattr(common, "choose_reading_dtype", lambda spec: torch.float64)
    path = tiny(tmp_path, num_hidden_layers=3)
    whole, part = engine_of(path, optimizer=SGD), engine_of(path, optimizer=SGD, **options)
    before = values(part)
    for engine in (whole, part):
        engine.train([batch_of(GROUPS)], Nll())
    full, after = values(whole), values(part)
    for name, value in after.items():
        if name.startswith(("embed", "blocks.0", "blocks.1")):
            assert value.equal(before[name]) and not value.equal(full[name]), name
        else:
            torch.testing.assert_close(value, full[name], rtol=1e-12, atol=1e-12)
            assert not value.equal(before[name]), name
    assert all(name.startswith(("blocks.2", "norm", "head")) for name in part.trained_names)


def test_frozen_weights_have_no_optimizer_state(tmp_path: Path) -> None:
    path = tiny(tmp_path / "hf", num_hidden_layers=3)
    sizes, engines = {}, {}
    for name, options in (("whole", {}), ("part", {"freeze_layers": 3})):
        engines[name] = engine_of(path, **options)
        engines[name].train([batch_of(GROUPS)], Nll())
        (tmp_path / name).mkdir()
        engines[name].save_state(tmp_path / name)
        sizes[name] = sum(
            file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file()
        )
    part = engines["part"]
    assert part.trained_names == {"norm.weight", "head.weight"}
    assert all(p.grad is None for p in part._network.parameters() if not p.requires_grad)
    whole = sum(p.numel() for p in part._network.parameters())
    held = sum(p.numel() for n, p in part._network.named_parameters() if n in part.trained_names)
    assert sizes["part"] / sizes["whole"] == pytest.approx(held / whole, rel=0.1)


def test_how_many_layers_are_frozen() -> None:
    assert (
        count_frozen_layers(2, None, 5),
        count_frozen_layers(None, 2, 5),
        count_frozen_layers(None, None, 5),
    ) == (
        2,
        3,
        None,
    )
    for first, last in ((6, None), (None, 6)):
        with pytest.raises(ConfigError, match="has 5 layers"):
            count_frozen_layers(first, last, 5)


def test_options_that_exclude_each_other() -> None:
    for options in (
        {"freeze_layers": 1, "train_last_layers": 1},
        {"freeze_layers": 1, "lora": LoRASpec(r=2)},
        {"residual_dropout_lima": True},
    ):
        with pytest.raises(ConfigError, match=r"exclude each other|ramps residual_dropout"):
            ModelSpec(**options)


def test_the_ramp_of_residual_dropout(tmp_path: Path) -> None:
    path = tiny(tmp_path, num_hidden_layers=4)
    ramp = engine_of(path, residual_dropout=0.3, residual_dropout_lima=True)
    assert [block.dropout for block in ramp._network.blocks] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [block.dropout for block in engine_of(path, residual_dropout=0.3)._network.blocks] == [
        0.3
    ] * 4
    single = tiny(tmp_path / "single", num_hidden_layers=1)
    assert [
        b.dropout
        for b in engine_of(single, residual_dropout=0.3, residual_dropout_lima=True)._network.blocks
    ] == [0.3]


def test_residual_dropout_is_in_force_in_training_alone(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    plain, dropped = (
        engine_of(path, optimizer=SGD),
        engine_of(path, optimizer=SGD, residual_dropout=0.4),
    )
    batch = batch_of(GROUPS)
    one, two = (
        engine.forward(batch, frozenset({"logprobs"})).data["logprobs"]
        for engine in (plain, dropped)
    )
    assert one.equal(two)
    losses = [engine.train([batch], Nll())[0].metrics["loss"] for engine in (plain, dropped)]
    assert abs(losses[0] - losses[1]) > 1e-4


LIMA = {"residual_dropout": 0.3, "residual_dropout_lima": True}


@pytest.mark.default_cases("d2-options3", "p2-options1", "t2-options4")
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("t2", LIMA),
        ("p2", LIMA),
        ("d2", {**LIMA, "gradient_checkpointing": True}),
        ("d2", {"freeze_layers": 1}),
        ("t2", {"train_last_layers": 1}),
    ],
)
def test_layouts_of_two_compute_the_same(
    layout: str, options: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    alone = layouts.run(
        path,
        "d1",
        Case(options={k: v for k, v in options.items() if k != "gradient_checkpointing"}),
        tmp_path / "a",
    )
    assert alone is not None
    found = ranks.run(layouts.run, path, layout, Case(options=options), tmp_path / "many")
    layouts.check(found, alone, tmp_path / "many", tmp_path / "a")


def test_a_pipeline_with_frozen_layers_is_refused(tmp_path: Path) -> None:
    from weft.checkpoints.hf_io import read_config
    from weft.engine.torch.network_source import check_layout
    from weft.topology import Layout

    path = tiny(tmp_path)
    spec = ModelSpec(path=str(path), trained=True, freeze_layers=1)
    with pytest.raises(ConfigError, match="write p1"):
        check_layout(spec, Layout(pipeline=2), read_config(path)[1])
