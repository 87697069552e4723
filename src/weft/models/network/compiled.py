"""Compilation of a network's blocks by torch, without their attention."""

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
    """Compile the parts of each block before and after attention.

    The compiled parts are used in passes without cached keys. They are compiled at the first use,
    once for all blocks of the same structure and for any number of tokens. Attention and experts
    keep their own kernels, so only the part before attention is compiled in a block with experts.
    For matrices in compiled parts, autograd computes the gradients as usual. These gradients are
    not added directly to master weights (see `weft.models.network.gradient_sums`).

    Hooks on modules of a block may call code that cannot be compiled; it then runs between the
    compiled parts. With `fp8`, compiled products use fp8 if the sizes of the matrix allow this.
    """
    for block in network.blocks:
        assert isinstance(block, Block)
        whole = not any(part._forward_pre_hooks or part._forward_hooks for part in block.modules())
        into, out = (
            kernels.compiled_by_rows(part, backend, whole=whole)
            for part in (Block.compute_heads, Block.compute_output)
        )
        experts = isinstance(block.mlp, MoE)
        block.compiled = CompiledParts(into, Block.compute_output if experts else out)
        for layer in [block.attention.qkv] if experts else block.modules():
            if fp8 is not None and isinstance(layer, Linear) and fp8.supports(layer.weight):
                layer.narrow = fp8
