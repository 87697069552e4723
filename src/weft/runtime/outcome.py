"""What one run of a node did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.data.sample import SequenceSample
from weft.graph.mfc import MFCDef, Node
from weft.graph.ready import Firing
from weft.runtime.group import SampleMeta


@dataclass(frozen=True)
class Outcome:
    """What a firing did: descriptions of its outputs (None where it made no keys), metrics, and
    when it ran.
    """

    firing: Firing
    outputs: SampleMeta | None
    metrics: Mapping[str, float]
    started: float  # seconds since the epoch
    seconds: float
    kept: tuple[str, ...]  # ids that a filter let pass; all of them otherwise
    seen: SequenceSample | None = None  # what the network made of a few ids, with its values


def told(node: Node, firing: Firing) -> str:
    """A firing in the words of an error."""
    if isinstance(node, MFCDef):
        what = f"role {node.role!r}"
    else:
        what = f"host function {node.function!r}"
    shown = ", ".join(firing.ids[:4]) + (", ..." if len(firing.ids) > 4 else "")
    return f"node {firing.node!r} ({what}, {len(firing.ids)} ids: {shown})"
