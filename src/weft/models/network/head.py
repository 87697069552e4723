"""Heads of a network: log-probs of tokens, one value per token, or one score per sequence."""

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
from weft.models.network.support import SamplingSupport
from weft.models.network.token_outputs import OutputProjection
from weft.models.network.vocabulary import WHOLE, Vocabulary

Pooling = Literal["last", "mean"]


class LMHead(nn.Module):
    """Output layer of a language model.

    `weight` is None if the layer uses the embedding's matrix, which is then an argument of each
    method.
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
        self.vocabulary: Vocabulary = WHOLE
        self.gradient_sum: kernels.GradientSum | None = (
            None  # gradient sum of the head's own matrix, or of the embedding's if tied
        )

    def build_projection(self, tied: Tensor | None) -> OutputProjection:
        """Return the output projection; `tied` is the embedding's matrix, used if `weight` is None."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None, "a head without a matrix of its own reads the embedding's"
        return OutputProjection(weight, self.bias, self.softcap, self.vocabulary, self.gradient_sum)

    def forward(
        self,
        states: Tensor,
        x: Packed,
        want: frozenset[Output],
        tied: Tensor | None,
        temperature: float,
        support: SamplingSupport | None,
    ) -> dict[Output, Tensor]:
        """Return the outputs named in `want` for the rows of `x`.

        `states` [N, width] are the hidden states of these rows. `tied` is the matrix of the
        embedding, which is used if the head has no matrix of its own.
        """
        return event_outputs.compute_outputs(
            states, x, self.build_projection(tied), want, temperature, support
        )


class ValueHead(nn.Module):
    """Head that computes one float32 value per row: [N, width] -> [N]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))

    def forward(self, states: Tensor) -> Tensor:
        return compute_row_values(states, self.weight)


def compute_row_values(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return one value per row, computed in float32 or wider: [N, H] -> [N].

    `weight` is [1, H]. bfloat16 is not precise enough: two thousand distinct rewards would be
    rounded to about a thousand.

    The result is a copy instead of a view. FSDP2 attaches hooks to the outputs of a network, and
    warns that writing to a view in place would bypass these hooks.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return kernels.linear(hidden.to(wide), weight.to(wide))[:, 0].clone()


def find_score_rows(x: Packed, padding: int | None) -> Tensor:
    """Return the index of the token at which each sequence's score is read, int64 [S].

    By default, the score is read at the sequence's last token. If `padding` is set, it is read at
    the last token other than `padding`, unless the sequence consists only of padding.
    `transformers` selects the token in the same way.
    """
    last = x.attention.last_tokens
    if padding is None:
        return last
    places = torch.arange(len(x.tokens), device=last.device)
    read = torch.where(x.tokens != padding, places, -1).cummax(0).values[last]
    starts = x.attention.dense.cu_seqlens.long()
    # First token of the segment in which each sequence ends.
    first = starts[torch.searchsorted(starts, last, right=True) - 1]
    return torch.where(read >= first, read, last)


def average_scores(per_token: Tensor, context: AttentionContext) -> Tensor:
    """Return the mean score over the tokens of each sequence: [T] -> float32 [S].

    The head is linear, so this is the score of the mean hidden state.
    """
    lengths = context.dense.lengths
    numbers = torch.arange(len(lengths), device=per_token.device)
    sequence = numbers.repeat_interleave(lengths, output_size=len(per_token))
    return per_token.new_zeros(len(lengths)).index_add(
        0, sequence, per_token / context.token_lengths
    )
