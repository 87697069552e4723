"""The decoder, for packed sequences; one class for all families, configured by `TransformerConfig`.

    Transformer(config, head="lm", pooling="last")
    network(x: Packed, want, temperature=1.0, support=None) -> {output: float32 array}
        [N] logprobs, entropy, top1 (lm), [N] values (value), [S] scores (score)
    network.compute_hidden(x) -> [T, width] after the last norm
    network.compute_hidden(x, rows) -> [N, width]
    network.next_token_logits(hidden_rows [R, width]) -> [R, V] float32

Pipeline stages have the same class: `layers=range(8, 16)` creates only these blocks. The stage has
the embedding if block 0 is included, and the last norm and the head if the last block is. A stage
without the embedding reads hidden states `states` [T, hidden], and a stage without the head returns
hidden states.

The modules of this package compute on one device; `weft.parallel` wraps and replaces them from
outside. The functions at the end prepare a network for training.

The parameters have the following canonical names, in which `{i}` is the layer.
`weft.models.network.linear` finds where each parameter is stored.

- `embed.weight`, `positions.weight`, `embed_in.weight`, `embed_out.weight`
- `blocks.{i}.attention.{q,k,v,o}.{weight,bias}`, `blocks.{i}.attention.{q_norm,k_norm}.weight`
- `blocks.{i}.mlp.{gate,up,down}.{weight,bias}`
- `blocks.{i}.mlp.router.weight`, `blocks.{i}.mlp.experts.{gate,up,down}.weight` [experts, out, in]
- `blocks.{i}.{norm1,norm2}.{weight,bias}` (before attention and MLP)
- `blocks.{i}.{norm1_post,norm2_post}.weight` (after them)
- `norm.{weight,bias}`
- `head.{weight,bias}` (absent if tied: the matrix of the embedding is used)
- `score.weight` [1, width] (value and score heads, in place of `head`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from weft import kernels
from weft.algorithms.base import Output
from weft.errors import ConfigError
from weft.kernels import GradientSum
from weft.models.attention.contexts import AttentionContext
from weft.models.kv.pages import Paged
from weft.models.kv.slots import Cached
from weft.models.network import prefix, rope, token_outputs
from weft.models.network.block import Block, BlockContext, CompiledParts, Norm, normalize
from weft.models.network.config import TransformerConfig
from weft.models.network.dropout import EmbeddingDropout, TokenDropout
from weft.models.network.fused_sums import PendingSum, can_normalize_sums, has_hooks
from weft.models.network.linear import Linear
from weft.models.network.lora import list_adapters
from weft.models.network.moe import MoE
from weft.models.network.output_projection import WHOLE, OutputProjection, OutputVocabulary
from weft.models.network.packed import Packed, SamplingSupport

Head = Literal["lm", "value", "score"]
Pooling = Literal["last", "mean"]
OUTPUTS: dict[str, frozenset[Output]] = {
    "lm": frozenset({"logprobs", "entropy", "top1", "top_ids", "top_logprobs", "given_logprobs"}),
    "value": frozenset({"values"}),
    "score": frozenset({"scores"}),
}


def check_outputs(head: Head, want: frozenset[Output]) -> None:
    """Raise `ConfigError` for outputs that a network with this head cannot compute."""
    if not want <= OUTPUTS[head]:
        supported = ", ".join(sorted(OUTPUTS[head]))
        unsupported = ", ".join(sorted(want - OUTPUTS[head]))
        raise ConfigError(f"a network with a {head} head gives {supported}, not {unsupported}")


class Embedding(nn.Embedding):
    """Embedding matrix [V, width] without initial values.

    If `nn.Embedding` drew values on the meta device, torch would load its compiler.
    """

    def reset_parameters(self) -> None:
        """Do nothing, so that the matrix is not initialized."""


class Transformer(nn.Module):
    """Decoder of packed sequences, or one pipeline stage of a decoder.

    The docstring of the module describes the arguments, methods and parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: Head = "lm",
        pooling: Pooling = "last",
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.kind = head
        self.pooling = pooling
        self.vocab_size = config.vocab_size
        # Indices of the local blocks in the whole network, in ascending order.
        self.held_layers = range(config.num_layers) if layers is None else layers
        # Every n-th block is computed again in the backward pass; 0 means none.
        self.recompute_every = 0
        # True if a prefix that sequences share must be computed for each sequence separately.
        self.repeats_prefixes = False
        # Padding token, or None; the score of a sequence is read at its last other token.
        self.padding: int | None = None
        # Create the modules of this stage.
        width = config.embed_dim or config.hidden_size
        hidden = config.hidden_size
        self.is_first_stage = self.held_layers[0] == 0
        self.is_last_stage = self.held_layers[-1] == config.num_layers - 1
        if self.is_first_stage or (self.is_last_stage and head == "lm" and config.tied):
            self.embed = Embedding(config.vocab_size, width)
        if self.is_first_stage and config.learned_positions is not None:
            self.positions = nn.Embedding(config.learned_positions, hidden)
        if width != hidden and self.is_first_stage:
            self.embed_in = nn.Linear(width, hidden, bias=False)
        if self.is_first_stage:
            self.embed_dropout = EmbeddingDropout()
        if width != hidden and self.is_last_stage:
            self.embed_out = nn.Linear(hidden, width, bias=False)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in self.held_layers)
        if self.is_last_stage and config.final_norm:
            self.norm = Norm(config)
        if self.is_last_stage and head != "lm":
            self.score = ValueHead(width)
        elif self.is_last_stage:
            self.head = LMHead(config)

    @classmethod
    def build_empty(
        cls,
        config: TransformerConfig,
        head: Head = "lm",
        pooling: Pooling = "last",
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: Sequence[int] | None = None,
    ) -> Transformer:
        """Return a network with uninitialized weights, without using a random generator."""
        with torch.device("meta"):
            network = cls(config, head, pooling, layers=layers)
        return network.to(dtype).to_empty(device=device)

    def forward(
        self,
        x: Packed,
        want: frozenset[Output],
        temperature: float = 1.0,
        support: SamplingSupport | None = None,
        states: Tensor | None = None,
    ) -> dict[Output, Tensor] | Tensor:
        """Return the outputs `want`, or hidden states [T, hidden] if this is not the last stage.

        The outputs of a language-model head are logprobs, entropy and top1 [N], and the log-probs
        of several ids per row (`weft.models.network.token_outputs`). The other heads compute values
        [N] or scores [S]. `states` are the hidden states from the previous stage, or None in the
        first stage. Raises `ConfigError` for outputs that the network's head cannot compute.
        """
        check_outputs(self.kind, want)
        hidden = self.compute_hidden(x, self.find_output_rows(x), states)
        if not self.is_last_stage:
            return hidden
        # Apply the head.
        if self.kind == "lm":
            outputs: dict[Output, Tensor] = self.head(
                hidden, x, want, self._tied_matrix, temperature, support
            )
            return outputs
        values: Tensor = self.score(hidden)
        if self.averages_scores:
            return {"scores": average_scores(values, x.attention)}
        return {"scores" if self.kind == "score" else "values": values}

    def find_output_rows(self, x: Packed) -> Tensor | None:
        """Return the indices of the tokens whose final states are read, int64 [N]; None for all."""
        if not self.is_last_stage or self.averages_scores:
            return None
        return find_score_rows(x, self.padding) if self.kind == "score" else x.rows

    def compute_hidden(
        self, x: Packed, rows: Tensor | None = None, states: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [T, width] after the last norm, or only those of `rows` int64 [N].

        `states` are the hidden states from the previous stage, or None in the first stage. If this
        is not the last stage, the result is the output of the last local block.
        """
        assert self.is_first_stage != (states is not None), (
            "all stages except the first, and only these, take hidden states"
        )
        dropout = None
        if x.dropout is not None:
            dropout = TokenDropout.from_lengths(x.dropout, x.attention.dense.lengths, x.positions)
        # Tokens follow the trained prefix; cached positions include it already.
        num_prefix = self.prefix_tokens
        if num_prefix and not isinstance(x.attention, Cached | Paged):
            x = replace(x, positions=x.positions + num_prefix)
        # Compute the embedding and the blocks.
        if states is None:
            states = self._embed(x, dropout)
        rotation = self._compute_rotation(x, states.dtype)
        context = BlockContext(x, rotation, dropout, fuses_sums=self._can_fuse_sums(states, x))
        if num_prefix:
            placed = prefix.place_prefix(x.attention, context.rotation, x.positions, num_prefix)
            context = replace(context, prefix=placed)
        outputs = self._run_blocks(states, context, rows)
        # Apply the last norm and the projection to the width of the embeddings.
        if self.is_last_stage and self.config.final_norm:
            _, states = normalize(self.norm, outputs)
        else:
            states = outputs.compute() if isinstance(outputs, PendingSum) else outputs
        if not self.is_last_stage:
            return states
        if self.config.embed_dim not in (None, self.config.hidden_size):
            return self.embed_out(states)
        return states

    def next_token_logits(self, hidden_rows: Tensor, wide: Tensor | None = None) -> Tensor:
        """Return float32 logits [R, V] for hidden states [R, width], not divided by a temperature.

        `wide` is the result of `kernels.prepare_wide` for `output_matrix`.
        """
        return self.projection.compute_logits(hidden_rows, wide)

    @property
    def output_matrix(self) -> Tensor | None:
        """Matrix from hidden states to logits; None if this stage has no language-model head."""
        return self.projection.weight if self.is_last_stage and self.kind == "lm" else None

    @property
    def projection(self) -> OutputProjection:
        """Output projection of a network with a language-model head."""
        return self.head.build_projection(self._tied_matrix)

    def can_share_prefixes(self, longest: int, on: torch.device | None = None) -> bool:
        """Return whether a prefix that several sequences share can be computed only once.

        `longest` is the number of tokens of the longest of these sequences. `on` is the device
        of the computation, by default that of the parameters. The result is False if rotations
        depend on the length of the sequence, if scores are the mean over all tokens, or if
        `repeats_prefixes` is set. It is also False if attention over shared prefixes does not
        support the network's windows or soft cap, or the device.
        """
        config = self.config
        device = on or next(self.parameters()).device
        longest += self.prefix_tokens
        covers_sequences = all(window is None or window >= longest for window in config.windows)
        has_length_dependent_rope = (
            config.rope is not None and config.rope.scaling in rope.LENGTH_DEPENDENT_SCALINGS
        )
        if device.type == "cpu":
            supports_attention = config.attention_softcap is None
        else:
            supports_attention = kernels.flex.serves(device, config.head_dim)
        return (
            covers_sequences
            and supports_attention
            and not has_length_dependent_rope
            and not self.averages_scores
            and not self.repeats_prefixes
        )

    @property
    def averages_scores(self) -> bool:
        """True if the score of a sequence is the mean over all its tokens."""
        return self.kind == "score" and self.pooling == "mean"

    @property
    def prefix_tokens(self) -> int:
        """Number of trained prefix tokens before each sequence; 0 while the prefix is disabled."""
        first_prefix = cast(Block, self.blocks[0]).attention.prefix
        is_active = first_prefix is not None and first_prefix.active
        return self.config.prefix_tokens if is_active else 0

    @property
    def can_read_pages(self) -> bool:
        """True, because this network can read keys and values in pages (`weft.models.kv.pages`).

        Other implementations of the decoder interface can return False.
        """
        return True

    @property
    def _tied_matrix(self) -> Tensor | None:
        return self.embed.weight if self.config.tied else None

    def _embed(self, x: Packed, dropout: TokenDropout | None) -> Tensor:
        """Return the sum of token and position embeddings, [T, hidden]."""
        config = self.config
        states: Tensor = self.embed(x.tokens)
        if config.embed_scale is not None:
            states = states * torch.full(
                (), config.embed_scale, dtype=states.dtype, device=states.device
            )
        if config.embed_dim not in (None, config.hidden_size):
            states = self.embed_in(states)
        if config.learned_positions is not None:
            states = states + self.positions(x.positions + config.position_offset)
        if dropout is not None:
            states = self.embed_dropout(states, dropout, config.embed_dropout)
        return states

    def _can_fuse_sums(self, states: Tensor, x: Packed) -> bool:
        """Return whether each norm can compute the sum before it, for hidden states like `states`.

        This is limited to passes over cached sequences in which no hooks would see the sums.
        """
        is_cached = isinstance(x.attention, Cached | Paged)
        if not is_cached or not kernels.fused.serves("add_norm", states):
            return False
        if self.config.placement not in ("pre", "both") or any(map(has_hooks, self.blocks)):
            return False
        norms = [self.norm] if self.is_last_stage and self.config.final_norm else []
        for block in self.blocks:
            assert isinstance(block, Block)
            norms += [block.norm1, block.norm2]
        return all(can_normalize_sums(norm, states) for norm in norms)

    def _run_blocks(
        self, states: Tensor, context: BlockContext, rows: Tensor | None
    ) -> Tensor | PendingSum:
        """Run the local blocks and return their output [T, hidden].

        If `rows` is given, only the output at these N rows is returned, [N, hidden].
        """
        for number, block in enumerate(self.blocks, 1):
            is_last = number == len(self.blocks)
            block_context = replace(context, rows=rows) if is_last else context
            layer = self.held_layers[number - 1]
            recomputes = self.recompute_every and (layer + 1) % self.recompute_every == 0
            if recomputes and torch.is_grad_enabled():
                states = checkpoint(
                    block, states, block_context, use_reentrant=False, preserve_rng_state=False
                )
            else:
                states = block(states, block_context)
        return states

    def _compute_rotation(self, x: Packed, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the tokens' (cos, sin), each [T, 1, dim / 2], or None without rotary positions."""
        rope_config = self.config.rope
        if rope_config is None:
            return None
        # Compute the lengths only if the rotation depends on them, because the host waits for a GPU
        # to compute them. Otherwise, the argument is not used, except for its device.
        needs_lengths = rope_config.scaling in rope.LENGTH_DEPENDENT_SCALINGS
        lengths = x.attention.token_lengths if needs_lengths else x.positions
        if needs_lengths and not isinstance(x.attention, Cached | Paged):
            lengths = lengths + self.prefix_tokens
        return rope.compute_rotation(rope_config, x.positions, lengths, dtype)


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
        self.vocabulary: OutputVocabulary = WHOLE
        # Sum to which the gradient of the output matrix is added, also if the matrix is tied.
        self.gradient_sum: kernels.GradientSum | None = None

    def build_projection(self, tied: Tensor | None) -> OutputProjection:
        """Return the output projection, with the embedding's matrix `tied` if `weight` is None."""
        weight = tied if self.weight is None else self.weight
        assert weight is not None, "a head without a matrix needs that of the embedding"
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
        embedding, which is used if `weight` is None.
        """
        return token_outputs.compute_outputs(
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
    rounded to about a thousand distinct values.

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
    indices = torch.arange(len(x.tokens), device=last.device)
    # Last token other than padding, up to the end of each sequence.
    score_rows = torch.where(x.tokens != padding, indices, -1).cummax(0).values[last]
    starts = x.attention.dense.cu_seqlens.long()
    # First token of the segment in which each sequence ends.
    first_tokens = starts[torch.searchsorted(starts, last, right=True) - 1]
    return torch.where(score_rows >= first_tokens, score_rows, last)


def average_scores(per_token: Tensor, context: AttentionContext) -> Tensor:
    """Return the mean score over the tokens of each sequence: [T] -> float32 [S].

    The head is linear, so this is the score of the mean hidden state.
    """
    lengths = context.dense.lengths
    indices = torch.arange(len(lengths), device=per_token.device)
    sequence_indices = indices.repeat_interleave(lengths, output_size=len(per_token))
    return per_token.new_zeros(len(lengths)).index_add(
        0, sequence_indices, per_token / context.token_lengths
    )


EMBEDDINGS = ("embed", "positions", "embed_in")  # modules with parameters before the first block


def set_residual_dropout(network: Transformer, rate: float, *, ramp: bool) -> None:
    """Set the dropout rate of the outputs of attention and MLP to `rate` in every layer.

    With `ramp`, the rate of layer i of L is i / (L - 1) * rate: it increases from 0 in the first
    layer to `rate` in the last (Zhou et al. 2023, "LIMA", section 3).
    """
    last = network.config.num_layers - 1
    for block in network.blocks:
        assert isinstance(block, Block)
        block.dropout = rate * block.layer / last if ramp and last else rate


def freeze(network: Transformer, first: int, dtype: torch.dtype | None = None) -> None:
    """Freeze the embeddings and the first `first` blocks of the whole network.

    If `dtype` is set, the frozen weights are converted to it, because frozen weights need no
    float32 copy for the optimizer. A tied output matrix is frozen together with the embedding.
    """
    blocks = []
    for block in network.blocks:
        if isinstance(block, Block) and block.layer < first:
            blocks.append(block)
    for module in (*(getattr(network, name, None) for name in EMBEDDINGS), *blocks):
        if isinstance(module, nn.Module):
            module.requires_grad_(False)
            if dtype is not None:
                module.to(dtype)


def train_embeddings(network: Transformer) -> None:
    """Make the embedding and output matrices trainable in addition to adapters.

    This is needed for newly added tokens.
    """
    for name in ("embed", "head"):
        module = getattr(network, name, None)
        if isinstance(module, nn.Module):
            module.requires_grad_(True)


def count_frozen_layers(first: int | None, last: int | None, num_layers: int) -> int | None:
    """Return the number of frozen first layers: `first`, or all except the last `last` layers.

    Returns None if `first` and `last` are both None. Raises `ConfigError` if `first` or `last` is
    larger than `num_layers`.
    """
    if first is not None and first > num_layers:
        raise ConfigError(
            f"freeze_layers={first}: the network has {num_layers} layers; write 0 to {num_layers}"
        )
    if last is not None and last > num_layers:
        raise ConfigError(
            f"train_last_layers={last}: the network has {num_layers} layers; write 0 to "
            f"{num_layers}"
        )
    return num_layers - last if last is not None else first


def compile_blocks(
    network: Transformer, backend: Any = "inductor", fp8: kernels.Fp8Product | None = None
) -> None:
    """Compile the parts of each block before and after attention.

    The compiled parts are used in passes without cached keys. They are compiled at the first use,
    once for all blocks of the same structure and for any number of tokens. Attention and experts
    keep their own kernels, so only the part before attention is compiled in a block with experts.
    For matrices in compiled parts, autograd computes the gradients as usual. These gradients are
    not added directly to master weights.

    Hooks on modules of a block may call code that cannot be compiled; this code runs between the
    compiled parts. With `fp8`, compiled products use fp8 if the sizes of the matrix allow this.
    """
    for block in network.blocks:
        assert isinstance(block, Block)
        # Hooks may call code that cannot be compiled.
        full_graph = not any(map(has_hooks, block.modules()))
        compute_heads, compute_output = (
            kernels.compiled_by_rows(part, backend, full_graph=full_graph)
            for part in (Block.compute_heads, Block.compute_output)
        )
        has_experts = isinstance(block.mlp, MoE)
        if has_experts:
            compute_output = Block.compute_output
        block.compiled = CompiledParts(compute_heads, compute_output)
        for layer in [block.attention.qkv] if has_experts else block.modules():
            if fp8 is not None and isinstance(layer, Linear) and fp8.supports(layer.weight):
                layer.narrow = fp8


def add_gradients_to(network: nn.Module, masters: Mapping[str, nn.Parameter]) -> None:
    """Make layers add their weight gradients to the `grad` of the float32 master weights `masters`.

    This applies to linear layers, their adapters and the output layer. `masters` maps the names of
    the network's parameters to the master weights. All other gradients are added to the `grad` of
    the network's own parameters as usual. For example, a tied matrix has two gradients: the
    gradient of the output layer is added to the master weight, and that of the embedding to the
    parameter.

    In the compiled parts of blocks, autograd still computes the gradients. Do not use this if a
    backward pass visits a layer twice, as in a pipeline that splits the backward pass, because each
    visit would add the gradient.
    """
    sums: dict[Tensor, GradientSum] = {}
    for name, parameter in network.named_parameters():
        if name in masters:
            sums[parameter] = GradientSum(masters[name])
    compiled = set()
    for block in network.modules():
        if isinstance(block, Block) and block.compiled is not None:
            for part in block.modules():
                compiled.add(part)
    for module in network.modules():
        if isinstance(module, Linear) and module not in compiled:
            module.gradient_sum = sums.get(module.weight)
            for adapter in list_adapters(module):
                adapter.gradient_sums = sums.get(adapter.lora_a), sums.get(adapter.lora_b)
        elif isinstance(module, Transformer) and module.is_last_stage and module.kind == "lm":
            module.head.gradient_sum = sums.get(module.projection.weight)
