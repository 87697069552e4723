"""Result of one firing (execution) of a graph node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.data.sample import SequenceSample
from weft.graph.mfc import MFCDef, Node
from weft.graph.ready import Firing
from weft.runtime.group import SampleMeta


@dataclass(frozen=True)
class FiringOutcome:
    """Result of one firing (execution) of a graph node.

    Attributes:
        firing: Node and sample ids of the firing.
        outputs: Metadata of the outputs, or None if the node has no output keys.
        metrics: Metrics of the node.
        start_time: Start in seconds since the epoch.
        seconds: Duration in seconds.
        kept_ids: Ids that the node kept: all ids, unless the node is a filter.
        seen_samples: Log-probs or scores of a few ids, for display, or None.
    """

    firing: Firing
    outputs: SampleMeta | None
    metrics: Mapping[str, float]
    start_time: float  # seconds since the epoch
    seconds: float
    kept_ids: tuple[str, ...]  # ids that a filter kept; all ids for other nodes
    seen_samples: SequenceSample | None = None  # the network's values for a few ids, with tensors


def describe_firing(node: Node, firing: Firing) -> str:
    """Describe a firing for an error message by its node, role or function, and ids."""
    if isinstance(node, MFCDef):
        what = f"role {node.role!r}"
    else:
        what = f"host function {node.function!r}"
    first_ids = ", ".join(firing.ids[:4]) + (", ..." if len(firing.ids) > 4 else "")
    return f"node {firing.node!r} ({what}, {len(firing.ids)} ids: {first_ids})"
