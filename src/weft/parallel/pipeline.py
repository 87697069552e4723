"""Pipeline parallelism: each rank computes some stages of a network and sends their results.

    pipeline = Pipeline({0: first}, "1f1b", group)          # rank 0; {1: second} on rank 1
    pipeline.train(microbatches, loss)                      # adds to this rank's gradients
    sum_tied_gradients(copies, ends, device)                # if the embedding is tied
    outputs = pipeline.forward(microbatches)                # on the last stage's rank, else None
    outputs = pipeline.share_outputs(outputs)               # on every rank

`weft.parallel.schedule` defines the order of the computations. Only hidden states and their
gradients are sent. All ranks have the same micro-batches, so each rank knows the shape of every
tensor that it receives: [T, hidden] for a pack of T tokens, where T can differ between
micro-batches. If context or sequence parallelism splits the tokens, T counts only this rank's
tokens.
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
from weft.models.network.packed import Microbatch
from weft.models.network.transformer import Transformer
from weft.parallel.backward_halves import Group, compute_input_half, compute_weight_half
from weft.parallel.collectives import connect_outputs, sum_over_ranks
from weft.parallel.schedule import (
    Action,
    ComputeAction,
    Kind,
    TransferAction,
    build_placement,
    plan_actions,
)
from weft.parallel.shard import finish_backward, is_sharded, sync_gradients, unshard

T = TypeVar("T")
# Limit on a rank's unfinished sends. At the limit, wait for the oldest one, which was received long
# ago unless a rank is stuck.
MAX_SENDS = 8
Outputs = dict[Output, Tensor]
Loss = Callable[[int, Outputs], Tensor]  # (micro-batch number, its outputs) -> scalar
# (stage, micro-batch), called after the forward pass -> scalar, or None if there is nothing to add
StageLoss = Callable[[int, int], Tensor | None]
# (source stage, target stage, micro-batch) of a tensor in transit
TransferKey = tuple[int, int, int]


def split_network(network: Transformer, runs: Sequence[range]) -> list[Transformer]:
    """Split a network into one network for each run of consecutive layers in `runs`.

    Together, the runs must cover all layers of the network. The new networks become submodules of
    the network and share its parameters. Hooks on the network also run for the new networks.
    """
    parts = []
    for run in runs:
        with torch.device("meta"):
            part = Transformer(network.config, network.kind, network.pooling, layers=run)
        for name, _ in list(part.named_children()):
            setattr(part, name, getattr(network, name))
        part.blocks = nn.ModuleList(
            network.blocks[network.held_layers.index(layer)] for layer in run
        )
        part.vocab_size = network.vocab_size
        part.padding = network.padding
        part.recompute_every = network.recompute_every
        part.repeats_prefixes = network.repeats_prefixes
        part._forward_pre_hooks.update(network._forward_pre_hooks)
        part._forward_hooks.update(network._forward_hooks)
        part._forward_hooks_always_called.update(network._forward_hooks_always_called)
        parts.append(part.train(network.training))
    network.stages = nn.ModuleList(parts)
    return parts


class Pipeline:
    """Part of a pipeline that runs on one rank.

    `networks` maps the index of each of the rank's stages to the network of the stage.
    """

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
        """Create this rank's part of a pipeline that runs the schedule `kind`.

        Args:
            networks: Network of each of this rank's stages, by stage index.
            kind: Name of the schedule, such as "1f1b".
            group: Ranks of the pipeline in order, or None if this is the only rank.
            dtype: Dtype of the hidden states, by default that of the parameters.
            count_of: Function from the number of tokens in a pack to the number of rows that this
                rank has. Needed only if context or sequence parallelism splits the tokens.
            sums_once: If False, sharded gradients are summed over the ranks after each backward
                pass, so that a rank stores only the gradients of its own rows. If True, they are
                summed only after a stage's last backward pass, which needs less communication but
                more memory.

        Raises `ConfigError` if `networks` are not the stages that the schedule assigns to this
        rank.
        """
        self.networks = dict(networks)
        self.kind = kind
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.placement = build_placement(kind, 1 if group is None else group.size(), len(networks))
        stages = self.placement.list_stages(self.rank)
        if tuple(sorted(networks)) != stages:
            raise ConfigError(
                f"pipeline schedule {kind}: rank {self.rank} of {self.placement.ranks} holds "
                f"stages {list(stages)}, "
                f"not {sorted(networks)}"
            )
        parameter = next(self.networks[stages[0]].parameters())
        self.dtype = dtype or parameter.dtype
        self.device = parameter.device
        self.width = self.networks[stages[0]].config.hidden_size
        self.lending_stage = _find_lending_stage(
            self.networks.get(0), self.networks.get(self.placement.num_stages - 1)
        )
        self._count_of = count_of
        self.sums_once = sums_once

    @property
    def has_last_stage(self) -> bool:
        """True if this rank computes the last stage."""
        return self.rank == self.placement.last_rank

    def compute_shape(self, microbatch: Microbatch) -> tuple[int, int]:
        """Return the shape (tokens, hidden) of the hidden states that this rank receives and sends.

        If several ranks split the tokens, only this rank's tokens are counted.
        """
        tokens = microbatch.num_tokens
        return tokens if self._count_of is None else self._count_of(tokens), self.width

    def train(
        self, microbatches: Sequence[Microbatch], loss: Loss, stage_loss: StageLoss | None = None
    ) -> None:
        """Run the forward and backward pass of every micro-batch, adding to this rank's gradients.

        `loss` is called on the rank of the last stage. `stage_loss` is called on every rank, and
        returns a term that the stage adds to the loss, such as the load-balancing loss of its
        experts. Raises `RunError` if another rank does not send or receive within the group's
        timeout.
        """
        actions = plan_actions(self.kind, self.placement, len(microbatches))[self.rank]
        with torch.enable_grad():
            _PipelineRun(self, microbatches, loss, stage_loss).run(actions)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Microbatch]) -> list[Outputs] | None:
        """Return each micro-batch's outputs on the rank of the last stage, and None on other ranks.

        Raises `RunError` if another rank does not send or receive within the group's timeout.
        """
        outputs: dict[int, Outputs] = {}

        def keep(microbatch: int, microbatch_outputs: Outputs) -> Tensor:
            outputs[microbatch] = microbatch_outputs
            return torch.empty(0)

        actions = plan_actions(self.kind, self.placement, len(microbatches), forward_only=True)[
            self.rank
        ]
        _PipelineRun(self, microbatches, keep, None).run(actions)
        if self.has_last_stage:
            return [outputs[number] for number in range(len(microbatches))]
        return None

    def share_outputs(self, outputs: Sequence[Outputs] | None) -> list[Outputs]:
        """Broadcast the outputs of the last stage, and return them on every rank.

        `outputs` has the outputs of each micro-batch, and is None on ranks without the last stage.
        Outputs with the same name are concatenated over all micro-batches and sent in one
        broadcast.
        """
        if self.group is None:
            return list(outputs or ())
        # Share shapes and dtypes first, so that the other ranks can allocate buffers.
        own_outputs = [] if outputs is None else outputs
        forms = self.share_values(
            [{name: (tuple(x.shape), x.dtype) for name, x in part.items()} for part in own_outputs]
        )
        # Broadcast each output of all micro-batches as one flat tensor.
        shared_outputs: list[Outputs] = [{} for _ in forms]
        for name in dict.fromkeys(name for form in forms for name in form):
            having = []
            for number, form in enumerate(forms):
                if name in form:
                    having.append(number)
            shapes = [forms[number][name][0] for number in having]
            sizes = [int(torch.Size(shape).numel()) for shape in shapes]
            if self.has_last_stage:
                flat = torch.cat(
                    [own_outputs[number][name].detach().flatten() for number in having]
                )
            else:
                flat = torch.empty(sum(sizes), dtype=forms[having[0]][name][1], device=self.device)
            dist.broadcast(flat, group=self.group, group_src=self.placement.last_rank)
            for number, shape, part in zip(having, shapes, flat.split(sizes), strict=True):
                shared_outputs[number][name] = part.view(shape)
        return shared_outputs

    def share_values(self, values: T) -> T:
        """Broadcast `values` from the rank with the last stage, and return them on every rank.

        Used for small picklable values, such as statistics.
        """
        if self.group is None:
            return values
        box: list[Any] = [values if self.has_last_stage else None]
        dist.broadcast_object_list(
            box, group=self.group, group_src=self.placement.last_rank, device=self.device
        )
        shared_values: T = box[0]
        return shared_values


@dataclass
class _StagePass:
    """Results of a stage's forward pass that are kept for its backward pass."""

    states: Tensor | None  # [T, hidden]: the stage's input, a leaf
    output: Tensor | None  # [T, hidden]: the stage's result; None for the last stage
    losses: list[Tensor]
    groups: list[Group] = field(default_factory=list)  # groups of weights, set by the "I" half


