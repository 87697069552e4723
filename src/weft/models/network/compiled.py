"""Networks whose blocks torch compiles: of each what comes before attention and what comes after
it.
"""

from __future__ import annotations

from typing import Any

from weft import kernels
from weft.models.network.block import Block, CompiledParts
from weft.models.network.linear import Linear
from weft.models.network.moe import MoE
from weft.models.network.transformer import Transformer


def compile_blocks(
    network: Transformer, backend: Any = "inductor", fp8: kernels.Fp8Product | None = None
) -> None:
    """From now on passes without cached keys run compiled parts of the blocks, which are compiled
    when they are first met: once for all blocks of one form, whatever the number of tokens.
    Attention keeps its own kernels, and experts theirs, so that of a block with experts the part
    before attention alone is compiled. Gradients of compiled matrices come from autograd.

    Where ranks share each layer (`enter`) they wait for each other between what is compiled. With
    `fp8` the products of what is compiled are such, where a matrix has the sizes for it.
    """
    for block in network.blocks:
        assert isinstance(block, Block)
        whole = block.enter is None
        into, out = (
            kernels.compiled_by_rows(part, backend, whole=whole) for part in (Block.into, Block.out)
        )
        experts = isinstance(block.mlp, MoE)
        block.compiled = CompiledParts(into, Block.out if experts else out)
        for layer in [block.attention.qkv] if experts else block.modules():
            if fp8 is not None and isinstance(layer, Linear) and fp8.takes(layer.weight):
                layer.narrow = fp8
