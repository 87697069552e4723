"""The JAX engine computes what the torch engine computes, in float64 to the last roundings."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import layouts
from tests.engine.common import EXACT, Nll, batch_of, engine_of, spec_of, tiny
from tests.engine.layouts import Case
from weft.checkpoints import hf_io
from weft.checkpoints.weight_files import WeightFiles
from weft.data.tokenizer import Tokenizer
from weft.engine.backends.jax import REFUSED_PARTS, check_network
from weft.engine.spec import LoRASpec, OptimizerSpec, ParallelSpec, TokenizerSpec
from weft.errors import CheckpointError, ConfigError
from weft.registry import families

ADAMW = OptimizerSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
PALM = OptimizerSpec(
    "palm", lr=1e-2, weight_decay=1.0, warmup_steps=1, beta2=0.99, lr_scheduler_type="rsqrt"
)
WANT = frozenset({"logprobs", "entropy", "top1"})
# Every family compiles for itself, which takes seconds: the others are in the slow tier.
FAMILIES = [
    name if name == "llama" else pytest.param(name, marks=pytest.mark.slow)
    for name in families.list_names()
    if name != "qwen3_moe"
]
OPTIMIZERS = ("adamw", "lion", "palm", "sgd")
METRICS = ("loss", "grad_norm", "nll", "worst", "learning_rate", "num_tokens")


def both(path: Path, **changes: Any) -> tuple[Any, Any]:
    """The two engines of one model directory, in float64."""
    changes = {"dtype": "float64", "dropout": 0.0, "optimizer": ADAMW, **changes}
    return engine_of(path, **changes), engine_of(path, **changes, backend="jax")


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, _, value in engine.read(engine.slices())}


def assert_equal_parameters(one: Any, other: Any) -> None:
    """Attention does not depend on the bias of keys, whose gradient is 0 but for rounding. AdamW
    divides it by eps: of 1e-16 it makes lr 1e-16 / eps = 1e-10 a step, and there are four at most.
    """
    theirs = parameters(other)
    for name, value in parameters(one).items():
        bounds = {**EXACT, "atol": 4e-10} if name.endswith("k.bias") else EXACT
        torch.testing.assert_close(theirs.pop(name), value, **bounds)
    assert not theirs


def assert_equal_steps(one: Any, other: Any, *seeds: int) -> None:
    minibatches = [layouts.batch(seed) for seed in seeds]
    steps = one.train(minibatches, Nll())
    for step, wanted in zip(other.train(minibatches, Nll()), steps, strict=True):
        for key in METRICS:
            assert step.metrics[key] == pytest.approx(wanted.metrics[key], rel=1e-10)
    assert_equal_parameters(one, other)


@pytest.mark.slow_cases(
    "gemma2", "gpt2", "gpt_bigcode", "gpt_neox", "mixtral", "olmo2", "opt", "qwen3"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_scores_and_learns_as_with_torch(family: str, tmp_path: Path) -> None:
    # transformers reads no tokenizer beside a scaled config.json of phi3
    changes = {"rope_scaling": None} if family == "phi3" else {}
    path = layouts.write_model(Case(family, changes=changes), tmp_path / "hf")
    one, other = both(path)
    want = one.forward(layouts.batch(0), WANT, temperature=0.7)
    found = other.forward(layouts.batch(0), WANT, temperature=0.7)
    for key in WANT:
        torch.testing.assert_close(found.data[key], want.data[key], **EXACT)
    assert_equal_steps(one, other, 0, 1, 2)
    assert other.evaluate(layouts.batch(3), Nll()) == pytest.approx(
        one.evaluate(layouts.batch(3), Nll()), rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"lora": LoRASpec(r=3, alpha=6.0)},
        {"freeze_layers": 1},
        {"gradient_checkpointing": True},
        {"optimizer": OptimizerSpec("lion", lr=1e-3, weight_decay=0.1)},
        {"optimizer": PALM},
        {"optimizer": OptimizerSpec("sgd", lr=1e-2, max_grad_norm=0.0)},
    ],
    ids=["scaled", "lora", "frozen", "recomputed", "lion", "palm", "sgd"],
)
def test_what_is_trained_and_how(options: dict[str, Any], tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    one, other = both(path, **options)
    assert_equal_steps(one, other, 0, 1)
    assert one.trained_names == other.trained_names
    for key in ("num_parameters", "num_trainable", "family", "flops_per_token"):
        assert one.description[key] == other.description[key]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "pooling"), [("value", "last"), ("score", "last"), ("score", "mean")]
)
def test_other_heads(head: Any, pooling: str, tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf", head)
    one, other = both(path, head=head, pooling=pooling, trained=False)
    key = "scores" if head == "score" else "values"
    want = one.forward(layouts.batch(0), frozenset({key}))
    found = other.forward(layouts.batch(0), frozenset({key}))
    assert found.ids == want.ids and found.data.keys() == {key}
    torch.testing.assert_close(found.data[key], want.data[key], **EXACT)


@pytest.mark.slow
def test_the_cut_into_micro_batches_changes_the_last_roundings_alone(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    one, other = (engine_of(path, dtype="float64", backend="jax") for _ in range(2))
    whole = one.train([layouts.batch(0)], Nll())[0].metrics
    cut = other.train([layouts.batch(0)], Nll(), max_tokens=layouts.MOST)[0].metrics
    for key in METRICS:
        assert cut[key] == pytest.approx(whole[key], rel=1e-10)
    assert_equal_parameters(one, other)


@pytest.mark.slow_cases("adamw", "palm", "lion-turn2", "sgd-turn7")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turn"),
    [
        *((kind, turn) for kind in OPTIMIZERS for turn in (("torch", "jax"), ("jax", "torch"))),
        ("adamw", ("jax", "jax")),
    ],
)
def test_a_run_goes_on_with_the_other_engine(kind: str, turn: Any, tmp_path: Path) -> None:
    """Of every optimizer torch reads what JAX saves, and JAX what torch saves, so that JAX reads its
    own states too; one of them shows it.
    """
    path = layouts.write_model(Case(), tmp_path / "hf")
    options: dict[str, Any] = {
        "dtype": "float64",
        "optimizer": OptimizerSpec(kind, lr=1e-3, warmup_steps=3),
    }
    straight = engine_of(path, **options)
    first, second = (engine_of(path, **options, backend=each) for each in turn)
    straight.train([layouts.batch(seed) for seed in range(2)], Nll())
    first.train([layouts.batch(seed) for seed in range(2)], Nll())
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    assert second.version == first.version
    assert_equal_steps(straight, second, 2, 3)


def test_a_state_that_it_cannot_continue_is_refused_by_name(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    first = engine_of(path, optimizer=OptimizerSpec("lion", lr=1e-3))
    first.train([layouts.batch(0)], Nll())
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    second = engine_of(path, backend="jax", optimizer=OptimizerSpec("sgd", lr=1e-3))
    with pytest.raises(CheckpointError, match=r"'exp_avg' of .* optimizer.type=sgd"):
        second.load_state(tmp_path / "state")
    frozen = engine_of(path, backend="jax", trained=False)
    with pytest.raises(CheckpointError, match="belongs to a role that is trained"):
        frozen.load_state(tmp_path / "state")


def test_a_saved_model_is_that_of_torch(tmp_path: Path) -> None:
    path = layouts.write_model(Case("mixtral"), tmp_path / "hf")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(path))
    files = []
    for backend in ("torch", "jax"):
        engine = engine_of(path, backend=backend, trained=False, dtype="bfloat16")
        engine.save_model(tmp_path / backend, tokenizer)
        files.append({p.name: p.read_bytes() for p in (tmp_path / backend).iterdir()})
    assert files[0] == files[1]
    assert WeightFiles(tmp_path / "jax").dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_one_tensor_at_a_time_is_in_host_memory(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted are the bytes of arrays that something still refers to."""
    path = layouts.write_model(Case(family), tmp_path / "hf")
    engine: Any = engine_of(path, backend="jax", dropout=0.0, router_aux_loss_coef=0.0)
    engine.train([layouts.batch(0)], Nll())
    copies: list[weakref.ref[Any]] = []
    held: list[int] = []

    def copy(values: Any) -> torch.Tensor:
        array = np.array(values)
        copies.append(weakref.ref(array))
        alive = [each() for each in copies]
        held.append(sum(each.nbytes for each in alive if each is not None))
        return torch.from_numpy(array)

    monkeypatch.setattr("weft.engine.jax.parameters.to_torch", copy)
    tokenizer = Tokenizer.load(TokenizerSpec(), str(path))
    for save in (lambda: engine.save_state(tmp_path), lambda: engine.save_model(path, tokenizer)):
        held.clear()
        save()
        assert all(each() is None for each in copies), "nothing is kept"
        shapes = engine._stacks.shapes.values()
        assert len(held) >= len(shapes)
        assert max(held) == max(4 * math.prod(shape) for shape in shapes)


