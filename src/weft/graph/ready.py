"""Scheduling: selection of the nodes that can run next, and of the sample ids to run them on.

Decisions depend only on ids, keys and counters. No tensors or clocks are involved.

State per sample id is stored once for each block: the ids that share the same state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic, TypeVar

from weft.graph.graph import DataflowGraph, VersionEdge
from weft.graph.mfc import HostFunction

T = TypeVar("T")


@dataclass(eq=False)
class StateBlock(Generic[T]):
    """Group of sample ids that share one state, for example because they have the same keys.

    Attributes:
        ids: Ids in the block, as the keys of a dict, which keeps their order.
        state: State of every id in the block.
    """

    ids: dict[str, None]
    state: T


class StateBlocks(Generic[T]):
    """Mapping from sample ids to states, which stores one state per block of ids.

    A block is a group of ids with the same state. `new()` creates the state of newly added ids.
    When a block is split, `copy(state)` copies its state.
    """

    def __init__(self, new: Callable[[], T], copy: Callable[[T], T]) -> None:
        self._new = new
        self._copy = copy
        self._block_of_id: dict[str, StateBlock[T]] = {}
        self._all_blocks: dict[StateBlock[T], None] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in the order in which they were added."""
        return iter(self._block_of_id)

    def __contains__(self, id: object) -> bool:
        return id in self._block_of_id

    def __len__(self) -> int:
        return len(self._block_of_id)

    def __getitem__(self, id: str) -> T:
        return self._block_of_id[id].state

    def items(self) -> Iterator[tuple[str, T]]:
        """Iterate over (id, state) in the order in which the ids were added."""
        return ((id, block.state) for id, block in self._block_of_id.items())

    @property
    def blocks(self) -> Collection[StateBlock[T]]:
        """All blocks, in the order in which they were created."""
        return self._all_blocks.keys()

    def list_ids(self, blocks: Collection[StateBlock[T]]) -> list[str]:
        """Return the ids in these blocks, in the order in which the ids were added."""
        if len(blocks) == 1:
            (block,) = blocks
            return list(block.ids)
        held = set(blocks)
        if held:
            return [id for id, block in self._block_of_id.items() if block in held]
        return []

    def group_by_block(self, ids: Sequence[str]) -> dict[StateBlock[T] | None, list[str]]:
        """Group the ids by block, keeping their given order.

        Ids without a block are grouped under None.
        """
        get = self._block_of_id.get
        parts = dict[StateBlock[T] | None, list[str]]()
        first = get(ids[0]) if ids else None
        if first is None:
            together = self._block_of_id.keys().isdisjoint(ids)
        else:
            together = first.ids.keys() >= set(ids)
        if ids and together:
            return {first: list(ids)}
        for id in ids:
            block = get(id)
            if block in parts:
                parts[block].append(id)
            else:
                parts[block] = [id]
        return parts

    def separate_states(self, ids: Sequence[str]) -> list[T]:
        """Return the states of these ids, one per block, so that the caller can modify them in
        place.

        A block that also contains other ids is split first, so that changes to the returned states
        affect only `ids`. New ids get a new block.
        """
        states = []
        for block, chosen in self.group_by_block(ids).items():
            if block is not None and len(chosen) == len(block.ids):
                states.append(block.state)
                continue
            own = StateBlock(
                dict.fromkeys(chosen), self._new() if block is None else self._copy(block.state)
            )
            self._all_blocks[own] = None
            self._block_of_id.update(dict.fromkeys(chosen, own))
            if block is not None:
                for id in chosen:
                    del block.ids[id]
            states.append(own.state)
        return states

    def discard(self, ids: Iterable[str]) -> Iterator[tuple[T, list[str], bool]]:
        """Remove the ids, and yield a tuple for each block that contained some of them.

        Each tuple has the state of the block, the ids removed from it, and whether the block is now
        empty. A block is changed only when the iterator reaches it, so the caller must exhaust the
        iterator.
        """
        for block, chosen in self.group_by_block(
            [id for id in ids if id in self._block_of_id]
        ).items():
            assert block is not None
            for id in chosen:
                del self._block_of_id[id], block.ids[id]
            if not block.ids:
                del self._all_blocks[block]
            yield block.state, chosen, not block.ids


