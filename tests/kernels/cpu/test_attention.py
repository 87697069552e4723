"""Attention by segments against torch in float64, up to what its arithmetic may lose: values and
gradients; and bits that no company changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bounds import assert_within, attention_bounds
from weft.kernels import VarlenSegments, rotate
from weft.kernels.cpu import attention


def keys_of_rows(
    rows: int, own: Tensor, across: Tensor | None, window: int | None
) -> list[list[int]]:
    """The keys that each row sees."""
    seen: list[list[int]] = [[] for _ in range(rows)]
    for row, count, key, keys in own.tolist():
        for i in range(count):
            stop = key + keys - count + i + 1
            seen[row + i] = list(range(max(key, stop - window) if window else key, stop))
    for row, count, key, keys in [] if across is None else across.tolist():
        for i in range(count):
            seen[row + i] += range(key, key + keys)
    return seen


def visible(rows: int, keys: int, own: Tensor, across: Tensor | None, window: int | None) -> Tensor:
    """The same as bool [rows, keys]."""
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    for row, seen in enumerate(keys_of_rows(rows, own, across, window)):
        mask[row, seen] = True
    return mask


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tensor,
    across: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """The same, a row at a time."""
    group, outs = q.shape[1] // k.shape[1], []
    for row, seen in enumerate(keys_of_rows(len(q), own, across, window)):
        mine, theirs = (x[seen].repeat_interleave(group, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,jhd->hj", q[row], mine) * scale).softmax(-1)
        outs.append(torch.einsum("hj,jhd->hd", weights, theirs))
    return torch.stack(outs)


def bounds(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> list[Tensor]:
    """Of the kernels, which hold the scores of 256 keys at once."""
    return attention_bounds(q, k, v, *rest, **more, part=256)


def tensors(
    tokens: int, heads: int, kv: int, dim: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    qk = torch.randn(tokens, heads + kv, dim)
    return qk[:, :heads], qk[:, heads:], torch.randn(tokens, kv, dim)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    own: Tensor,
    across: Tensor | None,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """The kernels on queries, keys and values side by side."""
    seen = VarlenSegments(own, across, window)
    return attention.attend(torch.cat([q, k, v], dim=1), k.shape[1], None, seen, scale)


def packed(lengths: list[int]) -> Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor([(start, n, start, n) for start, n in zip(starts, lengths, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.sampled_from([3, 8, 16, 24, 40, 64, 100]),
    st.sampled_from([None, 1, 5, 33]),
    st.booleans(),
)
def test_values_and_gradients(
    lengths: list[int], heads: tuple[int, int], dim: int, window: int | None, prefixed: bool
) -> None:
    q, k, v = tensors(sum(lengths), *heads, dim)
    own = packed(lengths)
    across = (
        torch.tensor([(lengths[0], sum(lengths[1:]), 0, lengths[0])])
        if prefixed and len(lengths) > 1
        else None
    )
    window = None if across is not None else window
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, own, across, dim**-0.5, window)
    expected = plain(*wide, own, across, dim**-0.5, window)
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad_out)
    wanted = torch.autograd.grad(expected, wide, grad_out.double())
    seen = visible(len(q), len(k), own, across, window)
    lost = bounds(q, k, v, seen, dim**-0.5, grad_out)
    for one, other, bound in zip((out, *found), (expected, *wanted), lost, strict=True):
        assert_within(one, other, bound)


def test_heads_and_gradients_may_lie_otherwise() -> None:
    side_by_side, seen = torch.randn(9, 6, 16), VarlenSegments(packed([9]))
    strided = side_by_side.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, same = (
        attention.attend(x, 2, None, seen, 0.2) for x in (strided, side_by_side.requires_grad_())
    )
    assert strided.stride(2) != 1 and torch.equal(out, same)
    for grad_out in (torch.randn(16, 2, 9).permute(2, 1, 0), torch.randn(9, 1, 1).expand(9, 2, 16)):
        (made,) = torch.autograd.grad(out, strided, grad_out, retain_graph=True)
        (wanted,) = torch.autograd.grad(
            same, side_by_side, grad_out.contiguous(), retain_graph=True
        )
        assert torch.equal(made, wanted)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2)])
def test_queries_and_keys_are_rotated_before_and_their_gradients_after(heads: int, kv: int) -> None:
    lengths = [5, 40, 1, 20]
    own, angles = packed(lengths), torch.randn(sum(lengths), 1, 12)
    cos, sin = angles.cos(), angles.sin()
    side_by_side = torch.cat(tensors(sum(lengths), heads, kv, 24), dim=1).requires_grad_()
    wide = side_by_side.detach().double().requires_grad_()
    out = attention.attend(side_by_side, kv, (cos, sin), VarlenSegments(own), 0.2)
    q, k, v = wide.split([heads, kv, kv], dim=1)
    q, k = (rotate(x, cos.double(), sin.double()) for x in (q, k))
    expected = plain(q, k, v, own, None, 0.2, None)
    grad_out = torch.randn_like(out)
    (made,) = torch.autograd.grad(out, side_by_side, grad_out, retain_graph=True)
    (again,) = torch.autograd.grad(out, side_by_side, grad_out)
    (wanted,) = torch.autograd.grad(expected, wide, grad_out.double())

    def turned(x: Tensor) -> Tensor:
        """What a rotation makes of sizes, whatever the signs."""
        first, second = x.double().abs().chunk(2, dim=-1)
        c, s = cos.double().abs(), sin.double().abs()
        return torch.cat([first * c + second * s, second * c + first * s], dim=-1)

    # Each of q and k meets three roundings of its two products. So do their gradients, which is less
    # than half of what the sums before lose: at least ten roundings of the same terms.
    seen = visible(len(q), len(k), own, None, None)
    sizes = tuple(turned(x) for x in side_by_side.detach().split([heads, kv, kv], dim=1)[:2])
    of_out, of_q, of_k, of_v = bounds(q, k, v, seen, 0.2, grad_out, sizes=sizes, more=6)
    assert_within(out, expected, of_out)
    assert_within(made, wanted, torch.cat([1.5 * turned(of_q), 1.5 * turned(of_k), of_v], dim=1))
    assert torch.equal(made, again), "what is kept for the backward pass stays as it is"


def test_it_does_not_depend_on_the_threads() -> None:
    """More of them than there are parts, too."""
    lengths, made = [90, 1, 30, 17], list[Tensor]()
    q, k, v = tensors(sum(lengths), 4, 2, 32)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 40, 100):
            torch.set_num_threads(count)
            made.append(attend(q, k, v, packed(lengths), None, 0.2))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(made[0], other) for other in made[1:])


@pytest.mark.parametrize("length", [300, 700])
@pytest.mark.parametrize("window", [None, 100])
def test_more_keys_than_are_held_at_once(length: int, window: int | None) -> None:
    q, k, v = tensors(length, 2, 1, 32)
    q = q * 2  # so that the largest score moves from chunk to chunk
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, expected = (
        of(*x, packed([length]), None, 0.2, window) for of, x in ((attend, leaves), (plain, wide))
    )
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, grad_out)
    wanted = torch.autograd.grad(expected, wide, grad_out.double())
    seen = visible(length, length, packed([length]), None, window)
    lost = bounds(q, k, v, seen, 0.2, grad_out)
    for one, other, bound in zip((out, *found), (expected, *wanted), lost, strict=True):
        assert_within(one, other, bound)


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("dim", [6, 20, 32, 80])
@pytest.mark.parametrize("window", [None, 40])
def test_a_row_has_the_same_bits_alone_and_in_a_pass(kv: int, dim: int, window: int | None) -> None:
    q, k, v = tensors(570, 4, kv, dim)
    whole = attention.attend_to(q, k, v, packed([570]), 0.3, causal=True, window=window)
    for row in (0, 1, 15, 16, 255, 256, 300, 569):
        segment = torch.tensor([(0, 1, 0, row + 1)])
        alone = attention.attend_to(
            q[row : row + 1], k, v, segment, 0.3, causal=True, window=window
        )
        assert torch.equal(alone.out[0], whole.out[row]) and torch.equal(
            alone.lse[0], whole.lse[row]
        )


@pytest.mark.parametrize("kv", [2, 4])
def test_a_cache_is_read_where_it_lies(kv: int) -> None:
    slots, room, dim = 3, 50, 16
    keys, values, q = (
        torch.randn(slots, kv, room, dim),
        torch.randn(slots, kv, room, dim),
        torch.randn(3, 4, dim),
    )
    keys[:, :, 40:] = torch.nan  # what no row sees is never read
    values[:, :, 40:] = torch.nan
    segments = torch.tensor(
        [
            (i, 1, slot * kv * room, used)
            for i, (slot, used) in enumerate([(2, 40), (0, 1), (1, 17)])
        ]
    )
    found = attention.attend_to(
        q, keys[0].transpose(0, 1), values[0].transpose(0, 1), segments, 0.25, causal=True
    )
    for i, (slot, used) in enumerate([(2, 40), (0, 1), (1, 17)]):
        mine, theirs = (x[slot, :, :used].transpose(0, 1) for x in (keys, values))
        whole, alone = torch.tensor([(0, 1, 0, used)]), q[i : i + 1]
        exact = plain(*(x.double() for x in (alone, mine, theirs)), whole, None, 0.25, None)
        seen = visible(1, used, whole, None, None)
        bound = bounds(alone, mine, theirs, seen, 0.25, torch.zeros_like(alone))[0]
        assert_within(found.out[i], exact[0], bound[0])


def test_values_of_another_size_are_left_to_torch() -> None:
    q, k, v = torch.ones(3, 4, 24), torch.ones(3, 4, 24), torch.ones(3, 4, 16)
    assert (
        attention.serves(q, k, k)
        and not attention.serves(q, k, v)
        and not attention.serves(q, k.double(), k)
    )
