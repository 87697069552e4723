"""Sizes of small decoders, whose cost a hand can follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.planner.cost import CallWorkload, build_memory_case, estimate_call
from weft.planner.decoder_sizes import CHUNK_ROWS, DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.memory import MemorySettings, NetworkShape, RoleMemory, estimate
from weft.topology import Layout, Mesh


def decoder(*, active: int, outputs: int, **shape: int) -> DecoderSizes:
    """A frozen decoder in float32 on a GPU, whose layers have `active` weights each."""
    parameters = shape["layers"] * active + shape["embedding"] + outputs
    return DecoderSizes(
        NetworkShape(parameters=parameters, trainable=parameters, **shape),
        MemorySettings("float32", False, "adamw", 0, False, CHUNK_ROWS, keeps_cache=True),
        active,
        outputs,
    )


def with_settings(network: DecoderSizes, **changes: Any) -> DecoderSizes:
    return replace(network, settings=replace(network.settings, **changes))


def with_adapters(network: DecoderSizes, trainable: int) -> DecoderSizes:
    """The decoder where only `trainable` weights of adapters are trained."""
    return replace(network, shape=replace(network.shape, trainable=trainable))


# Numbers that a hand can follow
SMALL = decoder(
    layers=4,
    hidden=100,
    query=100,
    key=50,
    inner=400,
    vocab=1000,
    active=150_000,
    embedding=100_000,
    outputs=100_000,
)


def compute_seconds(
    network: DecoderSizes, load: CallWorkload, at: Mesh, rates: DeviceRates
) -> float:
    return estimate_call(network, load, at, rates).seconds


def compute_memory(
    network: DecoderSizes,
    loads: list[CallWorkload],
    layout: Layout,
    rates: DeviceRates,
    *,
    own: bool = True,
) -> RoleMemory:
    case = build_memory_case(network, loads, layout, rates, own=own)
    return estimate(case.shape, case.settings, case.works)
