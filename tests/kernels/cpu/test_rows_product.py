"""Products against torch in float64 up to what their sums may lose, at sizes that fill no vector;
and a row's bits do not depend on its company.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bounds import assert_within, gamma, kernel_product_bound, unit
from weft.kernels.cpu import library, rows


@pytest.fixture(params=["tiles", "vectors"])
def products_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the processor's tiles, where it has such, and in its vectors."""
    kernels = library.load_library()
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
    st.integers(1, 300),
    st.integers(1, 330),
    st.integers(1, 1100),
    st.tuples(*[st.booleans()] * 2),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.booleans(),
    st.integers(0, 9),
)
def test_products(
    count: int,
    size: int,
    terms: int,
    transposed: tuple[bool, bool],
    gaps: tuple[int, int],
    biased: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, weight, bias = (
        torch.randn(count, terms),
        torch.randn(size, terms),
        torch.randn(size) if biased else None,
    )
    left, right = map(laid, (x, weight), transposed, gaps)
    assert rows.serves(left, right)
    made = rows.product(left, right, bias)
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    lost = kernel_product_bound(x, weight.T, more=2)
    # the bias, which is added last, or what is added to
    assert_within(made, wide, lost if bias is None else lost + gamma(1) * bias.double().abs())
    row = seed % count
    assert torch.equal(
        rows.product(x[row : row + 1], weight, bias), made[row : row + 1]
    )  # by the kernel for few rows
    total = torch.randn(count, size)
    whole = total.double() + x.double() @ weight.double().T
    # the sum of each piece of at most 320 terms is added to it
    lost = lost + gamma(terms // 128 + 2) * total.double().abs()
    rows.add_product(total, left, right)
    assert_within(total, whole, lost)


@pytest.mark.usefixtures("products_by")
def test_products_do_not_depend_on_the_threads() -> None:
    left, right = torch.randn(400, 500), torch.randn(300, 500)
    # many: which threads share row by row
    other, many = left.T.contiguous().T, torch.randn(1700, 500)
    threads = torch.get_num_threads()
    try:
        made = []
        for count in (1, 2, 3, 7, 40):
            torch.set_num_threads(count)
            made += [
                rows.product(left, right),
                rows.product(other, right),
                rows.product(left[:, :270], right[:, :270]),
                rows.product(left[:70], right),
                rows.product(many, right),
            ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, made[at % 5]) for at, one in enumerate(made))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0][:70], made[3])
    exact = many.double() @ right.double().T
    assert_within(made[4], exact, kernel_product_bound(many, right.T))


@pytest.mark.default_cases("vectors-33")
@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("size", [33, 290])
def test_products_of_a_result_that_no_cache_holds(size: int) -> None:
    """It is gone over less often: more of the columns is packed at once."""
    one, weight = torch.randn(1, 5000), torch.randn(size, 5000)
    many, expected = one.expand(40_000, 5000), rows.product(one, weight)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # shared by more, its parts may fit
        assert bool((rows.product(many, weight) == expected).all())
        total = torch.zeros(40_000, size)
        rows.add_product(total, many, weight)
        assert bool((total == expected).all())
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("count", [3, 300])  # by either kernel
def test_products_are_as_exact_as_float32(count: int) -> None:
    torch.manual_seed(0)
    spread = torch.logspace(-18, 18, 40).repeat_interleave(
        16
    )  # each pair of terms comes to about one, or to nothing beside it
    x, weight = torch.randn(count, 640) * spread, torch.randn(200, 640) / spread
    wide = x.double() @ weight.double().T
    error = (rows.product(x, weight).double() - wide).square().mean().sqrt()
    # Tiles round the most sums, six a term. Each loses up to u times itself, evenly distributed: in
    # the mean of squares u^2 / 3 of its own, which grows evenly to K. Together that is 6 K times u^2
    # / 3 times K / 2, or (u K)^2. With two parts instead of three the error is 1e-4.
    assert error < unit(torch.float32) * 640
    positive, other = torch.rand(count, 640), torch.rand(200, 640)
    exact = positive.double() @ other.double().T
    # What is left out has no sign of its own. Sums of positive terms grow evenly, and their squares
    # are a third of the last one's in the mean, so that n roundings lose u^2 n / 9 of it. That is the
    # variance of one element. Of the mean of all, six deviations are allowed; a sign makes it 6e-8.
    deviation = unit(torch.float32) * (6 * 640 / 9 / exact.numel()) ** 0.5
    assert abs((rows.product(positive, other).double() / exact - 1).mean()) < 6 * deviation
    one = torch.zeros(count, 640)
    one[:, 7] = 1 + 2**-23  # all digits of either side reach the result
    assert torch.equal(rows.product(one, weight), one[:, 7:8] * weight[:, 7])
    assert torch.equal(rows.product(x, one[:1]), one[:1, 7] * x[:, 7:8])


@pytest.mark.usefixtures("products_by")
@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_products_of_numbers_that_are_none_are_none(count: int, odd: float) -> None:
    x, weight = torch.randn(count, 70), torch.randn(90, 70)
    clean = rows.product(x, weight)
    x[1, 33] = weight[5, 2] = odd
    made = rows.product(x, weight)
    there = torch.ones(count, 90, dtype=torch.bool)
    there[1], there[:, 5] = False, False
    assert torch.equal(made.isfinite(), there) and torch.equal(made[there], clean[there])


@pytest.mark.parametrize(
    "x", [torch.ones(4, 8, dtype=torch.float64), torch.ones(0, 8), torch.ones(7), torch.tensor(1.0)]
)
def test_products_that_are_left_to_torch(x: Tensor) -> None:
    assert not rows.serves(x, torch.ones(3, 8, dtype=x.dtype))
    assert not rows.serves(torch.ones(4, 3), torch.ones(8, 4))


def test_sizes_that_do_not_fit_are_refused() -> None:
    left, right = torch.ones(200, 8), torch.ones(3, 8)
    with pytest.raises(AssertionError, match="one element per row of right"):
        rows.product(left, right, torch.ones(2))
    for total in (torch.ones(200, 2), torch.ones(3, 200).T):
        with pytest.raises(AssertionError):
            rows.add_product(total, left, right)
    with pytest.raises(AssertionError):
        rows.add_product(torch.ones(2, 100, 3), left.view(2, 100, 8), right)


def test_a_bias_of_another_dtype_is_cast() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5).bfloat16()
    exact = x.double() @ weight.double().T + bias.double()
    lost = kernel_product_bound(x, weight.T, more=1) + gamma(1) * bias.double().abs()
    assert_within(rows.product(x, weight, bias), exact, lost)
