"""Dataflow graph of nodes that are connected by two types of edges.

Key edges carry data between nodes. Version edges link a node that updates weights to the calls that
use these weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.errors import GraphError, build_unknown_name_error, find_nearest
from weft.graph.mfc import HostFunction, MFCDef, Node, ParamSync

DATASET = "dataset"


@dataclass(frozen=True)
class KeyEdge:
    """Edge along which data flows from one node to another.

    Attributes:
        producer: Name of the node that outputs the keys, or "dataset".
        consumer: Name of the node that reads the keys.
        keys: Keys that the consumer reads from the producer.
    """

    producer: str
    consumer: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class VersionEdge:
    """Dependency of a model function call on weights that another node updates.

    Attributes:
        producer: Name of the node that trains the weights or triggers their parameter sync.
        consumer: Name of the call that uses the weights.
        max_staleness: Maximum number of weight updates that can happen after the consumer has
            processed a sample and before the producer processes it.
    """

    producer: str
    consumer: str
    max_staleness: int


@dataclass(frozen=True)
class DataflowGraph:
    """Graph of nodes that are connected by the keys they read and output.

    `dataset_keys` are the keys of the dataset's rows. If a node outputs a key of the same name,
    other nodes read the node's output instead of the dataset's value.

    The constructor raises `GraphError` if the graph is invalid. Examples are two nodes that output
    the same key, a required key that nothing provides, and a cycle.
    """

    nodes: Sequence[Node]
    dataset_keys: Sequence[str] = ()
    syncs: Sequence[ParamSync] = ()
    edges: tuple[KeyEdge, ...] = field(init=False, repr=False, compare=False)
    version_edges: tuple[VersionEdge, ...] = field(init=False, repr=False, compare=False)
    order: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "dataset_keys", tuple(self.dataset_keys))
        object.__setattr__(self, "syncs", tuple(_resolve_sync(s, self.nodes) for s in self.syncs))
        _check_nodes(self.nodes)
        makers = _find_makers(self.nodes)
        object.__setattr__(
            self, "edges", tuple(_build_edges(self.nodes, makers, self.dataset_keys))
        )
        object.__setattr__(self, "order", _sort_topologically(self.nodes, self.edges))
        object.__setattr__(
            self, "version_edges", tuple(_build_version_edges(self.nodes, self.syncs))
        )

    def get_node(self, name: str) -> Node:
        """Return the node called `name`.

        Raises `ConfigError`, with similar names in the message, if there is no such node.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise build_unknown_name_error("node", name, [n.name for n in self.nodes])

    def insert_after(self, name: str, new: Node) -> DataflowGraph:
        """Return a copy of the graph with `new` inserted after an existing node.

        `name` is the name of the existing node. If both nodes output the same key, all other nodes
        read the value from `new`. On the graph's edges, the existing node's value is then called
        `{key}_before_{new.name}`; if `new` has the key as an input, it reads this value. If `new`
        has `batch_size` 0, it gets the batch size of the existing node. Raises `GraphError` if
        `new` reads no output of the existing node.
        """
        old = self.get_node(name)
        shared = [key for key in new.output_keys if key in old.output_keys]
        edges = {key: old.output_key_remap.get(key, key) for key in old.output_keys}
        aside = {key: f"{edges[key]}_before_{new.name}" for key in shared}
        read = {}
        for key in (*new.input_keys, *new.optional_keys):
            if key in edges:
                read[key] = aside.get(key, edges[key])
        if not read:
            raise GraphError(
                f"insert_after: node {new.name!r} reads "
                f"{_format_names((*new.input_keys, *new.optional_keys))}, but {name!r} makes "
                f"{_format_names(old.output_keys)}; add one of these to its input_keys"
            )
        changed = replace(old, output_key_remap={**old.output_key_remap, **aside})
        placed = replace(
            new,
            batch_size=new.batch_size or old.batch_size,
            input_key_remap={**read, **new.input_key_remap},
            output_key_remap={**{key: edges[key] for key in shared}, **new.output_key_remap},
        )
        nodes = []
        for node in self.nodes:
            for each in (changed, placed) if node.name == name else (node,):
                nodes.append(each)
        return replace(self, nodes=nodes)

    def find_producers(self, consumer: str) -> tuple[str, ...]:
        """Return the names of the nodes whose outputs `consumer` reads, in topological order.

        The producers of optional keys are included.
        """
        producers = {e.producer for e in self.edges if e.consumer == consumer} - {DATASET}
        return tuple(name for name in self.order if name in producers)

    def find_version_edges(self, consumer: str) -> tuple[VersionEdge, ...]:
        """Return the version edges of the call `consumer`.

        Each of them links the call to a node that updates the weights that the call uses.
        """
        return tuple(e for e in self.version_edges if e.consumer == consumer)

    def find_refilling_filter(self, edge: VersionEdge) -> HostFunction | None:
        """Return the first filter with refill rounds between the two nodes of `edge`.

        The filter is on a path from the call `edge.consumer` to `edge.producer`, the node that
        updates the weights of this call. In refill rounds, calls process additional whole batches
        to replace the samples that the filter removed. Returns None if there is no such filter.
        """
        between = self._find_consumers(edge.consumer) & {
            n for n in self.order if edge.producer in self._find_consumers(n)
        }
        filters = []
        for n in self.nodes:
            if isinstance(n, HostFunction) and n.refill_rounds and n.name in between:
                filters.append(n)
        return filters[0] if filters else None

    def _find_consumers(self, name: str) -> set[str]:
        """Return the names of all nodes that directly or indirectly read outputs of node `name`."""
        consumers = set[str]()
        front = [name]
        while front:
            now = front.pop()
            new = {edge.consumer for edge in self.edges if edge.producer == now} - consumers
            consumers |= new
            front += sorted(new)
        return consumers

    def list_model_calls(self) -> tuple[MFCDef, ...]:
        """Return the nodes that are model function calls."""
        return tuple(n for n in self.nodes if isinstance(n, MFCDef))

    def find_required_dataset_keys(self) -> dict[str, str]:
        """Return the keys that the dataset must provide, each with the first node that reads it.

        These are the required keys that no node outputs.
        """
        produced_keys = set(_find_makers(self.nodes))
        required: dict[str, str] = {}
        for node in self.nodes:
            for key in node.inputs:
                if key not in produced_keys:
                    required.setdefault(key, node.name)
        return required


