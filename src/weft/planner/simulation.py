"""Simulation of several steps of a run on a placement: when each call runs, and why it waits.

The replay takes the decisions of a run's master (`weft.runtime.master`) with the same functions,
`weft.graph.ready` and `weft.graph.launch_queue`, and advances a clock by estimated durations:

- A step begins when all work on the samples of the step before has ended. Calls that tolerate stale
  weights run ahead of training.
- Each device runs its calls in the order in which they reach it. In a run without stale weights,
  this is the order of the graph.
- Newly trained weights move to a call's devices before the call; neither they nor the devices that
  send the weights compute meanwhile.
- Filters keep all samples, and parameter syncs between roles take no time.

Steps are those in the middle of a run: each finds newly trained weights. Devices that take part in
the same calls are simulated as one, so the cost does not depend on the number of devices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.graph.graph import DataflowGraph
from weft.graph.launch_queue import LaunchQueue, can_run_ahead, choose_first, may_load
from weft.graph.ready import Firing, IdBuffer, find_ready_firings
from weft.observe.shown_plan import CALL, HOST_FUNCTION, WEIGHTS
from weft.planner.placed_calls import DeviceRange, PlacedCalls, locate_meshes
from weft.planner.problem import PlacementEstimate, PlacementProblem
from weft.topology import Mesh

# Reasons for which a span did not start earlier
INPUT, DEVICES, VERSION, STEP, ORDER = "input", "devices", "version", "step", "order"
MAX_STEPS = 200  # steps after which a run that does not repeat itself counts as steady
DIGITS = 9  # significant decimal digits by which two states are compared


@dataclass(frozen=True)
class SimulatedSpan:
    """Activity on devices or on the host, with the reason why it did not start earlier.

    Attributes:
        name: Name of the graph's node.
        kind: `CALL`, `HOST_FUNCTION`, or `WEIGHTS` for the transfer of weights before a call.
        role: Role of the call; "" for a host function.
        step: Step during which it ends, from 1.
        groups: Indices of the device ranges that it uses.
        start: Seconds since the start of the first step.
        seconds: Duration.
        reason: `INPUT`, `DEVICES`, `VERSION`, `STEP` or `ORDER`; "" if it did not wait.
        waits_for: Node for which it waited; "" for `STEP`.
        waited: For `DEVICES`, seconds that it was ready before; otherwise, seconds that its devices
            were idle before.
    """

    name: str
    kind: str
    role: str
    step: int
    groups: tuple[int, ...]
    start: float
    seconds: float
    reason: str = ""
    waits_for: str = ""
    waited: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.seconds

    def describe_wait(self) -> str:
        """Return a phrase about the wait before the span, or "" if there was none."""
        if not self.waited:
            return ""
        match self.reason:
            case "input":
                return f"waits for the outputs of {self.waits_for}"
            case "devices":
                return f"ready earlier, but its devices run {self.waits_for}"
            case "version":
                return f"waits for the weights that {self.waits_for} trains"
            case "order":
                return "waits for an earlier call of its role"
            case _:
                return "waits for the end of the step before"


@dataclass(frozen=True)
class RunSimulation:
    """Result of a replay.

    Attributes:
        groups: Ranges of devices; spans refer to them by index.
        spans: Activities in the order in which they start.
        step_ends: Time at which each step ends, in seconds.
        step_seconds: Duration of a step once steps repeat.
    """

    groups: Sequence[DeviceRange]
    spans: Sequence[SimulatedSpan]
    step_ends: Sequence[float]
    step_seconds: float

    @property
    def seconds(self) -> float:
        """Duration of all steps, with calls that run ahead at their end."""
        return max([*self.step_ends, *(span.end for span in self.spans)], default=0.0)

    def locate(self, meshes: Mapping[str, Mesh]) -> dict[str, tuple[int, ...]]:
        """Return the indices of the ranges of devices of each call in `meshes`."""
        located = locate_meshes(meshes.values(), self.groups)
        return {call: located[mesh] for call, mesh in meshes.items()}


def simulate(
    graph: DataflowGraph,
    follow: str,
    problem: PlacementProblem,
    estimate: PlacementEstimate,
    *,
    steps: int,
    host_seconds: Mapping[str, float] | None = None,
) -> RunSimulation:
    """Replay `steps` steps of a run on the placement of `estimate`.

    `follow` is the node that defines the steps (`Experiment.steps_follow`), and `problem` is the
    problem to which the placement belongs. Calls that `estimate` lacks take no time, and so do host
    functions that `host_seconds` lacks; it maps names of host functions to seconds a step.
    """
    placed = PlacedCalls.build(graph, problem, estimate)
    replay = _StepReplay(graph, follow, placed, host_seconds or {})
    ends: list[float] = []
    while len(ends) < steps:
        replay.run_step()
        ends.append(replay.now)
    spans = sorted([*replay.spans, *replay.list_running()], key=lambda span: span.start)
    step_seconds = _find_steady_seconds(replay) if replay.runs_ahead else ends[0]
    return RunSimulation(placed.groups, spans, ends, step_seconds)


def _find_steady_seconds(replay: _StepReplay) -> float:
    """Run more steps until they repeat, and return the mean duration of a step from then on.

    Steps repeat if the same work is under way at the end of two of them. If that does not happen,
    the result is the mean of the later half of `MAX_STEPS` steps.
    """
    states: dict[object, tuple[int, float]] = {}
    ends = []
    for step in range(MAX_STEPS):
        state = replay.describe_state()
        if state in states:
            earlier_step, earlier_time = states[state]
            return (replay.now - earlier_time) / (step - earlier_step)
        states[state] = (step, replay.now)
        replay.run_step()
        ends.append(replay.now)
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


# -- the replay


@dataclass
class _StepDecisions:
    """Decides the firings (executions of nodes) of each step like the master of a run.

    `decide_step` follows `Master._decide_step`. Sample ids denote equal parts of a batch.
    """

    graph: DataflowGraph
    follow: str
    buffer: IdBuffer = field(default_factory=IdBuffer)
    ahead_ids: set[str] = field(default_factory=set)  # ids that later steps train on

    def decide_step(self, queue: LaunchQueue | None) -> list[Firing]:
        """Return the firings decided in the next step, in order, and add them to `queue`."""
        decided: list[Firing] = []
        step_ids: set[str] | None = None
        while True:
            firings = find_ready_firings(self.graph, self.buffer, self.buffer.num_finished, ())
            if step_ids is not None:
                firings = [firing for firing in firings if step_ids.issuperset(firing.ids)]
            elif queue is not None:
                if may_load(self.graph, self.buffer, self.buffer.num_finished, self.follow, None):
                    self._add_rows()
                    continue
                firings = choose_first(self.graph, firings)
            for firing in firings:
                if firing.node == self.follow:
                    ids = list(self.buffer.entries)
                    step_ids = set(ids[: ids.index(firing.ids[-1]) + 1])
            if firings:
                self._record(firings, queue)
                decided += firings
            elif step_ids is not None:
                self.ahead_ids = set(self.buffer.entries) - step_ids if queue is not None else set()
                return decided
            else:
                self._add_rows()

    def _record(self, firings: Sequence[Firing], queue: LaunchQueue | None) -> None:
        for firing in firings:
            self.buffer.record_start(firing)
            if queue is not None:
                queue.add(firing, self.buffer)
        for firing in firings:
            outputs = self.graph.get_node(firing.node).outputs
            self.buffer.record_finish(firing, firing.ids, outputs, len(self.graph.nodes))

    def _add_rows(self) -> None:
        count = self.graph.get_node(self.follow).batch_size or 1
        first = self.buffer.num_batches
        ids = [f"{first}/{number}" for number in range(count)]
        self.buffer.add(ids, self.graph.find_required_dataset_keys())


def _reduce_batches(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph with batch sizes divided by their greatest common divisor."""
    unit = math.gcd(*(node.batch_size for node in graph.nodes)) or 1
    nodes = [replace(node, batch_size=node.batch_size // unit) for node in graph.nodes]
    return replace(graph, nodes=nodes)


class _StepReplay:
    """Clock, devices and unfinished work of a simulated run."""

    def __init__(
        self,
        graph: DataflowGraph,
        follow: str,
        placed: PlacedCalls,
        host_seconds: Mapping[str, float],
    ) -> None:
        self._graph = _reduce_batches(graph)
        self._placed = placed
        self._host_seconds = host_seconds
        self._decisions = _StepDecisions(self._graph, follow)
        self.runs_ahead = can_run_ahead(graph)
        self._finished: dict[str, int] = {}
        lanes = {name: call.lane for name, call in placed.calls.items() if call.lane is not None}
        self._queue = LaunchQueue(self._graph, self._finished, lanes)
        self.now = 0.0
        self._step = 1
        self._step_start = 0.0
        self._first_seconds = 1.0  # duration of the first step
        # By range of devices: time at which it is free, and the node that it runs until then
        self._free = [0.0] * len(placed.groups)
        self._last_node = [""] * len(placed.groups)
        self._ends: dict[tuple[str, str], float] = {}  # (node, id) -> end
        self._last_ends: dict[str, float] = {}  # node -> end of the last firing that has ended
        self._num_started = 0
        self._running: list[tuple[float, int, Firing]] = []  # heap of (end, number, firing)
        self._open: dict[Firing, None] = {}  # decided and unfinished
        self._spans_of: dict[Firing, list[SimulatedSpan]] = {}
        self._versions: dict[str, int] = {}  # call -> version of the weights that it has received
        self.spans: list[SimulatedSpan] = []

    def run_step(self) -> None:
        """Decide a step, and run until all work on its samples has ended."""
        self._step_start = self.now
        if self.runs_ahead:
            self._run_ahead()
        else:
            self._run_in_order()
        # Concurrent calls share the cores of a machine, so its total work bounds the step.
        self.now = max(self.now, self._step_start + self._placed.core_seconds)
        if self._step == 1:
            self._first_seconds = self.now or 1.0
        self._step += 1

    def _run_in_order(self) -> None:
        """Run a step in which the devices take their calls in the order of the graph."""
        position = {name: number for number, name in enumerate(self._graph.order)}
        firings = self._decisions.decide_step(None)
        for firing in sorted(firings, key=lambda firing: position[firing.node]):
            ready = self._step_start
            for end, _ in self._find_input_ends(firing):
                ready = max(ready, end)
            self._start(firing, ready, self._count_trained(firing))
        while self._running:
            self._finish_first()

    def _run_ahead(self) -> None:
        """Run a step in which calls start as the queue of a run's master releases them."""
        for firing in self._decisions.decide_step(self._queue):
            self._open[firing] = None
        while any(self._decisions.ahead_ids.isdisjoint(firing.ids) for firing in self._open):
            for released in self._queue.take():
                version = released.version
                if version is None:
                    version = self._count_trained(released.firing)
                self._start(released.firing, self.now, version)
            self._finish_first()

    def _finish_first(self) -> None:
        """Advance the clock to the next end of a firing."""
        end, _, firing = heapq.heappop(self._running)
        self.now = max(self.now, end)
        self._open.pop(firing, None)
        self._finished[firing.node] = self._finished.get(firing.node, 0) + 1
        self._last_ends[firing.node] = end
        for span in self._spans_of.pop(firing):
            self.spans.append(replace(span, step=self._step))

    def _find_input_ends(self, firing: Firing) -> list[tuple[float, str]]:
        """Return when each producer of the inputs of `firing` ends, with the producer's name."""
        ends = []
        for name in self._graph.find_producers(firing.node):
            ends.append((max(self._ends[name, id] for id in firing.ids), name))
        return ends

    def _count_trained(self, firing: Firing) -> int:
        """Return the version of the newest weights for a call: finished train steps of its role."""
        edges = self._graph.find_version_edges(firing.node)
        return sum(self._finished.get(edge.producer, 0) for edge in edges)

    def _start(self, firing: Firing, ready: float, version: int) -> None:
        """Start a firing that is ready at time `ready`, as soon as its devices are free."""
        call = self._placed.calls.get(firing.node)
        share = self._compute_share(firing)
        if call is None:
            takes = self._host_seconds.get(firing.node, 0.0) * share
            spans = [SimulatedSpan(firing.node, HOST_FUNCTION, "", 0, (), ready, takes)]
            end = ready + takes
        else:
            moves = 0.0
            if call.senders and self._versions.get(firing.node) != version:
                moves = call.transfer_seconds
                self._versions[firing.node] = version
            together = call.groups
            if moves:
                together = tuple(dict.fromkeys([*call.groups, *call.senders]))
            busiest = max(together, key=lambda group: self._free[group])
            begin = max(ready, self._free[busiest])
            devices_free = max(self._free[group] for group in call.groups)
            wait = self._explain_wait(firing, ready, busiest, devices_free)
            spans = []
            if moves:
                spans.append(
                    SimulatedSpan(firing.node, WEIGHTS, call.role, 0, together, begin, moves, *wait)
                )
                wait = ("", "", 0.0)
                for group in together:
                    self._free[group] = begin + moves
                    self._last_node[group] = f"the transfer of weights to {firing.node}"
            takes = call.seconds * share
            end = begin + moves + takes
            start = begin + moves
            spans.append(
                SimulatedSpan(firing.node, CALL, call.role, 0, call.groups, start, takes, *wait)
            )
            for group in call.groups:
                self._free[group] = end
                self._last_node[group] = firing.node
        for id in firing.ids:
            self._ends[firing.node, id] = end
        self._spans_of[firing] = spans
        self._num_started += 1
        heapq.heappush(self._running, (end, self._num_started, firing))

    def _compute_share(self, firing: Firing) -> float:
        """Return the share of a step's samples that a firing processes."""
        step_size = self._graph.get_node(self._decisions.follow).batch_size
        if not step_size or not self._graph.get_node(firing.node).batch_size:
            return 1.0
        return len(firing.ids) / step_size

    def _explain_wait(
        self, firing: Firing, ready: float, busiest: int, devices_free: float
    ) -> tuple[str, str, float]:
        """Return the reason, the node and the seconds of the wait before a call.

        The call is ready at time `ready`, and its devices are free at time `devices_free`. The
        range `busiest` of these and the sending devices is free last.
        """
        free = self._free[busiest]
        if free > ready:
            return DEVICES, self._last_node[busiest], free - ready
        causes = []
        for end, name in self._find_input_ends(firing):
            causes.append((end, INPUT, name))
        for edge in self._graph.find_version_edges(firing.node):
            causes.append((self._last_ends.get(edge.producer, 0.0), VERSION, edge.producer))
        causes.append((self._step_start, STEP, ""))
        time, reason, name = max(causes, key=lambda cause: cause[0])
        if time < ready:
            reason, name = ORDER, ""
        return reason, name, ready - devices_free

    def list_running(self) -> list[SimulatedSpan]:
        """Return the spans that have started and not ended."""
        spans = []
        for span in itertools.chain(*self._spans_of.values()):
            if span.start < self.now:
                spans.append(replace(span, step=self._step))
        return spans

    def describe_state(self) -> object:
        """Return the state on which the next steps depend, with times from the end of this step."""
        running = []
        for end, _, firing in self._running:
            running.append((self._round(end), firing.node, firing.step - self._step))
        waiting = sorted((firing.node, firing.step - self._step) for firing in self._open)
        versions = sorted((call, version - self._step) for call, version in self._versions.items())
        free = tuple(self._round(time) for time in self._free)
        return free, tuple(sorted(running)), tuple(waiting), tuple(versions)

    def _round(self, time: float) -> float:
        """Return the time from the end of the current step, rounded in units of the first step."""
        return round(max(0.0, time - self.now) / self._first_seconds, DIGITS)
