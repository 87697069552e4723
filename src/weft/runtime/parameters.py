"""Where parameters go between engines on different meshes, and when: to other roles as the graph says, to the copies of a role
before the calls that use them. Each such way is planned once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.realloc.plan import Transfer, plan
from weft.realloc.traffic import traffic
from weft.runtime.commands import Built, Keep, Move, Prepare, SyncHere
from weft.runtime.device_process import Command
from weft.runtime.dispatch import Dispatch, Given, Job
from weft.runtime.lanes import own_lanes
from weft.runtime.roles import Place, common
from weft.topology import Slice

Versions = Callable[[int], None]  # is told the target's new version
Failures = Callable[[BaseException], None]
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Way:
    """From one engine's ranks to another's, for these parameters. `moved` are the bytes that go from device to device each
    time, `across` those of them that go from machine to machine."""

    key: str
    ranks: tuple[int, ...]
    transfers: Sequence[Transfer]
    moved: int
    across: int

    def __str__(self) -> str:
        across = f", {self.across:,} of them between machines" if self.across else ""
        return f"{self.moved:,} bytes between devices each time{across}"


class Parameters:
    """`built` says what each rank holds, `hosts` on which machine it is. Used by one thread."""

    def __init__(
        self, dispatch: Dispatch, experiment: Experiment, built: Mapping[int, Built], hosts: Sequence[str]
    ) -> None:
        self._dispatch, self._experiment, self._built, self._hosts = dispatch, experiment, built, hosts
        self._meshes = experiment.meshes()
        # Which weights of its role a copy has, once all that is asked for is done.
        self._weights = dict.fromkeys(experiment.copies(), 0)
        self._copies = [place for place in self._weights if any(self._held(place).values())]  # with parameters
        self._stale: dict[Place, bool] = {}  # copies that need others, and whether more than what train steps change
        # Of which version they are, once all that is asked for is done, where a train step or a call has told: a role's own
        # weights, a copy's, and what is kept until a call on a copy uses it.
        self._versions: dict[str, int] = {}
        self._copied: dict[Place, int] = {}
        self._kept: dict[tuple[Place, int], Way] = {}
        self._ahead = set(own_lanes(experiment).values())
        self._changing: dict[str, Job] = {}  # the last that changed a role's own weights
        self._ways: dict[tuple[Place, Place, tuple[str, ...]], Way] = {}
        self._unready: dict[str, BaseException] = {}  # why ranks do not know a way, by its key

    def begin(self) -> None:
        """Let roles begin as copies of others on other devices. Raises `ConfigError` for what cannot be moved later."""
        for sync in self._experiment.graph.syncs:
            if not self._alike(sync):
                self._prepare(*self._of(sync))
        for place in self._copies:
            self._prepare(self._own(place[0]), place, self._trained(place))
        for role, first in self._experiment.init_from.items():
            copy, over = ParamSync(first, role), Future[int]()
            if not self._alike(copy):
                self._reallocate(copy, f"begin {role}", over.set_result, over.set_exception, partly=True)
                over.result()
            self.changed(role, None, whole=True)

    # -- from role to role

    def move(self, sync: ParamSync, done: Versions, failed: Failures, started: Callable[[], None]) -> None:
        """Begin a sync of the graph."""
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
        way = self._prepare(*what)
        return self._submit(way, Move(way.key, source, target, sync.eta), name, done, failed, started)

    def _of(self, sync: ParamSync, *, partly: bool = False) -> tuple[Place, Place, list[str], float]:
        source, target = self._own(sync.source), self._own(sync.target)
        return source, target, self._common(source, target, partly=partly), sync.eta

    def _alike(self, sync: ParamSync) -> bool:
        return self._meshes[sync.source] == self._meshes[sync.target]

    # -- from a role to its copies

    def keep(self, role: str, version: int, failed: Failures) -> None:
        """Keep the role's own weights, which are of this version, for later calls on copies that lack them."""
        for place in self._ahead:
            if place[0] == role and self._copied.get(place) != version:
                source = self._own(role)
                self._kept[place, version] = way = self._prepare(source, place, self._behind(place))
                job = Job(
                    f"keeping weights of {role!r}", source[1].ranks, _same(Keep(way.key, source, version)), _nothing, failed,
                    roles=frozenset({role}),
                )  # fmt: skip
                self._dispatch.submit(job)

    def trained(self, role: str, job: Job, version: int) -> None:
        """`job` is a train step, after which the role's own weights are of this version."""
        self.changed(role, job)
        self._versions[role] = version

    def changed(self, role: str, job: Job | None, *, whole: bool = False) -> None:
        """`job` is to change the role's own weights: those that train steps change, or with `whole` any."""
        if job is not None:
            self._changing[role] = job
        for place in self._copies:
            if place[0] == role:
                self._stale[place] = whole or self._stale.get(place, False)

    def restored(self) -> None:
        """Every role's own weights are others now, of no version that was told; nothing is kept."""
        self._versions.clear()
        self._copied.clear()
        self._kept.clear()
        for role in self._meshes:
            self.changed(role, None, whole=True)

    def refresh(self, place: Place, failed: Failures, version: int | None = None) -> int | None:
        """Have a copy get its role's newest weights, or those of a version, before what is submitted next, if it lacks them;
        which ones it has then. None for a role's own engine."""
        if place not in self._weights:
            return None
        newest = self._versions.get(place[0], version)
        if place in self._stale and version in (None, newest):
            self._refresh(place, self._prepare(self._own(place[0]), place, self._behind(place)), failed)
            del self._stale[place]
        elif version is not None and version != self._copied.get(place, newest):
            self._refresh(place, self._kept.pop((place, version)), failed, version)
        wanted = newest if version is None else version
        if wanted is not None:
            self._copied[place] = wanted
        return self._weights[place]

    def _refresh(self, place: Place, way: Way, failed: Failures, kept: int | None = None) -> None:
        self._weights[place] += 1
        what = Move(way.key, self._own(place[0]), place, weights=self._weights[place], kept=kept)
        self._submit(way, what, f"moving the weights of {place[0]!r} to {place[1]}", _nothing, failed)

    def _behind(self, place: Place) -> list[str]:
        """The parameters in which a copy may differ from its role."""
        whole = self._stale.get(place, False)
        return self._common(self._own(place[0]), place, partly=False) if whole else self._trained(place)

    def _trained(self, place: Place) -> list[str]:
        """The parameters that train steps of the role change; all where its engine does not tell."""
        source = self._own(place[0])
        names, told = (
            self._common(source, place, partly=False),
            [self._built[r].trained[place[0]] for r in source[1].ranks],
        )
        trained = frozenset[str]().union(*(each for each in told if each is not None))
        return [name for name in names if name in trained] if trained else names

    # -- ways

    def ways(self, role: str) -> list[tuple[str, Way]]:
        """(what for, way) of all that regularly goes from a role's weights."""
        found = []
        for sync in self._experiment.graph.syncs:
            if sync.source == role and not self._alike(sync):
                found.append((f"to {sync.target} after {sync.after}", self._prepare(*self._of(sync))))
        own = self._own(role)
        written = any(sync.target == role for sync in self._experiment.graph.syncs)
        for place in self._copies:
            if place[0] == role and (written or self._experiment.roles[role].trained):
                calls = [c.name for c in self._experiment.calls() if (c.role, self._experiment.mesh_of(c)) == place]
                names = self._common(own, place, partly=False) if written else self._trained(place)
                way = self._prepare(own, place, names)
                found.append((f"to its copy on {place[1]} for {', '.join(dict.fromkeys(calls))}", way))
        return found

    def _prepare(self, source: Place, target: Place, names: Sequence[str], eta: float = 1.0) -> Way:
        """The way, which its ranks know of."""
        between = source, target, tuple(names)
        if between not in self._ways:
            chosen = frozenset(names)
            have, want = self._held(source, chosen), self._held(target, chosen)
            transfers = plan(have, want, node_of=self._node_of)
            itemsize = dict.fromkeys(names, self._itemsize(source[0], target, eta))
            cost = traffic(transfers, have, want, itemsize=itemsize, node_of=self._node_of)
            ranks = tuple(sorted({*source[1].ranks, *target[1].ranks}))
            key = f"{source[0]} -> {target[0]}, way {len(self._ways)}"
            self._ways[between] = Way(key, ranks, transfers, cost.moved, cost.across)
            name = f"getting ready to move {source[0]!r} to {target[0]!r}"

            def unready(error: BaseException) -> None:
                self._unready[key] = error

            self._dispatch.submit(Job(name, ranks, _same(Prepare(key, ranks, transfers)), _nothing, unready))
        return self._ways[between]

    def _submit(
        self,
        way: Way,
        what: Move,
        name: str,
        done: Versions,
        failed: Failures,
        started: Callable[[], None] = lambda: None,
    ) -> Job:
        """The target's ranks do not wait for the source's, which may be at work: the job begins when those are done."""
        target, source = what.target[1].ranks, what.source[1].ranks
        last = self._changing.get(what.source[0])
        after = [last] if last is not None and not set(target) <= set(source) else []
        roles = frozenset({what.source[0], what.target[0]})
        told = lambda ends: done(ends[target[0]].value)  # noqa: E731

        def why(error: BaseException) -> None:
            failed(self._unready.get(way.key) or error)

        job = Job(name, way.ranks, _same(what), told, why, started, roles=roles, after=after)
        self._dispatch.submit(job)
        return job

    def _own(self, role: str) -> Place:
        return role, self._meshes[role]

    def _common(self, source: Place, target: Place, *, partly: bool) -> list[str]:
        """Parameters to move. Raises `ConfigError` where they differ."""
        return common(source[0], self._shapes(source), target[0], self._shapes(target), partly=partly)

    def _shapes(self, place: Place) -> dict[str, tuple[int, ...]]:
        """Parameters' whole shapes: as far as any rank's part reaches."""
        found: dict[str, tuple[int, ...]] = {}
        for parts in self._held(place).values():
            for name, part in parts.items():
                ends = tuple(each.stop for each in part)
                found[name] = tuple(map(max, ends, found.get(name, ends)))
        return found

    def _held(self, place: Place, names: Iterable[str] | None = None) -> dict[int, dict[str, Slice]]:
        held = {rank: self._built[rank].slices[place] for rank in place[1].ranks}
        return {
            rank: {name: part for name, part in parts.items() if names is None or name in names}
            for rank, parts in held.items()
        }

    def _itemsize(self, source: str, target: Place, eta: float) -> int:
        """Bytes of an element on its way: float32 masters of what is trained, rounded first where the target would do it."""
        trained = self._experiment.roles[source].trained
        own, wanted = (ITEMSIZE[self._experiment.roles[role].dtype or "float32"] for role in (source, target[0]))
        given = 4 if trained else own
        taken = 4 if self._experiment.roles[target[0]].trained and target == self._own(target[0]) else wanted
        return min(given, taken) if eta == 1.0 else given

    def _node_of(self, rank: int) -> int:
        return self._hosts.index(self._hosts[rank])


def _same(command: Command) -> Callable[[int], tuple[Command, Given]]:
    """The command of every rank."""
    return lambda rank: (command, Given())


def _nothing(_: object) -> None:
    """What is done with an end that nobody waits for."""
