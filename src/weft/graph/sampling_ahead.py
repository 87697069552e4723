"""Sampling ahead of training, for calls that tolerate stale weights.

With `max_staleness=k`, batches 0 to k are sampled before the first train step. Then training on
batch 0 is followed by sampling batch k + 1, training on batch 1 by sampling batch k + 2, and so on.
Apart from the first ones, samples thus always come from weights that are k steps old, independent
of timing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.graph.graph import DataflowGraph
from weft.graph.ready import Firing, IdBuffer, needs_rows


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
