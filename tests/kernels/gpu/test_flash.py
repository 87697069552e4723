"""Flash attention over packed sequences: what the installed torch takes, and on a GPU the values of
the exact form.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.bounds import assert_within, attention_bounds
from weft.kernels import AttentionSpec, VarlenLengths, flash
from weft.models.attention import accelerator, rectangles
from weft.models.attention.contexts import AttentionInputs, Dense

from .varlen_contract import varlen_attn

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUTS = torch.tensor([0, 150, 161, 400], dtype=torch.int32)


def test_abilities_are_read_from_the_signature() -> None:
    def of_2_11(
        query: Tensor, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
    ) -> None: ...

    def without_splits(
        query: Tensor, *, enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None
    ) -> None: ...

    assert flash.FlashFeatures.from_function(of_2_11) == flash.FlashFeatures(
        grouped_heads=False, block_table=False
    )
    assert flash.FlashFeatures.from_function(without_splits) == flash.FlashFeatures(
        grouped_heads=True, block_table=False
    )


def test_a_cpu_and_odd_heads_are_not_served() -> None:
    cuda = torch.device("cuda", 0)
    assert not flash.serves(torch.device("cpu"), torch.bfloat16, 64)
    assert not flash.serves(cuda, torch.float32, 64)
    assert not flash.serves(cuda, torch.bfloat16, 12) and not flash.serves(
        cuda, torch.bfloat16, 512
    )


class Recorder:
    """Stands in for the kernel: keeps what it is given."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()
        self.named: dict[str, Any] = {}

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        self.given, self.named = given, named
        return given[0]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    flash.find_features()  # those of the installed torch
    monkeypatch.setattr(flash, "load_kernel", lambda: recorder)
    return recorder


@pytest.mark.parametrize("grouped", [True, False])
def test_training_asks_for_causal_attention_of_grouped_heads(
    kernel: Recorder, monkeypatch: pytest.MonkeyPatch, grouped: bool
) -> None:
    monkeypatch.setattr(flash, "find_features", lambda: flash.FlashFeatures(grouped, False))
    q, k = torch.zeros(400, 4, 16), torch.zeros(400, 2, 16)
    at = VarlenLengths(CUTS, CUTS, 239, 239)
    flash.attend_packed(q, k, k, at, AttentionSpec(0.25))
    assert kernel.named["window_size"] == (-1, 0) and kernel.named["scale"] == 0.25
    assert (
        kernel.given[1].shape[1] == (2 if grouped else 4)
        and ("enable_gqa" in kernel.named) == grouped
    )
    assert kernel.given[3:] == (CUTS, CUTS, 239, 239)
    flash.attend_packed(q, k, k, at, AttentionSpec(0.25, window=40))
    assert kernel.named["window_size"] == (39, 0), "the kernel does not count the query itself"


def test_the_installed_kernel_takes_what_it_is_given(kernel: Recorder) -> None:
    from torch.nn.attention.varlen import varlen_attn as installed

    signature, q, k = inspect.signature(installed), torch.zeros(400, 4, 16), torch.zeros(400, 2, 16)
    flash.attend_packed(q, k, k, VarlenLengths(CUTS, CUTS, 239, 239), AttentionSpec(0.25))
    signature.bind(*kernel.given, **kernel.named)
    if flash.FlashFeatures.from_function(installed).block_table:
        keys, table = torch.zeros(7, 256, 2, 16), torch.zeros(3, 2, dtype=torch.int32)
        flash.attend_paged(
            torch.zeros(3, 4, 16),
            keys,
            keys,
            table,
            torch.ones(3, dtype=torch.int32),
            AttentionSpec(0.25),
        )
        signature.bind(*kernel.given, **kernel.named)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("grouped", [True, False])
