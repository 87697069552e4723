"""State without pickle, tensors by id and key, metrics of a step, and frequencies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.data.sample import SequenceSample
from weft.errors import DataError, RunError
from weft.runtime.checkpoints import read_state, write_state
from weft.runtime.firings import FiringMetrics, StepLedger, join_metrics
from weft.runtime.schedule import ActionFrequency
from weft.runtime.store import TensorStore


def sample(ids, key="x", shift=0, **metadata):
    lengths = [i % 3 + 1 for i in range(len(ids))]
    return SequenceSample.from_default(
        ids, {key: lengths}, {key: torch.arange(sum(lengths)) + shift}, metadata
    )


def test_state_comes_back_exactly(tmp_path):
    state = {
        "kl": 0.1 + 0.2,
        "count": 3,
        "name": "x",
        "none": None,
        "list": [1, {"mean": np.array([0.1, 0.2])}],
        "tensor": torch.tensor([1.5], dtype=torch.bfloat16),
        "scalar": np.float64(1 / 3),
    }
    write_state(tmp_path / "s", state)
    back = read_state(tmp_path / "s")
    assert back["kl"] == state["kl"] and back["scalar"] == 1 / 3 and back["none"] is None
    assert isinstance(back["list"][1]["mean"], np.ndarray) and np.array_equal(
        back["list"][1]["mean"], [0.1, 0.2]
    )
    assert back["tensor"].dtype == torch.bfloat16 and torch.equal(back["tensor"], state["tensor"])


@pytest.mark.parametrize(
    ("state", "words"),
    [({"a": {1: 2}}, r"state\.a"), ({"a": [object()]}, r"state\.a\[0\] is a object")],
)
def test_state_that_cannot_be_kept_names_its_place(tmp_path, state, words):
    with pytest.raises(RunError, match=words):
        write_state(tmp_path / "s", state)


def test_the_store_joins_batches_and_forgets_ids():
    store = TensorStore()
    store.put(sample(["a", "b", "c"], answer=[1, 2, 3]))
    store.put(sample(["c", "d"], shift=10, answer=[3, 4]))  # c again: the newer values hold
    store.put(sample(["d", "a"], key="y", shift=100))
    got = store.fetch(["d", "a"], ["x", "y"])
    assert got.ids == ("d", "a") and got.metadata["answer"] == (4, 1)
    assert got.data["x"].tolist() == [11, 12, 0] and got.data["y"].tolist() == [100, 101, 102]
    assert store.fetch(["c"], ["x"], ["y"]).keys == ("x",), "c has no y, which is optional"
    with pytest.raises(DataError, match="'c' has no key 'y'"):
        store.fetch(["a", "c"], ["y"])
    keys = {id: batch.keys for batch in store.iterate_batches() for id in batch.ids}
    assert keys == {"a": ("x", "y"), "b": ("x",), "c": ("x",), "d": ("x", "y")}
    kept = {id: store.fetch([id], keys[id]) for id in "abcd"}
    restored = TensorStore()
    for batch in store.iterate_batches():
        restored.put(SequenceSample.from_bytes(batch.to_bytes()))
    assert keys == {id: batch.keys for batch in restored.iterate_batches() for id in batch.ids}
    for id, one in kept.items():
        again = restored.fetch([id], keys[id])
        assert again.metadata == one.metadata and all(
            torch.equal(again.data[k], one.data[k]) for k in one.keys
        )
    store.discard(["a", "b", "c", "d"])
    assert len(store) == 0 and not store._batches and not any(map(len, store._readers))
    with pytest.raises(DataError, match="'a' is not in the store"):
        store.fetch(["a"], [])


def test_a_batch_whose_keys_were_all_replaced_is_let_go():
    """As where a call announces ids and then returns them all."""
    store, whole = TensorStore(), SequenceSample.from_default(["a", "b"], [1, 1], {"x": [1, 2]})
    store.put(whole.select(ids=["a"]))
    store.put(whole)
    assert len(list(store._batches)) == 1
    assert store.fetch(["a", "b"], ["x"]).data["x"].tolist() == [1, 2]
    store.put(SequenceSample.from_default(["a"], [1], {"y": [3]}))
    store.put(SequenceSample.from_default(["b"], [1], {"x": [4]}))
    assert store.fetch(["b", "a"], ["x"]).data["x"].tolist() == [4, 1] and len(store._batches) == 3
    store.discard(["a", "b"])
    assert not store._batches


def test_a_step_of_several_firings_is_one_line():
    metrics = StepLedger()
    metrics.record_measurements(
        "gen",
        FiringMetrics(
            {"reward": 1.0, "num_tokens": 10, "ratio_max": 2.0, "learning_rate": 0.1}, 3, 1.5
        ),
    )
    metrics.record_measurements(
        "gen",
        FiringMetrics(
            {"reward": 5.0, "num_tokens": 4, "ratio_max": 1.0, "learning_rate": 0.2}, 1, 0.5
        ),
    )
    assert metrics.close_step() == {
        "time/gen": 2.0,
        "gen/reward": 2.0,
        "gen/num_tokens": 14,
        "gen/ratio_max": 2.0,
        "gen/learning_rate": 0.2,
    }
    assert metrics.close_step() == {}
    assert join_metrics([FiringMetrics({"a": 1.0}, 2, 0), FiringMetrics({"b": 3.0}, 2, 0)]) == {
        "a": 1.0,
        "b": 3.0,
    }


def test_frequencies():
    every = ActionFrequency(steps=3, epochs=2)
    due = [step for step in range(1, 13) if every.check_due(step, epochs_done=step // 4)]
    assert due == [3, 6, 8, 9, 12], "each third step, and the end of the second epoch"
    timed = ActionFrequency(secs=0.0)
    assert timed.check_due(1, 0)
    slow = ActionFrequency(secs=1000.0)
    assert not slow.check_due(1, 0)
    slow.load_state_dict({"last_epochs": 0, "elapsed": 1001.0})
    assert slow.check_due(2, 0) and not slow.check_due(3, 0)
