"""What the backend `torch` says of a network."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.common import tiny_config
from weft.engine.backends.torch import compute_cost
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
