"""Queue that determines the order in which scheduled firings (executions of graph nodes) start.

`weft.graph.ready` decides in advance which nodes run, on which sample ids and in which order. A
firing starts as soon as its inputs exist. Calls also start in the order in which they were
scheduled, so that the order of requests to a worker group does not depend on timing. If some calls
tolerate stale weights (`max_staleness`), this order is kept separately for each role. Calls that
use a separate copy of the weights are ordered independently of the other calls of their role.

The queue uses neither clocks nor threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.graph.ready import Firing, IdBuffer


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
    `weft.runtime.separate_copies`) to a name of this copy. Calls on the same copy start in order,
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
