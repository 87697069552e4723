"""A shared prompt by FlexAttention, as on a GPU: outputs and gradients of a whole network are those
of repeated prompts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from tests.engine.common import batch_of
from tests.engine.prefixes import CONFIG, network_of
from tests.engine.test_rows_prefixes import check
from weft.models.attention import accelerator, dispatch
from weft.models.attention.contexts import AttentionInputs, Prefixed

GROUPS = [(33, [20, 1, 7]), (5, [4]), (140, [9, 30])]


@pytest.fixture(autouse=True)
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """FlexAttention, unfused, in the place of the CPU's joined parts; the layers that it served."""
    served: list[int] = []

    def by_flex(given: AttentionInputs, context: Prefixed) -> torch.Tensor:
        served.append(len(given.q))
        return accelerator.attend_prefixed(given, context)

    torch._dynamo.reset()  # unfused, it is traced with sizes that vary
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_warn_once", lambda *_, **__: None)
    monkeypatch.setitem(dispatch.BACKENDS, (Prefixed, "cpu"), by_flex)  # type: ignore[arg-type]
    return served


@pytest.mark.parametrize(
    ("head", "want"), [("lm", "logprobs"), ("value", "values"), ("score", "scores")]
)
def test_outputs_and_gradients(joined: list[int], head: str, want: str) -> None:
    check(network_of(CONFIG, head), batch_of(GROUPS), want)
    assert joined, "nothing was shared"


def test_grouped_heads_and_deep_networks(joined: list[int]) -> None:
    check(network_of(replace(CONFIG, num_kv_heads=1, num_layers=3)), batch_of(GROUPS), "logprobs")
    assert len(joined) == 3
