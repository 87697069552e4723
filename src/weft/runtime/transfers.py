"""Plans of parameter transfers between engines, and the jobs that execute them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.experiment import Experiment
from weft.planner.memory import BYTES
from weft.realloc.plan import ParameterTransfer, count_traffic, plan
from weft.runtime.commands import BuiltEngines, MoveParameters, PrepareReallocation
from weft.runtime.dispatch import DeviceJob, JobDispatcher, repeat_command
from weft.runtime.roles import EngineKey, list_common_parameters
from weft.topology import Slice

VersionCallback = Callable[[int], None]  # called with the target's new version
FailureCallback = Callable[[BaseException], None]


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


class TransferRunner:
    """Creator of plans of parameter transfers, and of the jobs that execute them.

    A plan is created on first use and kept.

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
        # plan key -> error of its preparation
        self._preparation_errors: dict[str, BaseException] = {}
        # role -> last job that changes its own weights
        self.last_changes: dict[str, DeviceJob] = {}

    def get_own_key(self, role: str) -> EngineKey:
        return role, self._meshes[role]

    def prepare_plan(
        self, source: EngineKey, target: EngineKey, names: Sequence[str], eta: float = 1.0
    ) -> ReallocationPlan:
        """Return the plan that transfers the named parameters from `source` to `target`.

        If the plan does not exist yet, it is created and sent to its ranks. `eta` is the weight of
        the source's values in the target (see `MoveParameters`). It is only needed to estimate how
        many bytes the plan will send.
        """
        plan_id = source, target, tuple(names)
        if plan_id not in self._plans:
            chosen = frozenset(names)
            have = self.collect_slices(source, chosen)
            want = self.collect_slices(target, chosen)
            transfers = plan(have, want, node_of=self._get_node)
            itemsize = dict.fromkeys(names, self._compute_itemsize(source[0], target, eta))
            cost = count_traffic(transfers, have, want, itemsize=itemsize, node_of=self._get_node)
            ranks = tuple(sorted({*source[1].ranks, *target[1].ranks}))
            key = f"{source[0]} -> {target[0]}, plan {len(self._plans)}"
            self._plans[plan_id] = ReallocationPlan(
                key, ranks, transfers, cost.moved_bytes, cost.across
            )
            name = f"preparing to move {source[0]!r} to {target[0]!r}"

            def on_failed(error: BaseException) -> None:
                self._preparation_errors[key] = error

            command = PrepareReallocation(key, ranks, transfers)
            job = DeviceJob(name, ranks, repeat_command(command), ignore_result, on_failed)
            self._dispatch.submit(job)
        return self._plans[plan_id]

    def run(
        self,
        reallocation: ReallocationPlan,
        command: MoveParameters,
        name: str,
        done: VersionCallback,
        failed: FailureCallback,
        started: Callable[[], None] = lambda: None,
        *,
        holds_up: bool = True,
    ) -> DeviceJob:
        """Submit a job that executes a plan, and return the job.

        `reallocation` is the plan of the transfers, `command` the command that each device gets. If
        `holds_up` is True, later requests for the two roles wait for the transfer. If some of the
        target's ranks are not ranks of the source, the job starts only after the job that last
        changed the source's weights, so that these ranks are not blocked while the source's ranks
        are busy.
        """
        target = command.target[1].ranks
        source = command.source[1].ranks
        last = self.last_changes.get(command.source[0])
        if last is not None and not set(target) <= set(source):
            after = [last]
        else:
            after = []
        roles = frozenset({command.source[0], command.target[0]} if holds_up else ())
        on_finished = lambda ends: done(ends[target[0]].value)  # noqa: E731

        def on_failed(error: BaseException) -> None:
            failed(self._preparation_errors.get(reallocation.key) or error)

        job = DeviceJob(
            name,
            reallocation.ranks,
            repeat_command(command),
            on_finished,
            on_failed,
            started,
            roles=roles,
            after=after,
        )
        self._dispatch.submit(job)
        return job

    def list_trained(self, place: EngineKey) -> list[str]:
        """Return the names of an engine's trained parameters.

        `place` identifies the engine. If the role's ranks do not report their trained parameters,
        the names of all parameters are returned.
        """
        role = place[0]
        mesh = self._meshes[place[0]]
        names = self.list_common((role, mesh), place, partly=False)
        trained_names = [self._built[rank].trained[role] for rank in mesh.ranks]
        trained = frozenset[str]().union(*(part for part in trained_names if part is not None))
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
                ends = tuple(interval.stop for interval in part)
                shapes[name] = tuple(map(max, ends, shapes.get(name, ends)))
        return shapes

    def collect_slices(
        self, place: EngineKey, names: Iterable[str] | None = None
    ) -> dict[int, dict[str, Slice]]:
        """Return the slices of parameters that each rank of an engine holds.

        The result maps ranks to parameter names to slices. If `names` is given, only these
        parameters are included.
        """
        parts_of_rank = {rank: self._built[rank].slices[place] for rank in place[1].ranks}
        slices: dict[int, dict[str, Slice]] = {}
        for rank, parts in parts_of_rank.items():
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
        source_width, target_width = (
            BYTES[self._experiment.roles[role].dtype or "float32"] for role in (source, target[0])
        )
        # Trained roles have float32 master weights; copies of them do not.
        if trained:
            source_width = 4
        is_own_engine = target[1] == self._meshes[target[0]]
        if self._experiment.roles[target[0]].trained and is_own_engine:
            target_width = 4
        return min(source_width, target_width) if eta == 1.0 else source_width

    def _get_node(self, rank: int) -> int:
        return self._hosts.index(self._hosts[rank])


def ignore_result(_: object) -> None:
    """Do nothing; used as the callback of jobs whose result is not needed."""
