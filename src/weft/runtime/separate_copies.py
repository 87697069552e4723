"""Selection of the calls that can run alongside training, on separate copies of a role.

All calls on a separate copy tolerate stale weights, so training need not wait for them.
"""

from __future__ import annotations

from weft.experiment import Experiment
from weft.graph.mfc import MFCDef
from weft.runtime.roles import EngineKey


def find_separate_copies(experiment: Experiment) -> dict[str, EngineKey]:
    """Return the separate copies of roles, by the names of the calls that run on them.

    A copy of a role is identified by the role and a mesh (set of devices with a layout). It is
    separate if its mesh shares no device with the role's own mesh, all calls on the copy tolerate
    stale weights, and no sync writes to the role.
    """
    meshes = experiment.build_meshes()
    used: dict[EngineKey, list[MFCDef]] = {}
    for call in experiment.graph.list_model_calls():
        used.setdefault((call.role, experiment.get_mesh(call)), []).append(call)
    written = {sync.target for sync in experiment.graph.syncs}
    separate_copies: dict[str, EngineKey] = {}
    for place, calls in used.items():
        if (
            set(place[1].ranks).isdisjoint(meshes[place[0]].ranks)
            and place[0] not in written
            and all(_tolerates_staleness(experiment, call) for call in calls)
        ):
            for call in calls:
                separate_copies[call.name] = place
    return separate_copies


def _tolerates_staleness(experiment: Experiment, call: MFCDef) -> bool:
    edges = experiment.graph.find_version_edges(call.name)
    return (
        len(edges) == 1
        and edges[0].max_staleness > 0
        and experiment.graph.get_node(edges[0].producer).trains
    )
