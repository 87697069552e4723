"""Adapters on modules of transformers: what merging rounds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from weft.engine.hf.lora import HFAdaptedLinear


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_merged_layer_computes_what_the_adapted_one_does(
    transposed: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    base = (Conv1D(5, 7) if transposed else nn.Linear(7, 5)).double()
    with torch.no_grad():
        base.weight.copy_(torch.randn(base.weight.shape, generator=generator, dtype=torch.float64))
    layer = HFAdaptedLinear(base.to(dtype), 3, 0.5, 0.0)
    a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 7), (5, 3))
    )
    a, b = (each if dtype == torch.float64 else each.float() for each in (a, b))
    update = 0.5 * (b @ a)
    weight = base.weight.detach()
    merged = layer.merge_weight(a, b)
    assert merged.dtype == dtype and merged.shape == weight.shape and merged.is_contiguous()
    assert torch.equal(
        merged, (weight.to(a.dtype) + (update.T if transposed else update)).to(dtype)
    )
