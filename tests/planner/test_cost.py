"""Estimates of seconds and bytes, against what they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.decoders import (
    SMALL,
    compute_memory,
    compute_seconds,
    with_adapters,
    with_settings,
)
from weft.planner.cost import (
    CallWorkload,
    estimate_call,
    estimate_transfers,
)
from weft.planner.devices import GIB, DeviceRates, estimate_cpu_rates
from weft.topology import Layout, Mesh

# Numbers that a hand can follow: 1 GFLOP/s, 1 GB/s of memory and of links, nothing that a layer or
# an exchange takes by itself.
RATES = DeviceRates("hand", 1e9, 1e9, 1e9, 1e8, 0.0, 0.0, 64 * GIB, 128, per_node=4)
TRAINED = with_settings(SMALL, trained=True)
SCORE = CallWorkload("inference", 8, 60, 40)
TRAIN = replace(SCORE, method="train_step", num_updates=2)
SAMPLE = replace(SCORE, method="generate")
PARAMETERS = 4 * 150_000 + 200_000


def mesh(layout: str, first: int = 0) -> Mesh:
    made = Layout.parse(layout)
    return Mesh(made, tuple(range(first, first + made.num_devices)))


# The last layer computes keys and values of all tokens, the rest only of rows that are read.
QKV = 100 * (100 + 2 * 50)
LATE = (150_000 - QKV) / 150_000


def layers_of(tokens: int, rows: int, length: int = 100) -> float:
    """Seconds of the products of four layers, the last of which is shorter."""
    layer = tokens * 2 * (150_000 + 100 * length) / 1e9
    return layer * (4 - LATE * (1 - rows / tokens))


def test_a_forward_pass_is_its_products() -> None:
    head = 8 * 40 * 2 * 100_000 / 1e9  # of the answers alone
    expected = layers_of(800, 320) + head
    assert compute_seconds(SMALL, SCORE, mesh("d1"), RATES) == pytest.approx(expected, rel=1e-12)
    assert compute_seconds(SMALL, SCORE, mesh("d4"), RATES) == pytest.approx(
        expected / 4, rel=1e-12
    )


def test_few_tokens_are_bound_by_reads_of_the_weights() -> None:
    slow = replace(RATES, memory_bandwidth=1e6)
    one = replace(SCORE, num_sequences=1, prompt_tokens=1, new_tokens=1)
    estimate = estimate_call(SMALL, one, mesh("d1"), slow)
    reads = 150_000 * 4 / 1e6 * (4 - LATE * (1 - 1 / 2))
    assert estimate.parts["memory"] == pytest.approx(reads, rel=1e-12)
    assert estimate.bound == "memory"
    assert estimate_call(SMALL, SCORE, mesh("d1"), RATES).bound == "products"


def test_a_scoring_head_reads_a_row_of_each_sequence() -> None:
    scores = replace(SMALL, scores=True, outputs=100)
    expected = layers_of(800, 8) + 8 * 2 * 100 / 1e9
    assert compute_seconds(scores, SCORE, mesh("d1"), RATES) == pytest.approx(expected, rel=1e-12)


def test_sequences_with_the_same_prompt_compute_it_once() -> None:
    """Four pairs: the second sequence of each computes 41 of its 100 tokens."""
    pairs = replace(SCORE, samples=2, shared_tokens=59)
    assert pairs.count_computed_tokens(SMALL) == 800 - 4 * 59
    apart = replace(SMALL, shares_prefixes=False)
    assert pairs.count_computed_tokens(apart) == 800
    head = 320 * 2 * 100_000 / 1e9
    assert compute_seconds(SMALL, pairs, mesh("d1"), RATES) == pytest.approx(
        layers_of(564, 320) + head, rel=1e-12
    )
    alike = replace(SCORE, saved_share=0.25)
    assert alike.count_computed_tokens(SMALL) == 600


def test_ranks_wait_for_the_one_with_the_most() -> None:
    """The first of two ranks has 120 of 200 tokens and 80 of 100 answer tokens."""
    uneven = replace(SCORE, batches=(((120, 80), (80, 20)),))
    expected = layers_of(400 * 1.2, 160 * 1.6) + 160 * 1.6 * 2 * 100_000 / 1e9
    assert compute_seconds(SMALL, uneven, mesh("d2"), RATES) == pytest.approx(expected, rel=1e-12)
    alone = compute_seconds(SMALL, SCORE, mesh("d1"), RATES)
    assert compute_seconds(SMALL, uneven, mesh("d1"), RATES) == alone


def test_long_sequences_among_short_ones_cost_more_attention() -> None:
    longer = replace(SCORE, attended_length=150.0)
    head = 320 * 2 * 100_000 / 1e9
    assert compute_seconds(SMALL, longer, mesh("d1"), RATES) == pytest.approx(
        layers_of(800, 320, 150) + head, rel=1e-12
    )


def test_a_backward_pass_is_two_more_and_recomputation_one() -> None:
    forward = compute_seconds(SMALL, SCORE, mesh("d1"), RATES)
    # weights, gradients and two moments, read or written three times
    update = PARAMETERS * 4 * 4 * 3 / 1e9
    assert compute_seconds(TRAINED, TRAIN, mesh("d1"), RATES) == pytest.approx(
        3 * forward + 2 * update, rel=1e-12
    )
    # The head is not computed again.
    again = with_settings(TRAINED, recompute=1)
    assert compute_seconds(again, TRAIN, mesh("d1"), RATES) == pytest.approx(
        3 * forward + layers_of(800, 320) + 2 * update, rel=1e-12
    )
    half = with_settings(TRAINED, recompute=2)
    assert compute_seconds(half, TRAIN, mesh("d1"), RATES) == pytest.approx(
        3 * forward + layers_of(800, 320) / 2 + 2 * update, rel=1e-12
    )
    twice = replace(TRAIN, num_epochs=2)
    assert compute_seconds(TRAINED, twice, mesh("d1"), RATES) == pytest.approx(
        2 * (3 * forward + 2 * update), rel=1e-12
    )


def test_losses_over_several_rows_compute_logits_again() -> None:
    """The gradient of a pair's loss is known only once both log-probs are."""
    plain = compute_seconds(TRAINED, TRAIN, mesh("d1"), RATES)
    pairs = replace(TRAIN, repeats_head=True)
    again = 320 * 2 * 100_000 / 1e9
    assert compute_seconds(TRAINED, pairs, mesh("d1"), RATES) == pytest.approx(
        plain + again, rel=1e-12
    )
    scored = replace(pairs, method="inference")
    assert compute_seconds(SMALL, scored, mesh("d1"), RATES) == compute_seconds(
        SMALL, SCORE, mesh("d1"), RATES
    )