def _check_nodes(nodes: Sequence[Node]) -> None:
    seen: set[str] = set()
    if not nodes:
        raise GraphError("the graph has no nodes; add at least one model function call")
    for node in nodes:
        if node.name in seen or node.name == DATASET:
            if node.name in seen:
                rule = "is the name of two nodes"
            else:
                rule = "is reserved for the dataset"
            raise GraphError(f"node {node.name!r}: {node.name!r} {rule}; rename one of them")
        seen.add(node.name)
        if node.batch_size < 0:
            raise GraphError(
                f"node {node.name!r}: batch_size={node.batch_size}; it must be at least 1, or 0 "
                f"for the loader's batch"
            )
        if isinstance(node, MFCDef) and node.max_staleness < 0:
            raise GraphError(
                f"node {node.name!r}: max_staleness={node.max_staleness}; it must be 0 "
                f"(on-policy) or more"
            )
        for remap, keys in (
            (node.input_key_remap, {*node.input_keys, *node.optional_keys}),
            (node.output_key_remap, set(node.output_keys)),
        ):
            for key in remap:
                if key not in keys:
                    raise GraphError(
                        f"node {node.name!r} remaps {key!r}, which is not one of its keys: "
                        f"{_format_names(keys)}"
                    )


def _find_makers(nodes: Sequence[Node]) -> dict[str, str]:
    """Return a mapping from each output key to the name of the node that outputs it.

    Keys have the names that are used on the graph's edges. Raises `GraphError` if two nodes output
    the same key.
    """
    makers: dict[str, str] = {}
    for node in nodes:
        for key in node.outputs:
            if key in makers:
                raise GraphError(
                    f"key {key!r} is made by node {makers[key]!r} and by node {node.name!r}; "
                    "rename one of them with output_key_remap"
                )
            makers[key] = node.name
    return makers


def _build_edges(
    nodes: Sequence[Node], makers: Mapping[str, str], dataset_keys: Sequence[str]
) -> Iterable[KeyEdge]:
    for node in nodes:
        sources: dict[str, list[str]] = {}
        for key in (*node.inputs, *node.optional_inputs):
            maker = makers.get(key) or (DATASET if key in dataset_keys else None)
            if maker is not None:
                sources.setdefault(maker, []).append(key)
            elif key in node.inputs:
                raise _build_missing_key_error(node.name, key, makers, dataset_keys)
        for producer, keys in sources.items():
            yield KeyEdge(producer, node.name, tuple(dict.fromkeys(keys)))


