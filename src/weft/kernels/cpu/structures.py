"""Structures shared by C++ and Python, with the same fields as in `kernels.h` and `forward.h`.

`weft.kernels.cpu.library` checks that the structures have the same sizes in both languages.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

NORMS = ("norm1", "norm2", "q_norm", "k_norm")
PRODUCTS = ("qkv", "o", "gate_up", "down")


def get_pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class HeadsStruct(ctypes.Structure):
    """Tensor [tokens, heads, dim], as an address and the strides of tokens and heads."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_stride", ctypes.c_long),
        ("head_stride", ctypes.c_long),
    )

    @classmethod
    def from_tensor(cls, x: Tensor) -> HeadsStruct:
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class AttentionStruct(ctypes.Structure):
    """Arguments of the attention kernels."""

    _fields_ = (
        *(
            (name, HeadsStruct)
            for name in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")
        ),
        *((name, ctypes.c_void_p) for name in ("lse", "segments")),
        *(
            (name, ctypes.c_long)
            for name in ("count", "heads", "kv", "dim", "causal", "window", "threads")
        ),
        ("scale", ctypes.c_double),
    )


# Weights of the norms, then weight and bias of each product.
Parameters: Any = ctypes.c_void_p * (len(NORMS) + 2 * len(PRODUCTS))


class BlockStruct(ctypes.Structure):
    """Parameters of a transformer block, its cached keys and values, and its attention settings."""

    _fields_ = (
        ("parameters", Parameters),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        ("scale", ctypes.c_double),
        ("window", ctypes.c_long),
    )


class PrefixStruct(ctypes.Structure):
    """Keys and values of a shared prefix, and the rows whose sequences begin with this prefix."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("count", "keys", "room")),
        ("stored", ctypes.POINTER(ctypes.c_void_p)),
    )


class StepStruct(ctypes.Structure):
    """Arguments and results of one forward pass of a network over a cache."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("states", "embedding", "norm", "cos", "sin")),
        *(
            (name, ctypes.c_void_p)
            for name in ("tokens", "positions", "wanted", "slots", "news", "lengths")
        ),
        *(
            (name, ctypes.c_long)
            for name in ("rows", "wants", "count", "blocks", "vocabulary", "hidden", "heads")
        ),
        *(
            (name, ctypes.c_long)
            for name in ("kv", "dim", "inner", "half", "room", "few", "threads")
        ),
        *((name, ctypes.c_double) for name in ("eps", "offset")),
        ("prefixes", ctypes.POINTER(PrefixStruct)),
        ("shared", ctypes.c_long),
    )


class DrawsStruct(ctypes.Structure):
    """Sampling parameters and results of decode steps."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("head", "bias", "uniforms", "is_stop", "early", "ids", "logprobs")
        ),
        ("temperature", ctypes.c_double),
        ("steps", ctypes.c_long),
    )


SHARED = (
    HeadsStruct,
    AttentionStruct,
    BlockStruct,
    PrefixStruct,
    StepStruct,
    DrawsStruct,
)  # in the order of `sizes.cpp`
