"""Decode steps of a generation: how many sequences decode together, and how many are preempted.

As long as the KV cache has room for all sequences, the steps follow from the lengths of answers.
Otherwise the decisions of the generator's scheduler (`weft.engine.generation.scheduler`) are
replayed for a sample of the sequences. The functions are pure.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

PAGE = 256  # tokens of a page of the KV cache (`weft.models.kv.pages`)
SAMPLED_STEPS = 8  # decode steps whose time is computed; the others are like one of them
# Maximum number of replayed sequences, and about how many of them run together; each represents an
# equal number of sequences
REPLAYED = 128
REPLAYED_TOGETHER = 16
STRIDES = 64  # strides in which a replay decodes the longest answer
SEED = 1

DecodeSteps = tuple[float, float, float]  # number of steps, mean batch, mean tokens before a token


@dataclass(frozen=True)
class DecodingPlan:
    """Steps of a generation on one device.

    Attributes:
        steps: Groups of equal decode steps.
        computed_again: Tokens that are computed again after their sequences were preempted.
        preemptions: Number of times that a sequence is preempted.
    """

    steps: tuple[DecodeSteps, ...]
    computed_again: float = 0.0
    preemptions: float = 0.0


@lru_cache(maxsize=4096)
def plan_decoding(
    sequences: int,
    together: int,
    *,
    prompt: int,
    mean: float,
    longest: int | None,
    samples: int,
    room: int,
) -> DecodingPlan:
    """Return the decode steps of `sequences` sequences, of which at most `together` run at a time.

    Answers have `mean` tokens on average, and `longest` at most (None: all are alike). Each prompt of
    `prompt` tokens has `samples` answers, which share its keys and values. The KV cache has room for
    `room` tokens.
    """
    longest = round(max(longest or mean, mean))
    shared = prompt / samples
    if together * (shared + longest + 2 * PAGE) <= room:
        return DecodingPlan(tuple(_list_steps(sequences, together, prompt, mean, longest)))
    return _simulate_decoding(sequences, together, prompt, shared, max(1, mean), longest, room)


def _list_steps(
    sequences: int, together: int, prompt: int, mean: float, longest: int
) -> list[DecodeSteps]:
    """Return the steps without preemption.

    As long as sequences wait, the batch is full. Then answers end one after another: with a mean m
    and a longest answer of n tokens, the share of answers that are longer than t tokens is taken as
    1 - (t / n)^(m / (n - m)), whose integral is m.
    """
    steps = []
    if sequences > together:
        full = (sequences - together) * mean / together
        steps.append((full, float(together), prompt + mean / 2))
    steps_per_group = longest / SAMPLED_STEPS
    for number in range(SAMPLED_STEPS):
        position = (number + 0.5) * steps_per_group
        alive = 1.0
        if longest > mean:
            alive = 1.0 - (position / longest) ** (mean / (longest - mean))
        steps.append((steps_per_group, max(1.0, together * alive), prompt + position))
    return steps


@dataclass(eq=False)
class _ReplayedAnswer:
    """Answer in a replay: its length, and the tokens decoded so far."""

    length: float
    done: float = 0.0
    started: bool = False


def _simulate_decoding(
    sequences: int,
    together: int,
    prompt: int,
    shared: float,
    mean: float,
    longest: int,
    room: int,
) -> DecodingPlan:
    """Return the steps of a generation whose KV cache is too small for all its sequences.

    As in the scheduler, waiting sequences are admitted in order as long as their tokens fit. If
    running ones need more room than there is, the youngest are preempted: they wait at the head of
    the queue, and their tokens are computed again.
    """
    num_fitting = min(together, max(1.0, room / (shared + mean / 2 + 1.5 * PAGE)))
    represented = max(1.0, num_fitting / REPLAYED_TOGETHER)
    count = min(REPLAYED, round(sequences / represented) or 1)
    rounds = sequences / (count * represented)  # the replay is repeated for the other sequences
    most = max(1.0, together / represented)
    pages = max(room / PAGE / represented, (shared + longest) / PAGE + 2.0)
    power = (longest - mean) / mean if longest > mean else 0.0
    lengths = [longest * ((number + 0.5) / count) ** power for number in range(count)]
    random.Random(SEED).shuffle(lengths)
    waiting = deque(_ReplayedAnswer(length) for length in lengths)
    running: list[_ReplayedAnswer] = []
    stride = max(1.0, longest / STRIDES)
    steps: list[DecodeSteps] = []
    computed_again = preemptions = 0.0

    def count_pages(answer: _ReplayedAnswer, more: float) -> float:
        # The first and the last page are partly empty, as `PageManager` counts.
        return (shared + answer.done + more) / PAGE + 1.5

    while waiting or running:
        used = sum(count_pages(answer, stride) for answer in running)
        preempted = False
        while used > pages and len(running) > 1:
            youngest = running.pop()
            used -= count_pages(youngest, stride)
            waiting.appendleft(youngest)
            preemptions += 1.0
            preempted = True
        while not preempted and waiting and len(running) < most:
            needed = count_pages(waiting[0], 0.0)
            if running and used + needed > pages:
                break
            used += needed
            answer = waiting.popleft()
            if answer.started:
                computed_again += shared + answer.done
            answer.started = True
            running.append(answer)
        context = prompt + sum(answer.done for answer in running) / len(running) + stride / 2
        steps.append((rounds * stride, max(1.0, len(running) * represented), context))
        for answer in running:
            answer.done += stride
        running = [answer for answer in running if answer.done < answer.length]
    return DecodingPlan(
        _join_steps(steps),
        rounds * computed_again * represented,
        rounds * preemptions * represented,
    )


def _join_steps(steps: list[DecodeSteps]) -> tuple[DecodeSteps, ...]:
    """Return fewer groups of steps, with the same numbers of steps and of tokens."""
    joined = []
    size = -(-len(steps) // (2 * SAMPLED_STEPS))
    for first in range(0, len(steps), size):
        part = steps[first : first + size]
        total = sum(number for number, _, _ in part)
        batch = sum(number * batch for number, batch, _ in part) / total
        tokens = sum(number * batch * context for number, batch, context in part)
        joined.append((total, batch, tokens / total / batch))
    return tuple(joined)
