"""The decoder of `weft.models.network` as pure functions of a dictionary of JAX arrays.

The parameters have weft's canonical names, with one difference: the parameters of equal blocks are
stacked, so that one compiled block serves all of them. `blocks.0:12.attention.q.weight` has the
matrices of blocks 0 to 11 as [12, out, in] (`weft.engine.jax.parameters`).

Tokens are in rows [R, L], each of which contains several sequences, one after the other, and
padding at the end. A token attends to earlier tokens of its own sequence, which has the same number
in `segments`; padding has the number 0.
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
CHUNK_CELLS = 1 << 24  # logits of a chunk of rows
LEAST_CHUNK_ROWS = 256  # each chunk reads the whole output matrix


def compute_hidden(
    parameters: Parameters,
    rows: TokenRows,
    decoder: DecoderSettings,
    past: Sequence[KeysValues] | None = None,
    *,
    keeps: bool,
) -> tuple[Array, list[KeysValues]]:
    """Return the hidden states after the last norm, [R, L, width], and each stack's keys and values.

    Without `keeps`, the list of keys and values is empty. With `past`, each row is one token, which
    attends to the cached tokens of its sequence: to as many as its position is.
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
    x = decoder.divide(x)
    new = []
    for number, (layers, stack) in enumerate(group_stacks(parameters)):
        own_past = None if past is None else past[number]
        x, own = _run_stack(x, stack, layers, own_past, rows, decoder, keeps=keeps)
        if own is not None:
            new.append(own)
    if config.final_norm:
        x = _normalize(parameters, "norm", x, decoder)
    if "embed_out.weight" in parameters:
        x = _apply_linear(parameters, "embed_out", x, decoder)
    return x, new


def group_stacks(parameters: Parameters) -> list[tuple[range, dict[str, Array]]]:
    """Return the stacks of equal blocks in order: their layers, and their parameters by name.

    The names are those within a block, such as `attention.q.weight`.
    """
    stacks: dict[tuple[int, int], dict[str, Array]] = {}
    for name, value in parameters.items():
        if name.startswith("blocks."):
            _, run, own = name.split(".", 2)
            first, stop = run.split(":")
            stacks.setdefault((int(first), int(stop)), {})[own] = value
    return [(range(*run), stacks[run]) for run in sorted(stacks)]


def _run_stack(
    x: Array,
    stack: Mapping[str, Array],
    layers: range,
    past: KeysValues | None,
    rows: TokenRows,
    decoder: DecoderSettings,
    *,
    keeps: bool,
) -> tuple[Array, KeysValues | None]:
    """Run equal blocks one after the other, with one compiled block for all of them.

    With `keeps`, their keys and values are returned too.
    """
    config = decoder.config
    windows = [config.window(layer) for layer in layers]
    distinct = list(dict.fromkeys(windows))
    kinds = [distinct.index(window) for window in windows]
    scales = []
    for layer in layers:
        scales.append(config.scale / (layer + 1 if config.layer_scaled_attention else 1))

    def run(
        x: Array, layer: tuple[Parameters, Array, Array, KeysValues | None]
    ) -> tuple[Array, KeysValues | None]:
        own, kind, scale, past = layer
        window = LayerWindow(distinct, kind)
        x, new = _run_block(x, own, window, scale, past, rows, decoder)
        return decoder.divide(x), new if keeps else None

    if decoder.policy is not None:
        run = jax.checkpoint(run, policy=getattr(jax.checkpoint_policies, decoder.policy))
    each = (dict(stack), jnp.asarray(kinds, jnp.int32), jnp.asarray(scales, decoder.wide), past)
    return lax.scan(run, x, each)


def _run_block(
    x: Array,
    own: Parameters,
    window: LayerWindow,
    scale: Array,
    past: KeysValues | None,
    rows: TokenRows,
    decoder: DecoderSettings,
) -> tuple[Array, KeysValues]:
    """Return the hidden states after a block, and the keys and values of its tokens."""
    config = decoder.config

    def attend(x: Array) -> tuple[Array, KeysValues]:
        return _attend(x, own, window, scale, past, rows, decoder)

    def feed(x: Array) -> Array:
        return _feed(x, own, decoder)

    norm = partial(_normalize, own, decoder=decoder)
    if config.parallel_residual:
        mixed, new = attend(norm("norm1", x))
        return x + mixed + feed(norm("norm2", x)), new
    match config.placement:
        case "pre":
            mixed, new = attend(norm("norm1", x))
            x = x + mixed
            return x + feed(norm("norm2", x)), new
        case "post":
            mixed, new = attend(x)
            x = x + norm("norm1_post", mixed)
            return x + norm("norm2_post", feed(x)), new
        case "both":
            mixed, new = attend(norm("norm1", x))
            x = x + norm("norm1_post", mixed)
            return x + norm("norm2_post", feed(norm("norm2", x))), new
        case "after":
            mixed, new = attend(x)
            x = norm("norm1", x + mixed)
            return norm("norm2", x + feed(x)), new


