"""One firing from start to end: a model function call through the group, or a host function in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from weft.data.sample import SequenceSample
from weft.data.tokenizer import Tokenizer
from weft.errors import RunError
from weft.graph.graph import DataflowGraph
from weft.graph.mfc import HostFunction, MFCDef
from weft.graph.ready import Firing
from weft.host.base import Beginner, HostCallable, HostContext, make_host_function
from weft.interfaces.base import MFCResult
from weft.runtime import waiting
from weft.runtime.edges import on_edges, read_inputs
from weft.runtime.group import SECONDS, STARTED, SampleMeta, WorkerGroup


@dataclass(frozen=True)
class Outcome:
    """What a firing did: descriptions of its outputs (None where it made no keys), metrics, and when it ran."""

    firing: Firing
    outputs: SampleMeta | None
    metrics: Mapping[str, float]
    started: float  # seconds since the epoch
    seconds: float
    kept: tuple[str, ...]  # ids that a filter let pass; all of them otherwise


class Fires:
    """Runs the nodes of one graph. `prefix` is what the group knows the graph's calls by, beside their names."""

    def __init__(
        self,
        graph: DataflowGraph,
        group: WorkerGroup,
        tokenizers: Mapping[str, Tokenizer],
        data_role: str,
        seed: int,
        prefix: str = "",
    ) -> None:
        self._graph, self._group, self._prefix, self._seed = graph, group, prefix, seed
        self._tokenizers, self._data_role = tokenizers, data_role
        self.functions: dict[str, HostCallable] = {
            node.name: make_host_function(node.function, node.args)
            for node in graph.nodes
            if isinstance(node, HostFunction)
        }
        self._begun: dict[tuple[str, str], Future[None]] = {}  # host function and id that it has begun with
        for node in graph.nodes:
            if isinstance(node, HostFunction):
                self._let_begin(node)

    def _let_begin(self, node: HostFunction) -> None:
        """Have a function that can begin early hear of the call that makes what it begins with, where it is one call."""
        function = self.functions[node.name]
        if not isinstance(function, Beginner):
            return
        part = replace(node, input_keys=function.begins_with, optional_keys=())
        makers = {maker.name for maker in self._graph.nodes if set(maker.outputs) & set(part.inputs)}
        if len(makers) != 1 or not isinstance(self._graph.node(*makers), MFCDef):
            return

        def hear(meta: SampleMeta) -> None:
            batch, context = read_inputs(self._group, part, meta.ids), self._context(node)
            begun = waiting.begin(lambda: function.begin(batch, context), f"host function {node.function!r}")
            self._begun.update(((node.name, id), begun) for id in meta.ids)

        self._group.listen(self._prefix + makers.pop(), hear)

    def _context(self, node: HostFunction, step: int = 0) -> HostContext:
        tokenizer = self._tokenizers[node.tokenizer_role or self._data_role]
        return HostContext(step, self._seed, tokenizer, node.deadline_s)

    def start(self, firing: Firing, meta: SampleMeta) -> Callable[[], Outcome]:
        """Begin; what is returned waits for the end. A host function runs in a thread of its own, so that it and the calls
        of other nodes go on at the same time."""
        node = self._graph.node(firing.node)
        if isinstance(node, MFCDef):
            future = self._group.submit(self._prefix + node.name, firing.step, [[meta]])
            return lambda: self._finish(node, firing, future)
        return self._begin_host(node, firing)

    def _finish(self, node: MFCDef, firing: Firing, future: Future[MFCResult]) -> Outcome:
        result = waiting.wait(future, node.deadline_s, told(firing, f"role {node.role!r}"))
        metrics = dict(result.metrics)
        started, seconds = metrics.pop(STARTED), metrics.pop(SECONDS)
        return Outcome(firing, result.outputs, metrics, started, seconds, firing.ids)

    def _begin_host(self, node: HostFunction, firing: Firing) -> Callable[[], Outcome]:
        started, clock = time.time(), time.perf_counter()
        what = told(firing, f"host function {node.function!r}")
        batch = read_inputs(self._group, node, firing.ids)
        context = self._context(node, firing.step)

        def work() -> tuple[SequenceSample | None, float]:
            for begun in [self._begun.pop((node.name, id), None) for id in firing.ids]:
                if begun is not None:
                    begun.result()
            return self.functions[node.name](batch, context), time.perf_counter() - clock

        future = waiting.begin(work, what)

        def end() -> Outcome:
            left = None if node.deadline_s is None else max(0.0, node.deadline_s - (time.perf_counter() - clock))
            try:
                made, seconds = waiting.wait(future, left, what, node.deadline_s)
                outputs = on_edges(node, made, firing.ids, filters=True)
            except RunError as error:
                raise RunError(f"{what}: {error}") from error
            except Exception as error:
                error.add_note(f"in {what}")
                raise
            kept = firing.ids if made is None else tuple(id for id in firing.ids if id in set(made.ids))
            meta = self._group.put(outputs) if outputs is not None and outputs.keys else None
            return Outcome(firing, meta, context.metrics, started, seconds, kept)

        return end

    def state_dict(self) -> dict[str, Any]:
        return {name: function.state_dict() for name, function in self.functions.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, function in self.functions.items():
            function.load_state_dict(state[name])


def told(firing: Firing, what: str) -> str:
    """A firing in the words of an error."""
    shown = ", ".join(firing.ids[:4]) + (", ..." if len(firing.ids) > 4 else "")
    return f"node {firing.node!r} ({what}, {len(firing.ids)} ids: {shown})"
