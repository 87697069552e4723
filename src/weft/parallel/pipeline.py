"""A network whose blocks lie on several ranks, run over micro-batches: each rank computes its
stages and sends what they make.

    pipeline = Pipeline({0: first}, "1f1b", group)          # on rank 0 of the group; {1: second} on rank 1
    pipeline.train(microbatches, loss)                      # adds to the gradients of this rank's stages
    sum_tied_gradients(tied_copies(pipeline.networks), ends, device)
    outputs = pipeline.forward(microbatches)                # on the rank of the last stage; None elsewhere
    outputs = pipeline.share_outputs(outputs)               # on every rank

The order is that of `weft.parallel.schedule`. All ranks have the same micro-batches, so each knows
the shape of whatever comes: [T, hidden] of a pack of T tokens, whose numbers may all differ; where
ranks share the tokens (c and t), of a rank's own ones. Nothing is sent but states and their
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft.algorithms.base import Output
from weft.errors import ConfigError, RunError
from weft.models.network.transformer import Transformer
from weft.parallel.halves import Group, half_of_input, half_of_weights
from weft.parallel.microbatch import Microbatch, connected
from weft.parallel.schedule import Action, Compute, Kind, Message, placement_of, plan
from weft.parallel.shard import is_sharded, make_whole, settle, sync_gradients

T = TypeVar("T")
MOST_SENDS = (
    # of a rank that may be on their way; then the oldest is waited for, which is long received if
    # nobody is stuck
    8
)
Outputs = dict[Output, Tensor]
Loss = Callable[[int, Outputs], Tensor]  # of a micro-batch's number and its outputs: a scalar
# of a stage and a micro-batch, after its forward pass
StageLoss = Callable[[int, int], Tensor | None]
# the stage that makes a tensor, the one that goes on with it, the micro-batch
Ends = tuple[int, int, int]


class Pipeline:
    """One rank's part of a pipeline: `networks` are the stages that it holds, by their numbers."""

    def __init__(
        self,
        networks: Mapping[int, Transformer],
        kind: Kind,
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        count_of: Callable[[int], int] | None = None,
        *,
        sums_once: bool = False,
    ) -> None:
        """`group`: the ranks of the pipeline, in order; None where this is the only one.

        `dtype` is that of the states, by default the parameters'. `count_of` a pack's tokens says
        how many are here, where pipelines share packs. Sharded gradients are summed over the ranks
        after each backward pass, so that a rank keeps those of its rows; with `sums_once` after a
        stage's last one, which sends less and keeps them whole. Raises `ConfigError` for stages
        that the kind puts elsewhere.
        """
        self.networks = dict(networks)
        self.kind = kind
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.placement = placement_of(kind, 1 if group is None else group.size(), len(networks))
        wanted = self.placement.stages_of(self.rank)
        if tuple(sorted(networks)) != wanted:
            raise ConfigError(
                f"pipeline schedule {kind}: rank {self.rank} of {self.placement.ranks} holds "
                f"stages {list(wanted)}, "
                f"not {sorted(networks)}"
            )
        parameter = next(self.networks[wanted[0]].parameters())
        self.dtype = dtype or parameter.dtype
        self.device = parameter.device
        self.width = self.networks[wanted[0]].config.hidden_size
        self.lends = _lender(self.networks.get(0), self.networks.get(self.placement.num_stages - 1))
        self._count_of = count_of
        self.sums_once = sums_once

    @property
    def ends(self) -> bool:
        """Whether this rank holds the last stage."""
        return self.rank == self.placement.last_rank

    def shape_of(self, microbatch: Microbatch) -> tuple[int, int]:
        """Of the states that this rank is given and hands on: of all tokens, or of its own where
        ranks share them.
        """
        sharing = next(iter(self.networks.values())).sharing
        if self._count_of is None:
            tokens = microbatch.num_tokens
        else:
            tokens = self._count_of(microbatch.num_tokens)
        return tokens if sharing is None else sharing.count(tokens), self.width

    def train(
        self, microbatches: Sequence[Microbatch], loss: Loss, stage_loss: StageLoss | None = None
    ) -> None:
        """Forward and backward of every micro-batch.

        `loss` is called on the rank of the last stage, `stage_loss` on each for what a stage itself
        adds to the loss, such as the balance of its experts. Raises `RunError` where another rank
        does not do its part within the group's timeout.
        """
        actions = plan(self.kind, self.placement, len(microbatches))[self.rank]
        with torch.enable_grad():
            _Run(self, microbatches, loss, stage_loss).run(actions)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch]) -> list[Outputs] | None:
        """The outputs of every micro-batch, on the rank of the last stage; None on the others.

        Raises `RunError` as `train`.
        """
        outputs: dict[int, Outputs] = {}

        def keep(microbatch: int, found: Outputs) -> Tensor:
            outputs[microbatch] = found
            return torch.empty(0)

        actions = plan(self.kind, self.placement, len(microbatches), forward_only=True)[self.rank]
        _Run(self, microbatches, keep, None).run(actions)
        if self.ends:
            return [outputs[number] for number in range(len(microbatches))]
        return None

    def share_outputs(self, outputs: Sequence[Outputs] | None) -> list[Outputs]:
        """What the rank of the last stage has, on every rank: one broadcast of each output of all
        micro-batches together.
        """
        if self.group is None:
            return list(outputs or ())
        given = [] if outputs is None else outputs
        forms = self.share_values(
            [{name: (tuple(x.shape), x.dtype) for name, x in each.items()} for each in given]
        )
        found: list[Outputs] = [{} for _ in forms]
        for name in dict.fromkeys(name for form in forms for name in form):
            having = [number for number, form in enumerate(forms) if name in form]
            shapes = [forms[number][name][0] for number in having]
            sizes = [int(torch.Size(shape).numel()) for shape in shapes]
            if self.ends:
                flat = torch.cat([given[number][name].detach().flatten() for number in having])
            else:
                flat = torch.empty(sum(sizes), dtype=forms[having[0]][name][1], device=self.device)
            dist.broadcast(flat, group=self.group, group_src=self.placement.last_rank)
            for number, shape, part in zip(having, shapes, flat.split(sizes), strict=True):
                found[number][name] = part.view(shape)
        return found

    def share_values(self, values: T) -> T:
        """Small plain values (statistics, forms) of the rank of the last stage, on every rank."""
        if self.group is None:
            return values
        box: list[Any] = [values if self.ends else None]
        dist.broadcast_object_list(
            box, group=self.group, group_src=self.placement.last_rank, device=self.device
        )
        found: T = box[0]
        return found


