"""EasyLM's files, written by msgpack and numpy as flax and EasyLM write them, and its network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np

from weft.compat.easylm.configs import EasyLMConfig

TINY = EasyLMConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_sequence_length=64,
)
BF16 = np.dtype(ml_dtypes.bfloat16)
Arrays = dict[str, np.ndarray]


def shapes_of(config: EasyLMConfig, head: str = "lm") -> dict[str, tuple[int, ...]]:
    """Return the shapes of a LLaMA's parameters in EasyLM, from its model code."""
    hidden, inner = config.hidden_size, config.intermediate_size
    small = hidden // config.num_attention_heads * config.kv_heads
    shapes: dict[str, tuple[int, ...]] = {"transformer/wte/embedding": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        block = f"transformer/h/{layer}"
        for name, shape in (
            ("attention/wq", (hidden, hidden)),
            ("attention/wk", (hidden, small)),
            ("attention/wv", (hidden, small)),
            ("attention/wo", (hidden, hidden)),
            ("feed_forward/w1", (hidden, inner)),
            ("feed_forward/w2", (inner, hidden)),
            ("feed_forward/w3", (hidden, inner)),
            ("attention_norm", (hidden,)),
            ("ffn_norm", (hidden,)),
        ):
            shapes[f"{block}/{name}/kernel"] = shape
    shapes["transformer/ln_f/kernel"] = (hidden,)
    if head == "score":
        shapes["score/kernel"] = (hidden, 1)
    elif not config.tie_word_embeddings:
        shapes["lm_head/kernel"] = (hidden, config.vocab_size)
    return shapes


def arrays_of(config: EasyLMConfig, head: str = "lm", dtype: Any = BF16, seed: int = 0) -> Arrays:
    """Return random weights of a network, in the order of EasyLM's files."""
    draw = np.random.default_rng(seed)
    shapes = shapes_of(config, head)
    arrays = {}
    for name in sorted(shapes, key=lambda name: name.split("/")):
        scale = 1.0 if len(shapes[name]) == 1 else 0.3
        values = draw.normal(size=shapes[name]) * 0.3 + (1.0 if scale == 1.0 else 0.0)
        arrays[name] = values.astype(dtype)
    return arrays


def encode_array(array: Any, code: int = 1) -> msgpack.ExtType:
    """Return flax's extension for an array."""
    content = (array.shape, array.dtype.name, array.tobytes("C"))
    return msgpack.ExtType(code, msgpack.packb(content, use_bin_type=True))


def encode_chunks(array: Any, size: int) -> dict[str, Any]:
    """Return flax's map for an array of more than 2**30 bytes, here with chunks of `size`."""
    flat = array.reshape(-1)
    chunks = [encode_array(flat[start : start + size]) for start in range(0, flat.size, size)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(index): length for index, length in enumerate(array.shape)},
        "chunks": {str(index): chunk for index, chunk in enumerate(chunks)},
    }


def encode_entry(key: Any, value: Any) -> bytes:
    """Return one entry of a stream; `value` is an array or what `msgpack` packs."""
    content = encode_array(value) if isinstance(value, np.ndarray) else value
    return msgpack.packb((key, msgpack.packb(content, strict_types=True)))


def encode_stream(arrays: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> bytes:
    return b"".join(
        encode_entry((*prefix, *name.split("/")), array) for name, array in arrays.items()
    )


def encode_tree(arrays: Mapping[str, Any]) -> bytes:
    """Return the single msgpack value that flax writes for nested dictionaries."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *path, last = name.split("/")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = encode_array(array) if isinstance(array, np.ndarray) else array
    return msgpack.packb(tree, strict_types=True)


def write_stream(path: Path, arrays: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_stream(arrays, prefix))
    return path


def decode_stream(path: Path) -> Arrays:
    """Return the arrays of a stream, read by `msgpack` alone."""

    def decode(code: int, content: bytes) -> Any:
        shape, dtype, raw = msgpack.unpackb(content, raw=False)
        assert code == 1
        return np.frombuffer(raw, dtype=BF16 if dtype == "bfloat16" else dtype).reshape(shape)

    arrays = {}
    with path.open("rb") as file:
        for key, value in msgpack.Unpacker(file, max_buffer_size=0):
            arrays["/".join(key)] = msgpack.unpackb(value, ext_hook=decode)
    return arrays


# -- EasyLM's network in float64


def compute(config: EasyLMConfig, arrays: Arrays, ids: np.ndarray) -> np.ndarray:
    """Return the logits (or scores at each position) of one sequence, by EasyLM's formulas."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}
    heads, kv_heads, dim = config.num_attention_heads, config.kv_heads, config.head_dim
    length = len(ids)
    x = w["transformer/wte/embedding"][ids]
    for layer in range(config.num_hidden_layers):
        block = f"transformer/h/{layer}"
        y = normalize(x, w[f"{block}/attention_norm/kernel"], config.rms_norm_eps)
        q = (y @ w[f"{block}/attention/wq/kernel"]).reshape(length, heads, dim)
        k = (y @ w[f"{block}/attention/wk/kernel"]).reshape(length, kv_heads, dim)
        v = (y @ w[f"{block}/attention/wv/kernel"]).reshape(length, kv_heads, dim)
        q, k = turn(q, config), turn(k, config)
        k = np.repeat(k, heads // kv_heads, axis=1)
        v = np.repeat(v, heads // kv_heads, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
        x = x + mixed @ w[f"{block}/attention/wo/kernel"]
        y = normalize(x, w[f"{block}/ffn_norm/kernel"], config.rms_norm_eps)
        gate = y @ w[f"{block}/feed_forward/w1/kernel"]
        gate = gate / (1 + np.exp(-gate))
        up = y @ w[f"{block}/feed_forward/w3/kernel"]
        x = x + (gate * up) @ w[f"{block}/feed_forward/w2/kernel"]
    x = normalize(x, w["transformer/ln_f/kernel"], config.rms_norm_eps)
    if "score/kernel" in w:
        return x @ w["score/kernel"]
    head = w.get("lm_head/kernel")
    return x @ (w["transformer/wte/embedding"].T if head is None else head)


def normalize(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x: np.ndarray, config: EasyLMConfig) -> np.ndarray:
    """Rotate the pairs (2i, 2i + 1) of each head, or (i, i + dim / 2) with `use_hf_rotary_emb`."""
    dim = config.head_dim
    frequencies = config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    if config.use_scaled_rope:
        frequencies = np.array([scale_frequency(each) for each in frequencies])
    angles = np.arange(len(x))[:, None, None] * frequencies
    turned = np.exp(1j * angles)
    out = np.empty_like(x)
    if config.use_hf_rotary_emb:
        pairs = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turned
        out[..., : dim // 2], out[..., dim // 2 :] = pairs.real, pairs.imag
    else:
        pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turned
        out[..., 0::2], out[..., 1::2] = pairs.real, pairs.imag
    return out


def scale_frequency(frequency: float) -> float:
    """Llama 3.1's scaling by factor 8, low and high frequency factors 1 and 4, context 8192."""
    length = 2 * np.pi / frequency
    if length < 8192 / 4:
        return frequency
    if length > 8192 / 1:
        return frequency / 8
    smooth = (8192 / length - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency
