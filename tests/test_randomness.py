"""One hash for every random number: published vectors, golden numbers, independence of batch and
order.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft import randomness
from weft.errors import ConfigError

# Known answers of Random123 (D. E. Shaw Research), file kat_vectors, threefry2x32 with 20 rounds:
# counter, key, result.
KNOWN = [
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]

# (seed, purpose, step, id, k, position) -> number * 2^24. These never change: sampled text depends
# on them.
GOLDEN = {
    (1, "sample", 0, "a", 0, 0): 12780603,
    (1, "sample", 0, "a", 0, 1): 374303,
    (1, "sample", 0, "a", 1, 0): 16673816,
    (1, "sample", 7, "a", 0, 0): 3666595,
    (2, "dropout", 7, "größe|x", 3, 4095): 14045597,
}


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_published_vectors(
    counter: tuple[int, int], key: tuple[int, int], result: tuple[int, int]
) -> None:
    found = randomness.compute_threefry(np.array(key, np.uint32), np.array(counter, np.uint32))
    assert tuple(found.tolist()) == result


@pytest.mark.parametrize(("use", "number"), GOLDEN.items())
def test_golden_numbers(use: tuple[int, str, int, str, int, int], number: int) -> None:
    assert randomness.draw_uniform(*use) * 2**24 == number


def naive_threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """The algorithm in Python integers, round by round as the paper's figure has it."""
    mask = 2**32 - 1
    schedule = [key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1]]
    x = [(counter[0] + schedule[0]) & mask, (counter[1] + schedule[1]) & mask]
    rotations = [13, 15, 26, 6, 17, 29, 16, 24]
    for turn in range(20):
        x[0] = (x[0] + x[1]) & mask
        r = rotations[turn % 8]
        x[1] = ((x[1] << r) | (x[1] >> (32 - r))) & mask
        x[1] ^= x[0]
        if turn % 4 == 3:
            j = turn // 4 + 1
            x[0] = (x[0] + schedule[j % 3]) & mask
            x[1] = (x[1] + schedule[(j + 1) % 3] + j) & mask
    return x[0], x[1]


words = st.integers(0, 2**32 - 1)


@given(st.tuples(words, words), st.tuples(words, words))
def test_equals_the_naive_form(key: tuple[int, int], counter: tuple[int, int]) -> None:
    found = randomness.compute_threefry(np.array(key, np.uint32), np.array(counter, np.uint32))
    assert tuple(found.tolist()) == naive_threefry(key, counter)


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.text(max_size=8), st.integers(0, 99), words)
def test_uniform_is_the_definition(seed: int, step: int, id: str, k: int, position: int) -> None:
    try:
        digest = hashlib.blake2b(f"{seed}|p|{step}|{id}|{k}".encode()).digest()
    except UnicodeEncodeError:
        return
    word = naive_threefry(struct.unpack("<II", digest[:8]), (position, 0))[0]
    assert randomness.draw_uniform(seed, "p", step, id, k, position) == (word >> 8) / 2**24


def test_a_number_does_not_depend_on_its_neighbours() -> None:
    uses = [(f"id{n}", n % 3, 5 * n) for n in range(40)]
    keys = np.array([randomness.derive_key(3, "sample", 2, id, k) for id, k, _ in uses])
    positions = np.array([position for *_, position in uses])
    together = randomness.draw_uniforms(keys, positions)
    assert together.dtype == np.float64
    assert together.tolist() == [
        randomness.draw_uniform(3, "sample", 2, id, k, p) for id, k, p in uses
    ]
    assert randomness.draw_uniforms(keys[::-1], positions[::-1]).tolist() == together[::-1].tolist()


def test_numbers_look_uniform() -> None:
    numbers = randomness.draw_uniforms(randomness.derive_key(1, "test"), np.arange(100_000))
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert 60 < chi_squared < 150  # 99 degrees of freedom: 5 standard deviations either way


def test_a_bar_in_the_purpose_is_refused() -> None:
    with pytest.raises(ConfigError, match="contains"):
        randomness.derive_key(1, "a|2", 3)


def test_permutations() -> None:
    order = randomness.draw_permutation(1000, 1, "shuffle", 4)
    assert sorted(order.tolist()) == list(range(1000))
    assert order.tolist() == randomness.draw_permutation(1000, 1, "shuffle", 4).tolist()
    assert order.tolist() != randomness.draw_permutation(1000, 1, "shuffle", 5).tolist()
    assert order[:5].tolist() == [508, 433, 195, 876, 545]
    assert randomness.draw_permutation(0, 1, "shuffle").tolist() == []
