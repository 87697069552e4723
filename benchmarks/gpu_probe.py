"""Each mechanism that weft uses on a GPU, alone and on small inputs, against the same in float64.

What fails is a line, and the next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.gpu_run import Run, describe, relative

BFLOAT16 = 0.02  # relative error of sums of products whose factors and results keep 8 bits
FLOAT32 = 1e-4  # of float32 sums of products of bfloat16 numbers, which are exact
FLIPPED = 0.02  # share of draws that differ: two kernels' float32 sums differ in the last digit
TILE = 128  # queries or keys of a block of FlexAttention


def probe(run: Run) -> None:
    """Every check, each with its seconds, the compilations that it waits for included."""
    device = run.where.device
    checks: Mapping[str, tuple[Callable[[torch.device], float], float]] = {
        "float32 sums of bfloat16 products": (wide_products, FLOAT32),
        "draws by the device": (draws, FLIPPED),
    }
    needing_a_gpu: Mapping[str, tuple[Callable[[torch.device], float], float]] = {
        "flash attention over packs and its gradients": (flash_attention, BFLOAT16),
        "compiled pointwise formulas": (formulas, BFLOAT16),
        "fused draws": (fused_draws, FLIPPED),
        "fused sums and norms": (fused_norm, BFLOAT16),
        "fused writes to the cache": (fused_store, 0.0),
        "FlexAttention over a shared prefix": (flex_attention, BFLOAT16),
        "captured graphs of three forms in a row": (graphs, FLOAT32),
    }
    if device.type == "cuda":
        checks = {**checks, **needing_a_gpu}
    else:
        for name in needing_a_gpu:
            run.leave_out(f"{name}, which needs a GPU")
    run.details["kernels"] = abilities()
    for name, (check, most) in checks.items():
        begin = time.monotonic()
        try:
            run.check(f"{name}: error", check(device), most, "relative")
        except Exception as error:
            run.wrong.append(f"{name}: {describe(error)}")
            run.write()
        run.add(f"{name}: time", time.monotonic() - begin, "s")


def abilities() -> dict[str, str]:
    """What the installed kernels can do."""
    from weft.kernels import flash, flex, fused

    return {
        "flash": str(flash.find_features()),
        "flash version": str(flash.find_version()),
        "flex": str(flex.can_compile()),
        "fused": ", ".join(sorted(fused.read_switches())) or "none",
    }


def drawn(
    device: torch.device, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normal numbers that are the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def wide_products(device: torch.device) -> float:
    from weft import kernels

    left, right = drawn(device, 512, 256), drawn(device, 384, 256, seed=1)
    total = drawn(device, 512, 384, seed=2, dtype=torch.float32)
    product = left.double().cpu() @ right.double().cpu().T
    expected = total.double().cpu() + product
    kernels.add_product(total, left, right)
    if device.type != "cuda":  # a CPU rounds each product to bfloat16 before it joins the sum
        return relative(kernels.wide_product(left, right).cpu(), product)
    return max(
        relative(kernels.wide_product(left, right).cpu(), product), relative(total.cpu(), expected)
    )


def draws(device: torch.device) -> float:
    """The share of draws that are not the exact ones: the inverse of the distribution function in
    float64.
    """
    from weft.engine.generation import sampling

    logits = drawn(device, 64, 8192, dtype=torch.float32) * 3
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    temperatures = torch.ones(64, dtype=torch.float64, device=device)
    found = sampling.sample_rows(logits, uniforms.to(device), temperatures).tokens.cpu()
    exact = sampling.invert_cdf(logits.double().cpu().softmax(-1), uniforms)
    return float((found != exact).float().mean())


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence, [T, heads, dim] each, with fewer heads of keys and values."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
        scores.shape[2] - scores.shape[1] + 1
    )
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def flash_attention(device: torch.device) -> float:
    from weft.kernels import AttentionSpec, VarlenLengths, flash

    ends, heads, dim = (0, 250, 600), (32, 8, 8), 64
    inputs = [
        drawn(device, ends[-1], count, dim, seed=n).requires_grad_()
        for n, count in enumerate(heads)
    ]
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    out = flash.attend_packed(
        *inputs, VarlenLengths(bounds, bounds, 350, 350), AttentionSpec(dim**-0.5)
    )
    weights = drawn(device, *out.shape, seed=9)
    found = (out, *torch.autograd.grad(out, inputs, weights))
    plain = [x.detach().double().cpu().requires_grad_() for x in inputs]
    parts = [exact_attention(*(x[a:b] for x in plain), dim**-0.5) for a, b in pairwise(ends)]
    expected = torch.cat(parts)
    wanted = (expected, *torch.autograd.grad(expected, plain, weights.double().cpu()))
    return max(relative(a.detach().cpu(), b.detach()) for a, b in zip(found, wanted, strict=True))


def formulas(device: torch.device) -> float:
    from weft.kernels import compiling
    from weft.kernels import formulas as exact

    x, by = drawn(device, 700, 512), drawn(device, 700, 256, seed=1)
    made = compiling.compile_as_one_kernel(exact.activated)(x, True, "silu")
    gradients = compiling.compile_as_one_kernel(exact.compute_activated_gradients)(
        by, x, True, "silu", True
    )
    wide, wide_by = x.double().cpu(), by.double().cpu()
    wanted = (
        exact.activated(wide, True, "silu"),
        *exact.compute_activated_gradients(wide_by, wide, True, "silu", True),
    )
    return max(
        relative(a.cpu(), b)
        for a, b in zip((made, *gradients), wanted, strict=True)
        if b is not None
    )


def fused_draws(device: torch.device) -> float:
    """The share of draws that are not the exact ones, of greedy ones too; infinite where a log-prob
    is wrong.
    """
    from weft.engine.generation import sampling
    from weft.kernels import fused

    logits, worst = drawn(device, 64, 151_936, dtype=torch.float32) * 3, 0.0
    uniforms = torch.rand(64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    temperatures = torch.full((64,), 0.8, dtype=torch.float64)
    wide = logits.double().cpu()
    scores = (logits.cpu() / temperatures.float()[:, None]).double()
    tokens, logprobs = fused.draw(logits, uniforms.to(device), temperatures.to(device))
    best, best_logprobs = fused.draw(logits, uniforms.to(device), None)
    for found, exact, row, of_row in (
        (tokens, sampling.invert_cdf(scores.softmax(-1), uniforms), scores, logprobs),
        (best, wide.argmax(-1), wide, best_logprobs),
    ):
        expected = row.log_softmax(-1).gather(1, found.cpu()[:, None])[:, 0]
        if relative(of_row.cpu(), expected) > FLOAT32:
            return float("inf")
        worst = max(worst, float((found.cpu() != exact).float().mean()))
    return worst


def fused_norm(device: torch.device) -> float:
    """The norm of Llama and that of Gemma, whose weights count from 1."""
    from weft.kernels import fused

    x, delta, weight = drawn(device, 40, 5120), drawn(device, 40, 5120, seed=1), drawn(device, 5120)
    errors = []
    for offset in (0.0, 1.0):
        total, normed = fused.add_rms_norm(x, delta, weight, 1e-6, offset)
        wide = total.double().cpu()
        scale = weight.double().cpu() + offset
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * scale
        errors += [relative(normed.cpu(), expected), relative(total.cpu(), (x + delta).cpu())]
    return max(errors)


def fused_store(device: torch.device) -> float:
    """Keys and values that are views of one tensor, written to places of a cache."""
    from weft.kernels import fused

    _, k, v = drawn(device, 40, 48, 128).split([32, 8, 8], dim=1)
    cache = torch.zeros(2, 100, 8, 128, dtype=k.dtype, device=device)
    places = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:40].to(device)
    expected = torch.zeros_like(cache)
    expected[:, places] = torch.stack([k, v])
    fused.store(k, v, cache[0], cache[1], places)
    return relative(cache.double().cpu(), expected.double().cpu())


def flex_attention(device: torch.device) -> float:
    """Two completions after one prompt, whose keys and values are there once."""
    from weft.kernels import AttentionSpec, flex

    prompt, rest, dim = 2 * TILE, TILE, 64
    bounds = torch.tensor(
        [0, prompt, prompt + rest, prompt + 2 * rest], dtype=torch.int32, device=device
    )
    q, k, v = (
        drawn(device, prompt + 2 * rest, count, dim, seed=n) for n, count in enumerate((8, 2, 2))
    )
    mask = flex.build_pack_mask(bounds, [((0, prompt), (prompt, len(q)))], len(q), None)
    found = flex.attend_packed(q, k, v, mask, AttentionSpec(dim**-0.5)).double().cpu()
    wide = [x.double().cpu() for x in (q, k, v)]
    errors = []
    for first in (prompt, prompt + rest):
        own = [torch.cat([x[:prompt], x[first : first + rest]]) for x in wide]
        errors.append(
            relative(found[first : first + rest], exact_attention(*own, dim**-0.5)[prompt:])
        )
    return max(errors)


def graphs(device: torch.device) -> float:
    """Each form's first capture comes after all graphs of the form before are gone."""
    import numpy as np

    from weft.engine.generation.graphs import DecodeGraphs, build_cuda_capture

    weight = drawn(device, 7, 5, dtype=torch.float32)
    made = DecodeGraphs(
        {"step": lambda numbers: numbers.float() @ weight}, device, build_cuda_capture(device)
    )
    random, errors = np.random.default_rng(0), []
    for form in range(3):
        for rows in (3, 13):
            step = random.integers(0, 9, (rows, 7)).astype(np.int32)
            with torch.no_grad():
                found = made("step", step, form=form, expected=rows).cpu()
            errors.append(relative(found, torch.from_numpy(step).double() @ weight.double().cpu()))
    if made.note is not None:
        raise RuntimeError(made.note)
    return max(errors)
