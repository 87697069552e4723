"""Scheduler of a run.

It asks `ready` which nodes can run, runs them, and keeps the state between steps. It knows nodes,
keys and ids only: tensors stay on the devices, and no algorithm is special-cased.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from weft.data.batches import Loader
from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import GraphError, RunError
from weft.experiment import Experiment
from weft.graph.agenda import Agenda
from weft.graph.ahead import first, may_load, oldest, runs_ahead
from weft.graph.mfc import HostFunction
from weft.graph.ready import Buffer, Firing, exhausted, ready, surplus
from weft.runtime.books import Books
from weft.runtime.group import WorkerGroup
from weft.runtime.lanes import own_lanes
from weft.runtime.node_runner import NodeRunner
from weft.runtime.outcome import Outcome
from weft.runtime.prefetch import Prefetched
from weft.runtime.state import read_state, write_state
from weft.runtime.step_metrics import Measured
from weft.runtime.store import TensorStore

MASTER = "master.bin"
WORKERS = "workers"
NUMERICS = "numerics"


class Listener(Protocol):
    """Receiver of finished firings, and of a step's ids while their tensors still exist."""

    def fired(self, outcome: Outcome, step: int) -> None: ...
    def stepped(self, ids: Sequence[str], step: int) -> None: ...


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step, and the position of the run after it."""

    step: int
    epoch: float
    epochs_done: int
    seconds: float
    measured: Mapping[str, float]


@dataclass
class Position:
    """Progress of the run; part of a recovery point."""

    step: int = 0
    epochs_done: int = 0
    ids_done: int = 0  # in the current epoch
    # node -> number of finished firings, including their syncs
    versions: dict[str, int] = field(default_factory=dict)


class Master:
    """Run the experiment's graph over the loader's rows, one step at a time."""

    def __init__(
        self,
        experiment: Experiment,
        group: WorkerGroup,
        loader: Loader,
        tokenizers: Mapping[str, Tokenizer],
    ) -> None:
        self._experiment = experiment
        self._graph = experiment.graph
        self._group = group
        self._loader = Prefetched(loader, experiment.most_epochs)
        self.listener: Listener | None = None
        self._runner = NodeRunner(experiment, experiment.graph, group, tokenizers)
        self._buffer = Buffer()
        self._books = Books()
        self._metas = TensorStore()
        self.position = Position()
        self._step_of_epoch = 0  # completed steps at the start of the current epoch
        # consecutive epochs without a step, because filters dropped every row
        self._barren_epochs = 0
        self._lanes = {
            call: f"{role} on {mesh}" for call, (role, mesh) in own_lanes(experiment).items()
        }
        self._agenda = Agenda(self._graph, self.position.versions, self._lanes)
        self._runs_ahead = runs_ahead(self._graph)
        self._ahead: set[str] = set()  # ids of later steps, set when a step is finished
        self._open: list[Firing] = []  # firings of filters whose kept ids are not yet applied
        self._kept: dict[Firing, Sequence[str]] = {}  # ids kept by finished filters in _open
        self._gone: list[str] = []  # ids unused once all decided firings are finished

    @property
    def notes(self) -> list[str]:
        """Messages for the user at the start of the run."""
        return self._runner.functions.notes

    def step(self) -> StepResult | None:
        """Run one step; return None if the data are exhausted.

        A step ends when the node that steps follow has fired and everything its ids need is done.
        Calls of later steps that tolerate older weights may still be running. Raises `RunError`
        naming node, role and ids if a call fails or misses its deadline.
        """
        begun = time.perf_counter()
        if not self._until_stepped():
            return None
        self.position.step += 1
        self._turn_epoch()
        now = self.position
        measured = self._books.close(self._ahead)
        epoch = now.epochs_done + now.ids_done / max(1, self._loader.num_ids)
        return StepResult(now.step, epoch, now.epochs_done, time.perf_counter() - begun, measured)

    def settle(self) -> None:
        """Wait until no firing is running, so that the group can be used otherwise."""
        while self._books.are_open():
            self._go_on()
        self._let_go()

    def _until_stepped(self) -> bool:
        # ids of this step and earlier ones, set when the node that steps follow is ready
        old: set[str] | None = None
        stepped: tuple[str, ...] = ()
        while True:
            firings = ready(self._graph, self._buffer, self._buffer.finished, self._open)
            if old is not None:
                firings = [firing for firing in firings if old.issuperset(firing.ids)]
            elif self._runs_ahead:
                if self._load_ahead():
                    continue
                firings = first(self._graph, firings)
            for firing in firings:
                if firing.node == self._experiment.steps_follow:
                    stepped = firing.ids
                    order = list(self._buffer.entries)
                    old = set(order[: order.index(stepped[-1]) + 1])
            if firings:
                self._decide(firings)
            elif self._open:
                self._close_first()
            elif old is not None:
                self._ahead = set(self._buffer.entries) - old if self._runs_ahead else set()
                self._finish(stepped)
                return True
            elif not self._load():
                self._finish()
                return False

    # -- deciding: the result of a call does not affect the schedule, so the next firings are decided
    #    before it ends. Results of filters do affect it; they are applied one by one, in the order
    #    in which the filters were decided on.

    def _decide(self, firings: Sequence[Firing]) -> None:
        """Mark these firings as decided; ids that filters keep are settled later."""
        for firing in firings:
            self._count_rounds(firing.node)
            self._buffer.start(firing)
            self._agenda.add(firing, self._buffer)
            self._books.decide(firing)
        for firing in firings:
            if self._may_drop(firing):
                self._open.append(firing)
            else:
                self._close(firing, firing.ids)
        for firing in firings:
            self._drop_surplus(firing.node)

    def _close_first(self) -> None:
        """Wait for the filter that was decided on first and apply the ids that it kept."""
        if self._runs_ahead:
            firing = oldest(self._buffer, self._open)
        else:
            firing = self._open[0]
        while firing not in self._kept:
            self._go_on()
        self._open.remove(firing)
        self._close(firing, self._kept.pop(firing))
        spent = exhausted(self._graph, self._buffer)
        if spent is not None:
            raise RunError(
                f"filter {spent.name!r}: {spent.refill_rounds} rounds of sampling left nothing to "
                f"train on; its prompts "
                "may all be too easy or too hard, or rewards never differ; change the data or the "
                "reward, or allow more rounds"
            )

    def _may_drop(self, firing: Firing) -> bool:
        node = self._graph.node(firing.node)
        return isinstance(node, HostFunction) and self._runner.functions.may_drop(node)

    def _close(self, firing: Firing, kept: Sequence[str]) -> None:
        node = self._graph.node(firing.node)
        self._forget(self._buffer.finish(firing, kept, node.outputs, len(self._graph.nodes)))

    def _count_rounds(self, node: str) -> None:
        """Log the sampling rounds behind a training node that fires, if a filter refills its batch."""
        for edge in self._graph.version_edges:
            filter = self._graph.refills(edge) if edge.producer == node else None
            if filter is not None:
                rounds = float(self._buffer.rounds(edge.consumer, node))
                self._books.note(filter.name, Measured({f"rounds/{edge.consumer}": rounds}, 1, 0.0))

    def _drop_surplus(self, node: str) -> None:
        """Drop ids that a refill sampled beyond the training node's batch."""
        while self._open and any(
            self._graph.refills(edge) for edge in self._graph.version_edges if edge.producer == node
        ):
            self._close_first()
        gone = surplus(self._graph, self._buffer, node)
        self._buffer.drop(gone)
        self._forget(gone)

    def _forget(self, gone: Sequence[str]) -> None:
        self._gone += gone
        self.position.ids_done += len(gone)

    # -- running: start every runnable firing; each one that finishes may enable others

    def _go_on(self) -> None:
        """Start every runnable firing, then wait for the next one to finish."""
        for each in self._agenda.take():
            self._runner.start(each.firing, self._metas, version=each.version, keeps=each.keeps)
        outcome = self._runner.wait()
        firing = outcome.firing
        self.position.versions[firing.node] = self.position.versions.get(firing.node, 0) + 1
        if outcome.outputs is not None:
            self._metas.put(outcome.outputs)
        self._books.end(firing, Measured(outcome.metrics, len(firing.ids), outcome.seconds))
        if self._may_drop(firing):
            self._kept[firing] = outcome.kept
        if self.listener is not None:
            self.listener.fired(outcome, self.position.step + 1)

    def _finish(self, stepped: Sequence[str] = ()) -> None:
        """Finish all firings of the current step, then drop ids that no firing needs."""
        while self._books.are_open(self._ahead):
            self._go_on()
        if stepped and self.listener is not None:
            self.listener.stepped(stepped, self.position.step + 1)
        self._let_go()

    def _let_go(self) -> None:
        # Running calls of later steps may still read ids that a filter has dropped.
        read = self._books.open_ids()
        gone = [id for id in self._gone if id not in read]
        self._group.discard(gone)
        self._metas.discard(gone)
        self._gone = [id for id in self._gone if id in read]

    # -- rows

    def _load(self) -> bool:
        """Add the loader's next batch to the buffer; return False at the end of the last epoch."""
        if self._buffer.closed:
            if self._buffer.entries:
                raise _stuck(self._buffer)
            self._ahead = set()
            self._finish()  # drop this epoch's ids first: the next epoch reuses them
            self._turn_epoch()
            if self.position.step > self._step_of_epoch:
                self._barren_epochs = 0
            else:
                self._barren_epochs = self._barren_epochs + 1
            self._step_of_epoch = self.position.step
        if self.position.epochs_done >= self._experiment.most_epochs or self._barren_epochs > 1:
            return False
        self._take_in_rows()
        return True

    def _load_ahead(self) -> bool:
        """Add the loader's next batch if a call may run ahead on it; return whether it was added."""
        most = self._experiment.control.max_steps
        follow = self._experiment.steps_follow
        left = None if most is None else most - self.position.step
        may = may_load(self._graph, self._buffer, self._buffer.finished, follow, left)
        if may:
            self._take_in_rows()
        return may

    def _take_in_rows(self) -> None:
        batch = self._loader.next_batch()
        self._check_keys(batch)
        self._metas.put(self._group.put(batch))
        self._buffer.add(batch.ids, batch.keys)
        self._buffer.closed = self._loader.epoch_done

    def _turn_epoch(self) -> None:
        """Start the next epoch if all ids of the current one are processed."""
        if self._buffer.closed and not self._buffer.entries:
            self._buffer.closed = False
            self.position.epochs_done += 1
            self.position.ids_done = 0

    def _check_keys(self, batch: SequenceSample) -> None:
        for key, node in self._graph.required_dataset_keys().items():
            if key not in batch.keys:
                raise GraphError(
                    f"node {node!r} needs key {key!r} of the rows, but rows of type "
                    f"{self._experiment.dataset_type!r} have "
                    f"{', '.join(batch.keys)}; choose another dataset.type or another graph"
                )

    # -- recovery points: between steps, with nothing in flight

    def save(self, directory: Path, extra: Mapping[str, Any]) -> None:
        """Write the state that a restart needs to the empty `directory`; `load` returns `extra`.

        Waits for running firings. Samples made ahead of training are included.
        """
        self.settle()
        state = {
            "position": vars(self.position),
            "buffer": self._buffer.state_dict(),
            "books": self._books.state_dict(),
            "loader": self._loader.state_dict(),
            "functions": self._runner.functions.state_dict(),
            NUMERICS: dict(self._group.numerics()),
            "extra": dict(extra),
        }
        write_state(directory / MASTER, state)
        descriptions = directory / "descriptions"
        descriptions.mkdir()
        for number, sample in enumerate(self._metas.batches()):
            (descriptions / f"{number}.bin").write_bytes(sample.to_bytes())
        (directory / WORKERS).mkdir()
        self._group.snapshot(directory / WORKERS).result()

    def load(self, directory: Path) -> Mapping[str, Any]:
        """Load the state that `save` wrote.

        Returns its `extra`, plus the saved run's numerical settings under `numerics`.
        """
        state = read_state(directory / MASTER)
        self._group.restore(directory / WORKERS)
        self.position = Position(**state["position"])
        # steps of the current epoch may have been completed before
        self._step_of_epoch = -1
        self._barren_epochs = 0
        self._agenda = Agenda(self._graph, self.position.versions, self._lanes)
        self._buffer.load_state_dict(state["buffer"])
        self._books.load_state_dict(
            state.get("books", ())
        )  # recovery points of older versions lack this
        self._loader.load_state_dict(state["loader"])
        self._runner.functions.load_state_dict(state["functions"])
        for path in sorted((directory / "descriptions").iterdir(), key=lambda p: int(p.stem)):
            self._metas.put(SequenceSample.from_bytes(path.read_bytes()))
        return {**state["extra"], NUMERICS: state[NUMERICS]}


def _stuck(buffer: Buffer) -> RunError:
    rows = list(buffer.entries.items())[:4]
    shown = "; ".join(
        f"{id}: through {', '.join(sorted(row.done)) or 'nothing'}" for id, row in rows
    )
    return RunError(
        f"no node can run on the {len(buffer.entries)} ids that are left of this epoch ({shown})"
    )