def test_packs_by_the_kernels_contract(
    monkeypatch: pytest.MonkeyPatch, grouped: bool, window: int | None
) -> None:
    q, k, v = (torch.randn(400, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    given = AttentionInputs(q, k, v, AttentionSpec(0.25, window), 0)
    expected = rectangles.attend_dense(given, Dense(CUTS, 239))
    monkeypatch.setattr(flash, "serves", lambda *_: True)
    monkeypatch.setattr(flash, "find_features", lambda: flash.FlashFeatures(grouped, False))
    monkeypatch.setattr(flash, "load_kernel", lambda: varlen_attn)
    found = accelerator.attend_dense(given, Dense(CUTS, 239))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_pages_are_never_split(kernel: Recorder) -> None:
    keys = torch.zeros(7, 256, 2, 16)
    table, used = (
        torch.zeros(3, 2, dtype=torch.int32),
        torch.tensor([1, 300, 256], dtype=torch.int32),
    )
    flash.attend_paged(torch.zeros(3, 4, 16), keys, keys, table, used, AttentionSpec(0.25))
    assert (
        kernel.named["num_splits"] == 1
        and kernel.named["block_table"] is table
        and kernel.named["seqused_k"] is used
    )
    assert kernel.given[3].tolist() == [0, 1, 2, 3] and kernel.given[5:] == (1, 512)


def test_one_query_a_row_needs_no_causal_mask(kernel: Recorder) -> None:
    """Asked for one, the kernel would give up computing the query heads of a key head together."""
    keys = torch.zeros(7, 256, 2, 16)
    table, used = (
        torch.zeros(3, 2, dtype=torch.int32),
        torch.tensor([1, 300, 256], dtype=torch.int32),
    )
    flash.attend_paged(torch.zeros(3, 4, 16), keys, keys, table, used, AttentionSpec(0.25))
    assert kernel.named["window_size"] == (-1, -1)
    flash.attend_paged(
        torch.zeros(3, 4, 16), keys, keys, table, used, AttentionSpec(0.25, window=40)
    )
    assert kernel.named["window_size"] == (39, 0)


@pytest.mark.parametrize("window", [None, 40])
def test_pages_by_the_kernels_contract(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    q, keys, values, table, used = pages_of(torch.float64)
    monkeypatch.setattr(flash, "load_kernel", lambda: varlen_attn)
    spec = AttentionSpec(0.125, window)
    assert_close(
        flash.attend_paged(q, keys, values, table, used, spec),
        by_row(q, keys, values, table, used, spec),
        rtol=1e-12,
        atol=1e-12,
    )


def pages_of(dtype: torch.dtype, rows: int = 3, device: str = "cpu") -> list[Tensor]:
    """(q, keys, values, table, used): rows of 8 query heads over 2 key heads, of 1 to 512 tokens in
    up to two pages.
    """
    torch.manual_seed(0)
    q = torch.randn(rows, 8, 64, device=device, dtype=dtype)
    keys, values = (
        torch.randn(1 + 2 * rows, 256, 2, 64, device=device, dtype=dtype) for _ in range(2)
    )
    table = 1 + torch.randperm(2 * rows).view(rows, 2)
    used = torch.linspace(1, 512, rows).long()
    return [q, keys, values, table.to(device, torch.int32), used.to(device, torch.int32)]


def by_row(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, used: Tensor, spec: AttentionSpec
) -> Tensor:
    """The last token of each row over the pages that it has, by the definition, in float64."""
    rows = []
    for row, count in enumerate(used.tolist()):
        first = 0 if spec.window is None else max(0, count - spec.window)
        k, v = (
            x[table[row].long()].flatten(0, 1)[first:count].double().cpu() for x in (keys, values)
        )
        k, v = k.repeat_interleave(4, 1), v.repeat_interleave(4, 1)
        weights = torch.softmax(
            torch.einsum("hd,khd->hk", q[row].double().cpu(), k) * spec.scale, -1
        )
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


def assert_by_row(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    used: Tensor,
    spec: AttentionSpec,
) -> None:
    """That `out` in bfloat16 is `by_row`, but for what is lost in float32 and in rounding to it."""
    # each row over all of its pages, of which those keys that do not count are not seen
    width, exact = table.shape[1] * keys.shape[1], by_row(q, keys, values, table, used, spec)
    place, count = torch.arange(width), used.cpu()[:, None]
    seen = place < count
    if spec.window is not None:
        seen &= place >= count - spec.window
    for row in range(len(q)):
        k, v = (x[table[row].long()].flatten(0, 1) for x in (keys, values))
        bound = attention_bounds(
            q[row : row + 1],
            k,
            v,
            seen[row : row + 1],
            spec.scale,
            torch.zeros_like(q[row : row + 1]),
            kept=torch.bfloat16,
        )[0]
        assert_within(out[row].cpu(), exact[row], bound[0], f"row {row}")


HOPPER, AMPERE = torch.device("cuda", 0), torch.device("cuda", 1)


class Registry:
    """Stands in for what torch knows of other flash attention than its own; `refusal` is raised
    where one is activated.
    """

    def __init__(self, patch: pytest.MonkeyPatch, refusal: Exception | None = None) -> None:
        self.current: str | None = None
        self.refusal = refusal
        patch.setattr(
            torch.cuda,
            "get_device_capability",
            lambda device: (9, 0) if device == HOPPER else (8, 6),
        )
        patch.setattr(torch.nn.attention, "activate_flash_attention_impl", self.activate)
        patch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: self.current)
        patch.setattr(
            torch.nn.attention, "restore_flash_attention_impl", lambda: self.activate(None)
        )

    def activate(self, name: str | None) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.current = name


def test_version_3_is_taken_where_it_is_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch)
    for device in (AMPERE, torch.device("cpu")):
        assert flash.choose(device, "auto") is None and registry.current is None
        with pytest.raises(RuntimeError, match=r"is not a GPU of compute capability 9\.x"):
            flash.choose(device, "fa3")
    assert (
        flash.choose(HOPPER, "auto")
        == flash.choose(HOPPER, "fa3")
        == "flash attention 3 of flash_attn_interface"
    )
    assert flash.find_active_implementation() == registry.current == flash.FA3_NAME
    assert flash.choose(HOPPER, "fa2") is None and registry.current is None


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            ModuleNotFoundError("No module named 'flash_attn_interface'"),
            "flash_attn_interface.* is not installed",
        ),
        (
            RuntimeError("does not expose FA3 backward kernels"),
            "does not expose FA3 backward kernels",
        ),
    ],
)
def test_without_version_3_the_plan_says_why(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception, said: str
) -> None:
    Registry(monkeypatch, refusal)
    note = flash.choose(HOPPER, "auto")
    assert note is not None and re.match(
        f"flash attention is torch's own, version 2: .*{said}", note
    )
    with pytest.raises(RuntimeError, match=said):
        flash.choose(HOPPER, "fa3")


