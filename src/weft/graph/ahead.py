"""Sampling ahead of training, where version edges let calls use older weights: what is decided on
before training is. Pure.

With `max_staleness=k` the order is: batches 0 to k are sampled, batch 0 trains, batch k + 1 is
sampled, batch 1 trains, ... So the samples of a batch come of weights that are k steps old, and
which weights these are never depends on what is over first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.graph.graph import DataflowGraph
from weft.graph.ready import Buffer, Firing, wants_rows


def runs_ahead(graph: DataflowGraph) -> bool:
    """Whether any call may use weights that are older than the newest."""
    return any(edge.max_staleness for edge in graph.version_edges)


def first(graph: DataflowGraph, firings: Sequence[Firing]) -> list[Firing]:
    """Those to decide on first: calls that may lag, since others of their role would hold them up;
    then those that do not train, since a call that is decided on after a training step waits for
    its weights; then training.
    """
    lagging = _lagging(graph)
    sampling = [firing for firing in firings if firing.node in lagging]
    return sampling or [f for f in firings if not graph.node(f.node).trains] or list(firings)


def may_load(
    graph: DataflowGraph,
    buffer: Buffer,
    versions: Mapping[str, int],
    follow: str,
    steps_left: int | None,
) -> bool:
    """Whether another batch of rows would let a call run further ahead.

    None beyond those that the node `follow` takes in the steps that are left.
    """
    size = graph.node(follow).batch_size
    waiting = [block for block in buffer.entries.blocks if follow not in block.known.started]
    count = sum(len(block.ids) for block in waiting)
    if size:
        firings = count // size
    else:
        firings = len({block.known.batch for block in waiting})
    if steps_left is not None and firings >= steps_left:
        return False
    return wants_rows(graph, buffer, versions, _lagging(graph))


def oldest(buffer: Buffer, firings: Sequence[Firing]) -> Firing:
    """The firing on the ids that came first, so that what is sampled ahead holds nothing up; else
    the one decided on first.
    """
    position = {id: number for number, id in enumerate(buffer.entries)}
    return min(firings, key=lambda firing: min(position.get(id, -1) for id in firing.ids))


def _lagging(graph: DataflowGraph) -> set[str]:
    return {edge.consumer for edge in graph.version_edges if edge.max_staleness}
