"""What the backend `torch` says of a network, and what it refuses before it reads one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.common import tiny_config
from weft.engine.backends.common import choose_role_device
from weft.engine.backends.torch import compute_cost
from weft.engine.spec import ModelSpec
from weft.errors import ConfigError
from weft.kernels import fused
from weft.models.network.transformer import Transformer


@pytest.mark.parametrize(
    ("name", "head", "late"),
    [
        ("llama", "lm", 131 * 32 + 32 * 32 + 3 * 32 * 56),
        ("llama", "value", 32 + 32 * 32 + 3 * 32 * 56),
        ("mixtral", "lm", 131 * 32 + 32 * 32 + 4 * 32 + 2 * 3 * 32 * 56),
    ],
)
def test_what_the_last_layer_does_for_wanted_rows_alone(name: str, head: Any, late: int) -> None:
    """The output matrix, attention's output, and the MLP: with experts the router and the two a
    token is routed to.
    """
    network = Transformer(tiny_config(name), head)
    assert compute_cost(network, frozen=False).late == late
    if head == "value":
        assert (
            compute_cost(Transformer(tiny_config(name), "score", "mean"), frozen=False).late == 32
        ), "all tokens are read"


def test_an_unknown_gpu_kernel_is_refused_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "read_switches", fused.read_switches.__wrapped__)
    monkeypatch.setenv(fused.VARIABLE, "store,sotre")
    with pytest.raises(ConfigError, match=r"WEFT_GPU_KERNELS=store,sotre: .* named sotre;"):
        choose_role_device(ModelSpec(path="model", device="cpu"))
