"""Networks that differ from their config.json by option (added tokens, longer positions), and how
`transformers` reads them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.bounds import assert_within, gamma, unit
from tests.engine import layouts
from tests.engine.common import (
    EXACT,
    Nll,
    batch_of,
    engine_of,
    load_exactly,
    plain_logprobs,
    spec_of,
    tiny,
)
from tests.engine.layouts import Case
from tests.models.common import tiny_config
from tests.ranks import Ranks
from tests.tiny import make_llama
from weft.checkpoints import hf_io, peft_io
from weft.data.sample import SequenceSample
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine import spec_parts
from weft.engine.spec import LoRASpec, OptimizerSpec, PrefixSpec
from weft.engine.torch import network_source
from weft.engine.torch.engine import TorchEngine
from weft.errors import CheckpointError, ConfigError
from weft.models.network import rope

SGD = OptimizerSpec(type="sgd", lr=0.1, beta1=0.0, lr_scheduler_type="constant", max_grad_norm=0.0)
ADDED = TokenizerSpec(add_tokens=["<|prompter|>", "<|new|>", "</s>"])
GROUPS = [(5, [4, 7]), (2, [6]), (3, [3])]


def saved(engine: TorchEngine, folder: Path) -> Path:
    spec = engine._spec
    engine.save_model(folder, Tokenizer.load(spec.tokenizer, spec.path))
    return folder


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, _, value in engine.read(engine.slices())}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_have_the_mean_of_the_old_rows(tied: bool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "hf", tie_word_embeddings=tied)
    old = len(AutoTokenizer.from_pretrained(path))
    engine = engine_of(path, tokenizer=ADDED, dtype="float64")
    stored, held = load_file(path / "model.safetensors"), parameters(engine)
    for name, theirs in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
    ):
        if name in held:
            rows = stored[theirs]
            assert len(held[name]) % 16 == 0 and 0 < len(held[name]) - old < 18
            assert torch.equal(held[name][:old], rows[:old].double())
            # A sum of some hundred numbers in float64, in an order that may be another.
            mean = rows[:old].double().mean(0).expand(len(held[name]) - old, -1)
            torch.testing.assert_close(held[name][old:].double(), mean, rtol=0, atol=1e-14)
    assert ("head.weight" in held) is not tied
    ours = saved(engine, tmp_path / "ours")
    model, tokenizer = (
        load_exactly(AutoModelForCausalLM, ours),
        AutoTokenizer.from_pretrained(ours),
    )
    assert model.config.vocab_size == len(held["embed.weight"]) and len(tokenizer) == old + 2
    assert tokenizer.convert_tokens_to_ids("<|new|>") == old + 1
    batch = batch_of(GROUPS)
    batch.data["completion"][3] = old + 1
    with torch.no_grad():
        for one, wanted in zip(
            engine.forward(batch, frozenset({"logprobs"})).sequences("logprobs"),
            plain_logprobs(model, batch),
            strict=True,
        ):
            torch.testing.assert_close(one, wanted, **EXACT)
    again = engine_of(ours, dtype="float64")  # no option any more: the checkpoint has all of it
    assert torch.equal(parameters(again)["embed.weight"], held["embed.weight"])


def test_rows_that_a_larger_vocabulary_had_for_nobody_are_new_too(tmp_path: Path) -> None:
    path = tiny(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(400)
    model.save_pretrained(path)
    old = len(AutoTokenizer.from_pretrained(path))
    held = parameters(engine_of(path, tokenizer=ADDED))["embed.weight"]
    rows = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert len(held) == 400
    # A float64 mean of some hundred numbers below 0.1, whose order of summation may be another,
    # and then one rounding to float32, which may go to a neighbour.
    mean = rows[:old].double().mean(0)
    assert_within(held[old], mean, unit(torch.float32) * mean.abs() + 1e-14)


def test_adapters_train_and_save_the_grown_matrices(tmp_path: Path) -> None:
    """modules_to_save under the family's own names: "wte" is none of Llama's (defect 9)."""
    path = tiny(tmp_path / "hf")
    engine = engine_of(path, tokenizer=ADDED, lora=LoRASpec(r=2), optimizer=SGD)
    before = parameters(engine)
    engine.train([batch_of(GROUPS)], Nll())
    after = parameters(engine)
    moved = {name for name in before if not before[name].equal(after[name])}
    assert {"embed.weight", "head.weight"} <= moved
    assert all("lora" in name or name in ("embed.weight", "head.weight") for name in moved)
    assert engine.without_adapters() is None or "embed.weight" in moved
    ours = saved(engine, tmp_path / "ours")
    settings = json.loads((ours / "adapter" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    network = hf_io.load(ours)
    assert torch.equal(dict(network.named_parameters())["embed.weight"], after["embed.weight"])
    base = engine_of(path, tokenizer=ADDED, trained=False)._network
    peft_io.load_adapter(ours / "adapter", base)
    assert torch.equal(base.embed.weight, after["embed.weight"])
    with pytest.raises(CheckpointError, match="add the same tokens first"):
        peft_io.load_adapter(ours / "adapter", engine_of(path, trained=False)._network)


@pytest.mark.usefixtures("float64_throughout")
def test_peft_loads_adapters_with_added_tokens(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = tiny(tmp_path / "hf")
    engine = engine_of(path, tokenizer=ADDED, lora=LoRASpec(r=2), optimizer=SGD, dtype="float64")
    engine.train([batch_of(GROUPS)], Nll())
    ours = saved(engine, tmp_path / "ours")
    base = load_exactly(AutoModelForCausalLM, path)
    base.resize_token_embeddings(len(parameters(engine)["embed.weight"]))
    model = peft.PeftModel.from_pretrained(base, ours / "adapter")
    batch = batch_of(GROUPS)
    with torch.no_grad():
        for one, wanted in zip(
            engine.forward(batch, frozenset({"logprobs"})).sequences("logprobs"),
            plain_logprobs(model, batch),
            strict=True,
        ):
            torch.testing.assert_close(one, wanted, **EXACT)


@pytest.mark.default_cases("False-d2", "True-t2")
@pytest.mark.parametrize("layout", ["t2", "d2"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_grown_vocabulary_over_ranks(
    lora: bool, layout: str, ranks: Ranks, tmp_path: Path
) -> None:
    case = Case(lora=lora, options={"tokenizer": ADDED})
    path = layouts.write_model(case, tmp_path / "hf")
    alone = layouts.run(path, "d1", case, tmp_path / "alone")
    assert alone is not None
    many = tmp_path / "many"
    layouts.check(ranks.run(layouts.run, path, layout, case, many), alone, many, tmp_path / "alone")


@pytest.mark.default_cases("frozen-t2")
@pytest.mark.parametrize("layout", ["d2", "t2"])
@pytest.mark.parametrize(
    "options", [{"tokenizer": ADDED}, {"freeze_layers": 1}], ids=["added", "frozen"]
)
def test_bfloat16_on_two_processes(
    options: dict[str, Any], layout: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Matrices that are trained beside adapters have float32 masters, frozen layers none."""
    case = Case(lora="tokenizer" in options, options={"dtype": "bfloat16", **options})
    path = layouts.write_model(case, tmp_path / "hf")
    wanted = layouts.half(path, "d1", case)
    for found in ranks.run(layouts.half, path, layout, case):
        assert found == pytest.approx(wanted, rel=5e-3)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize(
    "value",
    [
        {"type": "linear", "factor": 4},
        {"type": "dynamic", "factor": 2.0},
        {"type": "ntk", "alpha": 3},
    ],
)
def test_longer_positions_as_transformers_reads_them(
    value: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny(tmp_path / "hf", max_position_embeddings=16, initializer_range=0.5)
    engine = engine_of(path, rope_scaling=value, dtype="float64")
    ours = saved(engine, tmp_path / "ours")
    model = load_exactly(AutoModelForCausalLM, ours)
    batch = batch_of([(20, [12]), (6, [4])])
    got = engine.forward(batch, frozenset({"logprobs"})).sequences("logprobs")
    plain = (
        engine_of(path, dtype="float64")
        .forward(batch, frozenset({"logprobs"}))
        .sequences("logprobs")
    )
    assert not torch.allclose(got[0], plain[0], atol=1e-4)
    lost = [torch.zeros(()).double() for _ in got]
    if value["type"] == "dynamic":
        # `transformers` computes these frequencies, b^-e of a base b = 10000 x^(4/3), in float32:
        # both powers within 4 u, the product and the reciprocal within u, all as relative errors
        # of the frequency, for e <= 1.
        lost = [gamma(10) * slope for slope in sum_of_slopes(engine, batch, monkeypatch)]
    with torch.no_grad():
        for one, wanted, error in zip(got, plain_logprobs(model, batch), lost, strict=True):
            assert_within(one, wanted, error + EXACT["rtol"] * wanted.abs() + EXACT["atol"])
    config = json.loads((ours / "config.json").read_text())
    if value["type"] == "ntk":
        assert (
            config["rope_theta"] == pytest.approx(10000.0 * 3 ** (8 / 6), rel=1e-12)
            and config["rope_scaling"] is None
        )
        assert config["max_position_embeddings"] == 48
    else:
        assert config["rope_scaling"]["factor"] == value["factor"]
    again = (
        engine_of(ours, dtype="float64")
        .forward(batch, frozenset({"logprobs"}))
        .sequences("logprobs")
    )
    assert all(one.equal(two) for one, two in zip(got, again, strict=True))


def sum_of_slopes(
    engine: TorchEngine, batch: SequenceSample, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """How much each log-prob moves for a small relative change of the rotary frequencies, at most:
    the sum over the frequencies of the derivatives' sizes.
    """
    step, compute = 1e-6, rope._compute_frequencies

    def logprobs(moved: int) -> list[torch.Tensor]:
        def move(*given: Any) -> tuple[torch.Tensor, float]:
            found, factor = compute(*given)
            return found * (1 + step * (torch.arange(found.shape[-1]) == moved)), factor

        with monkeypatch.context() as patch:
            patch.setattr(rope, "_compute_frequencies", move)
            out = engine.forward(batch, frozenset({"logprobs"})).sequences("logprobs")
        return [torch.as_tensor(each) for each in out]

    plain = logprobs(-1)
    return [
        torch.stack([(one - whole).abs() for one in each]).sum(0) / step
        for whole, *each in zip(plain, *(logprobs(n) for n in range(4)), strict=True)
    ]


def test_what_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "hf")
    with pytest.raises(ConfigError, match="has rope_scaling of type linear already"):
        scaled = saved(
            engine_of(path, rope_scaling={"type": "linear", "factor": 2}), tmp_path / "scaled"
        )
        engine_of(scaled, rope_scaling={"type": "linear", "factor": 2})
    for options in ({"residual_dropout": 0.1}, {"freeze_layers": 0}, {"tokenizer": ADDED}):
        with pytest.raises(ConfigError, match="use backend=torch"):
            engine_of(path, backend="hf", **options)


def test_values_of_rope_scaling() -> None:
    assert (
        spec_parts.find_rope_problem(None) is None
        and spec_parts.find_rope_problem({"type": "ntk", "alpha": 2}) is None
    )
    for wrong in (
        "linear",
        {"type": "linear"},
        {"type": "ntk", "factor": 2},
        {"type": "linear", "factor": 0.5},
        {"type": "x"},
    ):
        assert "rope_scaling=" in str(spec_parts.find_rope_problem(wrong))
    assert (
        spec_parts.compute_scaled_context({"type": "linear", "factor": 2}, 512) == 1024
        and spec_parts.compute_scaled_context(None, 512) == 512
    )


def test_prefixes_that_do_not_go_with_a_model(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    engine_of(base, prefix=PrefixSpec(5)).save_model(
        tmp_path / "prefix", Tokenizer.load(TokenizerSpec(), str(base))
    )
    with pytest.raises(
        ConfigError,
        match=r"is a prefix of 5 tokens, and prefix\.num_tokens=0; write prefix\.num_tokens=5",
    ):
        engine_of(tmp_path / "prefix")
    with pytest.raises(ConfigError, match=r"is a prefix of 5 tokens, and prefix\.num_tokens=2"):
        engine_of(tmp_path / "prefix", prefix=PrefixSpec(2))
    spec, tokenizer = (
        spec_of(base, prefix=PrefixSpec(2)),
        Tokenizer.load(TokenizerSpec(), str(base)),
    )
    bigcode = tiny_config("gpt_bigcode", vocab_size=tokenizer.vocab_size)
    with pytest.raises(
        ConfigError, match=r"cannot save a prefix of a gpt_bigcode model in; use lora\.r"
    ):
        network_source.adapt_config(spec, bigcode, tokenizer)
    with pytest.raises(
        ConfigError, match=r"prefix\.num_tokens=2: leaves no room in the 2 positions"
    ):
        network_source.adapt_config(
            spec, replace(bigcode, family="gpt2", learned_positions=2), tokenizer
        )
