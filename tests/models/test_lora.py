"""Adapters: what they compute, what they train, and the same logits in PEFT both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from weft.engine.spec import LoRASpec
from weft.errors import CheckpointError, ConfigError
from weft.models import hf_io, lora, peft_io
from weft.models.packed import pack
from weft.models.transformer import Transformer

from .common import sequences, tiny

ROW = sequences([18])[0].clamp_min(1)


def logits(network: Transformer) -> Tensor:
    with torch.no_grad():
        return network.next_token_logits(network.hidden(pack([ROW])))


def adapted(name: str = "llama", head: Any = "lm", spec: LoRASpec | None = None, **changes: Any) -> Transformer:
    """A network whose adapters are not zero."""
    network = tiny(name, head, **changes)
    lora.attach(network, spec or LoRASpec(r=3, alpha=6.0))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for n, p in network.named_parameters():
            if lora.is_adapter(n):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return network


def save_both(network: Transformer, directory: Path) -> tuple[Path, Path]:
    parameters = dict(network.named_parameters())
    base = {n: p for n, p in parameters.items() if not lora.is_adapter(n)}
    hf_io.save(directory / "base", base, network.config, network.kind)
    peft_io.save_adapter(
        directory / "adapter",
        parameters,
        lora.scales(network),
        network.config,
        network.kind,
        base=str(directory / "base"),
    )
    return directory / "base", directory / "adapter"


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_new_adapters_change_nothing_and_train_alone(name: str) -> None:
    network = tiny(name)
    before = logits(network)
    frozen = {n: p.detach().clone() for n, p in network.named_parameters()}
    lora.attach(network, LoRASpec(r=2, alpha=4.0), seed=1)
    assert torch.equal(logits(network), before)
    trained = [n for n, p in network.named_parameters() if p.requires_grad]
    assert trained and all(lora.is_adapter(n) for n in trained)
    assert {n for n, _ in network.named_parameters()} - set(trained) == set(frozen), "the base keeps its names"
    network(pack([ROW]), frozenset({"logprobs"}))["logprobs"].sum().backward()
    for n, p in network.named_parameters():
        assert (p.grad is not None) == lora.is_adapter(n), n
    grads = {n: p.grad for n, p in network.named_parameters() if n.endswith(lora.B)}
    assert all(g is not None and g.abs().sum() > 0 for g in grads.values())


def test_the_formula() -> None:
    network = adapted(spec=LoRASpec(r=3, alpha=6.0, targets=["v"]))
    layer = network.blocks[1].attention.v
    x = torch.randn(4, 32)
    expected = x @ layer.weight.T + 2.0 * (x @ layer.lora_a.T) @ layer.lora_b.T
    assert_close(layer(x, None), expected)


def test_off_is_the_base_and_on_again_is_not() -> None:
    network = adapted()
    base = tiny()
    on = logits(network)
    with lora.adapters_off(network):
        assert torch.equal(logits(network), logits(base))
    assert torch.equal(logits(network), on) and not torch.allclose(on, logits(base), atol=0.1)


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "qwen3_moe"])
def test_merged_is_adapted(name: str) -> None:
    network = adapted(name)
    merged = hf_io.init_random(network.config, seed=0)
    merged.load_state_dict(lora.merge(dict(network.named_parameters()), lora.scales(network)))
    assert_close(logits(merged), logits(network))


def test_targets() -> None:
    network = tiny("gpt2")
    lora.attach(network, LoRASpec(r=2, targets=["q", "down"]))
    assert {n.rsplit(".", 1)[1] for n in lora.scales(network)} == {"q", "down"}
    with pytest.raises(ConfigError, match=r"no layers 'gate'"):
        lora.attach(tiny("gpt2"), LoRASpec(r=2, targets=["gate"]))
    everything = tiny()
    lora.attach(everything, LoRASpec(r=2))
    assert len(lora.scales(everything)) == 7 * 3


def test_a_score_head_is_trained_in_full() -> None:
    network = adapted(head="score")
    assert network.score.weight.requires_grad and not network.norm.weight.requires_grad


def test_new_adapters_depend_on_seed_and_name() -> None:
    one, other, third = tiny(), tiny(), tiny()
    for network, seed in ((one, 1), (other, 1), (third, 2)):
        lora.attach(network, LoRASpec(r=2), seed=seed)
    assert torch.equal(one.blocks[0].mlp.up.lora_a, other.blocks[0].mlp.up.lora_a)
    assert not torch.equal(one.blocks[0].mlp.up.lora_a, third.blocks[0].mlp.up.lora_a)


# -- PEFT


FAMILIES = [("llama", {}), ("gpt2", {}), ("phi3", {}), ("gpt_neox", {}), ("gpt_bigcode", {}), ("opt", {}), ("gemma2", {}),
            ("mixtral", {}), ("qwen3_moe", {"mlp_only_layers": []})]  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(("name", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_peft_computes_what_weft_saved(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    network = adapted(name, **changes)
    base, adapter = save_both(network, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    assert not torch.allclose(theirs(ROW[None]).logits[0], logits(network), atol=0.1)
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    assert_close(wrapped(ROW[None]).logits[0].detach(), logits(network))
    again = hf_io.load(base)
    peft_io.load_adapter(adapter, again)
    assert torch.equal(logits(again), logits(network))
    for n, p in network.named_parameters():
        assert torch.equal(again.get_parameter(n), p), n


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "v_proj", "down_proj"]),
        ("gpt2", ["c_attn", "mlp.c_proj"]),
        ("phi3", ["qkv_proj", "gate_up_proj"]),
        ("gpt_neox", ["query_key_value", "dense"]),
    ],
)
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_weft_computes_what_peft_saved(name: str, targets: list[str], rank_stabilised: bool, tmp_path: Path) -> None:
    base = tiny(name)
    hf_io.save(tmp_path / "base", dict(base.named_parameters()), base.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    settings = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, use_rslora=rank_stabilised,
        alpha_pattern={targets[0]: 3}, fan_in_fan_out=name == "gpt2",
    )  # fmt: skip
    wrapped = peft.get_peft_model(model, settings).eval()
    wrapped.save_pretrained(tmp_path / "adapter")
    network = hf_io.load(tmp_path / "base")
    peft_io.load_adapter(tmp_path / "adapter", network)
    assert_close(logits(network), wrapped(ROW[None]).logits[0].detach())
    assert not torch.allclose(logits(network), logits(base), atol=1e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::FutureWarning")
def test_a_reward_model_with_adapters(tmp_path: Path) -> None:
    network = adapted(head="score")
    base, adapter = save_both(network, tmp_path)
    with torch.no_grad():
        network.score.weight.add_(1.0)  # trained after the base was written
    save = dict(network.named_parameters())
    peft_io.save_adapter(adapter, save, lora.scales(network), network.config, "score", base=str(base))
    scores = network(pack([ROW]), frozenset({"scores"}))["scores"]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(base, attn_implementation="eager")
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    assert_close(wrapped(ROW[None]).logits[0], scores)
    again = hf_io.load(base, "score")
    peft_io.load_adapter(adapter, again)
    assert_close(again(pack([ROW]), frozenset({"scores"}))["scores"], scores)


def test_adapters_that_weft_does_not_compute_are_refused(tmp_path: Path) -> None:
    network = adapted()
    base, adapter = save_both(network, tmp_path)
    with pytest.raises(CheckpointError, match=r"no adapter_config.json"):
        peft_io.load_adapter(base, hf_io.load(base))
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    for key, value, said in (("use_dora", True, "use_dora"), ("bias", "all", "bias"), ("peft_type", "IA3", "IA3"),
                             ("task_type", "SEQ_2_SEQ_LM", "SEQ_2_SEQ_LM")):  # fmt: skip
        file.write_text(json.dumps({**settings, key: value}))
        with pytest.raises(CheckpointError, match=said):
            peft_io.load_adapter(adapter, hf_io.load(base))
    file.write_text(json.dumps(settings))
    fewer = tiny(num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"layers\.2.*no layer"):
        peft_io.load_adapter(adapter, fewer)
