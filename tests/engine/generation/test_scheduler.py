"""The scheduler and the slots, against a cache that is only a list of what each place holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.generation.blocks import SlotManager
from weft.engine.generation.scheduler import (
    GenerationBudget,
    Prefill,
    PrefillChunk,
    PromptPrefix,
    Scheduler,
    Sequence,
    StepPlan,
)
from weft.errors import RunError


class Machine:
    """Runs plans over a pretended cache: `held[key]` lists the tokens whose keys and values are
    stored for a sequence, after those of its prefix in `stored`; `parts` what is stored of
    unfinished prompts.
    """

    def __init__(
        self, budget: GenerationBudget, least_spared: int | None = None, unit: int = 1
    ) -> None:
        self.slots = SlotManager(budget.max_sequences, budget.max_tokens, least_spared, unit)
        self.scheduler = Scheduler(budget, self.slots)
        self.held: dict[tuple[str, int], tuple[int, ...]] = {}
        self.stored: dict[PromptPrefix, tuple[int, ...]] = {}
        self.parts: dict[Prefill, tuple[int, ...]] = {}
        self.prefilled = 0
        self.done: list[tuple[str, int]] = []

    def step(self) -> StepPlan:
        plan = self.scheduler.plan_step()
        for sequence in plan.preempted:
            del self.held[sequence.key]
        in_use = set(self.scheduler.prefixes.values())
        self.stored = {prefix: tokens for prefix, tokens in self.stored.items() if prefix in in_use}
        for sequence in plan.decodes:
            assert self.everything(sequence) == sequence.list_tokens()[:-1], (
                "stored is all but the last token"
            )
            self.held[sequence.key] += (sequence.list_tokens()[-1],)
        begun = [sequence for chunk in plan.chunks for sequence in self.compute(chunk)]
        self.check_memory()
        for sequence in [*plan.decodes, *begun]:
            sequence.tokens.append(1000 * sequence.k + len(sequence.tokens))
            if len(sequence.tokens) == sequence.limit:
                self.scheduler.finish(sequence)
                del self.held[sequence.key]
                self.done.append(sequence.key)
        return plan

    def compute(self, chunk: PrefillChunk) -> list[Sequence]:
        """Store what a chunk computes; the sequences that begin with it."""
        fill = chunk.prefill
        assert chunk.start < chunk.stop
        assert len(self.parts.get(fill, ())) == chunk.start, "chunks of a prompt follow each other"
        if fill.parent_prefix is not None:
            assert (
                self.stored[fill.parent_prefix] == fill.parent_prefix.tokens
                and fill.parent_prefix.is_ready
            )
        self.prefilled += chunk.stop - chunk.start
        self.parts[fill] = fill.tokens[: chunk.stop]
        if not chunk.is_last:
            return []
        computed = self.parts.pop(fill)
        if fill.new_prefix is not None:
            self.stored[fill.new_prefix] = computed
        for sequence in fill.sequences:
            assert sequence.key not in self.held and sequence.prefix is fill.parent_prefix
            self.held[sequence.key] = computed
            assert self.everything(sequence) == sequence.list_tokens()
        return fill.sequences

    def everything(self, sequence: Sequence) -> tuple[int, ...]:
        before = () if sequence.prefix is None else self.stored[sequence.prefix]
        return before + self.held[sequence.key]

    def check_memory(self) -> None:
        filling = [s.key for fill in self.scheduler.prefilling for s in fill.sequences]
        assert set(self.held) == set(self.scheduler.running)
        assert (
            len(self.slots) == len(self.held) + len(filling) <= self.scheduler.budget.max_sequences
        )
        assert all(len(tokens) <= self.slots.capacity for tokens in self.held.values())
        apart = sum(len(prefix.tokens) for prefix in self.scheduler.prefixes.values())
        assert self.slots.num_tokens == len(self.slots) * self.slots.capacity + apart
        most = self.scheduler.budget.max_tokens + self.slots.unit - 1
        assert self.slots.num_tokens <= self.slots.num_slots * self.slots.capacity + apart <= most
        assert self.slots.capacity % self.slots.unit == 0

    def restart(self) -> None:
        self.scheduler.restart()
        self.forget()

    def abort(self, *ids: str) -> list[tuple[str, int]]:
        gone = [sequence.key for sequence in self.scheduler.abort(ids)]
        for key in gone:
            self.held.pop(key, None)
        self.forget(only_unused=True)
        return gone

    def forget(self, *, only_unused: bool = False) -> None:
        if not only_unused:
            self.held.clear()
        self.parts = {
            fill: part for fill, part in self.parts.items() if fill in self.scheduler.prefilling
        }


def sequence(id: str, k: int = 0, prompt: int = 3, limit: int = 4) -> Sequence:
    return Sequence(id, k, tuple(range(prompt)), limit)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from([0, 70, 130]), st.integers(1, 90), st.integers(1, 90), st.integers(1, 3)
        ),
        min_size=1,
        max_size=8,
    ),
    max_sequences=st.integers(1, 6),
    max_tokens=st.integers(310, 900),
    max_prefill=st.integers(1, 200),
    least_spared=st.sampled_from([None, 1, 256]),
    unit=st.sampled_from([1, 16]),
    divides=st.booleans(),
    events=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from(["restart", "abort"])), max_size=3
    ),
)
def test_everything_submitted_finishes_within_the_budget(
    shapes: list[tuple[int, int, int, int]],
    max_sequences: int,
    max_tokens: int,
    max_prefill: int,
    least_spared: int | None,
    unit: int,
    divides: bool,
    events: list[tuple[int, str]],
) -> None:
    """Prompts of a system part that some share and a part of their own, at mixed lengths, with
    restarts and aborts between.
    """
    machine = Machine(
        GenerationBudget(max_sequences, max_tokens, max_prefill, divides), least_spared, unit
    )
    wanted = [
        Sequence(f"p{i}", k, (*range(system), *range(500 * i, 500 * i + own)), limit)
        for i, (system, own, limit, count) in enumerate(shapes)
        for k in range(count)
    ]
    for one in wanted:
        machine.scheduler.submit(one)
    aborted: set[tuple[str, int]] = set()
    for step in range(9000):
        for at, what in events:
            if at == step and what == "restart":
                machine.restart()
            elif at == step:
                aborted |= set(machine.abort("p0"))
        if machine.scheduler.idle:
            break
        plan = machine.step()
        assert plan.chunks or plan.decodes or plan.preempted, (
            "a step that does nothing would go on for ever"
        )
        computed = sum(chunk.stop - chunk.start for chunk in plan.chunks)
        assert computed <= max_prefill or (len(plan.chunks) == 1 and not divides)
    assert sorted(machine.done) == sorted({one.key for one in wanted} - aborted)
    machine.scheduler.plan_step()
    assert all(
        one.tokens == [1000 * one.k + i for i in range(one.limit)]
        for one in wanted
        if one.key not in aborted
    )
    assert (len(machine.slots), machine.slots.num_tokens) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(long=st.integers(50, 400), budget=st.integers(1, 60), running=st.integers(1, 4))
def test_a_long_prompt_does_not_hold_up_what_runs(long: int, budget: int, running: int) -> None:
    machine = Machine(GenerationBudget(max_prefill_tokens=budget))
    for i in range(running):
        machine.scheduler.submit(Sequence(f"p{i}", 0, (i,), 1000))
    while machine.scheduler.waiting or machine.scheduler.prefilling:
        machine.step()
    machine.scheduler.submit(sequence("long", prompt=long))
    steps = 0
    while "long" not in {key[0] for key in machine.held}:
        plan = machine.step()
        assert len(plan.decodes) == running, "everything that runs gets its token in each step"
        steps += 1
    assert steps == -(-long // budget)


def test_what_fits_into_one_step_is_not_cut() -> None:
    """A prompt above the budget takes the room that is there; the others wait for a step that has
    room for all of them.
    """
    machine = Machine(GenerationBudget(max_prefill_tokens=10))
    for name, tokens in (("a", 6), ("b", 7), ("long", 23), ("c", 3)):
        machine.scheduler.submit(sequence(name, prompt=tokens, limit=9))
    parts = [
        [(len(c.prefill.tokens), c.start, c.stop) for c in machine.step().chunks] for _ in range(5)
    ]
    assert parts == [
        [(6, 0, 6)],
        [(7, 0, 7), (23, 0, 3)],
        [(23, 3, 13)],
        [(23, 13, 23)],
        [(3, 0, 3)],
    ]


def test_samples_that_come_while_their_prompt_waits_join_it() -> None:
    machine = Machine(GenerationBudget(max_prefill_tokens=10))
    machine.scheduler.submit(sequence("a", prompt=6, limit=9))
    for k in range(8):
        machine.scheduler.submit(sequence("b", k, prompt=7, limit=9))
    while not machine.scheduler.idle:
        machine.step()
    assert machine.prefilled == 6 + 7


def test_samples_of_one_prompt_are_prefilled_once() -> None:
    machine = Machine(GenerationBudget())
    for k in range(8):
        machine.scheduler.submit(sequence("a", k, prompt=50))
    machine.scheduler.submit(sequence("b", 0, prompt=50))
    machine.step()
    assert machine.prefilled == 50
    assert len(machine.scheduler.running) == 9


def test_waiting_sequences_come_in_as_others_leave() -> None:
    machine = Machine(GenerationBudget(max_sequences=2))
    for i, limit in enumerate((1, 3, 2)):
        machine.scheduler.submit(sequence(f"p{i}", limit=limit))
    first = machine.step()
    assert [s.id for chunk in first.chunks for s in chunk.prefill.sequences] == ["p0", "p1"]
    second = machine.step()
    assert [s.id for s in second.decodes] == ["p1"]
    assert [s.id for chunk in second.chunks for s in chunk.prefill.sequences] == ["p2"]


def test_the_youngest_waits_again_where_memory_is_short() -> None:
    machine = Machine(GenerationBudget(max_tokens=128))
    machine.scheduler.submit(sequence("old", prompt=62, limit=10))
    machine.scheduler.submit(sequence("young", prompt=10, limit=30))
    machine.step()
    machine.step()
    machine.step()
    machine.step()
    assert [id for id, _ in machine.scheduler.running] == ["old"]
    assert [s.id for s in machine.scheduler.waiting] == ["young"]
    young = machine.scheduler.waiting[0]
    assert len(young.tokens) == 3, "what it has stays"


def test_what_ran_waits_in_its_order_before_the_others_after_new_weights() -> None:
    machine = Machine(GenerationBudget(max_sequences=3, max_prefill_tokens=6))
    for id, prompt in (("a", 2), ("b", 3), ("c", 9), ("d", 3)):
        machine.scheduler.submit(sequence(id, prompt=prompt))
    machine.step()
    assert [id for id, _ in machine.scheduler.running] == ["a", "b"]
    assert len(machine.scheduler.prefilling) == 1, "c is not computed yet"
    machine.restart()
    assert [s.id for s in machine.scheduler.waiting] == ["a", "b", "c", "d"]


def test_abort_takes_running_and_waiting_sequences_of_an_id() -> None:
    machine = Machine(GenerationBudget(max_sequences=2))
    for k in range(2):
        machine.scheduler.submit(sequence("a", k))
        machine.scheduler.submit(sequence("b", k))
    machine.step()
    assert machine.abort("a") == [("a", 0), ("a", 1)]
    machine.step()
    assert sorted(machine.scheduler.running) == [("b", 0), ("b", 1)]
    assert machine.abort("a", "unknown") == []


def test_a_completion_is_submitted_once() -> None:
    scheduler = Scheduler(GenerationBudget(), SlotManager(4, 1000))
    scheduler.submit(sequence("a"))
    with pytest.raises(RunError, match="completion 0 of 'a' was submitted twice"):
        scheduler.submit(sequence("a"))


def test_what_could_never_fit_is_refused_at_once() -> None:
    scheduler = Scheduler(GenerationBudget(max_tokens=20), SlotManager(4, 20))
    with pytest.raises(
        RunError,
        match=r"'a': prompt and completion may need 21 tokens.*20 are held.*gen\.max_new_tokens",
    ):
        scheduler.submit(sequence("a", prompt=17, limit=4))


def test_what_was_sampled_counts_for_room_even_beyond_the_limit() -> None:
    scheduler = Scheduler(GenerationBudget(max_tokens=20), SlotManager(4, 20))
    long = Sequence("a", 0, (1, 2), limit=10, tokens=[3] * 30)
    with pytest.raises(RunError, match="'a': prompt and completion may need 32 tokens"):
        scheduler.submit(long)


def test_slots_double_together_and_shrink_when_empty() -> None:
    slots = SlotManager(max_slots=3, max_tokens=1000)
    assert slots.admit("a", 10) and slots.admit("b", 128)
    assert slots.capacity == 128
    slots.start("a")
    assert slots.advance() and slots.capacity == 128
    slots.start("b")
    assert slots.advance() and slots.capacity == 256
    assert not slots.admit("c", 600), "three slots of 600 tokens are too many"
    assert slots.admit("c", 256) and not slots.admit("d", 1)
    for key in "abc":
        slots.release(key)
    assert (len(slots), slots.capacity) == (0, 0)


def test_a_slot_grows_to_what_is_needed_where_doubling_does_not_fit() -> None:
    slots = SlotManager(max_slots=2, max_tokens=300)
    assert slots.admit("a", 100) and slots.admit("b", 100)
    assert slots.capacity == 128
    assert slots.admit_prefix("p", 40) and not slots.admit_prefix("q", 5)
    for key in "ab":
        slots.start(key)
    assert sum(slots.advance() for _ in range(60)) == 30, "two slots of 130 tokens and 40 apart"
    slots.release("p")
    assert slots.advance() and slots.num_tokens == 300


def shared(count: int, system: int, own: int, samples: int = 1) -> list[Sequence]:
    return [
        Sequence(f"p{i}", k, (*range(system), *range(1000 * (i + 1), 1000 * (i + 1) + own)), 5)
        for i in range(count)
        for k in range(samples)
    ]


@pytest.mark.parametrize(
    ("count", "system", "own", "samples", "apart", "computed"),
    [
        # the samples of one prompt: all but the last token is held once
        (1, 200, 0, 8, [199], 200),
        (6, 128, 10, 1, [128], 188),  # a system prompt
        # samples share the whole prompt rather than the system prompt
        (3, 128, 100, 4, [227] * 3, 3 * 228),
        (4, 0, 100, 1, [], 400),  # nobody begins alike
        # too short to be stored apart: equal prompts are computed once and copied
        (4, 40, 10, 2, [], 4 * 50),
        (2, 0, 200, 2, [], 2 * 200),  # too few sequences, likewise
    ],
)
def test_what_sequences_begin_with_is_computed_and_held_once(
    count: int, system: int, own: int, samples: int, apart: list[int], computed: int
) -> None:
    machine = Machine(GenerationBudget(), least_spared=256)
    for one in shared(count, system, own, samples):
        machine.scheduler.submit(one)
    machine.step()
    assert sorted(len(prefix.tokens) for prefix in machine.scheduler.prefixes.values()) == apart
    assert machine.prefilled == computed
    while not machine.scheduler.idle:
        machine.step()
    assert machine.prefilled == computed


def test_later_requests_find_a_prefix_that_is_there() -> None:
    machine = Machine(GenerationBudget(), least_spared=256)
    first, second, third = shared(3, 320, 5)
    machine.scheduler.submit(first)
    machine.scheduler.submit(second)
    machine.step()
    machine.scheduler.submit(third)
    machine.step()
    assert machine.prefilled == 320 + 3 * 5
    assert third.prefix is first.prefix is not None


def test_a_prefix_leaves_with_the_last_that_begins_with_it() -> None:
    machine = Machine(GenerationBudget(), least_spared=256)
    for one in shared(1, 100, 0, samples=4):
        machine.scheduler.submit(one)
    machine.step()
    assert machine.slots.num_tokens == 99 + 4 * 64
    machine.abort("p0")
    assert machine.slots.num_tokens == 0 and not machine.scheduler.prefixes


def test_a_prefix_in_the_making_leaves_with_the_last_admitted() -> None:
    """Else the step after would plan nothing: what waits is not taken in while the prefix is to be
    computed.
    """
    machine = Machine(GenerationBudget(max_sequences=1, max_prefill_tokens=1), least_spared=1)
    for one in shared(2, 70, 1):
        machine.scheduler.submit(one)
    machine.step()
    machine.abort("p0")
    assert not machine.scheduler.prefixes and not machine.scheduler.prefilling
    assert machine.step().chunks


def test_equal_hashes_of_unlike_prompts_are_no_prefix() -> None:
    machine = Machine(GenerationBudget(), least_spared=256)
    one, other = Sequence("a", 0, (-1,) * 300, 3), Sequence("b", 0, (-2,) * 300, 3)
    assert hash(-1) == hash(-2)
    machine.scheduler.submit(one)
    machine.scheduler.submit(other)
    machine.step()
    assert one.prefix is not None and other.prefix is None
    assert machine.prefilled == 600
