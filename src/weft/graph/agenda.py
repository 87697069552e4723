"""Firings that are decided and have not begun: which of them may.

Pure; clocks and threads are the caller's.

What runs, on which ids and in which order is decided by `ready`, ahead of the work. A firing begins
the moment that what it reads is there. Calls begin in the order they were decided in, so that a
group is asked for the same things in the same order whatever finishes first; where a call may run
on old weights (`max_staleness`) that holds for the calls of each role, and where such calls have a
copy of the weights to themselves, for these calls and for the others of their role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef
from weft.graph.ready import Buffer, Firing


@dataclass(frozen=True)
class Beginning:
    """A firing that may begin.

    `version`: a call with a lane of its own uses the weights of after so many firings of its
    training node, whatever that has made since; an interruptible one those or newer ones. `keeps`:
    it trains, and calls that wait are to use the weights that it finds.
    """

    firing: Firing
    version: int | None = None
    keeps: bool = False


@dataclass(frozen=True)
class _Decided:
    firing: Firing
    after: Mapping[str, int]  # node -> how many of its firings must be over
    lane: str | None  # firings of one lane begin in order; host functions have none
    version: int | None  # of the weights that a call with a lane of its own uses
    wants: tuple[str, int] | None  # (training node, version), where it must not have newer ones


class Agenda:
    """`over[node]` counts the firings of a node that are over, with the syncs that follow them; the
    caller counts. `lanes` are those of calls that need not begin in one order with the others of
    their role (`weft.runtime.lanes`).
    """

    def __init__(
        self, graph: DataflowGraph, over: Mapping[str, int], lanes: Mapping[str, str] | None = None
    ) -> None:
        self._graph = graph
        self._over = over
        self._lanes = lanes or {}
        self._by_role = any(edge.max_staleness for edge in graph.version_edges)
        self._waiting: list[_Decided] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, firing: Firing, buffer: Buffer) -> None:
        """A firing that `buffer.start` was told of.

        It begins after the ones before it of the same node, after what made its keys, and after the
        training that its role's weights come from.
        """
        node = self._graph.node(firing.node)
        after = {firing.node: firing.step}
        for producer in self._graph.producers(firing.node):
            after[producer] = 1 + max(
                block.known.started[producer] for block in buffer.entries.parts(firing.ids) if block
            )
        for edge in self._graph.waits_for(firing.node):
            after[edge.producer] = buffer.fired.get(edge.producer, 0)
        if isinstance(node, MFCDef):
            if self._by_role:
                lane = node.role
            else:
                lane = ""
        else:
            lane = None
        version: int | None = None
        wants: tuple[str, int] | None = None
        if isinstance(node, MFCDef) and node.name in self._lanes:
            (edge,) = self._graph.waits_for(node.name)
            lane = self._lanes[node.name]
            version = after[edge.producer]
            wants = None if node.interruptible else (edge.producer, version)
        self._waiting.append(_Decided(firing, after, lane, version, wants))

    def take(self) -> list[Beginning]:
        """Those that may begin now, in the order in which they are to; they leave the agenda."""
        begin: list[_Decided] = []
        left: list[_Decided] = []
        held = set[str]()
        for each in self._waiting:
            if each.lane not in held and all(
                self._over.get(node, 0) >= count for node, count in each.after.items()
            ):
                begin.append(each)
                continue
            left.append(each)
            if each.lane is not None:
                held.add(each.lane)
        self._waiting = left
        wanted = {each.wants for each in left}
        return [
            Beginning(each.firing, each.version, (each.firing.node, each.firing.step) in wanted)
            for each in begin
        ]
