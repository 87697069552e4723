"""What is planned without weights is what the engine then says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.common import spec_of
from tests.engine.layouts import Case, engine, write_model
from tests.ranks import Ranks
from tests.tiny import make_llama
from weft.data.tokenizer import Tokenizer
from weft.engine.spec import LoRASpec, ModelSpec
from weft.errors import CheckpointError, ConfigError
from weft.launch.facts import describe_planned_engine
from weft.registry import backends
from weft.topology import Layout, Mesh

CPU, ONE = torch.device("cpu"), Mesh.on_first_devices(Layout())
SAID = ("family", "vocab_size", "num_layers", "num_parameters", "num_trainable", "dtype")
HELD = (*SAID, "sizes", "shared_prompts", "held_parameters", "held_trainable")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head": "score"},
        {"trained": False},
        {"lora": LoRASpec(r=4, targets=["q", "down"])},
        {"freeze_layers": 1},
        {"lora": LoRASpec(r=2, dropout=0.1)},
        {"backend": "hf"},
        {"backend": "hf", "lora": LoRASpec(r=4)},
    ],
    ids=str,
)
def test_one_device(path: Path, changes: dict[str, Any]) -> None:
    spec = spec_of(path, dtype="float32", **changes)
    made: Mapping[str, Any] = backends.get(spec.backend)(spec, Layout()).description
    found = describe_planned_engine(
        spec_of(path, dtype="float32", planned=True, **changes), ONE, CPU
    )
    for name in HELD if "sizes" in made else SAID:
        assert found[name] == made[name], name


def test_neither_weights_nor_a_tokenizer_nor_the_device_are_needed(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for backend in ("torch", "hf"):
        spec = spec_of(tmp_path, dtype="bfloat16", planned=True, backend=backend, device="cuda")
        assert describe_planned_engine(spec, ONE, torch.device("cuda"))["num_parameters"] > 0


def test_tokens_that_the_tokenizer_adds_are_counted(path: Path) -> None:
    spec = spec_of(path, dtype="float32", planned=True)
    spec.tokenizer.add_tokens = ["<|im_start|>"]
    tokenizer = Tokenizer.load(spec.tokenizer, spec.path)
    assert (
        describe_planned_engine(spec, ONE, CPU, tokenizer)["vocab_size"]
        > describe_planned_engine(spec, ONE, CPU)["vocab_size"]
    )


def test_what_the_engine_refuses_is_refused(path: Path) -> None:
    for changes, rule in (
        ({"layout": "t8"}, "layout"),
        ({"recompute_every": 9}, "recompute_every=9"),
        ({"fp8": True}, "fp8=true"),
        ({"fp8": True, "compile": True, "lora": LoRASpec(r=2)}, "fp8=true, lora.r above 0"),
    ):
        spec = spec_of(path, dtype="bfloat16", planned=True, **changes)
        with pytest.raises(ConfigError, match=rule):
            describe_planned_engine(spec, Mesh.on_first_devices(spec.resolve_layout()), CPU)


def test_a_network_that_transformers_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_act": "zz"}))
    spec = ModelSpec(path=str(tmp_path), backend="hf", dtype="float32")
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}: transformers cannot build it: .*'zz'"
    ):
        describe_planned_engine(spec, Mesh.on_first_devices(Layout()), torch.device("cpu"))


def test_a_backend_of_a_users_own_tells_its_name() -> None:
    assert (
        describe_planned_engine(ModelSpec(path="x", backend="mine"), ONE, CPU)["num_parameters"]
        == 0
    )


def said(path: Path, layout: str, case: Case) -> Mapping[str, Any]:
    return {**engine(path, layout, case)[0].description, "rank": dist.get_rank()}


@pytest.mark.slow
def test_the_first_rank_of_a_layout(tmp_path: Path) -> None:
    cases = [
        ("d2", Case()),
        ("d2f1", Case()),
        ("t2", Case(lora=True)),
        ("p2", Case()),
        ("d2", Case(lora=True)),
    ]
    with Ranks(2, tmp_path) as ranks:
        for number, (layout, case) in enumerate(cases):
            path = write_model(case, tmp_path / str(number))
            made = ranks.run(said, path, layout, case)[0]
            lora = LoRASpec(r=3, alpha=6.0) if case.lora else LoRASpec()
            spec = spec_of(path, lora=lora, layout=layout, planned=True, dtype="float32")
            found = describe_planned_engine(spec, Mesh.on_first_devices(spec.resolve_layout()), CPU)
            for name in (
                "sizes",
                "num_parameters",
                "num_trainable",
                "held_parameters",
                "held_trainable",
                "shared_prompts",
            ):
                assert found[name] == made[name], (layout, name)
