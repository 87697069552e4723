"""The state that an optimizer keeps of its parameters, as it is written and taken over: by
canonical name, in any layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from weft.engine.checkpoint import Saved
from weft.models.network.parameters import StoredParameter
from weft.topology import Slice

State = dict[str, Tensor]  # of one parameter, by slot
# ends the slot of scales of blocks, a slot of the parameter's shape goes before it
SCALES = ":scales"


def is_scales(key: str) -> bool:
    return key.endswith(SCALES)


def blocks(count: int, size: int) -> int:
    """How many blocks of `size` elements hold `count`; the last may hold less."""
    return -(-count // size)


def named(
    trained: Mapping[str, StoredParameter], states: Mapping[nn.Parameter, State], block: int
) -> dict[str, Tensor]:
    """`{parameter}/{slot}` -> tensor, from the state of each stored parameter.

    Scales are those of the blocks, of `block` elements of the stored parameter, that a canonical
    one has a part in.
    """
    return {
        f"{name}/{slot}": _part_of(part, slot, value, block)
        for name, part in trained.items()
        for slot, value in sorted(states.get(part.parameter, {}).items())
    }


def stored(
    trained: Mapping[str, StoredParameter], tensors: Mapping[str, Tensor], block: int
) -> dict[nn.Parameter, State]:
    """The way back.

    A stored parameter of which some parts have scales and others none has zeros in their place.
    """
    states: dict[nn.Parameter, State] = {}
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        part = trained[name]
        held = states.setdefault(part.parameter, {})
        if not value.dim():
            held[slot] = value
        elif is_scales(slot):
            where = _blocks_of(part, block)
            if value.numel() == where.stop - where.start:
                count = blocks(part.parameter.numel(), block)
                held.setdefault(slot, value.new_zeros(count))[where] = value
        else:
            whole = held.setdefault(
                slot, torch.zeros_like(part.parameter, dtype=value.dtype, device=value.device)
            )
            part.of(whole).copy_(value)
    return states


def _part_of(part: StoredParameter, slot: str, value: Tensor, block: int) -> Tensor:
    if not value.dim():
        return value.clone()
    return value[_blocks_of(part, block)] if is_scales(slot) else part.of(value)


def _blocks_of(part: StoredParameter, block: int) -> slice:
    """Those of the stored parameter's blocks that hold an element of the part."""
    if part.rows is None:
        return slice(0, blocks(part.parameter.numel(), block))
    row = math.prod(part.parameter.shape[1:])
    return slice(part.rows.start * row // block, blocks(part.rows.stop * row, block))


def written(tensors: Mapping[str, Tensor], places: Mapping[str, Slice]) -> dict[str, Tensor]:
    """As a rank writes them: scales, which fit the part here alone, under names that say which part
    that is.
    """
    return {
        _placed(key, places) if is_scales(key) else key: value for key, value in tensors.items()
    }


def fits_layouts(written_as: str, value: Tensor) -> bool:
    """Whether a tensor has the shape of the parameter that it is of, and can be cut as that is."""
    return value.dim() > 0 and not is_scales(written_as.partition("@")[0])


def read(
    saved: Saved, places: Mapping[str, Slice], elsewhere: Collection[str]
) -> dict[str, Tensor]:
    """This rank's part of every tensor that was saved, but of parameters that other ranks have
    (`elsewhere`) and of scales that are of other parts than lie here.
    """
    names = _readable(saved.names, places)
    of = owners(names, places)
    return {
        own: saved.read(key, None if is_scales(own) else places.get(of[key]))
        for key, own in names.items()
        if of[key] in places or of[key] not in elsewhere
    }


def owners(names: Iterable[str], slices: Mapping[str, Slice]) -> dict[str, str]:
    """The parameter of each tensor, which is named by it, or by it and what an optimizer keeps of
    it.
    """
    return {name: name if name in slices else name.rsplit("/", 1)[0] for name in names}


def _readable(keys: Iterable[str], places: Mapping[str, Slice]) -> dict[str, str]:
    """What is written -> what this rank calls it; scales of other parts than lie here are left out."""
    found = {}
    for written_as in keys:
        own = written_as.partition("@")[0]
        if not is_scales(own):
            found[written_as] = written_as
        elif own.rsplit("/", 1)[0] in places and written_as == _placed(own, places):
            found[written_as] = own
    return found


def _placed(key: str, places: Mapping[str, Slice]) -> str:
    place = places[key.rsplit("/", 1)[0]]
    return f"{key}@{','.join(f'{part.start}:{part.stop}' for part in place)}"
