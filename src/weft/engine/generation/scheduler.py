"""Which sequences run next: continuous batching as plain data. Pure: no torch, no tensors, no clock.

Sequences wait in the order they came. A step first makes room for one more token of everything that runs, sending the
youngest back to wait (its keys and values are computed again later) where memory is short; then it admits waiting ones, oldest
first, while there is room and the step's prefill budget lasts. Sequences that begin with exactly the same tokens are
prefilled once, so the K samples of a prompt cost one prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.engine.generation.blocks import Blocks
from weft.errors import RunError


@dataclass(frozen=True)
class Budget:
    """How much runs at once."""

    max_sequences: int = 64
    max_tokens: int = 1 << 20  # tokens whose keys and values are held at once
    max_prefill_tokens: int = 8192  # prompt tokens of one forward pass; a longer prompt runs alone


@dataclass(eq=False)
class Sequence:
    """One completion in the making, with what was sampled so far. `limit` is the most tokens it may get."""

    id: str
    k: int
    prompt: tuple[int, ...]
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.k

    @property
    def length(self) -> int:
        """Tokens known: prompt and completion."""
        return len(self.prompt) + len(self.tokens)

    def known(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)


@dataclass(frozen=True)
class Prefill:
    """Tokens to compute once, and the sequences that all begin with exactly them."""

    tokens: tuple[int, ...]
    sequences: list[Sequence]


@dataclass(frozen=True)
class Plan:
    """One step: `preempted` give their memory back, then a forward pass over the last tokens of `decodes` and one over
    `prefills`; each sequence of these gets one token."""

    preempted: list[Sequence]
    decodes: list[Sequence]
    prefills: list[Prefill]


class Scheduler:
    """Waiting and running sequences; `running` is in order of admission."""

    def __init__(self, budget: Budget, blocks: Blocks) -> None:
        self.budget, self.blocks = budget, blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._known: dict[tuple[str, int], Sequence] = {}

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises `RunError` where it is here already, or could not run even alone."""
        if sequence.key in self._known:
            raise RunError(f"completion {sequence.k} of {sequence.id!r} was submitted twice; give requests other ids")
        most = len(sequence.prompt) + sequence.limit
        if most > self.budget.max_tokens:
            raise RunError(
                f"{sequence.id!r}: prompt and completion may need {most} tokens, but keys and values of "
                f"{self.budget.max_tokens} are held at most; lower gen.max_new_tokens or dataset.max_prompt_len"
            )
        self._known[sequence.key] = sequence
        self.waiting.append(sequence)

    def plan(self) -> Plan:
        """What the next step runs; whatever is planned counts as running from now on."""
        preempted = self._make_room()
        decodes = list(self.running)
        return Plan(preempted, decodes, self._admit())

    def finish(self, sequence: Sequence) -> None:
        """A running sequence is done."""
        self.running.remove(sequence)
        self.blocks.release(sequence.key)
        del self._known[sequence.key]

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """Forget every sequence of these ids; returns them in order of submission."""
        wanted = set(ids)
        gone = [sequence for sequence in self._known.values() if sequence.id in wanted]
        for sequence in gone:
            if sequence in self.running:
                self.finish(sequence)
            else:
                self.waiting.remove(sequence)
                del self._known[sequence.key]
        return gone

    def restart(self) -> None:
        """Send everything that runs back to the head of the queue: its keys and values are to be computed again."""
        for sequence in self.running:
            self.blocks.release(sequence.key)
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()

    def _make_room(self) -> list[Sequence]:
        held, preempted = 0, []
        while held < len(self.running):
            # A sequence's last token has no keys and values yet; this step computes them.
            sequence = self.running[held]
            if self.blocks.extend(sequence.key, sequence.length):
                held += 1
                continue
            youngest = self.running.pop()
            self.blocks.release(youngest.key)
            self.waiting.appendleft(youngest)
            preempted.append(youngest)
        return preempted

    def _admit(self) -> list[Prefill]:
        prefills: dict[tuple[int, ...], Prefill] = {}
        spent = 0
        while self.waiting and len(self.running) < self.budget.max_sequences:
            sequence = self.waiting[0]
            known = sequence.known()
            cost = 0 if known in prefills else len(known)
            if prefills and spent + cost > self.budget.max_prefill_tokens:
                break
            if not self.blocks.admit(sequence.key, len(known)):
                break
            spent += cost
            prefills.setdefault(known, Prefill(known, [])).sequences.append(self.waiting.popleft())
            self.running.append(sequence)
        return list(prefills.values())
