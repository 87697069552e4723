"""Matrix products in 8-bit floats (Micikevicius et al. 2022, arXiv:2209.05433), using torchao.

torchao must be installed separately from weft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's names
MULTIPLE = 16  # required divisor of both sizes of a matrix
LEAST_FP8_CAPABILITY = (9, 0)  # Hopper

NarrowProduct = Callable[[Tensor, Tensor], Tensor]  # x [..., in], weight [out, in] -> [..., out]


def find_fp8_obstacle(device: torch.device) -> str | None:
    """Return the reason why the device cannot multiply matrices in fp8, or None if it can."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(device) < LEAST_FP8_CAPABILITY
    ):
        return f"{device} has no such products; an H100 or a later GPU of NVIDIA has"
    return None


class Fp8Product:
    """Product of x [..., in] and weight [out, in] transposed, computed in fp8.

    The product and its gradients with respect to x and to weight are matrix products whose inputs
    are rounded to 8 bits; their results are not. With the torchao `recipe` "rowwise_with_gw_hp",
    the gradient of the weight is computed without rounding to 8 bits. The recipe also determines
    whether scales are computed from the largest element of the whole tensor or of each row. If
    `emulate` is True, the rounded inputs are multiplied in a wider dtype, which works on any
    device.

    Raises `ImportError` if torchao is not installed.
    """

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Return whether the sizes of `weight` allow a matrix multiplication in fp8."""
        return all(size % MULTIPLE == 0 for size in weight.shape)

    def __init__(self, recipe: str, *, emulate: bool = False) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Weight gradients sum over the tokens of a pack, whose number need not be a multiple of 16:
        # let torchao pad this dimension.
        config = replace(
            Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate
        )
        with torch.device("meta"):
            holder = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False))
        self._layer = convert_to_float8_training(holder, config=config)[0]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(self._layer, {"weight": weight}, (x,))
        return output