def _attend(
    x: Array,
    own: Parameters,
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
        y = _apply_linear(own, f"attention.{name}", x, decoder)
        if config.qk_norm == "full" and name != "v":
            y = _normalize(own, f"attention.{name}_norm", y, decoder)
        y = y.reshape(*y.shape[:-1], count, config.head_dim)
        if config.qk_norm == "head" and name != "v":
            y = _normalize(own, f"attention.{name}_norm", y, decoder)
        heads[name] = y if name == "v" or rows.cos is None else _rotate(y, rows)
    q, k, v = heads["q"], heads["k"], heads["v"]
    q = q.reshape(*q.shape[:2], config.num_kv_heads, -1, config.head_dim)
    if past is None:
        mixed = attend_to_rows(q, k, v, window, scale, rows, decoder)
    else:
        mixed = attend_to_past(q, k, v, window, scale, past, rows, decoder)
    output = _apply_linear(own, "attention.o", mixed.reshape(*x.shape[:2], -1), decoder)
    return output, KeysValues(k, v)


def _rotate(heads: Array, rows: TokenRows) -> Array:
    """Rotate the first dimensions of each head, [R, L, heads, head_dim]."""
    cos, sin = rows.cos[:, :, None], rows.sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = jnp.split(heads, [half, 2 * half], axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _feed(x: Array, own: Parameters, decoder: DecoderSettings) -> Array:
    """Return the output of the MLP or of the experts, [R, L, hidden]."""
    config = decoder.config
    if config.experts is not None:
        return _feed_experts(x.reshape(-1, x.shape[-1]), own, decoder).reshape(x.shape)
    up = _apply_linear(own, "mlp.up", x, decoder)
    if config.gated:
        gate = _apply_linear(own, "mlp.gate", x, decoder)
        inner = _activate(gate.astype(decoder.wide), config) * up.astype(decoder.wide)
    else:
        inner = _activate(up.astype(decoder.wide), config)
    return _apply_linear(own, "mlp.down", inner.astype(x.dtype), decoder)


def _feed_experts(x: Array, own: Parameters, decoder: DecoderSettings) -> Array:
    """Return the weighted outputs of each token's experts, [T, hidden]. No token is dropped."""
    experts = decoder.config.experts
    assert experts is not None
    logits = _apply_linear(own, "mlp.router", x, decoder)
    weights, chosen = lax.top_k(jax.nn.softmax(logits.astype(decoder.wide), axis=-1), experts.top_k)
    if experts.normalize:
        weights = weights / weights.sum(-1, keepdims=True)
    # Sort the pairs of token and expert by expert.
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    token = order // experts.top_k
    sizes = jnp.bincount(chosen.reshape(-1), length=experts.num).astype(jnp.int32)

    def multiply(name: str, x: Array) -> Array:
        def apply(which: str, x: Array) -> Array:
            matrices = own[f"mlp.experts.{name}.{which}"].astype(x.dtype)
            return lax.ragged_dot(x, matrices.swapaxes(1, 2), sizes)

        y = apply("weight", x)
        if f"mlp.experts.{name}.lora_a" in own:
            y = y + apply("lora_b", apply("lora_a", x)) * decoder.adapter_scale
        return y

    gathered = x[token]
    gate = multiply("gate", gathered)
    inner = _activate(gate.astype(decoder.wide), decoder.config)
    inner = (inner * multiply("up", gathered).astype(decoder.wide)).astype(x.dtype)
    outputs = multiply("down", inner) * weights.reshape(-1)[order, None].astype(x.dtype)
    return jnp.zeros_like(x).at[token].add(outputs)


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


def _apply_linear(own: Parameters, name: str, x: Array, decoder: DecoderSettings) -> Array:
    """Return x W^T + b, plus scale (x A^T) B^T if the matrix has a low-rank adapter."""
    y = x @ own[f"{name}.weight"].astype(x.dtype).T
    if (bias := own.get(f"{name}.bias")) is not None:
        y = y + bias.astype(x.dtype)
    if (low := own.get(f"{name}.lora_a")) is not None:
        high = own[f"{name}.lora_b"].astype(x.dtype)
        y = y + (x @ low.astype(x.dtype).T) @ high.T * decoder.adapter_scale
    return y


def _normalize(own: Parameters, name: str, x: Array, decoder: DecoderSettings) -> Array:
    """Return the RMS norm or layer norm over the last dimension, with statistics in float32."""
    config = decoder.config
    wide = x.astype(decoder.wide)
    if config.norm == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.norm_eps)
    weight = own.get(f"{name}.weight")
    if weight is not None:
        offset = 1.0 if config.norm == "rms_plus_one" else 0.0
        wide = wide * (weight.astype(wide.dtype) + offset)
    if (bias := own.get(f"{name}.bias")) is not None:
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

    A language model gives `logprobs`, `entropy` and `top1` [N], over the ids of `reads.support` if
    there are any; with `reads.ids` `given_logprobs` [N, K + 1]; and with `top` `top_ids` [N, K] and
    `top_logprobs` [N, K + 1]. Other heads give `values` or `scores` [N]. With mean pooling, scores
    are in the order of the sequences' numbers.
    """
    hidden, _ = compute_hidden(parameters, rows, decoder, keeps=False)
    hidden = hidden.reshape(-1, hidden.shape[-1])[reads.rows]
    if decoder.head != "lm":
        weight = parameters["score.weight"].astype(decoder.wide)
        values = jnp.matmul(hidden.astype(decoder.wide), weight.T, precision="highest")[:, 0]
        if decoder.head == "score" and decoder.pooling == "mean":
            number = len(values)
            sums = jax.ops.segment_sum(values, reads.labels, number + 1)
            counts = jax.ops.segment_sum(jnp.ones_like(values), reads.labels, number + 1)
            values = (sums / jnp.maximum(counts, 1))[:number]
        return {"scores" if decoder.head == "score" else "values": values}

    Chunk = tuple[Array, HeadInputs]

    def read_chunk(chunk: Chunk) -> dict[Output, Array]:
        hidden, own = chunk
        logits = compute_logits(parameters, hidden, decoder) / temperature
        return _read_logits(logits, own, want, top)

    def skip_chunk(chunk: Chunk) -> dict[Output, Array]:
        shapes = jax.eval_shape(read_chunk, chunk)
        return jax.tree.map(lambda own: jnp.zeros(own.shape, own.dtype), shapes)

    def compute_chunk(chunk: Chunk) -> dict[Output, Array]:
        return lax.cond(chunk[1].count > 0, read_chunk, skip_chunk, chunk)

    count = _count_chunks(len(reads.rows), decoder.config.vocab_size)
    starts = jnp.arange(count) * (len(reads.rows) // count)
    whole = (hidden, reads._replace(count=None))
    hidden, parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), whole)
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


def _read_logits(
    logits: Array, reads: HeadInputs, want: frozenset[Output], top: TopIds | None
) -> dict[Output, Array]:
    labels = reads.labels[:, None]
    whole = jax.nn.log_softmax(logits, axis=-1)
    logprobs = whole
    if reads.support is not None:
        ids = jnp.arange(logits.shape[1])
        allowed = reads.support[:, ids // 8] >> (ids % 8).astype(jnp.uint8) & 1 > 0
        allowed |= ids == labels
        logprobs = jax.nn.log_softmax(jnp.where(allowed, logits, MASKED), axis=-1)
    outputs: dict[Output, Array] = {}
    if "logprobs" in want:
        outputs["logprobs"] = jnp.take_along_axis(logprobs, labels, axis=1)[:, 0]
    if "entropy" in want:
        outputs["entropy"] = -(jnp.exp(logprobs) * logprobs).sum(-1)
    if "top1" in want:
        outputs["top1"] = (logprobs.argmax(-1) == reads.labels).astype(logprobs.dtype)
    if "given_logprobs" in want:
        outputs["given_logprobs"] = _select_logprobs(whole, reads.ids)
    if top is not None:
        size = min(logits.shape[1], top.below or logits.shape[1])
        _, ids = lax.top_k(logits[:, :size], min(top.count, size))
        outputs["top_ids"] = ids.astype(jnp.int32)
        outputs["top_logprobs"] = _select_logprobs(whole, ids)
    return {key: value for key, value in outputs.items() if key in want}


def _select_logprobs(logprobs: Array, ids: Array) -> Array:
    """Return the log-probs of ids, and that of all other ids together, [N, K + 1]."""
    own = jnp.take_along_axis(logprobs, ids, axis=1)
    others = jnp.put_along_axis(logprobs, ids, -jnp.inf, axis=1, inplace=False)
    rest = jax.nn.logsumexp(others, axis=-1, keepdims=True)
    return jnp.concatenate([own, rest], axis=1)


def _count_chunks(num_rows: int, vocab_size: int) -> int:
    """Return the number of chunks whose logits are computed one after the other, a power of two.

    The number of rows is a multiple of a length that `round_up` gives.
    """
    most = max(LEAST_CHUNK_ROWS, CHUNK_CELLS // vocab_size)
    count = 1
    while num_rows / count > most and num_rows % (2 * count) == 0:
        count *= 2
    return count


def round_up(number: int, least: int = 1) -> int:
    """Return the smallest power of two, or three times one, that is not below `number` and `least`.

    Arrays of few sizes are compiled for, each at most a half larger than needed.
    """
    number = max(number, least, 1)
    power = 1 << math.ceil(math.log2(number))
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power
