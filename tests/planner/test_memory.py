"""The estimate of memory by hand, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.planner.memory import CallDemand, MemorySettings, NetworkShape, compute_peak, estimate

SHAPE = NetworkShape(
    parameters=1000,
    trainable=1000,
    layers=4,
    hidden=8,
    query=8,
    key=4,
    inner=16,
    vocab=50,
    embedding=400,
    tied=True,
)
TRAINED = MemorySettings(
    "float32", True, "adamw", recompute=0, offload_optimizer=False, chunk_rows=10
)
ROW_BY_ROW = replace(TRAINED, chunk_rows=1)
TRAIN = CallDemand(tokens=100, rows=60, backward=True)


def test_what_is_held_by_hand() -> None:
    one = estimate(SHAPE, TRAINED, [TRAIN])
    assert (one.parameters, one.masters, one.optimizer, one.gradients) == (4000, 0, 8000, 4000)
    half = estimate(SHAPE, replace(TRAINED, dtype="bfloat16", optimizer="lion"), [TRAIN])
    assert (half.parameters, half.masters, half.optimizer, half.gradients) == (
        2000,
        4000,
        4000,
        4000,
    )
    frozen = estimate(SHAPE, replace(TRAINED, trained=False, dtype="float16"), [])
    assert (frozen.permanent, frozen.gradients, frozen.call) == (2000, 0, 0)
    adapters = estimate(replace(SHAPE, trainable=10), replace(TRAINED, dtype="bfloat16"), [TRAIN])
    assert (adapters.parameters, adapters.masters, adapters.optimizer, adapters.gradients) == (
        2000,
        40,
        80,
        40,
    )
    host = estimate(SHAPE, replace(TRAINED, dtype="bfloat16", offload_optimizer=True), [TRAIN])
    assert host.permanent == 2000 and host.gradients == 0
    here = estimate(SHAPE, replace(TRAINED, dtype="bfloat16"), [replace(TRAIN, parts=2)])
    there = estimate(
        SHAPE, replace(TRAINED, dtype="bfloat16", offload_optimizer=True), [replace(TRAIN, parts=2)]
    )
    assert here.call - there.call == 4000, "no gradient stays on the device either"


def test_states_of_other_dtypes_by_hand() -> None:
    """1,000 parameters, 400 of them the embedding's: two moments each."""
    held = {
        dtype: estimate(SHAPE, replace(TRAINED, state_dtype=dtype), [TRAIN]).optimizer
        for dtype in ("float32", "bfloat16", "8bit")
    }
    assert held == {
        "float32": 8000,
        "bfloat16": 4000,
        "8bit": int(2 * (400 * 4 + 600 * (1 + 4 / 256))),
    }
    adapters = replace(SHAPE, trainable=512)
    assert estimate(adapters, replace(TRAINED, state_dtype="8bit"), [TRAIN]).optimizer == 2 * (
        512 + 2 * 4
    )


def test_activations_by_hand() -> None:
    layer = 4 * 8 + 2 * 8 + 2 * 4 + 2 * 16
    ends, working = 2 * 100 * 8 + 60 * 8, 100 * (3 * 8 + 4 * 16)
    assert SHAPE.count_saved_per_token() == layer and working > 3 * 50 * 10
    last = 100 * (2 * 8 + 2 * 8 + 2 * 4) + 60 * (2 * 8 + 2 * 16 + 8)
    assert estimate(SHAPE, TRAINED, [TRAIN]).activations == 4 * (
        ends + 3 * 100 * layer + last + working
    )
    every_second = estimate(SHAPE, replace(TRAINED, recompute=2), [TRAIN])
    assert every_second.activations == 4 * (
        ends + 2 * 100 * layer + 2 * 100 * 8 + working + 100 * layer
    )


