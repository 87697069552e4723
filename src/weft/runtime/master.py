"""Master of a run, which schedules the dataflow graph.

It asks `find_ready_firings` which nodes can run, runs them, and keeps the state between steps. It
only deals with nodes, keys and sample ids: tensors stay on the devices, and there is no special
case for any algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from weft.data.batches import BatchLoader
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import GraphError, RunError
from weft.experiment import Experiment
from weft.graph.launch_queue import LaunchQueue, can_run_ahead, choose_first, find_oldest, may_load
from weft.graph.mfc import HostFunction
from weft.graph.ready import (
    Firing,
    IdBuffer,
    find_exhausted_filter,
    find_ready_firings,
    find_surplus,
)
from weft.runtime.calls import WorkerGroup
from weft.runtime.checkpoints import read_state, write_state
from weft.runtime.firings import FiringMetrics, FiringOutcome, StepLedger
from weft.runtime.hosts import HostGroup
from weft.runtime.node_runner import NodeRunner, PrefetchingLoader
from weft.runtime.roles import find_separate_copies
from weft.runtime.store import TensorStore

MASTER_FILE = "master.bin"
WORKERS_FOLDER = "workers"
NUMERICS_KEY = "numerics"


class FiringListener(Protocol):
    """Listener that is notified of finished firings (executions of nodes) and finished steps.

    `on_step_finished` is called with the sample ids of the step while their tensors still exist.
    """

    def on_firing_finished(self, outcome: FiringOutcome, step: int) -> None: ...
    def on_step_finished(self, ids: Sequence[str], step: int) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step, and the progress of the run after it.

    Attributes:
        step: Number of completed steps.
        epoch: Progress in epochs, such as 1.5 in the middle of the second epoch.
        epochs_done: Number of completed epochs.
        seconds: Duration of the step.
        metrics: Metrics of all nodes.
    """

    step: int
    epoch: float
    epochs_done: int
    seconds: float
    metrics: Mapping[str, float]


@dataclass
class RunPosition:
    """Progress of a run, which is saved in recovery points.

    Attributes:
        step: Number of completed steps.
        epochs_done: Number of completed epochs.
        ids_done: Number of sample ids of the current epoch that no node needs any more.
        versions: Number of finished firings (executions) of each node. A firing counts as finished
            when the parameter syncs after it have finished, too. For a node that trains, the number
            serves as the version of the weights.
    """

    step: int = 0
    epochs_done: int = 0
    ids_done: int = 0  # in the current epoch
    # node -> number of finished firings, including their syncs
    versions: dict[str, int] = field(default_factory=dict)


