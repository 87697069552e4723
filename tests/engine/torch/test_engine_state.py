"""Parameters and state in and out: bitwise continuation, moving averages, saved models, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.bounds import assert_within, gamma
from tests.engine.common import EXACT, Nll, batch_of, engine_of, load_exactly, spec_of, tiny
from weft.checkpoints.config_file import PrefixSettings, read_prefix
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Request
from weft.engine.spec import GenerationSpec, LoRASpec, OptimizerSpec, PrefixSpec, Schedule
from weft.engine.torch import engine as torch_engine
from weft.engine.torch.adapters_off import can_share_base
from weft.engine.torch.engine import TorchEngine
from weft.errors import CheckpointError, ConfigError
from weft.models.network.linear import find_canonical_parameters
from weft.topology import build_whole_slice

GROUPS = [(5, [4, 7, 1]), (2, [6]), (9, [3, 3])]
LORA = LoRASpec(r=4, alpha=8.0, targets=["q", "v", "down"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("llama") / "m")


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, _, values in engine.read(engine.slices())}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def logprobs(engine: Any) -> torch.Tensor:
    return engine.forward(batch_of(GROUPS), frozenset({"logprobs"})).data["logprobs"]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": OptimizerSpec(lr=1e-2)},
        {"optimizer": OptimizerSpec(type="lion", lr=1e-3, beta2=0.99)},
        {"optimizer": OptimizerSpec(type="sgd", lr=1e-2), "dropout": 0.1},
        {"optimizer": OptimizerSpec(lr=1e-2), "dtype": "bfloat16"},
        {"optimizer": OptimizerSpec(lr=1e-2), "dtype": "float16"},
        {"optimizer": OptimizerSpec(lr=1e-2), "lora": LoRASpec(r=2, dropout=0.2)},
        {"optimizer": OptimizerSpec(lr=1e-2), "lora": LoRASpec(r=2), "dtype": "bfloat16"},
        {"optimizer": OptimizerSpec(lr=1e-2), "prefix": PrefixSpec(3)},
        {"optimizer": OptimizerSpec(lr=1e-2), "prefix": PrefixSpec(3), "dtype": "bfloat16"},
        {"optimizer": OptimizerSpec(lr=1e-2), "head": "value", "init_from_scratch": True},
        {"optimizer": OptimizerSpec(lr=1e-2, offload=True)},
        {"optimizer": OptimizerSpec(lr=1e-2, state_dtype="bfloat16"), "dtype": "bfloat16"},
    ],
    ids=[
        "adamw",
        "lion",
        "sgd-dropout",
        "bfloat16",
        "float16",
        "lora",
        "lora-bfloat16",
        "prefix",
        "prefix-bfloat16",
        "value",
        "host",
        "states",
    ],
)
def test_a_restart_goes_on_bit_for_bit(path: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    changes = {"schedule": Schedule(8, 2), **changes}
    loss = ValueLoss() if "head" in changes else Nll()
    batches = [batch_of(GROUPS, seed) for seed in range(4)]
    straight, first, second = (engine_of(path, **changes) for _ in range(3))
    wanted = [straight.train([b], loss)[0].metrics for b in batches]
    for b in batches[:2]:
        first.train([b], loss)
    first.save_state(tmp_path)
    second.train([batches[3]], loss)  # whatever it did before is forgotten
    second.load_state(tmp_path)
    assert second.version == 2
    got = [second.train([b], loss)[0].metrics for b in batches[2:]]
    for one, other in zip(got, wanted[2:], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert one[name] == other[name]
    assert_equal(parameters(second), parameters(straight))
    assert second._optimizer.collect_values() == straight._optimizer.collect_values()
    assert {p.name for p in tmp_path.iterdir()} == {
        "parameters.safetensors",
        "optimizer.safetensors",
        "state.json",
    }


class ValueLoss(Nll):
    outputs = frozenset({"values"})

    def __call__(self, out: Any, batch: Any, total: Any) -> Any:
        return ((out["values"] - 1.0) ** 2 * batch.mask).sum() / total["tokens"], {}


def test_a_state_before_the_first_step_and_a_broken_one(path: Path, tmp_path: Path) -> None:
    engine = engine_of(path)
    engine.save_state(tmp_path)
    before = parameters(engine)
    engine.train([batch_of(GROUPS)], Nll())
    engine.load_state(tmp_path)
    assert engine.version == 0
    assert_equal(before, parameters(engine))
    with pytest.raises(CheckpointError, match="belongs to a role that is trained"):
        engine_of(path, trained=False).load_state(tmp_path)
    file = tmp_path / "parameters.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cut short"):
        engine.load_state(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cut short"):
        engine.load_state(tmp_path)


def test_frozen_weights_are_saved_only_where_somebody_wrote_to_them(
    path: Path, tmp_path: Path
) -> None:
    frozen = engine_of(path, trained=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    frozen.save_state(tmp_path / "a")
    untouched = parameters(frozen)
    name = "blocks.0.mlp.up.weight"
    frozen.write([(name, build_whole_slice((64, 32)), torch.ones(64, 32))], version=7)
    frozen.save_state(tmp_path / "b")
    size = {d: (tmp_path / d / "parameters.safetensors").stat().st_size for d in "ab"}
    assert size["a"] < 100 and size["b"] > 64 * 32 * 4
    again = engine_of(path, trained=False)
    again.load_state(tmp_path / "b")
    assert again.version == 7
    assert_equal(parameters(again), parameters(frozen))
    with pytest.raises(CheckpointError, match="was changed since"):
        frozen.load_state(tmp_path / "a")
    fresh = engine_of(path, trained=False)
    fresh.load_state(tmp_path / "a")
    assert_equal(parameters(fresh), untouched)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_moving_average_follows_its_source(path: Path, tmp_path: Path, dtype: str) -> None:
    source, target = engine_of(path), engine_of(path, trained=False, dtype=dtype)
    start = parameters(target)
    eta, wanted = 0.01, {name: v.double() for name, v in start.items()}
    largest = {name: v.double().abs() for name, v in start.items()}
    for seed in range(5):
        source.train([batch_of(GROUPS, seed)], Nll())
        target.write(source.read(source.slices()), version=source.version, eta=eta)
        wanted = {
            name: eta * v.double() + (1 - eta) * wanted[name]
            for name, v in parameters(source).items()
        }
        for name, v in parameters(source).items():
            largest[name] = largest[name].maximum(v.abs())
    assert target.version == 5
    held = parameters(target)
    for name, values in wanted.items():
        # Each of five writes rounds a difference or a product of eta, a second product and the sum,
        # at most twice as large as any value was.
        assert_within(held[name], values, gamma(5 * 4) * 2 * largest[name], name)
    for name, stored in find_canonical_parameters(target._network).items():
        assert torch.equal(stored.data, held[name].to(stored.data.dtype))
    target.save_state(tmp_path)
    again = engine_of(path, trained=False, dtype=dtype)
    again.load_state(tmp_path)
    assert_equal(parameters(again), held)


def test_parts_of_parameters_can_be_written_and_misfits_are_named(path: Path) -> None:
    engine = engine_of(path)
    before = parameters(engine)
    name = "blocks.1.attention.q.weight"
    engine.write([(name, (slice(4, 6), slice(0, 32)), torch.zeros(2, 32))], version=0)
    after = parameters(engine)
    assert (after[name][4:6] == 0).all() and torch.equal(after[name][6:], before[name][6:])
    assert engine.slices()[name] == build_whole_slice((32, 32))
    with pytest.raises(ConfigError, match="no parameter 'nonsense'"):
        engine.write([("nonsense", build_whole_slice((1,)), torch.zeros(1))], version=0)
    with pytest.raises(ConfigError, match=r"is \(32, 32\) here and \(3, 3\)"):
        engine.write([(name, build_whole_slice((32, 32)), torch.zeros(3, 3))], version=0)


@pytest.mark.usefixtures("float64_throughout")
def test_lora_trains_adapters_and_leaves_the_base_alone(path: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    engine = engine_of(path, lora=LORA, dtype="float64")
    plain = engine_of(path, dtype="float64")
    reference = engine.without_adapters()
    assert reference is not None and plain.without_adapters() is None
    base_logprobs = logprobs(plain)
    torch.testing.assert_close(logprobs(engine), base_logprobs, **EXACT)
    before = parameters(engine)
    losses = [engine.train([batch_of(GROUPS)], Nll())[0].metrics["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    after = parameters(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora" in name}
    assert {name.split(".lora")[0].rsplit(".", 1)[1] for name in changed} == {"q", "v", "down"}
    assert engine.description["num_trainable"] == sum(before[name].numel() for name in changed)
    assert not torch.allclose(logprobs(engine), base_logprobs)
    torch.testing.assert_close(logprobs(reference), base_logprobs, **EXACT)
    assert_equal({n: v for n, _, v in reference.read(reference.slices())}, parameters(plain))
    with pytest.raises(ConfigError, match="adapters off"):
        reference.train([batch_of(GROUPS)], Nll())
    trained, frozen = spec_of(path, lora=LORA), spec_of(path, trained=False)
    assert can_share_base(frozen, trained) and not can_share_base(frozen, spec_of(path))
    assert not can_share_base(spec_of(path, trained=False, dtype="bfloat16"), trained)

    engine.save_model(tmp_path, Tokenizer.load(TokenizerSpec(), str(path)))
    merged = engine_of(tmp_path, dtype="float64")
    torch.testing.assert_close(logprobs(merged), logprobs(engine), **EXACT)
    hf = load_exactly(AutoModelForCausalLM, tmp_path)
    adapted = PeftModel.from_pretrained(
        load_exactly(AutoModelForCausalLM, path), tmp_path / "adapter"
    )
    tokens = torch.arange(10, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(hf(tokens).logits, adapted(tokens).logits, **EXACT)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_prefix_is_trained_and_saved_as_peft_saves_it(path: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    steps = OptimizerSpec(lr=1e-2, lr_scheduler_type="constant")
    engine = engine_of(path, prefix=PrefixSpec(4), optimizer=steps, dtype="float64")
    plain = engine_of(path, dtype="float64")
    reference = engine.without_adapters()
    assert reference is not None and torch.equal(logprobs(reference), logprobs(plain))
    before = parameters(engine)
    losses = [engine.train([batch_of(GROUPS)], Nll())[0].metrics["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    after = parameters(engine)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        f"blocks.{layer}.attention.prefix.{kind}" for layer in (0, 1) for kind in "kv"
    }
    assert torch.equal(logprobs(reference), logprobs(plain)) and not torch.equal(
        logprobs(engine), logprobs(plain)
    )

    engine.save_model(tmp_path / "saved", Tokenizer.load(TokenizerSpec(), str(path)))
    assert not list((tmp_path / "saved").glob("model*.safetensors"))
    again = engine_of(tmp_path / "saved", trained=False, dtype="float64")
    torch.testing.assert_close(logprobs(again), logprobs(engine), **EXACT)
    module = AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(PeftModel.from_pretrained(module, tmp_path / "saved"), PeftModel)
    # and not the model without its prefix
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")

    further = engine_of(tmp_path / "saved", prefix=PrefixSpec(4), optimizer=steps, dtype="float64")
    assert further.train([batch_of(GROUPS)], Nll())[0].metrics["loss"] < losses[-1]
    further.save_model(tmp_path / "further", Tokenizer.load(TokenizerSpec(), str(path)))
    assert read_prefix(tmp_path / "further") == PrefixSettings(4, str(path.resolve()))
    own, frozen = (
        spec_of(tmp_path / "saved", prefix=PrefixSpec(4)),
        spec_of(tmp_path / "saved", trained=False),
    )
    assert not can_share_base(frozen, own)  # a reference has the prefix as it was
    assert can_share_base(spec_of(path, trained=False), spec_of(path, prefix=PrefixSpec(4)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_loads_in_transformers(path: Path, tmp_path: Path, dtype: str) -> None:
    engine = engine_of(path, dtype=dtype)
    engine.train([batch_of(GROUPS)], Nll())
    engine.save_model(tmp_path, Tokenizer.load(TokenizerSpec(), str(path)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"
    saved = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(saved, parameters(engine)["blocks.1.mlp.up.weight"].to(saved.dtype))
    assert (tmp_path / "generation_config.json").exists() and (tmp_path / "tokenizer.json").exists()
    assert model.generation_config.eos_token_id == Tokenizer.load(TokenizerSpec(), str(path)).eos_id


@pytest.mark.usefixtures("float64_throughout")
def test_a_saved_reward_model_loads_in_transformers(path: Path, tmp_path: Path) -> None:
    engine = engine_of(path, head="score", trained=False, dtype="float64")
    engine.save_model(tmp_path, Tokenizer.load(TokenizerSpec(), str(path)))
    model = load_exactly(AutoModelForSequenceClassification, tmp_path)
    batch = batch_of([(3, [4])])
    tokens = torch.cat([batch.data["prompt"], batch.data["completion"]])[None]
    with torch.no_grad():
        torch.testing.assert_close(
            engine.forward(batch, frozenset({"scores"})).data["scores"],
            model(tokens).logits[0],
            **EXACT,
        )


def test_weights_from_scratch_depend_on_the_seed_alone(path: Path) -> None:
    one, same, other = (engine_of(path, init_from_scratch=True, seed=seed) for seed in (1, 1, 2))
    assert_equal(parameters(one), parameters(same))
    assert not torch.equal(parameters(one)["embed.weight"], parameters(other)["embed.weight"])


def test_an_engine_whose_weights_are_away_takes_them_back(path: Path) -> None:
    engine = engine_of(path)
    before = logprobs(engine)
    for what in ("weights", "optimizer"):
        engine.offload(what)
    assert torch.equal(logprobs(engine), before)
    engine.train([batch_of(GROUPS)], Nll())
    engine.offload("optimizer")
    engine.onload("optimizer")
    engine.train([batch_of(GROUPS)], Nll())


@pytest.mark.usefixtures("float64_throughout")
def test_generated_logprobs_are_those_that_training_recomputes(path: Path) -> None:
    engine = engine_of(path, dtype="float64")
    engine.train([batch_of(GROUPS)], Nll())
    with engine.generating(GenerationSpec(max_new_tokens=6, seed=5)) as generator:
        generator.submit([Request("a", 0, [9, 10, 11]), Request("b", 0, [12])])
        events = []
        while not generator.idle:
            events += generator.step()
    assert {e.version for e in events} == {1}
    by_id = {id: [e for e in events if e.id == id] for id in "ab"}
    batch = batch_of([(3, [len(by_id["a"])]), (1, [len(by_id["b"])])])
    data = {
        "prompt": torch.tensor([9, 10, 11, 12]),
        "completion": torch.tensor([e.token for id in "ab" for e in by_id[id]]),
    }
    batch = type(batch)(batch.ids, batch.lengths, batch.offsets, data)
    got = torch.tensor([e.logprob for id in "ab" for e in by_id[id]], dtype=torch.float64)
    # A generator rounds log-probs to float32, whatever it computes in.
    exact = logprobs_of(engine, batch)
    assert_within(got, exact, gamma(1) * exact.abs() + EXACT["atol"])


def logprobs_of(engine: TorchEngine, batch: Any) -> torch.Tensor:
    return engine.forward(batch, frozenset({"logprobs"})).data["logprobs"]


@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "bfloat16"}, {"lora": LORA}], ids=["float32", "bfloat16", "lora"]
)
def test_masters_in_host_memory_train_to_the_same_bits(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """On a CPU nothing need be apart, so the place that a GPU's masters have is asked for here."""
    batches = [batch_of(GROUPS, seed=seed) for seed in range(4)]
    spec = {
        "optimizer": OptimizerSpec(lr=1e-2, offload=True, weight_decay=0.1),
        "schedule": Schedule(8, 2),
        **changes,
    }
    plain, on_cpu = (
        engine_of(path, **spec),
        torch_engine.choose_master_device(spec_of(path, **spec), torch.device("cpu")),
    )
    assert on_cpu is None
    assert torch_engine.choose_master_device(
        spec_of(path, **spec), torch.device("cuda")
    ) == torch.device("cpu")
    monkeypatch.setattr(
        torch_engine, "choose_master_device", lambda spec, device: torch.device("cpu")
    )
    apart = engine_of(path, **spec)
    assert apart.notes == plain.notes and "in host memory already" in plain.notes[0]
    losses: dict[int, list[float]] = {id(plain): [], id(apart): []}
    for engine in (plain, apart):
        done = engine.train(batches[:2], Nll(), max_tokens=20)
        losses[id(engine)] += [stats.metrics["loss"] for stats in done]
    assert losses[id(plain)] == losses[id(apart)]
    (tmp_path / "s").mkdir()
    apart.save_state(tmp_path / "s")
    again = engine_of(path, **spec)
    again.load_state(tmp_path / "s")
    # masters of their own
    assert all(
        part.name in again._masters._masters for part in again._masters.trained_parameters.values()
    )
    rest = [
        [stats.metrics["loss"] for stats in e.train(batches[2:], Nll(), max_tokens=20)]
        for e in (plain, apart, again)
    ]
    assert rest[0] == rest[1] == rest[2]
    assert_equal(parameters(plain), parameters(apart))
    assert_equal(parameters(plain), parameters(again))
    assert torch.equal(logprobs(plain), logprobs(again))


def test_offloading_that_changes_nothing_is_said(path: Path) -> None:
    offload = OptimizerSpec(lr=1e-2, offload=True)
    assert (
        engine_of(path).notes == ()
        and engine_of(path, optimizer=offload, trained=False).notes == ()
    )
    [note] = engine_of(path, optimizer=offload).description["notes"]
    assert note.startswith("optimizer.offload=true: on a CPU")
