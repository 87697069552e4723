"""Parameter transfers between meshes (sets of devices with a layout).

They are syncs from one role to another, and updates of a role's copies on other meshes. A plan of
each transfer is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from weft.errors import RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.planner.memory import BYTES
from weft.realloc.plan import ParameterTransfer, count_traffic, plan
from weft.runtime.commands import (
    BuiltEngines,
    MoveParameters,
    PrepareReallocation,
    SaveParameters,
    SyncOnSameMesh,
)
from weft.runtime.dispatch import DeviceJob, JobDispatcher, repeat_command
from weft.runtime.roles import EngineKey, find_separate_copies, list_common_parameters
from weft.topology import Slice

VersionCallback = Callable[[int], None]  # called with the target's new version
FailureCallback = Callable[[BaseException], None]
# metric of calls on copies of a role: bytes of its weights that their devices received
WEIGHT_BYTES = "num_weight_bytes"


class ParameterTransfers:
    """Scheduler of parameter transfers. It is not thread-safe.

    `built` maps each rank to the description of its engines, and `hosts` lists the machine of each
    rank. In the methods, `place` identifies an engine by its role and mesh, and `failed` is a
    function that is called with the error if a transfer fails.
    """

    def __init__(
        self,
        dispatch: JobDispatcher,
        experiment: Experiment,
        built: Mapping[int, BuiltEngines],
        hosts: Sequence[str],
    ) -> None:
        self._dispatch = dispatch
        self._experiment = experiment
        self._plans = ReallocationPlanCache(dispatch, experiment, built, hosts)
        self._meshes = experiment.role_meshes
        # copy -> number of its weight updates once all submitted jobs are finished
        self._weights = dict.fromkeys(experiment.copies, 0)
        # copy -> bytes that were sent to it since its last call
        self._moved_bytes: dict[EngineKey, int] = {}
        # copies that have parameters
        self._copies = [
            place for place in self._weights if any(self._plans.collect_slices(place).values())
        ]
        # outdated copies -> whether parameters that train steps don't change are outdated too
        self._stale: dict[EngineKey, bool] = {}
        # The versions below are those once all submitted jobs are finished. They have an entry only
        # if a train step or a call has made the version known.
        # role -> version of its own weights
        self._versions: dict[str, int] = {}
        # copy -> version of its weights
        self._copy_versions: dict[EngineKey, int] = {}
        # copy -> (version -> number of its weight updates), for calls that accept newer weights
        self._weights_of_versions: dict[EngineKey, dict[int, int]] = {}
        # (copy, version) -> plan for weights that are kept for a later call on the copy
        self._saved_plans: dict[tuple[EngineKey, int], ReallocationPlan] = {}
        self._separate_copies = set(find_separate_copies(experiment).values())
        self._last_changes: dict[
            str, DeviceJob
        ] = {}  # role -> last job that changes its own weights

    def initialize(self) -> None:
        """Prepare all transfers, and initialize roles from the roles that `init_from` names.

        A role on the same mesh as its source is not initialized here, because it was initialized
        when the engines were built. Raises `ConfigError` if the parameters of the two roles of a
        transfer do not match.
        """
        for sync in self._experiment.graph.syncs:
            if not self._has_equal_meshes(sync):
                self._plans.prepare_plan(*self._resolve_sync(sync))
        for place in self._copies:
            self._plans.prepare_plan(
                self._get_own_key(place[0]), place, self._plans.list_trained(place)
            )
        for role, first in self._experiment.init_from.items():
            copy = ParamSync(first, role)
            over = Future[int]()
            if not self._has_equal_meshes(copy):
                self._reallocate(
                    copy, f"initializing {role}", over.set_result, over.set_exception, partly=True
                )
                over.result()
            self.mark_outdated(role, None, whole=True)

    # -- from role to role

    def start_sync(
        self,
        sync: ParamSync,
        done: VersionCallback,
        failed: FailureCallback,
        started: Callable[[], None],
    ) -> None:
        """Start to update a role's parameters from those of another role, as defined by `sync`.

        `started` is called when the transfer begins. `done` is called with the target's new version
        when it has finished, and `failed` with the error if it fails.
        """
        if not self._has_equal_meshes(sync):
            job = self._reallocate(sync, sync.name, done, failed, started)
        else:
            ranks = self._meshes[sync.source].ranks
            on_finished = lambda ends: done(ends[ranks[0]].value)  # noqa: E731
            roles = frozenset({sync.source, sync.target})
            job = DeviceJob(
                sync.name,
                ranks,
                repeat_command(SyncOnSameMesh(sync)),
                on_finished,
                failed,
                started,
                roles=roles,
            )
            self._dispatch.submit(job)
        self.mark_outdated(sync.target, job, whole=True)

    def _reallocate(
        self,
        sync: ParamSync,
        name: str,
        done: VersionCallback,
        failed: FailureCallback,
        started: Callable[[], None] = lambda: None,
        *,
        partly: bool = False,
    ) -> DeviceJob:
        source, target, *_ = what = self._resolve_sync(sync, partly=partly)
        way = self._plans.prepare_plan(*what)
        return self._submit_transfer(
            way, MoveParameters(way.key, source, target, sync.eta), name, done, failed, started
        )

    def _resolve_sync(
        self, sync: ParamSync, *, partly: bool = False
    ) -> tuple[EngineKey, EngineKey, list[str], float]:
        source = self._get_own_key(sync.source)
        target = self._get_own_key(sync.target)
        return source, target, self._plans.list_common(source, target, partly=partly), sync.eta

    def _has_equal_meshes(self, sync: ParamSync) -> bool:
        return self._meshes[sync.source] == self._meshes[sync.target]

    # -- from a role to its copies

    def save_weights(self, role: str, version: int, failed: FailureCallback) -> None:
        """Save a role's current weights before a train step replaces them.

        `version` is the version of these weights. Queued calls on copies of the role will need
        exactly this version. Nothing is saved for a copy that already has it.
        """
        for place in self._separate_copies:
            if place[0] == role and self._copy_versions.get(place) != version:
                source = self._get_own_key(role)
                self._saved_plans[place, version] = way = self._plans.prepare_plan(
                    source, place, self._list_outdated(place)
                )
                job = DeviceJob(
                    f"saving weights of {role!r}",
                    source[1].ranks,
                    repeat_command(SaveParameters(way.key, source, version)),
                    _ignore,
                    failed,
                    roles=frozenset({role}),
                )
                self._dispatch.submit(job)

    def record_training(self, role: str, job: DeviceJob, version: int) -> None:
        """Record that `job` is a train step, which gives the role's weights a new `version`."""
        self.mark_outdated(role, job)
        self._versions[role] = version

    def mark_outdated(self, role: str, job: DeviceJob | None, *, whole: bool = False) -> None:
        """Mark all copies of a role as outdated, because the role's own weights change.

        `job` is the job that changes them, or None if they have changed already. If `whole` is
        True, any parameter can change; otherwise only those that train steps change.
        """
        if job is not None:
            self._last_changes[role] = job
        for place in self._copies:
            if place[0] == role:
                self._stale[place] = whole or self._stale.get(place, False)

    def reset(self) -> None:
        """Forget all versions and saved weights after a restore.

        All copies are marked as outdated.
        """
        self._moved_bytes.clear()
        self._versions.clear()
        self._copy_versions.clear()
        self._weights_of_versions.clear()
        self._saved_plans.clear()
        for role in self._meshes:
            self.mark_outdated(role, None, whole=True)

    def update_copy(
        self, place: EngineKey, failed: FailureCallback, version: int | None = None
    ) -> int | None:
        """Update a copy of a role before a call on the copy is submitted.

        `place` is the role and mesh of the copy. The copy gets the newest weights of its role or,
        if `version` is given, the weights of that version. If it has them already, nothing is sent.
        Returns the number of updates that the copy will have received when the call starts, or None
        if `place` is a role's own engine.
        """
        if place not in self._weights:
            return None
        newest = self._versions.get(place[0], version)
        if place in self._stale and version in (None, newest):
            self._transfer_newest(place, failed)
        elif version is not None and version != self._copy_versions.get(place, newest):
            self._transfer_weights(
                place, self._find_saved_plan(place, version), failed, saved_version=version
            )
        wanted = newest if version is None else version
        if wanted is not None:
            self._copy_versions[place] = wanted
        return self._weights[place]

    def take_moved_bytes(self, place: EngineKey) -> dict[str, float]:
        """Return the bytes of weights that were sent to a copy since the last call of this method.

        They are returned as a metric of the call that uses the copy. `place` is the role and mesh
        of the copy. The result is empty for a role's own engine, which receives no weights.
        """
        if place not in self._weights:
            return {}
        return {WEIGHT_BYTES: float(self._moved_bytes.pop(place, 0))}

    def _find_saved_plan(self, place: EngineKey, version: int) -> ReallocationPlan:
        """Return the plan that sends the saved weights of a version to the copy at `place`.

        The plan is removed from `_saved_plans`. Raises `RunError` if the version was not saved.
        """
        way = self._saved_plans.pop((place, version), None)
        if way is None:
            there = (
                ", ".join(
                    str(of) for other, of in sorted(self._saved_plans, key=str) if other == place
                )
                or "none"
            )
            raise RunError(
                f"a call on {place[1]} needs version {version} of the weights of {place[0]!r}, "
                f"which was not saved; saved versions: "
                f"{there}"
            )
        return way

    def update_running_copy(
        self, place: EngineKey, failed: FailureCallback, version: int | None = None
    ) -> int | None:
        """Update a copy that an interruptible call uses, if the copy is outdated.

        Such a call can switch to newer weights while it runs. The copy is updated before the call
        is submitted and, during the call, after each train step. `place` is the copy's role and
        mesh, and `version` is the oldest version with which the call may start. Returns the number
        of updates that the copy must receive before the call starts, or None for a role's own
        engine.
        """
        if place not in self._separate_copies:
            return self.update_copy(place, failed)
        numbers = self._weights_of_versions.setdefault(place, {})
        if place in self._stale:
            waits = version is not None and self._copy_versions.get(place, -1) < version
            self._transfer_newest(place, failed, holds_up=waits)
            if (newest := self._versions.get(place[0], version)) is not None:
                self._copy_versions[place] = newest
                numbers[newest] = self._weights[place]
        elif version is not None:
            numbers.setdefault(self._copy_versions.setdefault(place, version), self._weights[place])
        known = []
        for of in sorted(numbers):
            if version is not None and of <= version:
                known.append(of)
        for older in known[:-1]:
            del numbers[older]
        return numbers[known[-1]] if known else 0

    def _transfer_newest(
        self, place: EngineKey, failed: FailureCallback, *, holds_up: bool = True
    ) -> None:
        self._transfer_weights(
            place,
            self._plans.prepare_plan(
                self._get_own_key(place[0]), place, self._list_outdated(place)
            ),
            failed,
            holds_up=holds_up,
        )
        del self._stale[place]

    def _transfer_weights(
        self,
        place: EngineKey,
        way: ReallocationPlan,
        failed: FailureCallback,
        *,
        saved_version: int | None = None,
        holds_up: bool = True,
    ) -> None:
        self._weights[place] += 1
        self._moved_bytes[place] = self._moved_bytes.get(place, 0) + way.num_bytes_moved
        what = MoveParameters(
            way.key,
            self._get_own_key(place[0]),
            place,
            weights=self._weights[place],
            saved_version=saved_version,
        )
        name = f"moving the weights of {place[0]!r} to {place[1]}"
        self._submit_transfer(way, what, name, _ignore, failed, holds_up=holds_up)

    def _list_outdated(self, place: EngineKey) -> list[str]:
        """Return the names of the parameters that may be outdated in the copy at `place`."""
        whole = self._stale.get(place, False)
        if whole:
            return self._plans.list_common(self._get_own_key(place[0]), place, partly=False)
        return self._plans.list_trained(place)

    # -- ways

    def list_plans(self, role: str) -> list[tuple[str, ReallocationPlan]]:
        """Return all recurring transfers of a role's weights, as (purpose, plan).

        The purpose is a phrase such as "to ref after actor_train".
        """
        plans = []
        for sync in self._experiment.graph.syncs:
            if sync.source == role and not self._has_equal_meshes(sync):
                plans.append(
                    (
                        f"to {sync.target} after {sync.after}",
                        self._plans.prepare_plan(*self._resolve_sync(sync)),
                    )
                )
        own = self._get_own_key(role)
        written = any(sync.target == role for sync in self._experiment.graph.syncs)
        for place in self._copies:
            if place[0] == role and (written or self._experiment.roles[role].trained):
                calls = []
                for name, c in self._experiment.calls.items():
                    if (c.role, self._experiment.call_meshes[name]) == place:
                        calls.append(c.name)
                if written:
                    names = self._plans.list_common(own, place, partly=False)
                else:
                    names = self._plans.list_trained(place)
                way = self._plans.prepare_plan(own, place, names)
                plans.append(
                    (f"to its copy on {place[1]} for {', '.join(dict.fromkeys(calls))}", way)
                )
        return plans

    def _submit_transfer(
        self,
        way: ReallocationPlan,
        what: MoveParameters,
        name: str,
        done: VersionCallback,
        failed: FailureCallback,
        started: Callable[[], None] = lambda: None,
        *,
        holds_up: bool = True,
    ) -> DeviceJob:
        """Submit a job that transfers parameters, and return the job.

        `way` is the plan of the transfer, and `what` is the command that each device gets. If
        `holds_up` is True, later requests for the two roles wait for the transfer. If some of the
        target's ranks are not ranks of the source, the job starts only after the job that last
        changed the source's weights, so that these ranks are not blocked while the source's ranks
        are busy.
        """
        target = what.target[1].ranks
        source = what.source[1].ranks
        last = self._last_changes.get(what.source[0])
        if last is not None and not set(target) <= set(source):
            after = [last]
        else:
            after = []
        roles = frozenset({what.source[0], what.target[0]} if holds_up else ())
        on_finished = lambda ends: done(ends[target[0]].value)  # noqa: E731

        def on_failed(error: BaseException) -> None:
            failed(self._plans.preparation_errors.get(way.key) or error)

        job = DeviceJob(
            name,
            way.ranks,
            repeat_command(what),
            on_finished,
            on_failed,
            started,
            roles=roles,
            after=after,
        )
        self._dispatch.submit(job)
        return job

    def _get_own_key(self, role: str) -> EngineKey:
        return role, self._meshes[role]