def _build_missing_key_error(
    node: str, key: str, makers: Mapping[str, str], dataset_keys: Sequence[str]
) -> GraphError:
    there = [
        *(f"{k} (dataset)" for k in dataset_keys),
        *(f"{k} ({maker})" for k, maker in makers.items()),
    ]
    close = find_nearest(key, [*dataset_keys, *makers])
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    rule = "which neither a node nor the dataset provides"
    return GraphError(
        f"node {node!r} reads key {key!r}{hint}, {rule}; available keys: {_format_names(there)}"
    )


def _sort_topologically(nodes: Sequence[Node], edges: Sequence[KeyEdge]) -> tuple[str, ...]:
    """Return the node names in topological order. Independent nodes keep their given order.

    Raises `GraphError` if the graph has a cycle.
    """
    waiting = {}
    for n in nodes:
        waiting[n.name] = {e.producer for e in edges if e.consumer == n.name} - {DATASET}
    order: list[str] = []
    while waiting:
        free = next((name for name, before in waiting.items() if not before), None)
        if free is None:
            raise _build_cycle_error(waiting, edges)
        order.append(free)
        del waiting[free]
        for before in waiting.values():
            before.discard(free)
    return tuple(order)


def _build_cycle_error(waiting: Mapping[str, set[str]], edges: Sequence[KeyEdge]) -> GraphError:
    """Return an error that describes a cycle of the graph.

    `waiting` contains the nodes that could not be sorted topologically, and maps each of them to
    its producers in `waiting`. Each node has at least one such producer, so walking backwards from
    any node finds a cycle.
    """
    path = [next(iter(waiting))]
    while path.count(path[-1]) < 2:
        path.append(sorted(waiting[path[-1]])[0])
    loop = path[path.index(path[-1]) :][::-1]
    keys = {(e.producer, e.consumer): ", ".join(e.keys) for e in edges}
    steps = "; ".join(f"{b!r} reads {keys[a, b]} of {a!r}" for a, b in itertools.pairwise(loop))
    return GraphError(
        f"the graph has a cycle: {steps}; rename a key with a remap, or remove a node"
    )


def _resolve_sync(sync: ParamSync, nodes: Sequence[Node]) -> ParamSync:
    """Check a parameter sync, and return it with the field `after` filled in if it was empty.

    By default, the sync runs after the node that trains the source role. Raises `GraphError` if the
    sync is invalid.
    """
    calls = [n for n in nodes if isinstance(n, MFCDef)]
    after = sync.after or next((n.name for n in calls if n.role == sync.source and n.trains), "")
    if after not in {n.name for n in nodes}:
        if sync.after:
            wanted = f"after {sync.after!r}"
        else:
            wanted = f"after the node that trains {sync.source!r}"
        raise GraphError(
            f"sync {sync.source} -> {sync.target} runs {wanted}, which does not exist; nodes: "
            f"{_format_names(n.name for n in nodes)}"
        )
    if sync.source == sync.target:
        raise GraphError(
            f"sync {sync.source} -> {sync.target}: source and target must be different roles"
        )
    if not 0.0 < sync.eta <= 1.0:
        raise GraphError(
            f"sync {sync.source} -> {sync.target}: eta={sync.eta}; it must be above 0 and at most 1 "
            f"(1 copies)"
        )
    return ParamSync(sync.source, sync.target, sync.eta, after)


def _build_version_edges(
    nodes: Sequence[Node], syncs: Sequence[ParamSync]
) -> Iterable[VersionEdge]:
    """Yield an edge from each node that updates weights to each call that uses these weights.

    Calls that train the weights themselves are left out.
    """
    calls = [n for n in nodes if isinstance(n, MFCDef)]
    changes = {(n.name, n.role): None for n in calls if n.trains} | {
        (s.after, s.target): None for s in syncs
    }
    for producer, role in changes:
        for call in calls:
            if call.role == role and call.name != producer and not call.trains:
                yield VersionEdge(producer, call.name, call.max_staleness)


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
