"""Mixture of experts in place of an MLP.

Each token is sent to `top_k` experts, and no token is dropped for lack of capacity. A
load-balancing loss keeps the router from sending all tokens to a few experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft import kernels
from weft.errors import ConfigError
from weft.kernels import Activation, RowGroups
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout
from weft.models.network.linear import Adapter, Linear, apply_adapter

# Weight of the loss if config.json sets `output_router_logits` but no `router_aux_loss_coef`.
DEFAULT_AUX_LOSS_WEIGHT = 0.001


class ExpertStack(nn.Module):
    """One matrix per expert, stacked: `weight` is [experts, out, in]."""

    def __init__(self, num_experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs))
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor, groups: RowGroups, dropout: TokenDropout | None = None) -> Tensor:
        """Multiply each row by the matrix of its expert: x [rows, in] -> [rows, out].

        The rows are sorted by expert, and `groups` has the number of rows of each expert.
        """
        adapter = self.adapter
        if adapter is None or not adapter.active:
            return kernels.grouped_linear(x, self.weight, groups)
        dropped = adapter.apply_dropout(x, dropout)
        # With a grouped kernel, compute all experts at once.
        if kernels.serves_groups(x, self.weight, adapter.lora_a, adapter.lora_b):
            adapter_input = x if dropped is None else dropped
            low_rank = kernels.grouped_linear(adapter_input, adapter.lora_a, groups) * adapter.scale
            base_output = kernels.grouped_linear(x, self.weight, groups)
            return base_output + kernels.grouped_linear(low_rank, adapter.lora_b, groups)
        # Without a grouped kernel, compute one expert after the other.
        sizes = groups.sizes
        dropped_parts = [None] * len(sizes) if dropped is None else dropped.split(sizes)
        experts = zip(
            x.split(sizes),
            dropped_parts,
            self.weight,
            adapter.lora_a,
            adapter.lora_b,
            strict=True,
        )
        outputs = []
        for rows, dropped_rows, weight, a, b in experts:
            if len(rows):
                outputs.append(apply_adapter(rows, dropped_rows, weight, None, a, b, adapter.scale))
        # Without rows, still use the parameters, so that their gradients are 0 and not missing.
        if not outputs:
            return apply_adapter(
                x,
                dropped,
                self.weight[0],
                None,
                adapter.lora_a[0],
                adapter.lora_b[0],
                adapter.scale,
            )
        return torch.cat(outputs)


class ExpertMLP(nn.Module):
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

    The router's softmax is in float32 (Fedus et al. 2021, "Switch Transformers", 2.4). Passes in
    training mode append the load of the busiest expert to `loads`; `take_loads` empties it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.experts is not None and config.gated
        experts = config.experts
        hidden = config.hidden_size
        self.top_k = experts.top_k
        self.normalize = experts.normalize
        self.router = Linear(hidden, {"router": experts.num}, bias=False)
        self.experts = ExpertMLP(experts.num, hidden, experts.intermediate_size, config.activation)
        # For each pass: tokens of the busiest expert, divided by the mean over the experts.
        self.loads: list[Tensor] = []

    def forward(
        self, x: Tensor, dropout: TokenDropout | None, aux_loss: MoEAuxLoss | None = None
    ) -> Tensor:
        # Choose each token's experts.
        logits = self.router(x)
        probabilities = torch.softmax(
            logits, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        weights, expert_ids = probabilities.topk(self.top_k, dim=-1)
        if aux_loss is not None:
            aux_loss.add(probabilities, expert_ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # Sort the pairs (token, choice) by expert.
        order = expert_ids.flatten().argsort(stable=True)
        tokens = order // self.top_k
        counts = expert_ids.new_zeros(logits.shape[1]).scatter_add_(
            0, expert_ids.flatten(), torch.ones_like(tokens)
        )
        if self.training and not torch.compiler.is_compiling():
            self.loads.append(counts.max() / counts.sum().clamp(min=1) * len(counts))
        groups = RowGroups(counts)
        inputs = x.index_select(0, tokens)
        expert_dropout = None if dropout is None else dropout.select(tokens)
        outputs = self.experts(inputs, groups, expert_dropout)
        # Add up each token's weighted outputs.
        weighted = outputs * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, tokens, weighted)

    def take_loads(self) -> list[Tensor]:
        """Return the loads recorded since the last call, and clear them."""
        loads = self.loads
        self.loads = []
        return loads


class MoEAuxLoss:
    """Load-balancing loss of one pass.

    Each layer with E experts has one loss value per sequence, E * sum_e f_e P_e. Here f_e is the
    share of the sequence's tokens that are sent to expert e, and P_e is the mean probability that
    the router gives to expert e for these tokens. If all experts are used equally, the value is
    top_k.

    This is the loss of Switch Transformers (Fedus et al. 2021, eq. 4-6), computed over one sequence
    instead of a batch (DeepSeek-V3 2024, eq. 17), so that it does not depend on the other sequences
    of the batch. `transformers` computes f and P over all layers and over a whole batch without
    padding; the two losses agree for one sequence and one layer.

    This class is not a dataclass, because FSDP2 copies dataclasses that are passed to a module.
    Each layer would then add its values to a separate copy.
    """

    def __init__(
        self,
        lengths: Tensor,
        num_layers: int | None = None,
        layers: list[Tensor] | None = None,
        *,
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Create a loss for the sequences of a pack.

        Args:
            lengths: Number of tokens of each sequence, int64 [S].
            num_layers: Number of layers with experts in the whole network. Needed only if the pass
                computes only some of the layers.
            layers: List to which each layer's values are added, by default a new list.
            average: Function that returns the mean over the tokens of each sequence, [T, E] -> [S,
                E]. By default, the pass must have all tokens of its sequences.
        """
        self.lengths = lengths
        self.num_layers = num_layers
        self.layers = [] if layers is None else layers
        self._average = average

    def add(self, probabilities: Tensor, expert_ids: Tensor) -> None:
        """Add the loss of one layer's router.

        `probabilities` is float [T, E], and `expert_ids`, int64 [T, top_k], are the experts to
        which each token is sent.
        """
        is_used = torch.zeros_like(probabilities).scatter_(1, expert_ids, 1.0)
        average = self._average or self._average_over_tokens
        shares = average(is_used)
        means = average(probabilities)
        self.layers.append(probabilities.shape[1] * (shares * means).sum(-1))

    def compute_by_sequence(self) -> Tensor:
        """Return each sequence's loss, averaged over the layers, [S].

        If the pass computed only some of the layers, the result is their contribution to the
        average.
        """
        return torch.stack(self.layers).sum(0) / (self.num_layers or len(self.layers))

    def _average_over_tokens(self, values: Tensor) -> Tensor:
        """Return the mean over the tokens of each sequence: [T, E] -> [S, E]."""
        sums = torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)
        return sums / self.lengths[:, None]


def choose_aux_loss_weight(config: TransformerConfig, coefficient: float | None) -> float:
    """Return the weight of the load-balancing loss in training.

    The weight is the user's option `coefficient`, unless it is None. By default, the weight is
    chosen as in `transformers`: it is `router_aux_loss_coef` in config.json if
    `output_router_logits` is set there, and 0 otherwise. Raises `ConfigError` if `coefficient` is
    set to a value other than 0 and the network has no experts.
    """
    if config.experts is None:
        if coefficient:
            raise ConfigError(
                f"router_aux_loss_coef={coefficient}: the option balances experts, and a "
                f"{config.family} model has none; "
                "leave it out"
            )
        return 0.0
    if coefficient is not None:
        return coefficient
    values: dict[str, Any] = dict(config.extra)
    if values.get("output_router_logits"):
        return float(values.get("router_aux_loss_coef", DEFAULT_AUX_LOSS_WEIGHT))
    return 0.0
