"""The code of other libraries in float64 where they insist on float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch


class _Wide:
    """The module `torch`, whose float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Wider(_Wide):
    """The same where `Tensor.float` is float64 too."""

    float = torch.float64


TORCH = _Wide()


@contextmanager
def in_float64(module: ModuleType) -> Iterator[None]:
    """Let what `module` computes as float32, and new tensors, be float64, so that its results can
    be compared to the last bits.

    `Tensor.float` is float64 everywhere meanwhile, so weft must not compute in here.
    """
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Wider())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
