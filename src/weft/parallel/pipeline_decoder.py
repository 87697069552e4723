"""The stages of a rank of a pipeline as a decoder, so that a generator on every rank generates with
the whole network.

    with StagedDecoder(network, {0: network}, placement, group, host_group) as decoder:      # on rank 0 of both groups
        with open_generator(decoder, spec, ..., budget=budget, settle=decoder.settle) as generator: ...

The generators of all ranks are given the same requests and the same budget, and so plan the same
steps; each rank keeps the keys and values of its own blocks. A pass sends its states [T, hidden] on
to the rank of the next stage; that of the last stage draws the tokens and sends them with their
log-probs to all others, never the logits. Tokens are host values and have a group of their own
(gloo): NCCL keeps all messages of two ranks in one order, and here states and tokens cross.

What overlaps: nothing is waited for when it is sent. One generator alone waits at the end of each
step for the last rank, so one rank works at a time. Several that take turns
(`weft.engine.generation.turns`), as many as there are ranks, keep all of them at work: while one's
tokens are on their way the ranks compute the others. A prompt is computed by one rank after the
other like a decode step. Decode steps are computed one at a time and not captured as CUDA graphs.

Where a rank holds several stages, a decode step comes by that often. Its first stage is computed at
once and the others put off (`catch_up`), so that all turns begin before the first goes on: stage by
stage, each time in the order in which they began, which is the same on every rank. A step that
computes prompts, whose keys are copied right after, puts nothing off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from weft.errors import RunError
from weft.models.network.packed import Packed
from weft.models.network.transformer import Transformer
from weft.placement import Placement

Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], "list[tuple[int, ...]] | None"]


@dataclass
class _Step:
    """A pass over `x` with stages to come on this rank; `made` is filled by the network's last one."""

    x: Packed
    left: deque[int]
    made: Tensor
    states: Tensor | None = None  # for the next stage, where the one before is here too
    then: Callable[[], None] | None = None


