"""Engines of a worker: building, copying, offloading, saving and restoring.

A worker has an engine for each role whose own mesh (set of devices with a layout) includes the
worker's rank. If calls use a role on another mesh that includes this rank, the worker also has a
copy of the role for that mesh. Training need not wait for calls on a copy if the copy is separate: it
shares no device with the role, and all calls on it tolerate stale weights. Transfers between devices
are in `weft.runtime.parameters`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine
from weft.engine.spec import ModelSpec
from weft.engine.torch.adapters_off import can_share_base
from weft.errors import CheckpointError, ConfigError, RunError
from weft.experiment import Experiment
from weft.graph.mfc import MFCDef, ParamSync
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.registry import backends
from weft.topology import Mesh

EngineKey = tuple[str, Mesh]  # (role, mesh of one of its engines)
OffloadableState = Literal["weights", "optimizer"]


@runtime_checkable
class SupportsDisablingAdapters(Protocol):
    """Engine whose adapters can be disabled, so that another role can use its base weights.

    `without_adapters` returns an engine for the base weights, or None if there are no adapters.
    """

    def without_adapters(self) -> Engine | None: ...


@runtime_checkable
class ReportsTrainedNames(Protocol):
    """Engine that reports the names of the parameters that its train steps change."""

    @property
    def trained_names(self) -> frozenset[str]: ...


class RoleEngines:
    """Engines on this rank, identified by role and mesh.

    `specs` maps roles to their model specs, which include the learning rate schedules. `groups` are
    the process groups of this rank, which are required if an engine runs on several devices.
    `tokenizers` maps roles to their tokenizers; an engine whose role has none loads its own.
    """

    def __init__(
        self,
        experiment: Experiment,
        specs: Mapping[str, ModelSpec],
        rank: int = 0,
        groups: ProcessGroups | None = None,
        tokenizers: Mapping[str, Tokenizer] | None = None,
    ) -> None:
        self._meshes = {
            role: mesh for role, mesh in experiment.role_meshes.items() if rank in mesh.ranks
        }
        self._rank = rank
        self._groups = groups
        self._tokenizers = tokenizers or {}
        self._engines: dict[EngineKey, Engine] = {}
        # state that hooks have offloaded to host memory
        self._offloaded: set[tuple[EngineKey, OffloadableState]] = set()
        synced_roles = {sync.target for sync in experiment.graph.syncs}
        shared: dict[str, Engine] = {}
        local_specs = {}
        for role, spec in specs.items():
            if role in self._meshes:
                local_specs[role] = spec
        # build engines with adapters before roles that share their base
        for role, spec in sorted(local_specs.items(), key=lambda item: not item[1].trained):
            base = None if role in synced_roles else self._find_shared_base(role, local_specs)
            if base is not None:
                shared[role] = base
            self._engines[role, self._meshes[role]] = base or self._build(
                role, spec, self._meshes[role]
            )
        # Number of weight updates that each copy has received, as counted by the driver; None
        # during a transfer.
        self._weights: dict[EngineKey, int | None] = {}
        for role, mesh in experiment.copies:
            if rank in mesh.ranks:
                self._engines[role, mesh] = self._build(role, specs[role].mirror(), mesh)
                self._weights[role, mesh] = 0
        for target, source in experiment.init_from.items():
            if target not in shared and self._has_equal_meshes(source, target):
                self._copy_parameters(source, target, eta=1.0, partly=True)
        for sync in experiment.graph.syncs:
            if self._has_equal_meshes(sync.source, sync.target):
                # raise ConfigError now rather than after the first step
                self._list_common(sync.source, sync.target, partly=False)

    @property
    def engine_keys(self) -> list[EngineKey]:
        """Role and mesh of every engine on this rank."""
        return list(self._engines)

    def _build(self, role: str, spec: ModelSpec, mesh: Mesh) -> Engine:
        backend = backends.get(spec.backend)
        ranks = []
        if mesh.layout.num_devices > 1:
            assert self._groups is not None, "a layout of several devices needs process groups"
            ranks.append(RankMesh(mesh, self._rank, self._groups))
        options = {}
        if "tokenizer" in inspect.signature(backend).parameters:
            options["tokenizer"] = self._tokenizers.get(role)
        engine: Engine = backend(spec, mesh.layout, *ranks, **options)
        return engine

    def _has_equal_meshes(self, source: str, target: str) -> bool:
        """Return whether both roles are on the same mesh and this rank belongs to it.

        If so, parameters can be copied between the roles without a transfer.
        """
        mesh = self._meshes.get(source)
        return mesh is not None and mesh == self._meshes.get(target)

    def _find_shared_base(self, role: str, specs: Mapping[str, ModelSpec]) -> Engine | None:
        """Return an engine that runs `role` on the base weights of a trained role, or None.

        The result is the trained role's engine with its adapters disabled. That engine must support
        disabling them, both roles must have the same base weights, and their meshes must split
        these in the same way.
        """
        for trained, spec in specs.items():
            engine = self._engines.get((trained, self._meshes[trained]))
            mesh = self._meshes[trained]
            if (
                can_share_base(specs[role], spec)
                and mesh.has_same_parts(self._meshes[role])
                and isinstance(engine, SupportsDisablingAdapters)
            ):
                return engine.without_adapters()
        return None

    def engine(
        self,
        role: str,
        mesh: Mesh | None = None,
        weights: int | None = None,
        *,
        or_newer: bool = False,
    ) -> Engine:
        """Return the role's engine on `mesh`, after moving the engine's weights to the device.

        By default, `mesh` is the role's own mesh. On any other mesh, the engine is a copy of the
        role, which must have received exactly `weights` weight updates or, with `or_newer`, at
        least that many. Otherwise `RunError` is raised.
        """
        place = self._build_key(role, mesh)
        has = self._weights.get(place)
        if place in self._weights and (
            weights is None or has is None or has < weights or (has > weights and not or_newer)
        ):
            raise RunError(
                f"role {role!r} on {place[1]}: its weights are not the role's newest ones"
            )
        self.onload(role, "weights", mesh)
        return self._engines[place]

    def offload(self, role: str, what: OffloadableState, mesh: Mesh | None = None) -> None:
        """Move a role's weights or optimizer state (`what`) to host memory.

        They are moved back to the device automatically when the engine needs them.
        """
        place = self._build_key(role, mesh)
        self._engines[place].offload(what)
        self._offloaded.add((place, what))

    def onload(self, role: str, what: OffloadableState, mesh: Mesh | None = None) -> None:
        """Move weights or optimizer state (`what`) back to the device if they were offloaded."""
        place = self._build_key(role, mesh)
        if (place, what) in self._offloaded:
            self._engines[place].onload(what)
            self._offloaded.discard((place, what))

    def find_engine(self, place: EngineKey) -> Engine | None:
        """Return the engine at `place`, or None if this rank does not have it."""
        return self._engines.get(place)

    @contextmanager
    def open_for_update(self, place: EngineKey, weights: int | None) -> Iterator[Engine | None]:
        """Yield the engine at `place` to a `with` block that replaces its weights.

        `place` is a role and a mesh. If this rank has no such engine, None is yielded. If the
        engine is a copy of a role, it cannot be used until the block ends. `weights` is then
        recorded as the number of weight updates that the copy has received.
        """
        copy = place in self._weights
        if copy:
            self._weights[place] = None
        yield self.find_engine(place)
        if copy:
            self._weights[place] = weights

    def sync(self, sync: ParamSync) -> int:
        """Set target = eta * source + (1 - eta) * target for the parameters of two roles.

        Returns the target's new version, which is the version of the source.
        """
        return self._copy_parameters(sync.source, sync.target, sync.eta, partly=False)

    def save_state(self, folder: Path) -> None:
        """Save the state of each role's own engine in `folder`, in one subfolder per role.

        Copies of roles are not saved. Frozen weights are omitted if they have not changed since
        they were loaded.
        """
        for role in self._meshes:
            directory = folder / role
            directory.mkdir(parents=True, exist_ok=True)  # shared by all ranks of the role
            self._get_own_engine(role).save_state(directory)

    def load_state(self, folder: Path) -> None:
        """Load the state of each role's own engine from `folder`.

        Raises `CheckpointError` if the state of a role is missing.
        """
        for role in self._meshes:
            if not (folder / role).is_dir():
                if folder.is_dir():
                    existing = ", ".join(sorted(p.name for p in folder.iterdir()))
                else:
                    existing = "none"
                raise CheckpointError(
                    f"{folder}: contains no state of role {role!r} (roles: {existing}); it was "
                    f"written by a run of another graph"
                )
            self.engine(role).load_state(folder / role)

    def describe(self) -> dict[str, Mapping[str, Any]]:
        """Return the description of each role's own engine."""
        return {role: self._get_own_engine(role).description for role in self._meshes}

    def describe_copies(self) -> dict[EngineKey, Mapping[str, Any]]:
        """Return `Engine.description` for each separate copy of a role on this rank."""
        copies: dict[EngineKey, Mapping[str, Any]] = {}
        for place, engine in self._engines.items():
            if place in self._weights:
                copies[place] = engine.description
        return copies

    def get_trained_names(self, role: str) -> frozenset[str] | None:
        """Return the names of the role's parameters that train steps change.

        Returns None if the engine does not report them.
        """
        engine = self._get_own_engine(role)
        return engine.trained_names if isinstance(engine, ReportsTrainedNames) else None

    def _get_own_engine(self, role: str) -> Engine:
        return self._engines[role, self._meshes[role]]

    def _build_key(self, role: str, mesh: Mesh | None) -> EngineKey:
        return role, mesh or self._meshes[role]

    def _copy_parameters(self, source: str, target: str, eta: float, *, partly: bool) -> int:
        """Set target = eta * source + (1 - eta) * target for two roles.

        Both must have an engine on this rank. Returns the target's new version. With `partly`, only
        the parameters that the two roles have in common are copied. Without it, raises
        `ConfigError` if the roles have different parameters.
        """
        names = self._list_common(source, target, partly=partly)
        source_engine = self.engine(source)
        target_engine = self.engine(target)
        target_engine.write(source_engine.read(names), version=source_engine.version, eta=eta)
        return target_engine.version

    def _list_common(self, source: str, target: str, *, partly: bool) -> list[str]:
        have = self._get_own_engine(source).slices()
        want = self._get_own_engine(target).slices()
        return list_common_parameters(source, have, target, want, partly=partly)


