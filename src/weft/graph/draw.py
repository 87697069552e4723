"""SVG drawing of a dataflow graph, without Graphviz.

Model function calls are colored by role, host functions are hexagons, and edges are labeled with
the keys that they carry. An edge is pale if its target can also be reached through other nodes; the
keys of a pale edge are shown on hover. Dashed lines show which calls wait for new weights, and
dotted lines show parameter syncs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from weft.graph.graph import DATASET, DataflowGraph, KeyEdge
from weft.graph.layers import GraphPositions, Pair, find_implied_edges, lay_out_graph
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.observe.page import DARK, GREY, ColourPair, assign_role_hues

WIDTH = 156
HEIGHT = 54  # height of a node
GAP_X = 34
GAP_Y = 62  # vertical gap between nodes
BEND = 44  # width of an edge that passes a layer
MARGIN = 22
LANE = 22
LABEL_LENGTH = 26
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
Point = tuple[float, float]


def to_svg(graph: DataflowGraph) -> str:
    """Return the graph as a self-contained SVG that adapts to a light or dark color scheme."""
    return _GraphDrawing(graph).render_svg()


@dataclass(frozen=True)
class _SideLine:
    """Line drawn to the left or right of the graph, between the sides of two nodes.

    Attributes:
        source: Name of the node at which the line starts.
        target: Name of the node at which the line ends.
        style: CSS class of the line: "version" (dashed) or "sync" (dotted).
        label: Text that is shown on hover.
    """

    source: str
    target: str
    style: str
    label: str


class _GraphDrawing:
    """Layout of a graph, and its rendering as SVG."""

    def __init__(self, graph: DataflowGraph) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph.nodes}
        self._edges: dict[Pair, KeyEdge] = {(e.producer, e.consumer): e for e in graph.edges}
        fed = any(source == DATASET for source, _ in self._edges)
        self._names = [*([DATASET] if fed else []), *graph.order]
        self._implied_edges = find_implied_edges(self._names, self._edges)
        self._positions: GraphPositions = lay_out_graph(
            self._names, list(self._edges), self._implied_edges, WIDTH + GAP_X, BEND
        )
        self._hues = assign_role_hues(node.role for node in graph.nodes if isinstance(node, MFCDef))
        self._side_lines = list(_find_side_lines(graph))
        right = max(x for x in self._positions.x.values()) + WIDTH / 2
        right = max([right, *(x for bends in self._positions.bends.values() for x, _ in bends)])
        left = min(x for x in self._positions.x.values()) - WIDTH / 2
        left = min([left, *(x for bends in self._positions.bends.values() for x, _ in bends)])
        self._span = (left, right)
        self._sides = self._choose_sides()
        on_left = self._sides.count(-1)
        on_right = self._sides.count(1)
        self._shift = MARGIN - left + (LANE * on_left + 14 if on_left else 0)
        self._width = self._shift + right + MARGIN + (LANE * on_right + 14 if on_right else 0)

    def render_svg(self) -> str:
        bottom = self._compute_y(max(self._positions.layer.values())) + HEIGHT + 26
        legend = list(self._render_legend(bottom))
        height = bottom + (22 if legend else 0)
        width = max(self._width, 300.0)
        shift = (width - self._width) / 2
        node_names = ", ".join(self._graph.order)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-shift:g} 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" role="img" aria-label="Dataflow graph: {escape(node_names)}">',
            f"<style>{self._render_style()}</style>",
            MARKERS,
            f'<rect class="ground" x="{-shift:g}" width="{width:g}" height="{height:g}"/>',
            *(
                self._render_edge(pair)
                for pair in sorted(self._edges, key=lambda pair: pair not in self._implied_edges)
            ),
            *(self._render_side_line(index, lane) for index, lane in enumerate(self._side_lines)),
            *(self._render_label(pair) for pair in self._edges if pair not in self._implied_edges),
            *(self._render_node(name) for name in self._names),
            *legend,
            "</svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    # -- geometry

    def _compute_x(self, name: str) -> float:
        return self._positions.x[name] + self._shift

    def _compute_y(self, layer: int) -> float:
        return MARGIN + layer * (HEIGHT + GAP_Y)

    def _compute_top(self, name: str) -> float:
        return self._compute_y(self._positions.layer[name])

    def _compute_ends(self, pair: Pair) -> tuple[Point, Point]:
        """Return the points where an edge leaves its source and reaches its target.

        The ends of all edges at a node are spread out horizontally, ordered by the x coordinate of
        the next point on each edge.
        """
        source, target = pair
        outs = sorted({self._compute_direction(p, 0) for p in self._edges if p[0] == source})
        ins = sorted(
            (p for p in self._edges if p[1] == target), key=lambda p: self._compute_direction(p, -1)
        )
        return (
            (
                self._compute_x(source)
                + _compute_fan_offset(outs.index(self._compute_direction(pair, 0)), len(outs)),
                self._compute_top(source) + HEIGHT,
            ),
            (
                self._compute_x(target) + _compute_fan_offset(ins.index(pair), len(ins)),
                self._compute_top(target) - 1,
            ),
        )

    def _compute_direction(self, pair: Pair, end: int) -> float:
        bends = self._positions.bends[pair]
        other = pair[1 if end == 0 else 0]
        return round(bends[end][0] if bends else self._positions.x[other], 3)

    def _compute_points(self, pair: Pair) -> list[Point]:
        start, end = self._compute_ends(pair)
        points = [start]
        for x, layer in self._positions.bends[pair]:
            points += [
                (x + self._shift, self._compute_y(layer)),
                (x + self._shift, self._compute_y(layer) + HEIGHT),
            ]
        return [*points, end]

    def _choose_sides(self) -> list[int]:
        """Return the side, -1 (left) or 1 (right), of each line that is routed around the nodes.

        A line is drawn on the side that is nearer to its ends. If both sides are equally near, it
        is drawn on the side with fewer lines.
        """
        sides: list[int] = []
        for lane in self._side_lines:
            middle = (
                self._positions.x[lane.source] + self._positions.x[lane.target] - sum(self._span)
            ) / 2
            if abs(middle) > 1:
                is_right = middle > 1
            else:
                is_right = sides.count(1) <= sides.count(-1)
            sides.append(1 if is_right else -1)
        return sides

    # -- lines

    def _render_edge(self, pair: Pair) -> str:
        keys = ", ".join(self._edges[pair].keys)
        title = f"{pair[0]} to {pair[1]}: {keys}"
        style = "edge pale" if pair in self._implied_edges else "edge"
        arrow = "arrow-pale" if pair in self._implied_edges else "arrow"
        path = _draw_smooth_path(self._compute_points(pair))
        return f'<path class="{style}" d="{path}" marker-end="url(#{arrow})"><title>{escape(title)}</title></path>'

    def _render_label(self, pair: Pair) -> str:
        """Render the label with the keys of the edge `pair`.

        The label is near the end of the edge where fewer edges meet, because lines are further
        apart there.
        """
        points = self._compute_points(pair)
        fan_out = sum(1 for p in self._edges if p[0] == pair[0] and p not in self._implied_edges)
        fan_in = sum(1 for p in self._edges if p[1] == pair[1] and p not in self._implied_edges)
        near_target = fan_out >= fan_in
        (x0, y0), (x1, y1) = (points[-2], points[-1]) if near_target else (points[0], points[1])
        if max(fan_in, fan_out) > 1:
            if near_target:
                share = 0.66
            else:
                share = 0.34
        else:
            share = 0.5
        eased = share * share * (3 - 2 * share)  # horizontal progress of the curve at this height
        x = x0 + (x1 - x0) * eased
        y = y0 + (y1 - y0) * share + 4
        keys = self._edges[pair].keys
        return (
            f'<text class="keys" x="{x:.1f}" y="{y:.1f}">{escape(shorten_keys(keys))}'
            f"<title>{escape(', '.join(keys))}</title></text>"
        )

    def _render_side_line(self, index: int, lane: _SideLine) -> str:
        side = self._sides[index]
        nth = self._sides[: index + 1].count(side)
        edge = self._span[0 if side < 0 else 1] + self._shift
        x = edge + side * (LANE * nth - 2)
        start = (
            self._compute_x(lane.source) + side * WIDTH / 2,
            self._compute_top(lane.source) + HEIGHT * 0.62,
        )
        end = (
            self._compute_x(lane.target) + side * (WIDTH / 2 + 1),
            self._compute_top(lane.target) + HEIGHT * 0.38,
        )
        up = -1 if end[1] < start[1] else 1
        curve = 14.0
        near = x - side * curve
        path = (
            f"M{start[0]:.1f} {start[1]:.1f} H{near:.1f} Q{x:.1f} {start[1]:.1f} {x:.1f} "
            f"{start[1] + up * curve:.1f} "
            f"V{end[1] - up * curve:.1f} Q{x:.1f} {end[1]:.1f} {near:.1f} {end[1]:.1f} "
            f"H{end[0]:.1f}"
        )
        hue = f"role-{self._find_role_index(lane.source)}"
        return (
            f'<path class="lane {lane.style} {hue}" d="{path}" marker-end="url(#arrow-lane)">'
            f"<title>{escape(lane.label)}</title></path>"
        )

    # -- nodes

    def _render_node(self, name: str) -> str:
        x = self._compute_x(name)
        y = self._compute_top(name)
        node = self._nodes.get(name)
        if node is None:
            shape = _draw_cylinder(x, y)
            kind = "data"
            second = "rows"
        elif isinstance(node, HostFunction):
            shape = _draw_hexagon(x, y)
            kind = "host"
            second = "host function"
        else:
            box = f'x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="10"'
            shape = f"<rect {box}/>"
            kind = f"role-{self._find_role_index(name)}"
            second = f"{node.role} · {node.method.replace('_', ' ')}"
        drop = 5 if node is None else 0  # shift text below the cylinder's lid
        return (
            f'<g class="node {kind}"><title>{escape(describe(node))}</title>{shape}'
            f'<text class="name" x="{x:g}" y="{y + drop + 24:g}"{_fit(name, 7.6)}>{escape(name)}</text>'
            f'<text class="what" x="{x:g}" y="{y + drop + 40:g}"{_fit(second, 6.0)}>{escape(second)}</text></g>'
        )

    def _find_role_index(self, name: str) -> int:
        node = self._nodes[name]
        return list(self._hues).index(node.role) if isinstance(node, MFCDef) else -1

    def _render_legend(self, y: float) -> Iterator[str]:
        """Yield the legend entries for the line styles that occur in the drawing, at height `y`."""
        kinds = [("edge", "keys")] if self._edges else []
        kinds += [("edge pale", "keys read later")] if self._implied_edges else []
        kinds += (
            [("lane version ink", "new weights")]
            if any(lane.style == "version" for lane in self._side_lines)
            else []
        )
        kinds += (
            [("lane sync ink", "parameter sync")]
            if any(lane.style == "sync" for lane in self._side_lines)
            else []
        )
        if len(kinds) < 2:
            return
        widths = [40 + 6.1 * len(label) for _, label in kinds]
        x = (self._width - sum(widths)) / 2
        for (style, label), width in zip(kinds, widths, strict=True):
            yield f'<path class="{style}" d="M{x:.1f} {y:g} h22"/>'
            yield f'<text class="legend" x="{x + 28:.1f}" y="{y + 4:g}">{label}</text>'
            x += width

    def _render_style(self) -> str:
        return (
            STYLE
            + _build_color_rules(self._hues, "light")
            + DARK
            + "{"
            + _build_color_rules(self._hues, "dark")
            + "}"
        )


def describe(node: Node | None) -> str:
    """Return a one-line description of a node, with the keys that it reads and outputs.

    None stands for the dataset.
    """
    if node is None:
        return "dataset: the rows"
    if isinstance(node, HostFunction):
        what = f"host function {node.function}"
    else:
        what = f"{node.role}, {node.interface}.{node.method}"
    return f"{node.name}: {what}; reads {', '.join(node.inputs) or 'nothing'}; makes {', '.join(node.outputs) or 'no keys'}"


def shorten_keys(keys: Sequence[str]) -> str:
    """Return a label for `keys` that is short enough for an edge, such as `prompt, completion +3`."""
    shown_keys = list(keys)
    while (
        len(shown_keys) > 1
        and len(", ".join(shown_keys)) + (4 if len(shown_keys) < len(keys) else 0) > LABEL_LENGTH
    ):
        shown_keys.pop()
    more = len(keys) - len(shown_keys)
    return ", ".join(shown_keys) + (f" +{more}" if more else "")


def _find_side_lines(graph: DataflowGraph) -> Iterator[_SideLine]:
    """Yield the line to draw for each version edge of the graph.

    A version edge links a call to the node that updates its weights. If a parameter sync updates
    the weights, the line is drawn as a sync.
    """
    roles = {}
    for node in graph.nodes:
        if isinstance(node, MFCDef):
            roles[node.name] = node.role
    syncs = {(sync.after, sync.target): sync for sync in graph.syncs}
    for edge in graph.version_edges:
        sync = syncs.get((edge.producer, roles[edge.consumer]))
        if sync is not None:
            how = "copies" if sync.eta == 1.0 else f"moves by {sync.eta:g} toward"
            yield _SideLine(
                edge.producer,
                edge.consumer,
                "sync",
                f"{sync.target} {how} {sync.source} after {sync.after}",
            )
            continue
        lag = f", at most {edge.max_staleness} behind" if edge.max_staleness else ""
        yield _SideLine(
            edge.producer,
            edge.consumer,
            "version",
            f"{edge.consumer} runs on weights of {edge.producer}{lag}",
        )


def _compute_fan_offset(index: int, count: int) -> float:
    """Return the horizontal offset of a line's end from the center of its node.

    `count` lines end on the same side of the node, and `index` is the index of this one.
    """
    step = min(16.0, (WIDTH - 60) / max(1, count - 1))
    return (index - (count - 1) / 2) * step


def _draw_smooth_path(points: Sequence[Point]) -> str:
    """Return the `d` attribute of a smooth SVG path through the points, vertical at both ends."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if abs(x1 - x0) < 0.5:
            path += f" L{x1:.1f} {y1:.1f}"
        else:
            half = (y0 + y1) / 2
            path += f" C{x0:.1f} {half:.1f} {x1:.1f} {half:.1f} {x1:.1f} {y1:.1f}"
    return path


