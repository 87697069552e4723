"""Meshes of JAX devices, and how arrays are divided over them.

A mesh has three axes: `dp` (copies of the model), `fsdp` (parts of parameters, optimizer states and
batches) and `mp` (parts of each matrix product). It is written `1,-1,8`, in which -1 stands for the
devices that are left, or with names, `dp:1,fsdp:-1,mp:8`, as in EasyLM; or as weft's layout
`d8f8t1`, which is `1,8,1`. After a leading `!`, devices are taken in the order of their numbers instead of
one that suits the network between them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.errors import ConfigError
from weft.topology import Layout

AXES = ("dp", "fsdp", "mp")
BATCH = ("dp", "fsdp")  # axes over which rows are divided
# Pattern of an array's name -> axes of its last dimensions. The first match counts.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"\.lora_[ab]$", ()),
    (r"(^|\.)(embed|head)\.weight$", ("mp", "fsdp")),
    (r"\.attention\.[qkv]\.weight$", ("mp", "fsdp")),
    (r"\.attention\.o\.weight$", ("fsdp", "mp")),
    (r"\.mlp\.(experts\.)?(gate|up)\.weight$", ("mp", "fsdp")),
    (r"\.mlp\.(experts\.)?down\.weight$", ("fsdp", "mp")),
    (r"", ()),
)


def parse_mesh(text: str | None, count: int, *, trained: bool = True) -> tuple[int, ...]:
    """Return the sizes of `AXES` for `count` devices.

    A mesh has all devices, a layout may have fewer. `trained` says whether the `d` of a layout
    divides parameters too. Raises `ConfigError` if the text is neither or needs other devices.
    """
    if text is None:
        return (1, 1, 1)
    sizes = list(_read_sizes(text, trained=trained))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"layout={text}: each size must be at least 1, and one may be -1")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and count % fixed == 0:
        sizes[sizes.index(-1)] = count // fixed
    total = math.prod(sizes)
    if total > count or -1 in sizes or (total < count and is_mesh(text)):
        model = math.gcd(max(1, sizes[2]), count)
        raise ConfigError(
            f"layout={text}: its sizes must multiply to the {count} devices that jax has here; "
            f"write 1,{count // model},{model}"
        )
    return tuple(sizes)


def is_mesh(text: str) -> bool:
    """Return whether the text is a mesh such as `1,-1,1`, and not a layout such as `d2`."""
    return "," in text or ":" in text or text.startswith("!")


def _read_sizes(text: str, *, trained: bool) -> Sequence[int]:
    """Return the sizes in the text, which can be -1."""
    plain = text.removeprefix("!")
    parts = plain.split(",")
    named = re.fullmatch(r"(dp|fsdp|mp):-?\d+(,(dp|fsdp|mp):-?\d+)*", plain)
    if named:
        values = dict(part.split(":") for part in parts)
        if len(values) == len(parts):
            return [int(values.get(axis, 1)) for axis in AXES]
    elif re.fullmatch(r"-?\d+,-?\d+,-?\d+", plain):
        return [int(part) for part in parts]
    elif not is_mesh(text):
        layout = Layout.parse(plain, trained=trained)
        if layout.num_devices != layout.data * layout.tensor:
            raise ConfigError(
                f"layout={text}: backend=jax divides batches, parameters and products (d, f, t); "
                f"use backend=torch for p, c and e"
            )
        return [layout.data // layout.fsdp, layout.fsdp, layout.tensor]
    raise ConfigError(
        f"layout={text}: backend=jax takes dp,fsdp,mp such as 1,-1,1, named sizes such as "
        f"fsdp:-1,mp:2, or a layout such as d8f8t1"
    )


def build_mesh(text: str | None, devices: Sequence[Any], *, trained: bool) -> Mesh:
    """Return the mesh of the first of these devices that the text describes."""
    sizes = parse_mesh(text, len(devices), trained=trained)
    chosen = list(devices)[: math.prod(sizes)]
    if (text or "").startswith("!"):
        return Mesh(np.array(chosen).reshape(sizes), AXES)
    return Mesh(mesh_utils.create_device_mesh(sizes, chosen), AXES)


def choose_sharding(mesh: Mesh, name: str, shape: Sequence[int]) -> NamedSharding:
    """Return how an array is divided over the mesh, by its name and shape.

    A dimension that an axis does not divide stays whole.
    """
    axes = next(axes for pattern, axes in RULES if re.search(pattern, name))
    spec: list[str | None] = [None] * len(shape)
    for place, axis in enumerate(axes, len(shape) - len(axes)):
        if axis is not None and shape[place] % mesh.shape[axis] == 0:
            spec[place] = axis
    return NamedSharding(mesh, PartitionSpec(*spec))


def divide_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays whose first dimension is divided over the data axes."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def count_row_parts(sharding: NamedSharding) -> int:
    """Return the number of parts into which rows are divided."""
    return math.prod(sharding.mesh.shape[axis] for axis in BATCH)