class StagedDecoder:
    """What a generator needs of a network (`weft.engine.generation.decoder.Decoder`); `config`
    counts the blocks held here.

    As a context it ends once the other ranks have all that was sent.
    """

    def __init__(
        self,
        network: Transformer,
        stages: Mapping[int, Transformer],
        placement: Placement,
        group: ProcessGroup,
        host_group: ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`stages` are those of `network`, by number.

        `dtype` is that of the states, by default the parameters'.
        """
        parameter = next(network.parameters())
        self.network = network
        self._group = group
        self._host = host_group
        self._device = parameter.device
        self.config = replace(network.config, num_layers=len(network.blocks))
        self.held_layers = network.held_layers
        self.vocab_size = network.vocab_size
        self._rank = group.rank()
        self._size = group.size()
        self._stages = dict(sorted(stages.items()))
        self._placement = placement
        self._last = placement.last_rank
        self._dtype = dtype or parameter.dtype
        # with the rank that it was sent to
        self._going: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._num_sent = 0
        self._put_off: deque[_Step] = deque()  # those that began first come first
        self._newest: _Step | None = None  # the last pass, where some of it is put off
        assert tuple(self._stages) == placement.stages_of(self._rank), (
            "the placement's stages of this rank"
        )
        assert network.begins == (self._rank == 0) and network.ends == (self._rank == self._last)

    def __enter__(self) -> StagedDecoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self._received(self._num_sent)

    @property
    def training(self) -> bool:
        return self.network.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.network.train(mode)

    @property
    def reads_pages(self) -> bool:
        """No: steps over pages are captured as graphs, and nothing is sent in a graph."""
        return False

    @property
    def prefix_tokens(self) -> int:
        return self.network.prefix_tokens

    def shares_prefixes(self, longest: int) -> bool:
        return self.network.shares_prefixes(longest)

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.network.parameters())

    def train(self, mode: bool = True) -> object:
        return self.network.train(mode)

    def hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor:
        """As `Transformer.hidden` on the last rank; on the others as many rows of nothing.

        Without `rows` what several stages make is there once they have caught up.
        """
        at_once = rows is not None or len(self._stages) == 1
        if at_once:
            self.catch_up()
        count = len(x.tokens) if rows is None else len(rows)
        if self.network.ends:
            width = self.config.embed_dim or self.config.hidden_size
        else:
            width = 0
        step = _Step(
            x,
            deque(self._stages),
            torch.empty(count, width, dtype=self._dtype, device=self._device),
        )
        self._compute(step, rows)
        while at_once and step.left:
            self._compute(step, rows)
        self._newest = step if step.left else None
        if step.left:
            self._put_off.append(step)
        return step.made

    @torch.no_grad()
    def catch_up(self) -> None:
        """Compute the stages that were put off."""
        while self._put_off:
            step = self._put_off.popleft()
            self._compute(step)
            if step.left:
                self._put_off.append(step)
            elif step.then is not None:
                step.then()

    def _compute(self, step: _Step, rows: Tensor | None = None) -> None:
        """The next stage of a pass."""
        stage = step.left.popleft()
        network = self._stages[stage]
        states = step.states
        step.states = None
        if stage > 0 and states is None:
            shape = len(step.x.tokens), self.config.hidden_size
            states = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._receive(states, self._placement.rank_of(stage - 1), "states", self._group)
        if network.ends:
            step.made.copy_(network.hidden(step.x, rows, states))
            return
        made = network.hidden(step.x, states=states)
        peer = self._placement.rank_of(stage + 1)
        if peer == self._rank:
            step.states = made
        else:
            self._send(made.contiguous(), peer, self._group)

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """On the last rank alone."""
        return self.network.next_token_logits(hidden_rows, wide)

    @property
    def output_matrix(self) -> Tensor | None:
        return self.network.output_matrix

    def settle(self, draw: Callable[[], Drawn], rows: int) -> Callable[[], Drawn]:
        """The last rank draws once its last stage is computed, and sends what it drew; the others
        wait for it when they are asked for it.
        """
        step = self._newest
        self._newest = None
        if not self.network.ends:
            sent = self._num_sent
            return lambda: self._drawn(rows, sent, step)
        drawn: list[Drawn] = []
        counts: list[int] = []

        def tell() -> None:
            drawn.append(draw())
            first, ids = packed_tokens(drawn[0])
            for peer in (rank for rank in range(self._size) if rank != self._rank):
                self._send(first, peer, self._host)
                if len(ids):
                    self._send(ids, peer, self._host)
            counts.append(self._num_sent)

        if step is None:
            tell()
        else:
            step.then = tell

        def taken() -> Drawn:
            self._reach(step)
            self._received(counts[0])  # the others take it at the same point of their turns
            return drawn[0]

        return taken

    def _drawn(self, rows: int, sent: int, step: _Step | None) -> Drawn:
        """What the last rank drew, from the first `sent` states of this one."""
        self._reach(step)
        first = torch.empty(3, rows, dtype=torch.float64)
        self._receive(first, self._last, "tokens", self._host)
        self._received(sent)
        ids = torch.empty(num_ids(first), dtype=torch.int64)
        if len(ids):
            self._receive(ids, self._last, "ids that a limit keeps", self._host)
        return unpacked_tokens(first, ids)

    def _reach(self, step: _Step | None) -> None:
        """Compute all that was put off, where some of this step was."""
        if step is not None and step.left:
            self.catch_up()

    # -- sending

    def _send(self, tensor: Tensor, peer: int, group: ProcessGroup) -> None:
        try:
            work = dist.isend(tensor, group=group, group_dst=peer)
        except RuntimeError as error:
            raise self._lost("what is sent was not taken by", peer) from error
        assert work is not None
        self._going.append((peer, tensor, work))
        self._num_sent += 1

    def _received(self, sent: int) -> None:
        """Give back the memory of the first `sent` tensors that were sent, once they are received."""
        while len(self._going) > self._num_sent - sent:
            peer, _, work = self._going.popleft()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._lost("what was sent was not taken by", peer) from error

    def _receive(self, tensor: Tensor, peer: int, what: str, group: ProcessGroup) -> None:
        try:
            work = dist.irecv(tensor, group=group, group_src=peer)
            assert work is not None
            work.wait()
        except RuntimeError as error:
            raise self._lost(f"the {what} did not come from", peer) from error

    def _lost(self, what: str, peer: int) -> RunError:
        return RunError(
            f"generation, rank {self._rank} of the pipeline: {what} rank {peer}; that rank "
            f"failed, or is later than the "
            "process group's timeout: look at its log first"
        )


def packed_tokens(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """(float64 [3, rows]: token, log-prob, how many ids a limit keeps or -1 where these are not
    recorded; int64: those ids).
    """
    tokens, logprobs, supports = drawn
    if supports is None:
        counts = np.full(len(tokens), -1)
    else:
        counts = np.array([len(ids) for ids in supports])
    ids = [id for support in supports or () for id in support]
    first = np.stack([tokens.astype(np.float64), logprobs, counts.astype(np.float64)])
    return torch.from_numpy(first), torch.tensor(ids, dtype=torch.int64)


def num_ids(first: Tensor) -> int:
    """How many ids the second of what `packed_tokens` makes holds, from the first."""
    return int(first[2].clip(0).sum())


def unpacked_tokens(first: Tensor, ids: Tensor) -> Drawn:
    """What `packed_tokens` was given."""
    tokens, logprobs, counts = first.numpy()
    supports = None
    if len(tokens) and counts[0] >= 0:
        ends = counts.cumsum().astype(np.int64)
        supports = [tuple(part.tolist()) for part in np.split(ids.numpy(), ends[:-1])]
    return tokens.astype(np.int64), logprobs, supports
