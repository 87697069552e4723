"""Context parallelism: the ranks of a group split the tokens of every pack to fit long sequences.

    join(network, group)             # the whole network, or the same stage of a pipeline
    network(packed, want)            # same pack on all ranks; every rank gets all outputs
    # each rank has only its part of the parameters' gradients: sum them over the group

A pack is a batch of sequences that are concatenated without padding. With c ranks, a pack is cut
into 2c pieces, and rank r gets the r-th piece from the start and the r-th piece from the end. Later
tokens attend to more keys, so an early and a late piece give all ranks the same amount of work (as
in Llama 3, Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). Except for attention,
everything is computed on the rank that has the token. For attention, the keys and values of all
tokens are gathered in each layer, and their gradients are summed in the backward pass. The head
computes the outputs of a rank's own rows, and these are gathered at the end.
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
from weft.models.attention.pack_shards import PackShard
from weft.models.network.moe import MoEAuxLoss
from weft.models.network.packed import Packed, SamplingSupport
from weft.models.network.transformer import Transformer, find_score_rows
from weft.parallel.collectives import (
    RowAssignment,
    gather_replicated_rows,
    gather_rows,
    sum_forward,
)
from weft.parallel.pipeline_decoder import DrawnTokens, count_ids, pack_tokens, unpack_tokens


def join(network: Transformer, group: ProcessGroup) -> None:
    """Split the tokens of every pack over the ranks of `group`, which all have the same network.

    A prefix that several sequences have in common is computed once for each sequence, because
    attention over split packs does not support shared prefixes. A pipeline stage receives and sends
    only the hidden states of this rank's tokens. Generation does not call `forward` and is not
    affected.
    """
    sharing = _TokenSharing(group)
    # Tensor parallelism, which can share the rows of a pass, then sees this rank's tokens.
    network.register_forward_pre_hook(sharing.enter, prepend=True)
    network.register_forward_hook(sharing.leave)
    network.repeats_prefixes = True


def find_token_runs(length: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of a pack's tokens that belong to `rank`, as pairs (start, stop).

    `stop` is exclusive. There are at most two ranges, and none is empty. `length` is the number of
    tokens in the pack, and `size` is the number of ranks.
    """
    bounds = _compute_bounds(length, size)
    first = (bounds[rank], bounds[rank + 1])
    second = (bounds[-rank - 2], bounds[-rank - 1])
    if first[1] == second[0]:
        first = (first[0], second[1])
        second = (0, 0)
    return tuple(run for run in (first, second) if run[0] < run[1])


def count_tokens(length: int, group: ProcessGroup) -> int:
    """Return the number of tokens that this rank has in a pack of `length` tokens."""
    return sum(stop - start for start, stop in find_token_runs(length, group.size(), group.rank()))


