"""FlexAttention's masks: who sees whom, the blocks that follow, and the outputs and gradients of a
shared prefix.

A CPU runs it unfused, and torch refuses gradients there only because its fused kernel has none: the
check is lifted here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.testing import assert_close

from tests.bounds import assert_within, attention_bounds
from weft.kernels import AttentionSpec, flex
from weft.models.attention import cached, rectangles
from weft.models.attention.contexts import AttentionInputs, Dense, PrefixContinuation, Prefixed

CUTS = [0, 150, 290, 301, 520, 700]
JOINS = (PrefixContinuation((0, 150), (150, 301)), PrefixContinuation((301, 520), (520, 700)))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    # unfused, it is traced with sizes that vary; other tests' sizes would make more of them vary
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)


def dense(device: str = "cpu") -> Dense:
    return Dense(torch.tensor(CUTS, dtype=torch.int32, device=device), int(np.diff(CUTS).max()))


def prefixed(device: str = "cpu") -> Prefixed:
    return Prefixed(dense(device), JOINS, torch.tensor([289, 300, 699], device=device))


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu", dim: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(CUTS[-1], h, dim, dtype=dtype, device=device, requires_grad=True)
        for h in (4, 2, 2)
    ]


def visible(context: Dense | Prefixed, window: int | None) -> Tensor:
    """bool [T, T] by the definition."""
    place = torch.arange(CUTS[-1])
    segment = torch.bucketize(place, torch.tensor(CUTS[1:]), right=True)
    seen = (segment[:, None] == segment) & (place <= place[:, None])
    if window is not None:
        seen &= place > place[:, None] - window
    for join in context.continuations if isinstance(context, Prefixed) else ():
        seen[slice(*join.continuation), slice(*join.prefix)] = True
    return seen


def written_out(
    q: Tensor, k: Tensor, v: Tensor, context: Dense | Prefixed, spec: AttentionSpec
) -> Tensor:
    """Attention by the definition, all scores at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    weights = torch.softmax(logits.masked_fill(~visible(context, spec.window), -torch.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def joins_of(context: Dense | Prefixed) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return (
        [(join.prefix, join.continuation) for join in context.continuations]
        if isinstance(context, Prefixed)
        else []
    )


def spans_of(context: Dense | Prefixed, length: int, window: int | None) -> flex.KeySpans:
    return flex.KeySpans.from_segments(context.dense.cu_seqlens, joins_of(context), length, window)


def attend(
    q: Tensor, k: Tensor, v: Tensor, context: Dense | Prefixed, spec: AttentionSpec
) -> Tensor:
    """By FlexAttention."""
    mask = flex.build_pack_mask(context.dense.cu_seqlens, joins_of(context), len(q), spec.window)
    return flex.attend_packed(q, k, v, mask, spec)


def full_mask(spans: flex.KeySpans) -> Tensor:
    index = torch.arange(len(spans.near))
    return spans.mask_mod(None, None, index[:, None], index[None])


@pytest.mark.parametrize(
    ("context", "window"), [(dense(), None), (dense(), 40), (prefixed(), None)]
)
def test_the_mask_is_the_definition_and_filling_sees_itself(
    context: Dense | Prefixed, window: int | None
) -> None:
    spans = spans_of(context, CUTS[-1], window)
    mask, length = full_mask(spans), CUTS[-1]
    assert mask.shape == (1024, 1024)
    assert torch.equal(mask[:length, :length], visible(context, window))
    assert not mask[:length, length:].any() and not mask[length:, :length].any()
    assert torch.equal(mask[length:, length:], torch.eye(1024 - length, dtype=torch.bool))
    assert mask.any(1).all(), "a query that sees nothing has no softmax"


@pytest.mark.parametrize(
    ("context", "window"), [(dense(), None), (dense(), 40), (prefixed(), None)]
)
def test_no_block_with_a_visible_key_is_left_out(
    context: Dense | Prefixed, window: int | None
) -> None:
    spans = spans_of(context, CUTS[-1], window)
    cells = full_mask(spans).view(8, flex.BLOCK, 8, flex.BLOCK)
    some, every = spans.find_blocks()
    assert torch.equal(some, cells.any(3).any(1))
    assert torch.equal(every, cells.all(3).all(1))
    block_mask = spans.build_mask()
    listed = torch.zeros(8, 8, dtype=torch.bool)
    for count, order in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    ):
        for row in range(8):
            listed[row, order[0, 0, row, : count[0, 0, row]].long()] = True
    assert torch.equal(listed, some)


def test_a_block_that_only_a_prefix_fills_is_full() -> None:
    context = Prefixed(
        Dense(torch.tensor([0, 256, 512], dtype=torch.int32), 256),
        (PrefixContinuation((0, 256), (256, 512)),),
        torch.tensor([511]),
    )
    some, every = spans_of(context, 512, None).find_blocks()
    assert some.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert every.int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]


