"""Calls that may run on old weights and have a copy of them to themselves: training of their role
need not wait for them.
"""

from __future__ import annotations

from weft.experiment import Experiment
from weft.graph.mfc import MFCDef
from weft.runtime.roles import Place


def own_lanes(experiment: Experiment) -> dict[str, Place]:
    """Call -> the copy of its role that it uses, for calls that begin in an order of their own: all
    that use the copy may lag, on devices that hold nothing else of the role, and one node alone
    changes the role's weights.
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
