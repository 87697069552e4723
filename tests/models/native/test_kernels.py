"""Each kernel against torch in float64, at sizes that fill no vector; and a row's bits do not depend on its company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from weft.models.activations import activate
from weft.models.native import library, logits, product, rows


@pytest.fixture(params=["tiles", "vectors"])
def products_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the processor's tiles, where it has such, and in its vectors."""
    kernels = library.library()
    assert kernels is not None
    tiles = request.param == "tiles"
    try:
        if kernels.weft_tiles(int(tiles)) != tiles:
            pytest.skip("the processor has no tiles of bfloat16")
        yield
    finally:
        kernels.weft_tiles(1)


def laid(x: Tensor, transposed: bool, gap: int) -> Tensor:
    """The same matrix, within a larger one; where it is transposed, column after column."""
    around = F.pad(x.T if transposed else x, (1, gap)).contiguous()[:, 1 : -gap or None]
    return around.T if transposed else around


@pytest.mark.usefixtures("products_by")
@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 330), st.integers(1, 1100), st.tuples(*[st.booleans()] * 2),
    st.tuples(*[st.integers(0, 3)] * 2), st.booleans(), st.integers(0, 9),
)  # fmt: skip
def test_products(
    count: int, size: int, terms: int, transposed: tuple[bool, bool], gaps: tuple[int, int], biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(count, terms), torch.randn(size, terms), torch.randn(size) if biased else None
    left, right = map(laid, (x, weight), transposed, gaps)
    assert product.serves(left, right)
    made = product.product(left, right, bias)
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert_close(made.double(), wide, atol=1e-5 * terms**0.5, rtol=0)
    row = seed % count
    assert torch.equal(
        product.product(x[row : row + 1], weight, bias), made[row : row + 1]
    )  # by the kernel for few rows
    total = torch.randn(count, size)
    whole = total.double() + x.double() @ weight.double().T
    product.add_product(total, left, right)
    assert_close(total.double(), whole, atol=1e-5 * terms**0.5, rtol=0)


@pytest.mark.usefixtures("products_by")
def test_products_do_not_depend_on_the_threads() -> None:
    left, right = torch.randn(400, 500), torch.randn(300, 500)
    turned, many = left.T.contiguous().T, torch.randn(1700, 500)  # many: which threads share row by row
    threads = torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3, 7, 40):
            torch.set_num_threads(count)
            made += [
                product.product(left, right),
                product.product(turned, right),
                product.product(left[:, :270], right[:, :270]),
                product.product(left[:70], right),
                product.product(many, right),
            ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, made[at % 5]) for at, one in enumerate(made))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0][:70], made[3])
    assert_close(made[4].double(), many.double() @ right.double().T, atol=3e-4, rtol=0)


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("size", [33, 290])
def test_products_of_a_result_that_no_cache_holds(size: int) -> None:
    """It is gone over less often: more of the columns is packed at once."""
    one, weight = torch.randn(1, 5000), torch.randn(size, 5000)
    many, expected = one.expand(40_000, 5000), product.product(one, weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # shared by more, its parts may fit
        assert bool((product.product(many, weight) == expected).all())
        total = torch.zeros(40_000, size)
        product.add_product(total, many, weight)
        assert bool((total == expected).all())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("rows", [3, 300])  # by either kernel
def test_products_are_as_exact_as_float32(rows: int) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-18, 18, 40).repeat_interleave(
        16
    )  # each pair of terms comes to about one, or to nothing beside it
    x, weight = torch.randn(rows, 640) * spread, torch.randn(200, 640) / spread
    wide = x.double() @ weight.double().T
    error = (product.product(x, weight).double() - wide).square().mean().sqrt()
    assert error < 1e-5  # of 25; with two parts instead of three 1e-4
    positive, other = torch.rand(rows, 640), torch.rand(200, 640)
    exact = positive.double() @ other.double().T
    assert abs((product.product(positive, other) / exact - 1).mean()) < 2e-8  # what is left out has no sign of its own
    one = torch.zeros(rows, 640)
    one[:, 7] = 1 + 2**-23  # all digits of either side reach the result
    assert torch.equal(product.product(one, weight), one[:, 7:8] * weight[:, 7])
    assert torch.equal(product.product(x, one[:1]), one[:1, 7] * x[:, 7:8])


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_products_of_numbers_that_are_none_are_none(rows: int, odd: float) -> None:
    x, weight = torch.randn(rows, 70), torch.randn(90, 70)
    clean = product.product(x, weight)
    x[1, 33] = weight[5, 2] = odd
    made = product.product(x, weight)
    there = torch.ones(rows, 90, dtype=torch.bool)
    there[1], there[:, 5] = False, False
    assert torch.equal(made.isfinite(), there) and torch.equal(made[there], clean[there])