def test_a_shared_prefix_is_that_of_the_joined_parts_forward_and_backward() -> None:
    context, spec = prefixed(), AttentionSpec(0.25)
    ours, theirs = inputs(torch.float64), inputs(torch.float64)
    out, expected = attend(*ours, context, spec), cached.attend(*theirs, context.parts, spec.scale)
    assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, ours, weights),
        torch.autograd.grad(expected, theirs, weights),
        strict=True,
    ):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "spec", [AttentionSpec(0.25, softcap=2.0), AttentionSpec(0.25, window=40, softcap=2.0)]
)
def test_capped_scores_are_those_of_the_written_out_form(spec: AttentionSpec) -> None:
    ours, theirs = inputs(torch.float64), inputs(torch.float64)
    out = attend(*ours, dense(), spec)
    expected = rectangles.attend_dense(AttentionInputs(*theirs, spec, 0), dense())
    assert_close(out, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, ours, weights),
        torch.autograd.grad(expected, theirs, weights),
        strict=True,
    ):
        assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("group", [1, 2, 3, 6, 7])
def test_groups_of_decoding_are_filled_up_to_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """The kernel for few queries takes no others; what is filled in changes no number."""
    asked: list[int] = []
    attend = flex.attend

    def spy(q: Tensor, k: Tensor, *rest: object) -> Tensor:
        asked.append(q.shape[1] // k.shape[1])
        return attend(q, k, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(flex, "attend", spy)
    torch.manual_seed(0)
    q = torch.randn(2, 3 * 2 * group, 16, dtype=torch.float64)[
        :, : 2 * group
    ]  # not contiguous, as after a joint product
    keys, values = (torch.randn(4, 16, 2, 16, dtype=torch.float64) for _ in range(2))
    table, used = (
        torch.tensor([[3, 1], [2, 0]], dtype=torch.int32),
        torch.tensor([20, 7], dtype=torch.int32),
    )
    out = flex.attend_paged(
        q, keys, values, flex.build_page_mask(table, used, (4, 16), None), AttentionSpec(0.25)
    )
    for row, count in enumerate(used.tolist()):
        k, v = (
            x[table[row].long()].flatten(0, 1)[:count].repeat_interleave(group, 1)
            for x in (keys, values)
        )
        weights = torch.softmax(torch.einsum("hd,khd->hk", q[row], k) * 0.25, -1)
        assert_close(out[row], torch.einsum("hk,khd->hd", weights, v), rtol=1e-12, atol=1e-12)
    assert asked == [{1: 1, 2: 2, 3: 4, 6: 8, 7: 8}[group]]


def test_few_sizes_are_compiled() -> None:
    assert [flex.compute_padded_length(n) for n in (1, 128, 129, 1000, 1024, 8000)] == [
        128,
        128,
        256,
        1024,
        1024,
        8192,
    ]
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        torch_flex.flex_attention, backend=counter, dynamic=False, fullgraph=True
    )
    for length, cut in ((300, 40), (300, 90), (280, 33), (500, 33), (130, 20)):
        context = Dense(torch.tensor([0, cut, length], dtype=torch.int32), length)
        q, k, v = (
            torch.randn(1, heads, flex.compute_padded_length(length), 16) for heads in (4, 2, 2)
        )
        compiled(
            q,
            k,
            v,
            block_mask=spans_of(context, length, None).build_mask(),
            scale=0.25,
            enable_gqa=True,
        )
    assert counter.frame_count == 2, (
        "one for 512 tokens and one for 256, whatever the sequences in them"
    )


@torch.no_grad()
def test_a_ragged_run_compiles_each_size_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding over one number of pages, by layers that differ in their scale, as rows end one
    after the other; and packs of many lengths.
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        torch_flex.flex_attention, backend=counter, dynamic=False, fullgraph=True
    )
    monkeypatch.setattr(flex, "_is_unfused", lambda _: False)
    monkeypatch.setattr(flex, "_compile", lambda: compiled)
    keys, values = (torch.randn(16, 16, 2, 16) for _ in range(2))
    for length in (40, 30, 20, 12, 3):
        for rows in (4, 2, 1):
            table = torch.arange(1, 1 + 3 * rows, dtype=torch.int32).view(rows, 3)
            mask = flex.build_page_mask(
                table, torch.full((rows,), length, dtype=torch.int32), (16, 16), None
            )
            for layer in range(1, 4):
                flex.attend_paged(
                    torch.randn(rows, 6, 16), keys, values, mask, AttentionSpec(0.25 / layer)
                )
    assert counter.frame_count == 3, "one for each number of rows"
    for length in (200, 150, 130, 100, 40):
        context = Dense(torch.tensor([0, 7, length], dtype=torch.int32), length)
        q, k, v = (torch.randn(length, heads, 16) for heads in (4, 2, 2))
        for layer in range(1, 4):
            attend(q, k, v, context, AttentionSpec(0.25 / layer))
    assert counter.frame_count == 5, "one more for packs of up to 256 tokens and one for up to 128"


