"""Where a network's passes go: in one call of the kernel only where somebody said that it computes
all that the modules do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from tests.engine.generation.common import CPU, LLAMA, build
from weft.engine.generation.passes import FIELD_RULES, DecoderPasses, supports_config
from weft.kernels import CachedForward, cpu_library
from weft.models.kv.slots import KVCache
from weft.models.network import lora
from weft.models.network.config import Experts, TransformerConfig
from weft.models.network.linear import find_canonical_values
from weft.models.network.transformer import Transformer

compiled = pytest.mark.skipif(
    cpu_library() is None, reason="no compiler: every pass goes module by module"
)
# Fields of which the kernel knows one value alone, with another value of each.
UNKNOWN = {
    "final_norm": False,
    "learned_positions": 512,
    "position_offset": 2,
    "norm_bias": True,
    "norm_weight": False,
    "attention_softcap": 30.0,
    "embed_scale": 2.0,
    "embed_dim": 12,
    "parallel_residual": True,
    "experts": Experts(4, 2, 8),
}
REFUSED = {
    "head_dim": 10_000,
    "norm": "layer",
    "placement": "post",
    "activation": "gelu",
    "gated": False,
    "qk_norm": "full",
}


def test_somebody_decided_on_every_field() -> None:
    names = {field.name for field in fields(TransformerConfig)}
    assert set(FIELD_RULES) | set(UNKNOWN) == names, (
        "add a new field to SERVED if the kernel computes it, to UNKNOWN if not"
    )
    assert not set(FIELD_RULES) & set(UNKNOWN)
    assert set(REFUSED) == {name for name, rule in FIELD_RULES.items() if rule is not None}


@pytest.mark.parametrize(("name", "value"), [*UNKNOWN.items(), *REFUSED.items()])
def test_one_value_that_the_kernel_does_not_compute_turns_it_off(name: str, value: Any) -> None:
    assert supports_config(LLAMA) and not supports_config(replace(LLAMA, **{name: value}))


@dataclass(frozen=True)
class Grown(TransformerConfig):
    novelty: float = 0.0


def test_a_field_that_nobody_decided_on_turns_it_off_where_it_is_used() -> None:
    grown = Grown(**{field.name: getattr(LLAMA, field.name) for field in fields(LLAMA)})
    assert supports_config(grown) and not supports_config(replace(grown, novelty=0.1))


def plain(network: Transformer) -> None:
    pass


def hooked(network: Transformer) -> None:
    network.blocks[1].mlp.down.register_forward_hook(lambda _, __, states: states * 2)


def hooked_before(network: Transformer) -> None:
    network.norm.register_forward_pre_hook(lambda _, given: (given[0] + 1,))


def adapted(network: Transformer) -> None:
    lora.attach(network, r=2, targets=["v"])
    for name, parameter in find_canonical_values(network).items():
        if name.endswith(lora.B):
            parameter.fill_(0.3)


def adapted_down(network: Transformer) -> None:
    lora.attach(network, r=2, targets=["down"])
    for name, parameter in find_canonical_values(network).items():
        if name.endswith(lora.B):
            parameter.fill_(0.3)


def reduced(network: Transformer) -> None:
    network.blocks[0].attention.o.register_forward_hook(lambda _, __, part: 2 * part)


class DoubledEmbedding(torch.nn.Module):
    def __init__(self, embed: torch.nn.Embedding) -> None:
        super().__init__()
        self.weight = embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.embedding(tokens, self.weight)


def embedded_by_ranks(network: Transformer) -> None:
    network.embed = DoubledEmbedding(network.embed)


def hidden(network: Transformer, through: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """Of two prompts, and of one more token each."""
    held = replace(network.config, num_layers=len(network.blocks))
    cache = KVCache(held, CPU, torch.float32, slots=2, room=16)
    slots = cache.allocate(2)
    prompts = [torch.tensor([7, 8, 9]), torch.tensor([10])]
    return [
        through(cache.extend(slots, prompts)),
        through(cache.extend(slots, torch.tensor([3, 4]))),
    ]


@compiled
@pytest.mark.parametrize(
    "change", [plain, hooked, hooked_before, adapted, adapted_down, reduced, embedded_by_ranks]
)
@torch.no_grad()
def test_what_modules_do_more_is_done(
    change: Callable[[Transformer], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, calls, run = build(dtype=torch.float32), list[int](), CachedForward.run
    monkeypatch.setattr(CachedForward, "run", lambda *given: (calls.append(1), run(*given))[1])
    before = hidden(network, network.compute_hidden)
    change(network)
    expected, found = (
        hidden(network, network.compute_hidden),
        hidden(network, DecoderPasses(network).compute_hidden),
    )
    assert len(calls) == (2 if change is plain else 0)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert change is plain or not torch.equal(found[1], before[1]), "the change shows"


@compiled
@torch.no_grad()
def test_a_part_of_the_layers_goes_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build(dtype=torch.float32)
    monkeypatch.setattr(CachedForward, "run", lambda *_: pytest.fail("the kernel ran"))
    part = Transformer(LLAMA, layers=range(1)).float()
    part.load_state_dict(
        {name: value for name, value in whole.state_dict().items() if name in part.state_dict()}
    )
    assert (
        part.is_first_stage
        and not part.is_last_stage
        and not DecoderPasses(part).supports_multi_step
    )
    pairs = zip(
        hidden(part, DecoderPasses(part).compute_hidden),
        hidden(part, part.compute_hidden),
        strict=True,
    )
    assert all(torch.equal(*pair) for pair in pairs)
