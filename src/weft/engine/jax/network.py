"""The decoder of `weft.models.network` as pure functions of a dictionary of JAX arrays.

The parameters have weft's canonical names, except that the parameters of equal blocks are stacked,
so that all of them use the same compiled block. For example, `blocks.0:12.attention.q.weight`
contains the matrices of blocks 0 to 11 as [12, out, in] (see `weft.engine.jax.parameters`).

Tokens are arranged in rows [R, L]. Each row contains several sequences, one after the other, and
padding at the end. A token attends to itself and to the earlier tokens with the same number in
`segments`, which are those of its sequence. Padding has the number 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from weft.algorithms.base import Output
from weft.engine.jax.attention import MASKED, LayerWindow, attend_to_past, attend_to_rows
from weft.engine.jax.decoder import DecoderSettings, HeadInputs, KeysValues, TokenRows
from weft.models.network.config import TransformerConfig
from weft.models.network.packed import TopIds

Parameters = Mapping[str, Array]
CHUNK_CELLS = 1 << 24  # most logits in a chunk of more than `MIN_CHUNK_ROWS` rows
MIN_CHUNK_ROWS = 256  # each chunk reads the whole output matrix, which is slow for fewer rows


def compute_hidden(
    parameters: Parameters,
    rows: TokenRows,
    decoder: DecoderSettings,
    past: Sequence[KeysValues] | None = None,
    *,
    return_kv: bool,
) -> tuple[Array, list[KeysValues]]:
    """Return hidden states [R, L, width] after the last norm, and each stack's keys and values.

    The list of keys and values is empty if `return_kv` is False. If `past` has the cached keys and
    values of each stack, each row is a single token, which also attends to its sequence's cached
    tokens; their number is the token's position.
    """
    config = decoder.config
    x = decoder.gather_table(parameters["embed.weight"])[rows.tokens].astype(decoder.dtype)
    if config.embed_scale is not None:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    if "embed_in.weight" in parameters:
        x = _apply_linear(parameters, "embed_in", x, decoder)
    if config.learned_positions is not None:
        table = parameters["positions.weight"].astype(x.dtype)
        x = x + table[rows.positions + config.position_offset]
    x = decoder.shard_rows(x)
    keys_values = []
    for number, (layers, stack) in enumerate(group_stacks(parameters)):
        stack_past = None if past is None else past[number]
        x, stack_kv = _run_stack(x, stack, layers, stack_past, rows, decoder, return_kv=return_kv)
        if stack_kv is not None:
            keys_values.append(stack_kv)
    if config.final_norm:
        x = _normalize(parameters, "norm", x, decoder)
    if "embed_out.weight" in parameters:
        x = _apply_linear(parameters, "embed_out", x, decoder)
    return x, keys_values


def group_stacks(parameters: Parameters) -> list[tuple[range, dict[str, Array]]]:
    """Return (layers, parameters) for each stack of equal blocks, in the order of the layers.

    The parameters have their names within a block, such as `attention.q.weight`.
    """
    stacks: dict[tuple[int, int], dict[str, Array]] = {}
    for name, value in parameters.items():
        if name.startswith("blocks."):
            _, layers, block_name = name.split(".", 2)
            start, stop = layers.split(":")
            stacks.setdefault((int(start), int(stop)), {})[block_name] = value
    return [(range(*span), stacks[span]) for span in sorted(stacks)]


def _run_stack(
    x: Array,
    stack: Mapping[str, Array],
    layers: range,
    past: KeysValues | None,
    rows: TokenRows,
    decoder: DecoderSettings,
    *,
    return_kv: bool,
) -> tuple[Array, KeysValues | None]:
    """Run equal blocks one after the other, with one compiled block for all of them.

    Returns the hidden states [R, L, hidden] and, if `return_kv`, the blocks' keys and values.
    """
    config = decoder.config
    windows = [config.window(layer) for layer in layers]
    window_sizes = list(dict.fromkeys(windows))
    window_indices = [window_sizes.index(window) for window in windows]
    scales = []
    for layer in layers:
        scales.append(config.scale / (layer + 1 if config.layer_scaled_attention else 1))

    def run(
        x: Array, layer: tuple[Parameters, Array, Array, KeysValues | None]
    ) -> tuple[Array, KeysValues | None]:
        parameters, window_index, scale, past = layer
        window = LayerWindow(window_sizes, window_index)
        x, keys_values = _run_block(x, parameters, window, scale, past, rows, decoder)
        return decoder.shard_rows(x), keys_values if return_kv else None

    if decoder.policy is not None:
        run = jax.checkpoint(run, policy=getattr(jax.checkpoint_policies, decoder.policy))
    layer_inputs = (
        dict(stack),
        jnp.asarray(window_indices, jnp.int32),
        jnp.asarray(scales, decoder.wide),
        past,
    )
    return lax.scan(run, x, layer_inputs)


def _run_block(
    x: Array,
    parameters: Parameters,
    window: LayerWindow,
    scale: Array,
    past: KeysValues | None,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> tuple[Array, KeysValues]:
    """Return the hidden states after a block, and the keys and values of its tokens."""
    config = decoder.config

    def attend(x: Array) -> tuple[Array, KeysValues]:
        return _attend(x, parameters, window, scale, past, rows, decoder)

    def run_mlp(x: Array) -> Array:
        return _compute_mlp(x, parameters, decoder)

    norm = partial(_normalize, parameters, decoder=decoder)
    if config.parallel_residual:
        attended, keys_values = attend(norm("norm1", x))
        return x + attended + run_mlp(norm("norm2", x)), keys_values
    match config.placement:
        case "pre":
            attended, keys_values = attend(norm("norm1", x))
            x = x + attended
            return x + run_mlp(norm("norm2", x)), keys_values
        case "post":
            attended, keys_values = attend(x)
            x = x + norm("norm1_post", attended)
            return x + norm("norm2_post", run_mlp(x)), keys_values
        case "both":
            attended, keys_values = attend(norm("norm1", x))
            x = x + norm("norm1_post", attended)
            return x + norm("norm2_post", run_mlp(norm("norm2", x))), keys_values
        case "after":
            attended, keys_values = attend(x)
            x = norm("norm1", x + attended)
            return norm("norm2", x + run_mlp(x)), keys_values


def _attend(
    x: Array,
    parameters: Parameters,
    window: LayerWindow,
    scale: Array,
    past: KeysValues | None,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> tuple[Array, KeysValues]:
    """Return the output of self-attention, [R, L, hidden], and the tokens' keys and values."""
    config = decoder.config
    heads = {}
    for name, count in (
        ("q", config.num_heads),
        ("k", config.num_kv_heads),
        ("v", config.num_kv_heads),
    ):
        y = _apply_linear(parameters, f"attention.{name}", x, decoder)
        if config.qk_norm == "full" and name != "v":
            y = _normalize(parameters, f"attention.{name}_norm", y, decoder)
        y = y.reshape(*y.shape[:-1], count, config.head_dim)
        if config.qk_norm == "head" and name != "v":
            y = _normalize(parameters, f"attention.{name}_norm", y, decoder)
        heads[name] = y if name == "v" or rows.cos is None else _rotate(y, rows)
    q, k, v = heads["q"], heads["k"], heads["v"]
    q = q.reshape(*q.shape[:2], config.num_kv_heads, -1, config.head_dim)
    if past is None:
        attended = attend_to_rows(q, k, v, window, scale, rows, decoder)
    else:
        attended = attend_to_past(q, k, v, window, scale, past, rows, decoder)
    output = _apply_linear(parameters, "attention.o", attended.reshape(*x.shape[:2], -1), decoder)
    return output, KeysValues(k, v)


