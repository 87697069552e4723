"""Mixture of experts in place of an MLP.

Each token is sent to `top_k` experts, and no token is dropped for lack of capacity.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import kernels
from weft.kernels import Activation, RowGroups
from weft.models.network.aux_loss import MoEAuxLoss
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout
from weft.models.network.linear import Adapter, Linear, apply_adapter


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
        # Without rows, still use the parameters, so that their gradients are 0 and not missing.
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


class Experts(nn.Module):
    """Feed-forward networks of all experts: down(activation(gate(x)) * up(x))."""

    def __init__(self, num: int, hidden: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.gate = ExpertStack(num, hidden, inner)
        self.up = ExpertStack(num, hidden, inner)
        self.down = ExpertStack(num, inner, hidden)

    def forward(self, x: Tensor, groups: RowGroups, dropout: TokenDropout | None) -> Tensor:
        """Return the output of each row's expert: [rows, hidden] -> [rows, hidden].

        The rows are sorted by expert, and `groups` has the number of rows of each expert.
        """
        gate = self.gate(x, groups, dropout)
        up = self.up(x, groups, dropout)
        y: Tensor = self.down(kernels.activate(gate, self.activation) * up, groups, dropout)
        return y


class MoE(nn.Module):
    """Mixture of experts: [T, hidden] -> [T, hidden].

    The router's softmax is in float32 (Fedus et al. 2021, "Switch Transformers", 2.4).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.experts is not None and config.gated
        experts = config.experts
        hidden = config.hidden_size
        self.top_k = experts.top_k
        self.normalize = experts.normalize
        self.router = Linear(hidden, {"router": experts.num}, bias=False)
        self.experts = Experts(experts.num, hidden, experts.intermediate_size, config.activation)

    def forward(
        self, x: Tensor, dropout: TokenDropout | None, aux_loss: MoEAuxLoss | None = None
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
        outputs = self.experts(inputs, groups, keys)
        # Add up each token's weighted outputs.
        weighted = outputs * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)
