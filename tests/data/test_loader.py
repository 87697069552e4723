"""Batches: equal in every run, with another part of each source every epoch, and resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batches import BatchingOptions, BatchLoader, MapLoader, SourceSubset, StreamLoader
from weft.data.datasets.base import DatasetUtility
from weft.data.loader import LoadedData, load_data
from weft.data.mixture import SourceShare, compute_epoch_order, count_per_epoch, hold_out
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec, SourceSpec, parse_sources
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError, UserError
from weft.options import validate
from weft.registry import register_dataset

Make = Callable[..., Tokenizer]


class Numbers:
    """Map-style dataset of `count` samples; sample i has i % 7 + 1 tokens."""

    def __init__(self, count: int, name: str = "n") -> None:
        self.count, self.name = count, name

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> SequenceSample:
        size = index % 7 + 1
        return SequenceSample.from_default(
            [f"{self.name}{index}"], [size], {"completion": torch.full((size,), index)}
        )


class Batches:
    """Iterable dataset of `count` batches of 1 to 3 ids, which differ by epoch if `fresh`."""

    def __init__(self, count: int, fresh: bool = False) -> None:
        self.count, self.first, self.fresh = count, 0, fresh

    def set_epoch(self, epoch: int) -> None:
        self.first = 1000 * epoch if self.fresh else 0

    def __iter__(self) -> Iterator[SequenceSample]:
        for batch in range(self.count):
            ids = [f"{self.first + batch}-{i}" for i in range(batch % 3 + 1)]
            yield SequenceSample.from_default(ids, [1] * len(ids), {"completion": [0] * len(ids)})


def loader(
    counts: list[int], batching: BatchingOptions, seed: int = 1, shuffle: bool = True, **share: Any
) -> MapLoader:
    parts = [
        SourceSubset(f"s{i}", Numbers(n), np.arange(n), prefix=len(counts) > 1)
        for i, n in enumerate(counts)
    ]
    shares = [SourceShare(part.name, len(part), **share) for part in parts]
    return MapLoader(parts, shares, batching, seed=seed, shuffle=shuffle)


def epoch_of(source: BatchLoader) -> list[tuple[str, ...]]:
    """Return the ids of each batch of one epoch."""
    batches = [source.next_batch().ids]
    while not source.epoch_done:
        batches.append(source.next_batch().ids)
    return batches


batchings = st.one_of(
    st.builds(BatchingOptions, st.integers(1, 9)),
    st.builds(BatchingOptions, st.none(), st.integers(7, 40)),
)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    batchings,
    st.integers(0, 99),
    st.booleans(),
)
def test_an_epoch_holds_every_id_once(
    counts: list[int], batching: BatchingOptions, seed: int, shuffle: bool
) -> None:
    source = loader(counts, batching, seed, shuffle)
    for number in range(2):
        assert source.epoch == number
        expected = source.batches_per_epoch
        batches = epoch_of(source)
        assert len(batches) == expected
        ids = [id for batch in batches for id in batch]
        assert len(ids) == len(set(ids)) == sum(counts) == source.num_ids
    assert source.count_batches(2) == sum(
        source.count_batches(n + 1) - source.count_batches(n) for n in range(2)
    )


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=2), batchings, st.integers(0, 9), st.data())
def test_the_position_is_exact_everywhere(
    counts: list[int], batching: BatchingOptions, seed: int, data: st.DataObject
) -> None:
    share = data.draw(st.sampled_from([{}, {"fraction": 0.5}]))
    source = loader(counts, batching, seed, **share)
    steps = 2 * source.batches_per_epoch + 2
    states, ids, facts = [json.loads(json.dumps(source.state_dict()))], [], [(0, False)]
    for _ in range(steps):
        ids.append(source.next_batch().ids)
        states.append(json.loads(json.dumps(source.state_dict())))
        facts.append((source.epoch, source.epoch_done))
    for step, state in enumerate(states):
        again = loader(counts, batching, seed, **share)
        again.load_state_dict(state)
        assert (again.epoch, again.epoch_done) == facts[step]
        assert [again.next_batch().ids for _ in range(steps - step)] == ids[step:]


@settings(deadline=None)
@given(st.integers(1, 6), st.booleans(), st.booleans())
def test_iterables_resume_everywhere(count: int, fresh: bool, counted: bool) -> None:
    def fresh_loader() -> StreamLoader:
        return StreamLoader(Batches(count, fresh), "s")

    source = fresh_loader()
    if counted:
        assert source.batches_per_epoch == count and source.num_ids == sum(
            i % 3 + 1 for i in range(count)
        )
    states, ids = [source.state_dict()], []
    for step in range(3 * count):
        ids.append(source.next_batch().ids)
        assert source.epoch_done == ((step + 1) % count == 0)
        assert source.epoch * count + source.state_dict()["batch"] == step + 1
        states.append(source.state_dict())
    assert (ids[:count] == ids[count : 2 * count]) != fresh
    for step, state in enumerate(states):
        again = fresh_loader()
        again.load_state_dict(state)
        assert [again.next_batch().ids for _ in range(3 * count - step)] == ids[step:]


def test_an_endless_iterable_states_its_length() -> None:
    class Endless(Batches):
        def __len__(self) -> int:
            return 2

    source = StreamLoader(Endless(10**9), "s")
    assert [source.next_batch().ids for _ in range(3)] == [("0-0",), ("1-0", "1-1"), ("0-0",)]
    assert (source.epoch, source.batches_per_epoch) == (1, 2)


def test_a_position_of_other_data_is_refused() -> None:
    state = loader([10], BatchingOptions(3)).state_dict()
    for other in (
        loader([11], BatchingOptions(3)),
        loader([10], BatchingOptions(2)),
        loader([10], BatchingOptions(3), seed=2),
    ):
        with pytest.raises(UserError, match="belongs to other data"):
            other.load_state_dict(state)


def test_token_batches_are_even_and_hold_the_longest() -> None:
    source = loader([100], BatchingOptions(None, 40))
    sizes = [source.next_batch().num_tokens() for _ in range(source.batches_per_epoch)]
    assert max(sizes) <= 40 and sum(sizes) == sum(i % 7 + 1 for i in range(100))
    assert min(sizes) >= 25
    with pytest.raises(ConfigError, match=r"train_tokens_per_batch=6.*longest sequence.*7 tokens"):
        loader([100], BatchingOptions(None, 6)).next_batch()


def test_order_depends_on_seed_and_epoch_alone() -> None:
    one, two = loader([30], BatchingOptions(4)), loader([30], BatchingOptions(4))
    first, second = epoch_of(one), epoch_of(one)
    assert first != second
    assert [epoch_of(two), epoch_of(two)] == [first, second]
    assert epoch_of(loader([30], BatchingOptions(4), seed=2)) != first
    plain = loader([5, 3], BatchingOptions(8), shuffle=False)
    assert epoch_of(plain) == [
        ("s0/n0", "s0/n1", "s0/n2", "s0/n3", "s0/n4", "s1/n0", "s1/n1", "s1/n2")
    ]


def test_golden_order() -> None:
    """Recovery depends on the order, and numpy guarantees the streams of its generators."""
    source, sample = compute_epoch_order(
        [SourceShare("a", 6, fraction=0.5), SourceShare("b", 3)], seed=7, epoch=2, shuffle=True
    )
    assert (source.tolist(), sample.tolist()) == ([1, 1, 0, 1, 0, 0], [0, 2, 1, 1, 5, 2])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.05, 1.0)), min_size=1, max_size=3),
    st.integers(0, 99),
    st.integers(0, 5),
)
def test_a_fraction_draws_without_repetition(
    sources: list[tuple[int, float]], seed: int, epoch: int
) -> None:
    shares = [SourceShare(f"s{i}", n, fraction=f) for i, (n, f) in enumerate(sources)]
    source, sample = compute_epoch_order(shares, seed, epoch, True)
    pairs = list(zip(source.tolist(), sample.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    for number, (n, f) in enumerate(sources):
        assert sum(s == number for s, _ in pairs) == max(1, round(n * f))
        assert all(0 <= i < n for s, i in pairs if s == number)


def test_every_epoch_draws_another_part() -> None:
    shares = [SourceShare("big", 1000, size=50), SourceShare("small", 20)]
    drawn = [
        set(sample[source == 0].tolist())
        for source, sample in (compute_epoch_order(shares, 1, e, True) for e in range(40))
    ]
    assert all(len(part) == 50 for part in drawn)
    assert all(one != two for one, two in pairwise(drawn))
    # 40 draws of 5 % miss a row with probability 0.95^40, about one in eight
    assert len(set().union(*drawn)) > 800
    alone = compute_epoch_order(shares[:1], 1, 3, False)[1].tolist()
    assert set(alone) == drawn[3]  # the draws from a source do not depend on the other sources


def test_weights_share_an_epoch_without_repetition() -> None:
    shares = [SourceShare("a", 1000, weight=1.0), SourceShare("b", 100, weight=3.0)]
    assert count_per_epoch(shares) == [33, 100]
    assert count_per_epoch([SourceShare("a", 10, weight=2.0)]) == [10]
    with pytest.raises(ConfigError, match="a has size=11, but only 10"):
        count_per_epoch([SourceShare("a", 10, size=11)])


def test_rows_of_one_tree_are_held_out_together() -> None:
    keys = [f"t{i // 3}" for i in range(60)]
    held = hold_out(keys, 0.25)
    assert held.sum() == 15
    assert all(held[i] == held[i - i % 3] for i in range(60))
    assert (held == hold_out(keys, 0.25)).all() and not hold_out(keys, 0.0).any()
    assert not hold_out(["one"], 0.5).any()


# -- from options to batches


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, count in (("a", 40), ("b", 10), ("valid", 5)):
        rows = [
            json.dumps({"id": str(i), "prompt": f"{name} {i} is", "answer": f" {i}"})
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    return tmp_path


def load(
    tokenizer: Tokenizer, files: Path, type: str = "prompt_answer", seed: int = 1, **options: Any
) -> LoadedData:
    spec = DatasetSpec(**{"train_bs_n_seqs": 4, "cache_dir": str(files / "cache"), **options})
    validate(spec)
    return load_data(spec, type, tokenizer, seed=seed, progress=False)


def test_one_source(files: Path, tokenizer: Tokenizer) -> None:
    data = load(
        tokenizer, files, train_path=str(files / "a.jsonl"), valid_path=str(files / "valid.jsonl")
    )
    batch = data.train.next_batch()
    assert batch.num_ids == 4 and all(id.isdigit() for id in batch.ids)
    assert batch.metadata["source"] == ("a",) * 4
    assert list(data.valid) == ["valid"] and len(data.valid["valid"]) == 5
    assert data.valid["valid"][0].ids == ("0",)
    assert data.format_counts().splitlines()[1].split() == [
        "a",
        "prompt_answer",
        "40",
        "0",
        "40",
        "0",
        "0",
        "0",
    ]
    assert data.notes == ()
    assert [line.split("  ")[0] for line in data.format_counts().splitlines()[1:3]] == [
        "a",
        "valid (valid)",
    ]
    cut = load(
        tokenizer,
        files,
        train_path=str(files / "a.jsonl"),
        valid_path=str(files / "valid.jsonl"),
        max_seqlen=2,
    )
    assert [note.split(": ")[0] for note in cut.notes] == ["a", "valid (valid)"]


def test_rows_to_evaluate_on_have_their_own_limit(files: Path, tokenizer: Tokenizer) -> None:
    def longest(part: SourceSubset) -> int:
        return max(part[i].num_tokens("prompt") + part[i].num_tokens() for i in range(len(part)))

    path, valid = str(files / "long.jsonl"), str(files / "valid_long.jsonl")
    rows = [
        json.dumps({"id": str(i), "prompt": "it is", "answer": " it" * (i + 5)}) for i in range(40)
    ]
    for file in (path, valid):
        Path(file).write_text("\n".join(rows))
    whole = load(tokenizer, files, train_path=path, valid_split=0.25)
    full = longest(whole.valid["long"])
    for own in ({"valid_split": 0.25}, {"valid_path": valid}):
        short = load(tokenizer, files, train_path=path, max_seqlen=4, valid_max_seqlen=full, **own)
        assert longest(short.parts[0]) == 4 and longest(next(iter(short.valid.values()))) in (
            full,
            short.max_seqlen,
        )
        other = load(tokenizer, files, train_path=path, max_seqlen=full, valid_max_seqlen=4, **own)
        assert (
            4 < longest(other.parts[0]) <= full and longest(next(iter(other.valid.values()))) == 4
        )
    ids = {part[i].ids[0] for part in (short.parts[0],) for i in range(len(part))}
    assert len(ids) == 40
    drop = load(
        tokenizer,
        files,
        train_path=path,
        max_seqlen=full - 1,
        valid_max_seqlen=full,
        valid_split=0.25,
        overlong="drop",
    )
    train, held = (
        {part[i].ids[0] for i in range(len(part))} for part in (drop.parts[0], drop.valid["long"])
    )
    assert not train & held and len(held) > 1 and 0 < len(train) < 30
    cut = load(tokenizer, files, train_path=path, valid_path=valid, valid_max_seqlen=2)
    assert (
        cut.notes
        and cut.notes[0].startswith("valid_long (valid)")
        and "dataset.valid_max_seqlen=2" in cut.notes[0]
    )
    with pytest.raises(ConfigError, match=r"dataset\.valid_max_seqlen=9: for rows with answers"):
        load(tokenizer, files, "prompt", train_path=path, valid_max_seqlen=9)


def test_a_mixture(files: Path, tokenizer: Tokenizer) -> None:
    sources = [
        {"path": str(files / "a.jsonl"), "fraction": 0.25, "valid_split": 0.1},
        {
            "path": str(files / "b.jsonl"),
            "name": "bee",
            "type": "prompt_answer",
            "valid_path": str(files / "valid.jsonl"),
        },
    ]
    data = load(tokenizer, files, sources=sources, max_seqlen=4)
    assert {name: len(part) for name, part in data.valid.items()} == {"a": 4, "bee": 5}
    assert data.train.num_ids == 9 + 10
    epochs = [{id for batch in epoch_of(data.train) for id in batch} for _ in range(3)]
    drawn = [{id for id in ids if id.startswith("a/")} for ids in epochs]
    assert all(len(ids) == 9 for ids in drawn) and drawn[0] != drawn[1] != drawn[2]
    assert all(
        {id for id in ids if id.startswith("bee/")} == {f"bee/{i}" for i in range(10)}
        for ids in epochs
    )
    held = {f"a/{data.valid['a'][i].ids[0]}" for i in range(4)}
    assert not held & set().union(*epochs)
    assert (
        data.notes
        and data.notes[0].startswith("a: of 40 rows, ")
        and "dataset.max_seqlen=4" in data.notes[0]
    )


def test_a_batch_holds_what_its_samples_hold(files: Path, tokenizer: Tokenizer) -> None:
    """Rows of tables are read all at once, those of other datasets one by one: the batches are the
    same.
    """

    class ByIndex:
        def __init__(self, dataset: Any) -> None:
            self.dataset = dataset

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> SequenceSample:
            found: SequenceSample = self.dataset[index]
            return found

    sources = [{"path": str(files / f"{name}.jsonl")} for name in "ab"]
    for options in ({"sources": sources}, {"train_path": str(files / "a.jsonl")}):
        at_once, singly = (load(tokenizer, files, **options).train for _ in range(2))
        assert isinstance(singly, MapLoader)
        singly._parts = [
            SourceSubset(p.name, ByIndex(p.dataset), p.indices, p.prefix) for p in singly._parts
        ]
        for _ in range(8):
            one, other = at_once.next_batch(), singly.next_batch()
            assert (
                one.ids == other.ids
                and dict(one.metadata) == dict(other.metadata)
                and one.keys == other.keys
            )
            for key in one.keys:
                assert one.data[key].dtype == other.data[key].dtype and torch.equal(
                    one.data[key], other.data[key]
                )
                assert np.array_equal(one.lengths[key], other.lengths[key])
                assert np.array_equal(one.offsets[key], other.offsets[key])


def test_valid_split_and_tokens(files: Path, tokenizer: Tokenizer) -> None:
    data = load(
        tokenizer,
        files,
        path=str(files / "a.jsonl"),
        valid_split=0.2,
        train_bs_n_seqs=None,
        train_tokens_per_batch=30,
    )
    assert len(data.valid["a"]) == 8 and data.train.num_ids == 32
    assert data.train.next_batch().token_costs().sum() <= 30


def test_dropped_rows_are_counted(files: Path, tokenizer: Tokenizer) -> None:
    (files / "long.jsonl").write_text(
        '{"prompt": "a", "answer": "b"}\n{"prompt": "a a a a a a a a", "answer": "b"}'
    )
    path = str(files / "long.jsonl")
    data = load(tokenizer, files, path=path, max_seqlen=4, remove_truncated_samples=True)
    assert data.notes == (
        "long: of 2 rows, 1 left out (dataset.max_seqlen=4, dataset.overlong=drop)",
    )
    prompts = load(tokenizer, files, "prompt", path=path, max_prompt_len=3, overlong="truncate")
    assert (
        "1 with the prompt cut (dataset.max_prompt_len=3, dataset.overlong=truncate"
        in prompts.notes[0]
    )
    with pytest.raises(DataError, match="1 of 2 rows are too long"):
        load(tokenizer, files, "prompt", path=path, max_prompt_len=3)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (
            {"sources": [{"path": "a", "fracton": 1}]},
            "unknown key 'fracton'; did you mean fraction",
        ),
        ({"sources": [{"fraction": 1}]}, r"dataset.sources\[0\]: path is missing"),
        (
            {"sources": [{"path": "a", "fraction": 1, "size": 2}]},
            "fraction and size exclude each other",
        ),
        (
            {"sources": [{"path": "a", "fraction": 1.5}]},
            "fraction=1.5: must be above 0 and at most 1",
        ),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "weight is relative"),
        ({"sources": "a"}, "must be a list"),
        ({"path": "a", "train_tokens_per_batch": 5}, "set exactly one of them"),
        ({"path": "a", "sources": [{"path": "b"}]}, "exclude each other"),
        ({"path": "a", "type": "promt"}, "unknown dataset type 'promt'; did you mean prompt"),
        ({"path": "a", "args": {"answer_kye": "x"}}, "no such argument; did you mean answer_key"),
        ({"path": "nowhere.jsonl"}, "there is no such file"),
        (
            {"sources": [{"path": "a", "name": "x"}, {"path": "b", "name": "x"}]},
            "two sources are named 'x'",
        ),
    ],
)
def test_options_that_do_not_fit(
    files: Path, tokenizer: Tokenizer, options: dict[str, Any], wrong: str
) -> None:
    def real(path: str) -> str:
        return str(files / f"{path}.jsonl") if path in ("a", "b") else path

    if isinstance(options.get("sources"), list):
        options = {
            **options,
            "sources": [
                {k: real(v) if k == "path" else v for k, v in s.items()} for s in options["sources"]
            ],
        }
    if "path" in options:
        options = {**options, "path": real(options["path"])}
    with pytest.raises(UserError, match=wrong):
        load(tokenizer, files, **options)


def test_sources_may_be_plain_paths() -> None:
    assert parse_sources(["a.jsonl", {"path": "b", "size": 3}]) == [
        SourceSpec("a.jsonl"),
        SourceSpec("b", size=3),
    ]


# -- classes of the user's own


@register_dataset("test-numbers")
class CustomNumbers(Numbers):
    def __init__(self, util: DatasetUtility, count: int, max_seqlen: int = 0) -> None:
        super().__init__(count)
        self.util, self.max_seqlen = util, max_seqlen


@register_dataset("test-batches")
class CustomBatches(Batches):
    def __init__(self, util: DatasetUtility, count: int) -> None:
        super().__init__(count)


@register_dataset("test-neither")
class Neither:
    def __init__(self, util: DatasetUtility) -> None:
        pass


def test_custom_datasets(files: Path, tokenizer: Tokenizer) -> None:
    data = load(
        tokenizer, files, type="test-numbers", args={"count": 9}, max_seqlen=77, valid_split=0.3
    )
    dataset = data.train._parts[0].dataset  # type: ignore[attr-defined]
    assert (dataset.max_seqlen, dataset.util.tokenizer, dataset.util.world_size) == (
        77,
        tokenizer,
        1,
    )
    assert data.train.num_ids == 6 and len(data.valid["data"]) == 3
    stream = load(tokenizer, files, "test-batches", args={"count": 4})
    assert [len(batch) for batch in epoch_of(stream.train)] == [1, 2, 3, 1]
    with pytest.raises(
        ConfigError,
        match=r"missing a required argument: 'count'; its constructor is CustomNumbers\(",
    ):
        load(tokenizer, files, "test-numbers")
    with pytest.raises(
        ConfigError, match=r"'test-numbers' takes no path, so .*valid\.jsonl cannot be given to it"
    ):
        load(
            tokenizer,
            files,
            "test-numbers",
            args={"count": 4},
            valid_path=str(files / "valid.jsonl"),
        )
    data = load(
        tokenizer,
        files,
        args={"path": str(files / "a.jsonl")},
        valid_path=str(files / "valid.jsonl"),
    )
    assert (data.train.num_ids, len(data.valid["valid"])) == (40, 5)
    with pytest.raises(ConfigError, match="Neither has neither"):
        load(tokenizer, files, "test-neither")
    with pytest.raises(ConfigError, match="iterable dataset cannot be split"):
        load(tokenizer, files, "test-batches", args={"count": 4}, valid_split=0.5)
    with pytest.raises(DataError, match="the dataset is empty"):
        load(tokenizer, files, "test-numbers", args={"count": 0})


def test_samples_of_another_kind_are_named() -> None:
    class Wrong(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"completion": [1]}

    with pytest.raises(
        DataError, match=r"w\[0\]: a map-style dataset returns a SequenceSample of one id, not dict"
    ):
        SourceSubset("w", Wrong(3), np.arange(3))[0]
