"""Runner of graph nodes, and work in background threads.

Model function calls run in the worker group. Host functions run in this process, each firing
(execution of a node) in a separate thread; some can begin their work when a call announces early
outputs.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from weft.data.batches import BatchLoader
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import RunError
from weft.experiment import Experiment
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef, Node
from weft.graph.ready import Firing
from weft.host.base import (
    HasNotes,
    HostCallable,
    HostContext,
    KeepsAll,
    SupportsPrefetch,
    make_host_function,
)
from weft.interfaces.base import MFCResult
from weft.runtime.calls import (
    SECONDS,
    STARTED,
    OutputsAnnounced,
    Task,
    TaskFailed,
    TaskFinished,
    TaskStarted,
    TensorSource,
    WorkerGroup,
    get_minibatches,
    read_inputs,
    to_edge_outputs,
)
from weft.runtime.firings import FiringOutcome, describe_firing
from weft.runtime.hosts import HostGroup
from weft.runtime.split import split

T = TypeVar("T")


def start_in_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run `function` in a daemon thread named `name` and return a future of its result."""
    future: Future[T] = Future()

    def run_task() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)

    threading.Thread(target=run_task, name=name, daemon=True).start()
    return future


class PrefetchingLoader:
    """Wrapper of a data loader that loads one batch ahead in the background.

    It loads batches for at most `epochs` epochs, which may be infinite. Errors of the wrapped
    loader are raised by `next_batch`. Nothing else may use the wrapped loader. The saved state is
    the position after the last batch that `next_batch` returned.
    """

    def __init__(self, loader: BatchLoader, epochs: float) -> None:
        self._loader = loader
        self._epochs = epochs
        self._next_batch: Future[SequenceSample] | None = None
        self._read_position()

    def _read_position(self) -> None:
        """Store the wrapped loader's position.

        This must not be called while a batch is being loaded in the background.
        """
        self.epoch_done = self._loader.epoch_done
        self.num_ids = self._loader.num_ids
        self._state: Mapping[str, Any] = self._loader.state_dict()

    def next_batch(self) -> SequenceSample:
        """Return the next batch and start loading the one after it."""
        if self._next_batch is None:
            batch = self._loader.next_batch()
        else:
            batch = self._next_batch.result()
        self._next_batch = None
        self._read_position()
        if self._loader.epoch < self._epochs:
            self._next_batch = start_in_thread(self._loader.next_batch, "weft-loader")
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's position after the last batch that `next_batch` returned."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved position, and discard a batch that was loaded ahead."""
        if self._next_batch is not None:
            self._next_batch.exception()  # wait: it must not advance the loader after the restore
            self._next_batch = None
        self._loader.load_state_dict(dict(state))
        self._read_position()


DEFAULT_DEADLINE_SECONDS = 6 * 3600.0  # default deadline of a node


