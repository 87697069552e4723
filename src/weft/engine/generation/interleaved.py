"""Generation by several generators on one network, whose steps are interleaved.

While one generator's tokens are sent between ranks, the passes of the other generators are
computed, which keeps all ranks of a pipeline busy. The order of steps is the same on every rank.

    with open_interleaved(decoder, spec, 4, budget=budget, ...) as generator:
        ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from weft.engine.base import Partial, Request, TokenEvent
from weft.engine.generation.generate import BatchGenerator, open_generator
from weft.engine.generation.passes import Decoder
from weft.engine.generation.sampling import TokenAgreement
from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.spec import GenerationSpec


@contextmanager
def open_interleaved(
    network: Decoder,
    spec: GenerationSpec,
    count: int,
    *,
    device: torch.device,
    version: int,
    eos_ids: Iterable[int],
    budget: GenerationBudget,
    agree_on_tokens: TokenAgreement,
) -> Iterator[InterleavedGenerator]:
    """Open `count` generators that share the budget and interleave their steps.

    The other arguments are those of `open_generator`. In a pipeline, `count` is at most the number
    of ranks.
    """
    ends = frozenset(eos_ids)
    share = replace(
        budget,
        max_sequences=max(1, budget.max_sequences // count),
        max_tokens=max(1, budget.max_tokens // count),
    )
    with ExitStack() as stack:
        yield InterleavedGenerator(
            [
                stack.enter_context(
                    open_generator(
                        network,
                        spec,
                        device=device,
                        version=version,
                        eos_ids=ends,
                        budget=share,
                        agree_on_tokens=agree_on_tokens,
                    )
                )
                for _ in range(count)
            ]
        )


class InterleavedGenerator:
    """Generator that interleaves the steps of several generators.

    Implements `weft.engine.base.Generator`. While one generator's tokens are sent between ranks,
    the steps of the other generators are computed, which keeps all ranks of a pipeline busy. All
    requests with the same id are submitted to the same generator, so that their common prompt is
    computed only once.
    """

    def __init__(self, generators: Sequence[BatchGenerator]) -> None:
        self._generators = list(generators)
        self._started: list[int] = []  # generators with a step in progress, oldest first
        # events of steps that `abort` or `weights_changed` finished, returned by the next `step`
        self._events: list[TokenEvent] = []
        self._generator_by_id: dict[str, int] = {}
        self._num_unfinished: Counter[str] = Counter()  # unfinished completions of an id

    @property
    def idle(self) -> bool:
        return not self._events and all(generator.idle for generator in self._generators)

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests as `BatchGenerator.submit` does.

        The requests of a new id are submitted to the least busy generator.
        """
        loads = Counter(dict.fromkeys(range(len(self._generators)), 0))
        for id, left in self._num_unfinished.items():
            loads[self._generator_by_id[id]] += left
        for request in requests:
            home = self._generator_by_id.setdefault(
                request.id, min(loads, key=lambda number: (loads[number], number))
            )
            self._generators[home].submit([request])
            self._num_unfinished[request.id] += 1
            loads[home] += 1

    def step(self) -> list[TokenEvent]:
        """Start a step in every generator that has none in progress, and finish the oldest step.

        Returns the events of the finished step. If `abort` or `weights_changed` has finished steps
        since the last call, returns only the events of these steps.
        """
        if self._events:
            events = self._events
            self._events = []
            return events
        for number, generator in enumerate(self._generators):
            if number not in self._started and not generator.idle:
                generator.begin()
                self._started.append(number)
        return self._finish() if self._started else []

    def abort(self, ids: Iterable[str]) -> list[Partial]:
        """Abort requests as `BatchGenerator.abort` does.

        Steps in progress are finished first. Their tokens are included in the result, and their
        events are returned by later calls of `step`.
        """
        self._finish_all()
        wanted = list(ids)
        partials = []
        for generator in self._generators:
            partials.extend(generator.abort(wanted))
        for partial in partials:
            self._forget(partial.id)
        return partials

    def weights_changed(self, version: int, *, keep_kv: bool = False) -> None:
        """Finish the steps that have begun, and then switch all generators to the new weights.

        The arguments are those of `BatchGenerator.weights_changed`.
        """
        self._finish_all()
        for generator in self._generators:
            generator.weights_changed(version, keep_kv=keep_kv)

    def _finish_all(self) -> None:
        while self._started:
            self._events += self._finish()

    def _finish(self) -> list[TokenEvent]:
        events = self._generators[self._started.pop(0)].finish()
        for event in events:
            if event.finish is not None:
                self._forget(event.id)
        return events

    def _forget(self, id: str) -> None:
        """Decrease the number of unfinished completions of `id` by one.

        After the last one, the assignment of `id` to a generator is removed.
        """
        self._num_unfinished[id] -= 1
        if not self._num_unfinished[id]:
            del self._num_unfinished[id], self._generator_by_id[id]
