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


@dataclass(eq=False)
class Group:
    """Ids of one batch of the loader of which the same is known: the keys that exist, the nodes that took them, each with its
    firing's number, and those that are through. What is done to all of them at once costs as much as for one."""

    ids: dict[str, int]  # each with its place in the epoch, rising
    batch: int  # which of the loader's batches brought them
    keys: set[str]
    started: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)

    def apart(self, ids: Iterable[str]) -> Group:
        """Some of the ids, taken out of this group, in one of their own."""
        chosen = {id: self.ids.pop(id) for id in sorted(ids, key=self.ids.__getitem__)}
        return Group(chosen, self.batch, set(self.keys), dict(self.started), set(self.done))


@dataclass
class Buffer:
    """(id, key) descriptions in loader order; never tensors. Ids of one epoch at a time, so an id is here at most once.

    `entries` name the group of every id, in loader order. `closed`: the loader has given all ids of this epoch. `fired` counts
    the firings of each node, `finished` those that are through, `marks[node]` the firings of all nodes up to the last one of
    this.
    """

    entries: dict[str, Group] = field(default_factory=dict)
    groups: dict[Group, None] = field(default_factory=dict)
    fired: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    num_batches: int = 0
    marks: dict[str, dict[str, int]] = field(default_factory=dict)
    taken: Counter[str] = field(default_factory=Counter)  # of the entries here, how many a node has started on
    through: Counter[str] = field(default_factory=Counter)  # and how many are through it
    _places: int = 0  # that ids have been given

    def add(self, ids: Sequence[str], keys: Iterable[str]) -> None:
        """Take in one batch of the loader. An id that is still here is a broken loader: ids are unique in an epoch."""
        twice = self.entries.keys() & set(ids)
        assert not twice, f"the loader gave id {min(twice)!r} twice in one epoch"
        self._keep(
            Group(
                dict(zip(ids, range(self._places, self._places + len(ids)), strict=True)), self.num_batches, set(keys)
            )
        )
        self._places += len(ids)
        self.num_batches += 1

    def _keep(self, group: Group) -> None:
        self.groups[group] = None
        self.entries.update(dict.fromkeys(group.ids, group))

    def groups_of(self, ids: Sequence[str]) -> dict[Group, Collection[str]]:
        """The groups of these ids, each with those that it holds; ids that are not here are left out."""
        first = self.entries.get(ids[0]) if ids else None
        if first is not None and first.ids.keys() >= (wanted := set(ids)):
            return {first: wanted}
        parts: dict[Group, list[str]] = {}
        for id in ids:
            if (group := self.entries.get(id)) is not None:
                parts.setdefault(group, []).append(id)
        return dict(parts)

    def _apart(self, ids: Sequence[str]) -> list[Group]:
        """Groups that hold these ids and no others."""
        found = []
        for group, chosen in self.groups_of(ids).items():
            if len(chosen) < len(group.ids):
                group = group.apart(chosen)
                self._keep(group)
            found.append(group)
        return found

    def start(self, firing: Firing) -> None:
        """Note that a node took its ids."""
        for group in self._apart(firing.ids):
            group.started[firing.node] = firing.step
        self.taken[firing.node] += len(firing.ids)
        self.fired[firing.node] = self.fired.get(firing.node, 0) + 1
        self.marks[firing.node] = dict(self.fired)

    def rounds(self, node: str, since: str) -> int:
        """Firings of `node` since the last firing of `since`."""
        return self.fired.get(node, 0) - self.marks.get(since, {}).get(node, 0)

    def drop(self, ids: Sequence[str]) -> None:
        """Forget ids that nobody needs any more; none of them may be in a firing under way."""
        for group, chosen in self.groups_of(ids).items():
            assert group.started.keys() == group.done, f"id {min(chosen)!r} is still in a firing"
            self._remove(group, chosen)

    def _remove(self, group: Group, ids: Collection[str]) -> None:
        for node in group.started:
            self.taken[node] -= len(ids)
        for node in group.done:
            self.through[node] -= len(ids)
        for id in ids:
            del self.entries[id]
        if len(ids) == len(group.ids):
            del self.groups[group]
            return
        for id in ids:
            del group.ids[id]

    def finish(self, firing: Firing, kept: Collection[str], keys: Iterable[str], num_nodes: int) -> list[str]:
        """Note what a firing made. Ids outside `kept` were filtered out. Returns the ids that nobody needs any more."""
        made, gone, keep = set(keys), set[str](), set(kept)
        self.finished[firing.node] = self.finished.get(firing.node, 0) + 1
        for group in self._apart(firing.ids):  # without those that another filter dropped meanwhile
            group.done.add(firing.node)
            group.keys |= made
            self.through[firing.node] += len(group.ids)
            leave = group.ids.keys() if len(group.done) == num_nodes else group.ids.keys() - keep
            if leave:
                gone |= leave
                self._remove(group, list(leave))
        return list(firing.ids) if len(gone) == len(firing.ids) else [id for id in firing.ids if id in gone]

    def state_dict(self) -> dict[str, Any]:
        """Plain values; only between steps, with nothing in flight."""
        rows = [[id, g.batch, sorted(g.keys), sorted(g.done)] for id, g in self.entries.items()]
        counts = {"fired": dict(self.fired), "marks": {node: dict(each) for node, each in self.marks.items()}}
        return {"entries": rows, **counts, "closed": self.closed, "num_batches": self.num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        alike: dict[tuple[Any, ...], dict[str, int]] = {}
        for place, (id, batch, keys, done) in enumerate(state["entries"]):
            alike.setdefault((batch, tuple(keys), tuple(done)), {})[id] = place
        self.entries, self.groups = dict.fromkeys(row[0] for row in state["entries"]), {}  # type: ignore[assignment]
        self._places = len(self.entries)
        for (batch, keys, done), ids in alike.items():
            self._keep(Group(ids, batch, set(keys), dict.fromkeys(done, -1), set(done)))
        self.taken, self.through = Counter(), Counter()
        for group in self.groups:
            self.taken.update(dict.fromkeys(group.started, len(group.ids)))
            self.through.update(dict.fromkeys(group.done, len(group.ids)))
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
        full.sort(key=lambda name: _place(buffer, reaches[name].ids[0]))  # stable: ties stay in the graph's order
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
    open_groups, able = list[Group](), list[str]()
    if buffer.taken[name] < len(buffer.entries):
        open_groups = [group for group in buffer.groups if name not in group.started]
    if open_groups and all(buffer.through[producer] for producer in producers):
        needed = set(node.inputs)
        able = _in_order([g for g in open_groups if needed <= g.keys and g.done.issuperset(producers)])
    edges = graph.waits_for(name)
    allowed = able[: _allowed(graph, buffer, versions, edges, able)]
    if node.batch_size:
        wanted = min([node.batch_size, *(_most(graph, edge) or node.batch_size for edge in edges)])
        taken = allowed[:wanted]
    else:
        first = buffer.entries[allowed[0]].batch if allowed else 0
        taken = [id for id in allowed if buffer.entries[id].batch == first]
        wanted = sum(len(group.ids) for group in open_groups if group.batch == first) if taken else 1
    more = False
    if not buffer.closed and not producers and len(taken) < wanted:
        more = _allowed(graph, buffer, versions, edges, able, another=1) > len(allowed)
    return _Reach(tuple(taken), bool(taken) and len(taken) >= wanted, more)


def _in_order(groups: Sequence[Group]) -> list[str]:
    """The ids of all, in loader order."""
    if len(groups) == 1:
        return list(groups[0].ids)
    places = {id: place for group in groups for id, place in group.ids.items()}
    return sorted(places, key=places.__getitem__)


def _place(buffer: Buffer, id: str) -> int:
    return buffer.entries[id].ids[id]


def _most(graph: DataflowGraph, edge: VersionEdge) -> int:
    """The most ids that a version edge ever lets pass before new weights; 0 where the loader's batches decide."""
    return (edge.max_staleness + 1) * graph.node(edge.producer).batch_size


def _allowed(
    graph: DataflowGraph,
    buffer: Buffer,
    versions: Mapping[str, int],
    edges: Sequence[VersionEdge],
    able: Sequence[str],
    another: int = 0,
) -> int:
    """How many of `able`, the oldest ones, the node may take before its weights would be too old for them; with `another` id of
    the loader's next batch after them.

    Ids that the node took and the training node has not yet taken fill the firings that come before new weights; so do
    firings of the training node under way (started, weights not in place).
    """
    count = len(able) + another
    for edge in edges:
        pending = _pending(buffer, edge)
        under_way = buffer.fired.get(edge.producer, 0) - versions.get(edge.producer, 0)
        free = edge.max_staleness + 1 - under_way
        size = graph.node(edge.producer).batch_size
        if size:
            missing = max(0, free * size - sum(len(group.ids) for group in pending))
            count = min(count, _refilled(graph, buffer, edge, missing, pending))
            continue
        batches = {group.batch for group in pending}
        fitting = 0
        for batch in [*(buffer.entries[id].batch for id in able), *[buffer.num_batches] * another]:
            batches.add(batch)
            if len(batches) > free:
                break
            fitting += 1
        count = min(count, fitting)
    return count


def _pending(buffer: Buffer, edge: VersionEdge) -> list[Group]:
    """Ids that the call took and the training node has not yet taken."""
    return [g for g in buffer.groups if edge.consumer in g.started and edge.producer not in g.started]


def _refilled(graph: DataflowGraph, buffer: Buffer, edge: VersionEdge, missing: int, pending: Sequence[Group]) -> int:
    """How many ids a call may take for a training node that lacks `missing`: behind a filter that refills, a whole batch once
    all pending ones are through it, and nothing after its rounds."""
    filter = graph.refills(edge)
    if filter is None or not missing:
        return missing
    rounds = buffer.rounds(edge.consumer, edge.producer)
    if rounds == 0:
        return missing
    if rounds >= filter.refill_rounds or any(filter.name not in group.done for group in pending):
        return 0
    return max(missing, graph.node(edge.consumer).batch_size)


def surplus(graph: DataflowGraph, buffer: Buffer, producer: str) -> list[str]:
    """Ids that a refill brought beyond what `producer` took, which fired just now: their weights would be too old for it."""
    found: dict[str, None] = {}
    for edge in graph.version_edges:
        if edge.producer == producer and graph.refills(edge) is not None:
            kept = edge.max_staleness * graph.node(producer).batch_size
            found |= dict.fromkeys(_in_order(_pending(buffer, edge))[kept:])
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
