"""What trying a decoder out takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from weft.engine.hf.trial import _hold_float32, _iterate_blocks, try_out

LAYERS = 6
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": LAYERS,
    "n_positions": 64,
}


def decoder(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=dtype).eval()


def wide(module: nn.Module) -> int:
    """Bytes of float32 parameters that stand in for others."""
    return sum(4 * p.numel() for p in module.parameters() if p.dtype == torch.float32)


def most(module: Any, during: Callable[[], Any]) -> int:
    """The most of them while a block runs."""
    seen: list[int] = []
    handles = [
        inner.register_forward_hook(lambda *_: seen.append(wide(module)))
        for block in _iterate_blocks(module)
        for inner in block.children()
    ]
    during()
    for handle in handles:
        handle.remove()
    return max(seen)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bloom"])
def test_no_more_than_one_block_is_there_twice(kind: str) -> None:
    module = decoder(kind)
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    blocks = [sum(4 * p.numel() for p in block.parameters()) for block in _iterate_blocks(module)]
    assert len(blocks) == LAYERS
    whole = 4 * sum(p.numel() for p in module.parameters())
    assert most(module, lambda: try_out(module, "lm", 40)) == whole - sum(blocks) + max(blocks)
    for name, p in module.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]), name
    assert not any(
        block._forward_hooks or block._forward_pre_hooks for block in _iterate_blocks(module)
    )


def test_what_it_finds_is_what_float32_throughout_finds() -> None:
    module = decoder("llama")
    found = try_out(module, "lm", 40)
    again = try_out(decoder("llama", torch.float32), "lm", 40)
    assert found.shapes == again.shapes and len(found.callers) == LAYERS and found.reason is None


class Peeping(nn.Module):
    """Reads a block's weight from outside of it."""

    def __init__(self, inner: nn.Module, block: nn.Linear) -> None:
        super().__init__()
        self.inner, self.other = inner, [block]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.inner(x + torch.nn.functional.linear(x, self.other[0].weight), *args, **kwargs)


def test_a_block_that_others_read_is_float32_throughout() -> None:
    module = decoder("llama")
    layers = module.model.layers
    layers[0] = Peeping(layers[0], layers[3].self_attn.q_proj)
    with torch.no_grad(), pytest.raises(RuntimeError), _hold_float32(module, by_block=True):
        module(input_ids=torch.tensor([[1, 2, 3]]))
    assert try_out(module, "lm", 40).hidden_size == 64
    assert all(p.dtype == torch.bfloat16 for p in module.parameters())
