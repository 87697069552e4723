"""Small networks for tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.bounds import assert_within
from tests.roundings import LIKELY, exactly
from weft.checkpoints import hf_io
from weft.models.network import lora
from weft.models.network.config import TransformerConfig
from weft.models.network.linear import find_canonical_values
from weft.models.network.packed import pack
from weft.models.network.transformer import Head, Transformer
from weft.registry import families


def tiny_config(name: str = "llama", **changes: Any) -> TransformerConfig:
    family = families.get(name)
    config: TransformerConfig = family.config({**family.tiny, **changes})
    return config


def tiny(
    name: str = "llama",
    head: Head = "lm",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Transformer:
    """A network with random values in every parameter, norms and biases included."""
    network = hf_io.init_random(tiny_config(name, **changes), head, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for value in find_canonical_values(network).values():
            value.add_(torch.randn(value.shape, generator=generator, dtype=dtype) * 0.1)
    return network


def adapted(
    name: str = "llama",
    head: Head = "lm",
    *,
    targets: tuple[str, ...] = (),
    dropout: float = 0.0,
    **changes: Any,
) -> Transformer:
    """A network whose adapters are not zero."""
    network = tiny(name, head, **changes)
    lora.attach(network, r=3, alpha=6.0, dropout=dropout, targets=targets)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for n, value in find_canonical_values(network).items():
            if lora.is_adapter(n):
                value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return network


@torch.no_grad()
def logits(network: Transformer, row: Tensor) -> Tensor:
    return network.next_token_logits(network.compute_hidden(pack([row])))


def roundings(network: Transformer, tokens: int) -> int:
    """The most that one number meets on its way through all blocks, for `tests.bounds`.

    A block adds up `hidden` products in two norms, in q, k, v and in gate and up; as many in its
    scores as heads are wide (at most `hidden`); `tokens` in the softmax, in what it weighs and, on
    the way back, in a parameter's gradient; the heads' width together in o and `inner` in down;
    some 10 more in the exponentials and the activation.
    """
    config = network.config
    block = (
        5 * config.hidden_size
        + config.num_heads * config.head_dim
        + config.intermediate_size
        + 3 * tokens
        + 10
    )
    return config.num_layers * block


def sequences(lengths: list[int], *, vocab: int = 131, seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in lengths]


def last_states(network: torch.nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """The hidden state of each row's last token, computed whole and alone."""
    return torch.stack([network.compute_hidden(pack([row]))[-1] for row in rows])


class LastStates:
    """The states of rows' last tokens that a cache gave, to be compared all at once with those of
    rows computed whole and alone in float64.
    """

    def __init__(self, network: Transformer) -> None:
        self._wide = copy.deepcopy(network).double()
        self._dtype = next(network.parameters()).dtype
        self._found: list[Tensor] = []
        self._rows: list[Tensor] = []

    def add(self, found: Tensor, rows: list[Tensor]) -> None:
        assert len(found) == len(rows)
        self._found.append(found.clone())
        self._rows += rows

    @torch.no_grad()
    def check(self) -> None:
        packed = pack(self._rows)
        ends = torch.tensor([len(row) for row in self._rows]).cumsum(0) - 1
        (together,) = exactly(lambda: self._wide.compute_hidden(packed)[ends], self._dtype)
        alone = last_states(self._wide, self._rows)
        assert_within(torch.cat(self._found), alone, LIKELY * together.deviation, "states")
