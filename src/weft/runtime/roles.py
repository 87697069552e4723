"""The engines of a worker, one a (role, layout): built, copied into each other, moved away and back, saved and restored."""

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
from weft.registry import backends
from weft.topology import Layout

Place = tuple[str, Layout]
What = Literal["weights", "optimizer"]


@runtime_checkable
class WithAdapters(Protocol):
    """An engine that can show itself without what it trains."""

    def without_adapters(self) -> Engine | None: ...


class Roles:
    """Every role of an experiment on its layout. `specs` have the schedules of the real run filled in."""

    def __init__(self, experiment: Experiment, specs: Mapping[str, ModelSpec]) -> None:
        self._layouts = {role: spec.resolve_layout() for role, spec in specs.items()}
        self._engines: dict[Place, Engine] = {}
        self._away: set[tuple[str, What]] = set()  # what hooks have moved to host memory
        written = {sync.target for sync in experiment.graph.syncs}
        shared: dict[str, Engine] = {}
        for role, spec in sorted(specs.items(), key=lambda each: not each[1].trained):  # adapters before their base
            base = None if role in written else self._base(spec, specs)
            if base is not None:
                shared[role] = base
            engine = base or backends.get(spec.backend)(spec, self._layouts[role])
            self._engines[role, self._layouts[role]] = engine
        for target, source in experiment.init_from.items():
            if target not in shared:
                self._copy(source, target, eta=1.0, partly=True)
        for sync in experiment.graph.syncs:
            self._common(sync.source, sync.target, partly=False)  # refused now rather than after the first step

    def _base(self, spec: ModelSpec, specs: Mapping[str, ModelSpec]) -> Engine | None:
        """The engine of a trained role with its adapters off, where that is what `spec` asks for and the engine offers it."""
        for role, trained in specs.items():
            engine = self._engines.get((role, self._layouts[role]))
            if shares_base(spec, trained) and isinstance(engine, WithAdapters):
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
            directory.mkdir(parents=True)
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
        """Parameters that both roles have; all of them unless `partly` (a new head keeps what it was initialised to).

        Raises `ConfigError` naming the parameters that differ.
        """
        have, want = self._engine(source).slices(), self._engine(target).slices()
        names = [name for name in want if name in have and have[name] == want[name]]
        if not names or (not partly and len(names) < max(len(want), len(have))):
            apart = sorted((set(want) | set(have)) - set(names))
            raise ConfigError(
                f"{source} -> {target}: parameters differ between the two roles ({', '.join(apart[:5])}); "
                "only networks of one shape can be copied, and none with adapters"
            )
        return names