class _PipelineRun:
    """Executor of one rank's pipeline actions for a sequence of micro-batches.

    Tensors that are sent or received are stored under the key (source stage, target stage,
    micro-batch).
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
        self._passes: dict[tuple[int, int], _StagePass] = {}
        # tensors to send, or inputs of another stage on this rank
        self._local_tensors: dict[TransferKey, Tensor] = {}
        self._receives: dict[TransferKey, tuple[Tensor, dist.Work]] = {}
        self._sends: dict[TransferKey, tuple[Tensor, dist.Work]] = {}
        # Number of backward passes left, by stage.
        self._backward_left = dict.fromkeys(pipeline.networks, len(microbatches))

    def run(self, actions: Sequence[Action]) -> None:
        if torch.is_grad_enabled():
            for network in self._pipeline.networks.values():
                sync_gradients(network, not self._pipeline.sums_once)
        for action in actions:
            if isinstance(action, ComputeAction):
                self._compute(action)
            else:
                self._post_message(action)
        lends = self._pipeline.lending_stage
        if lends is not None and torch.is_grad_enabled():
            finish_backward(lends, sums=True)
        for ends in list(self._sends):
            self._wait_for_send(ends)

    # -- computing

    def _compute(self, action: ComputeAction) -> None:
        if action.stage == self._pipeline.placement.num_stages - 1:
            lends = self._pipeline.lending_stage
        else:
            lends = None
        if lends is not None:
            unshard(lends)
        compute = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_backward_input,
            "W": self._run_backward_weight,
        }
        compute[action.half](action.stage, action.microbatch)
        if lends is not None and action.half != "F":
            finish_backward(lends, sums=not self._pipeline.sums_once)

    def _run_forward(self, stage: int, microbatch: int) -> None:
        network = self._pipeline.networks[stage]
        inputs = self._microbatches[microbatch]
        states = None if stage == 0 else self._take((stage - 1, stage, microbatch))
        training = torch.is_grad_enabled()
        if states is not None and training:
            states.requires_grad_()
        result = network(inputs.x, inputs.want, inputs.temperature, inputs.support, states)
        next_states = None
        losses = []
        if isinstance(result, Tensor):
            next_states = result
            self._local_tensors[stage, stage + 1, microbatch] = next_states.detach().contiguous()
        else:
            loss = self._loss(microbatch, result)
            if training and is_sharded(network) and not loss.requires_grad:
                # Other ranks wait for this rank's gradients.
                loss = connect_outputs(loss, result.values())
            losses.append(loss)
        if self._stage_loss is not None:
            stage_loss = self._stage_loss(stage, microbatch)
            if stage_loss is not None:
                losses.append(stage_loss)
        if training:
            self._passes[stage, microbatch] = _StagePass(states, next_states, losses)

    def _run_backward(self, stage: int, microbatch: int) -> None:
        network = self._pipeline.networks[stage]
        passed = self._passes.pop((stage, microbatch))
        roots, gradients = self._find_roots(stage, microbatch, passed)
        sums = self._count_backward(stage)
        if sums:
            sync_gradients(network, True)
        if roots:
            torch.autograd.backward(roots, gradients)
        elif sums:  # no backward pass ran, so no hook did
            finish_backward(network, sums=True)
        self._pass_back(stage, microbatch, passed)

    def _run_backward_input(self, stage: int, microbatch: int) -> None:
        """Compute the gradient of the stage's input, but not yet the gradients of its weights.

        `_run_backward_weight` computes the gradients of the weights later. The first stage has no
        input gradient, so its whole backward pass is left to `_run_backward_weight`. With
        activation recomputation, the whole backward pass runs immediately; split in two, it would
        recompute the blocks several times.
        """
        if stage == 0:
            return
        network = self._pipeline.networks[stage]
        passed = self._passes[stage, microbatch]
        if network.recompute_every:
            self._run_backward(stage, microbatch)
            return
        roots, gradients = self._find_roots(stage, microbatch, passed)
        assert passed.states is not None, "stages after the first are given states"
        passed.groups = compute_input_half(roots, gradients, passed.states)
        passed.output = None
        passed.losses = []
        self._pass_back(stage, microbatch, passed)
        passed.states = None

    def _run_backward_weight(self, stage: int, microbatch: int) -> None:
        if stage == 0:
            self._run_backward(stage, microbatch)
        elif (stage, microbatch) in self._passes:
            groups = self._passes.pop((stage, microbatch)).groups
            compute_weight_half(
                self._pipeline.networks[stage], groups, sums=self._count_backward(stage)
            )

    def _count_backward(self, stage: int) -> bool:
        """Count a backward pass, and return whether it sums the stage's gradients over the ranks.

        The last backward pass of a stage always sums the gradients.
        """
        self._backward_left[stage] -= 1
        return self._backward_left[stage] == 0 or not self._pipeline.sums_once

    def _find_roots(
        self, stage: int, microbatch: int, passed: _StagePass
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the tensors at which a stage's backward pass starts, and the gradient of each.

        The first tensors are the stage's losses. Their gradients are None, which means 1. They
        are followed by the stage's output and the gradient received from the next stage, except on
        the last stage, which has only losses.
        """
        roots: list[Tensor] = []
        for loss in passed.losses:
            if loss.requires_grad:
                roots.append(loss)
        gradients: list[Tensor | None] = [None] * len(roots)
        if passed.output is not None:
            gradient = self._take((stage + 1, stage, microbatch))
            # Its gradient is back, so the states were received.
            self._wait_for_send((stage, stage + 1, microbatch))
            if passed.output.requires_grad:
                roots.append(passed.output)
                gradients.append(gradient)
        return roots, gradients

    def _pass_back(self, stage: int, microbatch: int, passed: _StagePass) -> None:
        if passed.states is not None:
            gradient = passed.states.grad
            if gradient is None:  # no token of this micro-batch is trained
                gradient = torch.zeros_like(passed.states)
            self._local_tensors[stage, stage - 1, microbatch] = gradient.contiguous()

    # -- sending

    def _post_message(self, message: TransferAction) -> None:
        pipeline = self._pipeline
        ends = (message.source, message.target, message.microbatch)
        # A tag per micro-batch, source stage and direction.
        tag = 2 * (message.microbatch * pipeline.placement.num_stages + message.source)
        tag += message.target > message.source
        try:
            if message.direction == "SEND":
                if len(self._sends) == MAX_SENDS:
                    self._wait_for_send(next(iter(self._sends)))
                tensor = self._local_tensors.pop(ends)
                peer = pipeline.placement.get_rank(message.target)
                work = dist.isend(tensor, group=pipeline.group, group_dst=peer, tag=tag)
            else:
                shape = pipeline.compute_shape(self._microbatches[message.microbatch])
                tensor = torch.empty(shape, dtype=pipeline.dtype, device=pipeline.device)
                peer = pipeline.placement.get_rank(message.source)
                work = dist.irecv(tensor, group=pipeline.group, group_src=peer, tag=tag)
        except RuntimeError as error:
            raise self._build_lost_error(ends, sending=message.direction == "SEND") from error
        assert work is not None
        in_flight = self._sends if message.direction == "SEND" else self._receives
        in_flight[ends] = tensor, work

    def _take(self, ends: TransferKey) -> Tensor:
        """Return the tensor that a neighbouring stage has computed for one of this rank's stages.

        `ends` is the key of the tensor: (source stage, target stage, micro-batch). If the tensor
        comes from another rank, the method waits for it.
        """
        if ends not in self._receives:
            return self._local_tensors.pop(ends)
        tensor, work = self._receives.pop(ends)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._build_lost_error(ends, sending=False) from error
        return tensor

    def _wait_for_send(self, ends: TransferKey) -> None:
        """Wait until the sent tensor with the key `ends` has been received, and release its memory.

        Does nothing if no tensor with this key is being sent.
        """
        if ends in self._sends:
            _, work = self._sends.pop(ends)
            try:
                work.wait()
            except RuntimeError as error:
                raise self._build_lost_error(ends, sending=True) from error

    def _build_lost_error(self, ends: TransferKey, *, sending: bool) -> RunError:
        source, target, microbatch = ends
        kind = "states" if target > source else "gradient"
        own_stage, peer_stage = (source, target) if sending else (target, source)
        peer = self._pipeline.placement.get_rank(peer_stage)
        verb = "was not received by" if sending else "did not come from"
        return RunError(
            f"pipeline stage {own_stage} (rank {self._pipeline.rank}), micro-batch {microbatch}: "
            f"the {kind} {verb} stage {peer_stage} "
            f"(rank {peer}); that rank failed, or is later than the process group's timeout: look "
            f"at its log first"
        )


def _find_lending_stage(first: Transformer | None, last: Transformer | None) -> Transformer | None:
    """Return the first stage of the pipeline if the last stage uses the same embedding matrix.

    `first` and `last` are these two stages, or None if this rank does not have them. Returns None
    unless the rank has both as separate stages and their embeddings are tied.
    """
    if first is None or last is None or first is last or "embed" not in dict(last.named_children()):
        return None
    return first if first.embed is last.embed else None


def sum_tied_gradients(
    copies: Sequence[Tensor], group: ProcessGroup | None, device: torch.device
) -> None:
    """Set the gradient of each copy of a tied matrix to the sum of the gradients of all copies.

    The ranks of the first and the last stage must call this after the backward passes. `group` has
    these two ranks, and is None if one rank has both stages. `device` is the device on which the
    gradients are summed.
    """
    if not copies:
        return
    gradients = [torch.zeros_like(copy) if copy.grad is None else copy.grad for copy in copies]
    total = gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)
    total = total.to(device).contiguous()
    if group is not None:
        sum_over_ranks(total, group)
    for number, copy in enumerate(copies):
        copy.grad = total.to(copy.device, copy=number > 0)
