"""Read checkpoints of llama2.c (Karpathy 2023), float32: the legacy layout and export version 1.

Legacy files start with seven int32 (dim, hidden, layers, heads, kv heads, vocabulary, length),
followed by the weights, which include two rotary tables. A negative vocabulary size means that the
output matrix is not shared with the embedding. Files of version 1 have a header of 256 bytes:
"ak42", the version, the same seven int32, one byte that is nonzero if the output matrix is shared,
and zeros. The weights follow, with all norms first.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.models.network.config import Rope, TransformerConfig

MAGIC = 0x616B3432
HEADER_BYTES = 256
BOS = 1
EOS = 2
UNKNOWN = 0  # id of the unknown token in every vocabulary that llama2.c exports
MATRICES = {
    "attention.q": "wq",
    "attention.k": "wk",
    "attention.v": "wv",
    "attention.o": "wo",
    "mlp.gate": "w1",
    "mlp.down": "w2",
    "mlp.up": "w3",
}
TensorShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Llama2cHeader:
    """Header of a llama2.c file: sizes of the model, and the layout of the weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    length: int
    shared: bool  # True if the output matrix is the embedding
    legacy: bool  # True for the legacy layout, False for version 1
    start: int  # offset of the weights in bytes


def read(path: Path) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """Return the configuration and the canonical float32 parameters of a llama2.c file.

    Raises `CheckpointError` if the file has another format or an unexpected size.
    """
    raw = path.read_bytes()
    header = _parse_header(path, raw)
    shapes = _list_shapes(header)
    expected = header.start + 4 * sum(math.prod(shape) for shape in shapes.values())
    if len(raw) != expected:
        raise CheckpointError(
            f"{path} has {len(raw)} bytes, its header asks for {expected}; it is truncated or no "
            f"float32"
        )
    values = torch.from_numpy(np.frombuffer(raw, dtype="<f4", offset=header.start).copy())
    stored = {}
    for name, part in zip(
        shapes, values.split([math.prod(shape) for shape in shapes.values()]), strict=True
    ):
        stored[name] = part.reshape(shapes[name])
    return _build_config(header), _build_parameters(header, stored)


def _parse_header(path: Path, raw: bytes) -> Llama2cHeader:
    if len(raw) < HEADER_BYTES:
        raise CheckpointError(f"{path} is not a llama2.c checkpoint: it has {len(raw)} bytes")
    magic, version = struct.unpack_from("<Ii", raw)
    is_legacy = magic != MAGIC
    if not is_legacy and version != 1:
        raise CheckpointError(
            f"{path} is export version {version} (quantized); convert version 0 or 1, float32"
        )
    hidden, intermediate, layers, heads, kv_heads, vocab, length = struct.unpack_from(
        "<7i", raw, 0 if is_legacy else 8
    )
    is_shared = vocab > 0 if is_legacy else raw[36] != 0
    start = 28 if is_legacy else HEADER_BYTES
    header = Llama2cHeader(
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        abs(vocab),
        length,
        is_shared,
        is_legacy,
        start,
    )
    is_plausible = all(
        0 < size < 2**24
        for size in (header.hidden, header.intermediate, header.layers, header.vocab, header.length)
    )
    if not is_plausible or header.heads < 1 or header.kv_heads < 1 or header.hidden % header.heads:
        raise CheckpointError(f"{path} is not a llama2.c checkpoint: its header reads {header}")
    return header


def _list_shapes(header: Llama2cHeader) -> TensorShapes:
    """Return the shapes of the tensors in file order.

    The weights of all layers are stacked in one tensor.
    """
    layers = header.layers
    hidden = header.hidden
    intermediate = header.intermediate
    head_dim = hidden // header.heads
    kv_dim = header.kv_heads * head_dim
    embedding: TensorShapes = {"embedding": (header.vocab, hidden)}
    attention_norm: TensorShapes = {"attention_norm": (layers, hidden)}
    mlp_norm: TensorShapes = {"mlp_norm": (layers, hidden)}
    last_norm: TensorShapes = {"norm": (hidden,)}
    attention: TensorShapes = {
        "wq": (layers, hidden, hidden),
        "wk": (layers, kv_dim, hidden),
        "wv": (layers, kv_dim, hidden),
        "wo": (layers, hidden, hidden),
    }
    mlp: TensorShapes = {
        "w1": (layers, intermediate, hidden),
        "w2": (layers, hidden, intermediate),
        "w3": (layers, intermediate, hidden),
    }
    if header.shared:
        classifier: TensorShapes = {}
    else:
        classifier = {"classifier": (header.vocab, hidden)}
    if header.legacy:
        tables: TensorShapes = {
            "cos": (header.length, head_dim // 2),
            "sin": (header.length, head_dim // 2),
        }
        return (
            embedding
            | attention_norm
            | attention
            | mlp_norm
            | mlp
            | last_norm
            | tables
            | classifier
        )
    return attention_norm | mlp_norm | last_norm | embedding | attention | mlp | classifier


def _build_config(header: Llama2cHeader) -> TransformerConfig:
    head_dim = header.hidden // header.heads
    return TransformerConfig(
        family="llama",
        vocab_size=header.vocab,
        hidden_size=header.hidden,
        num_layers=header.layers,
        num_heads=header.heads,
        num_kv_heads=header.kv_heads,
        head_dim=head_dim,
        intermediate_size=header.intermediate,
        max_positions=header.length,
        norm_eps=1e-5,
        rope=Rope(10000.0, head_dim),
        tied=header.shared,
        extra={"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": UNKNOWN},
    )


def _build_parameters(header: Llama2cHeader, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    parameters = {"embed.weight": stored["embedding"], "norm.weight": stored["norm"]}
    if not header.shared:
        parameters["head.weight"] = stored["classifier"]
    for layer in range(header.layers):
        block = f"blocks.{layer}"
        parameters[f"{block}.norm1.weight"] = stored["attention_norm"][layer]
        parameters[f"{block}.norm2.weight"] = stored["mlp_norm"][layer]
        for weft_name, file_name in MATRICES.items():
            matrix = stored[file_name][layer]
            if file_name in ("wq", "wk"):
                matrix = _permute_rotary(
                    matrix, header.heads if file_name == "wq" else header.kv_heads
                )
            parameters[f"{block}.{weft_name}.weight"] = matrix
    return parameters


def _permute_rotary(matrix: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from interleaved to half-split rotary pairs.

    Pairs are (2i, 2i + 1) in the file and (i, i + dim / 2) in weft.
    """
    return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
