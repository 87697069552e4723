"""Low-rank adapters (Hu et al. 2021, "LoRA", section 4.1): y = W x + scale B A drop(x), W frozen; never merged in training.

    attach(network, spec, seed=1)          # a LoRASpec; freezes the base, adds `lora_a`, `lora_b` beside each `weight`
    with adapters_off(network): ...        # the base model: the reference of a LoRA actor
    merged = merge(parameters, scales(network))   # canonical parameters with B A added, for saving

A layer with an adapter keeps the canonical names of its weight and bias; the adapter adds `{layer}.lora_a` [r, in] and
`{layer}.lora_b` [out, r], with the number of experts in front for experts. scale = alpha / r. Dropout on the adapter's input
comes from the pack's noise (`weft.models.dropout`), so it repeats after a restart and does not depend on the packing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft import randomness
from weft.engine.spec import LoRASpec
from weft.errors import ConfigError, nearest
from weft.models.dropout import ADAPTERS, TokenNoise, site
from weft.models.products import add_product, linear, product

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # the linear layers of a block, by their canonical names
A, B = "lora_a", "lora_b"


class Adapted(nn.Module):
    """A linear layer, or the matrices of a stack of experts (weight [E, out, in]), with an adapter."""

    def __init__(self, base: nn.Module, r: int, scale: float, rate: float, site: int) -> None:
        super().__init__()
        weight, bias = base.weight, base.bias if isinstance(base, nn.Linear) else None
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.bias: nn.Parameter | None = bias
        self.scale, self.rate, self.site, self.active = scale, rate, site, True
        lead, (outputs, inputs) = weight.shape[:-2], weight.shape[-2:]
        self.lora_a = nn.Parameter(weight.new_empty(*lead, r, inputs))
        self.lora_b = nn.Parameter(weight.new_zeros(*lead, outputs, r))

    def forward(self, x: Tensor, noise: TokenNoise | None, sizes: list[int] | None = None) -> Tensor:
        """x [T, in] -> [T, out]; for experts `sizes[e]` rows, in order, go through expert e."""
        dropped = x if noise is None or not self.active else noise.drop(x, self.rate, self.site)
        if sizes is None:
            return self._one(x, dropped, self.weight, self.lora_a, self.lora_b)
        inputs = x.split(sizes)
        others = inputs if dropped is x else dropped.split(sizes)
        parts = zip(inputs, others, self.weight, self.lora_a, self.lora_b, strict=True)
        return torch.cat([self._one(*part) for part in parts if len(part[0])])

    def _one(self, x: Tensor, dropped: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if not self.active:
            return linear(x, weight, self.bias)
        own = None if dropped is x else dropped
        y: Tensor = _AdaptedLinear.apply(x, own, weight, self.bias, a, b, self.scale)
        return y


class _AdaptedLinear(torch.autograd.Function):
    """W x + bias + scale B A y for x and y [T, in] (y None: it is x); keeps x or y, and [T, r]. W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        source = x if y is None else y
        low = product(source, a).mul_(scale)
        out = product(x, weight, bias)
        add_product(out, low, b)
        ctx.save_for_backward(source, weight, a, b, low)
        ctx.scale, ctx.apart = scale, y is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (source, weight, a, b, low), by_out, needed = ctx.saved_tensors, gradients[0], ctx.needs_input_grad
        assert not needed[2] and not needed[3], "the base is frozen"
        by_low = product(by_out, b.T).mul_(ctx.scale)
        to_x = product(by_out, weight.T) if needed[0] else None
        to_y = product(by_low, a.T) if needed[1] else None
        if to_x is not None and not ctx.apart:
            add_product(to_x, by_low, a.T)
        to_a = product(by_low.T, source.T) if needed[4] else None
        to_b = product(by_out.T, low.T) if needed[5] else None
        return to_x, to_y, None, None, to_a, to_b, None


def attach(network: nn.Module, spec: LoRASpec, *, seed: int = 0) -> None:
    """Give the network's `spec.targets` adapters of rank `spec.r` and freeze everything else but a value or score head.

    A starts uniform in +-1/sqrt(in), from `seed` and the parameter's name alone; B starts at 0, so the network computes what
    it computed before. Raises `ConfigError` for a target that the network lacks.
    """
    targets = spec.targets or list(TARGETS)
    found = [name for name, _ in _layers(network) if name.rsplit(".", 1)[1] in targets]
    held = {name.rsplit(".", 1)[1] for name, _ in _layers(network)}
    for target in targets:
        if target not in held and spec.targets:
            near = nearest(target, held) or sorted(held)
            raise ConfigError(f"lora.targets: this network has no layers {target!r}; it has {', '.join(near)}")
    attach_ranks(network, dict.fromkeys(found, (spec.r, spec.alpha / spec.r)), spec.dropout)
    for name, parameter in network.named_parameters():
        if name.endswith(A):
            low, high = randomness.key(seed, "init", id=name)
            generator = torch.Generator().manual_seed(int(low) | int(high) << 32)
            drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float32) * 2 - 1
            with torch.no_grad():
                parameter.copy_(drawn / math.sqrt(parameter.shape[-1]))


def attach_ranks(network: nn.Module, ranks: Mapping[str, tuple[int, float]], dropout: float) -> None:
    """Adapters on the layers named, each of its (rank, scale); lora_a is left unfilled."""
    network.requires_grad_(False)
    for name, parameter in network.named_parameters():
        if name == "score.weight":
            parameter.requires_grad_(True)
    for name, layer in _layers(network):
        if name in ranks:
            parent, letter = name.rsplit(".", 1)
            rank, scale = ranks[name]
            place = site(int(name.split(".")[1]), ADAPTERS + TARGETS.index(letter))
            adapted = Adapted(layer, rank, scale, dropout, place)
            holder = network.get_submodule(parent)
            if isinstance(holder, nn.ModuleDict):
                holder[letter] = adapted
            else:
                setattr(holder, letter, adapted)


def _layers(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every layer of the blocks that can have an adapter."""
    return [(n, m) for n, m in network.named_modules() if n.startswith("blocks.") and n.rsplit(".", 1)[-1] in TARGETS]


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Within it the network computes what its base computes."""
    adapted = [module for module in network.modules() if isinstance(module, Adapted)]
    for module in adapted:
        module.active = False
    try:
        yield
    finally:
        for module in adapted:
            module.active = True


def scales(network: nn.Module) -> dict[str, float]:
    """Layer name -> scale, for every adapter."""
    return {name: module.scale for name, module in network.named_modules() if isinstance(module, Adapted)}


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def merge(parameters: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Canonical parameters without adapters: weight + scale B A, summed in float32, in the weight's dtype."""
    merged = {name: value.detach() for name, value in parameters.items() if not is_adapter(name)}
    for layer, scale in scales.items():
        weight = merged[f"{layer}.weight"]
        a, b = (parameters[f"{layer}.{part}"].detach().float() for part in (A, B))
        merged[f"{layer}.weight"] = (weight.float() + scale * (b @ a)).to(weight.dtype)
    return merged