def test_ranks_that_share_rows_keep_their_part_of_the_stream() -> None:
    shared = replace(SHAPE, row_ranks=4)
    assert SHAPE.count_saved_per_token() - shared.count_saved_per_token() == 2 * (8 - 2)
    assert SHAPE.count_saved_in_last_layer(100, 60) - shared.count_saved_in_last_layer(100, 60) == (
        100 + 60
    ) * (8 - 2)
    every = replace(TRAINED, recompute=1)
    whole, parts = (estimate(shape, every, [TRAIN]).activations for shape in (SHAPE, shared))
    # The inputs of all layers, both ends, and the layer that is computed again.
    assert whole - parts == 4 * 100 * (8 - 2) * (4 + 2 + 2)


def test_adapters_keep_their_products_and_open_the_mlp() -> None:
    layer = SHAPE.count_saved_per_token()
    assert replace(SHAPE, adapters=21).count_saved_per_token() == layer + 21
    assert replace(SHAPE, fused=False).count_saved_per_token() == layer + 2 * 16
    assert replace(SHAPE, fused=False, gated=False).count_saved_per_token() == layer


def test_padded_attention_keeps_its_output_twice_but_not_in_the_last_layer() -> None:
    padded = replace(SHAPE, copies_attention=True)
    assert padded.count_saved_per_token() == SHAPE.count_saved_per_token() + 8
    assert padded.count_saved_in_last_layer(100, 60) == SHAPE.count_saved_in_last_layer(100, 60)


def test_an_entropy_with_a_gradient_takes_two_more_chunks() -> None:
    wide = replace(SHAPE, vocab=5000)
    plain, more = (
        estimate(wide, ROW_BY_ROW, [replace(TRAIN, entropy=entropy)]).activations
        for entropy in (False, True)
    )
    assert more - plain == 2 * 5000 * 4


def test_logits_that_become_their_gradients_take_one_chunk() -> None:
    wide = replace(SHAPE, vocab=50_000)
    for work, less in (
        (replace(TRAIN, entropy=True), 4),
        (replace(TRAIN, backward=False), 1),
        (CallDemand(cache_tokens=64, sequences=1), 2),
    ):
        copied, in_place = (
            estimate(wide, replace(ROW_BY_ROW, in_place=way), [work]).call for way in (False, True)
        )
        assert copied - in_place == less * 50_000 * 4


@pytest.mark.parametrize("backward", [True, False])
def test_a_soft_cap_takes_two_more_chunks(backward: bool) -> None:
    wide, work = replace(SHAPE, vocab=50_000), replace(TRAIN, backward=backward)
    plain, capped = (
        estimate(replace(wide, capped=way), replace(ROW_BY_ROW, in_place=True), [work]).activations
        for way in (False, True)
    )
    assert capped - plain == 2 * 50_000 * 4


def test_a_look_up_that_adds_its_rows_makes_no_matrix_of_its_own() -> None:
    tied = replace(SHAPE, tied=True, embedding=1_000_000, parameters=9_000_000, trainable=9_000_000)
    whole, rows, later = (
        estimate(tied, replace(TRAINED, adds_rows=way), [replace(TRAIN, parts=parts)])
        for way, parts in ((False, 1), (True, 1), (True, 2))
    )
    assert whole.call - rows.call == 2 * 1_000_000 * 4
    assert later.call == later.activations + (9_000_000 + 1_000_000) * 4


def test_the_gradient_of_an_output_matrix_is_there_with_all_activations() -> None:
    """A score's is one row, and no such matrix."""
    tied, untied, scores = (
        estimate(replace(SHAPE, **changes), replace(TRAINED, adds_rows=True), [TRAIN])
        for changes in ({}, {"tied": False}, {"tied": False, "vocab": 1})
    )
    assert tied.call - tied.activations == untied.call - untied.activations == 400 * 4
    assert scores.call == scores.activations


def test_a_cache_that_is_kept_counts_while_others_work_and_has_a_limit() -> None:
    works = [CallDemand(cache_tokens=64, sequences=2, cache_limit=1000)]
    freed, kept = (
        estimate(SHAPE, replace(TRAINED, keeps_cache=keeps), works) for keeps in (False, True)
    )
    assert freed.cache == kept.cache == 1000
    assert (
        freed.resident_cache == 0
        and kept.resident_cache == 1000
        and kept.permanent == freed.permanent + 1000
    )
    assert freed.call == kept.call + 1000, "counted once"