def test_slices_are_written_and_averaged(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    engine: Any = engine_of(path, backend="jax", trained=False)
    name = "blocks.1.mlp.up.weight"
    before = parameters(engine)[name]
    half = torch.full((3, before.shape[1]), 2.0)
    engine.write([(name, (slice(1, 4), slice(0, before.shape[1])), half)], version=7, eta=0.25)
    after = parameters(engine)[name]
    assert engine.version == 7
    assert torch.equal(after[1:4], 0.25 * half + 0.75 * before[1:4])
    assert torch.equal(after[0], before[0]) and torch.equal(after[4:], before[4:])
    with pytest.raises(ConfigError, match=r"no parameter 'blocks\.9"):
        engine.write([("blocks.9.mlp.up.weight", (), half)], version=8)
    with pytest.raises(ConfigError, match="do not fit a slice of shape"):
        engine.write([(name, (slice(0, 2), slice(0, 2)), half)], version=8)


def test_an_average_of_weights_in_16_bits_moves_and_is_kept(tmp_path: Path) -> None:
    """As with torch, which keeps such weights in float32 from then on, also on disk."""
    path = layouts.write_model(Case(), tmp_path / "hf")
    name = "blocks.1.mlp.up.weight"
    found = []
    for backend in ("torch", "jax"):
        options: Any = {"backend": backend, "trained": False, "dtype": "bfloat16"}
        engine: Any = engine_of(path, **options)
        where = engine.slices()[name]
        target = 1.05 * parameters(engine)[name].float()
        for version in range(20):
            engine.write([(name, where, target)], version=version, eta=0.01)
        for turn in range(2):  # what is written stays through every restart
            folder = tmp_path / f"{backend}-{turn}"
            folder.mkdir()
            engine.save_state(folder)
            engine = engine_of(path, **options)
            engine.load_state(folder)
        found.append(parameters(engine)[name])
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0].float(), rtol=1e-6, atol=1e-7)
    share = (found[1] / target).mean()
    assert 0.957 < share < 0.963, "1 - 0.99 ** 20 of the way from 1 / 1.05"


