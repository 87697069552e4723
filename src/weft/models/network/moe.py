"""Mixture of experts in place of an MLP.

Each token is sent to `top_k` experts, and no token is dropped for lack of capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from weft import kernels
from weft.kernels import RowGroups
from weft.models.network.aux_loss import MoEAuxLoss
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout
from weft.models.network.linear import Adapter, Linear, apply_adapter
from weft.models.network.shared_rows import RowShare

ExpertFunction = Callable[[Tensor, RowGroups, TokenDropout | None], Tensor]


class ExpertExchange(Protocol):
    """Interface of functions that compute the outputs of experts that are distributed over ranks.

    Such a function sends each input row to the rank that has the row's expert, and gets the
    expert's output back.
    """

    def __call__(
        self, x: Tensor, groups: RowGroups, dropout: TokenDropout | None, compute: ExpertFunction
    ) -> Tensor:
        """Return the experts' outputs for x [rows, hidden], whose rows are sorted by expert.

        `groups` has the number of rows of each expert, including experts on other ranks. `compute`
        computes the outputs of the experts on this rank. All ranks must call this.
        """
        ...


class ExpertStack(nn.Module):
    """One matrix per expert, stacked: `weight` is [experts, out, in]."""

    def __init__(self, num: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, inputs))
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor, groups: RowGroups, dropout: TokenDropout | None = None) -> Tensor:
        """Multiply each row by the matrix of its expert: x [rows, in] -> [rows, out].

        The rows are sorted by expert, and `groups` has the number of rows of each expert.
        """
        adapter = self.adapter
        if adapter is None or not adapter.active:
            return kernels.grouped_linear(x, self.weight, groups)
        dropped = adapter.apply_dropout(x, dropout)
        if kernels.serves_groups(x, self.weight, adapter.lora_a, adapter.lora_b):
            low = (
                kernels.grouped_linear(x if dropped is None else dropped, adapter.lora_a, groups)
                * adapter.scale
            )
            base_output = kernels.grouped_linear(x, self.weight, groups)
            return base_output + kernels.grouped_linear(low, adapter.lora_b, groups)
        # Without a grouped kernel, compute one expert after the other.
        parts = x.split(groups.sizes)
        sizes = groups.sizes
        others = [None] * len(sizes) if dropped is None else dropped.split(sizes)
        each = zip(parts, others, self.weight, adapter.lora_a, adapter.lora_b, strict=True)
        by_expert = []
        for own, y, w, a, b in each:
            if len(own):
                by_expert.append(apply_adapter(own, y, w, None, a, b, adapter.scale))
        # Without rows, still use the parameters: all ranks of a sharded network must take part.
        if not by_expert:
            return apply_adapter(
                x,
                dropped,
                self.weight[0],
                None,
                adapter.lora_a[0],
                adapter.lora_b[0],
                adapter.scale,
            )
        return torch.cat(by_expert)


class MoE(nn.Module):
    """Mixture of experts: [T, hidden] -> [T, hidden].

    The router's softmax is in float32 (Fedus et al. 2021, "Switch Transformers", 2.4).

    Attributes:
        reduce: Function that sums the output over ranks, set if every expert is split over ranks.
            With sequence parallelism, it is not used, and `forward` returns only this rank's rows
            of the sum.
        exchange: Function that sends each row to the rank with the expert chosen for it, and gets
            the expert's output back. Set if the experts are distributed over ranks.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.experts is not None and config.gated
        experts = config.experts
        hidden = config.hidden_size
        self.top_k = experts.top_k
        self.normalize = experts.normalize
        self.activation = config.activation
        self.router = Linear(hidden, {"router": experts.num}, bias=False)
        self.experts = nn.ModuleDict(
            {
                "gate": ExpertStack(experts.num, hidden, experts.intermediate_size),
                "up": ExpertStack(experts.num, hidden, experts.intermediate_size),
                "down": ExpertStack(experts.num, experts.intermediate_size, hidden),
            }
        )
        self.reduce: Callable[[Tensor], Tensor] | None = None
        self.exchange: ExpertExchange | None = None

    def forward(
        self,
        x: Tensor,
        dropout: TokenDropout | None,
        aux_loss: MoEAuxLoss | None = None,
        share: RowShare | None = None,
    ) -> Tensor:
        # Choose each token's experts.
        logits = self.router(x)
        probabilities = torch.softmax(
            logits, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if aux_loss is not None:
            aux_loss.add(probabilities, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # Sort the pairs of token and expert by expert.
        order = chosen.flatten().argsort(stable=True)  # pairs (token, choice), by expert
        token = order // self.top_k
        counts = chosen.new_zeros(logits.shape[1]).scatter_add_(
            0, chosen.flatten(), torch.ones_like(token)
        )
        groups = RowGroups(counts)
        inputs = x.index_select(0, token)
        keys = None if dropout is None else dropout.select(token)
        # Compute the experts, on other ranks too if these have some of them.
        if self.exchange is None:
            outputs = self._compute_experts(inputs, groups, keys)
        else:
            outputs = self.exchange(inputs, groups, keys, self._compute_experts)
        # Add up each token's weighted outputs.
        weighted = outputs * weights.flatten()[order, None].to(x.dtype)
        y = torch.zeros_like(x).index_add(0, token, weighted)
        if self.reduce is None:
            return y
        return self.reduce(y) if share is None else share.scatter(y)

    def _compute_experts(self, x: Tensor, groups: RowGroups, keys: TokenDropout | None) -> Tensor:
        """Return the outputs of this rank's experts, [rows, hidden].

        The rows of `x` are sorted by expert.
        """
        gate = self.experts["gate"](x, groups, keys)
        up = self.experts["up"](x, groups, keys)
        y: Tensor = self.experts["down"](kernels.activate(gate, self.activation) * up, groups, keys)
        return y
