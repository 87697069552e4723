"""Scheduler of sequences for continuous batching.

Sequences wait in the order of submission. A step first reserves room for one more token of every
running sequence. If memory is short, the youngest sequence is preempted: it waits again, and its
keys and values are computed again later. Then waiting sequences are admitted, oldest first, and
their prompts are computed up to the prefill budget of the step. A longer prompt takes several
steps, in each of which every running sequence gets one token.

Sequences with equal first tokens share their computation: a prefix that is worth storing separately
(`PromptPrefix`) is computed and stored once; sequences with exactly the same tokens after it are
computed once and copied. A prompt is identified by a chain of hashes, one every `PREFIX_STRIDE`
tokens and one at its second-to-last token, so a few look-ups per sequence find the prompts that
share a prefix. A shared prefix never contains a sequence's last token: every sequence computes its
own last token, because its first new token is sampled from the result.

Decisions do not depend on the time, and the module does not import torch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.engine.generation.blocks import BlockManager
from weft.errors import DataError, RunError

if TYPE_CHECKING:
    from weft.engine.base import Partial

# tokens between the hashes of a prompt's prefixes, and tokens of the shortest shared prefix: a pass
# over fewer tokens would not be worth it
PREFIX_STRIDE = 64
PrefixLevel = tuple[int, int]  # (tokens, hash of the chain up to there)


@dataclass(eq=False)
class PromptPrefix:
    """Prefix shared by several sequences.

    `is_ready` is set once the keys and values of its tokens are computed. `num_users` is the number
    of admitted sequences that begin with the prefix.
    """

    tokens: tuple[int, ...]
    chain_hash: int  # hash of the chain
    is_ready: bool = False
    num_users: int = 0


@dataclass
class PrefixIndex:
    """Index that counts, for each prefix of a prompt, how many current sequences begin with it."""

    # minimum tokens that a new prefix must save: its length times the sequences after the first
    min_saved_tokens: int
    counts: Counter[int] = field(default_factory=Counter)

    def list_levels(self, prompt: tuple[int, ...]) -> tuple[PrefixLevel, ...]:
        """Return (length, hash) of each prefix of a prompt that can be shared, shortest first."""
        last = len(prompt) - 1
        ends = [*range(PREFIX_STRIDE, last, PREFIX_STRIDE), last]
        levels = []
        mark = 0
        start = 0
        for end in ends if last >= PREFIX_STRIDE else []:
            mark = hash((mark, prompt[start:end]))
            start = end
            levels.append((end, mark))
        return tuple(levels)

    def add(self, levels: Collection[PrefixLevel]) -> None:
        self.counts.update(mark for _, mark in levels)

    def remove(self, levels: Collection[PrefixLevel]) -> None:
        for _, mark in levels:
            self.counts[mark] -= 1
            if not self.counts[mark]:
                del self.counts[mark]

    def find_best(
        self, levels: Collection[PrefixLevel], stored: Mapping[int, PromptPrefix]
    ) -> PrefixLevel | None:
        """Return the prefix that saves a sequence the most tokens, or None if none saves enough.

        `levels` are the prefixes of the sequence's prompt. `stored` contains the prefixes that are
        already in the KV cache, by hash.
        """

        def count_saved_tokens(level: PrefixLevel) -> float:
            length, mark = level
            count = self.counts[mark]
            return float(length) if mark in stored else length * (count - 1) / count

        worthwhile = []
        for length, mark in levels:
            if mark in stored or length * (self.counts[mark] - 1) >= self.min_saved_tokens:
                worthwhile.append((length, mark))
        return max(worthwhile, key=count_saved_tokens, default=None)


@dataclass(frozen=True)
class GenerationBudget:
    """Limits on the sequences and tokens that a generator processes at the same time."""

    max_sequences: int = 64
    max_tokens: int = 1 << 20  # maximum tokens in the KV cache
    max_prefill_tokens: int = 8192  # maximum prompt tokens of one step
    # split longer prompts over several steps; otherwise each gets a step without other prompts
    splits_prompts: bool = True


@dataclass(eq=False)
class Sequence:
    """Completion in progress, with its prompt and the tokens sampled so far.

    `limit` is the maximum number of new tokens. While the sequence runs, its new tokens are
    recorded in a `DecodeBatch`. They are copied to this object when the sequence leaves that batch.
    """

    id: str
    k: int
    prompt: tuple[int, ...]
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)
    prefix: PromptPrefix | None = None
    levels: tuple[PrefixLevel, ...] = ()

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.k

    def list_tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)

    def continue_from(self, partial: Partial) -> None:
        """Use the tokens of `partial`, which were sampled for this completion before.

        Raises `DataError` if these tokens belong to another completion, have no log-probs or
        versions, or already reach the limit of the completion.
        """
        if (partial.id, partial.k) != self.key:
            raise DataError(
                f"completion {self.k} of {self.id!r}: generated is a part of completion "
                f"{partial.k} of {partial.id!r}; give each request its own"
            )
        if not len(partial.tokens) == len(partial.logprobs) == len(partial.versions):
            raise DataError(
                f"completion {self.k} of {self.id!r}: generated has {len(partial.tokens)} tokens, "
                f"{len(partial.logprobs)} log-probs and "
                f"{len(partial.versions)} versions; give one of each for every token"
            )
        if len(partial.tokens) >= self.limit:
            raise DataError(
                f"completion {self.k} of {self.id!r}: generated has {len(partial.tokens)} tokens "
                f"and at most {self.limit} are to be sampled, so nothing is left; leave it out or "
                "raise max_new_tokens"
            )
        self.tokens = list(partial.tokens)
        self.logprobs = list(partial.logprobs)
        self.versions = list(partial.versions)
        self.supports = [tuple(support) for support in partial.supports]


@dataclass(eq=False)
class Prefill:
    """Tokens whose keys and values must be computed before the sequences that contain them can run.

    A prefill computes either the shared prefix `new_prefix`, or the tokens of `sequences`. In the
    second case, all sequences have the same `tokens`. If they have a shared prefix, it is
    `parent_prefix`, and `tokens` are only those after it. A prefill can take several steps:
    `num_done` is the number of tokens computed so far.
    """

    tokens: tuple[int, ...]
    parent_prefix: PromptPrefix | None = None
    new_prefix: PromptPrefix | None = None
    sequences: list[Sequence] = field(default_factory=list)
    num_done: int = 0


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start:stop` of a prefill, which are computed in one step."""

    prefill: Prefill
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return self.stop - self.start == len(self.prefill.tokens)

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prefill.tokens)


