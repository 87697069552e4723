"""Parameter transfers between meshes (sets of devices with a layout).

They are syncs from one role to another, and updates of a role's copies on other meshes. A plan of
each transfer is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from weft.errors import RunError
from weft.experiment import Experiment
from weft.graph.mfc import ParamSync
from weft.runtime.commands import BuiltEngines, MoveParameters, SaveParameters, SyncOnSameMesh
from weft.runtime.dispatch import DeviceJob, JobDispatcher, repeat_command
from weft.runtime.roles import EngineKey, find_separate_copies
from weft.runtime.transfers import (
    FailureCallback,
    ReallocationPlan,
    TransferRunner,
    VersionCallback,
    ignore_result,
)

# metric of calls on copies of a role: bytes of its weights that their devices received
WEIGHT_BYTES = "num_weight_bytes"


class ParameterTransfers:
    """Scheduler of parameter transfers. It is not thread-safe.

    `built` maps each rank to the description of its engines, and `hosts` lists the machine of each
    rank. `copies` schedules the updates of the roles' copies on other meshes.
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
        self._transfers = TransferRunner(dispatch, experiment, built, hosts)
        self._meshes = experiment.role_meshes
        self.copies = RoleCopies(dispatch, experiment, self._transfers)

    def initialize(self) -> None:
        """Prepare all transfers, and initialize roles from the roles that `init_from` names.

        A role on the same mesh as its source is not initialized here, because it was initialized
        when the engines were built. Raises `ConfigError` if the parameters of the two roles of a
        transfer do not match.
        """
        for sync in self._experiment.graph.syncs:
            if not self._has_equal_meshes(sync):
                self._transfers.prepare_plan(*self._resolve_sync(sync))
        self.copies.prepare_plans()
        for role, source in self._experiment.init_from.items():
            copy = ParamSync(source, role)
            finished = Future[int]()
            if not self._has_equal_meshes(copy):
                self._reallocate(
                    copy,
                    f"initializing {role}",
                    finished.set_result,
                    finished.set_exception,
                    partly=True,
                )
                finished.result()
            self.copies.mark_outdated(role, None, whole=True)

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
        self.copies.mark_outdated(sync.target, job, whole=True)

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
                        self._transfers.prepare_plan(*self._resolve_sync(sync)),
                    )
                )
        return plans + self.copies.list_plans(role)

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
        source, target, *_ = transfer = self._resolve_sync(sync, partly=partly)
        reallocation = self._transfers.prepare_plan(*transfer)
        return self._transfers.run(
            reallocation,
            MoveParameters(reallocation.key, source, target, sync.eta),
            name,
            done,
            failed,
            started,
        )

    def _resolve_sync(
        self, sync: ParamSync, *, partly: bool = False
    ) -> tuple[EngineKey, EngineKey, list[str], float]:
        source = self._transfers.get_own_key(sync.source)
        target = self._transfers.get_own_key(sync.target)
        return source, target, self._transfers.list_common(source, target, partly=partly), sync.eta

    def _has_equal_meshes(self, sync: ParamSync) -> bool:
        return self._meshes[sync.source] == self._meshes[sync.target]


