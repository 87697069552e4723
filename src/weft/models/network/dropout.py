"""Dropout with masks that do not depend on the batch, the packing, or restarts.

    keys = DropoutKeys.from_sequences(seed, step, [(id, k), ...])    # one (id, k) per sequence
    packed = replace(packed, dropout=keys)

A mask depends only on the seed, the step, and the sequence, position, layer and channel of each
element. A pack without keys has no dropout. `step` must be different at every optimizer step, so
that no two steps have the same masks.

Masks are computed by threefry-2x32, the hash function of `weft.randomness`. The key of the hash is
`derive_key(seed, "dropout", step, id, k)` of the sequence. The counter is (position, site << 20 |
pair of channels), where a site is a place in the network at which dropout is applied. Each of the
two output words decides whether one channel is dropped. For attention weights, a separate key is
first derived for each layer and head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from weft import randomness

PURPOSE = "dropout"
CHANNEL_BITS = 20  # a site has at most 2^21 channels
EMBEDDING = 0
SITES_PER_LAYER = 16
# Indices of a layer's sites; each adapter has a separate site, from index ADAPTERS on.
ATTENTION_OUT = 0
MLP_OUT = 1
ADAPTERS = 2


def compute_site(layer: int | Tensor, place: int) -> int | Tensor:
    """Return the index of a dropout site among all sites of the network.

    Site 0 is the embedding. `place` is the index of the site within layer `layer`.
    """
    return 1 + layer * SITES_PER_LAYER + place


@dataclass(frozen=True)
class DropoutKeys:
    """Random keys for dropout, one per sequence.

    `keys` is int32 [S, 2]: the two unsigned 32-bit words of each key, reinterpreted as signed
    integers.
    """

    keys: Tensor

    @classmethod
    def from_sequences(
        cls,
        seed: int,
        step: int,
        sequences: Iterable[tuple[str, int]],
        device: torch.device | str = "cpu",
    ) -> DropoutKeys:
        """Return the dropout keys of the given sequences at optimizer step `step`.

        Each sequence is identified by (id, index of the completion).
        """
        words = np.array(
            [randomness.derive_key(seed, PURPOSE, step, id, k) for id, k in sequences],
            dtype=np.uint32,
        )
        return cls(torch.from_numpy(words.view(np.int32)).to(device))


@dataclass(frozen=True)
class TokenDropout:
    """Data that determine the dropout masks of the T tokens of a pass.

    Attributes:
        keys: Dropout key of each token's sequence, int32 [T, 2].
        positions: Position of each token, int32 [T].
        layer: Index of the layer to which dropout is applied: an int, or a scalar integer tensor
            that compiled code takes as an input.
        first_head: Index of the layer's first query head, where the query heads of all layers are
            numbered consecutively.
    """

    keys: Tensor
    positions: Tensor
    layer: int | Tensor = 0
    first_head: int = 0

    @classmethod
    def from_lengths(cls, dropout: DropoutKeys, lengths: Tensor, positions: Tensor) -> TokenDropout:
        """Return the `TokenDropout` of packed sequences with the given `lengths`, int64 [S].

        Each token gets the dropout key of its sequence; `positions` [T] are the positions of the
        tokens.
        """
        keys = dropout.keys.repeat_interleave(lengths, dim=0, output_size=len(positions))
        return cls(keys, positions.to(torch.int32))

    def select(self, tokens: Tensor) -> TokenDropout:
        """Return the dropout data of the tokens with the indices `tokens`, int64 [n]."""
        return replace(self, keys=self.keys[tokens], positions=self.positions[tokens])

    def drop_at(self, x: Tensor, rate: float, place: int, channel: int = 0) -> Tensor:
        """Apply `drop` to x at one of the layer's dropout sites; `place` is the site's index."""
        return self.drop(x, rate, compute_site(self.layer, place), channel)

    def drop(self, x: Tensor, rate: float, site: int | Tensor, channel: int = 0) -> Tensor:
        """Set elements of x [T, C] to 0 with probability `rate` and divide the others by 1 - rate.

        `channel` is the offset of x's first channel among all channels of the site.
        """
        if rate == 0.0:
            return x
        start = channel // 2
        stop = -(-(channel + x.shape[1]) // 2)
        pairs = torch.arange(start, stop, device=x.device, dtype=torch.int32) | (
            site << CHANNEL_BITS
        )
        first, second = threefry(self.keys[:, :1], self.keys[:, 1:], self.positions[:, None], pairs)
        words = torch.stack([first, second], dim=-1).flatten(1)[:, channel % 2 :][:, : x.shape[1]]
        return torch.where(_is_kept(words, rate), x / (1.0 - rate), 0.0)

    def drop_weights(
        self, weights: Tensor, rate: float, tokens: Tensor, position: int = 0
    ) -> Tensor:
        """Apply dropout to attention weights [n, heads, rows, L], as `drop` does.

        `weights[i]` belongs to the sequence that contains token `tokens[i, 0]` (int64). The first
        row of `weights[i]` has position `position` in that sequence.
        """
        heads, rows, length = weights.shape[1:]
        head_indices = (
            torch.arange(heads, device=weights.device, dtype=torch.int32) + self.first_head
        )
        keys = self.keys[tokens[:, 0]]
        # Counters with first word -1, which no position has.
        key0, key1 = threefry(
            keys[:, :1], keys[:, 1:], torch.full_like(head_indices, -1), head_indices
        )
        pairs = torch.arange(-(-length // 2), device=weights.device, dtype=torch.int32)
        query = torch.arange(rows, device=weights.device, dtype=torch.int32)[:, None] + position
        first, second = threefry(key0[..., None, None], key1[..., None, None], query, pairs)
        words = torch.stack([first, second], dim=-1).flatten(-2)[..., :length]
        return torch.where(_is_kept(words, rate), weights / (1.0 - rate), 0.0)


class EmbeddingDropout(nn.Module):
    """Dropout of the sum of token and position embeddings, [T, hidden]."""

    def forward(self, states: Tensor, dropout: TokenDropout, rate: float) -> Tensor:
        return dropout.drop(states, rate, EMBEDDING)


def _is_kept(words: Tensor, rate: float) -> Tensor:
    """Return a mask of the elements to keep, which is True with probability 1 - rate.

    An element is kept if the top 24 bits of its random word, divided by 2^24, are at least `rate`.
    """
    return ((words >> 8) & 0xFFFFFF) >= round(rate * 2**24)


def threefry(key0: Tensor, key1: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two output words of threefry-2x32-20 for int32 tensors, which are broadcast.

    The results are bit-identical to those of `weft.randomness.compute_threefry`.
    """
    schedule = (key0, key1, key0 ^ key1 ^ randomness.PARITY)
    x = x + key0
    y = y + key1
    for block in range(5):
        for rotation in randomness.ROTATIONS[4 * (block % 2) : 4 * (block % 2) + 4]:
            x = x + y
            y = ((y << rotation) | ((y >> (32 - rotation)) & ((1 << rotation) - 1))) ^ x
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + (block + 1)
    return x, y
