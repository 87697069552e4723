"""Where a batch is split: minibatches, data-parallel ranks, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interfaces.test_train import batch_of
from tests.runtime.toy import Toy, ToyTrain
from weft.data.sample import SequenceSample
from weft.interfaces.base import MFCResult, Minibatches
from weft.interfaces.train import TrainInterface
from weft.runtime.calls import TaskFinished
from weft.runtime.split import (
    collect_owners,
    join_outputs,
    split,
    split_completions,
    split_minibatches,
    split_over_ranks,
    take_samples,
)


def ids_of(parts: list[SequenceSample]) -> list[list[str]]:
    return [list(part.ids) for part in parts]


def one_rank(batch: SequenceSample, wanted: Minibatches, step: int = 0) -> list[SequenceSample]:
    return [part for (part,) in split(batch, wanted, 1, seed=7, role="actor", step=step)]


def test_minibatches_keep_groups_whole_where_they_divide() -> None:
    batch = batch_of([[1, 2], [3, 4], [5, 6], [7, 8]])
    assert ids_of(split_minibatches(batch, 2, "sequence")) == [["a", "b"], ["c", "d"]]
    assert ids_of(split_minibatches(batch, 1, "sequence")) == [["a", "b", "c", "d"]]


def test_completions_are_dealt_singly_where_groups_do_not_divide() -> None:
    parts = split_minibatches(batch_of([[1, 2], [3, 4], [5, 6]]), 2, "sequence")
    assert ids_of(parts) == [["a[0]", "a[1]", "b[0]"], ["b[1]", "c[0]", "c[1]"]]
    assert [p.lengths["completion"].tolist() for p in parts] == [[1, 2, 3], [4, 5, 6]]


def test_groups_that_a_loss_needs_whole_stay_whole() -> None:
    parts = split_minibatches(batch_of([[1, 2], [3, 4], [5, 6]]), 2, "group")
    assert ids_of(parts) == [["a", "b"], ["c"]]


def test_single_completions_hold_the_same_tokens_with_their_prompt_and_columns() -> None:
    batch = batch_of(
        [[1, 2], [3]], advantages=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], rewards=[7.0, 8.0, 9.0]
    )
    single = split_completions(batch)
    assert single.ids == ("a[0]", "a[1]", "b[0]")
    assert [s.tolist() for s in single.sequences("prompt")] == [[0, 1], [0, 1], [2, 3]]
    assert [s.tolist() for s in single.sequences("completion")] == [[0], [1, 2], [3, 4, 5]]
    assert [s.tolist() for s in single.sequences("advantages")] == [
        [0.0],
        [1.0, 2.0],
        [3.0, 4.0, 5.0],
    ]
    assert single.data["rewards"].tolist() == [7.0, 8.0, 9.0]
    assert single.metadata["answer"] == ("a!", "a!", "b!")


def test_every_epoch_sees_every_completion_once_in_an_order_of_its_own() -> None:
    batch, wanted = batch_of([[1]] * 16), Minibatches(count=4, epochs=3)
    parts = one_rank(batch, wanted)
    assert [p.num_ids for p in parts] == [4] * 12
    epochs = [[id for ids in ids_of(parts[i : i + 4]) for id in ids] for i in (0, 4, 8)]
    assert epochs[0] == list(batch.ids)
    assert all(sorted(order) == sorted(batch.ids) for order in epochs)
    assert epochs[1] != epochs[0] and epochs[2] != epochs[1]
    assert ids_of(one_rank(batch, wanted)) == ids_of(parts)
    assert ids_of(one_rank(batch, wanted, step=1)) != ids_of(parts)


def test_mini_batch_size_counts_completions() -> None:
    wanted = TrainInterface("sft", mini_batch_size=4).minibatches()
    assert wanted.unit == "sequence"
    counts = [
        [p.num_sequences() for p in one_rank(batch_of([[1, 1]] * ids), wanted)] for ids in (8, 3)
    ]
    assert counts == [[4, 4, 4, 4], [3, 3]], "the short last batch of an epoch"


def test_a_batch_smaller_than_its_minibatches_makes_fewer() -> None:
    assert [p.num_ids for p in one_rank(batch_of([[1], [1]]), Minibatches(count=4))] == [1, 1]


GROUPS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=24)


@settings(max_examples=80, deadline=None)
@given(
    GROUPS,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 2),
    st.sampled_from(["group", "sequence"]),
)
def test_ranks_share_every_minibatch(
    groups: list[list[int]], count: int, ranks: int, epochs: int, unit: Any
) -> None:
    """By description, as the Master does it; then with the data."""
    batch = batch_of(groups, rewards=[float(i) for i in range(sum(map(len, groups)))])
    wanted = Minibatches(count, epochs=epochs, unit=unit)
    parts = split(batch.meta(), wanted, ranks, seed=1, role="actor", step=3)
    whole = split(batch.meta(), wanted, 1, seed=1, role="actor", step=3)
    assert [len(each) for each in parts] == [ranks] * len(whole)
    assert collect_owners(
        [part for each in parts[: len(whole) // epochs] for part in each]
    ) == list(batch.ids)
    for shares, (minibatch,) in zip(parts, whole, strict=True):
        costs = [int(share.token_costs().sum()) for share in shares]
        assert sum(costs) == minibatch.token_costs().sum(), "every token is on one rank"
        largest = max(
            int(split_completions(share).token_costs().max(initial=0)) for share in shares
        )
        if unit == "group" or minibatch.num_ids >= ranks:
            assert [id for share in shares for id in share.ids] == list(minibatch.ids), (
                "groups stay whole and in order"
            )
            largest = int(minibatch.token_costs().max())
        assert max(costs) <= sum(costs) / ranks + largest, "as even as the largest thing allows"
        given = take_samples(batch, [share for share in shares if share.num_ids])
        back = split_completions(join_outputs(given, [id for part in given for id in part.ids]))
        same = split_completions(take_samples(batch, [minibatch])[0])
        for key in ("prompt", "completion", "rewards"):
            assert torch.equal(back.data[key], same.data[key]), (
                "what ranks hold together is the minibatch"
            )


def test_results_come_back_in_the_order_of_the_batch() -> None:
    batch = batch_of([[1], [9], [2], [5], [7]])
    (shares,) = split(batch, Minibatches(), 3, seed=0, role="ref", step=0)
    assert [int(share.token_costs().sum()) for share in shares] == [14, 11, 9]
    shuffled = [share.select(ids=share.ids[::-1], keys=["completion"]) for share in shares][::-1]
    joined = join_outputs([None, *shuffled], batch.ids)
    assert joined is not None and joined.ids == batch.ids
    assert torch.equal(joined.data["completion"], batch.data["completion"])
    assert join_outputs([None, None], batch.ids) is None


def test_ranks_without_anything_get_an_empty_part() -> None:
    shares = split_over_ranks(batch_of([[3, 4]]), 3, "sequence")
    assert ids_of(shares) == [["a[0]"], ["a[1]"], []]
    assert ids_of(split_over_ranks(batch_of([[3, 4]]), 2, "group")) == [["a"], []]


def test_a_worker_gets_single_completions_with_their_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups of two in two minibatches: what the Master described by lengths alone is cut
    where the tensors are.
    """
    group = Toy(tmp_path).session()._group
    batch = batch_of([[1, 2], [3, 4], [5, 6]])
    given: list[SequenceSample] = []

    def train_step(self: Any, model: Any, minibatches: list[SequenceSample]) -> MFCResult:
        given.extend(minibatches)
        return MFCResult()

    monkeypatch.setattr(ToyTrain, "train_step", train_step)
    monkeypatch.setattr(
        "weft.runtime.worker.read_inputs", lambda store, node, ids: store.fetch(ids, batch.keys)
    )
    group.put(batch)
    group.submit(
        "train",
        0,
        split(batch.meta(), Minibatches(2, unit="sequence"), 1, seed=0, role="actor", step=0),
    )
    events = [group.events.get(timeout=20.0) for _ in range(2)]
    assert isinstance(events[1], TaskFinished)
    assert ids_of(given) == [["a[0]", "a[1]", "b[0]"], ["b[1]", "c[0]", "c[1]"]]
    assert [each.data["completion"].tolist() for each in given] == [[*range(6)], [*range(6, 21)]]