def test_tokens_and_positions_without_an_embedding_are_an_error(tmp_path: Path) -> None:
    engine = engine_of(
        layouts.write_model(Case("gpt2"), tmp_path / "hf"), backend="jax", trained=False
    )
    with pytest.raises(IndexError, match="not in the vocabulary of 263 tokens"):
        engine.forward(batch_of([(50, [50])]), WANT)
    far = layouts.batch(0).select(ids=["id0"])
    with pytest.raises(IndexError, match=r"longer than the .* positions"):
        engine.forward(far.from_groups(["a"], *_long(100)), WANT)


def _long(count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    lengths = {"prompt": [[count]], "completion": [[count]]}
    return lengths, {key: torch.full((count,), 9) for key in lengths}


def test_a_state_without_a_trained_weight_is_refused(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    engine: Any = engine_of(path, backend="jax")
    engine.save_state(tmp_path)
    file = tmp_path / "parameters.safetensors"
    tensors = load_file(file)
    del tensors["norm.weight"]
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"the state lacks 'norm\.weight'"):
        engine_of(path, backend="jax").load_state(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype=float16: .* write bfloat16 or float32"),
        ({"compile": True}, "compile=true: .* leave it out"),
        ({"quantize": "8bit", "trained": False}, "quantize=8bit"),
        ({"offload": True}, "offload=true: .* use backend=torch"),
        ({"zero_stage": 0, "layout": "d2"}, "zero_stage=0: .* write a mesh"),
        ({"layout": "d2", "parallel": ParallelSpec(1, 2, 1)}, "exclude each other"),
        ({"layout": "banana"}, "layout=banana"),
        ({"device": "cpu:9"}, "device=cpu:9: jax has 8 devices"),
        ({"recompute_every": 2}, "recompute_every=2: .* gradient_checkpointing=true"),
        ({"attention": "splash"}, "attention=splash: .* is for a TPU"),
        ({"attention": "cudnn"}, "attention=cudnn: .* is for a GPU"),
        ({"dropout": 0.1}, r"does not have dropout; write dropout=0 \(and lora.dropout=0\)"),
        ({"optimizer": OptimizerSpec(state_dtype="bfloat16")}, "optimizer.state_dtype=bfloat16"),
        ({"device": "cuda"}, "device=cuda: jax has no such device"),
        ({"device": "tpu"}, "device=tpu: jax has no such device"),
    ],
)
def test_what_it_lacks_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    with pytest.raises(ConfigError, match=message):
        engine_of(path, **options, backend="jax")


