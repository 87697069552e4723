"""A tiny network's shapes, and the layouts that tests go through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.realloc.plan import holdings_of
from weft.topology import Layout, Mesh, Slice

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sizes:
    num_layers: int = 2
    head_layers: float = 0.0
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 2


HIDDEN, WIDTH, IDS, RANK, EXPERTS = 4, 16, 13, 3, 2  # 13 ids split unevenly
LEAN = re.compile(r"(embed|head|attention\.[qko]|mlp\.down|\d\.norm).weight")


def shapes(sizes: Sizes, *, tied: bool = False, form: str = "plain") -> Shapes:
    """Canonical names and whole shapes of a `plain` network, some of them (`lean`), those of one
    with `experts`, or the `adapters` of a plain one.
    """
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    linear = {
        "attention.q": (q, HIDDEN),
        "attention.k": (kv, HIDDEN),
        "attention.v": (kv, HIDDEN),
        "attention.o": (HIDDEN, q),
    }
    mlp = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    found: Shapes = {} if form == "adapters" else {"embed.weight": (IDS, HIDDEN)}
    for layer in range(sizes.num_layers):
        block: Shapes = {}
        if form == "experts":
            block |= {
                f"mlp.experts.{name}.weight": (EXPERTS, *shape) for name, shape in mlp.items()
            }
            block["mlp.router.weight"] = (EXPERTS, HIDDEN)
            layers = linear
        else:
            layers = linear | {f"mlp.{name}": shape for name, shape in mlp.items()}
        for name, (rows, columns) in layers.items():
            if form == "adapters":
                block |= {f"{name}.lora_a": (RANK, columns), f"{name}.lora_b": (rows, RANK)}
            else:
                block |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        if form != "adapters":
            block |= {
                "attention.q_norm.weight": (q,),
                "attention.k_norm.weight": (kv,),
                "norm.weight": (HIDDEN,),
            }
        found |= {f"blocks.{layer}.{name}": shape for name, shape in block.items()}
    if form != "adapters":
        found["norm.weight"] = (HIDDEN,)
    if form != "adapters" and not tied:
        found["head.weight"] = (IDS, HIDDEN)
    return (
        {name: shape for name, shape in found.items() if LEAN.search(name)}
        if form == "lean"
        else found
    )


def layouts(most: int, sizes: Sizes) -> list[Layout]:
    """Every layout of at most so many ranks that fits the network."""
    found = []
    degrees = range(1, most + 1)
    for d in degrees:
        for f in (f for f in degrees if d % f == 0):
            for t in degrees:
                for p in degrees:
                    layout = Layout(data=d, fsdp=f, tensor=t, pipeline=p)
                    if layout.num_devices <= most and fits(layout, sizes):
                        found.append(layout)
    return found


def fits(layout: Layout, sizes: Sizes) -> bool:
    try:
        holdings_of(shapes(sizes), sizes, Mesh.on_first_devices(layout))
    except ConfigError:
        return False
    return True


def on(
    layout: Layout, sizes: Sizes, *, start: int = 0, tied: bool = False, form: str = "plain"
) -> Mapping[int, Mapping[str, Slice]]:
    """What the ranks from `start` on hold."""
    mesh = Mesh(layout, tuple(range(start, start + layout.num_devices)))
    return holdings_of(shapes(sizes, tied=tied, form=form), sizes, mesh, tied=tied)
