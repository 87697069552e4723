"""Correction of the estimated times of messages by calls that two processes were measured to make.

Messages inside a call take longer than alone: tensors are copied and allocated around them, and
hooks run. A factor for each kind of message makes the estimate of the measured call right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from weft.planner.compute_times import ComputeTimes
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.messages import estimate_decode_messages
from weft.topology import Layout, Mesh

LEAST_FACTOR = 0.25  # a smaller factor is noise


def compute_factors(
    network: DecoderSizes, joined: Mapping[str, Mapping[str, Any]], rates: DeviceRates, tensor: int
) -> dict[str, float]:
    """Return factors of the times of messages, by kind: "shards", "tensor" and "decode".

    `joined` are the measured calls of two processes, `network` is the trained network that they
    hold, and `rates` have the profile that is to be corrected, of one of `tensor` ranks. A kind
    whose computation the profile does not have is left out.
    """
    factors = {}
    shared = rates.share_cores(2, 2)
    if tensor == 1 and "shards" in joined:
        values = joined["shards"]
        load = _build_load(values, 2 * values["sequences"])
        mesh = Mesh(Layout(data=2, fsdp=2), (0, 1))
        estimate = estimate_call(network, load, mesh, shared)
        messages = estimate.parts["messages"]
        factors["shards"] = _compute_factor(values["seconds"], estimate.seconds, messages)
    if tensor == 2 and "tensor" in joined:
        values = joined["tensor"]
        mesh = Mesh(Layout(tensor=2), (0, 1))
        estimate = estimate_call(network, _build_load(values, values["sequences"]), mesh, shared)
        messages = estimate.parts["messages"]
        factors["tensor"] = _compute_factor(values["seconds"], estimate.seconds, messages)
        values = joined["decode"]
        times = ComputeTimes(network, shared, mesh.layout)
        block, rest = times.compute_decode(values["sequences"], values["length"])
        computed = block.seconds * network.shape.layers + rest.seconds
        messages = estimate_decode_messages(network, values["sequences"], mesh, shared)
        factors["decode"] = _compute_factor(values["seconds"], computed + messages, messages)
    return factors


def _build_load(values: Mapping[str, Any], sequences: int) -> CallWorkload:
    """Return the workload of a measured training step: prompts of one token, one micro-batch."""
    load = CallWorkload("train_step", sequences, 1, values["length"] - 1)
    return replace(load, microbatch=load.num_tokens)


def _compute_factor(measured: float, estimated: float, messages: float) -> float:
    """Return the factor of `messages`, a part of `estimated`, that makes the estimate right."""
    return max(LEAST_FACTOR, (measured - (estimated - messages)) / messages)
