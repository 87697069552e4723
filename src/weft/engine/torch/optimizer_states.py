"""Conversion of optimizer states to and from a saved form that is independent of the layout.

Saved tensors are named by canonical parameters (`weft.models.network.linear`). A stored
parameter of the network can contain several canonical parameters, such as q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from weft.engine.checkpoint import SavedTensors
from weft.models.network.linear import StoredParameter
from weft.topology import Slice

State = dict[str, Tensor]  # state of one parameter, by slot
# suffix of the slot with the block scales of another slot, such as "exp_avg:scales"
SCALES = ":scales"


def is_scales(key: str) -> bool:
    return key.endswith(SCALES)


def count_blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` elements that are needed for `count` elements."""
    return -(-count // size)


def to_named_tensors(
    trained: Mapping[str, StoredParameter], states: Mapping[nn.Parameter, State], block: int
) -> dict[str, Tensor]:
    """Return the states of the parameters in `trained` as tensors named `{parameter}/{slot}`.

    A slot is one tensor of a parameter's state, such as `exp_avg`. The network can store several
    parameters as one, such as q, k and v. `states` has one state for each stored parameter, and
    this function splits it into the states of the separate parameters.

    If a state has scales, there is one for every `block` elements of the stored parameter. A
    separate parameter gets the scales of all blocks that contain its elements.
    """
    named_tensors: dict[str, Tensor] = {}
    for name, part in trained.items():
        for slot, value in sorted(states.get(part.parameter, {}).items()):
            named_tensors[f"{name}/{slot}"] = _slice_state(part, slot, value, block)
    return named_tensors


def from_named_tensors(
    trained: Mapping[str, StoredParameter], tensors: Mapping[str, Tensor], block: int
) -> dict[nn.Parameter, State]:
    """Convert the result of `to_named_tensors` back to states of stored parameters.

    A stored parameter can contain several canonical parameters. If `tensors` has scales for only
    some of them, the scales of the others are 0.
    """
    states: dict[nn.Parameter, State] = {}
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        part = trained[name]
        held = states.setdefault(part.parameter, {})
        if not value.dim():
            held[slot] = value
        elif is_scales(slot):
            where = _find_blocks(part, block)
            if value.numel() == where.stop - where.start:
                count = count_blocks(part.parameter.numel(), block)
                held.setdefault(slot, value.new_zeros(count))[where] = value
        else:
            whole = held.setdefault(
                slot, torch.zeros_like(part.parameter, dtype=value.dtype, device=value.device)
            )
            part.select_rows(whole).copy_(value)
    return states


def _slice_state(part: StoredParameter, slot: str, value: Tensor, block: int) -> Tensor:
    if not value.dim():
        return value.clone()
    return value[_find_blocks(part, block)] if is_scales(slot) else part.select_rows(value)


def _find_blocks(part: StoredParameter, block: int) -> slice:
    """Return the range of scale blocks that contain elements of the canonical parameter `part`.

    Scales are computed for the stored parameter `part.parameter`, which can contain several
    canonical parameters. There is one scale for each block of `block` elements.
    """
    if part.rows is None:
        return slice(0, count_blocks(part.parameter.numel(), block))
    row = math.prod(part.parameter.shape[1:])
    return slice(part.rows.start * row // block, count_blocks(part.rows.stop * row, block))


def rename_for_writing(
    tensors: Mapping[str, Tensor], places: Mapping[str, Slice]
) -> dict[str, Tensor]:
    """Return the tensors, keyed by their names in the saved file.

    The names of scale tensors get a suffix such as `@0:128,0:64`, because scales can only be loaded
    for the same slice of the parameter. Other names are unchanged. `places` maps parameters to the
    slices that this rank has.
    """
    for_writing: dict[str, Tensor] = {}
    for key, value in tensors.items():
        for_writing[_append_slice(key, places) if is_scales(key) else key] = value
    return for_writing


def has_parameter_shape(written_as: str, value: Tensor) -> bool:
    """Return whether a state tensor has its parameter's shape, and therefore the same slices.

    `written_as` is the name of the tensor in a file.
    """
    return value.dim() > 0 and not is_scales(written_as.partition("@")[0])


def read(
    saved: SavedTensors, places: Mapping[str, Slice], elsewhere: Collection[str]
) -> dict[str, Tensor]:
    """Return this rank's slice of every saved tensor.

    `elsewhere` contains the names of parameters that may be on other ranks. If this rank does not
    have such a parameter, the parameter's tensors are left out. Block scales of quantized states
    are included only if they were saved for exactly the slice of the parameter that this rank has.
    """
    names = _map_saved_names(saved.names, places)
    of = map_to_parameters(names, places)
    result: dict[str, Tensor] = {}
    for key, own in names.items():
        if of[key] in places or of[key] not in elsewhere:
            result[own] = saved.read(key, None if is_scales(own) else places.get(of[key]))
    return result


def map_to_parameters(names: Iterable[str], slices: Mapping[str, Slice]) -> dict[str, str]:
    """Map the name of each tensor, `{parameter}` or `{parameter}/{slot}`, to its parameter.

    The keys of `slices` are the names of parameters.
    """
    return {name: name if name in slices else name.rsplit("/", 1)[0] for name in names}


def _map_saved_names(keys: Iterable[str], places: Mapping[str, Slice]) -> dict[str, str]:
    """Map the names of saved tensors to the names that the tensors have on this rank.

    In the file, the name of a scale tensor ends with the slice of its parameter, as in
    `@0:128,0:64`. If this rank has a different slice of the parameter, the tensor is left out.
    `places` maps parameters to the slices that this rank has.
    """
    own_names = {}
    for written_as in keys:
        own = written_as.partition("@")[0]
        if not is_scales(own):
            own_names[written_as] = written_as
        elif own.rsplit("/", 1)[0] in places and written_as == _append_slice(own, places):
            own_names[written_as] = own
    return own_names


def _append_slice(key: str, places: Mapping[str, Slice]) -> str:
    place = places[key.rsplit("/", 1)[0]]
    return f"{key}@{','.join(f'{part.start}:{part.stop}' for part in place)}"