# -- plans


@dataclass(frozen=True)
class ReallocationPlan:
    """Plan for transferring parameters from one engine's ranks to another's.

    Attributes:
        key: Unique name of the plan.
        ranks: All ranks of both engines.
        transfers: Pieces of parameters to transfer.
        num_bytes_moved: Number of bytes sent between devices each time the plan is executed.
        across: Number of these bytes that are sent between machines.
    """

    key: str
    ranks: tuple[int, ...]
    transfers: Sequence[ParameterTransfer]
    num_bytes_moved: int
    across: int

    def __str__(self) -> str:
        if self.across:
            across = f", {self.across:,} of them between machines"
        else:
            across = ""
        return f"{self.num_bytes_moved:,} bytes between devices each time{across}"


class ReallocationPlanCache:
    """Cache of reallocation plans, each of which is created on first use.

    `built` maps each rank to the description of its engines, and `hosts` has the machine of each
    rank. In the methods, an engine is identified by its role and mesh.
    """

    def __init__(
        self,
        dispatch: JobDispatcher,
        experiment: Experiment,
        built: Mapping[int, BuiltEngines],
        hosts: Sequence[str],
    ) -> None:
        self._dispatch = dispatch
        self._experiment = experiment
        self._built = built
        self._hosts = hosts
        self._meshes = experiment.role_meshes
        self._plans: dict[tuple[EngineKey, EngineKey, tuple[str, ...]], ReallocationPlan] = {}
        self.preparation_errors: dict[
            str, BaseException
        ] = {}  # plan key -> error of its preparation

    def prepare_plan(
        self, source: EngineKey, target: EngineKey, names: Sequence[str], eta: float = 1.0
    ) -> ReallocationPlan:
        """Return the plan that transfers the named parameters from `source` to `target`.

        If the plan is not in the cache, it is created and sent to its ranks. `eta` is the weight of
        the source's values in the target (see `MoveParameters`). It is only needed to estimate how
        many bytes the plan will send.
        """
        between = source, target, tuple(names)
        if between not in self._plans:
            chosen = frozenset(names)
            have = self.collect_slices(source, chosen)
            want = self.collect_slices(target, chosen)
            transfers = plan(have, want, node_of=self._get_node)
            itemsize = dict.fromkeys(names, self._compute_itemsize(source[0], target, eta))
            cost = count_traffic(transfers, have, want, itemsize=itemsize, node_of=self._get_node)
            ranks = tuple(sorted({*source[1].ranks, *target[1].ranks}))
            key = f"{source[0]} -> {target[0]}, way {len(self._plans)}"
            self._plans[between] = ReallocationPlan(
                key, ranks, transfers, cost.moved_bytes, cost.across
            )
            name = f"preparing to move {source[0]!r} to {target[0]!r}"

            def on_failed(error: BaseException) -> None:
                self.preparation_errors[key] = error

            command = PrepareReallocation(key, ranks, transfers)
            job = DeviceJob(name, ranks, repeat_command(command), _ignore, on_failed)
            self._dispatch.submit(job)
        return self._plans[between]

    def list_trained(self, place: EngineKey) -> list[str]:
        """Return the names of an engine's trained parameters.

        `place` identifies the engine. If the role's ranks do not report their trained parameters,
        the names of all parameters are returned.
        """
        role = place[0]
        mesh = self._meshes[place[0]]
        names = self.list_common((role, mesh), place, partly=False)
        trained_names = [self._built[rank].trained[role] for rank in mesh.ranks]
        trained = frozenset[str]().union(*(each for each in trained_names if each is not None))
        return [name for name in names if name in trained] if trained else names

    def list_common(self, source: EngineKey, target: EngineKey, *, partly: bool) -> list[str]:
        """Return the names of the parameters that both engines have.

        If `partly` is True, each engine may also have other parameters. Otherwise `ConfigError` is
        raised if the parameters of the engines differ.
        """
        return list_common_parameters(
            source[0],
            self._compute_shapes(source),
            target[0],
            self._compute_shapes(target),
            partly=partly,
        )

    def _compute_shapes(self, place: EngineKey) -> dict[str, tuple[int, ...]]:
        """Return the shape of each whole parameter, computed from the slices of all ranks."""
        shapes: dict[str, tuple[int, ...]] = {}
        for parts in self.collect_slices(place).values():
            for name, part in parts.items():
                ends = tuple(each.stop for each in part)
                shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
        return shapes

    def collect_slices(
        self, place: EngineKey, names: Iterable[str] | None = None
    ) -> dict[int, dict[str, Slice]]:
        """Return the slices of parameters that each rank of an engine holds.

        The result maps ranks to parameter names to slices. If `names` is given, only these
        parameters are included.
        """
        held = {rank: self._built[rank].slices[place] for rank in place[1].ranks}
        slices: dict[int, dict[str, Slice]] = {}
        for rank, parts in held.items():
            slices[rank] = {
                name: part for name, part in parts.items() if names is None or name in names
            }
        return slices

    def _compute_itemsize(self, source: str, target: EngineKey, eta: float) -> int:
        """Return the number of bytes that are sent per element of a parameter.

        Parameters of a trained role are sent from the float32 master weights. If the target's dtype
        is smaller and `eta` is 1, they are rounded to that dtype before they are sent.
        """
        trained = self._experiment.roles[source].trained
        own, wanted = (
            BYTES[self._experiment.roles[role].dtype or "float32"] for role in (source, target[0])
        )
        given = 4 if trained else own
        own_engine = target[1] == self._meshes[target[0]]
        if self._experiment.roles[target[0]].trained and own_engine:
            taken = 4
        else:
            taken = wanted
        return min(given, taken) if eta == 1.0 else given

    def _get_node(self, rank: int) -> int:
        return self._hosts.index(self._hosts[rank])


def _ignore(_: object) -> None:
    """Do nothing; used as the callback of jobs whose result is not needed."""
