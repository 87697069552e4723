"""Decoders of `transformers` through the hf backend: packed where that is exact, length by length
elsewhere, always right.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer

from tests.engine.common import (
    EXACT,
    Nll,
    batch_of,
    engine_of,
    load_exactly,
    plain_logprobs,
    sequences,
)
from tests.tiny import make_tokenizer
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Request
from weft.engine.hf.trial import try_out
from weft.engine.spec import GenerationSpec, LoRASpec, OptimizerSpec
from weft.engine.torch.engine import TorchEngine
from weft.errors import CheckpointError, ConfigError
from weft.topology import Layout

GROUPS = [(5, [4, 7]), (2, [6]), (3, [3])]
SGD = OptimizerSpec(type="sgd", lr=0.1, beta1=0.0, lr_scheduler_type="constant", max_grad_norm=0.0)
COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# model type -> (configuration, how it runs); "by version": packed where the installed transformers
# uses its attention interface
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, "packed"),
    "gpt2": ({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "packed"),
    "phi": ({}, "packed"),
    "stablelm": ({}, "packed"),
    "granite": ({"logits_scaling": 2.0, "attention_multiplier": 0.2}, "packed"),
    "cohere": ({"logit_scale": 0.25}, "packed"),
    "gemma2": (
        {
            "head_dim": 8,
            "sliding_window": 4,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        "packed",
    ),
    "biogpt": ({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "packed"),
    "llama4_text": (
        {
            "attention_chunk_size": 4,
            "num_local_experts": 2,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
        },
        "apart",
    ),
    "bloom": ({"hidden_dropout": 0.0, "attention_dropout": 0.0}, "apart"),
    "gptj": (
        {"rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "by version",
    ),
    "gpt_neo": (
        {
            "attention_types": [[["global", "local"], 1]],
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
        },
        "apart",
    ),
    "lfm2": ({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}, "apart"),
    "mamba": ({"state_size": 4}, "apart"),
}


def save_tiny(directory: Path, kind: str, auto: Any = AutoModelForCausalLM, **changes: Any) -> Path:
    defaults = AutoConfig.for_model(kind)
    known = {
        key: value
        for key, value in COMMON.items()
        if key in defaults.to_dict() or key in type(defaults).attribute_map
    }
    config = AutoConfig.for_model(kind, **{**known, **FAMILIES[kind][0], **changes})
    torch.manual_seed(0)
    make_tokenizer(directory)
    auto.from_config(config).save_pretrained(directory)
    return directory


def runs_apart(kind: str, model: torch.nn.Module) -> bool:
    if FAMILIES[kind][1] == "by version":
        return "ALL_ATTENTION_FUNCTIONS" not in vars(inspect.getmodule(type(model)))
    return FAMILIES[kind][1] == "apart"


def parameters(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, _, values in engine.read(engine.slices())}


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("kind", FAMILIES)
def test_decoders_score_train_and_generate_as_transformers_does(tmp_path: Path, kind: str) -> None:
    path = save_tiny(tmp_path, kind)
    engine = engine_of(path, backend="hf", optimizer=SGD, dtype="float64")
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float64
    )
    assert ("without packing" in " ".join(engine.description["notes"])) == runs_apart(kind, model)
    batch = batch_of(GROUPS)
    got = engine.forward(batch, frozenset({"logprobs"}))
    with torch.no_grad():
        for one, wanted in zip(
            got.sequences("logprobs"), plain_logprobs(model, batch), strict=True
        ):
            torch.testing.assert_close(one, wanted, **EXACT)

    [stats] = engine.train([batch], Nll())
    loss = -torch.cat(plain_logprobs(model, batch)).mean()
    loss.backward()
    assert stats.metrics["loss"] == pytest.approx(loss.item(), rel=1e-11)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    held = parameters(engine)
    for name, values in model.named_parameters():
        torch.testing.assert_close(
            held[f"module.{name}"],
            values.detach(),
            **EXACT,
            msg=lambda text, name=name: f"{name}: {text}",
        )

    prompt = torch.arange(20, 25)
    tokens = prompt
    with engine.generating(GenerationSpec(max_new_tokens=6, greedy=True)) as generator:
        generator.submit([Request("a", 0, prompt.tolist()), Request("b", 0, [9])])
        events = []
        while not generator.idle:
            events += generator.step()
    with torch.no_grad():
        for _ in range(6):
            tokens = torch.cat([tokens, model(tokens[None]).logits[0, -1:].argmax(-1)])
    assert [e.token for e in events if e.id == "a"] == tokens[5:].tolist()


@pytest.mark.usefixtures("float64_throughout")
def test_the_cut_does_not_matter(tmp_path: Path) -> None:
    for kind in ("stablelm", "bloom"):
        path = save_tiny(tmp_path / kind, kind)
        whole, cut = (
            engine_of(path, backend="hf", optimizer=SGD, dtype="float64") for _ in range(2)
        )
        one = whole.train([batch_of(GROUPS)], Nll())[0]
        other = cut.train([batch_of(GROUPS)], Nll(), max_tokens=13)[0]
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-11)
        for name, values in parameters(whole).items():
            torch.testing.assert_close(parameters(cut)[name], values, **EXACT)


@pytest.mark.parametrize("kind", ["stablelm", "bloom"])
def test_gradient_checkpointing_changes_no_number(tmp_path: Path, kind: str) -> None:
    path = save_tiny(tmp_path, kind)
    plain, *recomputed = (
        engine_of(path, backend="hf", optimizer=SGD, dtype="float64", **how)
        for how in ({}, {"gradient_checkpointing": True}, {"recompute_every": 2})
    )
    one = plain.train([batch_of(GROUPS)], Nll())[0]
    for engine in recomputed:
        other = engine.train([batch_of(GROUPS)], Nll())[0]
        assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], rel=1e-11)
        for name, values in parameters(plain).items():
            torch.testing.assert_close(parameters(engine)[name], values, **EXACT)
    layers = [
        m for m in recomputed[1]._network.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    assert [layer.gradient_checkpointing for layer in layers] == [False, True]


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("kind", ["stablelm", "bloom"])
def test_value_and_score_heads(tmp_path: Path, kind: str) -> None:
    path = save_tiny(tmp_path, kind, AutoModelForSequenceClassification, num_labels=1)
    model = load_exactly(AutoModelForSequenceClassification, path)
    scorer = engine_of(path, backend="hf", head="score", trained=False, dtype="float64")
    critic = engine_of(path, backend="hf", head="value", optimizer=SGD, dtype="float64")
    batch = batch_of(GROUPS)
    scores = scorer.forward(batch, frozenset({"scores"})).data["scores"]
    values = critic.forward(batch, frozenset({"values"})).sequences("values")
    with torch.no_grad():
        for score, value, (tokens, prompt) in zip(scores, values, sequences(batch), strict=True):
            torch.testing.assert_close(score, model(tokens[None]).logits[0, 0], **EXACT)
            torch.testing.assert_close(value[-1], score, **EXACT)
            assert len(value) == len(tokens) - prompt + 1
    scorer.save_model(tmp_path / "saved", Tokenizer.load(TokenizerSpec(), str(path)))
    again = load_exactly(AutoModelForSequenceClassification, tmp_path / "saved")
    assert torch.equal(again.score.weight, model.score.weight)


def test_new_heads_on_a_causal_language_model(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "stablelm")
    critic, one, same = (
        engine_of(path, backend="hf", head=head) for head in ("value", "score", "score")
    )
    assert (critic.forward(batch_of(GROUPS), frozenset({"values"})).data["values"] == 0).all()
    first, second = (
        e.forward(batch_of(GROUPS), frozenset({"scores"})).data["scores"] for e in (one, same)
    )
    assert torch.equal(first, second) and (first != 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_and_a_restart(tmp_path: Path, dtype: str) -> None:
    path = save_tiny(tmp_path / "m", "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    straight, first, second = (engine_of(path, backend="hf", dtype=dtype) for _ in range(3))
    batches = [batch_of(GROUPS, seed) for seed in range(3)]
    wanted = [straight.train([b], Nll())[0].metrics["loss"] for b in batches]
    got = [first.train([batches[0]], Nll())[0].metrics["loss"]]
    (tmp_path / "state").mkdir()
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    got += [second.train([b], Nll())[0].metrics["loss"] for b in batches[1:]]
    assert got == wanted
    assert all(torch.equal(v, parameters(second)[n]) for n, v in parameters(straight).items())
    assert (
        got[0]
        != engine_of(path, backend="hf", dtype=dtype, dropout=0.0)
        .train([batches[0]], Nll())[0]
        .metrics["loss"]
    )
    straight.save_model(tmp_path / "saved", Tokenizer.load(TokenizerSpec(), str(path)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"
    held = parameters(straight)
    assert all(
        torch.equal(p, held[f"module.{name}"].to(p.dtype)) for name, p in model.named_parameters()
    )


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("kind", ["stablelm", "gpt2"])
def test_lora_on_any_linear(tmp_path: Path, kind: str) -> None:
    from peft import PeftModel

    path = save_tiny(tmp_path / "m", kind)
    engine = engine_of(path, backend="hf", lora=LoRASpec(r=4, alpha=8.0), dtype="float64")
    plain = load_exactly(AutoModelForCausalLM, path)
    before = parameters(engine)
    losses = [engine.train([batch_of(GROUPS)], Nll())[0].metrics["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    changed = {
        name for name, values in parameters(engine).items() if not torch.equal(values, before[name])
    }
    assert changed == {name for name in before if "lora" in name} and changed
    reference = engine.without_adapters()
    assert reference is not None
    base = reference.forward(batch_of(GROUPS), frozenset({"logprobs"})).data["logprobs"]
    with torch.no_grad():
        torch.testing.assert_close(
            base, torch.cat(plain_logprobs(plain, batch_of(GROUPS))), **EXACT
        )
    engine.save_model(tmp_path / "saved", Tokenizer.load(TokenizerSpec(), str(path)))
    merged = load_exactly(AutoModelForCausalLM, tmp_path / "saved")
    adapted = PeftModel.from_pretrained(plain, tmp_path / "saved" / "adapter")
    adapted_logprobs = engine.forward(batch_of(GROUPS), frozenset({"logprobs"})).data["logprobs"]
    with torch.no_grad():
        torch.testing.assert_close(
            torch.cat(plain_logprobs(merged, batch_of(GROUPS))), adapted_logprobs, **EXACT
        )
        torch.testing.assert_close(
            torch.cat(plain_logprobs(adapted, batch_of(GROUPS))), adapted_logprobs, **EXACT
        )
    with pytest.raises(ConfigError, match="no linear layers 'nonsense'"):
        engine_of(path, backend="hf", dtype="float64", lora=LoRASpec(targets=["nonsense"], r=4))


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "m", "stablelm")
    from tests.engine.common import spec_of
    from weft.registry import backends

    with pytest.raises(ConfigError, match="backend=hf runs copies of the whole module"):
        backends.get("hf")(spec_of(path, backend="hf"), Layout(tensor=2))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        (tmp_path / "empty").mkdir()
        engine_of(tmp_path / "empty", backend="hf")
    config = json.loads((path / "config.json").read_text())
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        engine_of(path, backend="hf")
    (path / "model.safetensors").write_bytes(weights)
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="lacks"):
        engine_of(path, backend="hf")
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="holds unknown"):
        engine_of(path, backend="hf")
    (path / "config.json").write_text(json.dumps({**config, "layer_norm_eps": float("nan")}))
    with pytest.raises(CheckpointError, match="layer_norm_eps=nan: it must be a finite number"):
        engine_of(path, backend="hf")
    (path / "config.json").write_text(
        json.dumps({**config, "auto_map": {"AutoConfig": "x.Y"}, "model_type": "nobody"})
    )
    with pytest.raises(CheckpointError, match="set trust_remote_code=true"):
        engine_of(path, backend="hf")
    (path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ConfigError, match="has an encoder"):
        engine_of(path, backend="hf")
    bert = AutoConfig.for_model(
        "bert", **{key: COMMON[key] for key in ("hidden_size", "vocab_size", "num_attention_heads")}
    )
    make_tokenizer(tmp_path / "bert")
    AutoModelForCausalLM.from_config(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="not a decoder"):
        engine_of(tmp_path / "bert", backend="hf")
    small = save_tiny(tmp_path / "small", "stablelm", vocab_size=100)
    with pytest.raises(CheckpointError, match="vocabulary of 100"):
        engine_of(small, backend="hf")


def test_a_network_of_half_precision_is_tried_out_in_float32(tmp_path: Path) -> None:
    """What rounding would hide is found, and the weights are what they were."""
    module = AutoModelForCausalLM.from_pretrained(
        save_tiny(tmp_path, "llama", tie_word_embeddings=True), dtype=torch.bfloat16
    )
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert try_out(module, "lm", 320).callers
    for name, value in module.state_dict().items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, before[name])
    assert module.lm_head.weight is module.get_input_embeddings().weight
    module.set_attn_implementation("sdpa")
    module.lm_head.register_forward_hook(lambda _, __, logits: logits * 1.01)
    with pytest.raises(ConfigError, match="not known to weft"):
        try_out(module, "lm", 320)
