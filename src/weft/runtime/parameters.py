"""Parameter transfers between meshes: syncs between roles, and updates of a role's copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from weft.errors import RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.runtime.commands import Built, Keep, Move, SyncHere
from weft.runtime.device_process import Command
from weft.runtime.dispatch import Dispatch, Given, Job
from weft.runtime.lanes import own_lanes
from weft.runtime.roles import Place
from weft.runtime.ways import Way, Ways

Versions = Callable[[int], None]  # called with the target's new version
Failures = Callable[[BaseException], None]


class Parameters:
    """Schedule parameter transfers. Not thread-safe.

    `built` describes the parameters of each rank; `hosts` names the machine of each rank.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        experiment: Experiment,
        built: Mapping[int, Built],
        hosts: Sequence[str],
    ) -> None:
        self._dispatch = dispatch
        self._experiment = experiment
        self._ways = Ways(dispatch, experiment, built, hosts)
        self._meshes = experiment.meshes()
        # copy -> number of its weights once all submitted jobs are finished
        self._weights = dict.fromkeys(experiment.copies(), 0)
        # copies that have parameters
        self._copies = [place for place in self._weights if any(self._ways.held(place).values())]
        # outdated copies -> whether parameters that train steps don't change are outdated too
        self._stale: dict[Place, bool] = {}
        # Versions once all submitted jobs are finished, if known from a train step or a call:
        # of each role's own weights, of each copy, and of weights kept for a later call on a
        # copy.
        self._versions: dict[str, int] = {}
        self._copied: dict[Place, int] = {}
        # version -> number of the weights, for calls that accept newer ones
        self._numbers: dict[Place, dict[int, int]] = {}
        self._kept: dict[tuple[Place, int], Way] = {}
        self._ahead = set(own_lanes(experiment).values())
        self._changing: dict[str, Job] = {}  # role -> last job that changes its own weights

    def begin(self) -> None:
        """Prepare all transfers and initialize roles from others on different meshes (`init_from`).

        Raises `ConfigError` for roles whose parameters do not match.
        """
        for sync in self._experiment.graph.syncs:
            if not self._alike(sync):
                self._ways.prepare(*self._of(sync))
        for place in self._copies:
            self._ways.prepare(self._own(place[0]), place, self._ways.trained(place))
        for role, first in self._experiment.init_from.items():
            copy = ParamSync(first, role)
            over = Future[int]()
            if not self._alike(copy):
                self._reallocate(
                    copy, f"initializing {role}", over.set_result, over.set_exception, partly=True
                )
                over.result()
            self.changed(role, None, whole=True)

    # -- from role to role

    def move(
        self, sync: ParamSync, done: Versions, failed: Failures, started: Callable[[], None]
    ) -> None:
        """Start a sync of the graph."""
        if not self._alike(sync):
            job = self._reallocate(sync, sync.name, done, failed, started)
        else:
            ranks = self._meshes[sync.source].ranks
            told = lambda ends: done(ends[ranks[0]].value)  # noqa: E731
            roles = frozenset({sync.source, sync.target})
            job = Job(sync.name, ranks, _same(SyncHere(sync)), told, failed, started, roles=roles)
            self._dispatch.submit(job)
        self.changed(sync.target, job, whole=True)

    def _reallocate(
        self,
        sync: ParamSync,
        name: str,
        done: Versions,
        failed: Failures,
        started: Callable[[], None] = lambda: None,
        *,
        partly: bool = False,
    ) -> Job:
        source, target, *_ = what = self._of(sync, partly=partly)
        way = self._ways.prepare(*what)
        return self._submit(
            way, Move(way.key, source, target, sync.eta), name, done, failed, started
        )

    def _of(
        self, sync: ParamSync, *, partly: bool = False
    ) -> tuple[Place, Place, list[str], float]:
        source = self._own(sync.source)
        target = self._own(sync.target)
        return source, target, self._ways.common(source, target, partly=partly), sync.eta

    def _alike(self, sync: ParamSync) -> bool:
        return self._meshes[sync.source] == self._meshes[sync.target]

    # -- from a role to its copies

    def keep(self, role: str, version: int, failed: Failures) -> None:
        """Keep the role's own weights, of this version, for later calls on copies that lack them."""
        for place in self._ahead:
            if place[0] == role and self._copied.get(place) != version:
                source = self._own(role)
                self._kept[place, version] = way = self._ways.prepare(
                    source, place, self._behind(place)
                )
                job = Job(
                    f"saving weights of {role!r}",
                    source[1].ranks,
                    _same(Keep(way.key, source, version)),
                    _nothing,
                    failed,
                    roles=frozenset({role}),
                )
                self._dispatch.submit(job)

    def trained(self, role: str, job: Job, version: int) -> None:
        """Record that `job` is a train step, after which the role's weights have this version."""
        self.changed(role, job)
        self._versions[role] = version

    def changed(self, role: str, job: Job | None, *, whole: bool = False) -> None:
        """Mark the role's copies as outdated; `job` changes the role's own weights.

        With `whole`, all parameters can change; otherwise only those that train steps change.
        """
        if job is not None:
            self._changing[role] = job
        for place in self._copies:
            if place[0] == role:
                self._stale[place] = whole or self._stale.get(place, False)

    def restored(self) -> None:
        """Mark all copies as outdated and forget versions and kept weights, after a restore."""
        self._versions.clear()
        self._copied.clear()
        self._numbers.clear()
        self._kept.clear()
        for role in self._meshes:
            self.changed(role, None, whole=True)

    def refresh(self, place: Place, failed: Failures, version: int | None = None) -> int | None:
        """Update a copy, if needed, before the next submitted call; return its weights' number.

        The copy gets its role's newest weights, or those of `version`. Returns None for a role's
        own engine.
        """
        if place not in self._weights:
            return None
        newest = self._versions.get(place[0], version)
        if place in self._stale and version in (None, newest):
            self._get_newest(place, failed)
        elif version is not None and version != self._copied.get(place, newest):
            self._get(place, self._kept_of(place, version), failed, kept=version)
        wanted = newest if version is None else version
        if wanted is not None:
            self._copied[place] = wanted
        return self._weights[place]

    def _kept_of(self, place: Place, version: int) -> Way:
        """Return the plan for the kept weights of a version. Raises `RunError` if none were kept."""
        way = self._kept.pop((place, version), None)
        if way is None:
            there = (
                ", ".join(str(of) for other, of in sorted(self._kept, key=str) if other == place)
                or "none"
            )
            raise RunError(
                f"a call on {place[1]} needs version {version} of the weights of {place[0]!r}, "
                f"which was not saved; saved versions: "
                f"{there}"
            )
        return way

    def follow(self, place: Place, failed: Failures, version: int | None = None) -> int | None:
        """Update a copy as soon as there are newer weights, even during the next submitted call.

        That call may start with weights of `version` or newer. Returns the lowest number of the
        weights it may have, or None for a role's own engine.
        """
        if place not in self._ahead:
            return self.refresh(place, failed)
        numbers = self._numbers.setdefault(place, {})
        if place in self._stale:
            waits = version is not None and self._copied.get(place, -1) < version
            self._get_newest(place, failed, holds_up=waits)
            if (newest := self._versions.get(place[0], version)) is not None:
                self._copied[place] = newest
                numbers[newest] = self._weights[place]
        elif version is not None:
            numbers.setdefault(self._copied.setdefault(place, version), self._weights[place])
        known = [of for of in sorted(numbers) if version is not None and of <= version]
        for older in known[:-1]:
            del numbers[older]
        return numbers[known[-1]] if known else 0

    def _get_newest(self, place: Place, failed: Failures, *, holds_up: bool = True) -> None:
        self._get(
            place,
            self._ways.prepare(self._own(place[0]), place, self._behind(place)),
            failed,
            holds_up=holds_up,
        )
        del self._stale[place]

    def _get(
        self,
        place: Place,
        way: Way,
        failed: Failures,
        *,
        kept: int | None = None,
        holds_up: bool = True,
    ) -> None:
        self._weights[place] += 1
        what = Move(way.key, self._own(place[0]), place, weights=self._weights[place], kept=kept)
        name = f"moving the weights of {place[0]!r} to {place[1]}"
        self._submit(way, what, name, _nothing, failed, holds_up=holds_up)

    def _behind(self, place: Place) -> list[str]:
        """Return the names of the parameters in which a copy may differ from its role."""
        whole = self._stale.get(place, False)
        if whole:
            return self._ways.common(self._own(place[0]), place, partly=False)
        return self._ways.trained(place)

    # -- ways

    def ways(self, role: str) -> list[tuple[str, Way]]:
        """Return (purpose, plan) of all recurring transfers of a role's weights."""
        found = []
        for sync in self._experiment.graph.syncs:
            if sync.source == role and not self._alike(sync):
                found.append(
                    (f"to {sync.target} after {sync.after}", self._ways.prepare(*self._of(sync)))
                )
        own = self._own(role)
        written = any(sync.target == role for sync in self._experiment.graph.syncs)
        for place in self._copies:
            if place[0] == role and (written or self._experiment.roles[role].trained):
                calls = [
                    c.name
                    for c in self._experiment.calls()
                    if (c.role, self._experiment.mesh_of(c)) == place
                ]
                if written:
                    names = self._ways.common(own, place, partly=False)
                else:
                    names = self._ways.trained(place)
                way = self._ways.prepare(own, place, names)
                found.append(
                    (f"to its copy on {place[1]} for {', '.join(dict.fromkeys(calls))}", way)
                )
        return found

    def _submit(
        self,
        way: Way,
        what: Move,
        name: str,
        done: Versions,
        failed: Failures,
        started: Callable[[], None] = lambda: None,
        *,
        holds_up: bool = True,
    ) -> Job:
        """Submit a transfer.

        The target's ranks do not wait for busy ranks of the source: the job is issued when the last
        change of the source's weights is finished. Unless `holds_up`, later requests of the roles
        do not wait for that.
        """
        target = what.target[1].ranks
        source = what.source[1].ranks
        last = self._changing.get(what.source[0])
        if last is not None and not set(target) <= set(source):
            after = [last]
        else:
            after = []
        roles = frozenset({what.source[0], what.target[0]} if holds_up else ())
        told = lambda ends: done(ends[target[0]].value)  # noqa: E731

        def why(error: BaseException) -> None:
            failed(self._ways.unready.get(way.key) or error)

        job = Job(name, way.ranks, _same(what), told, why, started, roles=roles, after=after)
        self._dispatch.submit(job)
        return job

    def _own(self, role: str) -> Place:
        return role, self._meshes[role]


def _same(command: Command) -> Callable[[int], tuple[Command, Given]]:
    """Return a `Job.make` that gives every rank the same command."""
    return lambda rank: (command, Given())


def _nothing(_: object) -> None:
    """Do nothing on completion."""