def _rotate(heads: Array, rows: TokenRows) -> Array:
    """Rotate the first dimensions of each head, [R, L, heads, head_dim]."""
    cos, sin = rows.cos[:, :, None], rows.sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = jnp.split(heads, [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _compute_mlp(x: Array, parameters: Parameters, decoder: DecoderSettings) -> Array:
    """Return the output of the MLP or of the experts, [R, L, hidden]."""
    config = decoder.config
    if config.experts is not None:
        flat = x.reshape(-1, x.shape[-1])
        return _compute_experts(flat, parameters, decoder).reshape(x.shape)
    up = _apply_linear(parameters, "mlp.up", x, decoder)
    if config.gated:
        gate = _apply_linear(parameters, "mlp.gate", x, decoder)
        inner = _activate(gate.astype(decoder.wide), config) * up.astype(decoder.wide)
    else:
        inner = _activate(up.astype(decoder.wide), config)
    return _apply_linear(parameters, "mlp.down", inner.astype(x.dtype), decoder)


def _compute_experts(x: Array, parameters: Parameters, decoder: DecoderSettings) -> Array:
    """Return the weighted sum of the outputs of each token's experts, [T, hidden].

    No token is dropped.
    """
    experts = decoder.config.experts
    assert experts is not None
    logits = _apply_linear(parameters, "mlp.router", x, decoder)
    weights, expert_ids = lax.top_k(
        jax.nn.softmax(logits.astype(decoder.wide), axis=-1), experts.top_k
    )
    if experts.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    # Sort the pairs (token, expert) by expert.
    order = jnp.argsort(expert_ids.reshape(-1), stable=True)
    tokens = order // experts.top_k
    sizes = jnp.bincount(expert_ids.reshape(-1), length=experts.num).astype(jnp.int32)

    def multiply(name: str, x: Array) -> Array:
        """Multiply each row by its expert's matrix `name`, and add the adapter's product."""

        def apply(matrix: str, x: Array) -> Array:
            matrices = parameters[f"mlp.experts.{name}.{matrix}"].astype(x.dtype)
            return lax.ragged_dot(x, matrices.swapaxes(1, 2), sizes)

        y = apply("weight", x)
        if f"mlp.experts.{name}.lora_a" in parameters:
            y = y + apply("lora_b", apply("lora_a", x)) * decoder.adapter_scale
        return y

    gathered = x[tokens]
    gate = multiply("gate", gathered)
    inner = _activate(gate.astype(decoder.wide), decoder.config)
    inner = (inner * multiply("up", gathered).astype(decoder.wide)).astype(x.dtype)
    outputs = multiply("down", inner) * weights.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[tokens].add(outputs)


def _activate(x: Array, config: TransformerConfig) -> Array:
    match config.activation:
        case "silu":
            return jax.nn.silu(x)
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)


def _apply_linear(parameters: Parameters, name: str, x: Array, decoder: DecoderSettings) -> Array:
    """Return x W^T + b, plus scale (x A^T) B^T if the matrix has a low-rank adapter."""
    y = x @ parameters[f"{name}.weight"].astype(x.dtype).T
    if (bias := parameters.get(f"{name}.bias")) is not None:
        y = y + bias.astype(x.dtype)
    if (lora_a := parameters.get(f"{name}.lora_a")) is not None:
        lora_b = parameters[f"{name}.lora_b"].astype(x.dtype)
        y = y + (x @ lora_a.astype(x.dtype).T) @ lora_b.T * decoder.adapter_scale
    return y


def _normalize(parameters: Parameters, name: str, x: Array, decoder: DecoderSettings) -> Array:
    """Return the RMS norm or layer norm over the last dimension, with statistics in float32."""
    config = decoder.config
    wide = x.astype(decoder.wide)
    if config.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.norm_eps)
    weight = parameters.get(f"{name}.weight")
    if weight is not None:
        offset = 1.0 if config.norm == "rms_plus_one" else 0.0
        wide = wide * (weight.astype(wide.dtype) + offset)
    if (bias := parameters.get(f"{name}.bias")) is not None:
        wide = wide + bias.astype(wide.dtype)
    return wide.astype(x.dtype)


