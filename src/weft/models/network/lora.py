"""Low-rank adapters: y = W x + scale B A drop(x), with W frozen.

See Hu et al. 2021, "LoRA", section 4.1. Adapters are never merged in training.

    attach(network, r=8, alpha=16, seed=1)     # freezes the base and adds `lora_a` and `lora_b`
    with disable_adapters(network): ...        # the base model: the reference of a LoRA actor
    merged = merge(parameters, collect_scales(network))    # parameters with B A added, for saving

A layer with an adapter keeps the canonical names of its weight and bias. The adapter adds
`{layer}.lora_a` [r, in] and `{layer}.lora_b` [out, r], which have an additional first dimension for
experts. The scale is alpha / r. Dropout of the adapter's input is derived from the pack's dropout
keys (`weft.models.network.dropout`), so it is the same after a restart and for any packing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft import randomness
from weft.errors import ConfigError, find_nearest
from weft.models.network.dropout import ADAPTERS
from weft.models.network.linear import Adapter, Linear, find_canonical_parameters, number_block
from weft.models.network.moe import ExpertStack
from weft.models.network.prefix import PrefixKeysValues

# Canonical names of the linear layers of a block.
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
A = "lora_a"
B = "lora_b"


def attach(
    network: nn.Module,
    *,
    r: int,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    seed: int = 0,
) -> None:
    """Add adapters of rank `r` to a network, and freeze the other parameters.

    `targets` are the names of the layers that get adapters, by default `TARGETS`. A value or score
    head is not frozen. If x is the input of a layer, its adapter adds alpha / r * B A x to the
    output. A is uniform in +-1/sqrt(in) and depends only on `seed` and the name of the parameter. B
    is 0, so the outputs of the network do not change. Raises `ConfigError` for a target that the
    network lacks.
    """
    add(network, r=r, alpha=alpha, dropout=dropout, targets=targets)
    for name, stored in find_canonical_parameters(network).items():
        if is_adapter(name):
            with torch.no_grad():
                stored.parameter.copy_(
                    draw_initial_values(name, tuple(stored.parameter.shape), seed)
                )


def add(
    network: nn.Module, *, r: int, alpha: float, dropout: float, targets: Sequence[str] = ()
) -> None:
    """Add adapters as `attach` does, but leave `lora_a` uninitialized.

    Use this if the values of `lora_a` are set afterwards.
    """
    layers = list(_find_layers(network))
    available = {name.rsplit(".", 1)[1] for name in layers}
    for target in targets:
        if target not in available:
            names = ", ".join(find_nearest(target, available) or sorted(available))
            raise ConfigError(
                f"lora.targets: this network has no layers {target!r}; it has {names}"
            )
    layer_names = []
    for name in layers:
        if name.rsplit(".", 1)[1] in (targets or TARGETS):
            layer_names.append(name)
    attach_ranks(network, dict.fromkeys(layer_names, (r, alpha / r)), dropout)


def draw_initial_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of the adapter parameter `name`, in float32.

    The values depend only on the name, the shape and the seed.
    """
    if name.endswith(B):
        return torch.zeros(shape)
    low, high = randomness.derive_key(seed, "init", id=name)
    generator = torch.Generator().manual_seed(int(low) | int(high) << 32)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float32)
    return (uniform * 2 - 1) / math.sqrt(shape[-1])


def attach_ranks(
    network: nn.Module, ranks: Mapping[str, tuple[int, float]], dropout: float
) -> None:
    """Add an adapter to each layer named in `ranks` and freeze the rest of the network.

    `ranks` maps the canonical name of a layer to the rank and scale of its adapter. `lora_a` is
    left uninitialized, because its values are set later. A value or score head is not frozen.
    """
    network.requires_grad_(False)
    for name, parameter in network.named_parameters():
        if name == "score.weight":
            parameter.requires_grad_(True)
    for name, (module, part) in _find_layers(network).items():
        if name not in ranks:
            continue
        rank, scale = ranks[name]
        place = ADAPTERS + TARGETS.index(name.rsplit(".", 1)[1])
        if isinstance(module, Linear):
            module.adapters[part] = Adapter(
                module.weight[module.find_rows(part)], rank, scale, dropout, place
            )
        else:
            module.adapter = Adapter(module.weight, rank, scale, dropout, place)


