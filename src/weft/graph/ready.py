"""Which node may run next, and on which ids. Pure: the whole of the scheduling, without a tensor or a clock in sight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.graph.graph import DataflowGraph, VersionEdge
from weft.graph.mfc import HostFunction


@dataclass(frozen=True)
class Firing:
    """One run of a node: on these ids, in loader order. `step` counts the node's firings from 0."""

    node: str
    ids: tuple[str, ...]
    step: int


@dataclass
class Entry:
    """What is known of one id: the keys that exist, the nodes that took it, each with its firing's number, and those that
    are through."""

    id: str
    batch: int  # which of the loader's batches brought it
    keys: set[str]
    started: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


@dataclass
class Buffer:
    """(id, key) descriptions in loader order; never tensors. Ids of one epoch at a time, so an id is here at most once.

    `closed`: the loader has given all ids of this epoch. `fired` counts the firings of each node, `finished` those that are
    through, `marks[node]` the firings of all nodes up to the last one of this.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    num_batches: int = 0
    marks: dict[str, dict[str, int]] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)  # of the entries here, how many a node has started on
    through: Counter[str] = field(default_factory=Counter)  # and how many are through it

    def add(self, ids: Sequence[str], keys: Iterable[str]) -> None:
        """Take in one batch of the loader. An id that is still here is a broken loader: ids are unique in an epoch."""
        known = set(keys)
        for id in ids:
            assert id not in self.entries, f"the loader gave id {id!r} twice in one epoch"
            self.entries[id] = Entry(id, self.num_batches, set(known))
        self.num_batches += 1

    def start(self, firing: Firing) -> None:
        """Note that a node took its ids."""
        for id in firing.ids:
            self.entries[id].started[firing.node] = firing.step
        self.taken[firing.node] += len(firing.ids)
        self.fired[firing.node] = self.fired.get(firing.node, 0) + 1
        self.marks[firing.node] = dict(self.fired)

    def rounds(self, node: str, since: str) -> int:
        """Firings of `node` since the last firing of `since`."""
        return self.fired.get(node, 0) - self.marks.get(since, {}).get(node, 0)

    def drop(self, ids: Iterable[str]) -> None:
        """Forget ids that nobody needs any more; none of them may be in a firing under way."""
        for id in ids:
            assert self.entries[id].started.keys() == self.entries[id].done, f"id {id!r} is still in a firing"
            self._remove(self.entries[id])

    def _remove(self, entry: Entry) -> None:
        for node in entry.started:
            self.taken[node] -= 1
        for node in entry.done:
            self.through[node] -= 1
        del self.entries[entry.id]

    def finish(self, firing: Firing, kept: Collection[str], keys: Iterable[str], num_nodes: int) -> list[str]:
        """Note what a firing made. Ids outside `kept` were filtered out. Returns the ids that nobody needs any more."""
        made, gone, keep, through = set(keys), list[str](), set(kept), 0
        self.finished[firing.node] = self.finished.get(firing.node, 0) + 1
        for id in firing.ids:
            entry = self.entries.get(id)
            if entry is None:  # another filter dropped it meanwhile
                continue
            entry.done.add(firing.node)
            entry.keys.update(made)
            through += 1
            if id not in keep or len(entry.done) == num_nodes:
                gone.append(id)
        self.through[firing.node] += through
        for id in gone:
            self._remove(self.entries[id])
        return gone

    def state_dict(self) -> dict[str, Any]:
        """Plain values; only between steps, with nothing in flight."""
        rows = [[e.id, e.batch, sorted(e.keys), sorted(e.done)] for e in self.entries.values()]
        counts = {"fired": dict(self.fired), "marks": {node: dict(each) for node, each in self.marks.items()}}
        return {"entries": rows, **counts, "closed": self.closed, "num_batches": self.num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries = {
            id: Entry(id, batch, set(keys), dict.fromkeys(done, -1), set(done))
            for id, batch, keys, done in state["entries"]
        }
        self.taken = Counter(node for entry in self.entries.values() for node in entry.started)
        self.through = Counter(node for entry in self.entries.values() for node in entry.done)
        self.fired, self.finished = dict(state["fired"]), dict(state["fired"])
        self.closed, self.num_batches = state["closed"], state["num_batches"]
        self.marks = {node: dict(each) for node, each in state["marks"].items()}


def ready(
    graph: DataflowGraph, buffer: Buffer, versions: Mapping[str, int], running: Collection[Firing]
) -> list[Firing]:
    """Every firing that may start now, oldest ids first, then in the graph's order. Nothing is changed.

    A node fires when `batch_size` ids hold its inputs and its version edges leave room for them; it takes the oldest.
    Where nothing runs, nothing is full and the loader cannot help (`wants_rows`), the first node in the graph's order
    that has any ids fires with what there is: the short last batch of an epoch, or the refill behind a filter.

    `versions[node]` counts the firings of `node` whose weights are in place; a node of `running` does not fire again
    before it is through.
    """
    busy = {firing.node for firing in running}
    reaches = {name: _reach(graph, buffer, versions, name) for name in graph.order}
    full = [name for name, reach in reaches.items() if name not in busy and reach.full]
    if full or running:
        position = {id: i for i, id in enumerate(buffer.entries)}
        full.sort(key=lambda name: position[reaches[name].ids[0]])  # stable: ties stay in the graph's order
        return [_firing(buffer, name, reaches[name].ids) for name in full]
    if any(reach.wants_rows for reach in reaches.values()):
        return []
    return [_firing(buffer, name, reach.ids) for name, reach in reaches.items() if reach.ids][:1]


def wants_rows(
    graph: DataflowGraph, buffer: Buffer, versions: Mapping[str, int], among: Collection[str] | None = None
) -> bool:
    """Whether another batch of the loader could help a node that reads rows alone to fire: any, or one of `among`."""
    names = graph.order if among is None else among
    return any(_reach(graph, buffer, versions, name).wants_rows for name in names)


@dataclass(frozen=True)
class _Reach:
    """The ids a node could take now, oldest first; whether they make a full batch; whether more rows would help."""

    ids: tuple[str, ...]
    full: bool
    wants_rows: bool


def _reach(graph: DataflowGraph, buffer: Buffer, versions: Mapping[str, int], name: str) -> _Reach:
    node, producers = graph.node(name), graph.producers(name)
    open_entries, able = list[Entry](), list[Entry]()
    if buffer.taken[name] < len(buffer.entries):
        open_entries = [e for e in buffer.entries.values() if name not in e.started]
    if open_entries and all(buffer.through[producer] for producer in producers):
        needed = set(node.inputs)
        able = [e for e in open_entries if needed <= e.keys and e.done.issuperset(producers)]
    edges = graph.waits_for(name)
    allowed = _allowed(graph, buffer, versions, edges, able)
    if node.batch_size:
        wanted = min([node.batch_size, *(_most(graph, edge) or node.batch_size for edge in edges)])
        taken = allowed[:wanted]
    else:
        taken = [e for e in allowed if e.batch == allowed[0].batch]
        wanted = sum(e.batch == taken[0].batch for e in open_entries) if taken else 1
    more = False
    if not buffer.closed and not producers and len(taken) < wanted:
        another = Entry("", buffer.num_batches, set(node.inputs))
        more = len(_allowed(graph, buffer, versions, edges, [*able, another])) > len(allowed)
    return _Reach(tuple(e.id for e in taken), bool(taken) and len(taken) >= wanted, more)


def _most(graph: DataflowGraph, edge: VersionEdge) -> int:
    """The most ids that a version edge ever lets pass before new weights; 0 where the loader's batches decide."""
    return (edge.max_staleness + 1) * graph.node(edge.producer).batch_size


