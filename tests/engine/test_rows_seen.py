"""What training keeps of a few ids."""

from __future__ import annotations

import random

import torch

from weft.data.sample import SequenceSample
from weft.engine.rows import KEPT_IDS, KEPT_TOKENS, choose_ids, keep_outputs


def part(*groups: list[int]) -> SequenceSample:
    tokens = sum(sum(group) for group in groups)
    ids = [str(i) for i in range(len(groups))]
    return SequenceSample.from_groups(
        ids, {"completion": list(groups)}, {"completion": torch.zeros(tokens)}
    )


def test_outputs_of_chosen_ids_are_kept_without_their_gradient() -> None:
    out = {
        "logprobs": torch.arange(20.0, requires_grad=True),
        "scores": torch.arange(5.0),
        "entropy": torch.zeros(20),
    }
    seen = keep_outputs(part([2, 3], [4], [6], [5]), out, ["3", "0", "7"])
    assert seen is not None and seen.ids == ("0", "3") and set(seen.keys) == {"logprobs", "scores"}
    assert not seen.data["logprobs"].requires_grad
    assert [values.tolist() for values in seen.select(ids=["0"]).sequences("logprobs")] == [
        [0, 1],
        [2, 3, 4],
    ]
    assert [values.tolist() for values in seen.select(ids=["3"]).sequences("logprobs")] == [
        [15, 16, 17, 18, 19]
    ]
    assert [values.tolist() for values in seen.select(ids=["3"]).sequences("scores")] == [[4]]


def test_nothing_is_kept_of_other_ids_very_long_ones_and_other_outputs() -> None:
    assert keep_outputs(part([1], [2]), {"scores": torch.zeros(2)}, ["2"]) is None
    assert (
        keep_outputs(part([KEPT_TOKENS + 1]), {"logprobs": torch.zeros(KEPT_TOKENS + 1)}, ["0"])
        is None
    )
    assert keep_outputs(part([1]), {"values": torch.zeros(1)}, ["0"]) is None


def test_the_choice_does_not_depend_on_how_ids_are_divided() -> None:
    ids = [f"row {i}" for i in range(100)] + ["\ud800"]
    whole = choose_ids(ids)
    assert len(whole) == KEPT_IDS
    for seed in range(20):
        random.Random(seed).shuffle(ids)
        cut = 7 * seed
        assert choose_ids([*choose_ids(ids[cut:]), *choose_ids(ids[:cut])]) == whole