def list_common_parameters(
    source: str, have: Mapping[str, Any], target: str, want: Mapping[str, Any], *, partly: bool
) -> list[str]:
    """Return the names of the parameters that the roles `source` and `target` have in common.

    `have` and `want` map the parameter names of the two roles to full shapes or, if both are on the
    same mesh, to local slices. A parameter is common if its shape or slice is equal in both. With
    `partly`, either role may have other parameters as well: for example, a new head, which keeps
    its initialization.

    Raises `ConfigError` if no parameter is common or, without `partly`, if any parameter differs.
    The message names the parameters that differ.
    """
    names = []
    for name in want:
        if name in have and have[name] == want[name]:
            names.append(name)
    if not names or (not partly and len(names) < max(len(want), len(have))):
        different = sorted((set(want) | set(have)) - set(names))
        raise ConfigError(
            f"{source} -> {target}: parameters differ between the two roles "
            f"({', '.join(different[:5])}); "
            "only networks of equal shapes and without adapters can be copied"
        )
    return names


def find_separate_copies(experiment: Experiment) -> dict[str, EngineKey]:
    """Return the separate copies of roles, by the names of the calls that run on them.

    A copy of a role is identified by the role and a mesh (set of devices with a layout). It is
    separate if its mesh shares no device with the role's own mesh, all calls on the copy tolerate
    stale weights, and no sync writes to the role.
    """
    meshes = experiment.role_meshes
    used: dict[EngineKey, list[MFCDef]] = {}
    for call in experiment.graph.list_model_calls():
        used.setdefault((call.role, experiment.call_meshes[call.name]), []).append(call)
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
