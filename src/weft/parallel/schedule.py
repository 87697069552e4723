"""Pipeline schedules: the order in which ranks compute and send, as plain data.

    placement = build_placement("1f1b", ranks=4)
    actions = plan_actions("1f1b", placement, num_microbatches=8)   # a tuple of actions per rank

No process group is needed. A stage consists of consecutive blocks of the network, and a rank has
one or several stages. `ComputeAction("F", s, m)` is the forward pass of micro-batch m through stage
s, and "B" is its backward pass. "I" and "W" are the two halves of a backward pass: "I" computes the
gradient of the stage's input, and "W" computes the gradients of its weights.

GPipe (Huang et al. 2019, arXiv:1811.06965) and 1F1B (Narayanan et al. 2019, "PipeDream") are
implemented here. Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473), the zero-bubble
schedule ZB1P and ZBV (Qi et al. 2023, arXiv:2401.10241; 2024, arXiv:2405.15362) come from the
tables of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args

from weft.errors import ConfigError
from weft.placement import Placement

Kind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "interleaved_zero_bubble", "zbv"]
Half = Literal["F", "B", "I", "W"]
# Fixed number of stages per rank, by kind. Interleaved kinds have 2 by default, or any larger
# number.
STAGES_A_RANK: dict[Kind, int] = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "zbv": 2}
# Kinds whose backward passes are split into "I" and "W".
SPLIT_BACKWARD_KINDS: tuple[Kind, ...] = ("zero_bubble", "interleaved_zero_bubble", "zbv")
# Names of classes in `torch.distributed.pipelining`, because importing it is slow.
TABLES: dict[Kind, str] = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}


@dataclass(frozen=True)
class ComputeAction:
    """Computation of a stage for one micro-batch.

    `half` is "F" for the forward pass, "B" for the backward pass, "I" for the half of the backward
    pass that computes the gradient of the stage's input, or "W" for the half that computes the
    gradients of its weights.
    """

    half: Half
    stage: int
    microbatch: int


@dataclass(frozen=True)
class TransferAction:
    """Transfer of a stage's result for one micro-batch to or from another rank.

    `source` and `target` are neighbouring stages on different ranks. If `target` is the next stage,
    the tensor has hidden states; if it is the previous stage, the tensor is the gradient of hidden
    states.
    """

    direction: Literal["SEND", "RECV"]
    source: int
    target: int
    microbatch: int


Action = ComputeAction | TransferAction
Order = Sequence[Sequence[ComputeAction]]  # by rank


def build_placement(kind: Kind, ranks: int, stages_per_rank: int | None = None) -> Placement:
    """Return the placement of a pipeline's stages on `ranks` ranks.

    Interleaved schedules have `stages_per_rank` stages per rank, by default 2. Other schedules have a
    fixed number (`STAGES_A_RANK`). Raises `ConfigError` for an unknown kind of schedule, or for a
    number of stages that the kind does not allow.
    """
    if kind not in get_args(Kind):
        raise ConfigError(
            f"pipeline_schedule={kind!r} is unknown; known: {', '.join(get_args(Kind))}"
        )
    fixed = STAGES_A_RANK.get(kind)
    if fixed is not None and stages_per_rank not in (None, fixed):
        were = "was" if stages_per_rank == 1 else "were"
        stages = "one stage" if fixed == 1 else f"{fixed} stages"
        raise ConfigError(
            f"pipeline_schedule={kind} has {stages} per rank, and {stages_per_rank} {were} "
            "asked for; interleaved_1f1b and interleaved_zero_bubble take any number from 2"
        )
    if fixed is None and stages_per_rank is not None and stages_per_rank < 2:
        raise ConfigError(
            f"pipeline_schedule={kind} has at least 2 stages per rank, and {stages_per_rank} was "
            f"asked for; with 1 it is "
            f"{kind.removeprefix('interleaved_')}"
        )
    return Placement(ranks, stages_per_rank or fixed or 2, turns=kind == "zbv")


@cache
def plan_actions(
    kind: Kind, placement: Placement, num_microbatches: int, *, forward_only: bool = False
) -> tuple[tuple[Action, ...], ...]:
    """Return the computations and transfers of each rank, in order.

    With `forward_only`, as for inference, only forward passes are planned.
    """
    order = build_order(kind, placement, num_microbatches)
    if forward_only:  # with fewer dependencies, the order can still be run
        order = [[action for action in actions if action.half == "F"] for actions in order]
    return tuple(map(tuple, add_transfers(order, placement)))


def build_order(kind: Kind, placement: Placement, num_microbatches: int) -> Order:
    """Return the computations of each rank, in order, without transfers."""
    match kind:
        case "gpipe":
            return [_order_gpipe(rank, num_microbatches) for rank in range(placement.ranks)]
        case "1f1b":
            result = []
            for rank in range(placement.ranks):
                result.append(_order_1f1b(rank, placement.ranks, num_microbatches))
            return result
        case _:
            return _from_table(kind, placement, num_microbatches)


def add_transfers(order: Order, placement: Placement) -> list[list[Action]]:
    """Return the actions of each rank: the computations in `order`, and the transfers they need.

    If another rank needs the result of a computation, the computation is followed by a SEND, and
    the other rank's list contains the matching RECV. Actions are placed in the order of a simulated
    run, in which every rank computes one action at a time and begins it once its inputs exist. A
    SEND and its RECV happen at the same time in this run, so the lists of all ranks agree with one
    global order. Therefore ranks cannot deadlock, even if each send blocks until it is received.
    Both ends of a connection also see their messages in the same order, as NCCL requires.

    Raises `ValueError` for an order that cannot be run.
    """
    lists: list[list[Action]] = [[] for _ in order]
    remaining = [list(reversed(actions)) for actions in order]
    done: set[ComputeAction] = set()
    while any(remaining):
        ready = []
        for actions in remaining:
            if actions and all(need in done for need in _iterate_needs(actions[-1], placement)):
                ready.append(actions.pop())
        if not ready:
            stuck = ", ".join(str(actions[-1]) for actions in remaining if actions)
            raise ValueError(
                f"this order cannot be run; next are {stuck}, and their inputs are never computed"
            )
        for action in ready:
            lists[placement.get_rank(action.stage)].append(action)
        for action in ready:
            target = _find_target(action, placement)
            if target is not None and placement.get_rank(target) != placement.get_rank(
                action.stage
            ):
                ends = action.stage, target, action.microbatch
                lists[placement.get_rank(action.stage)].append(TransferAction("SEND", *ends))
                lists[placement.get_rank(target)].append(TransferAction("RECV", *ends))
        done.update(ready)
    return lists


def _find_target(action: ComputeAction, placement: Placement) -> int | None:
    """Return the stage that receives the result of an action, or None if no stage needs it."""
    if action.half == "W":
        return None
    target = action.stage + (1 if action.half == "F" else -1)
    return target if 0 <= target < placement.num_stages else None


def _iterate_needs(action: ComputeAction, placement: Placement) -> Iterator[ComputeAction]:
    """Iterate over the computations whose results an action needs.

    A forward pass "F" needs "F" of the previous stage. A backward pass, "B" or its first half "I",
    needs "F" of the same stage, and the same kind of backward pass of the next stage. The second
    half "W" needs "I" of the same stage.
    """
    stage = action.stage
    microbatch = action.microbatch
    last = placement.num_stages - 1
    if action.half == "F":
        if stage > 0:
            yield ComputeAction("F", stage - 1, microbatch)
        return
    if action.half == "W":
        yield ComputeAction("I", stage, microbatch)
        return
    yield ComputeAction("F", stage, microbatch)
    if stage < last:
        yield ComputeAction(action.half, stage + 1, microbatch)


def _order_gpipe(rank: int, count: int) -> list[ComputeAction]:
    halves: tuple[Half, ...] = ("F", "B")
    gpipe: list[ComputeAction] = []
    for half in halves:
        for m in range(count):
            gpipe.append(ComputeAction(half, rank, m))
    return gpipe


def _order_1f1b(rank: int, ranks: int, count: int) -> list[ComputeAction]:
    """Return the computations of one rank in the 1F1B schedule, for `count` micro-batches.

    The rank first runs one forward pass for each rank after it, then alternates between forward and
    backward passes.
    """
    ahead = min(count, ranks - 1 - rank)
    order = [ComputeAction("F", rank, m) for m in range(ahead)]
    for m in range(count - ahead):
        order += [ComputeAction("F", rank, ahead + m), ComputeAction("B", rank, m)]
    return order + [ComputeAction("B", rank, m) for m in range(count - ahead, count)]


def _from_table(kind: Kind, placement: Placement, count: int) -> Order:
    """Return the computations of each rank in one of torch's schedules, for `count` micro-batches.

    torch's interleaved schedules accept only some numbers of micro-batches. The schedule is
    therefore built for the next number that is accepted, and the micro-batches beyond `count` are
    removed, which does not affect the others. torch's schedule classes get placeholders instead of
    real stages, because only their table of computations is used.
    """
    # Round up to a number of micro-batches that torch's table accepts.
    rounded = count
    while kind != "zbv" and rounded % max(1, rounded // placement.ranks):
        rounded += 1
    # Build the table from placeholders with the attributes that it reads.
    stages = []
    for stage in placement.list_stages(0):
        stages.append(
            SimpleNamespace(
                group_size=placement.ranks,
                group_rank=0,
                stage_index=stage,
                num_stages=placement.num_stages,
                is_first=stage == 0,
                is_last=stage == placement.num_stages - 1,
                submod=None,
                has_backward=True,
            )
        )
    from torch.distributed.pipelining import schedules

    table = getattr(schedules, TABLES[kind])(stages, rounded, loss_fn=_raise_unused).pipeline_order
    # Convert it, and drop the extra micro-batches.
    result = []
    for rank in range(placement.ranks):
        result.append(
            [
                ComputeAction(
                    cast(Half, action.computation_type.value),
                    action.stage_index,
                    action.microbatch_index,
                )
                for action in table[rank]
                if action is not None and action.microbatch_index < count
            ]
        )
    return result


def _raise_unused(*_: Any) -> Any:
    raise AssertionError("only the table of a schedule is used, nothing is computed")