def test_a_cache_by_hand() -> None:
    role = estimate(SHAPE, TRAINED, [CallDemand(cache_tokens=64, sequences=2)])
    assert role.cache == 2 * 4 * 4 * 64 * 4 and role.activations == 3 * 2 * 50 * 4


def test_more_recomputation_and_fewer_tokens_take_less() -> None:
    calls = [estimate(SHAPE, replace(TRAINED, recompute=n), [TRAIN]).call for n in (0, 2, 1)]
    assert calls[0] > calls[1] > calls[2]
    sizes = [
        estimate(SHAPE, TRAINED, [replace(TRAIN, tokens=n, rows=n)]).call for n in (50, 100, 200)
    ]
    assert sizes == sorted(sizes) and sizes[2] - sizes[1] == pytest.approx(
        2 * (sizes[1] - sizes[0]), rel=1e-12
    )
    assert (
        estimate(SHAPE, TRAINED, [replace(TRAIN, parts=3)]).call
        > estimate(SHAPE, TRAINED, [TRAIN]).call
    )


def test_roles_are_held_together_and_call_one_after_another() -> None:
    actor = estimate(SHAPE, TRAINED, [TRAIN, CallDemand(tokens=100, rows=60)])
    ref = estimate(SHAPE, replace(TRAINED, trained=False), [CallDemand(tokens=100, rows=60)])
    assert actor.call > ref.call > 0
    assert (
        compute_peak({"actor": actor, "ref": ref}) == actor.permanent + ref.permanent + actor.call
    )
    assert compute_peak({}) == 0


def test_what_lies_in_host_memory_between_calls_is_held_for_one_role_alone() -> None:
    half = replace(TRAINED, dtype="bfloat16")
    actor = estimate(SHAPE, replace(half, weights_leave=True), [TRAIN])
    ref = estimate(
        SHAPE, replace(half, trained=False, weights_leave=True), [CallDemand(tokens=100, rows=60)]
    )
    stays = estimate(SHAPE, half, [TRAIN])
    assert (actor.away, ref.away) == (2000 + 4000, 2000) and (actor.permanent, actor.call) == (
        stays.permanent,
        stays.call,
    )
    assert compute_peak({"actor": actor, "ref": ref}) == 8000 + 6000 + actor.call
    assert compute_peak({"actor": stays, "ref": ref}) == 14000 + max(stays.call, 2000 + ref.call)
    state = estimate(SHAPE, replace(half, weights_leave=True, optimizer_leaves=True), [TRAIN])
    assert state.away == state.permanent and compute_peak({"actor": state}) == compute_peak(
        {"actor": stays}
    )


@pytest.mark.parametrize("sums_once", [False, True])
def test_gradients_of_several_micro_batches_add_up_whole_where_ranks_share_them_once(
    sums_once: bool,
) -> None:
    """A block of the 4 that 4,000 elements have beside an embedding of 400, or all of them."""
    shared, settings = replace(SHAPE, shards=4), replace(TRAINED, sums_once=sums_once)
    one, several = (
        estimate(shared, settings, [replace(TRAIN, tokens=1000, parts=parts)]) for parts in (1, 2)
    )
    alone = [
        estimate(SHAPE, TRAINED, [replace(TRAIN, tokens=1000, parts=parts)]) for parts in (1, 2)
    ]
    assert (several.call - one.call) - (alone[1].call - alone[0].call) == 4 * (
        4000 - 900
    ) * sums_once


def test_float64_takes_twice_what_float32_does() -> None:
    single, double = (
        estimate(SHAPE, replace(TRAINED, dtype=dtype), [TRAIN]) for dtype in ("float32", "float64")
    )
    assert (double.permanent, double.gradients, double.call) == (
        2 * single.permanent,
        2 * single.gradients,
        2 * single.call,
    )
