"""What is compiled for a GPU computes what the other forms do; compiled once, whatever the lengths
of packs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from weft.kernels import activated, compiling, formulas, pointwise, rms_norm, rotate_heads


def angles(length: int, half: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    by = torch.arange(length, dtype=dtype)[:, None, None] * 100.0 ** -torch.linspace(
        0, 1, half, dtype=dtype
    )
    return by.cos(), by.sin()


def parts(length: int, dtype: torch.dtype = torch.float64) -> list[Callable[[], Tensor]]:
    """Every part of a block that is compiled, forward and backward, on `length` tokens: results and
    gradients.
    """

    def random(*shape: int) -> Tensor:
        return torch.randn(
            *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
        ).to(dtype)

    def gradient(function: Callable[[Tensor], Any], *shape: int) -> Tensor:
        x = random(*shape).requires_grad_()
        made = function(x)
        outputs = made if isinstance(made, tuple) else (made,)
        total = sum((out * random(*out.shape)).sum() for out in outputs)
        assert isinstance(total, Tensor)
        return torch.cat(
            [
                torch.autograd.grad(total, x)[0].flatten(),
                *(out.detach().flatten() for out in outputs),
            ]
        )

    cos, sin = angles(length, 3, dtype)
    weight = random(12)
    return [
        lambda: gradient(lambda x: rms_norm(x, weight, 1e-5, offset=1.0), length, 12),
        lambda: gradient(lambda x: activated(x, True, "silu"), length, 14),
        lambda: gradient(lambda x: activated(x, False, "gelu_tanh"), length, 14),
        lambda: gradient(lambda x: pointwise.rotate(x, cos, sin), length, 5, 8),
        lambda: gradient(lambda x: rotate_heads(x, 2, cos, sin), length, 9, 8),
    ]


def test_each_is_what_the_other_form_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [part() for part in parts(7)]
    used: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        used.append(function.__name__)
        return function

    monkeypatch.setattr(compiling, "serves", lambda *_: True)
    monkeypatch.setattr(compiling, "compile_as_one_kernel", counted)
    for made, wanted in zip([part() for part in parts(7)], plain, strict=True):
        assert_close(made, wanted, rtol=1e-10, atol=1e-12)
    assert set(used) == {
        "rms_norm",
        "compute_rms_norm_gradients",
        "activated",
        "compute_activated_gradients",
        "rotate",
        "rotate_heads",
        "compute_heads_gradient",
    }


def test_heads_are_rotated_as_queries_and_keys_by_themselves() -> None:
    heads, (cos, sin) = torch.randn(6, 9, 8, dtype=torch.float64, requires_grad=True), angles(6, 3)
    q, k, v = rotate_heads(heads, 2, cos, sin)
    assert_close(
        torch.cat([q, k], 1), pointwise.rotate(heads[:, :7], cos, sin), rtol=1e-12, atol=1e-12
    )
    assert torch.equal(v, heads[:, 7:])
    assert torch.autograd.gradcheck(lambda x: rotate_heads(x, 2, cos, sin), (heads,))


def test_what_is_between_input_and_result_is_float32() -> None:
    gate_up, by = torch.randn(9, 12), torch.randn(9, 6)
    half, half_by = gate_up.bfloat16(), by.bfloat16()
    exact = formulas.activated(half.float(), True, "silu")
    assert torch.equal(formulas.activated(half, True, "silu"), exact.bfloat16())
    for made, wanted in zip(
        formulas.compute_activated_gradients(half_by, half, True, "silu", True),
        formulas.compute_activated_gradients(half_by.float(), half.float(), True, "silu", True),
        strict=True,
    ):
        assert made is not None and wanted is not None and torch.equal(made, wanted.bfloat16())


def test_packs_of_any_length_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ragged run: 11 lengths, 10 functions of their own settings."""
    made: list[int] = []

    def count(module: Any, _: Any) -> Any:
        made.append(1)
        return module.forward

    torch._dynamo.reset()
    cached: dict[Any, Any] = {}
    settings: dict[str, Any] = {"dynamic": True, "fullgraph": True}
    monkeypatch.setattr(
        torch, "compile", lambda function, **own: cached.setdefault(function, make(function, own))
    )
    compile_with = torch._dynamo.optimize

    def make(function: Any, own: dict[str, Any]) -> Any:
        assert own == settings, "sizes are inputs"
        return compile_with(count, nopython=True, dynamic=True)(function)

    compiling.compile_dynamic.cache_clear()
    monkeypatch.setattr(compiling, "serves", lambda *_: True)
    try:
        for length in (33, 1000, 57, 64, 129, 41, 500, 36, 77, 2048, 45):
            for part in parts(length, torch.float32):
                part()
            if length == 33:
                first = len(made)
    finally:
        compiling.compile_dynamic.cache_clear()
        torch._dynamo.reset()
    assert first == len(made) <= 12
