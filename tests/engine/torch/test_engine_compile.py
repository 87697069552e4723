"""`compile=true`: an engine whose blocks torch compiles trains, scores and generates as one
without, or is refused.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.engine import layouts
from tests.engine.common import Nll, batch_of, engine_of
from tests.engine.layouts import Case
from tests.engine.torch.test_engine_offload import SPEC, apart, on_device, sampled
from tests.engine.torch.test_engine_state import GROUPS, LORA, logprobs, parameters, path
from tests.ranks import Ranks
from weft import kernels
from weft.engine.backends import common
from weft.engine.backends import torch as torch_backend
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.models.network.transformer import compile_blocks
from weft.topology import Layout

__all__ = ["path"]  # the fixture
KINDS = {"whole": {}, "recomputed": {"recompute_every": 1}, "lora": {"lora": LORA}}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's compiler is given runs as it is."""
    monkeypatch.setattr(
        torch_backend, "compile_blocks", partial(compile_blocks, backend="aot_eager")
    )


@pytest.mark.default_cases("recomputed", "whole")
@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_it_trains_scores_and_generates_the_same(
    path: Path, eager: None, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setattr(common, "choose_reading_dtype", lambda spec: torch.float64)
    plain, engine = (
        engine_of(path, **SPEC, **changes),
        engine_of(path, compile=True, **SPEC, **changes),
    )
    assert all(block.compiled is not None for block in engine._network.blocks)
    assert sampled(engine) == sampled(plain)
    for step in range(2):
        batches = [batch_of(GROUPS, seed=2 * step + n) for n in (0, 1)]
        one, other = (
            [s.metrics["loss"] for s in e.train(batches, Nll(), max_tokens=20)]
            for e in (engine, plain)
        )
        assert_close(one, other, rtol=1e-10, atol=0.0)
    for name, values in parameters(plain).items():
        assert_close(parameters(engine)[name], values, rtol=1e-8, atol=1e-10)
    assert_close(logprobs(engine), logprobs(plain), rtol=1e-8, atol=1e-10)


def test_it_comes_back_from_host_memory(
    path: Path, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engine_of(path, compile=True, **SPEC)
    engine, _ = apart(path, monkeypatch, compile=True, offload=True, **SPEC)
    for step in range(2):
        batch = [batch_of(GROUPS, seed=step)]
        assert torch.equal(logprobs(engine), logprobs(plain))
        engine.offload("weights")
        assert on_device(engine)["weights"] == 0
        one, other = (
            e.train(batch, Nll(), max_tokens=20)[0].metrics["loss"] for e in (engine, plain)
        )
        assert one == other
        engine.offload("weights")


# whose ranks wait for each other within a block
HEADS = [{}, {"sequence_parallel": False}, {"recompute_every": 1}]


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("d2f2", {}),
    ("d2f2", {"recompute_every": 1}),
    ("p2", {}),
]


@pytest.mark.slow_cases(
    "d2f2-{'recompute_every': 1}-inductor",
    "p2-{}-inductor",
    "t2-{'recompute_every': 1}-inductor",
    "t2-{'sequence_parallel': False}-inductor",
    "c2",
)
@pytest.mark.default_cases("recompute_every")
@pytest.mark.parametrize(
    ("layout", "options", "backend"),
    [
        *((layout, options, "aot_eager") for layout, options in LAYOUTS),
        ("c2", {}, "inductor"),
        *(pytest.param(*case, "inductor", marks=pytest.mark.slow) for case in LAYOUTS),
        *(pytest.param("t2", options, "inductor", marks=pytest.mark.slow) for options in HEADS),
    ],
    ids=str,
)
def test_two_processes_are_as_one(
    layout: str, options: dict[str, Any], backend: str, ranks: Ranks, tmp_path: Path
) -> None:
    case = Case(options={"compile": True, **options})
    model = layouts.write_model(case, tmp_path / "hf")
    alone = layouts.run(model, "d1", Case(), tmp_path / "alone")
    assert alone is not None
    many = ranks.run(run_compiled_by, backend, model, layout, case, tmp_path / "many")
    layouts.check(many, alone, tmp_path / "many", tmp_path / "alone")


def run_compiled_by(backend: str, *case: Any) -> layouts.Found | None:
    """`layouts.run` with another backend of torch's compiler: "aot_eager" runs the graphs as they
    are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "compile_blocks", partial(compile_blocks, backend=backend))
        return layouts.run(*case)


def test_what_cannot_be_compiled_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"compile=true: backend=hf .* use backend=torch, or leave it out"
    ):
        engine_of(path, backend="hf", compile=True)
    narrow = ModelSpec(path=str(path), compile=True, fp8=True)
    with pytest.raises(ConfigError, match=r"fp8=true, layout=.*tensor-parallel ranks .* write t1"):
        common.check_compile(narrow, Layout(tensor=2), cpu)
    halved = ModelSpec(path=str(path), compile=True, pipeline_schedule="zero_bubble")
    with pytest.raises(ConfigError, match=r"pipeline_schedule=zero_bubble halves backward passes"):
        common.check_compile(halved, Layout(pipeline=2), cpu)
    monkeypatch.setattr(kernels, "compiling_obstacle", lambda device: "there is no C++ compiler")
    with pytest.raises(
        ConfigError, match=r"cannot compile for cpu here: there is no C\+\+ compiler; install it"
    ):
        engine_of(path, compile=True)
    common.check_compile(ModelSpec(path=str(path)), Layout(tensor=2), cpu)


def test_products_of_8_bits_are_refused_where_they_cannot_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, changes = torch.device("cpu"), {"compile": True, "fp8": True, "dtype": "bfloat16"}
    for change, said in {
        "adapters": (
            {"lora": LORA, "trained": True},
            "fp8=true, lora.r above 0: .* leave one of them out",
        ),
        "dtype": ({"dtype": "float32"}, "fp8=true, dtype=float32: .* set dtype=bfloat16"),
        "device": (
            {},
            "fp8=true: cpu has no fp8 matrix products, but NVIDIA GPUs from the H100 on have; "
            "leave it out",
        ),
    }.values():
        with pytest.raises(ConfigError, match=said):
            common.build_fp8_product(ModelSpec(path=str(path), **{**changes, **change}), cpu)
    assert common.build_fp8_product(ModelSpec(path=str(path)), cpu) is None
    for backend in ("torch", "hf"):
        with pytest.raises(
            ConfigError, match=r"fp8=true: without compile=true .*; set it, or leave fp8 out"
        ):
            engine_of(path, backend=backend, fp8=True)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "fp8_obstacle", lambda device: None)
        patch.setitem(sys.modules, "torchao.float8", None)
        with pytest.raises(
            ConfigError, match=r"fp8=true: torchao cannot be imported .*; run: .*\[fp8\]', or leave"
        ):
            engine_of(path, **changes)
    with pytest.raises(ConfigError, match="fp8=true: cpu has no fp8 matrix products"):
        engine_of(path, **changes)
