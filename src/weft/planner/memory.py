"""Estimate of the memory that a run needs, computed from sizes alone.

Permanent memory of a role (parameters, masters, optimizer state) is summed over the roles of a
device. Memory during a call (activations, gradients, KV cache, and offloaded tensors of the role)
is counted once, for the largest call, because calls run one after another. The module does not
import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from weft.engine.spec import ModelSpec
from weft.observe.memory import GIB, MIB

SLOTS = {"adamw": 2, "palm": 2, "lion": 1, "sgd": 1}  # optimizer states for each trained parameter
# bytes per element of an optimizer state; 8-bit states have a float32 scale per block of 256
STATE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1.0 + 4 / 256}
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
WIDE = 4  # bytes of masters, gradients, logits
# chunk-sized tensors of the head (logits and derived values) alive at once
TRAINING_CHUNKS = 3
SCORING_CHUNKS = 2
SAMPLING_CHUNKS = 3  # the logits of a decode step, their softmax and log-softmax
# share of the largest matrix that a packing product copies at once, as measured
PACKED = 0.75
CAPPED_CHUNKS = 2  # additional chunks if logits have a soft cap
ENTROPY_CHUNKS = 2  # additional chunks if the entropy has a gradient
# Python objects of a run, without tensors: 17 to 23 MiB for SFT, DPO, GRPO and PPO, measured on
# one small layer
PROGRAM = 20 * MIB
PROCESS = 0.4 * GIB  # process of a CPU device without a model: Python, torch and their libraries
HOLES = 1.2  # measured ratio of occupied memory to live tensors of a CPU, due to fragmentation


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a decoder network, from which its memory is estimated.

    Attributes:
        parameters: Number of parameters on one rank.
        trainable: Number of trained parameters on one rank.
        layers: Number of layers.
        hidden: Width of the hidden states.
        query: Width of the query projection (number of heads times head size).
        key: Width of the key projection (number of key-value heads times head size).
        inner: Width of the MLP, summed over the experts that a token is routed to.
        vocab: Size of the vocabulary; 1 for a value or score head.
        embedding: Number of elements of the embedding matrix.
        gated: True if the MLP has a gate.
        tied: True if the embedding is also the output matrix.
        adapters: Number of elements per token that a layer's adapters keep for the backward pass.
        fused: True if the MLP recomputes activation(gate) and activation(gate) * up in the backward
            pass instead of keeping them.
        capped: True if logits have a soft cap.
        row_ranks: Number of ranks that divide the tokens of the residual stream (sequence
            parallelism); 1 if every rank has all tokens.
        rounded: Number of quantized elements, which are dequantized one matrix at a time.
        rounded_bytes: Size in bytes of the quantized elements.
        shards: Number of ranks over which the parameters are sharded. A rank gathers the parameters
            of a block when it computes the block.
        copies_attention: True if the output of attention is copied out of padded rectangles. A
            layer then keeps it twice: with padding for the backward pass of attention, and without
            padding for that of the output projection.
    """

    parameters: int
    trainable: int
    layers: int
    hidden: int
    query: int
    key: int
    inner: int
    vocab: int
    embedding: int
    gated: bool = True
    tied: bool = False
    adapters: int = 0
    fused: bool = True
    capped: bool = False
    row_ranks: int = 1
    rounded: int = 0
    rounded_bytes: int = 0
    shards: int = 1
    copies_attention: bool = False

    @property
    def embedding_elements(self) -> int:
        """Number of elements of the embedding and output matrices.

        If parameters are sharded, both matrices stay gathered during a whole pass.
        """
        return min(self.all_parameters, self.embedding * (1 if self.tied or self.vocab == 1 else 2))

    @property
    def all_parameters(self) -> int:
        return self.parameters * self.shards

    @property
    def block_elements(self) -> int:
        """Average number of elements of a block, including the elements on other ranks."""
        return -(-(self.all_parameters - self.embedding_elements) // max(1, self.layers))

    def count_saved_per_token(self) -> int:
        """Return the number of elements per token that a layer keeps for its backward pass.

        These are the hidden states before attention and before the MLP, the outputs of both norms,
        q, k, v, the output of attention (twice with `copies_attention`), the outputs of the MLP's
        first matrices, and what adapters keep. An MLP that isn't fused also keeps the output of its
        activation function and, if it is gated, the product of this output and the up projection.

        If ranks divide the tokens of the residual stream, each rank still keeps the outputs of the
        norms for all tokens, because attention and MLP read all of them.
        """
        return (
            2 * (self.stream_width + self.hidden)
            + 2 * self.query
            + 2 * self.key
            + self._copied
            + self._mlp_saved
            + self.adapters
        )

    def count_saved_in_last_layer(self, tokens: int, rows: int) -> int:
        """Return the number of elements that the last layer keeps for its backward pass.

        After attention, the layer continues with only `rows` of its `tokens`. It keeps the output
        of attention once for all tokens, and a copy of it for these rows. The hidden state before
        the MLP and everything computed from it, including what adapters keep, is kept only for
        these rows.
        """
        late = self.stream_width + self.hidden + self._mlp_saved + self.adapters
        early = self.count_saved_per_token() - self._copied - late
        return tokens * early + rows * (late + self.query)

    @property
    def stream_width(self) -> int:
        """Width of the residual stream on one rank, in elements per token.

        With sequence parallelism, each rank has only 1 / `row_ranks` of the tokens. The result is
        then the hidden size divided by `row_ranks`, an average over all tokens.
        """
        return -(-self.hidden // self.row_ranks)

    @property
    def largest_matrix(self) -> int:
        """Number of elements of the largest matrix of a block."""
        return self.hidden * max((2 if self.gated else 1) * self.inner, self.query + 2 * self.key)

    @property
    def _copied(self) -> int:
        """Number of elements per token of the second copy of attention's output."""
        return self.query if self.copies_attention else 0

    @property
    def _mlp_saved(self) -> int:
        """Number of elements per token that the MLP keeps for its backward pass."""
        return (2 if self.gated else 1) * (1 if self.fused else 2) * self.inner

    def count_working_per_token(self) -> int:
        """Return the peak number of elements per token that exist in one layer's backward pass."""
        return 3 * self.hidden + (4 if self.gated else 3) * self.inner


def list_adapted_sizes(
    hidden: int, query: int, key: int, inner: int, *, gated: bool, copies: int = 1
) -> dict[str, int]:
    """Return the number of inputs and outputs of each matrix of a block, by name.

    A low-rank adapter of a matrix has r elements for each of them. The arguments are the widths of
    a block, as in `NetworkShape`. The matrices of its MLP exist `copies` times, once per expert.
    """
    sizes = {"q": hidden + query, "k": hidden + key, "v": hidden + key, "o": hidden + query}
    names = ("gate", "up", "down") if gated else ("up", "down")
    return sizes | dict.fromkeys(names, copies * (hidden + inner))


@dataclass(frozen=True)
class MemorySettings:
    """Settings that determine how much memory a role needs on a device.

    Attributes:
        dtype: Name of the dtype in which the network computes.
        trained: True if the role is trained.
        optimizer: Type of the optimizer.
        recompute: Interval n if every n-th layer is recomputed in the backward pass; 0 if none is.
        offload_optimizer: True if master weights and optimizer state are always in host memory.
        chunk_rows: Number of tokens whose logits are always computed together.
        chunk_cells: More tokens are computed together up to this number of logits.
        weights_leave: True if weights are in host memory between the role's calls.
        optimizer_leaves: True if optimizer state is in host memory between the role's calls.
        packs: True if matrix products copy their right operand into another format (float32 on CPUs
            only).
        in_place: True if kernels overwrite the logits with results and gradients instead of
            allocating new tensors (float32 on CPUs only).
        adds_rows: True if the gradient of the embedding's look-up is added directly to the gradient
            of the embedding matrix, without a temporary matrix (float32 on CPUs only).
        keeps_cache: True if the KV cache stays allocated between calls.
        state_dtype: Name of the dtype of the optimizer state.
        fp8: True if matrix products of blocks use 8-bit copies of their operands.
        widens: True if the output matrix has a float32 copy during generation.
        reshards: True if a block's gathered parameters are freed after each pass through the block.
        sums_once: True if gradients are scattered only after the last micro-batch, instead of after
            each.
    """

    dtype: str
    trained: bool
    optimizer: str
    recompute: int
    offload_optimizer: bool
    chunk_rows: int
    weights_leave: bool = False
    optimizer_leaves: bool = False
    packs: bool = False
    in_place: bool = False
    adds_rows: bool = False
    keeps_cache: bool = False
    state_dtype: str = "float32"
    fp8: bool = False
    widens: bool = False
    reshards: bool = True
    sums_once: bool = False
    chunk_cells: int = 0

    def count_chunk_rows(self, vocab: int) -> int:
        """Return the maximum number of tokens whose `vocab` logits are in memory at the same time."""
        return max(self.chunk_rows, self.chunk_cells // vocab)


def build_settings(spec: ModelSpec, dtype: str, device: str, chunk_rows: int) -> MemorySettings:
    """Return the memory settings of a role that computes in `dtype`.

    `device` is the type of its device, such as "cpu" or "cuda". Nothing is offloaded between calls,
    and CPUs have no special kernels.
    """
    return MemorySettings(
        dtype=dtype,
        trained=spec.trained,
        optimizer=spec.optimizer.type,
        recompute=spec.recomputed_layers,
        offload_optimizer=spec.optimizer.offload and device != "cpu",
        chunk_rows=chunk_rows,
        keeps_cache=device == "cuda",
        state_dtype=spec.optimizer.state_dtype,
        fp8=spec.fp8,
        reshards=spec.zero_stage not in (1, 2),
        sums_once=spec.zero_stage == 1,
    )


@dataclass(frozen=True)
class CallDemand:
    """Sizes of one call of a model, from which the memory that it needs is estimated.

    Attributes:
        tokens: Number of tokens in a micro-batch.
        rows: Number of rows of a micro-batch for which outputs are computed.
        backward: True if the call has backward passes.
        parts: Number of micro-batches in a minibatch.
        entropy: True if the loss contains the entropy, whose gradient needs additional memory.
        cache_tokens: Size of the KV cache in tokens, before `cache_limit` is applied; 0 if the call
            does not generate.
        cache_limit: Maximum size of the KV cache in bytes, or None if it is not limited.
        sequences: Number of sequences that are decoded together.
    """

    tokens: int = 0
    rows: int = 0
    backward: bool = False
    parts: int = 1
    entropy: bool = False
    cache_tokens: int = 0
    cache_limit: int | None = None
    sequences: int = 0


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role on one device, in bytes.

    `permanent` is the sum of `parameters`, `masters`, `optimizer` and `resident_cache`.

    Attributes:
        parameters: Parameters in the compute dtype.
        masters: Master weights, if they are separate from the parameters.
        optimizer: Optimizer state.
        gradients: Gradients of the trained parameters.
        activations: Largest activations of any call.
        cache: Largest KV cache of any call.
        call: Highest peak memory of any call, not counting `permanent`. It can be less than
            `gradients` + `activations`, which don't peak at the same time.
        resident_cache: KV cache that stays allocated between calls.
        away: Part of `permanent` that is in host memory between calls.
    """

    parameters: int
    masters: int
    optimizer: int
    gradients: int
    activations: int
    cache: int
    call: int
    resident_cache: int = 0
    away: int = 0

    @property
    def permanent(self) -> int:
        return self.parameters + self.masters + self.optimizer + self.resident_cache

    def drop_weights(self) -> RoleMemory:
        """Return the memory of the role if it uses the weights of another role on the device."""
        return replace(self, parameters=0, masters=0, optimizer=0, gradients=0, away=0)

    def count_used_bytes(self, *, on_cpu: bool) -> tuple[float, float]:
        """Return the bytes that the role always takes, and those that it takes during its calls.

        A device needs the sum of the former over its roles, the largest of the latter, and
        `count_process_bytes`. On a CPU, the heap keeps freed memory, with gaps between tensors of
        many sizes, and memory that was freed by a cache is rarely reused.
        """
        stays, more = self.permanent - self.away, self.call + self.away
        return (stays + self.cache, HOLES * more) if on_cpu else (stays, more)


@dataclass(frozen=True)
class MemoryCase:
    """Input for estimating the memory of one role.

    `works` are the memory demands of the role's model calls.
    """

    shape: NetworkShape
    settings: MemorySettings
    works: tuple[CallDemand, ...]


def count_process_bytes(*, on_cpu: bool, num_devices: int) -> float:
    """Return the bytes that a device of a run takes besides its roles."""
    if not on_cpu:
        return 0.0
    return float(PROGRAM + (PROCESS if num_devices > 1 else 0))


def estimate(
    shape: NetworkShape, settings: MemorySettings, works: Iterable[CallDemand]
) -> RoleMemory:
    """Return the memory that one role needs for the calls that `works` describes."""
    if settings.dtype == "float64":
        single = estimate(shape, replace(settings, dtype="float32"), works)
        return RoleMemory(**{name: 2 * size for name, size in asdict(single).items()})
    # Sizes of the parts of permanent memory, and the largest demands of the calls.
    trainable = shape.trainable if settings.trained else 0
    width = BYTES[settings.dtype]
    apart = settings.dtype != "float32"
    on_device = 0 if settings.offload_optimizer else 1
    works = list(works)
    calls = [_estimate_call(shape, settings, trainable, work) for work in works]
    adds_up = settings.sums_once and any(work.backward and work.parts > 1 for work in works)
    parameters = (shape.parameters - shape.rounded) * width + shape.rounded_bytes
    masters = trainable * WIDE * apart * on_device
    state = _count_state_bytes(shape, settings, trainable) * on_device
    cache = max((cache for _, cache, _ in calls), default=0)
    resident_cache = cache if settings.keeps_cache else 0
    return RoleMemory(
        parameters=parameters,
        masters=masters,
        optimizer=state,
        gradients=trainable * WIDE * on_device,
        activations=max((activations for activations, _, _ in calls), default=0),
        cache=cache,
        call=max((most for _, _, most in calls), default=0)
        + (_count_gathered_bytes(shape, settings, adds_up=adds_up) if calls else 0)
        + (shape.largest_matrix * width if shape.rounded else 0),
        resident_cache=resident_cache,
        away=(parameters + masters + resident_cache) * settings.weights_leave
        + state * settings.optimizer_leaves,
    )


def _count_gathered_bytes(shape: NetworkShape, settings: MemorySettings, *, adds_up: bool) -> int:
    """Return the bytes of gathered parameters and gradients on one rank of a sharded network.

    With `settings.reshards`, the embedding, the output matrix and two blocks (the current one and
    the next) are gathered at the same time. Otherwise, all parameters are gathered.

    Normally, whole gradients exist for only one block at a time. With `adds_up`, the gradients of
    several micro-batches are summed before they are scattered, so whole gradients exist for all
    parameters. Gradients are counted only if all parameters are trained.
    """
    if shape.shards == 1:
        return 0
    if settings.reshards:
        elements = min(shape.embedding_elements + 2 * shape.block_elements, shape.all_parameters)
    else:
        elements = shape.all_parameters
    if settings.trained and shape.trainable == shape.parameters:
        gradient = (shape.all_parameters if adds_up else shape.block_elements) * WIDE
    else:
        gradient = 0
    return elements * BYTES[settings.dtype] + gradient


def _count_state_bytes(shape: NetworkShape, settings: MemorySettings, trainable: int) -> int:
    """Return the size of the optimizer state in bytes.

    With 8-bit states, the states of embeddings are still float32.
    """
    wide = 0
    if settings.state_dtype == "8bit" and trainable == shape.parameters:
        wide = min(-(-shape.embedding // shape.shards), trainable)
    each = STATE_BYTES[settings.state_dtype] * (trainable - wide) + WIDE * wide
    return int(SLOTS[settings.optimizer] * each)


def compute_peak(roles: Mapping[str, RoleMemory]) -> int:
    """Return the peak memory of all roles on one device, in bytes."""
    stays = sum(role.permanent - role.away for role in roles.values())
    return stays + max((role.away + role.call for role in roles.values()), default=0)


def _estimate_call(
    shape: NetworkShape, settings: MemorySettings, trainable: int, work: CallDemand
) -> tuple[int, int, int]:
    """Return an estimate of a call's memory in bytes: (activations, KV cache, peak).

    `trainable` is the number of trained parameters on this rank.
    """
    width = BYTES[settings.dtype]
    head = shape.vocab * WIDE * min(work.rows, settings.count_chunk_rows(shape.vocab))
    if settings.packs and shape.vocab > 1:
        packed = int(PACKED * shape.embedding * WIDE)
    else:
        packed = 0
    # Generation: the KV cache and the logits of a decode step.
    if work.cache_tokens:
        cache = 2 * shape.layers * shape.key * work.cache_tokens * width
        cache = cache if work.cache_limit is None else min(cache, work.cache_limit)
        logits = (1 if settings.in_place else SAMPLING_CHUNKS) * work.sequences * shape.vocab * WIDE
        logits += shape.vocab * shape.hidden * WIDE * settings.widens
        return logits, cache, logits + (0 if settings.keeps_cache else cache)
    # A forward pass: layers run one after another, and the head runs last.
    alone = 1 + CAPPED_CHUNKS * shape.capped
    ends = 2 * work.tokens * shape.stream_width * width + work.rows * shape.hidden * width
    if not work.backward:
        working = (
            work.tokens
            * (4 * shape.hidden + max(2 * shape.query + 2 * shape.key, 2 * shape.inner))
            * width
        )
        working += _count_fp8_copies(shape, settings, work)
        chunks = alone if settings.in_place else SCORING_CHUNKS
        most = ends + max(working, chunks * head + packed)
        return most, 0, most
    # Training: `saved_activations` are the activations of all layers; recomputed layers keep their input only.
    again = shape.layers // settings.recompute if settings.recompute else 0
    layer = work.tokens * shape.count_saved_per_token() * width
    saved_activations = (
        shape.layers - again
    ) * layer + again * work.tokens * shape.stream_width * width
    if not again or shape.layers % settings.recompute:
        saved_activations += shape.count_saved_in_last_layer(work.tokens, work.rows) * width - layer
    if settings.in_place:
        chunks = alone
    else:
        chunks = TRAINING_CHUNKS + ENTROPY_CHUNKS * work.entropy
    working = (
        work.tokens * shape.count_working_per_token() * width
        + (layer if again else 0)
        + _count_fp8_copies(shape, settings, work)
    )
    activations = ends + saved_activations + max(working, chunks * head + packed)
    gradients = 0 if settings.offload_optimizer else trainable * WIDE
    embedding = shape.embedding * WIDE if trainable == shape.parameters else 0
    # Early in a backward pass all activations exist, and the gradient of the output matrix, which
    # is as large as the embedding (all gradients after the first micro-batch). At its end all
    # gradients exist; the look-up's separately if its rows are not added in place, and the head's
    # too if they are tied. If ranks share rows, the gradients of the states have all rows.
    early = activations + (
        gradients + embedding if work.parts > 1 else embedding * (shape.vocab > 1)
    )
    ends += work.tokens * (shape.hidden - shape.stream_width) * width
    late = gradients + ends + (0 if settings.adds_rows else embedding * (1 + shape.tied))
    return activations, 0, max(early, late)


def _count_fp8_copies(shape: NetworkShape, settings: MemorySettings, work: CallDemand) -> int:
    """Return the size of the 8-bit copies of both operands of the largest matrix product, in bytes.

    Each operand is copied twice, because 8-bit products need two memory layouts of it.
    """
    return 2 * (work.tokens + shape.hidden) * (shape.inner + shape.hidden) * settings.fp8