def _draw_hexagon(x: float, y: float) -> str:
    half = WIDTH / 2
    cut = 16
    points = [
        (-half + cut, 0),
        (half - cut, 0),
        (half, HEIGHT / 2),
        (half - cut, HEIGHT),
        (-half + cut, HEIGHT),
    ]
    points.append((-half, HEIGHT / 2))
    return f'<polygon points="{" ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in points)}" stroke-linejoin="round"/>'


def _draw_cylinder(x: float, y: float) -> str:
    left = x - WIDTH / 2 + 14
    right = x + WIDTH / 2 - 14
    lid = 7
    half = (right - left) / 2
    body = f"M{left:g} {y + lid:g} V{y + HEIGHT - lid:g} a{half:g} {lid} 0 0 0 {2 * half:g} 0 V{y + lid:g}"
    return f'<path d="{body}"/><ellipse cx="{x:g}" cy="{y + lid:g}" rx="{half:g}" ry="{lid}"/>'


def _fit(text: str, letter: float) -> str:
    """Return SVG attributes that squeeze `text` to the width of a node, or "" if the text fits.

    `letter` is the assumed width of a letter.
    """
    room = WIDTH - 20
    if len(text) * letter > room:
        return f' textLength="{room}" lengthAdjust="spacingAndGlyphs"'
    return ""


