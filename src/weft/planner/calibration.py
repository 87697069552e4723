"""Additional time of messages within a call, compared with messages alone.

Within a call, a rank waits at each message until the other ranks have reached it, and tensors are
copied and hooks run before and after it. These times are computed from measured calls of two
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from weft.planner.compute_times import ComputeTimes, PassSize
from weft.planner.cost import CallWorkload, estimate_call
from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.messages import (
    estimate_decode_messages,
    estimate_pass_messages,
    estimate_shard_messages,
)
from weft.topology import Layout, Mesh


def compute_waits(
    network: DecoderSizes, joined: Mapping[str, Mapping[str, Any]], rates: DeviceRates, tensor: int
) -> dict[str, float]:
    """Return the extra seconds of each message within a call: of "shards", "tensor" and "decode".

    `joined` are the measured calls of two processes, and `network` is the network that they train.
    `rates` have the profile of one of `tensor` ranks, which does not have these times yet. A kind
    is left out if the profile does not have the times of its computation.
    """
    waits = {}
    shared = rates.share_cores(2, 2)
    # GPUs hide a part of these messages behind computation.
    if tensor == 1 and "shards" in joined and rates.kernels is None:
        values = joined["shards"]
        load = _build_load(values, 2 * values["sequences"])
        mesh = Mesh(Layout(data=2, fsdp=2), (0, 1))
        shard_messages = partial(estimate_shard_messages, network, mesh, shared, 1, trains=True)
        estimated = estimate_call(network, load, mesh, shared).seconds
        waits["shards"] = _compute_wait(values["seconds"] - estimated, shard_messages)
    if tensor == 2 and "tensor" in joined:
        values = joined["tensor"]
        mesh = Mesh(Layout(tensor=2), (0, 1))
        load = _build_load(values, values["sequences"])
        size = PassSize(load.num_tokens, values["length"], load.num_tokens, trains=True)
        pass_messages = partial(estimate_pass_messages, network, size, mesh, shared)
        estimated = estimate_call(network, load, mesh, shared).seconds
        waits["tensor"] = _compute_wait(values["seconds"] - estimated, pass_messages)
        values = joined["decode"]
        times = ComputeTimes(network, shared, mesh.layout)
        block, rest = times.compute_decode(values["sequences"], values["length"])
        decode_messages = partial(
            estimate_decode_messages, network, values["sequences"], mesh, shared
        )
        computed = block.seconds * network.shape.layers + rest.seconds
        estimated = computed + decode_messages(wait=0.0)
        waits["decode"] = _compute_wait(values["seconds"] - estimated, decode_messages)
    return waits


def _compute_wait(excess: float, estimate_messages: Callable[..., float]) -> float:
    """Return the extra seconds of each message of a call.

    The call takes `excess` seconds longer than estimated without them. `estimate_messages(wait=x)`
    returns the seconds of its messages if each takes x extra seconds.
    """
    num_messages = estimate_messages(wait=1.0) - estimate_messages(wait=0.0)
    return max(0.0, excess) / num_messages


def _build_load(values: Mapping[str, Any], sequences: int) -> CallWorkload:
    """Return the workload of a measured training step: prompts of one token, one micro-batch."""
    load = CallWorkload("train_step", sequences, 1, values["length"] - 1)
    return replace(load, microbatch=load.num_tokens)