@pytest.mark.parametrize(
    "x", [torch.ones(4, 8, dtype=torch.float64), torch.ones(0, 8), torch.ones(7), torch.tensor(1.0)]
)
def test_products_that_are_left_to_torch(x: Tensor) -> None:
    assert not product.serves(x, torch.ones(3, 8, dtype=x.dtype))
    assert not product.serves(torch.ones(4, 3), torch.ones(8, 4))


def test_sizes_that_do_not_fit_are_refused() -> None:
    left, right = torch.ones(200, 8), torch.ones(3, 8)
    with pytest.raises(AssertionError, match="one number a column"):
        product.product(left, right, torch.ones(2))
    for total in (torch.ones(200, 2), torch.ones(3, 200).T):
        with pytest.raises(AssertionError):
            product.add_product(total, left, right)
    with pytest.raises(AssertionError):
        product.add_product(torch.ones(2, 100, 3), left.view(2, 100, 8), right)


def test_a_bias_of_another_dtype_is_cast() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5).bfloat16()
    assert_close(product.product(x, weight, bias), x @ weight.T + bias.float())


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 37), (3, 256), (150, 40)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(shape: tuple[int, ...], offset: float) -> None:
    torch.manual_seed(shape[-1])
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    made, inverse = rows.rms_norm(x, weight, 1e-5, offset)
    wide, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_close(inverse.double(), expected, atol=0, rtol=1e-6)
    normed = wide * expected * (scale + offset)
    assert_close(made.double(), normed, atol=1e-6, rtol=1e-6)
    by_y = torch.randn(shape)
    wanted = torch.autograd.grad(normed, (wide, scale), by_y.double())
    for to_x, to_weight in [(True, True), (True, False), (False, True)]:
        found = rows.rms_norm_gradients(x, weight, inverse, by_y, offset, to_x=to_x, to_weight=to_weight)
        for one, other, there in zip(found, wanted, (to_x, to_weight), strict=True):
            assert (one is not None) == there
            if one is not None:
                assert_close(one.double(), other, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("half", [2, 5, 16])
def test_rotations_go_there_and_back(half: int) -> None:
    whole = torch.randn(6, 5, 33)
    x, angles = whole[:, 1:4], torch.randn(6, 1, half)
    turned = rows.rotate(x, angles.cos(), angles.sin(), 1.0)
    as_complex = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    assert_close(turned[..., : 2 * half], torch.cat([as_complex.real, as_complex.imag], -1), atol=1e-6, rtol=1e-6)
    assert torch.equal(turned[..., 2 * half :], x[..., 2 * half :])
    assert_close(rows.rotate(turned, angles.cos(), angles.sin(), -1.0), x, atol=1e-6, rtol=1e-6)
    part = rows.rotate(x, angles.cos(), angles.sin(), 1.0, turned=2)
    assert torch.equal(part[:, :2], turned[:, :2]) and torch.equal(part[:, 2], x[:, 2])
    rows.rotate_back(part, angles.cos(), angles.sin(), 2)
    assert_close(part, x, atol=1e-6, rtol=1e-6)
    assert torch.equal(part[:, 2], x[:, 2])


@pytest.mark.parametrize("gated", [True, False])
def test_silu(gated: bool) -> None:
    joined = torch.cat([torch.linspace(-120, 120, 2 * 37).view(2, 37), torch.randn(2, 37)], dim=1)
    joined[0, :2] = torch.tensor([-1e20, torch.nan])
    wide = joined.double().requires_grad_()
    opened, factor = wide.chunk(2, dim=1) if gated else (wide, 1.0)
    expected = activate(opened, "silu") * factor
    made = rows.silu(joined, gated)
    assert_close(made.double(), expected, atol=1e-30, rtol=1e-6, equal_nan=True)
    by_out = torch.randn(made.shape)
    (wanted,) = torch.autograd.grad(expected, wide, by_out.double())
    for again in (True, False):
        by_joined, once_more = rows.silu_gradients(joined, gated, by_out, again=again)
        assert_close(by_joined.double(), wanted, atol=1e-6, rtol=1e-5, equal_nan=True)
        assert once_more is None if not again else torch.equal(once_more.nan_to_num(7), made.nan_to_num(7))


def test_keys_and_values_come_to_their_places() -> None:
    made = torch.randn(4, 9, 6)
    k, v = made[:, 2:5], made[:, 5:8]
    keys, values = torch.zeros(3, 3, 10, 6), torch.zeros(3, 3, 10, 6)
    where = [(2, 0), (0, 9), (0, 3), (1, 4)]
    rows.store(k, v, keys, values, torch.tensor([slot * 30 + place for slot, place in where]))
    for token, (slot, place) in enumerate(where):
        assert torch.equal(keys[slot, :, place], k[token]) and torch.equal(values[slot, :, place], v[token])
    assert (keys != 0).sum() == k.numel()


@pytest.mark.parametrize("size", [7, 128, 300, 1029])
def test_statistics_and_gradients_of_logits(size: int) -> None:
    torch.manual_seed(size)
    x, labels = torch.randn(6, size) * 4, torch.randint(0, size, (6,))
    x[0, 1:3] = x[0].max() + 1  # two equal ones: the first counts
    x[1, ::2] = -torch.inf
    labels[1] = 1
    wide = x.double().requires_grad_()
    logp = wide.log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0)).sum(-1)
    found = logits.statistics(x, entropy=True, best=True)
    assert found.entropy is not None and found.best is not None
    assert_close(found.lse.double(), wide.logsumexp(-1), atol=1e-6, rtol=1e-6)
    assert_close(found.entropy.double(), entropy, atol=2e-6, rtol=1e-6)
    assert found.best.tolist() == [1, *x[1:].argmax(-1).tolist()]
    by_logprob, by_entropy = torch.randn(6), torch.randn(6)
    at_label = logp.gather(1, labels[:, None])[:, 0]
    finite = wide.masked_fill(wide == -torch.inf, -1e30)
    logp = finite.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    for by_other in (by_entropy, None):
        value = (by_logprob * at_label).sum() + (0.0 if by_other is None else (by_other * entropy).sum())
        (expected,) = torch.autograd.grad(value, wide, retain_graph=True)
        made = x.clone()
        logits.to_gradients(made, found, labels, by_logprob, by_other)
        assert_close(made.double(), expected.nan_to_num(), atol=3e-6, rtol=1e-5)