def test_another_kernel_that_the_user_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch)
    registry.current = "FA4"
    assert "FA4 is already active" in str(flash.choose(HOPPER, "auto"))
    assert flash.choose(HOPPER, "fa2") is None and registry.current == "FA4"


def test_the_installed_torch_has_a_place_for_version_3() -> None:
    assert flash.FA3_NAME in torch.nn.attention.list_flash_attention_impls()


def test_version_3_reads_pages_by_their_table_alone(
    kernel: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, pages = torch.zeros(2, 4, 16), torch.zeros(3, 8, 2, 16)
    table, used = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    flash.attend_paged(q, pages, pages, table, used, AttentionSpec(0.25))
    assert kernel.given[4].tolist() == [0, 16, 32]
    Registry(monkeypatch).current = flash.FA3_NAME
    flash.attend_paged(q, pages, pages, table, used, AttentionSpec(0.25))
    assert kernel.given[4] is None and kernel.named["block_table"] is table


@needs_cuda
@pytest.mark.parametrize("window", [None, 40])
def test_the_kernel_agrees_with_the_exact_form(window: int | None) -> None:
    torch.manual_seed(0)
    ours = [
        torch.randn(400, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (8, 2, 2)
    ]
    theirs = [x.detach().double().cpu().requires_grad_() for x in ours]
    spec = AttentionSpec(0.125, window)
    out = flash.attend_packed(*ours, VarlenLengths(CUTS.cuda(), CUTS.cuda(), 239, 239), spec)
    expected = rectangles.attend_dense(AttentionInputs(*theirs, spec, 0), Dense(CUTS, 239))
    weights = torch.randn_like(expected).bfloat16().double()
    found = torch.autograd.grad(out, ours, weights.to("cuda", torch.bfloat16))
    exact = torch.autograd.grad(expected, theirs, weights)
    # scores are summed in float32; weights, their gradients and results are rounded to bfloat16
    place = torch.arange(400)
    segment = torch.bucketize(place, CUTS[1:].long(), right=True)
    seen = (segment[:, None] == segment) & (place <= place[:, None])
    if window is not None:
        seen &= place > place[:, None] - window
    bounds = attention_bounds(*theirs, seen, 0.125, weights, kept=torch.bfloat16)
    for a, b, bound in zip((out, *found), (expected, *exact), bounds, strict=True):
        assert a.dtype == torch.bfloat16
        assert_within(a.cpu(), b, bound)


@needs_cuda
@pytest.mark.parametrize("window", [None, 40])
def test_pages_agree_with_the_exact_form(window: int | None) -> None:
    if not flash.find_features().block_table:
        pytest.skip("this torch has no block tables")
    given, spec = pages_of(torch.bfloat16, device="cuda"), AttentionSpec(0.125, window)
    q, keys, values, table, used = given
    out = flash.attend_paged(q, keys, values, table, used, spec)
    assert_by_row(out, q, keys, values, table, used, spec)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 3, 8, 64, 200])
@pytest.mark.parametrize("window", [None, 40])
def test_automatic_splits_write_every_row(
    monkeypatch: pytest.MonkeyPatch, rows: int, window: int | None
) -> None:
    """Where this passes on a build of torch, its own number of splits is right; weft does not use
    it, so a build where it is wrong is no failure. Memory that is handed out is full of what no
    attention gives: a row that stays unwritten shows.
    """
    if not flash.find_features().block_table:
        pytest.skip("this torch has no block tables")
    q, keys, values, table, used = pages_of(torch.bfloat16, rows, "cuda")
    spec, kernel = AttentionSpec(0.125, window), flash.load_kernel()
    monkeypatch.setattr(
        flash,
        "load_kernel",
        lambda: lambda *given, **named: kernel(*given, **{**named, "num_splits": None}),
    )
    poison = torch.full((64, *q.shape), 1e4, device="cuda", dtype=q.dtype)
    del poison
    out = flash.attend_paged(q, keys, values, table, used, spec)
    try:
        assert_by_row(out, q, keys, values, table, used, spec)
    except AssertionError as wrong:
        pytest.skip(
            f"torch's own number of splits is wrong in this build: {str(wrong).splitlines()[0]}"
        )
