"""The heads of a network: log-probs of tokens, or one value a token, or one score a sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from weft import kernels
from weft.algorithms.base import Output
from weft.models.attention.contexts import AttentionContext
from weft.models.network import event_outputs
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import Packed
from weft.models.network.split import VocabularySplit
from weft.models.network.support import Support
from weft.models.network.token_outputs import Projection

Pooling = Literal["last", "mean"]


class LMHead(nn.Module):
    """The output layer.

    `weight` is None where the embedding's matrix serves: it is then given with each call.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.embed_dim or config.hidden_size
        self.softcap = config.final_softcap
        if config.tied:
            self.weight = None
        else:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, width))
        if config.head_bias and not config.tied:
            self.bias: nn.Parameter | None = nn.Parameter(torch.empty(config.vocab_size))
        else:
            self.bias = None
        self.split: VocabularySplit | None = None
        self.gradient_sum: kernels.GradientSum | None = None  # of the matrix, whichever it is

    def projection(self, tied: Tensor | None) -> Projection:
        """The layer as the outputs read it; `tied` is the embedding's matrix."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None, "a head without a matrix of its own reads the embedding's"
        return Projection(weight, self.bias, self.softcap, self.split, self.gradient_sum)

    def forward(
        self,
        states: Tensor,
        x: Packed,
        want: frozenset[Output],
        tied: Tensor | None,
        temperature: float,
        support: Support | None,
    ) -> dict[Output, Tensor]:
        """`want` of the rows of `x`, from their states [N, width]."""
        return event_outputs.outputs(states, x, self.projection(tied), want, temperature, support)


class ValueHead(nn.Module):
    """[N, width] -> float32 [N]: one value a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, states: Tensor) -> Tensor:
        return row_values(states, self.weight)


def row_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """[N, H] -> [N] float32, and computed in it: one value a row; `weight` is [1, H].

    In bfloat16 two thousand rewards have half as many values. Memory of its own, no view: what is
    written to a view in place would go round the hooks that FSDP2 puts on a network's outputs,
    which it warns of.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return kernels.linear(hidden.to(wide), weight.to(wide))[:, 0].clone()


def score_rows(x: Packed, padding: int | None) -> Tensor:
    """int64 [S]: the token that a sequence's score is read at, its last one.

    With a `padding` token the last that is another, as `transformers` pools: a sequence that ends
    with the padding token is read one token earlier. A sequence of padding alone is read at its
    end.
    """
    last = x.attention.last
    if padding is None:
        return last
    places = torch.arange(len(x.tokens), device=last.device)
    read = torch.where(x.tokens != padding, places, -1).cummax(0).values[last]
    starts = x.attention.dense.cu_seqlens.long()
    # of the segment that a sequence ends in
    first = starts[torch.searchsorted(starts, last, right=True) - 1]
    return torch.where(read >= first, read, last)


def mean_scores(per_token: Tensor, context: AttentionContext) -> Tensor:
    """[T] -> [S] float32: one score a sequence, the mean of its tokens' (the head is linear, so it
    is the score of their mean).
    """
    lengths = context.dense.lengths
    numbers = torch.arange(len(lengths), device=per_token.device)
    sequence = numbers.repeat_interleave(lengths, output_size=len(per_token))
    return per_token.new_zeros(len(lengths)).index_add(
        0, sequence, per_token / context.token_lengths
    )
