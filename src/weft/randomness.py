"""Stateless random numbers that depend only on a seed and the purpose they are used for.

`draw_uniform(seed, purpose, step, id, k, position)` returns the same number in any batch, in any
order, on any rank and after any restart. The generator, threefry-2x32 with 20 rounds (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"), uses only 32-bit integer addition, exclusive
or and rotation, so that numpy, torch and jax agree bit for bit. The key is the first 8 bytes of
blake2b(seed|purpose|step|id|k), the counter is the position, and a number is the top 24 bits of the
first output word, divided by 2^24.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from weft.errors import ConfigError

Words = npt.NDArray[np.uint32]
Key = tuple[np.uint32, np.uint32]

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA  # Skein's key-schedule constant, as in Random123


def derive_key(seed: int, purpose: str, step: int = 0, id: str = "", k: int = 0) -> Key:
    """Return a random key of two uint32 words that depends only on the arguments.

    The words are the first 8 bytes of blake2b over `seed|purpose|step|id|k` (UTF-8), in
    little-endian order. `purpose` names the use of the numbers ("sample", "shuffle/NAME", ...).
    `id` is the id of a dataset row, and `k` is the index of one of its completions. Raises
    `ConfigError` if `purpose` contains "|", since two purposes could then share a key.
    """
    if "|" in purpose:
        raise ConfigError(
            f"purpose {purpose!r} of a random number contains '|', which separates the parts; "
            f"leave it out"
        )
    digest = hashlib.blake2b(f"{int(seed)}|{purpose}|{int(step)}|{id}|{int(k)}".encode()).digest()
    low, high = np.frombuffer(digest[:8], dtype="<u4")
    return np.uint32(low), np.uint32(high)


def compute_threefry(keys: Words, counters: Words) -> Words:
    """Return the output words of threefry-2x32 with 20 rounds, uint32 [..., 2].

    `keys` and `counters` are uint32 [..., 2] and are broadcast against each other.
    """
    keys, counters = np.broadcast_arrays(
        np.asarray(keys, np.uint32), np.asarray(counters, np.uint32)
    )
    # slices stay arrays, whose additions wrap without a warning
    first = keys[..., :1]
    second = keys[..., 1:]
    schedule = (first, second, first ^ second ^ np.uint32(PARITY))
    x = counters[..., :1] + first
    y = counters[..., 1:] + second
    for block in range(5):
        for rotation in ROTATIONS[4 * (block % 2) : 4 * (block % 2) + 4]:
            x = x + y
            y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
        x = x + schedule[(block + 1) % 3]
        y = y + schedule[(block + 2) % 3] + np.uint32(block + 1)
    return np.concatenate([x, y], axis=-1)


def draw_uniforms(keys: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return random numbers in [0, 1), float64 [n], each a multiple of 2^-24.

    `keys` (see `derive_key`) is uint32 [n, 2], or one key [2] for all numbers. `positions` is
    uint32 [n]: the index of each number among those with the same key, such as a token position.
    """
    words = np.atleast_2d(np.asarray(keys, dtype=np.uint32))
    places = np.asarray(positions, dtype=np.uint32)
    counters = np.stack([places, np.zeros_like(places)], axis=-1)
    return (compute_threefry(words, counters)[..., 0] >> np.uint32(8)).astype(np.float64) / 2.0**24


def draw_uniform(seed: int, purpose: str, step: int, id: str, k: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on the arguments.

    `position` is the index of the number among those with the same key, such as a token position.
    The other arguments determine the key (see `derive_key`).
    """
    return float(draw_uniforms(derive_key(seed, purpose, step, id, k), [position])[0])


def draw_permutation(n: int, seed: int, purpose: str, step: int = 0) -> npt.NDArray[np.int64]:
    """Return a random permutation of 0 to n - 1, int64 [n].

    Each index gets two random words from threefry, and the indices are sorted by them.
    """
    places = np.arange(n, dtype=np.uint32)
    words = compute_threefry(
        np.asarray(derive_key(seed, purpose, step)),
        np.stack([places, np.zeros_like(places)], axis=-1),
    )
    order = (words[:, 0].astype(np.uint64) << np.uint64(32)) | words[:, 1].astype(np.uint64)
    return np.argsort(order, kind="stable").astype(np.int64)
