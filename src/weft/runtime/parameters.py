"""Parameters between roles of many devices: each rank by itself where two roles lie alike, else from rank to rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.runtime.commands import Built, DropParcels, Give, SyncHere, Take
from weft.runtime.device_process import Command, Report
from weft.runtime.dispatch import Dispatch, Given, Job
from weft.runtime.roles import common
from weft.topology import Mesh

Versions = Callable[[int], None]  # is told the target's new version
Failures = Callable[[BaseException], None]


class Parameters:
    """`built` says what each rank holds of the roles that are moved."""

    def __init__(self, dispatch: Dispatch, meshes: Mapping[str, Mesh], built: Mapping[int, Built]) -> None:
        self._dispatch, self._meshes, self._built = dispatch, meshes, built

    def begin(self, experiment: Experiment) -> None:
        """Let roles begin as copies of others on other devices. Raises `ConfigError` for a sync that cannot be made later."""
        for sync in experiment.graph.syncs:
            if not self._alike(sync):
                self._common(sync, partly=False)
        for target, source in experiment.init_from.items():
            copy, over = ParamSync(source, target), Future[int]()
            if not self._alike(copy):
                self._reallocate(copy, f"begin {target}", over.set_result, over.set_exception, partly=True)
                over.result()

    def move(self, sync: ParamSync, step: int, done: Versions, failed: Failures, started: Callable[[], None]) -> None:
        """Begin a sync of the graph."""
        if not self._alike(sync):
            self._reallocate(sync, f"{sync.name}/{step}", done, failed, started)
            return
        ranks = self._meshes[sync.source].ranks
        roles = frozenset({sync.source, sync.target})
        told = lambda ends: done(ends[ranks[0]].value)  # noqa: E731
        self._dispatch.submit(Job(sync.name, ranks, _same(SyncHere(sync)), told, failed, started, roles=roles))

    def _alike(self, sync: ParamSync) -> bool:
        return self._meshes[sync.source] == self._meshes[sync.target]

    def _reallocate(
        self,
        sync: ParamSync,
        parcel: str,
        done: Versions,
        failed: Failures,
        started: Callable[[], None] = lambda: None,
        *,
        partly: bool = False,
    ) -> None:
        """Move parameters between different meshes: the one place where this is done. The source's first rank lays them ready
        as soon as what it was asked for before is done; the target's ranks take them then, and nobody waits for that."""
        source, target = self._meshes[sync.source], self._meshes[sync.target]
        giver, names = source.ranks[0], self._common(sync, partly=partly)

        def taken(ends: Mapping[int, Report]) -> None:
            drop = _same(DropParcels([parcel]))
            self._dispatch.submit(Job("letting go of parameters", [giver], drop, _nothing, _nothing))
            done(ends[target.ranks[0]].value)

        give = Job(
            f"giving parameters, {sync.name}",
            [giver],
            _same(Give(sync.source, names, parcel)),
            done=_nothing,
            failed=_nothing,  # the taking fails with it
            started=started,
            roles=frozenset({sync.source}),
        )
        take = Job(
            f"taking parameters, {sync.name}",
            target.ranks,
            _same(Take(sync.target, giver, parcel, sync.eta)),
            done=taken,
            failed=failed,
            roles=frozenset({sync.target}),
            after=[give],
        )
        self._dispatch.submit(give, take)

    def _common(self, sync: ParamSync, *, partly: bool) -> list[str]:
        """Parameters to move. Raises `ConfigError` where they differ, also in how ranks hold them."""
        giver, takers = self._meshes[sync.source].ranks[0], self._meshes[sync.target].ranks
        have = self._built[giver].slices[sync.source]
        for rank in takers:
            want = self._built[rank].slices[sync.target]
            names = common(sync.source, have, sync.target, want, partly=partly)
        return names


def _same(command: Command) -> Callable[[int], tuple[Command, Given]]:
    """The command of every rank."""
    return lambda rank: (command, Given())


def _nothing(_: object) -> None:
    """What is done with an end that nobody waits for."""
