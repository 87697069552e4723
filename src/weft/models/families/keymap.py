"""Map from parameters to checkpoint tensors, which can store them transposed, fused or split.

A `Key` is the location of one canonical parameter in a Hugging Face checkpoint. `list_rectangles`
lists the rectangles of checkpoint tensors that contain the parameter, or any `Slice` of it. Reading
copies these rectangles from the checkpoint, and writing copies them to it, so a map that is correct
in one direction is also correct in the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weft.topology import Slice, build_whole_slice

NetworkPart = Literal["embedding", "block", "head"]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class FusedLayout:
    """Position of one parameter in a checkpoint tensor that contains several parameters.

    The rows of the tensor form `blocks` blocks of equal size. Each block contains rows of all
    parameters, one parameter after the other: `sizes[i]` rows of parameter i. `index` is the index
    of this parameter in `sizes`. For example, the qkv tensor of phi3 is one block with all rows of
    q, k and v, and that of gpt_neox has one block per head, with `sizes` (head_dim, head_dim,
    head_dim).
    """

    blocks: int
    sizes: tuple[int, ...]
    index: int

    @property
    def start(self) -> int:
        """Index of the parameter's first row within each block."""
        return sum(self.sizes[: self.index])

    def split_runs(self, where: slice) -> Iterator[tuple[slice, slice]]:
        """Split the parameter's rows `where` into runs that are consecutive in the fused tensor.

        Yields (rows of the fused tensor, rows of the parameter) for each run.
        """
        size = self.sizes[self.index]
        stride = sum(self.sizes)
        for block in range(where.start // size, -(-where.stop // size)):
            first = max(where.start, block * size)
            last = min(where.stop, (block + 1) * size)
            shift = block * (stride - size) + self.start
            yield slice(first + shift, last + shift), slice(first, last)


@dataclass(frozen=True)
class Key:
    """Location of one parameter in a checkpoint.

    `name` and `hf` can contain the placeholder `{i}` for the index of the layer. The key is then a
    template for all layers, and `bind_layer` returns the key of one layer.

    Attributes:
        name: Canonical name of the parameter in weft.
        hf: Name of the checkpoint tensor. It contains `{e}`, the index of the expert, if each
            expert has a separate tensor.
        part: Part of the network to which the parameter belongs.
        transpose: True if the checkpoint stores the matrix as [in, out].
        fused: Position of the parameter in a checkpoint tensor that contains several parameters;
            None if the tensor contains only this one.
        experts: Number of checkpoint tensors, one per expert, that are stacked along dimension 0 to
            form the parameter; 0 if the parameter is not stacked.
        layer: Index of the layer; None in a template and for a parameter outside the blocks.
    """

    name: str
    hf: str
    part: NetworkPart = "block"
    transpose: bool = False
    fused: FusedLayout | None = None
    experts: int = 0
    layer: int | None = None

    def bind_layer(self, layer: int) -> Key:
        """Return a copy for one layer, with the index of the layer in place of `{i}` in the names."""
        hf = self.hf.replace("{i}", str(layer))
        return replace(self, name=self.name.replace("{i}", str(layer)), hf=hf, layer=layer)

    def list_hf_names(self) -> list[str]:
        """Return the names of all checkpoint tensors that contain the parameter."""
        if self.experts:
            return [self.hf.format(e=e) for e in range(self.experts)]
        return [self.hf]

    def compute_hf_shape(self, shape: Shape) -> Shape:
        """Return the shape of the checkpoint tensors that contain a parameter with this `shape`."""
        shape = shape[1:] if self.experts else shape
        if self.fused:
            shape = (self.fused.blocks * sum(self.fused.sizes), *shape[1:])
        return shape[::-1] if self.transpose else shape


@dataclass(frozen=True)
class CheckpointRectangle:
    """Part of a parameter, and the part of a checkpoint tensor with the same values.

    Both parts are given by one slice per dimension. If the parameter's `Key` has `transpose`, the
    values are transposed.

    Attributes:
        hf: Name of the checkpoint tensor.
        source: Slices of the checkpoint tensor.
        target: Slices of the parameter. If `expert` is set, the first slice selects this expert,
            and `source` has no slice for this dimension.
        expert: Index of the expert if each expert has its own checkpoint tensor, otherwise None.
    """

    hf: str
    source: Slice
    target: Slice
    expert: int | None = None


def list_rectangles(
    key: Key, shape: Shape, where: Slice | None = None
) -> list[CheckpointRectangle]:
    """Return the rectangles in which a checkpoint stores the slice `where` of a parameter.

    Each element names a rectangle of the parameter and the rectangle of a checkpoint tensor with
    the same values. The rectangles of the parameter are disjoint and together cover `where`, which
    is the whole parameter by default. `shape` is the shape of the parameter.
    """
    where = where or build_whole_slice(shape)
    if key.experts:
        inner = where[1:]
        source = inner[::-1] if key.transpose else inner
        rectangles: list[CheckpointRectangle] = []
        for expert in range(where[0].start, where[0].stop):
            target = (slice(expert, expert + 1), *inner)
            hf = key.hf.format(e=expert)
            rectangles.append(CheckpointRectangle(hf, source, target, expert=expert))
        return rectangles
    runs = key.fused.split_runs(where[0]) if key.fused else [(where[0], where[0])]
    row_rectangles = []
    for fused_rows, rows in runs:
        source = (fused_rows, *where[1:])
        if key.transpose:
            source = source[::-1]
        row_rectangles.append(CheckpointRectangle(key.hf, source, (rows, *where[1:])))
    return row_rectangles


@dataclass(frozen=True)
class KeyMap:
    """Checkpoint locations of all parameters of one network, by canonical name."""

    keys: Mapping[str, Key]

    @classmethod
    def from_templates(cls, templates: Iterable[Key], num_layers: int) -> KeyMap:
        """Create a map from `templates`; those with `{i}` in a name are repeated for every layer."""
        keys_by_name: dict[str, Key] = {}
        for key in templates:
            if "{i}" in key.name:
                bound_keys = [key.bind_layer(layer) for layer in range(num_layers)]
            else:
                bound_keys = [key]
            for bound in bound_keys:
                assert bound.name not in keys_by_name, f"two keys for {bound.name}"
                keys_by_name[bound.name] = bound
        return cls(keys_by_name)

    def select(self, names: Iterable[str]) -> KeyMap:
        """Return a map of only the parameters with the given `names`.

        Raises `KeyError` for an unknown name.
        """
        return KeyMap({name: self.keys[name] for name in names})

    def list_names(self, part: NetworkPart | None = None, layer: int | None = None) -> list[str]:
        """Return the names of the parameters in `part` of the network and in layer `layer`.

        None does not restrict the part or the layer.
        """
        names: list[str] = []
        for name, key in self.keys.items():
            if part in (None, key.part) and layer in (None, key.layer):
                names.append(name)
        return names

    def group_by_hf_name(self) -> dict[str, list[Key]]:
        """Return a mapping from each checkpoint tensor's name to the parameters in the tensor."""
        groups: dict[str, list[Key]] = {}
        for key in self.keys.values():
            for name in key.list_hf_names():
                groups.setdefault(name, []).append(key)
        return groups
