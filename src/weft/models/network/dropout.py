"""Dropout with masks that do not depend on the batch, its packing, or restarts.

    packed = replace(packed, dropout=DropoutKeys.of(seed, step, [(id, k), ...], device))    # one (id, k) per sequence

A mask depends only on the seed and on the place of the value: step, sequence, position, layer and
channel. A pack without keys has no dropout. Masks come from threefry-2x32, the hash of
`weft.randomness`: the key is the sequence's `key(seed, "dropout", step, id, k)`, the counter is
(position, site << 20 | pair of channels), and each of the two output words decides one channel.
Attention weights first derive a key for each layer and head. `step` must count every optimizer
step, so that no two share their masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from weft import randomness

PURPOSE = "dropout"
CHANNEL_BITS = 20  # a site has at most 2^21 channels
EMBEDDING = 0
SITES_A_LAYER = 16
# Sites of a layer; each adapter has a separate one, from ADAPTERS on.
ATTENTION_OUT = 0
MLP_OUT = 1
ADAPTERS = 2


def compute_site(layer: int | Tensor, place: int) -> int | Tensor:
    """Return the number of a place with dropout, given its number in the layer; 0 is the embedding."""
    return 1 + layer * SITES_A_LAYER + place


@dataclass(frozen=True)
class DropoutKeys:
    """Dropout keys of sequences: `keys` int32 [S, 2], the bits of the two unsigned words of each."""

    keys: Tensor

    @classmethod
    def from_sequences(
        cls,
        seed: int,
        step: int,
        sequences: Iterable[tuple[str, int]],
        device: torch.device | str = "cpu",
    ) -> DropoutKeys:
        """Return the keys of sequences (id, index of the completion) at an optimizer step."""
        words = np.array(
            [randomness.derive_key(seed, PURPOSE, step, id, k) for id, k in sequences],
            dtype=np.uint32,
        )
        return cls(torch.from_numpy(words.view(np.int32)).to(device))


@dataclass(frozen=True)
class TokenDropout:
    """Arguments of dropout at a place in the network.

    The key int32 [T, 2] and position int32 [T] of each token. `layer` is the layer whose values are
    dropped, a number or an integer tensor [] that a compiler takes as an input; `first_head` is the
    number of heads in all layers before the first layer whose attention weights are dropped.
    """

    keys: Tensor
    positions: Tensor
    layer: int | Tensor = 0
    first_head: int = 0

    @classmethod
    def from_lengths(cls, dropout: DropoutKeys, lengths: Tensor, positions: Tensor) -> TokenDropout:
        """Repeat each sequence's key for its tokens; `lengths` are the sequences' lengths."""
        keys = dropout.keys.repeat_interleave(lengths, dim=0, output_size=len(positions))
        return cls(keys, positions.to(torch.int32))

    def select(self, tokens: Tensor) -> TokenDropout:
        """Return the dropout of some tokens, `tokens` int64 [n]."""
        return replace(self, keys=self.keys[tokens], positions=self.positions[tokens])

    def drop_at(self, x: Tensor, rate: float, place: int, channel: int = 0) -> Tensor:
        """Drop values as `drop` does, at a place of the layer."""
        return self.drop(x, rate, compute_site(self.layer, place), channel)

    def drop(self, x: Tensor, rate: float, site: int | Tensor, channel: int = 0) -> Tensor:
        """Set entries of x [T, C] to 0 with probability `rate` and divide the others by 1 - rate.

        `channel` is the number of x's first channel among all channels of the site.
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

        Weights i of the n belong to the sequence of token `tokens[i, 0]` (int64), and its rows
        begin at `position`.
        """
        heads, rows, length = weights.shape[1:]
        place = torch.arange(heads, device=weights.device, dtype=torch.int32) + self.first_head
        key = self.keys[tokens[:, 0]]
        # Counters with first word -1, which no position has.
        key0, key1 = threefry(key[:, :1], key[:, 1:], torch.full_like(place, -1), place)
        pairs = torch.arange(-(-length // 2), device=weights.device, dtype=torch.int32)
        query = torch.arange(rows, device=weights.device, dtype=torch.int32)[:, None] + position
        first, second = threefry(key0[..., None, None], key1[..., None, None], query, pairs)
        words = torch.stack([first, second], dim=-1).flatten(-2)[..., :length]
        return torch.where(_is_kept(words, rate), weights / (1.0 - rate), 0.0)


def with_layer(how: TokenDropout | None, layer: int | Tensor) -> TokenDropout | None:
    """Return the dropout for the places of a layer."""
    return None if how is None else replace(how, layer=layer)


def _is_kept(words: Tensor, rate: float) -> Tensor:
    """Return whether the number in [0, 1) that each word encodes is at least `rate`.

    The number is the word's top 24 bits / 2^24.
    """
    return ((words >> 8) & 0xFFFFFF) >= round(rate * 2**24)


def threefry(key0: Tensor, key1: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return threefry-2x32-20 of int32 tensors (broadcast), bit for bit `weft.randomness.compute_threefry`."""
    schedule = (key0, key1, key0 ^ key1 ^ randomness.PARITY)
    x = x + key0
    y = y + key1
    for block in range(5):
        for turn in randomness.ROTATIONS[4 * (block % 2) : 4 * (block % 2) + 4]:
            x = x + y
            y = ((y << turn) | ((y >> (32 - turn)) & ((1 << turn) - 1))) ^ x
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + (block + 1)
    return x, y