# -- heads


def compute_outputs(
    parameters: Parameters,
    rows: TokenRows,
    reads: HeadInputs,
    temperature: Array,
    *,
    decoder: DecoderSettings,
    want: frozenset[Output],
    top: TopIds | None = None,
) -> dict[Output, Array]:
    """Return the outputs `want` at the rows of `reads`, float32 or wider.

    A language model computes `logprobs`, `entropy` and `top1`, each [N], over the ids in
    `reads.support` if it is set. For the ids in `reads.ids` it computes `given_logprobs`
    [N, K + 1], and for `top` it computes `top_ids` [N, K] and `top_logprobs` [N, K + 1]. Other
    heads compute `values` or `scores` [N]. Scores with mean pooling are in the order of the
    sequences.
    """
    hidden, _ = compute_hidden(parameters, rows, decoder, return_kv=False)
    hidden = hidden.reshape(-1, hidden.shape[-1])[reads.rows]
    if decoder.head != "lm":
        weight = parameters["score.weight"].astype(decoder.wide)
        values = jnp.matmul(hidden.astype(decoder.wide), weight.T, precision="highest")[:, 0]
        if decoder.head == "score" and decoder.pooling == "mean":
            # Average over sequences; unused rows are added to an extra last one.
            size = len(values)
            sums = jax.ops.segment_sum(values, reads.labels, size + 1)
            counts = jax.ops.segment_sum(jnp.ones_like(values), reads.labels, size + 1)
            values = (sums / jnp.maximum(counts, 1))[:size]
        return {"scores" if decoder.head == "score" else "values": values}

    Chunk = tuple[Array, HeadInputs]

    def read_chunk(chunk: Chunk) -> dict[Output, Array]:
        hidden, chunk_reads = chunk
        logits = compute_logits(parameters, hidden, decoder) / temperature
        return _compute_logit_outputs(logits, chunk_reads, want, top)

    def skip_chunk(chunk: Chunk) -> dict[Output, Array]:
        shapes = jax.eval_shape(read_chunk, chunk)
        return jax.tree.map(lambda output: jnp.zeros(output.shape, output.dtype), shapes)

    def compute_chunk(chunk: Chunk) -> dict[Output, Array]:
        return lax.cond(chunk[1].count > 0, read_chunk, skip_chunk, chunk)

    # Compute the rows in chunks, and skip chunks without used rows.
    count = _count_chunks(len(reads.rows), decoder.config.vocab_size)
    starts = jnp.arange(count) * (len(reads.rows) // count)
    all_rows = (hidden, reads._replace(count=None))
    hidden, parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), all_rows)
    chunks = (hidden, parts._replace(count=reads.count - starts))
    outputs = lax.map(jax.checkpoint(compute_chunk), chunks)
    return {key: value.reshape(-1, *value.shape[2:]) for key, value in outputs.items()}


