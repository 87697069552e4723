"""Decoder for generation with a network that is split over the ranks of a pipeline.

    # on rank 0 of both groups:
    with StagedDecoder(network, {0: network}, placement, group, host_group) as decoder:
        with open_generator(decoder, ..., agree_on_tokens=decoder.agree_on_tokens) as generator: ...

The generators of all ranks get the same requests and the same memory budget, so they plan the same
steps. Each rank caches the keys and values of its own blocks. In a forward pass, each stage sends
its hidden states [T, hidden] to the rank of the next stage. The rank of the last stage draws the
tokens and sends them with their log-probs to all others; logits are never sent. Tokens are host
tensors and are sent over a separate gloo group: NCCL keeps all messages between two ranks in one
order, but here hidden states and tokens are sent in opposite directions at the same time.

Ranks do not wait for sends to finish. With a single generator, each rank waits for the last rank at
the end of each step, so that only one rank works at a time. With as many generators as ranks, which
take turns (`weft.engine.generation.interleaved`), all ranks are busy: while the tokens of one
generator are being sent, the ranks compute the steps of the others. Prefills pass from rank to rank
like decode steps. Decode steps are computed one at a time and are not captured as CUDA graphs.

If a rank has several stages, a decode step visits the rank once for each. Its first stage is
computed immediately and the others are deferred (`catch_up`), so that the steps of all generators
start before the first step continues. Deferred stages run stage by stage, in the order in which the
steps began, which is the same on all ranks. A step with prefills defers no stages, because its keys
are copied immediately afterwards.
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

DrawnTokens = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], "list[tuple[int, ...]] | None"]


@dataclass
class _DecoderPass:
    """Forward pass of the pack `x` through this rank's stages.

    `left` are the indices of the stages that are not computed yet. `output` is allocated at the
    start, and contains the result once `left` is empty.
    """

    x: Packed
    left: deque[int]
    output: Tensor
    states: Tensor | None = None  # input of the next stage, if this rank made it
    then: Callable[[], None] | None = None


class StagedDecoder:
    """`Decoder` for one rank's stages of a pipeline (see `weft.engine.generation.passes`).

    `config` is the network's configuration, with `num_layers` set to the number of this rank's
    blocks. The decoder is a context manager. At the end of the `with` block, it waits until the
    other ranks have received everything that it has sent.
    """

    def __init__(
        self,
        network: Transformer,
        stages: Mapping[int, Transformer],
        placement: Placement,
        group: ProcessGroup,
        host_group: ProcessGroup,
    ) -> None:
        """Create the decoder of one rank of the pipeline.

        `stages` maps the indices of this rank's stages to their networks, and `network` has the
        blocks of all these stages. `placement` assigns the stages of the whole pipeline to ranks.
        `group` has the ranks of the pipeline, and `host_group` is their gloo group for host
        tensors.
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
        self._dtype = parameter.dtype
        # Unfinished sends: (target rank, tensor, work).
        self._sends: deque[tuple[int, Tensor, dist.Work]] = deque()
        self._num_sent = 0
        self._deferred_passes: deque[_DecoderPass] = deque()  # in the order in which they began
        self._last_deferred: _DecoderPass | None = None  # the last pass, if it has deferred stages
        assert tuple(self._stages) == placement.list_stages(self._rank), (
            "the placement's stages of this rank"
        )
        assert network.is_first_stage == (self._rank == 0) and network.is_last_stage == (
            self._rank == self._last
        )

    def __enter__(self) -> StagedDecoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self._wait_for_sends(self._num_sent)

    @property
    def training(self) -> bool:
        return self.network.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.network.train(mode)

    @property
    def can_read_pages(self) -> bool:
        """False, because this decoder does not support paged key-value caches.

        Decoding with a paged cache is captured as CUDA graphs, which cannot contain sends between
        ranks.
        """
        return False

    @property
    def prefix_tokens(self) -> int:
        return self.network.prefix_tokens

    def can_share_prefixes(self, longest: int) -> bool:
        return self.network.can_share_prefixes(longest)

    def parameters(self) -> Iterator[Tensor]:
        return iter(self.network.parameters())

    def train(self, mode: bool = True) -> object:
        return self.network.train(mode)

    def compute_hidden(self, x: Packed, rows: Tensor | None = None) -> Tensor:
        """Return the result of `Transformer.compute_hidden(x, rows)` on the last rank.

        Other ranks return an empty tensor [rows, 0]. If `rows` is None and this rank has several
        stages, the result has no valid values until `catch_up` has been called.
        """
        at_once = rows is not None or len(self._stages) == 1
        if at_once:
            self.catch_up()
        count = len(x.tokens) if rows is None else len(rows)
        if self.network.is_last_stage:
            width = self.config.embed_dim or self.config.hidden_size
        else:
            width = 0
        step = _DecoderPass(
            x,
            deque(self._stages),
            torch.empty(count, width, dtype=self._dtype, device=self._device),
        )
        self._compute(step, rows)
        while at_once and step.left:
            self._compute(step, rows)
        self._last_deferred = step if step.left else None
        if step.left:
            self._deferred_passes.append(step)
        return step.output

    @torch.no_grad()
    def catch_up(self) -> None:
        """Compute all stages that earlier calls of `compute_hidden` have deferred."""
        while self._deferred_passes:
            step = self._deferred_passes.popleft()
            self._compute(step)
            if step.left:
                self._deferred_passes.append(step)
            elif step.then is not None:
                step.then()

    def _compute(self, step: _DecoderPass, rows: Tensor | None = None) -> None:
        """Compute this rank's next stage in a forward pass.

        `step` is the forward pass. The result of the pipeline's last stage is stored in
        `step.output`. Any other stage passes its hidden states on to the stage after it.
        """
        stage = step.left.popleft()
        network = self._stages[stage]
        states = step.states
        step.states = None
        if stage > 0 and states is None:
            shape = len(step.x.tokens), self.config.hidden_size
            states = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._receive(states, self._placement.get_rank(stage - 1), "states", self._group)
        if network.is_last_stage:
            step.output.copy_(network.compute_hidden(step.x, rows, states))
            return
        next_states = network.compute_hidden(step.x, states=states)
        peer = self._placement.get_rank(stage + 1)
        if peer == self._rank:
            step.states = next_states
        else:
            self._send(next_states.contiguous(), peer, self._group)

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return the logits of the next tokens. Must be called only on the last rank.

        `wide` is an optional float32 copy of the output matrix (see `Decoder.next_token_logits`).
        """
        return self.network.next_token_logits(hidden_rows, wide)

    @property
    def output_matrix(self) -> Tensor | None:
        return self.network.output_matrix

    def agree_on_tokens(
        self, draw: Callable[[], DrawnTokens], rows: int
    ) -> Callable[[], DrawnTokens]:
        """Return a function that, on every rank, returns the tokens drawn in this step.

        The rank with the last stage calls `draw` as soon as this stage is computed, and sends the
        tokens. On the other ranks, the returned function waits for the tokens. `rows` is the number
        of tokens.
        """
        step = self._last_deferred
        self._last_deferred = None
        if not self.network.is_last_stage:
            sent = self._num_sent
            return lambda: self._receive_drawn(rows, sent, step)
        drawn: list[DrawnTokens] = []
        counts: list[int] = []

        def send_drawn() -> None:
            drawn.append(draw())
            first, ids = pack_tokens(drawn[0])
            for peer in (rank for rank in range(self._size) if rank != self._rank):
                self._send(first, peer, self._host)
                if len(ids):
                    self._send(ids, peer, self._host)
            counts.append(self._num_sent)

        if step is None:
            send_drawn()
        else:
            step.then = send_drawn

        def take_drawn() -> DrawnTokens:
            self._compute_deferred(step)
            self._wait_for_sends(counts[0])  # the other ranks receive at the same point
            return drawn[0]

        return take_drawn

    def _receive_drawn(self, rows: int, sent: int, step: _DecoderPass | None) -> DrawnTokens:
        """Receive the tokens that the last rank has drawn from the output of a forward pass.

        If this rank has deferred stages of the pass, it computes them first, because the last rank
        needs their results. In this case, `step` is the pass; otherwise, it is None. The method
        also waits until the first `sent` tensors sent by this rank are received, and releases them.
        """
        self._compute_deferred(step)
        first = torch.empty(3, rows, dtype=torch.float64)
        self._receive(first, self._last, "tokens", self._host)
        self._wait_for_sends(sent)
        ids = torch.empty(count_ids(first), dtype=torch.int64)
        if len(ids):
            self._receive(ids, self._last, "ids that a limit keeps", self._host)
        return unpack_tokens(first, ids)

    def _compute_deferred(self, step: _DecoderPass | None) -> None:
        """Make sure that the deferred stages of a forward pass have been computed.

        If any of them are left, the deferred stages of all passes are computed. `step` is the
        forward pass, or None if the pass did not defer any stages.
        """
        if step is not None and step.left:
            self.catch_up()

    # -- sending

    def _send(self, tensor: Tensor, peer: int, group: ProcessGroup) -> None:
        try:
            work = dist.isend(tensor, group=group, group_dst=peer)
        except RuntimeError as error:
            raise self._build_lost_error("a sent tensor was not received by", peer) from error
        assert work is not None
        self._sends.append((peer, tensor, work))
        self._num_sent += 1

    def _wait_for_sends(self, sent: int) -> None:
        """Wait until the first `sent` tensors from this rank have been received, then release them.

        `sent` is counted from the creation of the decoder.
        """
        while len(self._sends) > self._num_sent - sent:
            peer, _, work = self._sends.popleft()
            try:
                work.wait()
            except RuntimeError as error:
                raise self._build_lost_error("a sent tensor was not received by", peer) from error

    def _receive(self, tensor: Tensor, peer: int, what: str, group: ProcessGroup) -> None:
        try:
            work = dist.irecv(tensor, group=group, group_src=peer)
            assert work is not None
            work.wait()
        except RuntimeError as error:
            raise self._build_lost_error(f"the {what} did not come from", peer) from error

    def _build_lost_error(self, what: str, peer: int) -> RunError:
        return RunError(
            f"generation, rank {self._rank} of the pipeline: {what} rank {peer}; that rank "
            f"failed, or is later than the "
            "process group's timeout: look at its log first"
        )


def pack_tokens(drawn: DrawnTokens) -> tuple[Tensor, Tensor]:
    """Pack drawn tokens into two tensors for sending; `unpack_tokens` is the inverse.

    The first tensor, float64 [3, rows], has for each row the token id, its log-prob, and the number
    of ids that a limit such as top-k leaves (-1 if these ids are not recorded). The second tensor,
    int64, has these ids for all rows, one row after the other.
    """
    tokens, logprobs, supports = drawn
    if supports is None:
        counts = np.full(len(tokens), -1)
    else:
        counts = np.array([len(ids) for ids in supports])
    ids = []
    for support in supports or ():
        for id in support:
            ids.append(id)
    first = np.stack([tokens.astype(np.float64), logprobs, counts.astype(np.float64)])
    return torch.from_numpy(first), torch.tensor(ids, dtype=torch.int64)


def count_ids(first: Tensor) -> int:
    """Return the length of the second tensor that `pack_tokens` returns, given the first tensor.

    A rank that receives the two tensors needs the length to allocate the second one.
    """
    return int(first[2].clip(0).sum())


def unpack_tokens(first: Tensor, ids: Tensor) -> DrawnTokens:
    """Unpack the two tensors that `pack_tokens` returned."""
    tokens, logprobs, counts = first.numpy()
    supports = None
    if len(tokens) and counts[0] >= 0:
        ends = counts.cumsum().astype(np.int64)
        supports = [tuple(part.tolist()) for part in np.split(ids.numpy(), ends[:-1])]
    return tokens.astype(np.int64), logprobs, supports