def _allowed(
    graph: DataflowGraph,
    buffer: Buffer,
    versions: Mapping[str, int],
    edges: Sequence[VersionEdge],
    able: Sequence[Entry],
) -> list[Entry]:
    """The oldest of `able` that the node may take before its weights would be too old for them.

    Ids that the node took and the training node has not yet taken fill the firings that come before new weights; so do
    firings of the training node under way (started, weights not in place).
    """
    count = len(able)
    for edge in edges:
        pending = _pending(buffer, edge)
        under_way = buffer.fired.get(edge.producer, 0) - versions.get(edge.producer, 0)
        free = edge.max_staleness + 1 - under_way
        size = graph.node(edge.producer).batch_size
        if size:
            missing = max(0, free * size - len(pending))
            count = min(count, _refilled(graph, buffer, edge, missing, pending))
            continue
        batches = {e.batch for e in pending}
        fitting = 0
        for entry in able:
            batches.add(entry.batch)
            if len(batches) > free:
                break
            fitting += 1
        count = min(count, fitting)
    return list(able[:count])


def _pending(buffer: Buffer, edge: VersionEdge) -> list[Entry]:
    """Ids that the call took and the training node has not yet taken."""
    return [e for e in buffer.entries.values() if edge.consumer in e.started and edge.producer not in e.started]


def _refilled(graph: DataflowGraph, buffer: Buffer, edge: VersionEdge, missing: int, pending: Sequence[Entry]) -> int:
    """How many ids a call may take for a training node that lacks `missing`: behind a filter that refills, a whole batch once
    all pending ones are through it, and nothing after its rounds."""
    filter = graph.refills(edge)
    if filter is None or not missing:
        return missing
    rounds = buffer.rounds(edge.consumer, edge.producer)
    if rounds == 0:
        return missing
    if rounds >= filter.refill_rounds or any(filter.name not in entry.done for entry in pending):
        return 0
    return max(missing, graph.node(edge.consumer).batch_size)


def surplus(graph: DataflowGraph, buffer: Buffer, producer: str) -> list[str]:
    """Ids that a refill brought beyond what `producer` took, which fired just now: their weights would be too old for it."""
    found: dict[str, None] = {}
    for edge in graph.version_edges:
        if edge.producer == producer and graph.refills(edge) is not None:
            kept = edge.max_staleness * graph.node(producer).batch_size
            found |= dict.fromkeys(entry.id for entry in _pending(buffer, edge)[kept:])
    return list(found)


def exhausted(graph: DataflowGraph, buffer: Buffer) -> HostFunction | None:
    """A filter whose rounds are over without a single id that passed it."""
    for edge in graph.version_edges:
        filter = graph.refills(edge)
        spent = filter is not None and buffer.rounds(edge.consumer, edge.producer) >= filter.refill_rounds
        if spent and not _pending(buffer, edge):
            return filter
    return None


def _firing(buffer: Buffer, node: str, ids: tuple[str, ...]) -> Firing:
    return Firing(node, ids, buffer.fired.get(node, 0))
