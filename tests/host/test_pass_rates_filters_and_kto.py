"""Dynamic sampling, and KTO's baseline from mismatched completions."""

from __future__ import annotations

import pytest
import torch

from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError
from weft.host.base import HostContext, make_host_function
from weft.host.bco_shift import kto_baseline, kto_mismatch


def grouped(
    key: str, groups: list[list[list[float]]], dtype: torch.dtype = torch.float32
) -> SequenceSample:
    """`groups[i][k]` lists the values of completion k of id i under one key."""
    ids = [f"p{n}" for n in range(len(groups))]
    flat = [value for group in groups for sequence in group for value in sequence]
    lengths = {key: [[len(sequence) for sequence in group] for group in groups]}
    return SequenceSample.from_groups(ids, lengths, {key: torch.tensor(flat, dtype=dtype)})


def test_dynamic_sampling_drops_groups_of_one_reward() -> None:
    context = HostContext()
    batch = grouped("rewards", [[[1.0], [0.0]], [[1.0], [1.0]], [[0.0], [0.0]], [[0.5], [0.25]]])
    made = make_host_function("dynamic_sampling", {})(batch, context)
    assert made.ids == ("p0", "p3")
    assert made.data["kept"].tolist() == [1.0, 1.0]
    assert context.metrics == {"kept_fraction": 0.5}


def test_dynamic_sampling_may_drop_everything() -> None:
    made = make_host_function("dynamic_sampling", {})(
        grouped("rewards", [[[1.0], [1.0]]]), HostContext()
    )
    assert made is not None
    assert made.ids == ()
    assert made.num_ids == 0


def test_dynamic_sampling_refuses_groups_of_one() -> None:
    with pytest.raises(ConfigError, match="group_size"):
        make_host_function("dynamic_sampling", {})(
            grouped("rewards", [[[1.0]], [[0.0], [1.0]]]), HostContext()
        )


COMPLETIONS = [[[1, 2], [3]], [[4, 5, 6]], [[7], [8], [9]]]


def test_mismatch_gives_each_prompt_the_next_ids_completions() -> None:
    batch = grouped("completion", COMPLETIONS, torch.int64)
    made = make_host_function("kto_mismatch", {})(batch, HostContext())
    assert made is not None
    assert made.ids == batch.ids
    assert [s.tolist() for s in made.sequences("kl_completion")] == [
        [4, 5, 6],
        [7],
        [8],
        [9],
        [1, 2],
        [3],
    ]
    assert made.group_of("kl_completion").tolist() == [0, 1, 1, 1, 2, 2]
    assert made.data["kl_mask"].tolist() == [1.0] * 9
    assert batch.update(made).ids == batch.ids


def test_mismatch_takes_the_mask_along() -> None:
    masks = [[[1.0, 0.0], [1.0]], [[0.0, 0.0, 1.0]], [[1.0], [1.0], [0.0]]]
    batch = grouped("completion", COMPLETIONS, torch.int64).update(grouped("loss_mask", masks))
    made = kto_mismatch(batch, HostContext())
    assert made.data["kl_mask"].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def scored(
    logprobs: list[list[list[float]]],
    reference: list[list[list[float]]],
    mask: list[list[list[float]]],
) -> SequenceSample:
    made = grouped("kl_logprobs", logprobs).update(grouped("kl_ref_logprobs", reference))
    return made.update(grouped("kl_mask", mask))


def test_the_baseline_by_hand() -> None:
    # Differences 0.5 + 0.25 (one of 9 masked) and -0.25: mean of 0.75 and -0.25 is 0.25.
    batch = scored(
        [[[-1.0, -1.0, 0.0]], [[-1.0]]],
        [[[-1.5, -1.25, -9.0]], [[-0.75]]],
        [[[1.0, 1.0, 0.0]], [[1.0]]],
    )
    context = HostContext()
    made = kto_baseline(batch, context)
    assert made.data["kl_baseline"].tolist() == [0.25, 0.25]
    assert made.lengths["kl_baseline"].tolist() == [1, 1]
    assert context.metrics == {"kl_baseline": 0.25}


def test_the_baseline_is_never_negative() -> None:
    made = kto_baseline(scored([[[-2.0]]], [[[-1.0]]], [[[1.0]]]), HostContext())
    assert made.data["kl_baseline"].tolist() == [0.0]


def test_a_batch_of_one_has_a_baseline_of_zero() -> None:
    batch = kto_mismatch(grouped("completion", [[[1, 2]]], torch.int64), HostContext())
    assert batch.data["kl_mask"].tolist() == [0.0, 0.0]
    made = kto_baseline(scored([[[-1.0, -1.0]]], [[[-5.0, -5.0]]], [[[0.0, 0.0]]]), HostContext())
    assert made.data["kl_baseline"].tolist() == [0.0]


def test_scores_of_different_completions_are_refused() -> None:
    made = grouped("kl_logprobs", [[[1.0, 2.0]]]).update(grouped("kl_ref_logprobs", [[[1.0]]]))
    with pytest.raises(DataError, match="kl_completion"):
        kto_baseline(made, HostContext())