def test_adapters_save_the_gradients_of_the_weights_that_are_frozen() -> None:
    forward = compute_seconds(SMALL, SCORE, mesh("d1"), RATES)
    adapted = with_adapters(TRAINED, PARAMETERS // 100)
    update = 2 * PARAMETERS / 100 * 4 * 4 * 3 / 1e9
    assert compute_seconds(adapted, TRAIN, mesh("d1"), RATES) == pytest.approx(
        2.01 * forward + update, rel=1e-12
    )
    slow = replace(
        RATES, flops=1e15, memory_bandwidth=1e15
    )  # what remains is what tensor ranks send: as much as in full training
    sent = [
        compute_seconds(network, replace(TRAIN, num_updates=1), mesh("t2"), slow)
        for network in (adapted, TRAINED)
    ]
    assert sent[0] == pytest.approx(sent[1], rel=1e-3)


def test_the_backward_pass_ends_at_frozen_layers() -> None:
    """Three of four layers are frozen, and with them the embedding: only the last goes back."""
    trained = 150_000 + 100_000
    frozen = replace(with_adapters(TRAINED, trained), frozen_layers=3)
    assert not frozen.has_adapters
    head = 320 * 2 * 100_000 / 1e9
    forward = layers_of(800, 320)
    update = 2 * trained * 4 * 4 * 3 / 1e9
    assert compute_seconds(frozen, TRAIN, mesh("d1"), RATES) == pytest.approx(
        forward + 2 * forward / 4 + 3 * head + update, rel=1e-12
    )


def test_copies_sum_their_gradients_and_shards_gather_their_weights() -> None:
    alone = compute_seconds(TRAINED, TRAIN, mesh("d1"), RATES)
    update = 2 * PARAMETERS * 4 * 4 * 3 / 1e9
    copies = (alone - update) / 2 + update + 2 * 2 * PARAMETERS * 4 / 2 / 1e9
    copies += 2 * 4 * PARAMETERS * 4 / 1e9  # into one buffer and back: two reads, two writes
    assert compute_seconds(TRAINED, TRAIN, mesh("d2f1"), RATES) == pytest.approx(copies, rel=1e-12)
    # Each of two minibatches gathers all layers twice and the ends once, and scatters gradients.
    layers, ends = 600_000, 200_000
    exchanged = 2 * (2 * layers + ends) + 2 * PARAMETERS
    shards = (alone - update) / 2 + update / 2 + exchanged * 4 / 2 / 1e9
    assert compute_seconds(TRAINED, TRAIN, mesh("d2f2"), RATES) == pytest.approx(shards, rel=1e-12)
    stays = with_settings(TRAINED, reshards=False)  # ZeRO stage 2: gathered once
    assert compute_seconds(stays, TRAIN, mesh("d2f2"), RATES) == pytest.approx(
        shards - 2 * layers * 4 / 2 / 1e9, rel=1e-12
    )


def test_gradients_are_scattered_after_each_micro_batch_or_once() -> None:
    many = replace(TRAIN, num_updates=1, microbatch=100)  # 4 on each of two ranks
    each = compute_seconds(TRAINED, many, mesh("d2f2"), RATES)
    once = compute_seconds(with_settings(TRAINED, sums_once=True), many, mesh("d2f2"), RATES)
    assert each - once == pytest.approx(3 * PARAMETERS * 4 / 2 / 1e9, rel=1e-9)


# A network whose output matrix costs nothing and whose last layer reads all rows: stages are alike.
EVEN = replace(SMALL, outputs=0)
WHOLE = replace(SCORE, prompt_tokens=0, new_tokens=100)


def test_pipelines_wait_and_tensor_ranks_send() -> None:
    alone = compute_seconds(EVEN, WHOLE, mesh("d1"), RATES)
    states = 800 * 100 * 4
    single = estimate_call(EVEN, WHOLE, mesh("p2"), RATES)
    assert single.seconds == pytest.approx(alone + states / 1e9, rel=1e-12)
    assert single.parts["bubble"] == pytest.approx(alone / 2, rel=1e-12)
    many = replace(WHOLE, microbatch=100)  # 8 of them
    assert compute_seconds(EVEN, many, mesh("p2"), RATES) == pytest.approx(
        alone / 2 * 9 / 8 + states / 1e9, rel=1e-12
    )
    # Two stages on each rank wait half as long, and send twice.
    interleaved = Mesh(replace(Layout.parse("p2"), stages_per_rank=2), (0, 1))
    assert compute_seconds(EVEN, many, interleaved, RATES) == pytest.approx(
        alone / 2 * (1 + 1 / 16) + 2 * states / 1e9, rel=1e-12
    )
    # Two sums in each layer, and one of the embeddings
    sums = (2 * 4 + 1) * 2 * states / 2 / 1e9
    assert compute_seconds(EVEN, WHOLE, mesh("t2"), RATES) == pytest.approx(
        alone / 2 + sums, rel=1e-12
    )


def test_ranks_of_a_pipeline_wait_for_the_messages_of_the_stages_before() -> None:
    states = 800 * 100 * 4
    sums = (2 * 2 + 1) * 2 * states / 2 / 1e9  # of a stage with two layers
    compute = compute_seconds(EVEN, WHOLE, mesh("t2"), RATES) - (2 * 4 + 1) * states / 1e9
    found = estimate_call(EVEN, WHOLE, mesh("t2p2"), RATES)
    assert found.seconds == pytest.approx(compute + 2 * sums + states / 1e9, rel=1e-12)
    assert found.parts["bubble"] == pytest.approx(compute / 2 + sums, rel=1e-12)
    # Two ranks that share a batch gather their weights, in each stage.
    sharded = estimate_call(EVEN, WHOLE, mesh("d2f2p2"), RATES)
    whole = estimate_call(EVEN, WHOLE, mesh("d2f1p2"), RATES)
    gathered = sharded.parts["messages"] - whole.parts["messages"]
    assert sharded.seconds - whole.seconds == pytest.approx(2 * gathered, rel=1e-12)


def test_pipelines_leave_cores_to_others() -> None:
    many = replace(WHOLE, microbatch=100)
    assert WHOLE.count_active_stages(mesh("p4").layout) == 1.0
    assert many.count_active_stages(mesh("p4").layout) == pytest.approx(4 * 8 / 11)
    assert replace(WHOLE, method="generate").count_active_stages(mesh("p4").layout) == 4
    cores = estimate_cpu_rates(2, 4.0, 4, 1)
    assert cores.share_cores(4, 4).crowding == 2.0 and cores.share_cores(2, 4).crowding == 1.0
    assert cores.share_cores(4, 4).time_send(1e6, (0, 1)) == 2 * cores.time_send(1e6, (0, 1))


def test_the_slowest_stage_sets_the_pace() -> None:
    """With a head as costly as eight layers, the last of two stages has it and one layer."""
    heavy = replace(SMALL, outputs=1_200_000)
    many = replace(WHOLE, microbatch=100)
    layer = 100 * 2 * (150_000 + 100 * 100) / 1e9
    head = 100 * 2 * 1_200_000 / 1e9
    states = 800 * 100 * 4
    assert compute_seconds(heavy, many, mesh("p2"), RATES) == pytest.approx(
        8 * (layer + head) + 3 * layer + states / 1e9, rel=1e-12
    )


def test_another_node_is_further_away() -> None:
    near = compute_seconds(TRAINED, TRAIN, mesh("d2f1", 0), RATES)
    far = compute_seconds(TRAINED, TRAIN, Mesh(Layout.parse("d2f1"), (3, 4)), RATES)
    assert far - near == pytest.approx(2 * 2 * PARAMETERS * 4 / 2 * (1 / 1e8 - 1 / 1e9), rel=1e-9)


def test_a_decode_step_reads_the_weights_and_stages_share_the_cache() -> None:
    slow = replace(RATES, flops=1e15)  # reads of memory are all that counts
    prefill = 4 * 150_000 * 4 / 1e9
    weights = 40 * (4 * 150_000 + 100_000) * 4 / 1e9
    cache = 40 * 8 * 80 * 2 * 4 * 50 * 4 / 1e9
    assert compute_seconds(SMALL, SAMPLE, mesh("d1"), slow) == pytest.approx(
        prefill + weights + cache, rel=1e-3
    )
    assert compute_seconds(SMALL, SAMPLE, mesh("d2"), slow) == pytest.approx(
        prefill + weights + cache / 2, rel=1e-3
    )
    # Two stages decode four sequences each in turn: both read their weights twice in a step.
    fast = replace(slow, link_bandwidth=1e15)
    assert compute_seconds(SMALL, SAMPLE, mesh("p2"), fast) == pytest.approx(
        prefill / 2 + weights + cache / 2, rel=1e-3
    )
    assert compute_seconds(SMALL, SAMPLE, mesh("t2"), fast) == pytest.approx(
        (prefill + weights + cache) / 2, rel=1e-3
    )
    two_rounds = replace(slow, most_sequences=4)
    assert compute_seconds(SMALL, SAMPLE, mesh("d1"), two_rounds) == pytest.approx(
        prefill + 2 * weights + cache, rel=1e-3
    )


def test_sharded_weights_are_gathered_once_for_a_generation() -> None:
    copies = compute_seconds(SMALL, SAMPLE, mesh("d2f1"), RATES)
    shards = compute_seconds(SMALL, SAMPLE, mesh("d2f2"), RATES)
    assert shards - copies == pytest.approx(PARAMETERS * 4 / 2 / 1e9, rel=1e-9)


def test_more_work_never_takes_less_time() -> None:
    for method in ("inference", "train_step", "generate"):
        base = replace(SCORE, method=method)
        network = TRAINED if method == "train_step" else SMALL
        for layout in ("d1", "d2f2", "t2", "p2"):
            before = compute_seconds(network, base, mesh(layout), RATES)
            for change in (
                {"num_sequences": 16},
                {"prompt_tokens": 90},
                {"new_tokens": 60},
            ):
                more = compute_seconds(network, replace(base, **change), mesh(layout), RATES)
                assert more >= before, (method, layout, change)


def test_a_batch_is_sent_to_the_ranks_that_share_it() -> None:
    """4 GB at 1 GB/s; the first device alone may have made it itself."""
    load = replace(SCORE, batch_bytes=4e9)
    for layout, first, seconds in (("d1", 0, 0.0), ("d1", 1, 4.0), ("d4", 0, 1.0), ("t2", 0, 4.0)):
        parts = [
            estimate_call(SMALL, each, mesh(layout, first), RATES).parts for each in (SCORE, load)
        ]
        assert parts[1]["messages"] - parts[0]["messages"] == pytest.approx(seconds)


# Eight experts of which two process a token; each has 3 x 100 x 200 weights
SPARSE = replace(TRAINED, experts=8, chosen_experts=2)
SPARSE = replace(
    SPARSE,
    shape=replace(SPARSE.shape, parameters=4 * (30_000 + 480_000) + 200_000, trainable=2_240_000),
)


def test_experts_are_divided_over_other_ranks_than_the_rest() -> None:
    assert SPARSE.expert_elements == 480_000
    experts = 4 * 480_000
    rest = SPARSE.shape.parameters - experts
    for layout, stored in (
        ("d4f1e4", rest + experts / 4),
        ("d4f4e2", rest / 4 + experts / 4),
        ("d4f2e4", rest / 2 + experts / 4),
        ("d2f1t2e2", rest / 2 + experts / 4),
    ):
        found = SPARSE.count_stored_parameters(Layout.parse(layout))
        assert found == pytest.approx(stored), layout
        held = compute_memory(SPARSE, [TRAIN], Layout.parse(layout), RATES)
        assert held.parameters == 4 * stored and held.optimizer == 8 * stored


def test_rows_are_sent_to_the_experts_and_back() -> None:
    """Forward and backward, each there and back, in four layers; half of the rows stay."""
    load = replace(TRAIN, num_updates=1)
    alone, shared = (
        estimate_call(SPARSE, load, mesh(layout), RATES).parts["messages"]
        for layout in ("d2f1", "d2f1e2")
    )
    busiest = 1 + 0.6 / 2
    rows = 400 * 2 * 100 * 4 * busiest / 2 / 1e9
    sums = 2 * 4 / 2 * (2_240_000 - (2_240_000 - 4 * 480_000 / 2)) / 1e9
    assert shared - alone == pytest.approx(4 * 2 * 2 * rows - sums)


def test_parts_add_up_to_the_call() -> None:
    for load, layout in ((TRAIN, "d2f2"), (SAMPLE, "t2"), (SCORE, "p2")):
        found = estimate_call(TRAINED, load, mesh(layout), RATES)
        assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=1e-12)
        assert found.seconds == compute_seconds(TRAINED, load, mesh(layout), RATES)