@dataclass
class _Pass:
    """What a stage's forward pass leaves for the backward pass."""

    states: Tensor | None  # that came in, a leaf
    made: Tensor | None  # [T, hidden]: that went out
    losses: list[Tensor]
    groups: list[Group] = field(default_factory=list)  # of weights, once the inputs' half is done


class _Run:
    """One run of a rank's actions.

    Tensors on their way have the key (from stage, to stage, micro-batch).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        microbatches: Sequence[Microbatch],
        loss: Loss,
        stage_loss: StageLoss | None,
    ) -> None:
        self._pipeline = pipeline
        self._microbatches = microbatches
        self._loss = loss
        self._stage_loss = stage_loss
        self._passes: dict[tuple[int, int], _Pass] = {}
        self._made: dict[Ends, Tensor] = {}  # to be sent, or for another stage of this rank
        self._coming: dict[Ends, tuple[Tensor, dist.Work]] = {}
        self._going: dict[Ends, tuple[Tensor, dist.Work]] = {}
        # whose gradients a stage has not got yet
        self._left = dict.fromkeys(pipeline.networks, len(microbatches))

    def run(self, actions: Sequence[Action]) -> None:
        if torch.is_grad_enabled():
            for network in self._pipeline.networks.values():
                sync_gradients(network, not self._pipeline.sums_once)
        for action in actions:
            if isinstance(action, Compute):
                self._compute(action)
            else:
                self._message(action)
        lends = self._pipeline.lends
        if lends is not None and torch.is_grad_enabled():
            settle(lends, sums=True)
        for ends in list(self._going):
            self._sent(ends)

    # -- computing

    def _compute(self, action: Compute) -> None:
        if action.stage == self._pipeline.placement.num_stages - 1:
            lends = self._pipeline.lends
        else:
            lends = None
        if lends is not None:
            make_whole(lends)
        compute = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
        }
        compute[action.half](action.stage, action.microbatch)
        if lends is not None and action.half != "F":
            settle(lends, sums=not self._pipeline.sums_once)

    def _forward(self, stage: int, microbatch: int) -> None:
        network = self._pipeline.networks[stage]
        given = self._microbatches[microbatch]
        states = None if stage == 0 else self._take((stage - 1, stage, microbatch))
        training = torch.is_grad_enabled()
        if states is not None and training:
            states.requires_grad_()
        found = network(given.x, given.want, given.temperature, given.support, states)
        made = None
        losses = []
        if isinstance(found, Tensor):
            made = found
            self._made[stage, stage + 1, microbatch] = made.detach().contiguous()
        else:
            loss = self._loss(microbatch, found)
            if training and is_sharded(network) and not loss.requires_grad:
                loss = connected(loss, found.values())  # other ranks wait for this one's gradients
            losses.append(loss)
        if (
            self._stage_loss is not None
            and (own := self._stage_loss(stage, microbatch)) is not None
        ):
            losses.append(own)
        if training:
            self._passes[stage, microbatch] = _Pass(states, made, losses)

    def _backward(self, stage: int, microbatch: int) -> None:
        network = self._pipeline.networks[stage]
        passed = self._passes.pop((stage, microbatch))
        roots, gradients = self._roots(stage, microbatch, passed)
        sums = self._sums(stage)
        if sums:
            sync_gradients(network, True)
        if roots:
            torch.autograd.backward(roots, gradients)
        elif sums:  # no hook has seen it
            settle(network, sums=True)
        self._pass_back(stage, microbatch, passed)

    def _backward_input(self, stage: int, microbatch: int) -> None:
        """The gradient of what came in; those of the weights wait at the nodes that they enter the
        graph by.

        The first stage has no input: its backward pass is whole and comes later. Blocks that are
        computed again would be so once for each group of weights: theirs is whole and comes now.
        """
        if stage == 0:
            return
        network = self._pipeline.networks[stage]
        passed = self._passes[stage, microbatch]
        if network.recompute_every:
            self._backward(stage, microbatch)
            return
        roots, gradients = self._roots(stage, microbatch, passed)
        assert passed.states is not None, "stages after the first are given states"
        passed.groups = half_of_input(roots, gradients, passed.states)
        passed.made = None
        passed.losses = []
        self._pass_back(stage, microbatch, passed)
        passed.states = None

    def _backward_weight(self, stage: int, microbatch: int) -> None:
        if stage == 0:
            self._backward(stage, microbatch)
        elif (stage, microbatch) in self._passes:
            groups = self._passes.pop((stage, microbatch)).groups
            half_of_weights(self._pipeline.networks[stage], groups, sums=self._sums(stage))

    def _sums(self, stage: int) -> bool:
        """Whether the pass that begins sums the stage's gradients over the ranks: its last one does
        in any case.
        """
        self._left[stage] -= 1
        return self._left[stage] == 0 or not self._pipeline.sums_once

    def _roots(
        self, stage: int, microbatch: int, passed: _Pass
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where a backward pass begins, and with which gradients."""
        roots: list[Tensor] = [loss for loss in passed.losses if loss.requires_grad]
        gradients: list[Tensor | None] = [None] * len(roots)
        if passed.made is not None:
            gradient = self._take((stage + 1, stage, microbatch))
            # its gradient is back, so it has been received
            self._sent((stage, stage + 1, microbatch))
            if passed.made.requires_grad:
                roots.append(passed.made)
                gradients.append(gradient)
        return roots, gradients

    def _pass_back(self, stage: int, microbatch: int, passed: _Pass) -> None:
        if passed.states is not None:
            gradient = passed.states.grad
            if gradient is None:  # nothing of this micro-batch is trained
                gradient = torch.zeros_like(passed.states)
            self._made[stage, stage - 1, microbatch] = gradient.contiguous()

    # -- sending

    def _message(self, message: Message) -> None:
        pipeline = self._pipeline
        ends = (message.source, message.target, message.microbatch)
        tag = 2 * (message.microbatch * pipeline.placement.num_stages + message.source)
        tag += message.target > message.source
        try:
            if message.way == "SEND":
                if len(self._going) == MOST_SENDS:
                    self._sent(next(iter(self._going)))
                tensor = self._made.pop(ends)
                peer = pipeline.placement.rank_of(message.target)
                work = dist.isend(tensor, group=pipeline.group, group_dst=peer, tag=tag)
            else:
                shape = pipeline.shape_of(self._microbatches[message.microbatch])
                tensor = torch.empty(shape, dtype=pipeline.dtype, device=pipeline.device)
                peer = pipeline.placement.rank_of(message.source)
                work = dist.irecv(tensor, group=pipeline.group, group_src=peer, tag=tag)
        except RuntimeError as error:
            raise self._lost(ends, sending=message.way == "SEND") from error
        assert work is not None
        (self._going if message.way == "SEND" else self._coming)[ends] = tensor, work

    def _take(self, ends: Ends) -> Tensor:
        """What another stage made, once it is here."""
        if ends not in self._coming:
            return self._made.pop(ends)
        tensor, work = self._coming.pop(ends)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(ends, sending=False) from error
        return tensor

    def _sent(self, ends: Ends) -> None:
        """Give back what was sent, once it is received."""
        if ends in self._going:
            _, work = self._going.pop(ends)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost(ends, sending=True) from error

    def _lost(self, ends: Ends, *, sending: bool) -> RunError:
        source, target, microbatch = ends
        what = "states" if target > source else "gradient"
        here, there = (source, target) if sending else (target, source)
        peer = self._pipeline.placement.rank_of(there)
        verb = "was not taken by" if sending else "did not come from"
        return RunError(
            f"pipeline stage {here} (rank {self._pipeline.rank}), micro-batch {microbatch}: the "
            f"{what} {verb} stage {there} "
            f"(rank {peer}); that rank failed, or is later than the process group's timeout: look "
            f"at its log first"
        )


def _lender(first: Transformer | None, last: Transformer | None) -> Transformer | None:
    """The first stage, where it is here together with the last one, which reads its matrix (tied
    embeddings).
    """
    if first is None or last is None or first is last or "embed" not in dict(last.named_children()):
        return None
    return first if first.embed is last.embed else None


def tied_copies(networks: Mapping[int, Transformer]) -> list[nn.Parameter]:
    """The embeddings of the first and the last stage among these, where they are copies of one
    matrix.
    """
    found = [
        network.embed.weight
        for network in networks.values()
        if network.config.tied and network.kind == "lm" and network.begins != network.ends
    ]
    return [parameter for parameter in found if parameter.requires_grad]


def sum_tied_gradients(
    copies: Sequence[nn.Parameter], group: ProcessGroup | None, device: torch.device
) -> None:
    """Give each copy the sum of all copies' gradients.

    Both ends of the pipeline call it after the backward passes, with the `group` of the two's
    devices; None where one rank holds both.
    """
    if not copies:
        return
    given = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
    total = torch.stack(given).sum(0).to(device)
    if group is not None:
        dist.all_reduce(total, group=group)
    for copy in copies:
        copy.grad = total.to(copy.device, copy=True)
