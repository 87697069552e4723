"""Accumulation of linear layers' gradients directly in the `grad` of float32 master weights."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from weft.kernels import GradientSum
from weft.models.network.block import Block
from weft.models.network.linear import Linear
from weft.models.network.lora import list_adapters
from weft.models.network.transformer import Transformer


def add_to(network: nn.Module, masters: Mapping[str, nn.Parameter]) -> None:
    """Make layers add their weight gradients to the `grad` of the float32 master weights `masters`.

    This applies to linear layers, their adapters and the output layer. `masters` maps the names of
    the network's parameters to the master weights. All other gradients are added to the `grad` of
    the network's own parameters as usual. For example, a tied matrix has two gradients: that of the
    output layer is added to the master weight, and that of the embedding to the parameter.

    In the compiled parts of blocks, autograd still computes the gradients. Do not use this if a
    backward pass visits a layer twice, as in a pipeline that splits the backward pass, because each
    visit would add the gradient.
    """
    sums: dict[Tensor, GradientSum] = {}
    for name, p in network.named_parameters():
        if name in masters:
            sums[p] = GradientSum(masters[name])
    compiled = set()
    for block in network.modules():
        if isinstance(block, Block) and block.compiled is not None:
            for part in block.modules():
                compiled.add(part)
    for module in network.modules():
        if isinstance(module, Linear) and module not in compiled:
            module.gradient_sum = sums.get(module.weight)
            for adapter in list_adapters(module):
                adapter.gradient_sums = sums.get(adapter.lora_a), sums.get(adapter.lora_b)
        elif isinstance(module, Transformer) and module.is_last_stage and module.kind == "lm":
            module.head.gradient_sum = sums.get(module.projection.weight)