def test_weights_that_are_there_are_not_moved() -> None:
    whole = PARAMETERS * 4 / 1e9
    assert estimate_transfers(TRAINED, mesh("d2"), [mesh("d2")], RATES)[0] == 0.0
    assert estimate_transfers(TRAINED, mesh("t2"), [mesh("d2")], RATES)[0] == pytest.approx(
        whole / 2, rel=1e-12
    )
    assert estimate_transfers(TRAINED, mesh("d2"), [mesh("t2")], RATES)[0] == 0.0
    assert estimate_transfers(TRAINED, mesh("d1"), [mesh("d1", 1)], RATES)[0] == pytest.approx(
        whole, rel=1e-12
    )
    assert estimate_transfers(TRAINED, mesh("d1"), [mesh("d2", 2)], RATES)[0] == pytest.approx(
        2 * whole, rel=1e-12
    )  # both from one
    adapters = with_adapters(TRAINED, 1000)
    assert estimate_transfers(adapters, mesh("d1"), [mesh("d1", 1)], RATES)[0] == pytest.approx(
        4e-6, rel=1e-12
    )


def test_memory_is_shared_by_shards_tensor_ranks_and_stages() -> None:
    held = {
        layout: compute_memory(TRAINED, [TRAIN], Layout.parse(layout), RATES)
        for layout in ("d2f1", "d2f2", "t2", "p2")
    }
    assert (
        held["d2f1"].parameters == PARAMETERS * 4 and held["d2f1"].optimizer == 2 * PARAMETERS * 4
    )
    for layout in ("d2f2", "t2", "p2"):
        assert held[layout].permanent == held["d2f1"].permanent // 2
    gathered = 200_000 + 2 * 150_000  # embedding and output matrix, a layer and the next
    # and a layer's gradient
    assert held["d2f2"].call == held["d2f1"].call + gathered * 4 + 150_000 * 4
    copy = compute_memory(TRAINED, [SAMPLE], Layout(), RATES, own=False)
    slot = 128  # 64 tokens, doubled until the 100 of a sequence fit, as the generator does
    assert copy.optimizer == copy.gradients == 0 and copy.cache == 2 * 4 * 50 * 8 * slot * 4
