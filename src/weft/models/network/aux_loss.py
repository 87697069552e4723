"""Load-balancing loss, which keeps a router from sending all tokens to a few experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig

DEFAULT_AUX_LOSS_WEIGHT = (
    0.001  # default of router_aux_loss_coef in a config.json that asks for the loss
)


class MoEAuxLoss:
    """Load-balancing loss of one pass; each layer adds one value per sequence:

        E * sum_e f_e P_e

    f_e is the share of the sequence's tokens that go to expert e, and P_e the mean of their router
    probability for e. This is the loss of Switch Transformers (Fedus et al. 2021, eq. 4-6), over
    one sequence instead of a batch (DeepSeek-V3 2024, eq. 17), so it does not depend on the other
    sequences of the batch. Its value is top_k if all experts are used equally. `transformers`
    computes f and P over all layers and a whole batch without padding; for one sequence and one
    layer the two agree.

    This is not a dataclass: FSDP2 copies the dataclasses among a module's arguments, and each layer
    would then add to its own copy.
    """

    def __init__(
        self,
        lengths: Tensor,
        num_layers: int | None = None,
        layers: list[Tensor] | None = None,
        *,
        whole: Tensor | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Create an empty loss for the sequences of a pack.

        `lengths` int64 [S] are the sequences' lengths. `num_layers` is the number of layers with
        experts in the whole network, if the pass goes through only some of them. If ranks share the
        sequences, `lengths` counts this rank's tokens, `whole` all tokens, and `reduce` sums a
        tensor over the ranks.
        """
        self.lengths = lengths
        self.num_layers = num_layers
        self.layers = [] if layers is None else layers
        self.whole = whole
        self.reduce = reduce

    def add(self, probabilities: Tensor, chosen: Tensor) -> None:
        """Add the loss of one layer's router.

        `probabilities` is float [T, E]; `chosen` int64 [T, top_k] are the experts of each token.
        """
        used = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        shares = self._average_over_tokens(used)
        means = self._average_over_tokens(probabilities)
        self.layers.append(probabilities.shape[1] * (shares * means).sum(-1))

    def compute_by_sequence(self) -> Tensor:
        """Return the mean over layers, [S].

        If a pass goes through only some of the layers, return their share of the mean.
        """
        return torch.stack(self.layers).sum(0) / (self.num_layers or len(self.layers))

    def _average_over_tokens(self, values: Tensor) -> Tensor:
        """Return the means over the tokens of each sequence: [T, E] -> [S, E]."""
        sums = torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)
        sums = sums if self.reduce is None else self.reduce(sums)
        return sums / (self.lengths if self.whole is None else self.whole)[:, None]


def choose_aux_loss_weight(config: TransformerConfig, coefficient: float | None) -> float:
    """Return the weight of the auxiliary loss in training.

    This is the option if it is set, else `router_aux_loss_coef` of config.json if that sets
    `output_router_logits`, as in `transformers`. Raises `ConfigError` if the option is set and the
    network has no experts.
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
