"""What attention on a GPU keeps for a pass. A CPU runs FlexAttention unfused."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from weft.kernels import AttentionSpec, flex
from weft.models.attention import accelerator
from weft.models.attention.contexts import AttentionInputs, Dense


@torch.no_grad()
def test_layers_of_one_pass_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    # unfused, it is traced with sizes that vary; other tests' sizes would make more of them vary
    torch._dynamo.reset()
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)
    monkeypatch.setattr(flex, "serves", lambda *_: True)
    context = Dense(torch.tensor([0, 150, 290, 700], dtype=torch.int32), 410)
    q, k, v = (torch.randn(700, heads, 16) for heads in (4, 2, 2))

    def attend(spec: AttentionSpec) -> None:
        accelerator.attend_dense(AttentionInputs(q, k, v, spec, 0), context)

    attend(AttentionSpec(0.25, softcap=2.0))
    first = context.masks[None]
    attend(AttentionSpec(0.25, softcap=2.0))
    attend(AttentionSpec(0.25, window=40, softcap=2.0))
    assert context.masks[None] is first and set(context.masks) == {None, 40}
