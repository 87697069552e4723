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
                E]; by default that of a pack with all tokens of its sequences.
        """
        self.lengths = lengths
        self.num_layers = num_layers
        self.layers = [] if layers is None else layers
        self._average = average

    def add(self, probabilities: Tensor, chosen: Tensor) -> None:
        """Add the loss of one layer's router.

        `probabilities` is float [T, E], and `chosen`, int64 [T, top_k], are the experts to which
        each token is sent.
        """
        used = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        average = self._average or self._average_over_tokens
        shares = average(used)
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