PARTS = {
    "dropout": Case(changes={"attention_dropout": 0.1}),
    "load-balancing loss": Case("mixtral", options={"router_aux_loss_coef": 0.1}),
    "experts in some layers only": Case("qwen3_moe", changes={"mlp_only_layers": [0]}),
    "trained prefixes": Case(prefix=3),
}


@pytest.mark.parametrize("part", REFUSED_PARTS)
def test_a_part_that_it_lacks_is_refused_by_name(part: str) -> None:
    case = PARTS[part]
    family = families.get(case.family)
    config = family.config({**family.tiny, **case.changes})
    network = hf_io.init_random(replace(config, prefix_tokens=case.prefix), "lm", seed=1)
    spec = replace(spec_of(Path("m")), dropout=0.0, router_aux_loss_coef=0.0)
    with pytest.raises(ConfigError, match=rf"backend=jax does not have {part}; "):
        check_network(replace(spec, **case.options), network)
    if case.options:  # is fine if it is switched off
        check_network(spec, network)


def test_requests_that_it_lacks_are_refused(tmp_path: Path) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    engine = engine_of(path, backend="jax", trained=False)
    with pytest.raises(ConfigError, match="a network with a lm head gives"):
        engine.forward(layouts.batch(0), frozenset({"values"}))
    with pytest.raises(ConfigError, match="not trained"):
        engine.train([layouts.batch(0)], Nll())


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = layouts.write_model(Case(), tmp_path / "hf")
    monkeypatch.setattr("weft.engine.backends.jax.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the package 'jax' is not installed; run: .*\[jax\]"):
        engine_of(path, backend="jax")


@pytest.mark.slow
def test_batches_of_other_sizes_use_what_is_compiled(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m")
    engine: Any = engine_of(path, backend="jax")
    for groups in ([(5, [9, 4])], [(3, [8])], [(6, [7, 5])], [(2, [11, 3, 1, 1])]):
        engine.train([batch_of(groups)], Nll())
    assert engine._network._compute_with_vjp._cache_size() == 1
