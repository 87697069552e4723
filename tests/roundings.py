"""What a whole computation, a network's pass or its gradients, loses to its roundings: found by
making them, each as large as the arithmetic allows and with a random sign.

Bounds of single products are in `tests.bounds`. Those of whole networks would be sums over millions
of roundings, each times what the rest of the network makes of it; here the network itself carries
them on. All of it is computed in float64 with signs from a generator, so that no processor's own
float32 has a part in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.bounds import assert_within, unit

POOL = 1 << 18  # signs that are drawn once; each operation takes a part of them
LIKELY = 6.0  # standard deviations, as in `bounds.probable_gamma`

aten = torch.ops.aten
# Operations of several steps, which are computed step by step.
STEPS = get_decompositions(
    [
        aten._softmax,
        aten._softmax_backward_data,
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.gelu,
        aten.gelu_backward,
        aten.silu,
        aten.silu_backward,
        aten.tanh_backward,
        aten.sigmoid_backward,
    ]
)
# Operations whose results round once; others that are no sums are right within 4 u.
ONCE = {"add", "sub", "rsub", "mul", "div", "sqrt", "reciprocal", "square", "_to_copy", "to"}
# Operations that round nothing.
EXACT = {
    "abs",
    "amax",
    "amin",
    "cat",
    "clamp",
    "clamp_min",
    "clone",
    "constant_pad_nd",
    "copy",
    "embedding",
    "fill",
    "flip",
    "gather",
    "index",
    "index_select",
    "lift_fresh",
    "masked_fill",
    "max",
    "min",
    "neg",
    "relu",
    "repeat",
    "scatter",
    "select_backward",
    "slice_backward",
    "sort",
    "stack",
    "threshold_backward",
    "topk",
    "unfold",
    "where",
    "zero",
}


def _terms(name: str, args: Sequence[Any]) -> int | None:
    """How many numbers an element of a sum adds up at most, or None where `name` is no sum."""
    if name in ("mm", "bmm", "mv", "dot"):
        return args[0].shape[-1]
    if name in ("addmm", "baddbmm", "addmv"):
        return args[1].shape[-1] + 1
    if name in ("sum", "mean"):
        shape = args[0].shape
        dims = range(len(shape)) if len(args) < 2 or not args[1] else args[1]
        return math.prod(shape[dim] for dim in dims)
    if name == "cumsum":
        return args[0].shape[args[1]]
    if name == "embedding_dense_backward":
        return args[1].numel()
    if name in ("scatter_add", "index_add"):
        return args[2].shape[args[1] if args[2].ndim > 1 else 0] + 1
    if name in ("index_put", "_index_put_impl") and len(args) > 3 and args[3]:
        return max(index.numel() for index in args[1] if index is not None) + 1
    return None


class _Moved(TorchDispatchMode):
    """Moves every number that an operation makes in float64 by as much as it may round in `dtype`,
    up or down by chance.

    What is float32 even so, the angles of rotary positions, is rounded in float32, where that is not
    the same everywhere: additions, products and roots are.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self._dtype, self._draws = dtype, random.Random(seed)
        signs = torch.randint(0, 2, (POOL,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
        self._pools = {d: signs.to(d) for d in (torch.float64, torch.float32)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in STEPS:
            with self:
                return STEPS[func](*args, **kwargs)
        name, sizes = func.overloadpacket.__name__.rstrip("_"), None
        held = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        rounds = name not in EXACT and any(map(torch.is_floating_point, held))
        terms = _terms(name, args) if rounds else None
        if terms is not None:
            # What the terms of each sum are together, signs aside.
            given = {k: abs(v) if k in ("alpha", "beta") else v for k, v in kwargs.items()}
            sizes = func(*tree_map_only(Tensor, _size, args), **tree_map_only(Tensor, _size, given))
        result = func(*args, **kwargs)
        # Views are what they were, and so are tensors that are handed through.
        own = set() if func._schema.is_mutable else {x.untyped_storage().data_ptr() for x in held}
        if not rounds or any(
            isinstance(x, Tensor) and x.untyped_storage().data_ptr() in own
            for x in tree_leaves(result)
        ):
            return result
        if isinstance(result, Tensor):
            self._move(result, 1 if name in ONCE else 4, sizes, terms)
        else:
            assert sizes is None, name
            for made in tree_leaves(result):
                self._move(made, 4, None, None)
        return result

    def _move(self, made: Any, steps: int, sizes: Tensor | None, terms: float | None) -> None:
        if not isinstance(made, Tensor) or not made.is_floating_point() or not made.numel():
            return
        if made.dtype != torch.float64 and steps == 1 and terms is None:
            return
        u = unit(self._dtype if made.dtype == torch.float64 else made.dtype)
        pool, count = self._pools[made.dtype], made.numel()
        pool = pool if count < POOL // 2 else pool.repeat(2 * count // POOL + 1)
        start = self._draws.randrange(len(pool) - count)
        signs = pool[start : start + count].view(made.shape)
        if sizes is None or terms is None:
            made.mul_(signs.mul(steps * u).add_(1.0))
        else:
            # Each of n additions, and each product, rounds by u of the sum's size at most. Their
            # signs differ, so that together they are as one error of sqrt(n + 1) u.
            made.addcmul_(sizes, signs, value=math.sqrt(terms + 1) * u)


def _size(x: Tensor) -> Tensor:
    return x.abs() if x.is_floating_point() else x


class Exact(NamedTuple):
    """A result in float64, and the standard deviation, at most, of what another dtype makes of it."""

    value: Tensor
    deviation: float


def exactly(
    compute: Callable[[], Tensor | Sequence[Tensor]],
    dtype: torch.dtype = torch.float32,
    draws: int = 2,
) -> list[Exact]:
    """The results of `compute`, a computation in float64, and how far those in `dtype` may lie.

    A result is wrong by the sum of J e over all roundings e, of which each is |e| <= b and J is
    what becomes of it. Where each e is b or -b by chance, the sum's variance is that of J b over all
    of them; roundings with mean zero have no larger one, and their sum exceeds `LIKELY` times its
    root with a probability below 2 exp(-18) (Hoeffding 1963). The variance is the mean square over
    `draws` of such signs, of each element, and the largest of a result's elements counts: a result
    of few elements wants more draws.
    """

    def run() -> list[Tensor]:
        made = compute()
        return [x.detach().clone() for x in ([made] if isinstance(made, Tensor) else made)]

    with sdpa_kernel(SDPBackend.MATH):
        exact = run()  # first: what it stores for later is exact
        squares = [torch.zeros_like(x, dtype=torch.float64) for x in exact]
        for seed in range(draws):
            with _Moved(dtype, seed):
                moved = run()
            for square, x, y in zip(squares, moved, exact, strict=True):
                square.add_((x - y).double().square())
    return [
        Exact(x, float((square.amax() / draws).sqrt()) if square.numel() else 0.0)
        for x, square in zip(exact, squares, strict=True)
    ]


def assert_computed(
    actual: Tensor | Sequence[Tensor],
    compute: Callable[[], Tensor | Sequence[Tensor]],
    dtype: torch.dtype = torch.float32,
    draws: int = 2,
) -> None:
    """That `actual` is what `compute` gives in float64, but for what `dtype` loses: see `exactly`."""
    made = [actual] if isinstance(actual, Tensor) else actual
    for number, (x, (value, deviation)) in enumerate(
        zip(made, exactly(compute, dtype, draws), strict=True)
    ):
        assert_within(x, value, LIKELY * deviation, f"result {number}")