class RoleCopies:
    """Scheduler of the updates of roles' copies on other meshes.

    A copy is updated when a call on it is submitted: to the newest weights of its role, or to those
    of the version that the call needs. In the methods, `place` identifies an engine by its role and
    mesh, and `failed` is a function that is called with the error if a transfer fails.
    """

    def __init__(
        self, dispatch: JobDispatcher, experiment: Experiment, transfers: TransferRunner
    ) -> None:
        self._dispatch = dispatch
        self._experiment = experiment
        self._transfers = transfers
        # copy -> number of its weight updates once all submitted jobs are finished
        self._weights = dict.fromkeys(experiment.copies, 0)
        # copy -> bytes that were sent to it since its last call
        self._moved_bytes: dict[EngineKey, int] = {}
        # copies that have parameters
        self._copies = [
            place for place in self._weights if any(self._transfers.collect_slices(place).values())
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

    def prepare_plans(self) -> None:
        """Prepare the transfers of the parameters that train steps change."""
        for place in self._copies:
            self._transfers.prepare_plan(
                self._transfers.get_own_key(place[0]), place, self._transfers.list_trained(place)
            )

    def save_weights(self, role: str, version: int, failed: FailureCallback) -> None:
        """Save a role's current weights before a train step replaces them.

        `version` is the version of these weights. Queued calls on copies of the role will need
        exactly this version. Nothing is saved for a copy that already has it.
        """
        for place in self._separate_copies:
            if place[0] == role and self._copy_versions.get(place) != version:
                source = self._transfers.get_own_key(role)
                self._saved_plans[place, version] = reallocation = self._transfers.prepare_plan(
                    source, place, self._list_outdated(place)
                )
                job = DeviceJob(
                    f"saving weights of {role!r}",
                    source[1].ranks,
                    repeat_command(SaveParameters(reallocation.key, source, version)),
                    ignore_result,
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
            self._transfers.last_changes[role] = job
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
        for role in self._experiment.role_meshes:
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
        new_version = newest if version is None else version
        if new_version is not None:
            self._copy_versions[place] = new_version
        return self._weights[place]

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

    def take_moved_bytes(self, place: EngineKey) -> dict[str, float]:
        """Return the bytes of weights that were sent to a copy since the last call of this method.

        They are returned as a metric of the call that uses the copy. `place` is the role and mesh
        of the copy. The result is empty for a role's own engine, which receives no weights.
        """
        if place not in self._weights:
            return {}
        return {WEIGHT_BYTES: float(self._moved_bytes.pop(place, 0))}

    def list_plans(self, role: str) -> list[tuple[str, ReallocationPlan]]:
        """Return the recurring transfers to copies of a role, as (purpose, plan)."""
        plans = []
        source = self._transfers.get_own_key(role)
        is_synced = any(sync.target == role for sync in self._experiment.graph.syncs)
        for place in self._copies:
            if place[0] == role and (is_synced or self._experiment.roles[role].trained):
                calls = []
                for name, call in self._experiment.calls.items():
                    if (call.role, self._experiment.call_meshes[name]) == place:
                        calls.append(call.name)
                if is_synced:
                    names = self._transfers.list_common(source, place, partly=False)
                else:
                    names = self._transfers.list_trained(place)
                reallocation = self._transfers.prepare_plan(source, place, names)
                plans.append(
                    (
                        f"to its copy on {place[1]} for {', '.join(dict.fromkeys(calls))}",
                        reallocation,
                    )
                )
        return plans

    def _find_saved_plan(self, place: EngineKey, version: int) -> ReallocationPlan:
        """Return the plan that sends the saved weights of a version to the copy at `place`.

        The plan is removed from `_saved_plans`. Raises `RunError` if the version was not saved.
        """
        reallocation = self._saved_plans.pop((place, version), None)
        if reallocation is None:
            saved_versions = []
            for other_place, saved_version in sorted(self._saved_plans, key=str):
                if other_place == place:
                    saved_versions.append(str(saved_version))
            raise RunError(
                f"a call on {place[1]} needs version {version} of the weights of {place[0]!r}, "
                f"which was not saved; saved versions: {', '.join(saved_versions) or 'none'}"
            )
        return reallocation

    def _transfer_newest(
        self, place: EngineKey, failed: FailureCallback, *, holds_up: bool = True
    ) -> None:
        self._transfer_weights(
            place,
            self._transfers.prepare_plan(
                self._transfers.get_own_key(place[0]), place, self._list_outdated(place)
            ),
            failed,
            holds_up=holds_up,
        )
        del self._stale[place]

    def _transfer_weights(
        self,
        place: EngineKey,
        reallocation: ReallocationPlan,
        failed: FailureCallback,
        *,
        saved_version: int | None = None,
        holds_up: bool = True,
    ) -> None:
        self._weights[place] += 1
        self._moved_bytes[place] = self._moved_bytes.get(place, 0) + reallocation.num_bytes_moved
        command = MoveParameters(
            reallocation.key,
            self._transfers.get_own_key(place[0]),
            place,
            weights=self._weights[place],
            saved_version=saved_version,
        )
        name = f"moving the weights of {place[0]!r} to {place[1]}"
        self._transfers.run(reallocation, command, name, ignore_result, failed, holds_up=holds_up)

    def _list_outdated(self, place: EngineKey) -> list[str]:
        """Return the names of the parameters that may be outdated in the copy at `place`."""
        whole = self._stale.get(place, False)
        if whole:
            return self._transfers.list_common(
                self._transfers.get_own_key(place[0]), place, partly=False
            )
        return self._transfers.list_trained(place)
