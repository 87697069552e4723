"""Building blocks of networks: functions on plain tensors that use the fastest available kernel.

`models/` imports this module and none of its submodules; docs/kernels.md describes what each
function guarantees. Most functions accept any tensor: they use a kernel if it supports the type,
dtype and device of the tensor, and torch otherwise. The results are equal up to rounding. For a
function that exists only as a kernel, the caller must first call the corresponding function
`serves`, which returns whether the kernel supports the tensors.
"""

from weft.kernels.compiling import compile_by_rows as compiled_by_rows
from weft.kernels.compiling import find_obstacle as compiling_obstacle
from weft.kernels.copy_queue import (
    CopyMark,
    CopyQueue,
    build_copy_queue,
    get_address,
    get_storage,
    put,
    resize_storage,
)
from weft.kernels.cpu.attention import MAX_DIM as MAX_HEAD_DIM
from weft.kernels.cpu.attention import attend as attend_segments
from weft.kernels.cpu.attention import attend_rows, merge_rows
from weft.kernels.cpu.attention import attend_to as attend_cache
from weft.kernels.cpu.attention import serves as serves_attention
from weft.kernels.cpu.cached_forward import (
    BlockWeights,
    CachedForward,
    CachedPass,
    DrawParameters,
    LinearWeights,
    NetworkWeights,
    PrefixRows,
)
from weft.kernels.cpu.cached_forward import serves as serves_network
from weft.kernels.cpu.library import MIN_QUERIES, MIN_SPARED_KEYS, in_vectors, serves
from weft.kernels.cpu.library import load_library as cpu_library
from weft.kernels.cpu.rows import draw
from weft.kernels.cpu.rows import store as store_keys
from weft.kernels.formulas import activate
from weft.kernels.gpu import flash, flex, fused
from weft.kernels.pointwise import (
    activated,
    activated_linear,
    rms_norm,
    rotate,
    rotate_heads,
    statistics,
    to_gradients,
)
from weft.kernels.products import (
    MIN_ROWS,
    Fp8Product,
    GradientSum,
    NarrowProduct,
    RowGroups,
    add_product,
    compute_weight_gradient,
    grouped_linear,
    linear,
    prepare_wide,
    product,
    serves_groups,
    wide_product,
)
from weft.kernels.products import find_fp8_obstacle as fp8_obstacle
from weft.kernels.types import (
    Activation,
    AttentionSpec,
    AttentionState,
    SoftmaxStatistics,
    VarlenLengths,
    VarlenSegments,
)

__all__ = [
    "MAX_HEAD_DIM",
    "MIN_QUERIES",
    "MIN_ROWS",
    "MIN_SPARED_KEYS",
    "Activation",
    "AttentionSpec",
    "AttentionState",
    "BlockWeights",
    "CachedForward",
    "CachedPass",
    "CopyMark",
    "CopyQueue",
    "DrawParameters",
    "Fp8Product",
    "GradientSum",
    "LinearWeights",
    "NarrowProduct",
    "NetworkWeights",
    "PrefixRows",
    "RowGroups",
    "SoftmaxStatistics",
    "VarlenLengths",
    "VarlenSegments",
    "activate",
    "activated",
    "activated_linear",
    "add_product",
    "attend_cache",
    "attend_rows",
    "attend_segments",
    "build_copy_queue",
    "compiled_by_rows",
    "compiling_obstacle",
    "compute_weight_gradient",
    "cpu_library",
    "draw",
    "flash",
    "flex",
    "fp8_obstacle",
    "fused",
    "get_address",
    "get_storage",
    "grouped_linear",
    "in_vectors",
    "linear",
    "merge_rows",
    "prepare_wide",
    "product",
    "put",
    "resize_storage",
    "rms_norm",
    "rotate",
    "rotate_heads",
    "serves",
    "serves_attention",
    "serves_groups",
    "serves_network",
    "statistics",
    "store_keys",
    "to_gradients",
    "wide_product",
]
