"""Calls on stale weights that have their own copy of the role, so training need not wait for them."""

from __future__ import annotations

from weft.experiment import Experiment
from weft.graph.mfc import MFCDef
from weft.runtime.roles import Place


def own_lanes(experiment: Experiment) -> dict[str, Place]:
    """Return call -> copy of its role, for calls that run in an order of their own.

    Conditions: all calls on the copy tolerate staleness, the copy shares no device with the role's
    own mesh, and no sync writes to the role.
    """
    meshes = experiment.meshes()
    used: dict[Place, list[MFCDef]] = {}
    for call in experiment.graph.model_calls():
        used.setdefault((call.role, experiment.mesh_of(call)), []).append(call)
    written = {sync.target for sync in experiment.graph.syncs}
    return {
        call.name: place
        for place, calls in used.items()
        if set(place[1].ranks).isdisjoint(meshes[place[0]].ranks)
        and place[0] not in written
        and all(_lags(experiment, call) for call in calls)
        for call in calls
    }


def _lags(experiment: Experiment, call: MFCDef) -> bool:
    edges = experiment.graph.waits_for(call.name)
    return (
        len(edges) == 1
        and edges[0].max_staleness > 0
        and experiment.graph.node(edges[0].producer).trains
    )
