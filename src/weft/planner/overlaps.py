"""Parts of a network that the devices of one mesh lack if they have those of another mesh.

They are computed from the widths of a layer and the coordinates of the devices, for all parameters
of a kind at once. They agree with the transfers that a run executes (`weft.realloc.plan`), except
that biases, norms and rounding are left out, and that matrices whose rows are stored together (q, k
and v, or gate and up) count as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.planner.decoder_sizes import DecoderSizes, list_stage_layers
from weft.topology import Layout, Mesh

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class LackedElements(NamedTuple):
    """Elements that the devices of meshes lack, float64 [meshes, devices] in the order of each mesh.

    Attributes:
        missing: Elements that a device needs and does not have.
        crossing: Part of them that no device of its machine has either.
    """

    missing: Floats
    crossing: Floats


class _DevicePositions(NamedTuple):
    """Coordinates of devices in a mesh, int64 of any shape; -1 if the mesh does not have a device."""

    data: Integers
    tensor: Integers
    pipeline: Integers


class _MatrixSlice(NamedTuple):
    """Interval of the rows or columns of a matrix, as fractions of all of them."""

    start: Floats
    length: Floats


def compute_lacked_elements(
    network: DecoderSizes, source: Mesh, targets: Sequence[Mesh], per_node: int
) -> LackedElements:
    """Return the trained elements that the devices of `targets` lack if `source` has trained them.

    All targets have the same number of devices. `per_node` is the number of devices of a machine.
    """
    ranks = np.array([target.ranks for target in targets], np.int64)
    layouts = [target.layout for target in targets]
    in_source = _locate(source, ranks)
    inside = in_source.data >= 0
    needed = np.zeros(ranks.shape)
    present = np.zeros(ranks.shape)
    counts = _count_layers(network, source.layout, layouts)
    rows, columns = np.arange(len(targets))[:, None], np.arange(ranks.shape[1])
    for kind, elements in _list_elements(network).items():
        count, common = counts["ends" if kind == "ends" else "blocks"]
        part = np.ones(ranks.shape)
        overlap = np.ones(ranks.shape)
        slices = np.stack([_list_all_slices(kind, layout) for layout in layouts])
        for axis, source_slice in enumerate(_list_slices(kind, source.layout, in_source)):
            start, length = slices[:, axis, 0], slices[:, axis, 1]
            part *= length
            stop = np.minimum(source_slice.start + source_slice.length, start + length)
            overlap *= np.maximum(0.0, stop - np.maximum(source_slice.start, start))
        needed += elements * count * part
        common_elements = elements * common[rows, in_source.pipeline, columns]
        present += np.where(inside, common_elements * overlap, 0.0)
    missing = np.maximum(0.0, needed - present)
    return LackedElements(
        missing, missing * _compute_distant_share(source, ranks, inside, per_node)
    )


def _locate(mesh: Mesh, ranks: Integers) -> _DevicePositions:
    """Return the coordinates of the devices `ranks` in a mesh, whose ranks are ascending."""
    layout = mesh.layout
    mesh_ranks = np.array(mesh.ranks, np.int64)
    index = np.minimum(np.searchsorted(mesh_ranks, ranks), len(mesh_ranks) - 1)
    is_inside = mesh_ranks[index] == ranks
    row, tensor = np.divmod(index, layout.tensor)
    pipeline, data = np.divmod(row // layout.context, layout.data)
    return _DevicePositions(*(np.where(is_inside, each, -1) for each in (data, tensor, pipeline)))


@lru_cache(maxsize=4096)
def _list_positions(layout: Layout) -> _DevicePositions:
    """Return the coordinates of all devices of a layout."""
    ranks = tuple(range(layout.num_devices))
    return _locate(Mesh(layout, ranks), np.array(ranks, np.int64))


@lru_cache(maxsize=4096)
def _list_all_slices(kind: str, layout: Layout) -> Floats:
    """Return the slices of a matrix that all devices of a layout have (`_list_slices`).

    float64 [axes, 2, devices]: starts and lengths, as fractions of the axis.
    """
    return np.array(_list_slices(kind, layout, _list_positions(layout)))


def _list_elements(network: DecoderSizes) -> dict[str, float]:
    """Return the number of trained elements of each kind of matrix.

    "rows" and "columns" are the matrices of a layer whose rows or columns tensor parallelism
    divides; "expert rows" and "expert columns" are those of its experts. "ends" is the embedding or
    the output matrix.
    """
    shape = network.shape
    trained = shape.trainable / shape.parameters
    if network.has_adapters:
        return {"columns": shape.trainable / shape.layers}
    chosen = network.chosen_experts if network.experts else 1
    copies = network.experts or 1
    inner = shape.inner // chosen * copies
    prefix = "expert " if network.experts else ""
    sizes = {
        "rows": float(shape.hidden * (shape.query + 2 * shape.key)),
        "columns": float(shape.query * shape.hidden),
    }
    for kind, matrices in (("rows", 2 if shape.gated else 1), ("columns", 1)):
        name = f"{prefix}{kind}"
        sizes[name] = sizes.get(name, 0.0) + matrices * shape.hidden * inner
    scale = trained * shape.block_elements / sum(sizes.values())
    scaled = {kind: scale * size for kind, size in sizes.items()}
    return scaled | {"ends": trained * shape.embedding}


def _count_layers(
    network: DecoderSizes, source: Layout, targets: Sequence[Layout]
) -> dict[str, tuple[Floats, Floats]]:
    """Return the numbers of layers ("blocks") and of embeddings and output matrices ("ends").

    Each value is a pair: the number on each device of `targets`, [targets, devices], and how many
    of these each pipeline rank of `source` has too, [targets, pipeline ranks, devices].
    """
    shape = network.shape
    head = network.outputs / max(1, network.active) if shape.vocab > 1 else 0.0
    stages = _keep_stages(source)
    counts: dict[str, tuple[list[Floats], list[Floats]]] = {"blocks": ([], []), "ends": ([], [])}
    for layout in targets:
        pipeline = _list_positions(layout).pipeline
        stage_counts = _count_in_stages(
            shape.layers, head, shape.tied, shape.vocab == 1, stages, _keep_stages(layout)
        )
        for kind, (own, common) in stage_counts.items():
            counts[kind][0].append(own[pipeline])
            counts[kind][1].append(common[:, pipeline])
    return {kind: (np.stack(own), np.stack(common)) for kind, (own, common) in counts.items()}


@lru_cache(maxsize=4096)
def _keep_stages(layout: Layout) -> Layout:
    """Return a layout that has the pipeline stages of `layout`, and degree 1 otherwise."""
    return Layout(
        pipeline=layout.pipeline, stages_per_rank=layout.stages_per_rank, turns=layout.turns
    )


@lru_cache(maxsize=4096)
def _count_in_stages(
    layers: int, head: float, tied: bool, scores: bool, source: Layout, target: Layout
) -> dict[str, tuple[Floats, Floats]]:
    """Return the counts of `_count_layers` for the pipeline ranks of `target`.

    Each value is a pair: the number on each pipeline rank of `target`, [ranks], and how many of
    these each pipeline rank of `source` has too, [source ranks, ranks].
    """
    layouts = (source, target)
    blocks = [_mark_layers(layers, head, layout) for layout in layouts]
    ends = [_mark_ends(layout, tied=tied, scores=scores) for layout in layouts]
    counts = {}
    for kind, (of_source, of_target) in {"blocks": blocks, "ends": ends}.items():
        counts[kind] = (of_target.sum(1), of_source @ of_target.T)
    return counts


def _mark_layers(layers: int, head: float, layout: Layout) -> Floats:
    """Return 1 for each layer that a pipeline rank has, else 0, [pipeline ranks, layers]."""
    has = np.zeros((layout.pipeline, layers))
    for rank, runs in enumerate(list_stage_layers(layers, head, layout)):
        for run in runs:
            has[rank, run.start : run.stop] = 1.0
    return has


def _mark_ends(layout: Layout, *, tied: bool, scores: bool) -> Floats:
    """Return 1 for the embedding and the output matrix that a pipeline rank has, else 0.

    The first stage has the embedding, and the last one the output matrix or, if both are one, a
    copy of it. float64 [pipeline ranks, 2].
    """
    has = np.zeros((layout.pipeline, 2))
    has[layout.placement.get_rank(0), 0] = 1.0
    if not scores:
        has[layout.placement.last_rank, 0 if tied else 1] = 1.0
    return has


def _list_slices(kind: str, layout: Layout, positions: _DevicePositions) -> list[_MatrixSlice]:
    """Return the rows and columns (for experts: also the experts) that devices have of a matrix."""
    tensor = _MatrixSlice(
        positions.tensor / layout.tensor, np.full(positions.tensor.shape, 1.0 / layout.tensor)
    )
    if kind.startswith("expert"):
        parts = layout.expert * layout.expert_shards
        number = positions.data % layout.expert * layout.expert_shards
        number = number + positions.data % layout.fsdp // layout.expert
        experts = _MatrixSlice(number / parts, np.full(number.shape, 1.0 / parts))
        return [experts, tensor]
    shard = positions.data % layout.fsdp
    if kind == "columns":
        rows = _MatrixSlice(shard / layout.fsdp, np.full(shard.shape, 1.0 / layout.fsdp))
        return [rows, tensor]
    # Rows are divided over tensor ranks, and each part over shards.
    parts = layout.tensor * layout.fsdp
    number = positions.tensor * layout.fsdp + shard
    whole = _MatrixSlice(np.zeros(shard.shape), np.ones(shard.shape))
    return [_MatrixSlice(number / parts, np.full(number.shape, 1.0 / parts)), whole]


def _compute_distant_share(
    source: Mesh, ranks: Integers, inside: npt.NDArray[np.bool_], per_node: int
) -> Floats:
    """Return the share of missing elements that no device of `source` in the same machine has.

    `inside` is True for devices of `source`.
    """
    layout = source.layout
    parts = layout.tensor * layout.pipeline * layout.fsdp
    nodes = ranks // per_node
    held_parts = _count_held_parts(source, per_node)
    near = np.where(nodes < len(held_parts), held_parts[np.minimum(nodes, len(held_parts) - 1)], 0)
    # What a device has itself is not missing.
    lacked = np.maximum(parts - inside, 1)
    return 1.0 - np.minimum(1.0, np.maximum(0.0, near - inside) / lacked)


@lru_cache(maxsize=4096)
def _count_held_parts(source: Mesh, per_node: int) -> Integers:
    """Return how many distinct parts of the network each machine has, up to the last one in use."""
    layout = source.layout
    ranks = np.array(source.ranks, np.int64)
    positions = _locate(source, ranks)
    number = (
        positions.pipeline * layout.tensor + positions.tensor
    ) * layout.fsdp + positions.data % layout.fsdp
    pairs = np.unique(np.stack([ranks // per_node, number]), axis=1)
    return np.bincount(pairs[0])