def _compute_bounds(length: int, size: int) -> list[int]:
    """Return the boundaries of the 2 * `size` pieces into which `length` tokens are cut.

    Each of the `size` ranks gets two pieces. The pieces differ by at most one token, so the numbers
    of tokens per rank differ by at most two.
    """
    return [-(-piece * length // (2 * size)) for piece in range(2 * size + 1)]


def _assign_owners(length: int, size: int, device: torch.device) -> Tensor:
    """Return the rank of each of `length` tokens, int64 [length]."""
    pieces = [stop - start for start, stop in pairwise(_compute_bounds(length, size))]
    ranks = torch.tensor([min(piece, 2 * size - 1 - piece) for piece in range(2 * size)])
    return ranks.repeat_interleave(torch.tensor(pieces)).to(device)


class _TokenSharing:
    """Forward hooks of a network that split each pack over the ranks and gather the outputs.

    During a forward pass, the object stores which rank computes which outputs.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._outputs: RowAssignment | None = None  # None: every rank has a part of every output

    def enter(self, network: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of `forward` for this rank's part of the pack.

        This is the hook that runs before `forward`. It removes the tokens of other ranks, and with
        them the outputs (such as log-probs) that are read at these tokens. The labels and the
        sampling support (the token ids left by limits such as top-k) are reduced to the remaining
        outputs.
        """
        x, want, *more = arguments
        assert isinstance(network, Transformer) and isinstance(x, Packed)
        # Assign tokens to ranks, and each output to the rank of the token where it is read.
        owner = _assign_owners(len(x.tokens), self._group.size(), x.tokens.device)
        tokens = RowAssignment.from_owners(owner, self._group)
        if network.kind == "score":
            reads = find_score_rows(x, network.padding)
        else:
            reads = x.rows
        outputs = RowAssignment.from_owners(owner[reads], self._group)
        if network.kind == "score" and network.pooling == "mean":
            self._outputs = None
        else:
            self._outputs = outputs
        # Select the rows, labels and supports of this rank's outputs.
        part = x if network.kind == "score" else x.select_rows(outputs.own_rows)
        own = tokens.local_indices[reads[outputs.own_rows]]
        part = replace(
            part,
            rows=own,
            labels=part.labels[: len(own)] if network.kind == "score" else part.labels,
        )
        if len(more) > 1 and isinstance(more[1], SamplingSupport):
            more[1] = more[1].select(outputs.own_rows.cpu().numpy())
        return (_build_shard(part, tokens, own), want, *more)

    def leave(
        self, network: nn.Module, arguments: tuple[Any, ...], outputs: dict[str, Tensor] | Tensor
    ) -> dict[str, Tensor] | Tensor:
        """Return the outputs of all ranks, in the order of the pack's rows.

        If the network is a pipeline stage other than the last one, `outputs` are hidden states, and
        are returned unchanged. This is the hook that runs after `forward`.
        """
        own = self._outputs
        self._outputs = None
        if isinstance(outputs, Tensor):
            return outputs
        if own is None:
            return {name: sum_forward(value, self._group) for name, value in outputs.items()}
        return {name: gather_replicated_rows(value, own) for name, value in outputs.items()}


def _build_shard(x: Packed, tokens: RowAssignment, last: Tensor) -> Packed:
    """Return this rank's part of the pack, with the attention context of its tokens.

    `tokens` assigns the tokens of the pack to ranks. `last` has the tokens at which scores are
    computed, as indices into this rank's tokens.
    """
    assert isinstance(x.attention, Dense), "packs whose sequences share no prefixes"
    group = tokens.group
    runs = find_token_runs(len(x.tokens), group.size(), group.rank())
    attention = PackShard(x.attention, runs, partial(gather_rows, rows=tokens), last)
    aux_loss = x.aux_loss
    if aux_loss is not None:
        lengths = attention.dense.lengths
        average = partial(_average_over_tokens, lengths, whole=aux_loss.lengths, group=group)
        aux_loss = MoEAuxLoss(lengths, aux_loss.num_layers, aux_loss.layers, average=average)
    return replace(
        x,
        tokens=x.tokens[tokens.own_rows],
        positions=x.positions[tokens.own_rows],
        attention=attention,
        aux_loss=aux_loss,
    )


def _average_over_tokens(
    lengths: Tensor, values: Tensor, *, whole: Tensor, group: ProcessGroup
) -> Tensor:
    """Return the mean over all ranks' tokens of each sequence: this rank's [T, E] -> [S, E].

    `lengths` [S] are the numbers of this rank's tokens, and `whole` [S] those of all ranks.
    """
    sums = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
    return sum_forward(sums, group) / whole[:, None]


def draw_on_first_rank(
    draw: Callable[[], DrawnTokens], rows: int, group: ProcessGroup
) -> Callable[[], DrawnTokens]:
    """Draw tokens on the group's first rank, and return a function that returns them on every rank.

    The first rank calls `draw` and broadcasts the tokens immediately. The other ranks receive the
    tokens when they call the returned function. `rows` is the number of tokens, and `group` is a
    process group for host tensors. In this way, ranks generate the same tokens although their
    logits can differ by rounding (see `weft.engine.generation.sampling.TokenAgreement`).
    """
    if group.rank() > 0:
        return lambda: _receive_drawn(rows, group)
    drawn = draw()
    for tensor in pack_tokens(drawn):
        if tensor.numel():
            dist.broadcast(tensor, group=group, group_src=0)
    return lambda: drawn


def _receive_drawn(rows: int, group: ProcessGroup) -> DrawnTokens:
    first = torch.empty(3, rows, dtype=torch.float64)
    if rows:
        dist.broadcast(first, group=group, group_src=0)
    ids = torch.empty(count_ids(first), dtype=torch.int64)
    if len(ids):
        dist.broadcast(ids, group=group, group_src=0)
    return unpack_tokens(first, ids)
