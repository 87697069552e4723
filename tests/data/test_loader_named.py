"""Mixtures with named datasets: shares, fresh subsets, validation sets, and separate names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.loader import LoadedData, load_data
from weft.data.spec import DatasetSpec, SourceSpec, parse_named
from weft.errors import ConfigError
from weft.options import validate
from weft.testing.datasets import build_small_tokenizer


@pytest.fixture
def copy(tmp_path: Path) -> str:
    """Return a copy of gsm8k with 20 rows for training and 6 of its test split."""
    for name, count in (("train", 20), ("test", 6)):
        rows = [{"question": f"{name} {i}", "answer": f"#### {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def load(tmp_path: Path, *named: Any, type: str = "chat", **options: Any) -> LoadedData:
    spec = DatasetSpec(
        named=list(named), train_bs_n_seqs=4, cache_dir=str(tmp_path / "cache"), **options
    )
    validate(spec)
    return load_data(spec, type, build_small_tokenizer(), seed=1, progress=False)


def epoch(data: LoadedData) -> set[str]:
    ids = set(data.train.next_batch().ids)
    while not data.train.epoch_done:
        ids |= set(data.train.next_batch().ids)
    return ids


def test_the_short_form_is_a_list_of_sources() -> None:
    assert parse_named("webgpt") == [SourceSpec(named="webgpt")]
    assert parse_named(
        [
            "webgpt",
            {"oasst_export": {"fraction": 0.5, "lang": "en", "valid_split": 0.1, "max_valid": 9}},
        ]
    ) == [
        SourceSpec(named="webgpt"),
        SourceSpec(
            named="oasst_export", fraction=0.5, valid_split=0.1, max_valid=9, args={"lang": "en"}
        ),
    ]
    assert parse_named([{"alpaca": None}]) == [SourceSpec(named="alpaca")]
    for value, wrong in (
        ([], "must be a list such as"),
        (
            [{"webgpt": None, "fraction": 0.5}],
            "one entry is one dataset, and this one has the keys webgpt, fraction",
        ),
        ([{"webgpt": 3}], "webgpt=3: must be a mapping"),
        ([{"webgpt": {"fraction": 2}}], r"dataset.named\[0\].fraction=2: must be above 0"),
        ([{"webgpt": {"max_valid": 0}}], "max_valid=0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            parse_named(value)
    with pytest.raises(
        ConfigError, match=r"says what its rows are; leave out type, split and columns"
    ):
        SourceSpec.parse({"named": "webgpt", "type": "chat"}, "x")
    with pytest.raises(ConfigError, match=r"path is missing; .*`named`"):
        SourceSpec.parse({"fraction": 0.5}, "x")


def test_shares_draw_another_part_every_epoch(copy: str, tmp_path: Path) -> None:
    data = load(tmp_path, {"gsm8k": {"path": copy, "fraction": 0.25}})
    epochs = [epoch(data) for _ in range(6)]
    assert {len(ids) for ids in epochs} == {5} and len(set().union(*epochs)) > 10
    assert len(epoch(load(tmp_path, {"gsm8k": {"path": copy, "size": 7}}))) == 7


def test_validation_is_the_sources_own_capped_or_left_out(copy: str, tmp_path: Path) -> None:
    def valid(**options: Any) -> dict[str, int]:
        return {
            name: len(part)
            for name, part in load(tmp_path, {"gsm8k": {"path": copy, **options}}).valid.items()
        }

    assert valid() == valid(valid_split=0.5) == {"gsm8k": 6}
    assert valid(max_valid=4) == {"gsm8k": 4} and valid(max_valid=40) == {"gsm8k": 6}
    assert valid(valid_split=0.0) == {}
    one_file = {"gsm8k": {"path": f"{copy}/train.jsonl"}}
    assert load(tmp_path, one_file).valid == {}
    split = load(tmp_path, one_file, valid_split=0.2)
    assert {name: len(part) for name, part in split.valid.items()} == {"gsm8k": 4} and len(
        epoch(split)
    ) == 16
    elsewhere = load(
        tmp_path,
        one_file,
        valid_split=0.2,
        valid_path=split.valid["gsm8k"].dataset.table and _chat(tmp_path),
    )
    assert list(elsewhere.valid) == ["other"] and len(epoch(elsewhere)) == 20


def _chat(tmp_path: Path) -> str:
    file = tmp_path / "other.jsonl"
    file.write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
        )
    )
    return str(file)


def test_max_valid_holds_for_files_too(tmp_path: Path) -> None:
    row = json.loads(Path(_chat(tmp_path)).read_text())
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(20)))
    source = {"path": str(tmp_path / "many.jsonl"), "valid_split": 0.5, "max_valid": 3}
    data = load_data(
        DatasetSpec(sources=[source], train_bs_n_seqs=4, cache_dir=str(tmp_path)),
        "chat",
        build_small_tokenizer(),
        seed=1,
        progress=False,
    )
    assert (
        len(data.valid["many"]) == 3 and data.counts[0].evaluation == 3 and data.train.num_ids == 10
    )


def test_a_name_given_twice_has_ids_and_validation_sets_of_its_own(
    copy: str, tmp_path: Path
) -> None:
    entry = {"gsm8k": {"path": copy, "size": 10}}
    data = load(tmp_path, entry, entry, sources=[{"path": _chat(tmp_path)}])
    assert set(data.valid) == {"gsm8k", "gsm8k-2"}
    ids = epoch(data)
    assert {id.split("/")[0] for id in ids} == {"gsm8k", "gsm8k-2", "other"} and len(ids) == 21


def test_the_mode_follows_from_the_rows_that_the_experiment_reads(
    copy: str, tmp_path: Path
) -> None:
    entry = {"gsm8k": {"path": copy}}
    prompts = load(tmp_path, entry, type="prompt").train.next_batch()
    assert "completion" not in prompts.keys and prompts.metadata["answer"][0].startswith("####")
    with pytest.raises(ConfigError, match=r"gsm8k: is of no use in mode rm; it is for sft, rl"):
        load(tmp_path, entry, type="paired_comparison")
    with pytest.raises(ConfigError, match=r"named datasets have rows of weft's own types"):
        load(tmp_path, entry, type="riddles")
    with pytest.raises(
        ConfigError, match=r"dataset.named and dataset.train_path='a.jsonl' exclude each other"
    ):
        load(tmp_path, entry, train_path="a.jsonl")


def test_plain_text_is_learned_whole_beside_chats(copy: str, tmp_path: Path) -> None:
    (tmp_path / "pajama.jsonl").write_text(json.dumps({"text": "abc"}))
    data = load(
        tmp_path,
        {"red_pajama": {"path": str(tmp_path / "pajama.jsonl")}},
        {"gsm8k": {"path": copy}},
        shuffle=False,
    )
    sample = data.train.next_batch().unpack()[0]
    assert sample.ids == ("red_pajama/0",)
    words = build_small_tokenizer()
    assert sample.data["prompt"].tolist() + sample.data["completion"].tolist() == [
        *words.encode("abc"),
        words.require_eos(),
    ]
    assert (
        sample.data["loss_mask"].tolist() == [1.0] * len(sample.data["completion"])
        and len(sample.data["prompt"]) == 1
    )


def test_auto_takes_the_longest_row(copy: str, tmp_path: Path) -> None:
    entry = {"gsm8k": {"path": copy}}
    whole = load(tmp_path, entry, max_seqlen="auto")
    assert (
        whole.max_seqlen
        == max(int(part.dataset.table.compute_seqlens().max()) for part in whole.parts)
        > 20
    )
    assert load(tmp_path, entry, max_seqlen=20).max_seqlen == 20
