"""A sample of numpy arrays and one of torch tensors: operations agree, and keep the kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from weft.data.sample import SequenceSample
from weft.errors import DataError

KINDS: dict[str, type[Any]] = {"numpy": np.ndarray, "torch": torch.Tensor}


def sample(kind: str) -> SequenceSample:
    """Return three prompts with 2, 1 and 3 completions."""
    counts = [[2, 3], [1], [2, 2, 4]]
    made = SequenceSample.from_groups(
        ["a", "b", "c"],
        {
            "prompt": [[3], [0], [2]],
            "completion": counts,
            "logprobs": counts,
            "rewards": [[1] * len(c) for c in counts],
        },
        {
            "prompt": torch.arange(5),
            "completion": torch.arange(14),
            "logprobs": torch.linspace(-1, 0, 14),
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0]),
        },
        {"answer": ["x", "y", "z"]},
    )
    return made.numpy() if kind == "numpy" else made


OPERATIONS: dict[str, Callable[[SequenceSample], list[SequenceSample]]] = {
    "select ids": lambda s: [s.select(ids=["c", "a"])],
    "select consecutive ids": lambda s: [s.select(ids=["a", "b"])],
    "select no ids": lambda s: [s.select(ids=[])],
    "select keys": lambda s: [s.select(keys=["completion"])],
    "split": lambda s: s.split(2),
    "split_by_tokens": lambda s: s.split_by_tokens(20),
    "unpack": lambda s: s.unpack(),
    "gather": lambda s: [SequenceSample.gather(s.unpack())],
    "ungroup": lambda s: [s.ungroup(8)],
    "regroup": lambda s: [s.ungroup(8).regroup()],
    "like": lambda s: [s.like("completion", advantages=np.arange(14.0, dtype=np.float32))],
    "one_per": lambda s: [s.one_per("completion", rank=torch.arange(6))],
    "update": lambda s: [s.update(s.one_per("prompt", kept=np.ones(3)))],
    "remap_keys": lambda s: [s.remap_keys({"logprobs": "old_logprobs"})],
    "bytes": lambda s: [SequenceSample.from_bytes(s.to_bytes("zlib"))],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_the_kind_and_gives_the_same(name: str, kind: str) -> None:
    made, plain = OPERATIONS[name](sample(kind)), OPERATIONS[name](sample("torch"))
    assert len(made) == len(plain)
    for one, other in zip(made, plain, strict=True):
        assert one.ids == other.ids
        assert set(one.data) == set(other.data)
        for key, values in one.data.items():
            assert isinstance(values, KINDS[kind]), key
            assert values.tolist() == other.data[key].tolist()
            assert one.lengths[key].tolist() == other.lengths[key].tolist()
            assert [each.tolist() for each in one.sequences(key)] == [
                each.tolist() for each in other.sequences(key)
            ]


def test_a_batch_of_both_kinds_is_joined_in_the_kind_of_the_first() -> None:
    for first, second in (("numpy", "torch"), ("torch", "numpy")):
        joined = SequenceSample.gather(
            [sample(first).select(ids=["a"]), sample(second).select(ids=["b", "c"])]
        )
        assert all(isinstance(values, KINDS[first]) for values in joined.data.values())
        assert joined.data["completion"].tolist() == list(range(14))


def test_like_has_the_ids_groups_and_lengths_of_a_key() -> None:
    batch = sample("torch")
    made = batch.like("logprobs", advantages=np.zeros(14), weights=torch.ones(14))
    assert made.ids == batch.ids
    assert made.keys == ("advantages", "weights")
    assert [each.tolist() for each in made.seqlens["advantages"]] == [[2, 3], [1], [2, 2, 4]]
    assert batch.update(made).num_tokens("weights") == 14
    alone = batch.meta().like("completion", mask=[1.0] * 14)
    assert isinstance(alone.data["mask"], torch.Tensor)


def test_one_per_has_one_value_a_sequence() -> None:
    made = sample("torch").one_per("completion", scores=np.arange(6.0))
    assert [each.tolist() for each in made.seqlens["scores"]] == [[1, 1], [1], [1, 1, 1]]
    assert sample("torch").one_per("prompt", kept=[1, 0, 1]).seqlens["kept"][1].tolist() == [1]


def test_values_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match=r"'advantages'.*sum to 14"):
        sample("torch").like("completion", advantages=np.zeros(13))
    with pytest.raises(DataError, match="no key 'complition'; did you mean completion"):
        sample("torch").like("complition", advantages=np.zeros(14))
