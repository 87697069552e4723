"""Meshes of JAX devices, and the sharding of arrays over them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from weft.engine.jax.mesh_sizes import AXES, parse_mesh

BATCH = ("dp", "fsdp")  # axes over which rows are divided
# Pattern of an array's name -> mesh axes that divide its last dimensions. The first match is used.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"\.lora_[ab]$", ()),
    (r"(^|\.)(embed|head)\.weight$", ("mp", "fsdp")),
    (r"\.attention\.[qkv]\.weight$", ("mp", "fsdp")),
    (r"\.attention\.o\.weight$", ("fsdp", "mp")),
    (r"\.mlp\.(experts\.)?(gate|up)\.weight$", ("mp", "fsdp")),
    (r"\.mlp\.(experts\.)?down\.weight$", ("fsdp", "mp")),
    (r"", ()),
)


def build_mesh(text: str | None, devices: Sequence[Any], *, trained: bool) -> Mesh:
    """Return the mesh that the text describes, built from the first devices of the list.

    Raises `ConfigError` for an invalid text (see `parse_mesh`).
    """
    sizes = parse_mesh(text, len(devices), trained=trained)
    chosen = list(devices)[: math.prod(sizes)]
    if (text or "").startswith("!"):
        return Mesh(np.array(chosen).reshape(sizes), AXES)
    return Mesh(mesh_utils.create_device_mesh(sizes, chosen), AXES)


def choose_sharding(mesh: Mesh, name: str, shape: Sequence[int]) -> NamedSharding:
    """Return the sharding of an array over the mesh, chosen by the array's name and shape.

    A dimension is not divided if its size is not a multiple of the size of the axis.
    """
    axes = next(axes for pattern, axes in RULES if re.search(pattern, name))
    spec: list[str | None] = [None] * len(shape)
    for dim, axis in enumerate(axes, len(shape) - len(axes)):
        if axis is not None and shape[dim] % mesh.shape[axis] == 0:
            spec[dim] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def build_row_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose first dimension is divided over the data axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def count_row_parts(sharding: NamedSharding) -> int:
    """Return the number of parts into which rows are divided."""
    return math.prod(sharding.mesh.shape[axis] for axis in BATCH)


def put_on_mesh(values: Any, sharding: Sharding | None) -> Any:
    """Put an array, or a pytree of arrays, on the devices of a mesh; None leaves it on the host.

    If the devices belong to several processes, each process must pass all values, and stores only
    its part.
    """
    if sharding is None:
        return values
    if sharding.is_fully_addressable:
        return jax.device_put(values, sharding)

    def place_parts(array: Any) -> Any:
        host_array = np.asarray(array)
        return jax.make_array_from_callback(
            host_array.shape, sharding, lambda index: host_array[index]
        )

    return jax.tree.map(place_parts, values)


def fetch(array: Any) -> np.ndarray[Any, Any]:
    """Return the values of an array of JAX or numpy in host memory.

    If the array is divided over several processes, all of them must call this function.
    """
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not array.is_fully_replicated:
            assert isinstance(array.sharding, NamedSharding)
            array = _build_gather(array.sharding.mesh)(array)
        array = array.addressable_data(0)
    return np.asarray(array)


@cache
def _build_gather(mesh: Mesh) -> Any:
    """Return a compiled function that gathers an array on all devices of the mesh."""
    return jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
