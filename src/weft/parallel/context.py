"""Context parallelism: ranks share the tokens of every pack, so that long sequences fit.

    join(network, group)             # the whole network on every rank, or the same stage of a pipeline
    network(packed, want)            # called with the same pack on all; on every rank the outputs of all its rows
    # gradients of parameters are then each rank's own part: sum them over the group

A pack is cut into 2c pieces, of which rank r of c has the r-th from either end: later tokens see
more keys, and a piece of each kind comes to as much work for every rank (as in Llama 3, Grattafiori
et al. 2024, arXiv:2407.21783, section 3.3.2). Everything but attention is computed where a token
is; in attention its query meets the keys and values of all, which are gathered layer by layer.
Their gradients are summed on the way back. The head gives the outputs of a rank's own rows, and
these are gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from weft.models.attention.contexts import Dense
from weft.models.attention.portions import Portion
from weft.models.network.aux_loss import MoEAuxLoss
from weft.models.network.head import score_rows
from weft.models.network.packed import Packed
from weft.models.network.support import Support
from weft.models.network.transformer import Transformer
from weft.parallel.collectives import RowParts, gathered, gathered_alike, summed_forward
from weft.parallel.pipeline_decoder import Drawn, num_ids, packed_tokens, unpacked_tokens


def join(network: Transformer, group: ProcessGroup) -> None:
    """Let the ranks of `group`, which have the same network, share the tokens of every pack that it
    is called with. Prefixes are not shared between sequences then, but repeated. A stage of a
    pipeline is given the states of this rank's tokens alone, and hands on those. Generation, which
    goes past `forward`, is not touched.
    """
    sharing = _Sharing(group)
    network.register_forward_pre_hook(sharing.enter)
    network.register_forward_hook(sharing.leave)
    network.repeats_prefixes = True


def runs_of(length: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """The tokens of a pack of `length` that rank `rank` of `size` has: runs (first, one past the
    last), none empty.
    """
    bounds = _bounds(length, size)
    first = (bounds[rank], bounds[rank + 1])
    second = (bounds[-rank - 2], bounds[-rank - 1])
    if first[1] == second[0]:
        first = (first[0], second[1])
        second = (0, 0)
    return tuple(run for run in (first, second) if run[0] < run[1])


def count_of(length: int, group: ProcessGroup) -> int:
    """How many tokens of a pack of `length` this rank has."""
    return sum(stop - start for start, stop in runs_of(length, group.size(), group.rank()))


def _bounds(length: int, size: int) -> list[int]:
    """Of the 2 `size` pieces.

    What does not divide goes to the first ones, so that ranks differ by a token or two.
    """
    return [-(-piece * length // (2 * size)) for piece in range(2 * size + 1)]


def _owners(length: int, size: int, device: torch.device) -> Tensor:
    """int64 [length]: the rank that has each token."""
    pieces = [stop - start for start, stop in pairwise(_bounds(length, size))]
    ranks = torch.tensor([min(piece, 2 * size - 1 - piece) for piece in range(2 * size)])
    return ranks.repeat_interleave(torch.tensor(pieces)).to(device)


class _Sharing:
    """The hooks around one network; between the two of a call, which of the outputs are made on
    which rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._outputs: RowParts | None = None  # None: each rank has a part of every one

    def enter(self, network: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Leave of a pack what this rank computes."""
        x, want, *more = arguments
        assert isinstance(network, Transformer) and isinstance(x, Packed)
        owner = _owners(len(x.tokens), self._group.size(), x.tokens.device)
        tokens = RowParts.of(owner, self._group)
        if network.kind == "score":
            reads = score_rows(x, network.padding)
        else:
            reads = x.rows
        outputs = RowParts.of(owner[reads], self._group)
        if network.kind == "score" and network.pooling == "mean":
            self._outputs = None
        else:
            self._outputs = outputs
        part = x if network.kind == "score" else x.at(outputs.own)
        own = tokens.number[reads[outputs.own]]
        part = replace(
            part,
            rows=own,
            labels=part.labels[: len(own)] if network.kind == "score" else part.labels,
        )
        if len(more) > 1 and isinstance(more[1], Support):
            more[1] = more[1].select(outputs.own.cpu().numpy())
        return (_portion(part, tokens, own), want, *more)

    def leave(
        self, network: nn.Module, arguments: tuple[Any, ...], outputs: dict[str, Tensor] | Tensor
    ) -> dict[str, Tensor] | Tensor:
        """All outputs, in the order of the pack's rows; of a network that does not end its states
        as they are.
        """
        own = self._outputs
        self._outputs = None
        if isinstance(outputs, Tensor):
            return outputs
        if own is None:
            return {name: summed_forward(value, self._group) for name, value in outputs.items()}
        return {name: gathered_alike(value, own) for name, value in outputs.items()}


def _portion(x: Packed, tokens: RowParts, last: Tensor) -> Packed:
    """The tokens of this rank, of which scores are read at `last`."""
    assert isinstance(x.attention, Dense), "packs whose sequences share no prefixes"
    group = tokens.group
    runs = runs_of(len(x.tokens), group.size(), group.rank())
    attention = Portion(x.attention, runs, partial(gathered, rows=tokens), last)
    aux_loss = x.aux_loss
    if aux_loss is not None:
        aux_loss = MoEAuxLoss(
            attention.dense.lengths,
            aux_loss.num_layers,
            aux_loss.layers,
            whole=aux_loss.lengths,
            reduce=partial(summed_forward, group=group),
        )
    return replace(
        x,
        tokens=x.tokens[tokens.own],
        positions=x.positions[tokens.own],
        attention=attention,
        aux_loss=aux_loss,
    )


def drawn_by_first(
    draw: Callable[[], Drawn], rows: int, group: ProcessGroup
) -> Callable[[], Drawn]:
    """Of ranks that generate the same the first draws (`weft.engine.generation.settings.Settle`),
    so that rounding cannot part them. `group` moves tensors of the host.
    """
    if group.rank() > 0:
        return lambda: _received(rows, group)
    drawn = draw()
    for tensor in packed_tokens(drawn):
        if tensor.numel():
            dist.broadcast(tensor, group=group, group_src=0)
    return lambda: drawn


def _received(rows: int, group: ProcessGroup) -> Drawn:
    first = torch.empty(3, rows, dtype=torch.float64)
    if rows:
        dist.broadcast(first, group=group, group_src=0)
    ids = torch.empty(num_ids(first), dtype=torch.int64)
    if len(ids):
        dist.broadcast(ids, group=group, group_src=0)
    return unpacked_tokens(first, ids)
