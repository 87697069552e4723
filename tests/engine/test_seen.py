"""What training keeps of a few ids."""

from __future__ import annotations

import torch

from weft.data.sample import SequenceSample
from weft.engine.seen import IDS, TOKENS, first_ids


def part(*groups: list[int]) -> SequenceSample:
    tokens = sum(sum(group) for group in groups)
    ids = [str(i) for i in range(len(groups))]
    return SequenceSample.from_groups(ids, {"completion": list(groups)}, {"completion": torch.zeros(tokens)})


def test_outputs_of_the_first_ids_are_kept_without_their_gradient() -> None:
    out = {"logprobs": torch.arange(20.0, requires_grad=True), "scores": torch.arange(5.0), "entropy": torch.zeros(20)}
    seen = first_ids(part([2, 3], [4], [6], [5]), out)
    assert seen is not None and seen.ids == ("0", "1", "2", "3") and set(seen.keys) == {"logprobs", "scores"}
    assert not seen.data["logprobs"].requires_grad
    assert [values.tolist() for values in seen.select(ids=["0"]).sequences("logprobs")] == [[0, 1], [2, 3, 4]]
    assert [values.tolist() for values in seen.select(ids=["1"]).sequences("scores")] == [[2]]


def test_it_is_a_few_ids_and_tokens_whatever_the_batch() -> None:
    many = first_ids(part(*[[1]] * 50), {"scores": torch.zeros(50)})
    assert many is not None and many.num_ids == IDS
    long = first_ids(part([TOKENS + 1], [1]), {"logprobs": torch.zeros(TOKENS + 2)})
    assert long is not None and long.ids == ("0",), "one id is always there"
    assert first_ids(part([1]), {"values": torch.zeros(1)}) is None
