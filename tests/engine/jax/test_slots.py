"""Sizes of key-value caches."""

from weft.engine.generation.scheduler import GenerationBudget
from weft.engine.jax.slots import CacheSizes, SlotsOfOneSize


def test_a_cache_keeps_to_its_limit() -> None:
    """Sizes are rounded up where there is room for it."""
    sizes = CacheSizes(None, multiple=1)
    assert sizes.choose(3, 600, 10_000) == (8, 768)
    assert sizes.choose(1, 700, 1_500) == (1, 700)
    assert sizes.choose(5, 700, 1_500) == (2, 700)
    assert sizes.choose(1, 700, 600) == (1, 700), "one sequence always has a slot"


def test_known_sizes_serve_four_times_as_many_sequences() -> None:
    sizes = CacheSizes(longest=900, multiple=2)
    assert sizes.choose(30, 100, 1 << 20) == (32, 1024), "with room for the longest of the run"
    for slots, capacity in ((1, 50), (128, 1000)):
        assert sizes.choose(slots, capacity, 1 << 20) == (32, 1024)
    assert sizes.choose(129, 100, 1 << 20) == (192, 1024)
    assert sizes.choose(40, 100, 1 << 20) == (192, 1024), "the smallest that has enough"


def test_a_sequence_waits_until_a_slot_is_free() -> None:
    slots = SlotsOfOneSize(GenerationBudget(max_sequences=3), CacheSizes(None, multiple=1))
    slots.expect(20, 40)
    assert [slots.admit(number, 10) for number in range(9)] == [True] * 8 + [False]
    assert (slots.slots, slots.capacity) == (8, 64)
    slots.release(4)
    assert slots.admit(9, 10)
    slots.expect(1, 100)
    assert slots.admit(9, 10) is False
    assert (slots.slots, slots.capacity) == (8, 128), "it never shrinks"