class Master:
    """Scheduler that runs the experiment's graph on the data loader's rows, step by step."""

    def __init__(
        self,
        experiment: Experiment,
        group: WorkerGroup,
        loader: BatchLoader,
        tokenizers: Mapping[str, Tokenizer],
        hosts: HostGroup | None = None,
    ) -> None:
        self._experiment = experiment
        self._graph = experiment.graph
        self._group = group
        self._loader = PrefetchingLoader(loader, experiment.most_epochs)
        self.listener: FiringListener | None = None
        self._runner = NodeRunner(experiment, experiment.graph, group, tokenizers, hosts=hosts)
        self._buffer = IdBuffer()
        self._ledger = StepLedger()
        self._descriptions = TensorStore()
        self.position = RunPosition()
        self._step_of_epoch = 0  # completed steps at the start of the current epoch
        # consecutive epochs without a step, because filters dropped every row
        self._empty_epochs = 0
        self._separate_copies = {
            call: f"{role} on {mesh}"
            for call, (role, mesh) in find_separate_copies(experiment).items()
        }
        self._launch_queue = LaunchQueue(self._graph, self.position.versions, self._separate_copies)
        self._runs_ahead = can_run_ahead(self._graph)
        self._ahead_ids: set[str] = set()  # ids of later steps, set when a step is finished
        # firings of filters whose kept ids are not applied yet
        self._open_filters: list[Firing] = []
        # ids kept by those of `_open_filters` that have finished
        self._kept_ids: dict[Firing, Sequence[str]] = {}
        self._unused_ids: list[str] = []  # ids unused once all decided firings are finished

    @property
    def notes(self) -> list[str]:
        """Messages that are shown to the user at the start of the run."""
        return self._runner.functions.notes

    def step(self) -> StepResult | None:
        """Run one step, and return its result or None if the data are exhausted.

        A step ends when the node that defines steps (`Experiment.steps_follow`) has fired and all
        other work on the samples of this step is done. Calls for later steps may still be running
        if they tolerate older weights. Raises `RunError` naming the node, role and ids if a call
        fails or misses its deadline.
        """
        start = time.perf_counter()
        step_ids = self._decide_step()
        while self._ledger.has_open_firings(self._ahead_ids):
            self._launch_ready_and_wait()
        if step_ids and self.listener is not None:
            self.listener.on_step_finished(step_ids, self.position.step + 1)
        self._discard_unused()
        if step_ids is None:
            return None
        self.position.step += 1
        self._turn_epoch()
        position = self.position
        measured = self._ledger.close_step(self._ahead_ids)
        epoch = position.epochs_done + position.ids_done / max(1, self._loader.num_ids)
        return StepResult(
            position.step, epoch, position.epochs_done, time.perf_counter() - start, measured
        )

    def wait_until_idle(self) -> None:
        """Wait until no node is running, so that the worker group is free for other calls.

        Ids that no node reads any more are removed.
        """
        while self._ledger.has_open_firings():
            self._launch_ready_and_wait()
        self._discard_unused()

    def _decide_step(self) -> Sequence[str] | None:
        """Schedule all firings (executions of nodes) of a step, and return the ids that it uses.

        Returns None if the data are exhausted; the firings that are scheduled then belong to no
        step.
        """
        # ids of this step and earlier ones, set when the node that steps follow is ready
        allowed_ids: set[str] | None = None
        step_ids: tuple[str, ...] = ()
        while True:
            firings = find_ready_firings(
                self._graph, self._buffer, self._buffer.num_finished, self._open_filters
            )
            if allowed_ids is not None:
                firings = [firing for firing in firings if allowed_ids.issuperset(firing.ids)]
            elif self._runs_ahead:
                if self._load_ahead():
                    continue
                firings = choose_first(self._graph, firings)
            for firing in firings:
                if firing.node == self._experiment.steps_follow:
                    step_ids = firing.ids
                    order = list(self._buffer.entries)
                    allowed_ids = set(order[: order.index(step_ids[-1]) + 1])
            if firings:
                self._decide_firings(firings)
            elif self._open_filters:
                self._apply_first_filter()
            elif allowed_ids is not None:
                later_ids = set(self._buffer.entries) - allowed_ids
                self._ahead_ids = later_ids if self._runs_ahead else set()
                return step_ids
            elif not self._load_batch():
                return None

    # -- deciding: the result of a call does not affect the schedule, so the next firings are decided
    #    before it ends. Results of filters do affect it; they are applied one by one, in the order
    #    in which the filters were decided on.

    def _decide_firings(self, firings: Sequence[Firing]) -> None:
        """Schedule these firings (executions of nodes) without waiting for their results.

        Nodes that read their outputs can be scheduled at once, as if the outputs existed already.
        The outputs of a filter are an exception: `_apply_first_filter` must first wait for the
        filter, to find out which ids it kept.
        """
        for firing in firings:
            self._count_rounds(firing.node)
            self._buffer.record_start(firing)
            self._launch_queue.add(firing, self._buffer)
            self._ledger.add_firing(firing)
        for firing in firings:
            if self._can_drop_ids(firing):
                self._open_filters.append(firing)
            else:
                self._finish_decision(firing, firing.ids)
        for firing in firings:
            self._drop_surplus(firing.node)

    def _apply_first_filter(self) -> None:
        """Wait for a scheduled filter to finish, and pass the ids that it kept to later nodes.

        The filter is the one that was scheduled first or, if calls run ahead of training, the one
        with the oldest ids. Raises `RunError` if a filter has used all its sampling rounds
        (`refill_rounds`) and no ids are left to train on.
        """
        if self._runs_ahead:
            firing = find_oldest(self._buffer, self._open_filters)
        else:
            firing = self._open_filters[0]
        while firing not in self._kept_ids:
            self._launch_ready_and_wait()
        self._open_filters.remove(firing)
        self._finish_decision(firing, self._kept_ids.pop(firing))
        exhausted = find_exhausted_filter(self._graph, self._buffer)
        if exhausted is not None:
            raise RunError(
                f"filter {exhausted.name!r}: {exhausted.refill_rounds} rounds of sampling left "
                "nothing to train on; its prompts may all be too easy or too hard, or rewards "
                "never differ; change the data or the reward, or allow more rounds"
            )

    def _can_drop_ids(self, firing: Firing) -> bool:
        node = self._graph.get_node(firing.node)
        return isinstance(node, HostFunction) and self._runner.functions.can_drop_ids(node)

    def _finish_decision(self, firing: Firing, kept_ids: Sequence[str]) -> None:
        node = self._graph.get_node(firing.node)
        self._mark_unused(
            self._buffer.record_finish(firing, kept_ids, node.outputs, len(self._graph.nodes))
        )

    def _count_rounds(self, node: str) -> None:
        """Record the number of sampling rounds that were needed to fill the batch of `node`.

        Several rounds can be needed if a filter before the node removes ids, which are then
        replaced. Without such a filter, nothing is recorded.
        """
        for edge in self._graph.version_edges:
            filter_node = self._graph.find_refilling_filter(edge) if edge.producer == node else None
            if filter_node is not None:
                rounds = float(self._buffer.count_rounds(edge.consumer, node))
                self._ledger.record_measurements(
                    filter_node.name, FiringMetrics({f"rounds/{edge.consumer}": rounds}, 1, 0.0)
                )

    def _drop_surplus(self, node: str) -> None:
        """Remove surplus ids, which are too old for the next execution of the training node `node`.

        There can be a surplus if ids that a filter removed were replaced by a whole batch.
        """
        while self._open_filters and any(
            self._graph.find_refilling_filter(edge)
            for edge in self._graph.version_edges
            if edge.producer == node
        ):
            self._apply_first_filter()
        surplus = find_surplus(self._graph, self._buffer, node)
        self._buffer.drop(surplus)
        self._mark_unused(surplus)

    def _mark_unused(self, ids: Sequence[str]) -> None:
        self._unused_ids += ids
        self.position.ids_done += len(ids)

    # -- running: start every runnable firing; each one that finishes may enable others

    def _launch_ready_and_wait(self) -> None:
        """Start all scheduled firings that can run, then wait for any firing to finish."""
        for queued in self._launch_queue.take():
            self._runner.start(
                queued.firing,
                self._descriptions,
                version=queued.version,
                keeps=queued.needs_old_weights,
            )
        outcome = self._runner.wait()
        firing = outcome.firing
        self.position.versions[firing.node] = self.position.versions.get(firing.node, 0) + 1
        if outcome.outputs is not None:
            self._descriptions.put(outcome.outputs)
        self._ledger.finish_firing(
            firing, FiringMetrics(outcome.metrics, len(firing.ids), outcome.seconds)
        )
        if self._can_drop_ids(firing):
            self._kept_ids[firing] = outcome.kept_ids
        if self.listener is not None:
            self.listener.on_firing_finished(outcome, self.position.step + 1)

    def _discard_unused(self) -> None:
        # Running calls of later steps may still read ids that a filter has dropped.
        read = self._ledger.collect_open_ids()
        unread_ids = [id for id in self._unused_ids if id not in read]
        self._group.discard(unread_ids)
        self._descriptions.discard(unread_ids)
        self._unused_ids = [id for id in self._unused_ids if id in read]

    # -- rows

    def _load_batch(self) -> bool:
        """Add the loader's next batch to the buffer, starting a new epoch if necessary.

        Returns False if there are no batches left.
        """
        if self._buffer.closed:
            if self._buffer.entries:
                raise _build_stuck_error(self._buffer)
            self._ahead_ids = set()
            self.wait_until_idle()  # drop this epoch's ids first: the next epoch reuses them
            self._turn_epoch()
            if self.position.step > self._step_of_epoch:
                self._empty_epochs = 0
            else:
                self._empty_epochs = self._empty_epochs + 1
            self._step_of_epoch = self.position.step
        if self.position.epochs_done >= self._experiment.most_epochs or self._empty_epochs > 1:
            return False
        self._add_rows()
        return True

    def _load_ahead(self) -> bool:
        """Add the loader's next batch if a call that runs ahead of training could start with it.

        Returns whether a batch was added.
        """
        most = self._experiment.control.max_steps
        follow = self._experiment.steps_follow
        steps_left = None if most is None else most - self.position.step
        can_load = may_load(
            self._graph, self._buffer, self._buffer.num_finished, follow, steps_left
        )
        if can_load:
            self._add_rows()
        return can_load

    def _add_rows(self) -> None:
        batch = self._loader.next_batch()
        self._check_keys(batch)
        self._descriptions.put(self._group.put(batch))
        self._buffer.add(batch.ids, batch.keys)
        self._buffer.closed = self._loader.epoch_done

    def _turn_epoch(self) -> None:
        """Advance to the next epoch if all ids of the current one have been processed."""
        if self._buffer.closed and not self._buffer.entries:
            self._buffer.closed = False
            self.position.epochs_done += 1
            self.position.ids_done = 0

    def _check_keys(self, batch: SequenceSample) -> None:
        for key, node in self._graph.find_required_dataset_keys().items():
            if key not in batch.keys:
                raise GraphError(
                    f"node {node!r} needs key {key!r} of the rows, but rows of type "
                    f"{self._experiment.dataset_type!r} have "
                    f"{', '.join(batch.keys)}; choose another dataset.type or another graph"
                )

    # -- recovery points: between steps, with nothing in flight

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write the state that a restart needs to the empty `directory`, along with `extra`.

        Waits until no node is running. Samples that later steps will use are included.
        """
        self.wait_until_idle()
        state = {
            "position": vars(self.position),
            "buffer": self._buffer.state_dict(),
            "books": self._ledger.state_dict(),
            "loader": self._loader.state_dict(),
            "functions": self._runner.functions.state_dict(),
            NUMERICS_KEY: dict(self._group.describe_numerics()),
            "extra": dict(extra),
        }
        write_state(directory / MASTER_FILE, state)
        descriptions = directory / "descriptions"
        descriptions.mkdir()
        for number, sample in enumerate(self._descriptions.iterate_batches()):
            (descriptions / f"{number}.bin").write_bytes(sample.to_bytes())
        (directory / WORKERS_FOLDER).mkdir()
        self._group.snapshot(directory / WORKERS_FOLDER).result()

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Load the state that `save` wrote.

        Returns the saved `extra`, with the numerical settings of the saved run added under the key
        `numerics`.
        """
        state = read_state(directory / MASTER_FILE)
        self._group.restore(directory / WORKERS_FOLDER)
        self.position = RunPosition(**state["position"])
        # steps of the current epoch may have been completed before
        self._step_of_epoch = -1
        self._empty_epochs = 0
        self._launch_queue = LaunchQueue(self._graph, self.position.versions, self._separate_copies)
        self._buffer.load_state_dict(state["buffer"])
        self._ledger.load_state_dict(
            state.get("books", ())
        )  # recovery points of older versions lack this
        self._loader.load_state_dict(state["loader"])
        self._runner.functions.load_state_dict(state["functions"])
        for path in sorted((directory / "descriptions").iterdir(), key=lambda p: int(p.stem)):
            self._descriptions.put(SequenceSample.from_bytes(path.read_bytes()))
        return {**state["extra"], NUMERICS_KEY: state[NUMERICS_KEY]}


def _build_stuck_error(buffer: IdBuffer) -> RunError:
    rows = list(buffer.entries.items())[:4]
    examples = "; ".join(
        f"{id}: through {', '.join(sorted(row.finished)) or 'nothing'}" for id, row in rows
    )
    return RunError(
        f"no node can run on the {len(buffer.entries)} ids that are left of this epoch ({examples})"
    )
