"""A mixture of experts in place of an MLP: each token goes to its `top_k` experts, none is dropped for lack of capacity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.models.activations import activate
from weft.models.balance import Balance
from weft.models.config import TransformerConfig
from weft.models.dropout import TokenNoise
from weft.models.lora import Adapted
from weft.models.products import linear


class ExpertStack(nn.Module):
    """One matrix of every expert: weight [experts, out, in]."""

    def __init__(self, num: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, outputs, inputs))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        """x [sum of sizes, in], sorted by expert -> [same, out]; `sizes[e]` rows go through expert e."""
        parts = x.split(sizes)
        return torch.cat([linear(part, self.weight[e]) for e, part in enumerate(parts) if len(part)])


class MoE(nn.Module):
    """[T, hidden] -> [T, hidden]. The router's softmax is float32 (Fedus et al. 2021, "Switch Transformers", 2.4)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.experts is not None and config.gated
        experts, hidden = config.experts, config.hidden_size
        self.top_k, self.normalize, self.activation = experts.top_k, experts.normalize, config.activation
        self.router = nn.Linear(hidden, experts.num, bias=False)
        self.experts = nn.ModuleDict(
            {
                "gate": ExpertStack(experts.num, hidden, experts.intermediate_size),
                "up": ExpertStack(experts.num, hidden, experts.intermediate_size),
                "down": ExpertStack(experts.num, experts.intermediate_size, hidden),
            }
        )

    def forward(self, x: Tensor, noise: TokenNoise | None, balance: Balance | None = None) -> Tensor:
        if not len(x):
            return x
        logits = linear(x, self.router.weight)
        probabilities = torch.softmax(logits, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if balance is not None:
            balance.add(probabilities, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # pairs (token, choice), by expert
        token = order // self.top_k
        sizes = chosen.flatten().bincount(minlength=self.router.out_features).tolist()
        inputs = x.index_select(0, token)
        dropped = None if noise is None else noise.select(token)
        gate, up = self._expert("gate", inputs, dropped, sizes), self._expert("up", inputs, dropped, sizes)
        outputs = self._expert("down", activate(gate, self.activation) * up, dropped, sizes)
        weighted = outputs * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, weighted)

    def _expert(self, name: str, x: Tensor, noise: TokenNoise | None, sizes: list[int]) -> Tensor:
        stack = self.experts[name]
        return stack(x, noise, sizes) if isinstance(stack, Adapted) else stack(x, sizes)