@dataclass(frozen=True)
class StepPlan:
    """Plan of the work in one decoding step.

    First the memory of the `preempted` sequences is freed. Then the network processes the last
    tokens of the sequences in `decodes` and the prompt tokens in `chunks`. Each sequence in
    `decodes` gets one new token, and so does each sequence whose last chunk is processed.
    """

    preempted: list[Sequence]
    decodes: list[Sequence]
    chunks: list[PrefillChunk]


class Scheduler:
    """Scheduler of waiting and running sequences.

    `running` contains the running sequences in order of admission. `prefilling` contains the
    pending prefills of admitted sequences.
    """

    def __init__(self, budget: GenerationBudget, blocks: BlockManager) -> None:
        self.budget = budget
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Prefill] = []
        self.running: dict[tuple[str, int], Sequence] = {}
        self.prefixes: dict[int, PromptPrefix] = {}
        self._sequences: dict[tuple[str, int], Sequence] = {}
        # number of times that a running sequence was preempted
        self.num_preempted = 0
        self._longest = 0  # maximum tokens of any submitted sequence
        self._index = PrefixIndex(blocks.min_saved_tokens or 0)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises `RunError` if it was submitted before, or if memory is too small even for this
        sequence alone.
        """
        if sequence.key in self._sequences:
            raise RunError(
                f"completion {sequence.k} of {sequence.id!r} was submitted twice; give requests "
                f"other ids"
            )
        most = max(len(sequence.prompt) + sequence.limit, len(sequence.list_tokens()))
        if most > self.budget.max_tokens:
            raise RunError(
                f"{sequence.id!r}: prompt and completion may need {most} tokens, but keys and "
                f"values of "
                f"{self.budget.max_tokens} are held at most; lower gen.max_new_tokens or "
                f"dataset.max_prompt_len"
            )
        if self.blocks.min_saved_tokens is not None:
            sequence.levels = self._index.list_levels(sequence.prompt)
            self._index.add(sequence.levels)
        self._sequences[sequence.key] = sequence
        self._longest = max(self._longest, most)
        self.blocks.expect(len(self._sequences), self._longest)
        self.waiting.append(sequence)

    def plan_step(self) -> StepPlan:
        """Return the work of the next step, and update the state as if this work were done."""
        preempted = self._make_room()
        decodes = list(self.running.values())
        if not preempted:  # their tokens may not be recorded yet, and memory is full
            self._admit()
        self._drop_unused()
        return StepPlan(preempted, decodes, self._split_prefills())

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence whose last token has been sampled."""
        del self.running[sequence.key]
        self._release(sequence)
        self._forget(sequence)
        self._drop_unused(self._index.counts)

    def abort(self, ids: Iterable[str]) -> list[Sequence]:
        """Remove all sequences of these ids, and return them in order of submission."""
        aborted_ids = set(ids)
        aborted_sequences = []
        for sequence in self._sequences.values():
            if sequence.id in aborted_ids:
                aborted_sequences.append(sequence)
        for sequence in aborted_sequences:
            if sequence.key in self.running:
                self.finish(sequence)
                continue
            fill = next((fill for fill in self.prefilling if sequence in fill.sequences), None)
            if fill is None:
                self.waiting.remove(sequence)
            else:
                fill.sequences.remove(sequence)
                self._release(sequence)
            self._forget(sequence)
        self.prefilling = [fill for fill in self.prefilling if fill.new_prefix or fill.sequences]
        self._drop_unused(self._index.counts)
        return aborted_sequences

    def restart(self) -> None:
        """Move all admitted sequences back to the head of the queue after the weights have changed.

        Their keys and values will be computed again.
        """
        admitted = [
            *self.running.values(),
            *(sequence for fill in self.prefilling for sequence in fill.sequences),
        ]
        for sequence in admitted:
            self._release(sequence)
        self.waiting.extendleft(reversed(admitted))
        self.running.clear()
        self.prefilling.clear()
        self._drop_unused()

    # -- memory

    def _make_room(self) -> list[Sequence]:
        """Reserve room for the keys and values of each running sequence's last token.

        Returns the sequences that were preempted to make room.
        """
        preempted = []
        while not self.blocks.advance():
            if self._drop_unused():
                continue
            # Pending prefills are younger than all running sequences; only their computation is
            # lost.
            if self.prefilling:
                young = []
                for fill in self.prefilling:
                    young.extend(fill.sequences)
                self.prefilling.clear()
            else:
                young = [self.running.popitem()[1]]
                preempted += young
                self.num_preempted += 1
            for sequence in young:
                self._release(sequence)
            self.waiting.extendleft(reversed(young))
        return preempted

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.key)
        if sequence.prefix is not None:
            sequence.prefix.num_users -= 1
            sequence.prefix = None

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        if not self._sequences:
            self._longest = 0
        self._index.remove(sequence.levels)

    def _drop_unused(self, keep: Container[int] = ()) -> bool:
        """Free the prefixes that no admitted sequence uses, and return whether any were freed.

        Computed prefixes whose hashes are in `keep` are not freed.
        """
        unused = []
        for prefix in self.prefixes.values():
            if not prefix.num_users and not (prefix.is_ready and prefix.chain_hash in keep):
                unused.append(prefix)
        for prefix in unused:
            del self.prefixes[prefix.chain_hash]
            self.blocks.release(prefix)
            self.prefilling = [fill for fill in self.prefilling if fill.new_prefix is not prefix]
        return bool(unused)

    # -- admission

    def _admit(self) -> None:
        """Admit waiting sequences while there is room, up to the prefill budget of a step."""
        pending = sum(len(fill.tokens) - fill.num_done for fill in self.prefilling)
        equal = {}
        for fill in self.prefilling:
            if fill.new_prefix is None:
                equal[(fill.parent_prefix, fill.tokens)] = fill
        count = len(self.running) + sum(len(fill.sequences) for fill in self.prefilling)
        while (
            self.waiting
            and count < self.budget.max_sequences
            and pending < self.budget.max_prefill_tokens
        ):
            sequence = self.waiting[0]
            fills = self._allocate(sequence)
            if fills is None and self._drop_unused():
                fills = self._allocate(sequence)
            if fills is None:
                break
            *new_fills, own_fill = fills
            first = equal.setdefault((own_fill.parent_prefix, own_fill.tokens), own_fill)
            if first is own_fill:
                new_fills.append(own_fill)
            else:
                first.sequences.append(sequence)
            self.prefilling += new_fills
            pending += sum(len(fill.tokens) for fill in new_fills)
            self.waiting.popleft()
            count += 1

    def _allocate(self, sequence: Sequence) -> list[Prefill] | None:
        """Allocate memory for a sequence, and return the prefills that it needs.

        The last prefill is that of the sequence's own tokens. If the sequence needs a shared prefix
        that is not stored yet, the first prefill is that of the prefix. Returns None and allocates
        nothing if there is not enough room.
        """
        fills = []
        tokens = sequence.list_tokens()
        prefix = self._find_prefix(sequence)
        if prefix is not None and prefix.chain_hash not in self.prefixes:
            if not self.blocks.admit_prefix(prefix, len(prefix.tokens)):
                return None
            self.prefixes[prefix.chain_hash] = prefix
            fills.append(Prefill(prefix.tokens, new_prefix=prefix))
        own_tokens = tokens if prefix is None else tokens[len(prefix.tokens) :]
        if not self.blocks.admit(sequence.key, len(own_tokens)):
            if fills and prefix is not None:
                del self.prefixes[prefix.chain_hash]
                self.blocks.release(prefix)
            return None
        if prefix is not None:
            sequence.prefix = prefix
            prefix.num_users += 1
        return [*fills, Prefill(own_tokens, parent_prefix=prefix, sequences=[sequence])]

    def _find_prefix(self, sequence: Sequence) -> PromptPrefix | None:
        level = self._index.find_best(sequence.levels, self.prefixes)
        if level is None:
            return None
        length, mark = level
        tokens = sequence.prompt[:length]
        stored = self.prefixes.get(mark)
        if stored is None:
            return PromptPrefix(tokens, mark)
        return stored if stored.tokens == tokens else None  # other tokens with the same hash

    def _split_prefills(self) -> list[PrefillChunk]:
        """Return chunks of the pending prefills for the next step, in order.

        The chunks have at most `budget.max_prefill_tokens` tokens in total. Only a prefill that is
        longer than this is split. If the budget forbids splitting, such a prefill is computed
        whole, in a step without other prefills.
        """
        room = self.budget.max_prefill_tokens
        chunks: list[PrefillChunk] = []
        while self.prefilling and room:
            fill = self.prefilling[0]
            rest = len(fill.tokens) - fill.num_done
            if rest > room and (
                rest <= self.budget.max_prefill_tokens or not self.budget.splits_prompts
            ):
                if chunks:
                    break
                room = rest
            chunk = PrefillChunk(fill, fill.num_done, fill.num_done + min(rest, room))
            chunks.append(chunk)
            room -= chunk.stop - chunk.start
            fill.num_done = chunk.stop
            if not chunk.is_last:
                break
            self.prefilling.pop(0)
            if fill.new_prefix is not None:
                fill.new_prefix.is_ready = True
            for sequence in fill.sequences:
                self.running[sequence.key] = sequence
                self.blocks.start(sequence.key)
        return chunks
