"""Linear layers, fused if they have the same input, and a network's parameters by canonical name.

    Linear(hidden, {"q": 512, "k": 128, "v": 128}, bias=True)    # one product for three layers

The parameter with the canonical name `attention.q.weight` is then rows 0 to 511 of
`attention.qkv.weight`; `find_canonical_parameters` finds these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft import kernels
from weft.kernels import Activation, GradientSum, NarrowProduct
from weft.models.network import quantized
from weft.models.network.dropout import TokenDropout
from weft.models.network.quantized import Quantized

# Sums to which the gradients of A and B are added, instead of to their `grad`.
Sums = tuple[GradientSum | None, GradientSum | None]


class Adapter(nn.Module):
    """Low-rank adapter of a linear layer or of a stack of experts: y += scale B A drop(x).

    See Hu et al. 2021, "LoRA", section 4.1.
    """

    def __init__(self, weight: Tensor, r: int, scale: float, rate: float, place: int) -> None:
        """Create an adapter for `weight` [out, in], or [experts, out, in] for a stack of experts.

        `r` is the rank of the adapter, and `rate` is its dropout rate. `place` is the index of the
        adapter's dropout among all dropouts of the layer (see `weft.models.network.dropout`). The
        attribute `channel` is the index of the first input channel in the masks of this dropout.
        """
        super().__init__()
        self.channel = 0
        self.scale = scale
        self.rate = rate
        self.place = place
        self.active = True
        self.gradient_sums: Sums = (None, None)
        *leading_sizes, outputs, inputs = weight.shape
        self.lora_a = nn.Parameter(weight.new_empty(*leading_sizes, r, inputs))
        self.lora_b = nn.Parameter(weight.new_zeros(*leading_sizes, outputs, r))

    def apply_dropout(self, x: Tensor, dropout: TokenDropout | None) -> Tensor | None:
        """Return x after the adapter's dropout, or None if there is no dropout."""
        if dropout is None or self.rate == 0.0:
            return None
        return dropout.drop_at(x, self.rate, self.place, self.channel)


def apply_adapter(
    x: Tensor,
    dropped: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    sums: Sums = (None, None),
) -> Tensor:
    """Return W x + bias + scale B A y, [T, out], for x [T, in] and y = `dropped` [T, in].

    A is `a` [r, in], and B is `b` [out, r]. If `dropped` is None, y is x. W and the bias are
    frozen. If the first element of `sums` is not None, the gradient of A is added to it; the second
    element does the same for B.
    """
    if torch.compiler.is_compiling():
        low_rank = nn.functional.linear(x if dropped is None else dropped, a)
        return nn.functional.linear(x, weight, bias) + scale * nn.functional.linear(low_rank, b)
    y: Tensor = _AdaptedLinear.apply(x, dropped, weight, bias, a, b, (scale, sums))
    return y


