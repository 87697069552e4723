"""Key maps: any slice of any parameter, from the rectangles of any layout, both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.common import tiny_config
from weft.checkpoints.hf_io import assemble
from weft.models.families.keymap import FusedLayout, Key, KeyMap, list_rectangles
from weft.registry import families

LAYOUTS = {
    "plain": (Key("p", "h"), (6, 4)),
    "transposed": (Key("p", "h", transpose=True), (6, 4)),
    "second of two": (Key("p", "h", fused=FusedLayout(1, (5, 6), 1)), (6, 4)),
    "heads alternate": (Key("p", "h", fused=FusedLayout(3, (2, 2, 2), 1)), (6, 4)),
    "fused and transposed": (
        Key("p", "h", transpose=True, fused=FusedLayout(1, (6, 2, 2), 0)),
        (6, 4),
    ),
    "bias of alternating heads": (Key("p", "h", fused=FusedLayout(3, (2, 2, 2), 2)), (6,)),
    "experts": (Key("p", "h.{e}", experts=3), (3, 6, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_pieces_cover_a_slice_exactly_once(layout: str, data: st.DataObject) -> None:
    key, shape = LAYOUTS[layout]
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    where = tuple(slice(a, b) for a, b in bounds)
    if any(a == b for a, b in bounds):
        return
    stored = {name: torch.randn(key.compute_hf_shape(shape)) for name in key.list_hf_names()}
    whole = read(key, shape, stored, None)
    assert torch.equal(read(key, shape, stored, where), whole[where])


def read(
    key: Key,
    shape: tuple[int, ...],
    stored: dict[str, torch.Tensor],
    where: tuple[slice, ...] | None,
) -> torch.Tensor:
    out, count = torch.zeros(shape), torch.zeros(shape)
    for piece in list_rectangles(key, shape, where):
        part = stored[piece.hf][piece.source]
        part = part.T if key.transpose and part.dim() == 2 else part
        out[piece.target] = part[None] if piece.expert is not None else part
        count[piece.target] += 1
    assert count.max() == 1
    return out if where is None else out[where]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gpt_bigcode", "phi3", "mixtral", "opt"])
def test_writing_is_the_inverse_of_reading(name: str) -> None:
    family, config = families.get(name), tiny_config(name)
    keymap = family.keymap(config)
    from weft.checkpoints.hf_io import compute_parameter_shapes

    shapes = compute_parameter_shapes(config)
    parameters = {n: torch.randn(s) for n, s in shapes.items()}
    stored = dict(assemble(keymap.group_by_hf_name(), parameters, shapes))
    for n, key in keymap.keys.items():
        assert torch.equal(read(key, shapes[n], stored, None), parameters[n]), n


def test_parts_and_layers() -> None:
    keymap = families.get("llama").keymap(tiny_config("llama"))
    assert keymap.list_names("embedding") == ["embed.weight"]
    assert keymap.list_names("head") == ["norm.weight", "head.weight"]
    assert len(keymap.list_names("block", layer=1)) == 9 and all(
        n.startswith("blocks.1.") for n in keymap.list_names(layer=1)
    )
    assert set(keymap.select(["embed.weight"]).keys) == {"embed.weight"}
    with pytest.raises(KeyError):
        keymap.select(["nothing"])


def test_two_keys_for_one_parameter_are_a_mistake() -> None:
    with pytest.raises(AssertionError, match="two keys for p"):
        KeyMap.from_templates((Key("p", "a"), Key("p", "b")), 1)
