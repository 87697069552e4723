"""Expert parallelism: each rank holds some of the experts, and tokens are sent to their experts.

    join(network, group)             # before memory is allocated: keeps only this rank's experts
    network(packed, want)            # a different pack on each rank

With e ranks in the group and E experts, each rank holds E / e whole experts, and every rank has all
routers. All ranks must run the same number of forward and backward passes. Tokens are sent to the
ranks of their experts and back by all-to-all (Lepikhin et al. 2020, "GShard", arXiv:2006.16668).
Unlike in GShard, experts have no capacity: a rank receives exactly the rows that its experts
process, without padding, and no token is dropped. The gradient of an expert covers the tokens of
all ranks of the group, and is summed over the ranks of other groups that hold the same experts. All
other gradients are summed as without expert parallelism. `weft.parallel.shard.gather` collects all
experts again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft.kernels import RowGroups
from weft.models.network.dropout import TokenDropout
from weft.models.network.moe import ExpertMLP, ExpertStack


def join(network: nn.Module, group: ProcessGroup) -> None:
    """Keep only this rank's experts in each MoE layer, and set up the exchange of tokens.

    The ranks of `group` divide the experts among themselves. Call this before memory is allocated
    for the network's parameters.
    """
    for module in network.modules():
        if isinstance(module, ExpertMLP):
            for name, stack in list(module.named_children()):
                assert isinstance(stack, ExpertStack) and stack.adapter is None, (
                    "adapters are added afterwards"
                )
                num, outputs, inputs = stack.weight.shape
                with stack.weight.device:
                    local_stack = ExpertStack(num // group.size(), inputs, outputs).to(
                        stack.weight.dtype
                    )
                setattr(module, name, local_stack)
            exchange = _ExpertExchange(group)
            module.register_forward_pre_hook(exchange.send_rows)
            module.register_forward_hook(exchange.send_outputs)


class _ExpertExchange:
    """Hooks on `ExpertMLP` that exchange the rows between ranks that each have some of the experts.

    Each row is sent to the rank that has the row's expert, and the output of the expert is sent
    back. In between, the object stores the numbers and the order of the rows.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # (numbers of rows sent to and received from each rank, order of the received rows)
        self._sent: tuple[list[int], list[int], Tensor] | None = None

    def send_rows(
        self, experts: nn.Module, given: tuple[Tensor, RowGroups, TokenDropout | None]
    ) -> tuple[Tensor, RowGroups, TokenDropout | None]:
        """Replace the rows of this rank's tokens by the rows for this rank's experts."""
        x, groups, dropout = given
        # Exchange the numbers of rows, which the host needs as split sizes.
        counts = groups.counts.view(self._group.size(), -1)  # [ranks, experts of a rank]
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent_counts = counts.tolist()
        received_counts = arriving.tolist()
        sent = [sum(row) for row in sent_counts]
        taken = [sum(row) for row in received_counts]
        # Rows arrive sorted by source rank, then by expert; sort them by expert.
        expert = torch.arange(arriving.shape[1], device=x.device).repeat(self._group.size())
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(taken)).argsort(
            stable=True
        )
        rows = _exchange_rows(x, sent, taken, self._group).index_select(0, order)
        if dropout is None:
            keys = None
        else:
            keys = self._exchange_dropout(dropout, sent, taken).select(order)
        self._sent = sent, taken, order
        local_groups = RowGroups(
            arriving.sum(0), [sum(column) for column in zip(*received_counts, strict=True)]
        )
        return rows, local_groups, keys

    def send_outputs(self, experts: nn.Module, given: object, outputs: Tensor) -> Tensor:
        """Send the outputs back in the order in which the rows arrived."""
        assert self._sent is not None
        sent, taken, order = self._sent
        self._sent = None
        outputs = outputs.index_select(0, order.argsort())
        return _exchange_rows(outputs, taken, sent, self._group)

    def _exchange_dropout(
        self, dropout: TokenDropout, sent: list[int], taken: list[int]
    ) -> TokenDropout:
        """Return the dropout keys and positions of the tokens that this rank receives.

        They determine the dropout masks of the tokens, so each token's key and position are sent to
        the rank of its expert. `dropout` has the keys and positions of this rank's own tokens.
        `sent[r]` tokens are sent to rank r, and `taken[r]` tokens are received from it.
        """
        words = _all_to_all(
            torch.cat([dropout.keys, dropout.positions[:, None]], dim=1), sent, taken, self._group
        )
        return replace(dropout, keys=words[:, :2], positions=words[:, 2])


def _exchange_rows(x: Tensor, sent: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    """Send `sent[r]` consecutive rows of x to each rank r, and return the rows received.

    `taken[r]` rows are received from each rank r. The backward pass sends the gradients back.
    """
    y: Tensor = _AllToAll.apply(x, sent, taken, group)
    return y


def _all_to_all(x: Tensor, sent: list[int], taken: list[int], group: ProcessGroup) -> Tensor:
    y = x.new_empty(sum(taken), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), taken, sent, group=group)
    return y


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], taken: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.given = sent, taken, group
        return _all_to_all(x, sent, taken, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, taken, group = ctx.given
        return _all_to_all(gradients[0], taken, sent, group), None, None, None
