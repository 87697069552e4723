"""Tensor parallelism: the ranks of a group split the heads, the MLPs' width and the vocabulary.

    narrow = Transformer(narrow_config(config, t, rank))    # its weights: `compute_tensor_slice`
    join(narrow, config, group, shares_rows=True)
    narrow(packed, want)                            # every rank gets the whole network's outputs
    # after the backward passes of a step:
    sum_gradients(find_canonical_parameters(narrow), config, group, device, shares_rows=True)

Every rank passes the whole hidden states to its part of attention and MLP, and the results are
summed over the ranks. In the backward pass, the gradients of the hidden states are summed (Shoeybi
et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3). With sequence parallelism (`shares_rows`;
Korthikanti et al. 2022, "Reducing activation recomputation", arXiv:2205.05198, section 4.2.2), the
ranks also split the rows between attention and MLP: rows are gathered before each of the two, and
their result is summed and scattered. The communication volume is the same, because an all-reduce is
a reduce-scatter followed by an all-gather. Only `forward` splits the rows: generation, which calls
`compute_hidden`, uses whole hidden states.

The network does not know of the other ranks. Hooks on its modules exchange the tensors, norms over
heads of several ranks are replaced, and so is the head's vocabulary.
`weft.topology.compute_tensor_slice` defines how weights are split. The softmax over a split
vocabulary, of which each rank has consecutive ids, is also here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

from weft import kernels, topology
from weft.kernels import SoftmaxStatistics
from weft.models.network import lora
from weft.models.network.block import Block, BlockContext, Norm, ResidualStream
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import TokenDropout
from weft.models.network.linear import Linear, StoredParameter
from weft.models.network.moe import MoE
from weft.models.network.packed import Packed
from weft.models.network.transformer import Transformer
from weft.parallel.collectives import (
    RowAssignment,
    find_max_over_ranks,
    gather_from_ranks,
    gather_replicated_rows,
    gather_rows,
    scatter_rows,
    sum_backward,
    sum_both_ways,
    sum_forward,
    sum_over_ranks,
    sum_without_gradient,
)
from weft.topology import compute_vocabulary


@dataclass(frozen=True)
class SplitVocabulary:
    """Vocabulary of which each rank of a process group has consecutive ids.

    Implements the protocol `OutputVocabulary` (see `weft.models.network.output_projection`). All ranks
    must call the methods that combine tensors of the ranks.
    """

    first_id: int  # this rank's first id
    vocab_size: int  # ids in all
    group: ProcessGroup

    def count_ids(self, columns: int) -> int:
        return self.vocab_size

    def count_max_columns(self, columns: int) -> int:
        """Return the largest number of ids of a rank, so that all ranks have equal chunks."""
        return -(-self.vocab_size // self.group.size())

    def find_ids(self, columns: int) -> slice:
        return slice(self.first_id, self.first_id + columns)

    def find_columns(self, ids: Tensor, columns: int) -> Tensor:
        local = ids - self.first_id
        return torch.where((local >= 0) & (local < columns), local, torch.full_like(local, -1))

    def complete(self, logits: Tensor) -> Tensor:
        """Return the logits of all ids; the result is bitwise identical on all ranks."""
        counts = []
        for rank in range(self.group.size()):
            ids = compute_vocabulary(self.vocab_size, self.group.size(), rank)
            counts.append(ids.stop - ids.start)
        padded = logits.new_zeros(len(logits), max(counts))
        padded[:, : logits.shape[1]] = logits
        parts = self._gather_side_by_side(padded).split(max(counts), dim=1)
        return torch.cat(
            [part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1
        )

    def logsumexp(self, lse: Tensor) -> Tensor:
        most = lse.detach().clone(memory_format=torch.contiguous_format)
        find_max_over_ranks(most, self.group)
        shift = torch.where(most.isfinite(), most, torch.zeros_like(most))
        return sum_without_gradient((lse - shift).exp(), self.group).log() + shift

    def gather(self, logits: Tensor, columns: Tensor) -> Tensor:
        values = logits.gather(1, columns.clamp_min(0))
        return sum_without_gradient(
            torch.where(columns >= 0, values, torch.zeros_like(values)), self.group
        )

    def scatter(self, x: Tensor, columns: Tensor, values: Tensor) -> None:
        row, column = (columns >= 0).nonzero(as_tuple=True)
        x[row, columns[row, column]] = values[row, column]

    def find_likeliest(self, logits: Tensor, count: int, below: int | None) -> Tensor:
        if below is None:
            num_allowed = logits.shape[1]
        else:
            num_allowed = min(max(below - self.first_id, 0), logits.shape[1])
        best = logits[:, :num_allowed].topk(min(count, num_allowed), dim=1)
        padding = (0, count - best.values.shape[1])  # every rank must send equally many
        values = self._gather_side_by_side(
            nn.functional.pad(best.values, padding, value=float("-inf"))
        )
        ids = self._gather_side_by_side(nn.functional.pad(best.indices + self.first_id, padding))
        return ids.gather(1, values.topk(count, dim=1).indices)

    def uses_statistics(self, logits: Tensor) -> bool:
        return True

    def compute_statistics(
        self, logits: Tensor, columns: Tensor, *, entropy: bool, best: bool
    ) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the log-probs of one id per row, and the statistics over all ranks' logits.

        Rank r has the log-sum-exp lse_r and the entropy H_r of its own logits. The log-sum-exp of
        all logits is lse = logsumexp of lse_r, and the entropy is lse - sum over ranks of exp(lse_r
        - lse) (lse_r - H_r).
        """
        local = kernels.statistics(logits, entropy=entropy, best=best)
        lse = self.logsumexp(local.lse)
        logprobs = self.gather(logits, columns[:, None])[:, 0] - lse
        whole_entropy = None
        if local.entropy is not None:
            share = (local.lse - lse).exp()
            mean = torch.where(
                share > 0, share * (local.lse - local.entropy), torch.zeros_like(share)
            )
            whole_entropy = lse - sum_without_gradient(mean, self.group)
        likeliest = None
        if local.best is not None:
            # On ties, argmax takes the first rank.
            values = self._gather_side_by_side(logits.gather(1, local.best[:, None]))
            ids = self._gather_side_by_side(local.best[:, None] + self.first_id)
            likeliest = ids.gather(1, values.argmax(dim=1, keepdim=True))[:, 0]
        return logprobs, SoftmaxStatistics(lse, whole_entropy, likeliest)

    def _gather_side_by_side(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, in rank order: [R, K] -> [R, ranks * K]."""
        return torch.cat(list(gather_from_ranks(values, self.group)), dim=1)


# Parameters that every rank holds whole but uses only for its own heads or width, so each rank has
# only a part of their gradient.
PARTIAL = (
    r"blocks\.\d+\.(attention\.([qkv]\.lora_a|o\.lora_b|[qk]_norm\.weight)"
    r"|mlp\.(router\.weight|.*(gate|up)\.lora_a|.*down\.lora_b))"
)
# Parameters used between attention and MLP. With sequence parallelism, each rank has only a part of
# these gradients too.
BETWEEN = (
    r"(positions|embed_in|embed_out|score)\.weight|norm\.(weight|bias)"
    r"|blocks\.\d+\.(norm[12](_post)?\.(weight|bias)|(attention\.o|mlp\.down)\.bias)"
)
# Parameters of key and value heads, which several ranks hold if there are fewer heads than ranks.
# COPIED_NORM adds the norm over all keys.
COPIED = r"blocks\.\d+\.attention\.([kv]\.(weight|bias|lora_b)|prefix\.[kv])"
COPIED_NORM = rf"{COPIED}|blocks\.\d+\.attention\.k_norm\.weight"


def narrow_config(config: TransformerConfig, t: int, rank: int) -> TransformerConfig:
    """Return the configuration of one rank's part of a network.

    `t` is the number of tensor-parallel ranks, and `rank` is the index of the rank among them. The
    part has fewer heads, a narrower MLP and a smaller vocabulary. Raises `ConfigError` if the
    network cannot be split into `t` parts.
    """
    width = config.intermediate_size
    experts = config.experts
    ids = topology.compute_vocabulary(config.vocab_size, t, rank)
    heads = topology.compute_heads(config, t, rank)
    kv = topology.compute_kv_heads(config, t, rank)
    if experts is not None:
        inner = topology.shard((experts.intermediate_size,), 0, t, rank)[0]
        experts = replace(experts, intermediate_size=inner.stop - inner.start)
    if experts is None or experts.layers:
        part = topology.shard((width,), 0, t, rank)[0]
        width = part.stop - part.start
    return replace(
        config,
        vocab_size=ids.stop - ids.start,
        num_heads=heads.stop - heads.start,
        num_kv_heads=kv.stop - kv.start,
        intermediate_size=width,
        experts=experts,
    )


def join(
    network: Transformer, config: TransformerConfig, group: ProcessGroup, *, shares_rows: bool
) -> None:
    """Connect this rank's part of a network to the parts of the other ranks of `group`.

    `config` is the configuration of the whole network. With `shares_rows`, the network uses
    sequence parallelism: outside of attention and MLP, each rank has the hidden states of only some
    tokens.
    """
    network.vocab_size = config.vocab_size
    _EndsConnection(network, config, group, shares_rows=shares_rows)
    for block in network.blocks:
        assert isinstance(block, Block)
        _BlockConnection(block, config, group)


def count_rows(length: int, group: ProcessGroup) -> int:
    """Return the number of this rank's rows in a pack of `length` tokens whose rows are shared."""
    most = -(-length // group.size())
    return min(max(length - group.rank() * most, 0), most)


@dataclass(frozen=True)
class _SharedRows:
    """Assignment of a pass's rows to the ranks.

    Attributes:
        tokens: Assignment of all tokens.
        wanted: Assignment of the tokens whose final hidden states are needed.
        wanted_tokens: Indices of this rank's wanted tokens among its tokens, int64.
    """

    tokens: RowAssignment
    wanted: RowAssignment
    wanted_tokens: Tensor

    @classmethod
    def from_pass(cls, x: Packed, rows: Tensor | None, group: ProcessGroup) -> _SharedRows:
        """Assign consecutive tokens to each rank; `rows` are the wanted tokens, or None for all."""
        tokens = RowAssignment.from_equal_runs(len(x.tokens), group, x.tokens.device)
        if rows is None:
            wanted_tokens = torch.arange(len(tokens.own_rows), device=x.tokens.device)
            return cls(tokens, tokens, wanted_tokens)
        wanted = tokens.select(rows)
        return cls(tokens, wanted, tokens.local_indices[rows[wanted.own_rows]])


@dataclass(frozen=True)
class _SharedPack(Packed):
    """Input of a pass in which the ranks share the rows of hidden states."""

    shared: _SharedRows | None = None


class _EndsConnection:
    """Hooks on a network and on its modules before the first and after the last block.

    During a pass that shares rows, the object stores the assignment of rows to ranks.
    """

    def __init__(
        self,
        network: Transformer,
        config: TransformerConfig,
        group: ProcessGroup,
        *,
        shares_rows: bool,
    ) -> None:
        self._group = group
        self._first_id = topology.compute_vocabulary(
            config.vocab_size, group.size(), group.rank()
        ).start
        self._shared: _SharedRows | None = None
        self._has_id: Tensor | None = None  # bool [T]: mask of the tokens whose ids this rank has
        if shares_rows:
            network.register_forward_pre_hook(self._begin_pass)
            network.register_forward_hook(self._end_pass, always_call=True)
        if network.is_first_stage:
            network.embed.register_forward_pre_hook(self._find_own_ids)
            network.embed.register_forward_hook(self._sum_embeddings)
            network.embed_dropout.register_forward_pre_hook(self._select_dropout)
            if config.learned_positions is not None:
                network.positions.register_forward_pre_hook(self._select_positions)
        if network.is_last_stage and network.kind == "lm":
            network.head.vocabulary = SplitVocabulary(self._first_id, config.vocab_size, group)
            network.head.register_forward_pre_hook(self._enter_head)
        elif network.is_last_stage:
            network.score.register_forward_hook(self._gather_values)

    def _begin_pass(self, network: Transformer, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = given
        shared = _SharedRows.from_pass(x, network.find_output_rows(x), self._group)
        self._shared = shared
        values = {field.name: getattr(x, field.name) for field in fields(x)}
        return (_SharedPack(**values | {"shared": shared}), *rest)

    def _end_pass(self, network: nn.Module, given: tuple[Any, ...], result: object) -> None:
        self._shared = None

    def _find_own_ids(self, embed: nn.Embedding, given: tuple[Tensor]) -> Tensor:
        local = given[0] - self._first_id
        self._has_id = (local >= 0) & (local < len(embed.weight))
        return torch.where(self._has_id, local, 0)

    def _sum_embeddings(self, embed: nn.Module, given: tuple[Tensor], states: Tensor) -> Tensor:
        assert self._has_id is not None
        states = states * self._has_id[:, None]
        self._has_id = None
        if self._shared is None:
            return sum_forward(states, self._group)
        return scatter_rows(states, self._shared.tokens)

    def _select_positions(self, positions: nn.Module, given: tuple[Tensor]) -> Tensor:
        return given[0] if self._shared is None else given[0][self._shared.tokens.own_rows]

    def _select_dropout(
        self, layer: nn.Module, given: tuple[Tensor, TokenDropout, float]
    ) -> tuple[Tensor, TokenDropout, float]:
        states, dropout, rate = given
        if self._shared is not None:
            dropout = dropout.select(self._shared.tokens.own_rows)
        return states, dropout, rate

    def _enter_head(self, head: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        states, *rest = given
        if self._shared is None:
            return (sum_backward(states, self._group), *rest)
        return (gather_rows(states, self._shared.wanted), *rest)

    def _gather_values(self, score: nn.Module, given: tuple[Tensor], values: Tensor) -> Tensor:
        return (
            values if self._shared is None else gather_replicated_rows(values, self._shared.wanted)
        )


class _BlockConnection:
    """Hooks on a block and on its modules: attention and MLP are split over the ranks.

    During a pass that shares rows, the object stores the assignment of rows to ranks, for the
    inputs of attention and for the outputs of attention and MLP. If a block is recomputed in the
    backward pass, the assignments are stored again. The hooks are not compiled.
    """

    def __init__(self, block: Block, config: TransformerConfig, group: ProcessGroup) -> None:
        self._group = group
        self._inputs: RowAssignment | None = None
        self._outputs: RowAssignment | None = None
        attention = block.attention
        block.register_forward_pre_hook(self._begin_block)
        attention.qkv.register_forward_pre_hook(self._enter_attention)
        self._sum_output(attention.o)
        heads = topology.compute_heads(config, group.size(), group.rank())
        attention.first_head = attention.layer * config.num_heads + heads.start
        _set_first_channel(attention.o, heads.start * config.head_dim)
        if config.qk_norm == "full":
            copies = max(1, group.size() // config.num_kv_heads)
            attention.register_module(
                "q_norm",
                _SplitNorm(attention.q_norm, config.num_heads * config.head_dim, group),
            )
            attention.register_module(
                "k_norm",
                _SplitNorm(attention.k_norm, config.num_kv_heads * config.head_dim, group, copies),
            )
        block.mlp.register_forward_pre_hook(self._enter_mlp)
        if isinstance(block.mlp, MoE):
            block.mlp.register_forward_hook(self._sum_outputs)
            down = block.mlp.experts.down
            if down.adapter is not None:
                down.adapter.channel = group.rank() * down.weight.shape[-1]
        else:
            self._sum_output(block.mlp.down)
            _set_first_channel(block.mlp.down, group.rank() * block.mlp.down.weight.shape[1])

    def _sum_output(self, layer: Linear) -> None:
        """Sum the products of `layer` over the ranks before its bias is added."""
        layer.register_forward_pre_hook(_leave_bias_out, with_kwargs=True)
        layer.register_forward_hook(self._sum_outputs)
        layer.register_forward_hook(_add_bias)

    def _begin_block(
        self, block: nn.Module, given: tuple[Tensor, BlockContext]
    ) -> tuple[Tensor, BlockContext] | None:
        x, context = given
        shared = context.pack.shared if isinstance(context.pack, _SharedPack) else None
        if shared is None:
            self._inputs = self._outputs = None
            return None
        self._inputs = shared.tokens
        self._outputs = shared.tokens if context.mlp_rows is None else shared.wanted
        rows = None if context.rows is None else shared.wanted_tokens
        dropout = context.mlp_dropout
        if dropout is not None:
            dropout = dropout.select(self._outputs.own_rows)
        return x, replace(context, stream=ResidualStream(rows, dropout))

    @_disable_dynamo
    def _enter_attention(self, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._gather(given, self._inputs)

    @_disable_dynamo
    def _enter_mlp(self, layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._gather(given, self._outputs)

    def _gather(self, given: tuple[Any, ...], rows: RowAssignment | None) -> tuple[Any, ...]:
        x, *rest = given
        return (sum_backward(x, self._group) if rows is None else gather_rows(x, rows), *rest)

    @_disable_dynamo
    def _sum_outputs(self, layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> Tensor:
        if self._outputs is None:
            return sum_forward(y, self._group)
        return scatter_rows(y, self._outputs)


def _leave_bias_out(
    layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return given, named | {"biased": False}


def _add_bias(layer: Linear, given: tuple[Any, ...], y: Tensor) -> Tensor:
    return y if layer.bias is None else y + layer.bias


class _SplitNorm(nn.Module):
    """RMS norm over `whole` elements that are split over the ranks of a group.

    `norm` is this rank's part of the norm. If `copies` ranks hold the same elements, these are
    counted once.
    """

    def __init__(self, norm: Norm, whole: int, group: ProcessGroup, copies: int = 1) -> None:
        super().__init__()
        assert norm.kind != "layer", "the statistics of a layer norm are not summed over ranks"
        assert norm.weight is not None
        self.weight = norm.weight
        self.eps = norm.eps
        self._offset = 0.0 if norm.kind == "rms" else 1.0
        self._whole = whole
        self._group = group
        self._copies = copies

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum(-1, keepdim=True)
        if self._copies > 1:
            squares = squares / self._copies
        squares = sum_both_ways(squares, self._group)
        normed = wide * torch.rsqrt(squares / self._whole + self.eps)
        return (normed * (self.weight + self._offset)).to(x.dtype)


def _set_first_channel(layer: Linear, channel: int) -> None:
    """Store the index of this rank's first input feature in the layer's adapters.

    `channel` is the index within the whole layer. It determines the random numbers of adapter
    dropout.
    """
    for adapter in lora.list_adapters(layer):
        adapter.channel = channel


def sum_gradients(
    stored: Mapping[str, StoredParameter],
    config: TransformerConfig,
    group: ProcessGroup,
    device: torch.device,
    *,
    shares_rows: bool,
) -> None:
    """Sum the partial gradients that the ranks have computed for replicated parameters.

    For example, all ranks have the norm of the query heads, but each rank applies it only to its
    own heads. With `shares_rows` (sequence parallelism), the parameters used outside of attention
    and MLP are included, because each rank applies them only to its own tokens. The gradients of
    key and value heads are summed only over the ranks that hold the same head.

    `stored` maps canonical names to parameters. `device` is the device over which the group
    communicates; the gradients may be on another device. All ranks of `group` must call this.
    """
    # Sum the gradients of parameters that all ranks use in part.
    parts = _find_partial(stored, config)
    if shares_rows:
        for name, part in stored.items():
            if re.fullmatch(BETWEEN, name):
                parts.append(part)
    gradients = [grad for part in parts if (grad := part.grad) is not None]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
        sum_over_ranks(flat, group)
        put_back(flat, gradients)
    # Sum those of key and value heads over the ranks that hold the same head.
    copies = group.size() // config.num_kv_heads
    if copies > 1:
        _sum_copies(
            stored, COPIED if config.qk_norm != "full" else COPIED_NORM, group, copies, device
        )


def _find_partial(
    stored: Mapping[str, StoredParameter], config: TransformerConfig
) -> list[StoredParameter]:
    by_head = config.qk_norm != "full"
    result: list[StoredParameter] = []
    for name, part in stored.items():
        if re.fullmatch(PARTIAL, name) and (by_head or "_norm" not in name):
            result.append(part)
    return result


def _sum_copies(
    stored: Mapping[str, StoredParameter],
    pattern: str,
    group: ProcessGroup,
    copies: int,
    device: torch.device,
) -> None:
    """Sum the gradients of key and value heads over the ranks that hold the same head.

    Each head is held by `copies` consecutive ranks. `pattern` matches the names of the parameters.
    """
    optional_gradients = []
    for name, part in stored.items():
        if re.fullmatch(pattern, name):
            optional_gradients.append(part.grad)
    gradients = [gradient for gradient in optional_gradients if gradient is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
    of_ranks = gather_from_ranks(flat, group)
    first = group.rank() // copies * copies
    put_back(of_ranks[first : first + copies].sum(0), gradients)


def put_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Copy the values in `flat`, a concatenation of flattened gradients, back to `gradients`."""
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, values in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(values.view_as(gradient))