class Linear(nn.Module):
    """One linear layer, or several fused layers with the same input: [T, in] -> [T, sum of out].

    Attributes:
        parts: Output size of each fused layer, by the name of the layer.
        adapters: Adapter of each fused layer that has one, by the name of the layer.
        narrow: Function that computes the product in compiled passes, for example in fp8; None if
            torch computes it.
        gradient_sum: Sum to which the weight's gradient is added; None if the gradient is added to
            the weight's `grad` as usual.
    """

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool) -> None:
        super().__init__()
        self.parts = dict(parts)
        outputs = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapters = nn.ModuleDict()
        self.narrow: NarrowProduct | None = None
        self.gradient_sum: GradientSum | None = None

    def forward(
        self, x: Tensor, dropout: TokenDropout | None = None, *, biased: bool = True
    ) -> Tensor:
        """Return the output [T, out] for x [T, in]; without `biased`, the bias is left out."""
        bias = self.bias if biased else None
        if len(self.adapters):
            return self._apply_adapters(x, bias, dropout)
        if self.narrow is not None and torch.compiler.is_compiling():
            output = self.narrow(x, self.weight)
            return output if bias is None else output + bias
        if self.is_quantized:
            return quantized.linear(x, self.weight, bias)
        return kernels.linear(x, self.weight, bias, self.gradient_sum)

    @property
    def is_quantized(self) -> bool:
        """True if the matrix is quantized."""
        return isinstance(self.weight, Quantized)

    def find_rows(self, part: str) -> slice:
        """Return the rows of the matrix that belong to the fused layer `part`, such as "q"."""
        names = list(self.parts)
        start = sum(self.parts[name] for name in names[: names.index(part)])
        return slice(start, start + self.parts[part])

    def find_adapter(self, part: str) -> Adapter | None:
        """Return the adapter of the fused layer `part`, such as "q", or None if it has none."""
        adapter = self.adapters[part] if part in self.adapters else None  # noqa: SIM401 - a ModuleDict has no `get`
        assert adapter is None or isinstance(adapter, Adapter)
        return adapter

    def _apply_adapters(
        self, x: Tensor, bias: Tensor | None, dropout: TokenDropout | None
    ) -> Tensor:
        """Return the concatenated outputs of all fused layers, adapters included, [T, width].

        Each layer is computed separately, so that its output does not depend on whether the other
        layers have adapters.
        """
        outputs = []
        for part in self.parts:
            weight = self.weight[self.find_rows(part)]
            part_bias = None if bias is None else bias[self.find_rows(part)]
            adapter = self.find_adapter(part)
            if adapter is not None and adapter.active:
                dropped = adapter.apply_dropout(x, dropout)
                a = adapter.lora_a
                b = adapter.lora_b
                outputs.append(
                    apply_adapter(
                        x, dropped, weight, part_bias, a, b, adapter.scale, adapter.gradient_sums
                    )
                )
            elif isinstance(weight, Quantized):
                outputs.append(quantized.linear(x, weight, part_bias))
            else:
                outputs.append(kernels.linear(x, weight, part_bias))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


class DownLinear(Linear):
    """Last layer of an MLP, which also applies the activation function.

    Its matrix is multiplied by activation(gate) * up, or by activation(up) without a gate. The
    input of the activation is saved for the backward pass, which computes the activation again.
    """

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, gated: bool, activation: Activation
    ) -> None:
        super().__init__(inputs, {"down": outputs}, bias=bias)
        self.gated = gated
        self.activation = activation

    def forward(
        self, x: Tensor, dropout: TokenDropout | None = None, *, biased: bool = True
    ) -> Tensor:
        """Return the output of the MLP, [T, out]; without `biased`, the bias is left out.

        x is the input of the activation function: up [T, in] or, with a gate, gate and up side by
        side [T, 2 in].
        """
        uses_narrow = self.narrow is not None and torch.compiler.is_compiling()
        if len(self.adapters) or self.is_quantized or uses_narrow:
            activated = kernels.activated(x, self.gated, self.activation)
            return super().forward(activated, dropout, biased=biased)
        bias = self.bias if biased else None
        return kernels.activated_linear(
            x, self.gated, self.weight, bias, self.activation, self.gradient_sum
        )


