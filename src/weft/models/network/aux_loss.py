"""How evenly a mixture of experts is used: the loss that keeps a router from sending everything to
a few experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.network.config import TransformerConfig

USUAL = 0.001  # router_aux_loss_coef where a config.json that asks for the loss does not say it


class MoEAuxLoss:
    """Filled by the layers of one pass, each with one value a sequence:

        E * sum_e f_e P_e,  f_e = share of the sequence's tokens that go to expert e,  P_e = mean of their router probability

    as in Switch Transformers (Fedus et al. 2021, eq. 4-6), over one sequence in place of a batch
    (DeepSeek-V3 2024, eq. 17), so that it does not depend on what a sequence is computed with. It
    is top_k where all experts are used alike. `transformers` takes f and P over a whole batch,
    padding left out, and over all layers together; of one sequence and one layer it is this.

    No dataclass: FSDP2 hands a module copies of those among its arguments, and the layers would
    each fill their own.
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
        """`lengths` int64 [S]: tokens of each sequence of the pack; `num_layers` of the whole
        network that have experts, where a pass goes through a part of them. Where ranks share the
        sequences `lengths` counts the tokens that are here and `whole` all of them, and `reduce`
        sums what the ranks have.
        """
        self.lengths = lengths
        self.num_layers = num_layers
        self.layers = [] if layers is None else layers
        self.whole = whole
        self.reduce = reduce

    def add(self, probabilities: Tensor, chosen: Tensor) -> None:
        """A layer's router: float probabilities [T, E] and int64 chosen experts [T, top_k] of every
        token.
        """
        used = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        shares = self._mean(used)
        means = self._mean(probabilities)
        self.layers.append(probabilities.shape[1] * (shares * means).sum(-1))

    def by_sequence(self) -> Tensor:
        """[S]: the mean over layers; of a part of them its share of that mean."""
        return torch.stack(self.layers).sum(0) / (self.num_layers or len(self.layers))

    def _mean(self, values: Tensor) -> Tensor:
        """[T, E] -> [S, E]: over the tokens of each sequence."""
        sums = torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)
        sums = sums if self.reduce is None else self.reduce(sums)
        return sums / (self.lengths if self.whole is None else self.whole)[:, None]


def aux_loss_weight(config: TransformerConfig, asked: float | None) -> float:
    """The weight of the auxiliary loss in training: the option, else config.json's
    `router_aux_loss_coef` where it sets `output_router_logits`, as in `transformers`. Raises
    `ConfigError` where the option is set and nothing is routed.
    """
    if config.experts is None:
        if asked:
            raise ConfigError(
                f"router_aux_loss_coef={asked}: balances the experts of a mixture, and a "
                f"{config.family} model has none; "
                "leave it out"
            )
        return 0.0
    if asked is not None:
        return asked
    values: dict[str, Any] = dict(config.extra)
    if values.get("output_router_logits"):
        return float(values.get("router_aux_loss_coef", USUAL))
    return 0.0
