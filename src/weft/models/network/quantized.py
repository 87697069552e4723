"""Frozen matrices that are stored in 8 or 4 bits and multiplied in the network's dtype.

    quantize_matrices(layers, "4bit", torch.bfloat16)    # layers on the meta device, without memory
    dequantize(layer.weight)                             # [out, in] in bfloat16, for one product

With 8 bits, values are int8 with one scale per row (absmax / 127). With 4 bits, they are NF4 with
one float32 scale per 64 elements of a row (Dettmers et al. 2023, "QLoRA", section 3), computed by
`bitsandbytes`. Values are quantized when they are copied into a matrix, so loading never needs
memory for the whole unquantized network.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft import kernels

Kind = Literal["8bit", "4bit"]
LIBRARY = "bitsandbytes"  # computes 4-bit values
BLOCK = 64  # elements of a row that share a scale in 4 bits
INT8_MAX = 127
QUANT_TYPE = "nf4"
_aten = torch.ops.aten


class Quantized(Tensor):
    """Matrix [out, in] that is stored only in quantized form.

    It has the shape and dtype of the unquantized matrix. Rows can be selected, and values can be
    copied into it. All other operations use the dequantized matrix.
    """

    codes: Tensor  # [out, in] int8, or [out, in / 2] uint8
    scales: Tensor  # [out, 1] or [out, in / 64], float32
    kind: Kind

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, kind: Kind, dtype: torch.dtype) -> Quantized:
        shape = (codes.shape[0], codes.shape[1] * (2 if kind == "4bit" else 1))
        wrapper = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        wrapper.codes = codes
        wrapper.scales = scales
        wrapper.kind = kind
        return cast(Quantized, wrapper)

    @classmethod
    def build_empty(
        cls, rows: int, columns: int, kind: Kind, dtype: torch.dtype, device: torch.device | str
    ) -> Quantized:
        """Return a matrix with uninitialized values, which must be overwritten later."""
        if kind == "8bit":
            codes = torch.empty(rows, columns, dtype=torch.int8, device=device)
            scales = (rows, 1)
        else:
            codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
            scales = (rows, columns // BLOCK)
        return cls(codes, torch.empty(scales, dtype=torch.float32, device=device), kind, dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the quantized values and the scales, in bytes."""
        return self.codes.nbytes + self.scales.nbytes

    def to_device(self, device: torch.device | str) -> Quantized:
        """Return an uninitialized matrix of the same shape and format on `device`.

        Values are not copied, because this is used to allocate memory before the values are loaded.
        """
        rows, columns = self.shape
        return Quantized.build_empty(rows, columns, self.kind, self.dtype, device)

    def select_rows(self, rows: slice) -> Quantized:
        """Return the rows `rows` as a view; values copied into the view change this matrix."""
        return Quantized(self.codes[rows], self.scales[rows], self.kind, self.dtype)

    def dequantize(self) -> Tensor:
        """Return the dequantized matrix [out, in], in the dtype of this matrix."""
        if self.kind == "8bit":
            return self.codes.to(self.dtype).mul_(self.scales.to(self.dtype))
        shape = tuple(self.shape)
        scales = self.scales.reshape(-1)
        matrix: Tensor = _import_library().dequantize_4bit(
            self.codes, scales, BLOCK, QUANT_TYPE, shape, self.dtype
        )
        return matrix

    def store_rounded(self, values: Tensor) -> None:
        """Quantize `values` and store them in this matrix."""
        values = values.to(self.codes.device, torch.float32).expand(self.shape).contiguous()
        if self.kind == "8bit":
            scales = values.abs().amax(1, keepdim=True) / INT8_MAX
            self.scales.copy_(scales)
            self.codes.copy_((values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_())
            return
        codes, scales = _import_library().quantize_4bit(values, BLOCK, QUANT_TYPE, torch.uint8)
        self.codes.copy_(codes.view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        implementation = IMPLEMENTATIONS.get(func)
        if implementation is not None and isinstance(first, Quantized):
            return implementation(*args, **kwargs)
        assert not (func._schema.is_mutable and isinstance(first, Quantized)), (
            f"{func} on a quantized matrix"
        )
        # Compute all other operations with the dequantized matrices.
        plain_args = [dequantize(x) if isinstance(x, Tensor) else x for x in args]
        plain_kwargs = {
            name: dequantize(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()
        }
        return func(*plain_args, **plain_kwargs)


def _slice_rows(
    matrix: Quantized, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    if dim == 0 and step == 1:
        return matrix.select_rows(slice(start, end))
    return matrix.dequantize()[(slice(None),) * dim + (slice(start, end, step),)]


def _build_alias(matrix: Quantized, *_: Any, **__: Any) -> Quantized:
    return matrix.select_rows(slice(None))


def _copy_in(matrix: Quantized, values: Tensor, non_blocking: bool = False) -> Quantized:
    matrix.store_rounded(dequantize(values))
    return matrix


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _build_alias,
    _aten.alias.default: _build_alias,
    _aten.slice.Tensor: _slice_rows,
    _aten.copy_.default: _copy_in,
}


def dequantize(weight: Tensor) -> Tensor:
    """Return `weight` itself, or the dequantized matrix if `weight` is `Quantized`."""
    return weight.dequantize() if isinstance(weight, Quantized) else weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b, [T, out], for x [T, in] and a frozen `Quantized` matrix W.

    Only the quantized form of W is kept for the backward pass.
    """
    assert isinstance(weight, Quantized)
    output: Tensor = _QuantizedLinear.apply(x, weight, bias)
    return output


class _QuantizedLinear(torch.autograd.Function):
    """Autograd function that computes `linear`, with a gradient for the input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return kernels.product(x, weight.dequantize(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[0]:
            grad_x = kernels.product(gradients[0], ctx.weight.dequantize().T)
        else:
            grad_x = None
        return grad_x, None, None


def quantize_matrices(layers: Iterable[nn.Module], kind: Kind, dtype: torch.dtype) -> int:
    """Replace the `weight` of each layer with a quantized matrix of the same shape.

    All weights are on the meta device, before and after, so no values are quantized yet. Returns
    the total number of elements of the replaced matrices. With 4 bits, a matrix whose row length is
    not a multiple of `BLOCK` is left unchanged.
    """
    count = 0
    for layer in layers:
        weight = layer.weight
        assert isinstance(weight, nn.Parameter) and weight.is_meta
        rows, columns = weight.shape
        if kind == "4bit" and columns % BLOCK:
            continue
        layer.weight = nn.Parameter(
            Quantized.build_empty(rows, columns, kind, dtype, "meta"), requires_grad=False
        )
        count += rows * columns
    return count


def allocate_memory(network: nn.Module, device: torch.device) -> None:
    """Allocate memory for a network as `network.to_empty(device)` does.

    Unlike that method, this supports networks with quantized matrices.
    """
    # Replace quantized matrices with empty tensors, which `_apply` supports.
    replacements = []
    for module in network.modules():
        if isinstance(getattr(module, "weight", None), Quantized):
            matrix = cast(Quantized, cast(Tensor, module.weight).detach())
            replacements.append((module, matrix.to_device(device)))
    for module, _ in replacements:
        module.weight = nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)
    network._apply(lambda tensor: _allocate(tensor, device))
    for module, weight in replacements:
        module.weight = nn.Parameter(weight, requires_grad=False)


def _allocate(like: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the shape of `like`, a tensor on the meta device.

    `torch.empty_like` would import sympy for such a tensor, which takes a third of a second.
    """
    if type(like) in (Tensor, nn.Parameter):
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return torch.empty_like(like, device=device)  # subclasses of tensors


def count_bytes(network: nn.Module) -> tuple[int, int]:
    """Return the number of quantized elements, and their size in bytes including scales."""
    matrices = [weight for weight in network.parameters() if isinstance(weight, Quantized)]
    num_elements = sum(matrix.numel() for matrix in matrices)
    return num_elements, sum(matrix.num_bytes for matrix in matrices)


def _import_library() -> Any:
    """Import `bitsandbytes`, and return its operations."""
    # Hide the library's warnings about kernels that weft does not use.
    logging.getLogger(LIBRARY).setLevel(logging.ERROR)
    importlib.import_module(f"{LIBRARY}.functional")
    return torch.ops.bitsandbytes