def _find_layers(network: nn.Module) -> dict[str, tuple[Linear | ExpertStack, str]]:
    """Return the layers that can have an adapter, as pairs (module, part) by canonical name.

    `part` is the layer's name within a fused `Linear` module, and empty for a stack of experts.
    """
    layers: dict[str, tuple[Linear | ExpertStack, str]] = {}
    for path, module in network.named_modules():
        name = number_block(path, getattr(network, "held_layers", None))
        if not name.startswith("blocks."):
            continue
        if isinstance(module, Linear):
            parent = name.rpartition(".")[0]
            for part in module.parts:
                if part in TARGETS:
                    layers[f"{parent}.{part}"] = (module, part)
        elif isinstance(module, ExpertStack):
            layers[name] = (module, "")
    return layers


def find_adapters(network: nn.Module) -> dict[str, Adapter]:
    """Return the adapters of the network by the canonical names of their layers."""
    adapters = {}
    for name, (module, part) in _find_layers(network).items():
        if isinstance(module, ExpertStack):
            adapter = module.adapter
        else:
            adapter = module.find_adapter(part)
        if adapter is not None:
            adapters[name] = adapter
    return adapters


def list_adapters(layer: Linear) -> list[Adapter]:
    """Return the adapters of all linear layers that are fused in `layer`."""
    adapters: list[Adapter] = []
    for adapter in layer.adapters.values():
        if isinstance(adapter, Adapter):
            adapters.append(adapter)
    return adapters


@contextmanager
def disable_adapters(network: nn.Module) -> Iterator[None]:
    """Disable all adapters and prefixes in a `with` block, so that the network is the base model."""
    modules = [m for m in network.modules() if isinstance(m, Adapter | PrefixKeysValues)]
    for module in modules:
        module.active = False
    try:
        yield
    finally:
        for module in modules:
            module.active = True


def collect_scales(network: nn.Module) -> dict[str, float]:
    """Return the scale of each adapter by the canonical name of its layer."""
    return {name: adapter.scale for name, adapter in find_adapters(network).items()}


def is_adapter(name: str) -> bool:
    """Return whether the parameter with this name belongs to an adapter."""
    return name.endswith((f".{A}", f".{B}"))


def merge(parameters: Mapping[str, Tensor], scales: Mapping[str, float]) -> Mapping[str, Tensor]:
    """Return the canonical parameters with the adapters merged: weight + scale B A.

    A merged weight is computed when it is read. Only the last one is cached, because the matrices
    of all experts are read from the same parameter, one after the other. See `merge_weight` for the
    dtypes.
    """
    return _MergedParameters(parameters, scales)


class _MergedParameters(Mapping[str, Tensor]):
    """Result of `merge`."""

    def __init__(self, parameters: Mapping[str, Tensor], scales: Mapping[str, float]) -> None:
        self._parameters = parameters
        self._scales = scales
        self._names = [name for name in parameters if not is_adapter(name)]
        self._last: tuple[str, Tensor] | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if is_adapter(name):
            raise KeyError(name)
        if self._last is None or self._last[0] != name:
            self._last = None  # free the last weight before the next one is computed
            self._last = name, self._compute(name)
        return self._last[1]

    def _compute(self, name: str) -> Tensor:
        layer = name.removesuffix(".weight")
        scale = self._scales.get(layer)
        if scale is None or not name.endswith(".weight"):
            return self._parameters[name].detach()
        a, b = self._parameters[f"{layer}.{A}"], self._parameters[f"{layer}.{B}"]
        return merge_weight(self._parameters[name], a, b, scale)


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight + scale B A in the dtype of the weight.

    The sum is computed in the widest dtype of `weight`, `a` and `b`, at least float32.
    """
    dtype = functools.reduce(torch.promote_types, (weight.dtype, a.dtype, b.dtype), torch.float32)
    update = scale * (b.detach().to(dtype) @ a.detach().to(dtype))
    return (weight.detach().to(dtype) + update).to(weight.dtype)