class NodeRunner:
    """Runner of the nodes of one graph.

    The worker group identifies each call of the graph by `prefix` followed by the node's name. The
    prefix distinguishes the calls of the evaluation graph ("eval/") from those of the training
    graph (""). With `hosts`, firings end in the order in which they end on the first host.
    """

    def __init__(
        self,
        experiment: Experiment,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        prefix: str = "",
        hosts: HostGroup | None = None,
    ) -> None:
        self._graph = graph
        self._group = group
        self._prefix = prefix
        self._seed = experiment.control.seed
        self.functions = HostFunctionRunner(
            graph, group, tokenizers, experiment.data_role, self._seed, prefix, hosts
        )
        self._hosts = hosts
        # Firings that ended here and that `wait` has not returned yet, by task.
        self._ended: dict[Task, FiringOutcome] = {}
        self._ranks = {
            node.name: experiment.call_meshes[prefix + node.name].layout.data
            for node in graph.list_model_calls()
        }
        self._minibatches = {node.name: get_minibatches(node) for node in graph.list_model_calls()}
        self._running_firings: dict[Task, _RunningFiring] = {}  # unfinished task -> firing

    def start(
        self,
        firing: Firing,
        metas: TensorSource,
        *,
        version: int | None = None,
        keeps: bool = False,
    ) -> None:
        """Start a firing (execution of a node).

        `metas` is the store that has the metadata of the firing's ids. `version` and `keeps` are
        passed to `WorkerGroup.submit`.
        """
        node = self._graph.get_node(firing.node)
        if isinstance(node, MFCDef):
            run = self._register(firing, node, self._prefix + node.name)
            batch = read_inputs(metas, node, firing.ids)
            ranks = self._ranks[node.name]
            minibatches = self._minibatches[node.name]
            parts = split(
                batch, minibatches, ranks, seed=self._seed, role=node.role, step=firing.step
            )
            self._group.submit(*run.task, parts, version=version, keeps=keeps)
            self._start_syncs(run)
        else:
            run = self._register(firing, node, node.name)
            self.functions.start(node, firing, run.task)

    def wait(self) -> FiringOutcome:
        """Wait until any firing has finished, including the syncs after it; return its outcome.

        On a host that is not the first, wait for the firing that the first host has decided on.

        If a firing failed, its error is raised. Raises `RunError` naming the node if a deadline has
        passed.
        """
        decided: Task | None = None
        if self._hosts is not None and not self._hosts.is_first:
            name, step = self._hosts.decide(list)
            decided = (name, step)
        while decided is None or decided not in self._ended:
            next_due = min(self._running_firings.values(), key=lambda run: run.expires_at)
            seconds_left = max(0.0, next_due.expires_at - time.monotonic())
            try:
                event = self._group.events.get(
                    timeout=None if math.isinf(seconds_left) else seconds_left
                )
            except queue.Empty:
                raise self._build_overdue_error(next_due) from None
            if isinstance(event, OutputsAnnounced):
                self.functions.prefetch(event)
                continue
            run = self._running_firings[event.task]
            if isinstance(event, TaskStarted):
                if event.task == run.task:
                    deadline_s = run.node.deadline_s
                    if deadline_s is None:
                        deadline_s = DEFAULT_DEADLINE_SECONDS
                    run.expires_at = time.monotonic() + deadline_s
                continue
            del self._running_firings[event.task]
            run.tasks.remove(event.task)
            if isinstance(event, TaskFailed):
                raise event.error
            if event.task == run.task:
                run.expires_at, run.outcome = math.inf, self._build_outcome(run, event.result)
            if run.outcome is not None and not run.tasks:
                self._ended[run.task] = run.outcome
                decided = decided or run.task
        if self._hosts is not None and self._hosts.is_first:
            task = decided
            self._hosts.decide(lambda: list(task))
        return self._ended.pop(decided)

    def _register(self, firing: Firing, node: Node, name: str) -> _RunningFiring:
        run = _RunningFiring(firing, node, (name, firing.step))
        self._add_task(run, run.task)
        return run

    def _add_task(self, run: _RunningFiring, task: Task) -> None:
        run.tasks.add(task)
        self._running_firings[task] = run

    def _start_syncs(self, run: _RunningFiring) -> None:
        for sync in self._graph.syncs:
            if sync.after == run.node.name:
                self._add_task(run, (sync.name, run.firing.step))
                self._group.sync(sync, run.firing.step)

    def _build_outcome(
        self, run: _RunningFiring, result: MFCResult | FiringOutcome
    ) -> FiringOutcome:
        if isinstance(result, FiringOutcome):
            self._start_syncs(run)
            return result
        metrics = dict(result.metrics)
        started = metrics.pop(STARTED)
        seconds = metrics.pop(SECONDS)
        return FiringOutcome(
            run.firing, result.outputs, metrics, started, seconds, run.firing.ids, result.seen
        )

    def _build_overdue_error(self, run: _RunningFiring) -> RunError:
        deadline_s = run.node.deadline_s
        if deadline_s is not None:
            limit = f"its deadline_s={deadline_s:g} seconds; raise it"
        else:
            limit = f"{DEFAULT_DEADLINE_SECONDS:g} seconds; set deadline_s"
        firing = describe_firing(run.node, run.firing)
        message = f"{firing} did not finish within {limit}, or find out what is blocking"
        if isinstance(run.node, MFCDef):
            return self._group.build_overdue_error(*run.task, message)
        return RunError(message)


@dataclass
class _RunningFiring:
    """Firing (execution of a node) that has not finished.

    Attributes:
        firing: Name of the node, ids of the processed samples, and index of the firing.
        node: Node that is executed.
        task: Identifier by which events refer to the execution of the node.
        tasks: Identifiers of all unfinished tasks: the execution of the node, and the parameter
            syncs that follow it.
        expires_at: Deadline of the node, as a time of the monotonic clock in seconds; infinite while
            the node is not running.
        outcome: Result of the node once it has finished.
    """

    firing: Firing
    node: Node
    task: Task
    tasks: set[Task] = field(default_factory=set)
    expires_at: float = math.inf  # on the monotonic clock
    outcome: FiringOutcome | None = None


