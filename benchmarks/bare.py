"""Stand-ins for two small packages, so that a benchmark runs where torch, transformers, numpy and
safetensors are all there is.

weft's losses are written in the array API standard and have shapes in their types:
`array_api_compat` says which library an array belongs to, `jaxtyping` what a shape is called. On
torch tensors alone, with nobody checking shapes, little of either is needed. Packages that are
installed are left alone.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class Namespace:
    """torch under the names of the array API standard, as far as the losses of the benchmark use
    it.
    """

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    @staticmethod
    def astype(array: Any, dtype: Any) -> Any:
        return array.to(dtype)

    @staticmethod
    def take(array: Any, rows: Any, axis: int) -> Any:
        return array.index_select(axis, rows)


class Shaped:
    """`Float[Array, "N"]` is what it says to a reader."""

    def __class_getitem__(cls, _: Any) -> Any:
        return Any


def stand_in() -> list[str]:
    """Make up for what is missing; returns the names."""
    made = {"array_api_compat": _array_api(), "jaxtyping": _jaxtyping()}
    missing = [
        name for name in made if name not in sys.modules and importlib.util.find_spec(name) is None
    ]
    sys.modules.update({name: made[name] for name in missing})
    return missing


def _array_api() -> ModuleType:
    import numpy
    import torch

    module: Any = ModuleType("array_api_compat")
    names = Namespace()
    module.is_torch_array = lambda array: isinstance(array, torch.Tensor)
    module.is_jax_array = lambda array: False
    module.is_array_api_obj = lambda array: isinstance(array, torch.Tensor | numpy.ndarray)
    module.array_namespace = lambda array, *_: names if module.is_torch_array(array) else numpy
    module.device = lambda array: array.device if module.is_torch_array(array) else "cpu"
    module.to_device = lambda array, device: (
        array.to(device) if module.is_torch_array(array) else array
    )
    return module


def _jaxtyping() -> ModuleType:
    module: Any = ModuleType("jaxtyping")
    module.Float = module.Int = module.Bool = Shaped
    return module
