"""What the engine's tests have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bounds import Float64Throughout


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    """Networks in float64 round nothing to float32 on their way, those of `transformers` neither."""
    with Float64Throughout():
        yield