def test_without_a_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert not flex.serves(torch.device("cpu"), 64)
    for makes in (True, False):
        monkeypatch.setattr(flex, "can_compile", lambda makes=makes: makes)
        assert flex.serves(cuda, 64) == makes and not flex.serves(cuda, 8)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.exhaustive
def test_a_fused_kernel_reads_the_listed_blocks_alone() -> None:
    """Compiled for a CPU, the forward pass skips blocks that are not listed, as it does on a GPU: a
    shared prefix, and pages of which each row reads its own.
    """
    compiled = torch.compile(torch_flex.flex_attention, dynamic=False, fullgraph=True)
    q, k, v = (torch.randn(1, heads, 1024, 32) for heads in (4, 2, 2))
    spans = spans_of(prefixed(), CUTS[-1], None)
    settings: dict[str, Any] = {
        "block_mask": spans.build_mask(),
        "scale": 0.25,
        "enable_gqa": True,
    }

    def check(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> None:
        """Compiled in float32, up to what that loses, against float64 by the plain formula. `seen`
        is of each sequence's queries, which all read the same keys.
        """
        found = compiled(q, k, v, **settings)
        exact = torch_flex.flex_attention(q.double(), k.double(), v.double(), **settings)
        keys, values = (x[0].transpose(0, 1) for x in (k, v))
        for row, one in enumerate(q):
            queries = one.transpose(0, 1)
            bound = attention_bounds(
                queries, keys, values, seen[row], 0.25, torch.zeros_like(queries)
            )[0]
            assert_within(found[row].transpose(0, 1), exact[row].transpose(0, 1), bound)

    check(q, k, v, full_mask(spans)[None])
    table = torch.tensor([[3, 5, 0], [1, 0, 0], [4, 2, 6], [0, 0, 0]], dtype=torch.int32)
    used = torch.tensor([300, 256, 700, 1], dtype=torch.int32)
    q, k, v = (
        torch.randn(4, 4, 1, 32),
        torch.randn(1, 2, 7 * 256, 32),
        torch.randn(1, 2, 7 * 256, 32),
    )
    for window in (None, 100):
        settings["block_mask"] = flex.build_page_mask(table, used, (7, 256), window)
        seen = torch.zeros(4, 1, 7 * 256, dtype=torch.bool)
        for row, count in enumerate(used.tolist()):
            for place in range(0 if window is None else max(0, count - window), count):
                seen[row, 0, int(table[row, place // 256]) * 256 + place % 256] = True
        check(q, k, v, seen)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_agrees_with_the_exact_form(dtype: torch.dtype) -> None:
    """Up to what float32 loses; in bfloat16 weights, their gradients and results are rounded too."""
    for spec, context in (
        (AttentionSpec(0.25), prefixed),
        (AttentionSpec(0.25, window=40, softcap=2.0), dense),
    ):
        ours = [x.detach().cuda().requires_grad_() for x in inputs(dtype)]
        theirs = [x.detach().double().cpu().requires_grad_() for x in ours]
        out, expected = attend(*ours, context("cuda"), spec), written_out(*theirs, context(), spec)
        weights = torch.randn_like(expected).to(dtype).double()
        found = torch.autograd.grad(out, ours, weights.to("cuda", dtype))
        exact = torch.autograd.grad(expected, theirs, weights)
        bounds = attention_bounds(
            *theirs,
            visible(context(), spec.window),
            spec.scale,
            weights,
            kept=None if dtype == torch.float32 else dtype,
            softcap=spec.softcap,
        )
        for a, b, bound in zip((out, *found), (expected, *exact), bounds, strict=True):
            assert a.dtype == dtype
            assert_within(a.cpu(), b, bound)
