"""Meshes of eight devices that a CPU stands in for (`tests/environment.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from tests.engine import layouts
from tests.engine.common import EXACT, Nll, engine_of
from tests.engine.jax.test_engine import ADAMW, METRICS, assert_equal_parameters, parameters
from tests.engine.layouts import Case
from weft.engine.jax import parameters as parameter_stacks
from weft.engine.jax.mesh import build_mesh, choose_sharding
from weft.engine.jax.mesh_sizes import AXES, parse_mesh
from weft.engine.spec import OptimizerSpec
from weft.errors import ConfigError
from weft.models.network.packed import TopIds


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (None, (1, 1, 1)),
        ("1,-1,1", (1, 8, 1)),
        ("-1,2,2", (2, 2, 2)),
        ("1,1,8", (1, 1, 8)),
        ("!2,-1,1", (2, 4, 1)),
        ("dp:2,fsdp:-1,mp:2", (2, 2, 2)),
        ("mp:8", (1, 1, 8)),
        ("!mp:4,fsdp:2", (1, 2, 4)),
        ("d8f8t1", (1, 8, 1)),
        ("d4f2t2", (2, 2, 2)),
        ("d2", (1, 2, 1)),
        ("t4", (1, 1, 4)),
    ],
)
def test_a_mesh_or_a_layout_gives_sizes(text: str | None, sizes: tuple[int, ...]) -> None:
    assert parse_mesh(text, 8) == sizes


def test_a_frozen_role_is_copied_by_d() -> None:
    assert parse_mesh("d4", 8, trained=False) == (4, 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,-1,3", r"multiply to the 8 devices .* write 1,8,1"),
        ("2,2,1", r"multiply to the 8 devices .* write 1,8,1"),
        ("1,-1,16", r"multiply to the 8 devices .* write 1,1,8"),
        ("1,2,12", r"write 1,2,4"),
        ("d16", r"multiply to the 8 devices"),
        ("-1,-1,1", r"one may be -1"),
        ("0,8,1", r"at least 1"),
        ("1,8", r"takes dp,fsdp,mp"),
        ("dp:2,dp:4", r"takes dp,fsdp,mp"),
        ("tp:8", r"takes dp,fsdp,mp"),
        ("d2p2", r"use backend=torch for p, c and e"),
        ("d2x", r"layout=d2x"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_mesh(text, 8)


def test_the_first_rule_that_matches_divides_an_array() -> None:
    mesh = build_mesh("2,2,2", jax.devices("cpu"), trained=True)
    assert mesh.axis_names == AXES and mesh.size == 8

    def divided(name: str, *shape: int) -> tuple[Any, ...]:
        return tuple(choose_sharding(mesh, name, shape).spec)

    assert divided("embed.weight", 64, 32) == ("mp", "fsdp")
    assert divided("embed.weight", 63, 32) == (None, "fsdp"), "63 rows are not divided by 2"
    assert divided("blocks.0:4.attention.k.weight", 4, 16, 32) == (None, "mp", "fsdp")
    assert divided("blocks.0:4.attention.o.weight", 4, 32, 16) == (None, "fsdp", "mp")
    assert divided("blocks.0:4.mlp.down.weight", 4, 32, 64) == (None, "fsdp", "mp")
    assert divided("blocks.0:4.mlp.experts.up.weight", 4, 8, 64, 32) == (None, None, "mp", "fsdp")
    for name in ("norm.weight", "blocks.0:4.attention.q.bias", "blocks.0:4.mlp.up.lora_a"):
        assert not any(divided(name, 4, 32))


GRADIENTS = (
    "embed.weight",
    "blocks.0.attention.q.weight",
    "blocks.1.attention.o.weight",
    "blocks.2.mlp.down.weight",
    "norm.weight",
)
SLOW_MESHES = ("8,1,1", "1,8,1", "1,1,8")


@pytest.mark.slow_cases("llama-8,1,1", "llama-1,1,8", "mixtral")
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama", "2,2,2"),
        *(pytest.param("llama", mesh, marks=pytest.mark.slow) for mesh in SLOW_MESHES),
        pytest.param("mixtral", "2,2,2", marks=pytest.mark.slow),
        pytest.param("gemma2", "2,2,2", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_computes_what_one_device_of_torch_does(
    family: str, mesh: str, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(family), tmp_path / "hf")
    options: dict[str, Any] = {"dtype": "float64", "optimizer": ADAMW}
    one = engine_of(path, **options)
    other: Any = engine_of(path, **options, backend="jax", layout=mesh)
    assert other.description["device"] == "8 x cpu" and other.layout.num_devices == 1
    # All logits but for a constant of each row, as log-probs.
    top = frozenset({"top_ids", "top_logprobs"})
    every = TopIds(one.description["vocab_size"])
    wanted_top = one.forward(layouts.batch(0), top, top=every).data
    found_top = other.forward(layouts.batch(0), top, top=every).data
    assert torch.equal(found_top["top_ids"], wanted_top["top_ids"])
    logprobs, wanted_logprobs = (each["top_logprobs"][:, :-1] for each in (found_top, wanted_top))
    torch.testing.assert_close(logprobs, wanted_logprobs, **EXACT)
    minibatches = [layouts.batch(seed) for seed in range(3)]
    steps = one.train(minibatches, Nll())
    for step, wanted in zip(other.train(minibatches, Nll()), steps, strict=True):
        for key in METRICS:
            assert step.metrics[key] == pytest.approx(wanted.metrics[key], rel=1e-10)
    assert_equal_parameters(one, other)
    # Parameters and optimizer states lie in parts, which a state on disk puts together.
    name = next(n for n in other._network.arrays if n.endswith("attention.q.weight"))
    if mesh == "2,2,2":
        array = other._network.arrays[name]
        assert array.addressable_shards[0].data.size == array.size // 4
        moment = other._optimizer._state.mu[name]
        assert moment.sharding == array.sharding
    (tmp_path / "state").mkdir()
    other.save_state(tmp_path / "state")
    again = engine_of(path, **options)
    again.load_state(tmp_path / "state")
    assert_equal_parameters(one, again)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["2,2,2", *SLOW_MESHES])
def test_gradients_are_those_of_torch(mesh: str, tmp_path: Path) -> None:
    """A step of SGD with the learning rate 1 takes the gradient off the parameter."""
    path = layouts.write_model(Case(), tmp_path / "hf")
    sgd = OptimizerSpec(
        "sgd", lr=1.0, beta1=0.0, lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=0.0
    )
    gradients = []
    for more in ({}, {"backend": "jax", "layout": mesh}):
        engine: Any = engine_of(path, dtype="float64", dropout=0.0, optimizer=sgd, **more)
        before = parameters(engine)
        engine.train([layouts.batch(0)], Nll())
        after = parameters(engine)
        gradients.append({name: before[name] - after[name] for name in GRADIENTS})
    for name in GRADIENTS:
        assert float(gradients[0][name].abs().max()) > 1e-3
        torch.testing.assert_close(gradients[1][name], gradients[0][name], **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["d1", "2,2,2"])
def test_large_stacks_are_read_and_written_layer_by_layer(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same values as whole stacks: read, trained, averaged, saved and loaded."""
    path = layouts.write_model(Case(), tmp_path / "hf")
    count = []
    set_layer = parameter_stacks.set_layer

    def set_and_count(stack: Any, index: int, values: Any) -> Any:
        count.append(index)
        return set_layer(stack, index, values)

    found = []
    for limit in (1 << 28, 0):
        monkeypatch.setattr(parameter_stacks, "LARGE_BYTES", limit)
        monkeypatch.setattr(parameter_stacks, "set_layer", set_and_count)
        engine: Any = engine_of(path, dtype="float64", optimizer=ADAMW, backend="jax", layout=mesh)
        engine.train([layouts.batch(0)], Nll())
        engine.write(
            [(name, where, 2 * values) for name, where, values in engine.read(engine.slices())],
            version=3,
            eta=0.25,
        )
        folder = tmp_path / f"state-{limit}"
        folder.mkdir()
        engine.save_state(folder)
        again: Any = engine_of(path, dtype="float64", optimizer=ADAMW, backend="jax", layout=mesh)
        again.load_state(folder)
        again.train([layouts.batch(1)], Nll())
        found.append(parameters(again))
        assert bool(count) == (limit == 0)
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
