"""Functions on plain tensors that networks are built from; each uses the fastest available kernel.

`models/` imports this module and nothing below it; docs/kernels.md is the contract. Most functions
accept any tensor: they use a kernel if it supports the tensor's type, dtype and device, else torch,
with equal results up to rounding. Functions that exist only as kernels must be guarded by the
`serves` function for them.
"""

from weft.kernels.activations import activate
from weft.kernels.compiling import by_rows as compiled_by_rows
from weft.kernels.compiling import obstacle as compiling_obstacle
from weft.kernels.cpu.attention import MOST_DIM as MOST_HEAD_DIM
from weft.kernels.cpu.attention import attend as attend_segments
from weft.kernels.cpu.attention import attend_rows, merge_rows
from weft.kernels.cpu.attention import attend_to as attend_cache
from weft.kernels.cpu.attention import serves as serves_attention
from weft.kernels.cpu.cached_forward import (
    BlockWeights,
    CachedForward,
    CachedPass,
    Drawing,
    LinearWeights,
    NetworkWeights,
    PrefixRows,
)
from weft.kernels.cpu.cached_forward import serves as serves_network
from weft.kernels.cpu.library import library as cpu_library
from weft.kernels.cpu.library import serves
from weft.kernels.cpu.rows import store as store_keys
from weft.kernels.cpu.sizes import HOLES, LEAST_QUERIES, LEAST_SPARED_KEYS, in_vectors
from weft.kernels.cpu.softmax import draw
from weft.kernels.fp8 import Fp8Product, NarrowProduct
from weft.kernels.fp8 import obstacle as fp8_obstacle
from weft.kernels.gpu import flash, flex
from weft.kernels.grouped import Groups, grouped_linear
from weft.kernels.grouped import serves as serves_groups
from weft.kernels.lane import Lane, Mark, lane_of
from weft.kernels.pointwise import activated, activated_linear, rms_norm, rotate, rotate_heads
from weft.kernels.products import (
    LEAST_ROWS,
    GradientSum,
    add_product,
    kept_wide,
    linear,
    product,
    weight_gradient,
    wide_product,
)
from weft.kernels.softmax import statistics, to_gradients
from weft.kernels.transfer import address, put, resize_storage, storage_of
from weft.kernels.types import (
    Activation,
    AttentionSpec,
    AttentionState,
    Statistics,
    VarlenLengths,
    VarlenSegments,
)

__all__ = [
    "HOLES",
    "LEAST_QUERIES",
    "LEAST_ROWS",
    "LEAST_SPARED_KEYS",
    "MOST_HEAD_DIM",
    "Activation",
    "AttentionSpec",
    "AttentionState",
    "BlockWeights",
    "CachedForward",
    "CachedPass",
    "Drawing",
    "Fp8Product",
    "GradientSum",
    "Groups",
    "Lane",
    "LinearWeights",
    "Mark",
    "NarrowProduct",
    "NetworkWeights",
    "PrefixRows",
    "Statistics",
    "VarlenLengths",
    "VarlenSegments",
    "activate",
    "activated",
    "activated_linear",
    "add_product",
    "address",
    "attend_cache",
    "attend_rows",
    "attend_segments",
    "compiled_by_rows",
    "compiling_obstacle",
    "cpu_library",
    "draw",
    "flash",
    "flex",
    "fp8_obstacle",
    "grouped_linear",
    "in_vectors",
    "kept_wide",
    "lane_of",
    "linear",
    "merge_rows",
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
    "storage_of",
    "store_keys",
    "to_gradients",
    "weight_gradient",
    "wide_product",
]
