"""Running of graph nodes: model function calls in the group, host functions in this process."""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.data.tokenizer import Tokenizer
from weft.errors import RunError
from weft.experiment import Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import MFCDef, Node
from weft.graph.ready import Firing
from weft.interfaces.base import MFCResult
from weft.runtime.check import wanted_minibatches
from weft.runtime.edges import Shelf, read_inputs
from weft.runtime.events import Announced, Event, Failed, Started, Task
from weft.runtime.group import SECONDS, STARTED, WorkerGroup
from weft.runtime.host_functions import HostFunctions
from weft.runtime.outcome import Outcome, told
from weft.runtime.split import split

LONGEST_SECONDS = 6 * 3600.0  # default deadline of a node


@dataclass
class _UnderWay:
    """Unfinished firing with the tasks that it waits for: its own and the following syncs."""

    firing: Firing
    node: Node
    own: Task
    tasks: set[Task] = field(default_factory=set)
    expires: float | None = None  # on the monotonic clock
    outcome: Outcome | None = None


class NodeRunner:
    """Run the nodes of one graph.

    `prefix` is prepended to the graph's call names in the group.
    """

    def __init__(
        self,
        experiment: Experiment,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        prefix: str = "",
    ) -> None:
        self._graph = graph
        self._group = group
        self._prefix = prefix
        self._seed = experiment.control.seed
        self.functions = HostFunctions(
            graph, group, tokenizers, experiment.data_role, self._seed, prefix
        )
        self._ranks = {
            node.name: experiment.mesh_of(node).layout.data for node in graph.model_calls()
        }
        self._minibatches = {node.name: wanted_minibatches(node) for node in graph.model_calls()}
        self._under_way: dict[Task, _UnderWay] = {}  # unfinished task -> firing

    def start(
        self, firing: Firing, metas: Shelf, *, version: int | None = None, keeps: bool = False
    ) -> None:
        """Start a firing; `metas` has the metadata of its ids.

        `version` and `keeps` are passed to `WorkerGroup.submit`.
        """
        node = self._graph.node(firing.node)
        if isinstance(node, MFCDef):
            run = self._register(firing, node, self._prefix + node.name)
            batch = read_inputs(metas, node, firing.ids)
            ranks = self._ranks[node.name]
            wanted = self._minibatches[node.name]
            parts = split(batch, wanted, ranks, seed=self._seed, role=node.role, step=firing.step)
            self._group.submit(*run.own, parts, version=version, keeps=keeps)
            self._start_syncs(run)
        else:
            run = self._register(firing, node, node.name)
            self.functions.start(node, firing, run.own)

    @property
    def idle(self) -> bool:
        """True if no firing is running."""
        return not self._under_way

    def wait(self) -> Outcome:
        """Wait for the next firing to finish, including its syncs, and return its outcome.

        Raises the error of a failed firing, naming the node, or `RunError` if a deadline has
        passed.
        """
        while True:
            event = self._next_event()
            if isinstance(event, Announced):
                self.functions.prefetch(event)
                continue
            run = self._under_way[event.task]
            if isinstance(event, Started):
                if event.task == run.own:
                    own = run.node.deadline_s
                    run.expires = time.monotonic() + (LONGEST_SECONDS if own is None else own)
                continue
            del self._under_way[event.task]
            run.tasks.remove(event.task)
            if isinstance(event, Failed):
                raise event.error
            if event.task == run.own:
                run.expires, run.outcome = None, self._outcome(run, event.result)
            if run.outcome is not None and not run.tasks:
                return run.outcome

    def _register(self, firing: Firing, node: Node, name: str) -> _UnderWay:
        run = _UnderWay(firing, node, (name, firing.step))
        self._expect(run, run.own)
        return run

    def _expect(self, run: _UnderWay, task: Task) -> None:
        run.tasks.add(task)
        self._under_way[task] = run

    def _start_syncs(self, run: _UnderWay) -> None:
        for sync in self._graph.syncs:
            if sync.after == run.node.name:
                self._expect(run, (sync.name, run.firing.step))
                self._group.sync(sync, run.firing.step)

    def _outcome(self, run: _UnderWay, result: MFCResult | Outcome) -> Outcome:
        if isinstance(result, Outcome):
            self._start_syncs(run)
            return result
        metrics = dict(result.metrics)
        started = metrics.pop(STARTED)
        seconds = metrics.pop(SECONDS)
        return Outcome(
            run.firing, result.outputs, metrics, started, seconds, run.firing.ids, result.seen
        )

    def _next_event(self) -> Event:
        """Return the next event; raise the deadline's error if none arrives before it."""
        bounded = [
            (run.expires, run) for run in self._under_way.values() if run.expires is not None
        ]
        if not bounded:
            return self._group.events.get()
        expires, first = min(bounded, key=lambda each: each[0])
        try:
            return self._group.events.get(timeout=max(0.0, expires - time.monotonic()))
        except queue.Empty:
            raise self._overdue(first) from None

    def _overdue(self, run: _UnderWay) -> RunError:
        own = run.node.deadline_s
        if own is not None:
            late = f"its deadline_s={own:g} seconds; raise it"
        else:
            late = f"{LONGEST_SECONDS:g} seconds; set deadline_s"
        what = (
            f"{told(run.node, run.firing)} did not finish within {late}, or find out what is "
            f"blocking"
        )
        if isinstance(run.node, MFCDef):
            return self._group.overdue(*run.own, what)
        return RunError(what)
