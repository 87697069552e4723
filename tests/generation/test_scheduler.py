"""The scheduler and the slots, against a cache that is only a list of what each place holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.generation.blocks import Slots
from weft.engine.generation.scheduler import Budget, Plan, Scheduler, Sequence
from weft.errors import RunError


class Machine:
    """Runs plans over a pretended cache: `held[key]` lists the tokens whose keys and values are stored."""

    def __init__(self, budget: Budget) -> None:
        self.slots = Slots(budget.max_sequences, budget.max_tokens)
        self.scheduler = Scheduler(budget, self.slots)
        self.held: dict[tuple[str, int], tuple[int, ...]] = {}
        self.prefilled = 0
        self.done: list[tuple[str, int]] = []

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        for sequence in plan.preempted:
            del self.held[sequence.key]
        for sequence in plan.decodes:
            assert self.held[sequence.key] == sequence.known()[:-1], "stored is all but the last token"
            self.held[sequence.key] = sequence.known()
        for prefill in plan.prefills:
            self.prefilled += len(prefill.tokens)
            for sequence in prefill.sequences:
                assert sequence.known() == prefill.tokens and sequence.key not in self.held
                self.held[sequence.key] = prefill.tokens
        assert len(self.held) == len(self.slots) == len(self.scheduler.running)
        assert len(self.slots) * self.slots.capacity <= self.scheduler.budget.max_tokens
        assert max(map(len, self.held.values())) <= self.slots.capacity
        for sequence in [*plan.decodes, *(s for prefill in plan.prefills for s in prefill.sequences)]:
            sequence.tokens.append(1000 * sequence.k + len(sequence.tokens))
            if len(sequence.tokens) == sequence.limit:
                self.scheduler.finish(sequence)
                del self.held[sequence.key]
                self.done.append(sequence.key)
        return plan

    def restart(self) -> None:
        self.scheduler.restart()
        self.held.clear()

    def abort(self, *ids: str) -> list[tuple[str, int]]:
        gone = [sequence.key for sequence in self.scheduler.abort(ids)]
        for key in gone:
            self.held.pop(key, None)
        return gone


def sequence(id: str, k: int = 0, prompt: int = 3, limit: int = 4) -> Sequence:
    return Sequence(id, k, tuple(range(prompt)), limit)


@settings(max_examples=100, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90), st.integers(1, 3)), min_size=1, max_size=8),
    max_sequences=st.integers(1, 6),
    max_tokens=st.integers(180, 700),
    max_prefill=st.integers(1, 200),
    restart_at=st.integers(0, 30),
)
def test_everything_submitted_finishes_within_the_budget(
    shapes: list[tuple[int, int, int]], max_sequences: int, max_tokens: int, max_prefill: int, restart_at: int
) -> None:
    machine = Machine(Budget(max_sequences, max_tokens, max_prefill))
    wanted = [
        sequence(f"p{i}", k, prompt, limit) for i, (prompt, limit, count) in enumerate(shapes) for k in range(count)
    ]
    for one in wanted:
        machine.scheduler.submit(one)
    for step in range(5000):
        if machine.scheduler.idle:
            break
        if step == restart_at:
            machine.restart()
        plan = machine.step()
        assert plan.prefills or plan.decodes, "a step that does nothing would go on for ever"
        assert len(machine.scheduler.running) <= max_sequences
        assert len(plan.prefills) <= 1 or sum(len(p.tokens) for p in plan.prefills) <= max_prefill
    assert sorted(machine.done) == sorted(one.key for one in wanted)
    assert all(one.tokens == [1000 * one.k + i for i in range(one.limit)] for one in wanted)


def test_samples_of_one_prompt_are_prefilled_once() -> None:
    machine = Machine(Budget())
    for k in range(8):
        machine.scheduler.submit(sequence("a", k, prompt=50))
    machine.scheduler.submit(sequence("b", 0, prompt=50))
    machine.step()
    assert machine.prefilled == 50
    assert len(machine.scheduler.running) == 9


def test_waiting_sequences_come_in_as_others_leave() -> None:
    machine = Machine(Budget(max_sequences=2))
    for i, limit in enumerate((1, 3, 2)):
        machine.scheduler.submit(sequence(f"p{i}", limit=limit))
    assert [s.id for p in machine.step().prefills for s in p.sequences] == ["p0", "p1"]
    second = machine.step()
    assert [s.id for s in second.decodes] == ["p1"]
    assert [s.id for p in second.prefills for s in p.sequences] == ["p2"]


def test_the_youngest_waits_again_where_memory_is_short() -> None:
    machine = Machine(Budget(max_tokens=128))
    machine.scheduler.submit(sequence("old", prompt=62, limit=10))
    machine.scheduler.submit(sequence("young", prompt=10, limit=30))
    machine.step()
    machine.step()
    machine.step()
    machine.step()
    assert [s.id for s in machine.scheduler.running] == ["old"]
    assert [s.id for s in machine.scheduler.waiting] == ["young"]
    young = machine.scheduler.waiting[0]
    assert len(young.tokens) == 3, "what it has stays"


def test_abort_takes_running_and_waiting_sequences_of_an_id() -> None:
    machine = Machine(Budget(max_sequences=2))
    for k in range(2):
        machine.scheduler.submit(sequence("a", k))
        machine.scheduler.submit(sequence("b", k))
    machine.step()
    assert machine.abort("a") == [("a", 0), ("a", 1)]
    machine.step()
    assert sorted(s.key for s in machine.scheduler.running) == [("b", 0), ("b", 1)]
    assert machine.abort("a", "unknown") == []


def test_a_completion_is_submitted_once() -> None:
    scheduler = Scheduler(Budget(), Slots(4, 1000))
    scheduler.submit(sequence("a"))
    with pytest.raises(RunError, match="completion 0 of 'a' was submitted twice"):
        scheduler.submit(sequence("a"))


def test_what_could_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(Budget(max_tokens=20), Slots(4, 20))
    with pytest.raises(
        RunError, match=r"'a': prompt and completion may need 21 tokens.*20 are held.*gen\.max_new_tokens"
    ):
        scheduler.submit(sequence("a", prompt=17, limit=4))


def test_slots_double_together_and_shrink_when_empty() -> None:
    slots = Slots(max_slots=3, max_tokens=1000)
    assert slots.admit("a", 10) and slots.admit("b", 65)
    assert slots.capacity == 128
    assert slots.extend("a", 129) and slots.capacity == 256
    assert not slots.extend("a", 600), "two slots of 600 tokens are too many"
    assert slots.admit("c", 256) and not slots.admit("d", 1)
    for key in "abc":
        slots.release(key)
    assert (len(slots), slots.capacity) == (0, 0)