@dataclass(frozen=True)
class Firing:
    """One execution of a node.

    Attributes:
        node: Name of the node.
        ids: Ids of the samples that are processed, in the order of the data loader.
        step: Index of this firing among all firings of the node, from 0.
    """

    node: str
    ids: tuple[str, ...]
    step: int


@dataclass
class IdState:
    """Progress of a sample through the graph.

    Attributes:
        batch: Index of the loader's batch that contained the sample.
        keys: Keys that exist for the sample.
        started: Nodes that have started to process the sample. The values are the indices of the
            firings (executions of the nodes) that process it (`Firing.step`).
        finished: Nodes that have finished processing the sample.
    """

    batch: int = 0  # number of the loader's batch
    keys: set[str] = field(default_factory=set)
    started: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def copy(self) -> IdState:
        return IdState(self.batch, set(self.keys), dict(self.started), set(self.finished))


@dataclass
class IdBuffer:
    """Record of the progress of all samples of the current epoch, in the order of the data loader.

    Attributes:
        entries: State of each sample id.
        num_started: Number of firings (executions) that each node has started.
        num_finished: Number of firings that each node has finished.
        closed: True if the loader has returned all samples of the epoch.
        num_batches: Number of batches that the loader has returned.
        started_at_last_firing: Maps each node to a copy of `num_started`, taken when the node last
            started a firing. It is used to count how often other nodes have fired since.
        num_ids_started: Number of ids in `entries` that each node has started to process.
        num_ids_finished: Number of ids in `entries` that each node has finished processing.
    """

    entries: StateBlocks[IdState] = field(
        default_factory=lambda: StateBlocks(IdState, IdState.copy)
    )
    num_started: dict[str, int] = field(default_factory=dict)
    num_finished: dict[str, int] = field(default_factory=dict)
    closed: bool = False
    num_batches: int = 0
    started_at_last_firing: dict[str, dict[str, int]] = field(default_factory=dict)
    # Number of current ids that each node has taken, and that it has finished.
    num_ids_started: Counter[str] = field(default_factory=Counter)
    num_ids_finished: Counter[str] = field(default_factory=Counter)

    def add(self, ids: Sequence[str], keys: Iterable[str]) -> None:
        """Add a batch from the data loader, in which each sample has the keys `keys`.

        Ids must be unique within the epoch.
        """
        new = self.entries.group_by_block(ids).get(None, [])
        assert len(set(new)) == len(ids), (
            f"the loader gave id {next(id for id in ids if id in self.entries or ids.count(id) > 1)!r} twice in one epoch"
        )
        self._put(ids, IdState(self.num_batches, set(keys)))
        self.num_batches += 1

    def _put(self, ids: Sequence[str], entry: IdState) -> None:
        for own in self.entries.separate_states(ids):
            own.batch = entry.batch
            own.keys = entry.keys
            own.started = entry.started
            own.finished = entry.finished

    def record_start(self, firing: Firing) -> None:
        """Record that a node has started to process the ids of `firing`."""
        for entry in self.entries.separate_states(firing.ids):
            entry.started[firing.node] = firing.step
        self.num_ids_started[firing.node] += len(firing.ids)
        self.num_started[firing.node] = self.num_started.get(firing.node, 0) + 1
        self.started_at_last_firing[firing.node] = dict(self.num_started)

    def count_rounds(self, node: str, since: str) -> int:
        """Return how often `node` has fired since the last firing of the node `since`."""
        return self.num_started.get(node, 0) - self.started_at_last_firing.get(since, {}).get(
            node, 0
        )

    def drop(self, ids: Iterable[str]) -> None:
        """Remove ids that no node needs any more. No running node may be processing any of them."""
        for entry, chosen in self._discard(ids):
            assert entry.started.keys() == entry.finished, f"id {chosen[0]!r} is still in a firing"

    def _discard(self, ids: Iterable[str]) -> Iterator[tuple[IdState, list[str]]]:
        for entry, chosen, _ in self.entries.discard(ids):
            for node in entry.started:
                self.num_ids_started[node] -= len(chosen)
            for node in entry.finished:
                self.num_ids_finished[node] -= len(chosen)
            yield entry, chosen

    def record_finish(
        self, firing: Firing, kept_ids: Collection[str], keys: Iterable[str], num_nodes: int
    ) -> list[str]:
        """Record that a firing has finished; return the ids that no node needs any more.

        An id is no longer needed if it is not in `kept_ids`, because a filter removed it, or if all
        `num_nodes` nodes of the graph have finished processing it. `keys` are the output keys of
        the firing, which become available for its ids.
        """
        output_keys = set(keys)
        keep = set(kept_ids)
        removable_ids = set[str]()
        self.num_finished[firing.node] = self.num_finished.get(firing.node, 0) + 1
        dropped = set(
            self.entries.group_by_block(firing.ids).get(None, ())
        )  # removed by another filter in the meantime
        if dropped:
            here: Sequence[str] = [id for id in firing.ids if id not in dropped]
        else:
            here = firing.ids
        for entry in self.entries.separate_states(here):
            entry.finished.add(firing.node)
            entry.keys |= output_keys
        self.num_ids_finished[firing.node] += len(here)
        for block, chosen in self.entries.group_by_block(here).items():
            assert block is not None
            removable_ids |= (
                set(chosen) if len(block.state.finished) == num_nodes else set(chosen) - keep
            )
        leave = [id for id in here if id in removable_ids] if removable_ids else []
        for _ in self._discard(leave):
            pass
        return leave

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values. Must not be called while a node is running."""
        rows = [[id, e.batch, sorted(e.keys), sorted(e.finished)] for id, e in self.entries.items()]
        counts = {
            "fired": dict(self.num_started),
            "marks": {node: dict(each) for node, each in self.started_at_last_firing.items()},
        }
        return {"entries": rows, **counts, "closed": self.closed, "num_batches": self.num_batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.entries = StateBlocks(IdState, IdState.copy)
        self.num_ids_started = Counter()
        self.num_ids_finished = Counter()
        for (batch, keys, done), rows in groupby(state["entries"], key=lambda row: row[1:]):
            ids = [row[0] for row in rows]
            self._put(ids, IdState(batch, set(keys), dict.fromkeys(done, -1), set(done)))
            for node in done:
                self.num_ids_started[node] += len(ids)
                self.num_ids_finished[node] += len(ids)
        self.num_started = dict(state["fired"])
        self.num_finished = dict(state["fired"])
        self.closed = state["closed"]
        self.num_batches = state["num_batches"]
        self.started_at_last_firing = {node: dict(each) for node, each in state["marks"].items()}


def find_ready_firings(
    graph: DataflowGraph, buffer: IdBuffer, versions: Mapping[str, int], running: Collection[Firing]
) -> list[Firing]:
    """Return all firings that can start now, sorted by their oldest ids, then by the graph's order.

    A node can fire when `batch_size` ids have the keys that it reads and its version edges allow
    processing them with the current weights. It processes the oldest such ids.

    If nothing is running and no node has a full batch, one node may fire with a smaller batch: the
    first node in the graph's order that can process any ids. This is allowed only if more rows from
    the loader would not help (`needs_rows` is False). For example, the epoch may be at its end, or
    the node may need to process only a few ids, to replace those that a filter removed.

    `versions` maps each node to the number of its firings whose updated weights are available. A
    node in `running` does not fire again before it has finished. The arguments are not modified.
    """
    busy = {firing.node for firing in running}
    reaches = {name: _find_available_ids(graph, buffer, versions, name) for name in graph.order}
    full = [name for name, reach in reaches.items() if name not in busy and reach.is_full]
    if full or running:
        if len(full) > 1:
            position = {id: i for i, id in enumerate(buffer.entries)}
            # the sort is stable: ties keep the graph's order
            full.sort(key=lambda name: position[reaches[name].ids[0]])
        return [_build_firing(buffer, name, reaches[name].ids) for name in full]
    if any(reach.needs_rows for reach in reaches.values()):
        return []
    return [_build_firing(buffer, name, reach.ids) for name, reach in reaches.items() if reach.ids][
        :1
    ]


def needs_rows(
    graph: DataflowGraph,
    buffer: IdBuffer,
    versions: Mapping[str, int],
    among: Collection[str] | None = None,
) -> bool:
    """Return whether the loader's next batch could let a node start a firing (execution).

    Only nodes that read nothing but dataset keys are considered. If `among` is given, only nodes
    named in it are considered.
    """
    names = graph.order if among is None else among
    return any(_find_available_ids(graph, buffer, versions, name).needs_rows for name in names)


@dataclass(frozen=True)
class _AvailableIds:
    """Sample ids that a node can process now.

    Attributes:
        ids: The oldest such ids, at most one batch.
        is_full: True if these ids are a complete batch.
        needs_rows: True if more rows from the loader could complete the batch.
    """

    ids: tuple[str, ...]
    is_full: bool
    needs_rows: bool


def _find_available_ids(
    graph: DataflowGraph, buffer: IdBuffer, versions: Mapping[str, int], name: str
) -> _AvailableIds:
    node = graph.get_node(name)
    producers = graph.find_producers(name)
    # Ids that the node has not taken and whose inputs exist.
    open_blocks = list[StateBlock[IdState]]()
    able = list[str]()
    if buffer.num_ids_started[name] < len(buffer.entries):
        open_blocks = []
        for each in buffer.entries.blocks:
            if name not in each.state.started:
                open_blocks.append(each)
    if open_blocks and all(buffer.num_ids_finished[producer] for producer in producers):
        needed = set(node.inputs)
        fitting = []
        for b in open_blocks:
            if needed <= b.state.keys and b.state.finished.issuperset(producers):
                fitting.append(b)
        able = buffer.entries.list_ids(fitting)
    # Limit them by the age of the weights and by the batch size.
    edges = graph.find_version_edges(name)
    allowed = able[: _count_allowed(graph, buffer, versions, edges, able)]
    if node.batch_size:
        wanted = min(
            [node.batch_size, *(_compute_max_ids(graph, edge) or node.batch_size for edge in edges)]
        )
        taken = allowed[:wanted]
    else:
        first = buffer.entries[allowed[0]].batch if allowed else 0
        taken = [id for id in allowed if buffer.entries[id].batch == first]
        if taken:
            wanted = sum(len(block.ids) for block in open_blocks if block.state.batch == first)
        else:
            wanted = 1
    # Check if another batch of rows would help.
    more = False
    if not buffer.closed and not producers and len(taken) < wanted:
        more = _count_allowed(graph, buffer, versions, edges, able, another=1) > len(allowed)
    return _AvailableIds(tuple(taken), bool(taken) and len(taken) >= wanted, more)


def _compute_max_ids(graph: DataflowGraph, edge: VersionEdge) -> int:
    """Return how many ids a call may process with the same weights before it needs newer ones.

    This is the number of ids in `max_staleness` + 1 batches of the training node. If that node has
    no fixed batch size, the result is 0, which means no limit.
    """
    return (edge.max_staleness + 1) * graph.get_node(edge.producer).batch_size


def _count_allowed(
    graph: DataflowGraph,
    buffer: IdBuffer,
    versions: Mapping[str, int],
    edges: Sequence[VersionEdge],
    able: Sequence[str],
    another: int = 0,
) -> int:
    """Return how many of the ids in `able` a node may process before its weights are too old.

    `able` are the ids whose inputs exist, oldest first. With `another=1`, one id of the loader's
    next batch is added to them, which shows whether loading this batch would help.

    Each edge in `edges` links the node to a training node that updates its weights. Before the next
    update, the node may process the ids for at most `max_staleness` + 1 firings (executions) of the
    training node. The ids of firings that have already started count toward this limit, as do ids
    that the node has started to process but the training node has not.
    """
    count = len(able) + another
    for edge in edges:
        pending = _find_pending(buffer, edge)
        under_way = buffer.num_started.get(edge.producer, 0) - versions.get(edge.producer, 0)
        free = edge.max_staleness + 1 - under_way
        size = graph.get_node(edge.producer).batch_size
        if size:
            missing = max(0, free * size - sum(len(block.ids) for block in pending))
            count = min(count, _count_refill(graph, buffer, edge, missing, pending))
            continue
        batches = {block.state.batch for block in pending}
        fitting = 0
        for batch in [*(buffer.entries[id].batch for id in able), *[buffer.num_batches] * another]:
            batches.add(batch)
            if len(batches) > free:
                break
            fitting += 1
        count = min(count, fitting)
    return count


def _find_pending(buffer: IdBuffer, edge: VersionEdge) -> list[StateBlock[IdState]]:
    """Return the blocks of ids that a call has started to process but the training node has not.

    The training node is `edge.producer`, which updates the weights. The call is `edge.consumer`,
    which uses these weights.
    """
    blocks = buffer.entries.blocks
    result: list[StateBlock[IdState]] = []
    for b in blocks:
        if edge.consumer in b.state.started and edge.producer not in b.state.started:
            result.append(b)
    return result


def _count_refill(
    graph: DataflowGraph,
    buffer: IdBuffer,
    edge: VersionEdge,
    missing: int,
    pending: Sequence[StateBlock[IdState]],
) -> int:
    """Return how many ids a call may process for a training node that still needs `missing` ids.

    The result is `missing` unless a filter between the call and the training node has refill
    rounds, in which more samples are processed to replace those that the filter removed. In this
    case, the result is `missing` in the first round, and at least the call's batch size in later
    rounds. It is 0 while the filter has not processed all ids of earlier rounds (`pending`), and
    after the last round.
    """
    filter = graph.find_refilling_filter(edge)
    if filter is None or not missing:
        return missing
    rounds = buffer.count_rounds(edge.consumer, edge.producer)
    if rounds == 0:
        return missing
    if rounds >= filter.refill_rounds or any(
        filter.name not in block.state.finished for block in pending
    ):
        return 0
    return max(missing, graph.get_node(edge.consumer).batch_size)


def find_surplus(graph: DataflowGraph, buffer: IdBuffer, producer: str) -> list[str]:
    """Return the ids that are too old for the next firing (execution) of a training node.

    `producer` is the name of the training node, which has just fired. Whole batches are processed
    to replace ids that a filter removed, so there can be more ids than the node needs. Some of
    these surplus ids were processed with weights that are too old for the next firing.
    """
    surplus: dict[str, None] = {}
    for edge in graph.version_edges:
        if edge.producer == producer and graph.find_refilling_filter(edge) is not None:
            num_kept = edge.max_staleness * graph.get_node(producer).batch_size
            surplus |= dict.fromkeys(
                buffer.entries.list_ids(_find_pending(buffer, edge))[num_kept:]
            )
    return list(surplus)


def find_exhausted_filter(graph: DataflowGraph, buffer: IdBuffer) -> HostFunction | None:
    """Return a filter that has used up its `refill_rounds` and left no id to train on, or None.

    `refill_rounds` is the maximum number of sampling rounds per step.
    """
    for edge in graph.version_edges:
        filter = graph.find_refilling_filter(edge)
        spent = (
            filter is not None
            and buffer.count_rounds(edge.consumer, edge.producer) >= filter.refill_rounds
        )
        if spent and not _find_pending(buffer, edge):
            return filter
    return None


def _build_firing(buffer: IdBuffer, node: str, ids: tuple[str, ...]) -> Firing:
    return Firing(node, ids, buffer.num_started.get(node, 0))
