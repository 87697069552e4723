"""Low-rank adapters on a `transformers` module (Hu et al. 2021, "LoRA", section 4.1).

An adapted layer computes y = W x + scale B A drop(x), where W is frozen. Targets are the names of
linear layers in the module (`q_proj`, `query_key_value`, ...). If no targets are set, all linear
layers except the output layer are adapted. `weft.models.network.lora` does the same for weft's
decoder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import randomness
from weft.engine import checkpoint
from weft.engine.hf.imported import Conv1D, PreTrainedModel
from weft.engine.spec import LoRASpec
from weft.errors import ConfigError, find_nearest
from weft.models.network.lora import merge_weight
from weft.writing import write

BASE = ".base"  # part that wrapping adds to a parameter's name


class HFAdaptedLinear(nn.Module):
    """Linear layer with an adapter.

    The base layer is an `nn.Linear`, or GPT-2's transposed `Conv1D`. The attributes `weight` and
    `bias` are those of the base layer, because code of the model may access them.
    """

    def __init__(self, base: nn.Linear | Conv1D, r: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.dropout = dropout
        self.active = True
        self.transposed = isinstance(base, Conv1D)
        inputs, outputs = base.weight.shape if self.transposed else base.weight.shape[::-1]
        self.lora_a = nn.Parameter(base.weight.new_empty(r, inputs))
        self.lora_b = nn.Parameter(base.weight.new_zeros(outputs, r))

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if not self.active:
            return y
        return y + self.scale * F.linear(
            F.linear(F.dropout(x, self.dropout, self.training), self.lora_a), self.lora_b
        )

    def merge_weight(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the sum of the base layer's weight and the scaled product of `b` and `a`."""
        weight = self.base.weight.detach()
        if self.transposed:
            return merge_weight(weight.T, a, b, self.scale).T.contiguous()
        return merge_weight(weight, a, b, self.scale)


def attach(module: PreTrainedModel, spec: LoRASpec, *, seed: int) -> None:
    """Add adapters to the target layers, and freeze everything else except a value or score head.

    Matrix A is drawn uniformly between -1/sqrt(in) and 1/sqrt(in), with random numbers that depend
    only on `seed` and the layer's name; B is 0. Raises `ConfigError` for a target that the module
    lacks.
    """
    output = module.get_output_embeddings()
    layers = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output and "." in name:
            layers[name] = layer
    held = {name.rsplit(".", 1)[1] for name in layers}
    for target in spec.targets:
        if target not in held:
            raise ConfigError(
                f"lora.targets: this {module.config.model_type} module has no linear layers "
                f"{target!r}; "
                f"it has {', '.join(find_nearest(target, held) or sorted(held))}"
            )
    module.requires_grad_(False)
    for name, layer in layers.items():
        parent, own = name.rsplit(".", 1)
        if spec.targets and own not in spec.targets:
            continue
        adapted = HFAdaptedLinear(layer, spec.r, spec.alpha / spec.r, spec.dropout)
        low, high = randomness.derive_key(seed, "init", id=f"{name}.lora_a")
        generator = torch.Generator().manual_seed(int(low) | int(high) << 32)
        drawn = torch.rand(adapted.lora_a.shape, generator=generator) * 2 - 1
        with torch.no_grad():
            adapted.lora_a.copy_(drawn / math.sqrt(adapted.lora_a.shape[1]))
        setattr(module.get_submodule(parent), own, adapted)
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and child is not output and "." not in name:
            child.requires_grad_(True)


@contextmanager
def disable_adapters(module: nn.Module) -> Iterator[None]:
    """Disable the adapters within the context, so that the module behaves like its base model."""
    adapted = []
    for layer in module.modules():
        if isinstance(layer, HFAdaptedLinear):
            adapted.append(layer)
    for layer in adapted:
        layer.active = False
    try:
        yield
    finally:
        for layer in adapted:
            layer.active = True


def merge_state(module: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's state dict with the adapters merged into the weights.

    The names are those of the base model. `tensors` maps the names of the adapters' parameters to
    their unrounded values.
    """
    state = {}
    for name, value in module.state_dict().items():
        if not name.endswith((".lora_a", ".lora_b")):
            state[name.replace(f"{BASE}.", ".")] = value
    for name, layer in module.named_modules():
        if isinstance(layer, HFAdaptedLinear):
            state[f"{name}.weight"] = layer.merge_weight(
                tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
            )
    return state


def save_adapter(
    directory: Path,
    module: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    spec: LoRASpec,
    base: str,
) -> None:
    """Write an adapter as PEFT does: `adapter_model.safetensors` and `adapter_config.json`.

    `tensors` maps the module's parameter names to values.
    """
    directory.mkdir(parents=True, exist_ok=True)
    adapted = {}
    for name, layer in module.named_modules():
        if isinstance(layer, HFAdaptedLinear):
            adapted[name] = layer
    held: dict[str, Tensor] = {}
    for name in adapted:
        held[f"base_model.model.{name}.lora_A.weight"] = tensors[f"{name}.lora_a"]
        held[f"base_model.model.{name}.lora_B.weight"] = tensors[f"{name}.lora_b"]
    heads = []
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and child.out_features == 1:
            heads.append(name)
    for name in heads:
        held[f"base_model.model.{name}.weight"] = tensors[f"{name}.weight"]
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if heads else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": spec.r,
        "lora_alpha": spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(adapted),
        "modules_to_save": heads or None,
        "fan_in_fan_out": any(layer.transposed for layer in adapted.values()),
        "bias": "none",
        "inference_mode": True,
    }
    checkpoint.write_tensors(directory / "adapter_model.safetensors", held)
    write(directory / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True) + "\n")
