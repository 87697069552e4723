"""Order in which scheduled firings (executions of graph nodes) start, also if sampling runs ahead.

`weft.graph.ready` decides in advance which nodes run, on which sample ids and in which order. A
firing starts as soon as its inputs exist. Calls also start in the order in which they were
scheduled, so that the order of requests to a worker group does not depend on timing. If some calls
tolerate stale weights (`max_staleness`), this order is kept separately for each role. Calls that
use a separate copy of the weights are ordered independently of the other calls of their role.

Calls that tolerate stale weights are scheduled ahead of training. With `max_staleness=k`, batches 0
to k are sampled before the first train step. Then training on batch 0 is followed by sampling batch
k + 1, training on batch 1 by sampling batch k + 2, and so on. Apart from the first ones, samples
thus always come from weights that are k steps old, independent of timing.

This module uses neither clocks nor threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.graph.ready import Firing, IdBuffer, needs_rows


@dataclass(frozen=True)
class FiringLaunch:
    """Firing (one execution of a node) that can start now.

    Attributes:
        firing: The firing to start.
        version: Version of the weights with which the call starts, counted in train steps since the
            start of the run. None if the call does not use a separate copy of the weights.
        needs_old_weights: True if the firing is a train step, but a queued call still needs the
            weights as they are before this step.
    """

    firing: Firing
    version: int | None = None
    needs_old_weights: bool = False


@dataclass(frozen=True)
class _QueuedFiring:
    firing: Firing
    required_firings: Mapping[str, int]  # node -> required number of finished firings
    lane: str | None  # firings with the same lane start in order; None for host functions
    version: int | None  # version of the weights, for calls with their own copy
    required_weights: (
        tuple[str, int] | None
    )  # (training node, version) if newer weights are not allowed


class LaunchQueue:
    """Queue of firings (executions of graph nodes) that are scheduled but not started.

    `over` maps each node to the number of its finished firings. The caller updates this mapping. A
    firing counts as finished when the parameter syncs after it have finished, too.

    `lanes` maps each call that uses a separate copy of the weights (see
    `weft.runtime.roles`) to a name of this copy. Calls on the same copy start in order,
    independently of the other calls of their role.
    """

    def __init__(
        self, graph: DataflowGraph, over: Mapping[str, int], lanes: Mapping[str, str] | None = None
    ) -> None:
        self._graph = graph
        self._finished = over
        self._lanes = lanes or {}
        self._ordered_by_role = any(edge.max_staleness for edge in graph.version_edges)
        self._waiting: list[_QueuedFiring] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, firing: Firing, buffer: IdBuffer) -> None:
        """Add a firing that `buffer.record_start` has already recorded.

        The firing will start after earlier firings of the same node, after the firings that produce
        its inputs, and after the train steps whose weights it uses.
        """
        # Finished firings that this one has to wait for.
        node = self._graph.get_node(firing.node)
        after = {firing.node: firing.step}
        for producer in self._graph.find_producers(firing.node):
            after[producer] = 1 + max(
                block.state.started[producer]
                for block in buffer.entries.group_by_block(firing.ids)
                if block
            )
        for edge in self._graph.find_version_edges(firing.node):
            after[edge.producer] = buffer.num_started.get(edge.producer, 0)
        # Calls start in order, per role if any call tolerates staleness.
        if isinstance(node, MFCDef):
            if self._ordered_by_role:
                lane = node.role
            else:
                lane = ""
        else:
            lane = None
        # A call with its own copy of the weights has its own order and version.
        version: int | None = None
        wants: tuple[str, int] | None = None
        if isinstance(node, MFCDef) and node.name in self._lanes:
            (edge,) = self._graph.find_version_edges(node.name)
            lane = self._lanes[node.name]
            version = after[edge.producer]
            wants = None if node.interruptible else (edge.producer, version)
        self._waiting.append(_QueuedFiring(firing, after, lane, version, wants))

    def take(self) -> list[FiringLaunch]:
        """Remove the firings (executions of nodes) that can start now, and return them.

        They are returned in the order in which they were added to the queue.
        """
        begin: list[_QueuedFiring] = []
        left: list[_QueuedFiring] = []
        held = set[str]()
        for each in self._waiting:
            if each.lane not in held and all(
                self._finished.get(node, 0) >= count
                for node, count in each.required_firings.items()
            ):
                begin.append(each)
                continue
            left.append(each)
            if each.lane is not None:
                held.add(each.lane)
        self._waiting = left
        wanted = {each.required_weights for each in left}
        result: list[FiringLaunch] = []
        for each in begin:
            result.append(
                FiringLaunch(
                    each.firing, each.version, (each.firing.node, each.firing.step) in wanted
                )
            )
        return result


# -- sampling ahead of training


def can_run_ahead(graph: DataflowGraph) -> bool:
    """Return whether any call in the graph tolerates stale weights."""
    return any(edge.max_staleness for edge in graph.version_edges)


def choose_first(graph: DataflowGraph, firings: Sequence[Firing]) -> list[Firing]:
    """Return the firings (executions of graph nodes) that should be scheduled first.

    If any of `firings` are calls that tolerate stale weights, only these are returned, because
    other calls of their role would delay them. Otherwise, all firings that do not train are
    returned, because a call that is scheduled after a train step has to wait for the new weights.
    If all firings train, all are returned.
    """
    lagging = _find_stale_calls(graph)
    sampling = [firing for firing in firings if firing.node in lagging]
    return sampling or [f for f in firings if not graph.get_node(f.node).trains] or list(firings)


def may_load(
    graph: DataflowGraph,
    buffer: IdBuffer,
    versions: Mapping[str, int],
    follow: str,
    steps_left: int | None,
) -> bool:
    """Return whether to load another batch now, for calls that run ahead of training.

    The batch should be loaded if a call that tolerates stale weights could start with it. It is not
    needed if the loaded rows suffice for the remaining steps of the run. `follow` is the node that
    defines the steps: it runs once per step. `steps_left` is the number of remaining steps, or None
    if there is no limit.
    """
    size = graph.get_node(follow).batch_size
    waiting = []
    for block in buffer.entries.blocks:
        if follow not in block.state.started:
            waiting.append(block)
    count = sum(len(block.ids) for block in waiting)
    if size:
        firings = count // size
    else:
        firings = len({block.state.batch for block in waiting})
    if steps_left is not None and firings >= steps_left:
        return False
    return needs_rows(graph, buffer, versions, _find_stale_calls(graph))


def find_oldest(buffer: IdBuffer, firings: Sequence[Firing]) -> Firing:
    """Return the firing (execution of a graph node) with the oldest sample ids.

    If several have the same age, the first of them is returned. Training needs the oldest ids
    first, so the caller waits for this firing before the others.
    """
    position = {id: number for number, id in enumerate(buffer.entries)}
    return min(firings, key=lambda firing: min(position.get(id, -1) for id in firing.ids))


def _find_stale_calls(graph: DataflowGraph) -> set[str]:
    stale_calls: set[str] = set()
    for edge in graph.version_edges:
        if edge.max_staleness:
            stale_calls.add(edge.consumer)
    return stale_calls
