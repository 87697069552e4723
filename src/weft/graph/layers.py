"""Layered layout for drawing a graph top to bottom, with few crossings and edges around nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

SWEEPS = 12
BUNDLED_WEIGHT = 0.1  # weight of a bundled edge when columns are aligned
Pair = tuple[str, str]


@dataclass(frozen=True)
class GraphPositions:
    """Positions of the nodes and edges in a drawing.

    Attributes:
        x: Horizontal position of each node's center.
        layer: Row of each node, counted from 0 at the top.
        bends: For each edge, the (x, layer) points that it passes through between its two ends.
    """

    x: Mapping[str, float]
    layer: Mapping[str, int]
    bends: Mapping[Pair, Sequence[tuple[float, int]]]


def lay_out_graph(
    names: Sequence[str],
    edges: Sequence[Pair],
    bundled: Collection[Pair],
    node_width: float,
    bend_width: float,
) -> GraphPositions:
    """Compute the positions of the nodes and edges of an acyclic graph.

    `names` are in topological order. `node_width` is the width reserved for a node, and
    `bend_width` is the width reserved for an edge that passes through a layer. Edges in `bundled`
    that have the same source run together and only separate above their targets.
    """
    layer = compute_layers(names, edges)
    rows: list[list[str]] = [[] for _ in range(max(layer.values()) + 1)]
    for name in names:
        rows[layer[name]].append(name)
    # Split each edge into links between neighboring layers, with a dummy node in every layer passed.
    links: dict[Pair, float] = {}  # link -> weight with which its ends are aligned
    passing: dict[Pair, list[str]] = {}
    for edge in edges:
        source, target = edge
        way = source if edge in bundled else f"{source}\0{target}"
        chain = [f"{way}\0{row}" for row in range(layer[source] + 1, layer[target])]
        for row, dummy in enumerate(chain, layer[source] + 1):
            if dummy not in rows[row]:
                rows[row].append(dummy)
        passing[edge] = chain
        for link in itertools.pairwise([source, *chain, target]):
            links[link] = max(links.get(link, 0.0), BUNDLED_WEIGHT if edge in bundled else 1.0)
    # Reduce crossings, then assign coordinates.
    _order_rows(rows, list(links))
    x = _compute_coordinates(rows, links, dict.fromkeys(names, node_width), bend_width)
    rank = {}
    for index, dummies in enumerate(rows):
        for dummy in dummies:
            rank[dummy] = index
    bends = {edge: [(x[dummy], rank[dummy]) for dummy in chain] for edge, chain in passing.items()}
    return GraphPositions({name: x[name] for name in names}, layer, bends)


def compute_layers(names: Sequence[str], edges: Sequence[Pair]) -> dict[str, int]:
    """Return each node's layer: 0 if it has no sources, else 1 plus the highest layer of a source.

    In `names`, each node must come after its sources.
    """
    layer: dict[str, int] = {}
    for name in names:
        layer[name] = max(
            (layer[source] + 1 for source, target in edges if target == name), default=0
        )
    return layer


def find_implied_edges(names: Sequence[str], edges: Iterable[Pair]) -> set[Pair]:
    """Return the edges whose target can also be reached from the source through other nodes.

    `names` are in topological order.
    """
    pairs = set(edges)
    below: dict[str, set[str]] = {}
    for name in reversed(names):
        nexts = {target for source, target in pairs if source == name}
        below[name] = nexts.union(*(below[target] for target in nexts)) if nexts else set()
    implied_edges: set[Pair] = set()
    for a, b in pairs:
        if any(b in below[via] for _, via in pairs if _ == a and via != b):
            implied_edges.add((a, b))
    return implied_edges


def _order_rows(rows: list[list[str]], links: Sequence[Pair]) -> None:
    """Reorder each row in place so that edges cross as little as possible.

    Each pair in `links` has two nodes that are in neighboring rows and connected by an edge. In
    alternating sweeps down and up, each row is sorted by the mean position of the linked nodes in
    the previous row. The best order found is kept.
    """
    best = [list(row) for row in rows]
    fewest = _count_crossings(rows, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for index in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            near = {
                name: place for place, name in enumerate(rows[index - 1 if down else index + 1])
            }
            here = {name: float(place) for place, name in enumerate(rows[index])}
            for name in here:
                places = []
                for a, b in links:
                    if (b if down else a) == name:
                        places.append(near[a if down else b])
                here[name] = sum(places) / len(places) if places else here[name]
            rows[index].sort(key=lambda name, here=here: here[name])  # type: ignore[misc]
        crossings = _count_crossings(rows, links)
        if crossings < fewest:
            best = [list(row) for row in rows]
            fewest = crossings
    rows[:] = best


def _count_crossings(rows: Sequence[Sequence[str]], links: Sequence[Pair]) -> int:
    place = {}
    for row, names in enumerate(rows):
        for index, name in enumerate(names):
            place[name] = (row, index)
    spans = [(place[a][0], place[a][1], place[b][1]) for a, b in links]
    return sum(
        1
        for i, (row, a, b) in enumerate(spans)
        for other, c, d in spans[i + 1 :]
        if row == other and (a - c) * (b - d) < 0
    )


def _compute_coordinates(
    rows: Sequence[Sequence[str]],
    links: Mapping[Pair, float],
    widths: Mapping[str, float],
    bend_width: float,
) -> dict[str, float]:
    """Return the x coordinate of every node and bend, shifted so that the drawing starts at x = 0.

    A bend is the point at which an edge passes through a row. `links` maps each pair of directly
    connected nodes or bends, which are in adjacent rows, to a weight. Every node or bend is placed
    close to the weighted mean position of those to which it is linked. In each row, the order is
    kept and nothing overlaps.
    """
    room = {}
    for row in rows:
        for name in row:
            room[name] = widths.get(name, bend_width)
    x: dict[str, float] = {}
    for row in rows:
        left = -sum(room[name] for name in row) / 2
        for name in row:
            x[name] = left + room[name] / 2
            left += room[name]
    neighbours: dict[str, dict[str, float]] = {name: {} for name in room}
    for (a, b), pull in links.items():
        neighbours[a][b] = neighbours[b][a] = pull
    for sweep in range(4 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wished = {name: _compute_neighbor_mean(neighbours[name], x, x[name]) for name in row}
            _place_row(row, wished, room, x)
    least = min(x[name] - room[name] / 2 for name in x)
    return {name: value - least for name, value in x.items()}


def _compute_neighbor_mean(
    neighbours: Mapping[str, float], x: Mapping[str, float], default: float
) -> float:
    weight = sum(neighbours.values())
    if weight:
        return sum(x[name] * pull for name, pull in neighbours.items()) / weight
    return default


def _place_row(
    row: Sequence[str], wished: Mapping[str, float], room: Mapping[str, float], x: dict[str, float]
) -> None:
    """Set the `x` coordinates of a row's nodes as close to `wished` as possible without overlap.

    The nodes keep their order, and the sum of the squared distances is minimized. `room` has the
    width of each node. Nodes that would overlap are merged into blocks that move together.
    """
    blocks: list[tuple[list[str], float]] = []  # (names, x of the first name)
    for name in row:
        names = [name]
        first = wished[name]
        while blocks and first < _end(blocks[-1], room) + room[names[0]] / 2:
            names = blocks.pop()[0] + names
            offsets = _compute_offsets(names, room)
            first = sum(wished[n] - o for n, o in zip(names, offsets, strict=True)) / len(names)
        blocks.append((names, first))
    for names, first in blocks:
        for name, offset in zip(names, _compute_offsets(names, room), strict=True):
            x[name] = first + offset


def _compute_offsets(names: Sequence[str], room: Mapping[str, float]) -> list[float]:
    offsets = [0.0]
    for before, after in itertools.pairwise(names):
        offsets.append(offsets[-1] + (room[before] + room[after]) / 2)
    return offsets


def _end(block: tuple[list[str], float], room: Mapping[str, float]) -> float:
    names, first = block
    return first + _compute_offsets(names, room)[-1] + room[names[-1]] / 2
