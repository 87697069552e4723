"""Random windows of long sequences."""

from __future__ import annotations

from collections import Counter

import numpy as np

from weft.data.lengths import EncodedSample, RandomWindow


def sample(prompt: int, mask: str) -> EncodedSample:
    """Return a sample of ids 100, 101, ...; `mask` is 1 for trained tokens of the completion."""
    ids = list(range(100, 100 + prompt + len(mask)))
    return EncodedSample(ids[:prompt], [ids[prompt:]], [[on == "1" for on in mask]])


def parts(window: RandomWindow, encoded: EncodedSample, count: int = 600) -> list[EncodedSample]:
    return [window.apply(encoded, np.random.default_rng(seed)) for seed in range(count)]


def whole(encoded: EncodedSample) -> list[int]:
    return [*encoded.prompt, *encoded.completions[0]]


def test_every_place_with_something_to_learn_is_as_likely() -> None:
    encoded = sample(4, "1100000011")  # ids 100..113, trained: 104, 105, 112, 113
    found = Counter(whole(one)[0] for one in parts(RandomWindow(4, 1.0), encoded, 3000))
    # A window that begins at 105 or 106 to 108 trains nothing: 105 would be its first token, which
    # is not trained.
    assert set(found) == {101, 102, 103, 104, 109, 110}
    assert all(abs(count / 3000 - 1 / 6) < 0.03 for count in found.values())


def test_a_window_keeps_ids_and_mask_together() -> None:
    encoded = sample(3, "110011110")
    truth = dict(zip(whole(encoded), [False] * 3 + encoded.masks[0], strict=True))
    for one in parts(RandomWindow(5, 1.0), encoded):
        ids = whole(one)
        assert (
            ids == list(range(ids[0], ids[0] + len(ids)))
            and len(ids) <= 5
            and one.prompt
            and one.masks[0][-1]
        )
        assert [False] * len(one.prompt) + one.masks[0] == [
            at > 0 and truth[id] for at, id in enumerate(ids)
        ]


def test_the_head_stays_in_front() -> None:
    encoded = sample(4, "1111111")
    for one in parts(RandomWindow(6, 1.0, head=[100, 101]), encoded, 50):
        assert (
            whole(one)[:2] == [100, 101]
            and one.prompt == [100, 101][: len(one.prompt)] + one.prompt[2:]
        )
    assert {whole(one)[0] for one in parts(RandomWindow(6, 1.0, bos_id=100), encoded, 50)} == {100}


def test_what_fits_and_what_is_not_drawn_stays() -> None:
    encoded = sample(2, "111")
    assert all(one is encoded for one in parts(RandomWindow(5, 1.0), encoded, 20))
    long = sample(2, "1" * 30)
    kept = sum(one is long for one in parts(RandomWindow(8, 0.3), long, 2000))
    assert abs(kept / 2000 - 0.7) < 0.04
    pair = EncodedSample([1], [[2] * 9, [3] * 9], [[True] * 9] * 2)
    assert RandomWindow(4, 1.0).apply(pair, np.random.default_rng(0)) is pair
