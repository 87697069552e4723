"""The loss that balances experts: what it is, and that its gradient depends on the sequences alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.engine.common import EXACT, Nll, batch_of, engine_of
from tests.tiny import make_llama, make_tokenizer
from weft.checkpoints import hf_io
from weft.engine.base import DEFAULT_MAX_TOKENS
from weft.engine.spec import OptimizerSpec
from weft.errors import ConfigError
from weft.models.network.moe import MoE, MoEAuxLoss, choose_aux_loss_weight
from weft.models.network.packed import pack

SGD = OptimizerSpec(
    type="sgd", lr=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0
)
GROUPS = [(3, [4, 2]), (0, [6]), (5, [1, 3, 2]), (2, [5])]


def make_mixtral(directory: Path, **changes: Any) -> Path:
    tokenizer = make_tokenizer(directory)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=len(tokenizer), **{**shape, **changes})
    MixtralForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(tmp_path_factory.mktemp("mixtral"))


def trained(
    path: Path, budget: int = DEFAULT_MAX_TOKENS, **changes: Any
) -> tuple[dict[str, torch.Tensor], Any]:
    engine = engine_of(path, optimizer=SGD, dtype="float64", **changes)
    [stats] = engine.train([batch_of(GROUPS)], Nll(), max_tokens=budget)
    return {name: values.clone() for name, _, values in engine.read(list(engine.slices()))}, stats


@pytest.mark.usefixtures("float64_throughout")
def test_one_sequence_and_one_layer_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_mixtral(tmp_path, num_hidden_layers=1)
    # 32, since `transformers` divides by their number in float32 whatever the network's dtype
    tokens = torch.arange(10, 42)
    theirs = MixtralForCausalLM.from_pretrained(
        path, dtype=torch.float64, experts_implementation="eager"
    )
    found = theirs(
        tokens[None], output_router_logits=True, attention_mask=torch.ones(1, len(tokens))
    ).aux_loss
    found.backward()
    ours = hf_io.load(str(path), "lm", dtype=torch.float64).requires_grad_(True)
    packed = pack([tokens])
    balance = MoEAuxLoss(packed.attention.dense.lengths)
    ours(replace(packed, aux_loss=balance), frozenset({"logprobs"}))
    (value,) = balance.compute_by_sequence()
    value.backward()
    torch.testing.assert_close(value, found, **EXACT)
    gate = next(p for name, p in theirs.named_parameters() if name.endswith("gate.weight"))
    torch.testing.assert_close(ours.blocks[0].mlp.router.weight.grad, gate.grad, **EXACT)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_load_of_the_busiest_expert_is_measured(path: Path, recompute: bool) -> None:
    """In each layer and micro-batch, four experts have half of the tokens each, on average."""
    engine = engine_of(path, optimizer=SGD, gradient_checkpointing=recompute)
    found: list[float] = []

    def count(router: Any, given: Any, logits: torch.Tensor) -> None:
        tokens = logits.topk(2, dim=-1).indices.flatten().bincount(minlength=4)
        found.append(float(tokens.max()) / (len(logits) * 2 / 4))

    for module in engine._network.modules():
        if isinstance(module, MoE):
            module.router.register_forward_hook(count)
    [stats] = engine.train([batch_of(GROUPS)], Nll(), max_tokens=16)
    assert len(found) >= 4
    assert stats.metrics["expert_load"] == pytest.approx(sum(found) / len(found), rel=1e-6)
    engine.train([batch_of(GROUPS)], Nll(), max_tokens=16)
    assert not any(module.loads for module in engine._network.modules() if isinstance(module, MoE))


def test_a_network_without_experts_has_no_load(tmp_path: Path) -> None:
    engine = engine_of(make_llama(tmp_path / "llama"), optimizer=SGD)
    [stats] = engine.train([batch_of(GROUPS)], Nll())
    assert "expert_load" not in stats.metrics


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("budget", [10, 16, 25])
def test_the_gradient_does_not_depend_on_the_cut(path: Path, budget: int) -> None:
    whole, one = trained(path, router_aux_loss_coef=0.5)
    cut, other = trained(path, budget, router_aux_loss_coef=0.5)
    without, _ = trained(path)
    assert one.metrics["balance_loss"] == pytest.approx(other.metrics["balance_loss"], rel=1e-12)
    assert one.metrics["loss"] == pytest.approx(
        one.metrics["nll"] + 0.5 * one.metrics["balance_loss"], rel=1e-12
    )
    for name, values in whole.items():
        torch.testing.assert_close(values, cut[name], **EXACT)
    router = "blocks.0.mlp.router.weight"
    assert not torch.allclose(whole[router], without[router]), "the balance moves the router"


@pytest.mark.usefixtures("float64_throughout")
def test_recomputed_layers_give_the_same_gradient(path: Path) -> None:
    kept, _ = trained(path, router_aux_loss_coef=0.5)
    recomputed, _ = trained(path, router_aux_loss_coef=0.5, gradient_checkpointing=True)
    for name, values in kept.items():
        torch.testing.assert_close(values, recomputed[name], **EXACT)


def test_the_weight_is_the_options_or_the_models(tmp_path: Path, path: Path) -> None:
    plain = hf_io.read_config(str(path))[1]
    asking = hf_io.read_config(
        str(make_mixtral(tmp_path, output_router_logits=True, router_aux_loss_coef=0.02))
    )[1]
    assert [choose_aux_loss_weight(plain, None), choose_aux_loss_weight(asking, None)] == [
        0.0,
        0.02,
    ]
    assert [choose_aux_loss_weight(plain, 0.1), choose_aux_loss_weight(asking, 0.0)] == [0.1, 0.0]
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.1: .* a mixtral model has none"):
        choose_aux_loss_weight(replace(plain, experts=None), 0.1)
    with pytest.raises(ConfigError, match="backend=hf adds no loss"):
        engine_of(path, backend="hf", router_aux_loss_coef=0.1)