MARKERS = "<defs>{}</defs>".format(
    "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="{size}" '
        f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="{style}" d="M0.5 0.8 L7.2 4 L0.5 7.2 Z"/></marker>'
        for name, style, size in (
            ("arrow", "head", 10),
            ("arrow-pale", "head-pale", 8),
            ("arrow-lane", "head-lane", 10),
        )
    )
)

STYLE = (
    f"text{{font-family:{FONT};text-anchor:middle}}"
    ".name{font-size:13.5px;font-weight:600}.what{font-size:11px}.legend{font-size:11px;text-anchor:start}"
    ".keys{font-size:11px;paint-order:stroke;stroke-width:4px;stroke-linejoin:round}"
    ".edge{fill:none;stroke-width:1.5}.pale{stroke-width:1.2}.lane{fill:none;stroke-width:1.6}"
    ".version{stroke-dasharray:6 4}.sync{stroke-dasharray:1 "
    "4.5;stroke-linecap:round;stroke-width:2.2}"
    ".node rect,.node polygon,.node path,.node ellipse{stroke-width:1.6}"
)


def _build_color_rules(hues: Mapping[str, ColourPair], ground: str) -> str:
    """Return the CSS color rules for a "light" or "dark" background (`ground`)."""
    dark = ground == "dark"
    paper, ink, quiet, line, pale = (
        ("#191b21", "#eceef2", "#a3a9b6", "#868d9b", "#4a505d")
        if dark
        else ("#ffffff", "#1b1d23", "#5c6370", "#7d8492", "#cdd2da")
    )
    rules = [
        f".ground,.keys{{fill:{paper}}}.keys{{stroke:{paper};fill:{quiet}}}.name{{fill:{ink}}}.what,.legend{{fill:{quiet}}}",
        f".edge,.ink{{stroke:{line}}}.head{{fill:{line}}}.pale{{stroke:{pale}}}.head-pale{{fill:{pale}}}.head-lane{{fill:{line}}}",
    ]
    shapes = [(f"role-{index}", hue) for index, hue in enumerate(hues.values())] + [
        ("host", GREY),
        ("data", GREY),
    ]
    for kind, hue in shapes:
        colour = hue.dark if dark else hue.light
        tint = f"color-mix(in srgb,{colour} {18 if dark else 10}%,{paper})"
        shape = ",".join(f".{kind} {tag}" for tag in ("rect", "polygon", "path", "ellipse"))
        rules.append(
            f"{shape}{{fill:{paper};fill:{tint};stroke:{colour}}}.lane.{kind}{{stroke:{colour}}}"
        )
    return "".join(rules)
