"""Matrix products of 8-bit floats (Micikevicius et al. 2022, arXiv:2209.05433) by torchao, which is
not installed with weft.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # names of torchao's
MULTIPLE = 16  # of both sides of a matrix
LEAST_CAPABILITY = (9, 0)  # Hopper

NarrowProduct = Callable[[Tensor, Tensor], Tensor]  # x [..., in], weight [out, in] -> [..., out]


def obstacle(device: torch.device) -> str | None:
    """What keeps a device from them; None where nothing does."""
    if (
        device.type != "cuda"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY
    ):
        return f"{device} has no such products; an H100 or a later GPU of NVIDIA has"
    return None


class Fp8Product:
    """x [..., in] times weight [out, in] transposed, differentiable in both.

    Each of the three products of a layer rounds what it multiplies to 8 bits, scaled by its largest
    entries: those of the whole tensor, or by `recipe` of a row. Sums are wide, and so are
    gradients; `emulate` computes the same anywhere, by wide products of rounded numbers.

    Raises `ImportError` where torchao is missing.
    """

    @staticmethod
    def takes(weight: Tensor) -> bool:
        return all(size % MULTIPLE == 0 for size in weight.shape)

    def __init__(self, recipe: str, *, emulate: bool = False) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Packs have any number of tokens, which gradients of matrices sum over: torchao fills them
        # up.
        config = replace(
            Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate
        )
        with torch.device("meta"):
            holder = nn.Sequential(nn.Linear(MULTIPLE, MULTIPLE, bias=False))
        self._layer = convert_to_float8_training(holder, config=config)[0]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        made: Tensor = torch.func.functional_call(self._layer, {"weight": weight}, (x,))
        return made
