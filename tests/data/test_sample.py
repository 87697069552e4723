"""Properties of SequenceSample, for random groups of random shape."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.work import calls_of
from weft.data.sample import SequenceSample
from weft.errors import ConfigError, DataError

lengths = st.integers(0, 6)


@st.composite
def samples(draw: st.DrawFn, min_ids: int = 1, max_ids: int = 7) -> SequenceSample:
    """Groups of 1 to 4 completions with a prompt, a mask, a float key with a trailing dim,
    per-sequence values, metadata.
    """
    count = draw(st.integers(min_ids, max_ids))
    prompts = [[draw(lengths)] for _ in range(count)]
    completions = [draw(st.lists(lengths, min_size=1, max_size=4)) for _ in range(count)]
    ones = [[1] * len(group) for group in completions]
    num_p, num_c, num_s = (sum(map(sum, groups)) for groups in (prompts, completions, ones))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    data = {
        "prompt": torch.arange(num_p),
        "completion": torch.arange(num_c) + 1000,
        "loss_mask": torch.from_numpy(rng.integers(0, 2, num_c).astype(np.float32)),
        "hidden": torch.from_numpy(rng.normal(size=(num_c, 2))).to(torch.bfloat16),
        "rewards": torch.from_numpy(rng.normal(size=num_s).astype(np.float32)),
    }
    seqlens = {
        "prompt": prompts,
        "completion": completions,
        "loss_mask": completions,
        "hidden": completions,
        "rewards": ones,
    }
    ids = [f"s/{i}" for i in range(count)]
    return SequenceSample.from_groups(
        ids, seqlens, data, {"answer": [f"a{i}" for i in range(count)], "n": list(range(count))}
    )


def same(one: SequenceSample, other: SequenceSample) -> None:
    assert one.ids == other.ids
    assert set(one.keys) == set(other.keys)
    assert dict(one.metadata) == dict(other.metadata)
    assert set(one.data) == set(other.data)
    for key in one.keys:
        np.testing.assert_array_equal(one.lengths[key], other.lengths[key])
        np.testing.assert_array_equal(one.offsets[key], other.offsets[key])
    for key, value in one.data.items():
        assert value.dtype == other.data[key].dtype
        assert torch.equal(value, other.data[key]), key


@settings(deadline=None)
@given(samples(), st.data())
def test_gather_undoes_split(sample: SequenceSample, data: st.DataObject) -> None:
    parts = sample.split(data.draw(st.integers(1, sample.num_ids)))
    assert all(part.num_ids for part in parts)
    same(SequenceSample.gather(parts), sample)
    same(SequenceSample.gather(sample.unpack()), sample)


@settings(deadline=None)
@given(samples(), st.integers(0, 60))
def test_split_by_tokens_keeps_the_budget(sample: SequenceSample, budget: int) -> None:
    if budget < sample.token_costs().max():
        with pytest.raises(ConfigError, match="max_tokens_per_microbatch"):
            sample.split_by_tokens(budget)
        return
    parts = sample.split_by_tokens(budget)
    assert all(part.token_costs().sum() <= budget for part in parts)
    same(SequenceSample.gather(parts), sample)


@settings(deadline=None)
@given(samples(), st.integers(12, 60), st.randoms())
def test_regroup_undoes_ungroup(sample: SequenceSample, budget: int, random: Any) -> None:
    parts = sample.ungroup(budget)
    assert parts.token_costs().max() <= budget
    assert parts.num_tokens("completion") == sample.num_tokens("completion")
    same(parts.regroup(), sample)
    shuffled = list(parts.ids)
    random.shuffle(shuffled)
    again = parts.select(ids=shuffled).regroup()
    same(again.select(ids=sample.ids), sample)


@settings(deadline=None)
@given(samples(), st.integers(12, 30))
def test_keys_made_on_parts_come_back_by_completion(sample: SequenceSample, budget: int) -> None:
    parts = sample.ungroup(budget)
    lengths = [group.tolist() for group in parts.seqlens["completion"]]
    made = SequenceSample.from_groups(
        parts.ids, {"logprobs": lengths}, {"logprobs": parts.data["completion"] * 0.5}
    )
    whole = parts.update(made).regroup()
    assert torch.equal(whole.data["logprobs"], sample.data["completion"] * 0.5)
    np.testing.assert_array_equal(whole.offsets["logprobs"], sample.offsets["completion"])


def test_a_part_holds_the_prompt_and_says_where_it_is_from() -> None:
    sample = SequenceSample.from_groups(
        ["a", "b"],
        {"prompt": [[2], [1]], "completion": [[3, 3, 3], [1]]},
        {"prompt": [1, 2, 3], "completion": [1, 1, 1, 2, 2, 2, 3, 3, 3, 9]},
    )
    parts = sample.ungroup(10)
    assert parts.ids == ("a[0:2]", "a[2:3]", "b[0:1]") or parts.ids == (
        "a[0:1]",
        "a[1:3]",
        "b[0:1]",
    )
    assert [t.tolist() for t in parts.sequences("prompt")] == [[1, 2], [1, 2], [3]]
    assert parts.metadata["part"][0]["id"] == "a" and parts.metadata["part"][2]["count"] == 1
    with pytest.raises(DataError, match="3 completions, but its parts are"):
        parts.select(ids=parts.ids[1:]).regroup()
    with pytest.raises(ConfigError, match=r"max_tokens_per_microbatch=4.*5 tokens"):
        sample.ungroup(4)


@settings(deadline=None)
@given(samples(), st.sampled_from([None, "zlib"]))
def test_bytes_round_trip(sample: SequenceSample, compression: str | None) -> None:
    raw = sample.to_bytes(compression)
    same(SequenceSample.from_bytes(raw), sample)
    same(SequenceSample.from_bytes(sample.meta().to_bytes(compression)), sample.meta())
    same(pickle.loads(pickle.dumps(sample)), sample)


def test_bytes_that_are_no_sample_are_refused() -> None:
    sample = SequenceSample.from_default(["a"], [3], {"completion": torch.arange(3)})
    with pytest.raises(DataError, match="not a SequenceSample"):
        SequenceSample.from_bytes(pickle.dumps(sample))
    with pytest.raises(DataError, match="end within key"):
        SequenceSample.from_bytes(sample.to_bytes()[:-1])
    with pytest.raises(DataError, match="JSON values"):
        SequenceSample.from_default(["a"], [1], {"x": [1]}, {"m": [object()]}).to_bytes()
    with pytest.raises(DataError, match="compression"):
        sample.to_bytes("lzma")


@settings(deadline=None)
@given(samples(), st.randoms())
def test_update_joins_by_id(sample: SequenceSample, random: Any) -> None:
    order = list(sample.ids)
    random.shuffle(order)
    scores = SequenceSample.from_default(
        order, [1] * len(order), {"score": torch.tensor([float(i[2:]) for i in order])}
    )
    joined = sample.update(scores)
    assert joined.data["score"].tolist() == [float(i[2:]) for i in sample.ids]
    same(joined.select(keys=sample.keys), sample)


@settings(deadline=None)
@given(samples(min_ids=2))
def test_select_takes_ids_in_the_order_asked(sample: SequenceSample) -> None:
    backwards = sample.select(ids=sample.ids[::-1])
    same(backwards.select(ids=sample.ids), sample)
    one = sample.select(ids=[sample.ids[1]], keys=["completion"])
    assert one.keys == ("completion",)
    same(one, sample.unpack()[1].select(keys=["completion"]))


def test_a_tensor_of_another_length_is_an_error_that_names_the_key() -> None:
    with pytest.raises(DataError, match=r"'loss_mask'.*\(4,\).*sum to 5"):
        SequenceSample.from_default(
            ["a", "b"], [2, 3], {"completion": torch.arange(5), "loss_mask": torch.ones(4)}
        )
    with pytest.raises(DataError, match=r"'x'.*2 lengths.*3 ids"):
        SequenceSample.from_default(["a", "b", "c"], {"x": [1, 2]}, {"x": torch.ones(3)})
    with pytest.raises(DataError, match="more than once"):
        SequenceSample.from_default(["a", "a"], [1, 1], {"x": torch.ones(2)})
    with pytest.raises(DataError, match="ids are texts"):
        SequenceSample.from_default([1.5], [1], {"x": torch.ones(1)})  # type: ignore[list-item]
    with pytest.raises(DataError, match="metadata 'answer' has 1 values for 2 ids"):
        SequenceSample.from_default(["a", "b"], [1, 1], {"x": torch.ones(2)}, {"answer": ["one"]})


def test_unknown_keys_and_ids_are_named() -> None:
    sample = SequenceSample.from_default(["a"], [2], {"completion": torch.arange(2)})
    with pytest.raises(DataError, match="no key 'completions'; did you mean completion"):
        sample.num_tokens("completions")
    with pytest.raises(DataError, match="has lengths, but"):
        sample.meta().sequences("completion")
    with pytest.raises(DataError, match=r"\['b'\] are not in"):
        sample.select(ids=["b"])
    with pytest.raises(DataError, match="same ids"):
        sample.update(SequenceSample.from_default(["b"], [1], {"x": [1]}))
    with pytest.raises(DataError, match="same name"):
        sample.update(SequenceSample.from_default(["a"], [1], {"x": [1]})).remap_keys(
            {"x": "completion"}
        )
    other = SequenceSample.from_default(["b"], [2], {"answer": torch.arange(2)})
    with pytest.raises(DataError, match=r"differ in the keys \['answer', 'completion'\]"):
        SequenceSample.gather([sample, other])


def test_it_cannot_be_changed() -> None:
    sample = SequenceSample.from_default(["a"], [2], {"completion": torch.arange(2)}, {"m": [1]})
    with pytest.raises(AttributeError):
        sample.ids = ("b",)  # type: ignore[misc]
    with pytest.raises(TypeError):
        sample.data["other"] = torch.arange(2)  # type: ignore[index]
    with pytest.raises(ValueError):
        sample.lengths["completion"][0] = 5
    renamed = sample.remap_keys({"completion": "answer"})
    assert (sample.keys, renamed.keys) == (("completion",), ("answer",))


def test_views_and_descriptions() -> None:
    sample = SequenceSample.from_groups(
        ["a", "b"], {"completion": [[2, 1], [3]]}, {"completion": torch.arange(6)}
    )
    assert [s.tolist() for s in sample.sequences("completion")] == [[0, 1], [2], [3, 4, 5]]
    assert sample.sequences("completion")[2].data_ptr() == sample.data["completion"][3:].data_ptr()
    assert sample.group_of("completion").tolist() == [0, 0, 1]
    assert [v.tolist() for v in sample.seqlens["completion"]] == [[2, 1], [3]]
    assert sample.meta().data == {} and sample.meta().num_tokens() == 6
    assert sample.to("cpu").data["completion"].tolist() == list(range(6))


def test_gather_fills_metadata_that_a_source_lacks() -> None:
    one = SequenceSample.from_default(["a"], [1], {"x": [1]}, {"answer": ["4"]})
    two = SequenceSample.from_default(["b"], [1], {"x": [2]}, {"source": ["s"]})
    assert dict(SequenceSample.gather([one, two]).metadata) == {
        "answer": ("4", None),
        "source": (None, "s"),
    }


def test_ten_thousand_ids_are_split_without_a_call_for_each() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 100, 10_000)
    sample = SequenceSample.from_default(
        [str(i) for i in range(10_000)], sizes.tolist(), {"completion": torch.arange(sizes.sum())}
    )
    assert calls_of(lambda: sample.split(8)) < 5_000
    parts = sample.split(8)
    loads = [part.token_costs().sum() for part in parts]
    assert max(loads) - min(loads) < 200
