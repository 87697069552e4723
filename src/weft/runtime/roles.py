"""The engines of a worker, one a (role, layout): built, copied into each other, moved away and back, saved and restored.

A worker has the roles whose meshes its rank is of. What two roles on different devices have in common is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from weft.engine.base import Engine
from weft.engine.spec import ModelSpec
from weft.engine.torch.adapters_off import shares_base
from weft.errors import CheckpointError, ConfigError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.parallel.mesh import ProcessGroups, RankMesh
from weft.registry import backends
from weft.topology import Layout, Slice

Place = tuple[str, Layout]
What = Literal["weights", "optimizer"]


@runtime_checkable
class WithAdapters(Protocol):
    """An engine that can show itself without what it trains."""

    def without_adapters(self) -> Engine | None: ...


class Roles:
    """The roles of an experiment that this rank has, each on its layout. `specs` have the schedules of the real run filled in;
    `groups` are needed for layouts of several devices."""

    def __init__(
        self,
        experiment: Experiment,
        specs: Mapping[str, ModelSpec],
        rank: int = 0,
        groups: ProcessGroups | None = None,
    ) -> None:
        self._meshes = {role: mesh for role, mesh in experiment.meshes().items() if rank in mesh.ranks}
        self._layouts = {role: mesh.layout for role, mesh in self._meshes.items()}
        self._rank, self._groups = rank, groups
        self._engines: dict[Place, Engine] = {}
        self._away: set[tuple[str, What]] = set()  # what hooks have moved to host memory
        written = {sync.target for sync in experiment.graph.syncs}
        shared: dict[str, Engine] = {}
        here = {role: spec for role, spec in specs.items() if role in self._meshes}
        for role, spec in sorted(here.items(), key=lambda each: not each[1].trained):  # adapters before their base
            base = None if role in written else self._base(role, here)
            if base is not None:
                shared[role] = base
            self._engines[role, self._layouts[role]] = base or self._build(role, spec)
        for target, source in experiment.init_from.items():
            if target not in shared and self._alike(source, target):
                self._copy(source, target, eta=1.0, partly=True)
        for sync in experiment.graph.syncs:
            if self._alike(sync.source, sync.target):
                self._common(sync.source, sync.target, partly=False)  # refused now rather than after the first step

    def __contains__(self, role: str) -> bool:
        return role in self._meshes

    def _build(self, role: str, spec: ModelSpec) -> Engine:
        mesh, backend = self._meshes[role], backends.get(spec.backend)
        engine: Engine
        if mesh.layout.num_devices == 1:
            engine = backend(spec, mesh.layout)
        else:
            assert self._groups is not None, "the ranks of a layout of several devices have process groups"
            engine = backend(spec, mesh.layout, RankMesh(mesh, self._rank, self._groups))
        return engine

    def _alike(self, source: str, target: str) -> bool:
        """Whether both roles are here on the same mesh, so that each rank copies what it holds."""
        here = self._meshes.get(source)
        return here is not None and here == self._meshes.get(target)

    def _base(self, role: str, specs: Mapping[str, ModelSpec]) -> Engine | None:
        """The engine of a trained role with its adapters off, where that is what `role` asks for, on the same devices, and the
        engine offers it."""
        for trained, spec in specs.items():
            engine = self._engines.get((trained, self._layouts[trained]))
            if shares_base(specs[role], spec) and self._alike(trained, role) and isinstance(engine, WithAdapters):
                return engine.without_adapters()
        return None

    def engine(self, role: str) -> Engine:
        """The role's engine, with its weights where they can be used."""
        self.onload(role, "weights")
        return self._engine(role)

    def offload(self, role: str, what: What) -> None:
        """Move weights or optimizer state to host memory; nothing happens where they are there already."""
        if (role, what) not in self._away:
            self._engine(role).offload(what)
            self._away.add((role, what))

    def onload(self, role: str, what: What) -> None:
        """The way back."""
        if (role, what) in self._away:
            self._engine(role).onload(what)
            self._away.discard((role, what))

    def sync(self, sync: ParamSync) -> int:
        """target = eta * source + (1 - eta) * target; the target's new version, which is the source's."""
        return self._copy(sync.source, sync.target, sync.eta, partly=False)

    def save_state(self, folder: Path) -> None:
        """Every role; engines leave out frozen weights that nobody wrote to."""
        for role in self._layouts:
            directory = folder / role
            directory.mkdir(parents=True, exist_ok=True)  # all ranks of a role share it
            self._engine(role).save_state(directory)

    def load_state(self, folder: Path) -> None:
        """Raises `CheckpointError` where a role's state is not there."""
        for role in self._layouts:
            if not (folder / role).is_dir():
                there = ", ".join(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else "none"
                raise CheckpointError(
                    f"{folder}: holds no state of role {role!r} (roles: {there}); it is of another graph"
                )
            self.engine(role).load_state(folder / role)

    def describe(self) -> dict[str, Mapping[str, Any]]:
        return {role: self._engine(role).description for role in self._layouts}

    def _engine(self, role: str) -> Engine:
        return self._engines[role, self._layouts[role]]

    def _copy(self, source: str, target: str, eta: float, *, partly: bool) -> int:
        """Move parameters by name."""
        names = self._common(source, target, partly=partly)
        giver, taker = self.engine(source), self.engine(target)
        taker.write(giver.read(names), version=giver.version, eta=eta)
        return taker.version

    def _common(self, source: str, target: str, *, partly: bool) -> list[str]:
        have, want = self._engine(source).slices(), self._engine(target).slices()
        return common(source, have, target, want, partly=partly)


def common(
    source: str, have: Mapping[str, Slice], target: str, want: Mapping[str, Slice], *, partly: bool
) -> list[str]:
    """Parameters that two roles both have; all of them unless `partly` (a new head keeps what it was initialised to).

    Raises `ConfigError` naming the parameters that differ.
    """
    names = [name for name in want if name in have and have[name] == want[name]]
    if not names or (not partly and len(names) < max(len(want), len(have))):
        apart = sorted((set(want) | set(have)) - set(names))
        raise ConfigError(
            f"{source} -> {target}: parameters differ between the two roles ({', '.join(apart[:5])}); "
            "only networks of one shape can be copied, and none with adapters"
        )
    return names