def test_logits_that_are_no_numbers_show() -> None:
    x = torch.zeros(3, 40)
    x[1, 7], x[2, 39] = torch.nan, torch.inf
    lse = logits.statistics(x).lse
    assert lse.isfinite().tolist() == [True, False, False]
    assert logits.draw(x, torch.full((3,), 0.5, dtype=torch.float64))[1].isfinite().tolist() == [True, False, False]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 99), st.floats(0, 1, exclude_max=True))
def test_draws_are_the_inverse_of_the_running_sum(size: int, seed: int, uniform: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, size) * 3
    x[1, torch.randperm(size)[: size // 2]] = -torch.inf
    uniforms = torch.tensor([uniform, uniform / 2, 0.0], dtype=torch.float64)
    ids, logprobs = logits.draw(x, uniforms)
    assert torch.equal(logprobs, x.gather(-1, ids[:, None])[:, 0] - logits.statistics(x).lse)
    sums = x.double().softmax(-1).cumsum(-1)
    for row, id in enumerate(ids.tolist()):
        assert x[row, id] > -torch.inf
        before = float(sums[row, id - 1]) if id else 0.0
        assert before - 1e-6 <= uniforms[row] <= float(sums[row, id]) + 1e-6
    alone, _ = logits.draw(x[1:2], uniforms[1:2])
    assert alone[0] == ids[1]


def test_only_float32_of_a_cpu_is_served() -> None:
    assert library.serves(torch.ones(2))
    assert not library.serves(torch.ones(2, dtype=torch.bfloat16)) and not library.serves(torch.ones(2, device="meta"))
