"""Runner of a graph's host functions.

Each firing (execution of a node) runs in a thread of its own. Some functions can begin their work
when a call announces early outputs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from weft.data.tokenizer import Tokenizer
from weft.errors import RunError
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef
from weft.graph.ready import Firing
from weft.host.base import (
    HasNotes,
    HostCallable,
    HostContext,
    KeepsAll,
    SupportsPrefetch,
    make_host_function,
)
from weft.runtime import background
from weft.runtime.firings import FiringOutcome, describe_firing
from weft.runtime.group import OutputsAnnounced, Task, WorkerGroup, run_and_report
from weft.runtime.node_data import read_inputs, to_edge_outputs


class HostFunctionRunner:
    """Runner of a graph's host functions.

    `by_node` maps node names to functions. `prefix` is put before the names of the graph's model
    calls, to distinguish those of the evaluation graph ("eval/") from those of the training graph
    ("").
    """

    def __init__(
        self,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        data_role: str,
        seed: int,
        prefix: str,
    ) -> None:
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
            n.name: make_host_function(n.function, n.args) for n in nodes
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
        what = describe_firing(node, firing)
        batch = read_inputs(self._group, node, firing.ids)
        context = self._build_context(node, firing.step)

        def run_function() -> FiringOutcome:
            try:
                # Wait for early starts, then run the function on the whole batch.
                for begun in [self._started_ids.pop((node.name, id), None) for id in firing.ids]:
                    if begun is not None:
                        begun.result()
                result = self.by_node[node.name](batch, context)
                seconds = time.perf_counter() - clock
                outputs = to_edge_outputs(node, result, firing.ids, filters=self.can_drop_ids(node))
            except RunError as error:
                raise RunError(f"{what}: {error}") from error
            except Exception as error:
                error.add_note(f"in {what}")
                raise
            # Store the outputs and list the ids that the function kept.
            left = None if result is None else set(result.ids)
            kept_ids = tuple(id for id in firing.ids if left is None or id in left)
            if outputs is not None and outputs.keys:
                meta = self._group.put(outputs)
            else:
                meta = None
            return FiringOutcome(firing, meta, context.metrics, started, seconds, kept_ids)

        threading.Thread(
            target=run_and_report,
            args=(task, run_function, self._group.events),
            name=what,
            daemon=True,
        ).start()

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
        for node in self._prefetches.get(announced.call, ()):
            function = self.by_node[node.name]
            ids = announced.outputs.ids
            assert isinstance(function, SupportsPrefetch)
            begun = background.start_in_thread(
                partial(
                    function.begin, read_inputs(self._group, node, ids), self._build_context(node)
                ),
                f"host function {node.function!r}",
            )
            self._started_ids.update(((node.name, id), begun) for id in ids)

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
