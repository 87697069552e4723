"""Time of copies to host memory and back, as far as computation does not hide them.

Two options keep a role's tensors in host memory: `offload` its weights and masters between its calls,
and `optimizer.offload` its masters and optimizer state, which are then updated there. The hook
`offload_optimizer` moves the optimizer state out after a training call. The functions are pure.
"""

from __future__ import annotations

from weft.planner.decoder_sizes import DecoderSizes
from weft.planner.devices import DeviceRates
from weft.planner.memory import BYTES, SLOTS, STATE_BYTES, WIDE
from weft.topology import Layout

HOST_MEMORY = 1e11  # bytes per second of host memory for each device, an assumption


def estimate_weight_copies(
    network: DecoderSizes, layout: Layout, rates: DeviceRates, computed: float, *, trains: bool
) -> float:
    """Return the seconds that a call takes longer because its role's weights are in host memory.

    Weights arrive layer by layer, while earlier layers compute. The call's first pass, which computes
    for `computed` seconds, hides as much of these copies, except for that of the first layer. Weights that the call
    has trained are copied to the host afterwards; other weights are still there.
    """
    width = network.element_bytes
    stored = network.count_stored_parameters(layout) * width
    if network.settings.trained and width < WIDE:
        stored += network.count_stored_parameters(layout, trainable=True) * WIDE
    arriving = stored / rates.host_bandwidth
    first = arriving * layout.pipeline / network.shape.layers
    visible = max(first, arriving - computed)
    return visible + (arriving if trains else 0.0)


def estimate_state_copies(
    network: DecoderSizes, layout: Layout, rates: DeviceRates, updating: float
) -> float:
    """Return the seconds that a training call takes longer if its optimizer state is offloaded.

    The state arrives in parts, and the `updating` seconds of the first optimizer step hide a part
    of the copies. It is copied to the host after the call.
    """
    settings = network.settings
    elements = network.count_stored_parameters(layout, trainable=True)
    copied = elements * SLOTS[settings.optimizer] * STATE_BYTES[settings.state_dtype]
    copied /= rates.host_bandwidth
    return max(0.0, copied - updating) + copied


def estimate_host_updates(
    network: DecoderSizes, layout: Layout, rates: DeviceRates, parts: int, computed: float
) -> float:
    """Return the seconds of an optimizer step in host memory that computation does not hide.

    After each of `parts` micro-batches, gradients are copied and added in host memory during the
    backward pass; all micro-batches compute for `computed` seconds. Then masters are updated, and
    new weights are copied back meanwhile.
    """
    elements = network.count_stored_parameters(layout, trainable=True)
    values = 2 + SLOTS[network.settings.optimizer]
    gradients = parts * elements * BYTES[network.settings.dtype] / rates.host_bandwidth
    updating = elements * WIDE * values * 3 / HOST_MEMORY
    weights = elements * WIDE / rates.host_bandwidth
    return max(0.0, gradients - computed) + max(updating, weights)
