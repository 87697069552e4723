"""Serialize tensors and plain values without pickle.

The format consists of `MAGIC`, the length of the header (8 bytes), the header as JSON, and the raw
buffers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.errors import DataError

MAGIC = b"weft1\n"
COMPRESSIONS = (None, "zlib")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def encode(tensors: Mapping[str, Tensor], values: Any, compression: str | None = None) -> bytes:
    """Serialize named tensors and JSON values to bytes.

    Raises `DataError` for values that JSON cannot represent, and for an unknown dtype or
    compression.
    """
    if compression not in COMPRESSIONS:
        raise DataError(
            f"compression={compression!r}: must be one of {', '.join(map(str, COMPRESSIONS))}"
        )
    layout = []
    buffers = []
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise DataError(
                f"key {name!r} has dtype {dtype}, which cannot be serialized; known: "
                f"{', '.join(DTYPES)}"
            )
        layout.append([name, dtype, list(tensor.shape)])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        buffers.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    body = b"".join(buffers)
    if compression == "zlib":
        body = zlib.compress(body, 1)
    try:
        header = json.dumps(
            {"tensors": layout, "values": values, "compression": compression}
        ).encode()
    except TypeError as error:
        raise DataError(
            f"metadata must be JSON values (text, numbers, lists, mappings): {error}"
        ) from error
    return MAGIC + len(header).to_bytes(8, "little") + header + body


def decode(raw: bytes) -> tuple[dict[str, Tensor], Any]:
    """Deserialize the output of `encode` to (tensors, values).

    Raises `DataError` if the bytes have another format or are truncated.
    """
    if not raw.startswith(MAGIC):
        raise DataError("these bytes are not a SequenceSample: they do not begin with its header")
    start = len(MAGIC) + 8
    length = int.from_bytes(raw[len(MAGIC) : start], "little")
    header = json.loads(raw[start : start + length])
    body = raw[start + length :]
    if header["compression"] == "zlib":
        body = zlib.decompress(body)
    tensors = {}
    at = 0
    for name, dtype, shape in header["tensors"]:
        empty = torch.empty(shape, dtype=DTYPES[dtype])
        size = empty.numel() * empty.element_size()
        if at + size > len(body):
            raise DataError(
                f"the bytes end within key {name!r}: there are {len(body)} of at least "
                f"{at + size} bytes"
            )
        if size:
            empty = torch.frombuffer(bytearray(body[at : at + size]), dtype=DTYPES[dtype]).reshape(
                shape
            )
        tensors[name] = empty
        at += size
    return tensors, header["values"]