def compute_logits(parameters: Parameters, hidden: Array, decoder: DecoderSettings) -> Array:
    """Return logits [N, V], float32 or wider, not divided by a temperature."""
    config = decoder.config
    matrix = parameters["embed.weight" if config.tied else "head.weight"].astype(hidden.dtype)
    logits = jnp.einsum("nw,vw->nv", hidden, matrix, preferred_element_type=decoder.wide)
    if (bias := parameters.get("head.bias")) is not None:
        logits = logits + bias.astype(logits.dtype)
    if config.final_softcap is not None:
        logits = config.final_softcap * jnp.tanh(logits / config.final_softcap)
    return logits


def _compute_logit_outputs(
    logits: Array, reads: HeadInputs, want: frozenset[Output], top: TopIds | None
) -> dict[Output, Array]:
    """Return the outputs `want` for logits [N, V], which are already divided by the temperature."""
    labels = reads.labels[:, None]
    all_logprobs = jax.nn.log_softmax(logits, axis=-1)
    logprobs = all_logprobs
    if reads.support is not None:
        # Normalize over the ids that sampling kept and the label.
        ids = jnp.arange(logits.shape[1])
        is_kept = reads.support[:, ids // 8] >> (ids % 8).astype(jnp.uint8) & 1 > 0
        is_kept |= ids == labels
        logprobs = jax.nn.log_softmax(jnp.where(is_kept, logits, MASKED), axis=-1)
    outputs: dict[Output, Array] = {}
    if "logprobs" in want:
        outputs["logprobs"] = jnp.take_along_axis(logprobs, labels, axis=1)[:, 0]
    if "entropy" in want:
        outputs["entropy"] = -(jnp.exp(logprobs) * logprobs).sum(-1)
    if "top1" in want:
        outputs["top1"] = (logprobs.argmax(-1) == reads.labels).astype(logprobs.dtype)
    if "given_logprobs" in want:
        outputs["given_logprobs"] = _select_logprobs(all_logprobs, reads.ids)
    if top is not None:
        size = min(logits.shape[1], top.below or logits.shape[1])
        _, ids = lax.top_k(logits[:, :size], min(top.count, size))
        outputs["top_ids"] = ids.astype(jnp.int32)
        outputs["top_logprobs"] = _select_logprobs(all_logprobs, ids)
    return {key: value for key, value in outputs.items() if key in want}


def _select_logprobs(logprobs: Array, ids: Array) -> Array:
    """Return the log-probs of the `ids` [N, K], followed by that of all other ids, [N, K + 1]."""
    selected = jnp.take_along_axis(logprobs, ids, axis=1)
    others = jnp.put_along_axis(logprobs, ids, -jnp.inf, axis=1, inplace=False)
    others_total = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return jnp.concatenate([selected, others_total], axis=1)


def _count_chunks(num_rows: int, vocab_size: int) -> int:
    """Return the number of chunks of rows, whose logits are computed one after the other.

    The number is a power of two that divides `num_rows`.
    """
    max_rows = max(MIN_CHUNK_ROWS, CHUNK_CELLS // vocab_size)
    count = 1
    while num_rows / count > max_rows and num_rows % (2 * count) == 0:
        count *= 2
    return count


def round_up(number: int, least: int = 1) -> int:
    """Return the smallest size 2^k or 3 * 2^k that is at least `number` and at least `least`.

    With these sizes, functions are compiled for few shapes, and arrays are at most half as large
    again as needed.
    """
    number = max(number, least, 1)
    power = 1 << math.ceil(math.log2(number))
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