class _AdaptedLinear(torch.autograd.Function):
    """Autograd function behind `apply_adapter`.

    For the backward pass, it saves the input of the adapter, [T, in], and the product of this input
    with the adapter's first matrix, [T, r].
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        settings: tuple[float, Sums],
    ) -> Tensor:
        scale, ctx.sums = settings
        adapter_input = x if dropped is None else dropped
        low_rank = kernels.product(adapter_input, a).mul_(scale)
        out = kernels.product(x, quantized.dequantize(weight), bias)
        kernels.add_product(out, low_rank, b)
        ctx.save_for_backward(adapter_input, weight, a, b, low_rank)
        ctx.scale = scale
        ctx.has_dropped_input = dropped is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        adapter_input, weight, a, b, low_rank = ctx.saved_tensors
        grad_out = gradients[0]
        needed = ctx.needs_input_grad
        assert not needed[2] and not needed[3], "the base is frozen"
        grad_low = kernels.product(grad_out, b.T).mul_(ctx.scale)
        if needed[0]:
            grad_x = kernels.product(grad_out, quantized.dequantize(weight).T)
        else:
            grad_x = None
        grad_dropped = kernels.product(grad_low, a.T) if needed[1] else None
        if grad_x is not None and not ctx.has_dropped_input:
            kernels.add_product(grad_x, grad_low, a.T)
        if needed[4]:
            grad_a = kernels.compute_weight_gradient(grad_low.T, adapter_input.T, ctx.sums[0])
        else:
            grad_a = None
        if needed[5]:
            grad_b = kernels.compute_weight_gradient(grad_out.T, low_rank.T, ctx.sums[1])
        else:
            grad_b = None
        return grad_x, grad_dropped, None, None, grad_a, grad_b, None


@dataclass(frozen=True)
class StoredParameter:
    """Location of a canonical parameter in the network.

    The network can store several canonical parameters as one. For example, the canonical parameters
    `q.weight`, `k.weight` and `v.weight` of an attention layer are rows of the stored parameter
    `qkv.weight`.

    Attributes:
        name: Name of the stored parameter in the network.
        parameter: The stored parameter.
        rows: Rows of the stored parameter that are the canonical parameter; None means all rows.
    """

    name: str
    parameter: nn.Parameter
    rows: slice | None = None

    @property
    def data(self) -> Tensor:
        """Values of the canonical parameter, as a view without a gradient."""
        return self.select_rows(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """Gradient of the canonical parameter, as a view, or None if it has not been computed."""
        return None if self.parameter.grad is None else self.select_rows(self.parameter.grad)

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    def select_rows(self, values: Tensor) -> Tensor:
        """Return the rows of `values` in `rows`, or `values` itself if `rows` is None.

        `values` has the shape of the stored parameter, and is for example its gradient.
        """
        return values if self.rows is None else values[self.rows]


def find_canonical_parameters(network: nn.Module) -> dict[str, StoredParameter]:
    """Return the location of every parameter by canonical name; tied parameters are listed once.

    Parameters outside of weft's modules have the same name in the network as their canonical name.
    """
    parameters: dict[str, StoredParameter] = {}
    seen: set[tuple[int, int]] = set()
    for path, module in network.named_modules():
        for name, stored in _iterate_module(path, module):
            key = id(stored.parameter), 0 if stored.rows is None else stored.rows.start
            if key not in seen:
                seen.add(key)
                parameters[name] = stored
    layers = getattr(network, "held_layers", None)
    if layers is None:
        return parameters
    return {number_block(name, layers): stored for name, stored in parameters.items()}


def find_canonical_values(network: nn.Module) -> dict[str, Tensor]:
    """Return the values of every parameter by canonical name, as views without gradients."""
    return {name: stored.data for name, stored in find_canonical_parameters(network).items()}


def _iterate_module(path: str, module: nn.Module) -> Iterator[tuple[str, StoredParameter]]:
    """Yield (canonical name, location) of the parameters of the module at `path`, but not below it.

    The parameters of adapters are listed with their layers.
    """
    if isinstance(module, Adapter):
        return
    if isinstance(module, Linear):
        parent = path.rpartition(".")[0]
        for part in module.parts:
            yield from _iterate_part(f"{parent}.{part}".lstrip("."), path, module, part)
        return
    for local_name, parameter in module.named_parameters(recurse=False):
        name = f"{path}.{local_name}".lstrip(".")
        yield name, StoredParameter(name, parameter)
    adapter = getattr(module, "adapter", None)
    if isinstance(adapter, Adapter):
        yield from _iterate_adapter(path, f"{path}.adapter", adapter)


def _iterate_part(
    name: str, path: str, module: Linear, part: str
) -> Iterator[tuple[str, StoredParameter]]:
    """Yield the parameters of the fused layer `part` of a module; `name` is the layer's name."""
    rows = module.find_rows(part) if len(module.parts) > 1 else None
    yield f"{name}.weight", StoredParameter(f"{path}.weight", module.weight, rows)
    if module.bias is not None:
        yield f"{name}.bias", StoredParameter(f"{path}.bias", module.bias, rows)
    if (adapter := module.find_adapter(part)) is not None:
        yield from _iterate_adapter(name, f"{path}.adapters.{part}", adapter)


def _iterate_adapter(
    name: str, path: str, adapter: Adapter
) -> Iterator[tuple[str, StoredParameter]]:
    for matrix in ("lora_a", "lora_b"):
        yield f"{name}.{matrix}", StoredParameter(f"{path}.{matrix}", getattr(adapter, matrix))


def number_block(name: str, layers: Sequence[int] | None) -> str:
    """Return `name` with the local index of its block replaced by the index in the whole network.

    `layers` are the indices of the local blocks in the whole network. If it is None, the name is
    returned unchanged.
    """
    parts = name.split(".")
    if layers is not None and parts[0] == "blocks" and len(parts) > 1:
        parts[1] = str(layers[int(parts[1])])
    return ".".join(parts)