class HostFunctionRunner:
    """Runner of a graph's host functions.

    `by_node` maps node names to functions. `prefix` is put before the names of the graph's model
    calls, to distinguish those of the evaluation graph ("eval/") from those of the training graph
    (""). With `hosts`, functions run on the first host alone, which shares their results.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        data_role: str,
        seed: int,
        prefix: str,
        hosts: HostGroup | None = None,
    ) -> None:
        self._hosts = hosts
        self._graph = graph
        self._group = group
        self._prefix = prefix
        self._seed = seed
        self._tokenizers = tokenizers
        self._data_role = data_role
        nodes = []
        for node in graph.nodes:
            if isinstance(node, HostFunction):
                nodes.append(node)
        self.by_node: dict[str, HostCallable] = {
            node.name: make_host_function(node.function, node.args) for node in nodes
        }
        # call -> functions that start on its early outputs
        self._prefetches: dict[str, list[HostFunction]] = {}
        # (host function, id) -> early start
        self._started_ids: dict[tuple[str, str], Future[None]] = {}
        for node in nodes:
            self._start_prefetches(node)

    def start(self, node: HostFunction, firing: Firing, task: Task) -> None:
        """Start a firing (execution of a node) in a new thread.

        The thread reports events for `task`; the result is a `FiringOutcome`.
        """
        started = time.time()
        clock = time.perf_counter()
        description = describe_firing(node, firing)
        batch = read_inputs(self._group, node, firing.ids)
        context = self._build_context(node, firing.step)

        def run_and_report() -> None:
            self._group.events.put(TaskStarted(task))
            try:
                self._group.events.put(TaskFinished(task, run_function()))
            except BaseException as error:
                self._group.events.put(TaskFailed(task, error))

        def run_function() -> FiringOutcome:
            try:
                result = self._call(node, firing, batch, context)
                seconds = time.perf_counter() - clock
                outputs = to_edge_outputs(node, result, firing.ids, filters=self.can_drop_ids(node))
            except RunError as error:
                raise RunError(f"{description}: {error}") from error
            except Exception as error:
                error.add_note(f"in {description}")
                raise
            # Store the outputs and list the ids that the function kept.
            output_ids = None if result is None else set(result.ids)
            kept_ids = tuple(id for id in firing.ids if output_ids is None or id in output_ids)
            if outputs is not None and outputs.keys:
                meta = self._group.put(outputs)
            else:
                meta = None
            return FiringOutcome(firing, meta, context.metrics, started, seconds, kept_ids)

        threading.Thread(target=run_and_report, name=description, daemon=True).start()

    def _call(
        self, node: HostFunction, firing: Firing, batch: SequenceSample, context: HostContext
    ) -> SequenceSample | None:
        """Run a function on a whole batch, after waiting for its early starts."""

        def call() -> SequenceSample | None:
            for early_start in [self._started_ids.pop((node.name, id), None) for id in firing.ids]:
                if early_start is not None:
                    early_start.result()
            return self.by_node[node.name](batch, context)

        if self._hosts is None:
            return call()
        ids = hashlib.sha256("\n".join(firing.ids).encode()).hexdigest()
        key = f"{self._prefix}{node.name}/{firing.step}/{ids}"
        return self._hosts.share_outputs(key, call, context.metrics)

    @property
    def notes(self) -> list[str]:
        """Messages of the host functions that are shown to the user at the start of the run."""
        result: list[str] = []
        for function in self.by_node.values():
            if isinstance(function, HasNotes):
                result.extend(function.notes)
        return result

    def can_drop_ids(self, node: HostFunction) -> bool:
        """Return whether the node's function is a filter, which may drop ids."""
        return not isinstance(self.by_node[node.name], KeepsAll)

    def prefetch(self, announced: OutputsAnnounced) -> None:
        """Let host functions begin their work on early outputs of a call that is still running.

        The event `announced` reports these outputs.
        """
        if self._hosts is not None and not self._hosts.is_first:
            return
        for node in self._prefetches.get(announced.call, ()):
            function = self.by_node[node.name]
            ids = announced.outputs.ids
            assert isinstance(function, SupportsPrefetch)
            early_start = start_in_thread(
                partial(
                    function.begin, read_inputs(self._group, node, ids), self._build_context(node)
                ),
                f"host function {node.function!r}",
            )
            self._started_ids.update(((node.name, id), early_start) for id in ids)

    def _start_prefetches(self, node: HostFunction) -> None:
        """Request early outputs of a model call, if the function of `node` can start with them.

        The function must support prefetching (`SupportsPrefetch`), and the keys that it needs to
        start must all be outputs of one model call or keys of the dataset.
        """
        function = self.by_node[node.name]
        if not isinstance(function, SupportsPrefetch):
            return
        part = replace(node, input_keys=function.begins_with, optional_keys=())
        makers = set()
        for maker in self._graph.nodes:
            if set(maker.outputs) & set(part.inputs):
                makers.add(maker.name)
        if len(makers) == 1 and isinstance(self._graph.get_node(*makers), MFCDef):
            call = self._prefix + makers.pop()
            self._prefetches.setdefault(call, []).append(part)
            self._group.announce_outputs(call)

    def _build_context(self, node: HostFunction, step: int = 0) -> HostContext:
        tokenizer = self._tokenizers[node.tokenizer_role or self._data_role]
        return HostContext(step, self._seed, tokenizer, node.deadline_s)

    def state_dict(self) -> dict[str, Any]:
        return {name: function.state_dict() for name, function in self.by_node.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, function in self.by_node.items():
            function.load_state_dict(state[name])
