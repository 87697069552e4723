"""Sizes of a mesh of devices, parsed from the option `layout` without importing jax.

A mesh has three axes: `dp` (copies of the model), `fsdp` (shards of parameters, optimizer states
and batches) and `mp` (shards of each matrix product). The option can be

- three sizes, such as `1,-1,8`, as in EasyLM. A size of -1 is computed from the number of devices.
- named sizes, such as `dp:1,fsdp:-1,mp:8`, as in EasyLM.
- a layout of weft, such as `d8f8t1`, which is the mesh `1,8,1`.

A leading `!` orders the devices by number, instead of by the network that connects them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from weft.errors import ConfigError
from weft.topology import Layout

AXES = ("dp", "fsdp", "mp")


def parse_mesh(text: str | None, count: int, *, trained: bool = True) -> tuple[int, ...]:
    """Return the sizes of `AXES` for `count` devices.

    A mesh must use all devices; a layout may use fewer. `trained` is True for a trained role, whose
    layout by default also divides the parameters over the `d` ranks. Raises `ConfigError` if the
    text is neither a mesh nor a layout, or does not match the number of devices.
    """
    if text is None:
        return (1, 1, 1)
    sizes = list(read_sizes(text, trained=trained))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"layout={text}: each size must be at least 1, and one may be -1")
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and count % fixed == 0:
        sizes[sizes.index(-1)] = count // fixed
    total = math.prod(sizes)
    if total > count or -1 in sizes or (total < count and is_mesh(text)):
        mp = math.gcd(max(1, sizes[2]), count)
        raise ConfigError(
            f"layout={text}: its sizes must multiply to the {count} devices that jax has here; "
            f"write 1,{count // mp},{mp}"
        )
    return tuple(sizes)


def is_mesh(text: str) -> bool:
    """Return whether the text is a mesh such as `1,-1,1`, and not a layout such as `d2`."""
    return "," in text or ":" in text or text.startswith("!")


def read_sizes(text: str, *, trained: bool = True) -> Sequence[int]:
    """Return the sizes of `AXES` that the text specifies; a size can be -1.

    Raises `ConfigError` if the text is neither a mesh nor a layout that the backend supports.
    """
    sizes_text = text.removeprefix("!")
    parts = sizes_text.split(",")
    if re.fullmatch(r"(dp|fsdp|mp):-?\d+(,(dp|fsdp|mp):-?\d+)*", sizes_text):
        values = dict(part.split(":") for part in parts)
        if len(values) == len(parts):  # no axis is named twice
            return [int(values.get(axis, 1)) for axis in AXES]
    elif re.fullmatch(r"-?\d+,-?\d+,-?\d+", sizes_text):
        return [int(part) for part in parts]
    elif not is_mesh(text):
        layout = Layout.parse(sizes_text, trained=trained)
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
