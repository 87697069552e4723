"""A shared prompt by FlexAttention, as on a GPU: outputs and gradients of a whole network are those of repeated prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.engine.common import batch_of
from tests.engine.test_shared_prefixes import CONFIG, check, network_of
from weft.engine import rows
from weft.models import attention, flex
from weft.models.packed import Prefixed
from weft.models.scores import Scores

GROUPS = [(33, [20, 1, 7]), (5, [4]), (140, [9, 30])]


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention, unfused, in the place of the CPU's joined parts; the layers that it served."""
    served: list[int] = []

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Any, scale: float) -> torch.Tensor:
        served.append(len(q))
        return flex.packed(q, k, v, context, Scores(scale))

    torch._dynamo.reset()  # unfused, it is traced with sizes that vary
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)
    monkeypatch.setattr(rows, "LEAST_PREFIX", 1, raising=False)
    monkeypatch.setattr(Prefixed, "parts", property(lambda context: context))
    monkeypatch.setattr(attention, "merge", packed)
    return served


@pytest.mark.parametrize(("head", "want"), [("lm", "logprobs"), ("value", "values"), ("score", "scores")])
def test_outputs_and_gradients(joined: list[int], head: str, want: str) -> None:
    check(network_of(CONFIG, head), batch_of(GROUPS), want)
    assert joined, "nothing was shared"


def test_grouped_heads_and_deep_networks(joined: list[int]) -> None:
    check(network_of(replace(CONFIG, num_kv_heads=1, num_layers=3)), batch_of(GROUPS), "logprobs")
    assert len(joined) == 3
