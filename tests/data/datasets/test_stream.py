"""Dataset type `stream`: batches that continue at any step, and options that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.tiny import make_tokenizer, prompt_answer_rows, write_jsonl
from weft.data.batches import StreamLoader
from weft.data.loader import load_data
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.load(TokenizerSpec(path=str(folder)))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = write_jsonl(tmp_path / "rows.jsonl", prompt_answer_rows(11))
    return str(path or tmp_path / "rows.jsonl")


def open_loader(path: str, tokenizer: Tokenizer, **args: Any) -> StreamLoader:
    spec = DatasetSpec(
        train_path=path,
        type="stream",
        args={"form": "prompt_answer", "batch": 4, "steps": 3, **args},
    )
    loader = load_data(spec, "prompt_answer", tokenizer, seed=1, progress=False).train
    assert isinstance(loader, StreamLoader)
    return loader


def describe(batch: SequenceSample) -> tuple[Any, ...]:
    return batch.ids, batch.data["prompt"].tolist(), batch.data["completion"].tolist()


def test_every_step_is_continued(rows: str, tokenizer: Tokenizer) -> None:
    whole = open_loader(rows, tokenizer)
    assert (whole.num_ids, whole.batches_per_epoch, whole.count_batches(2)) == (12, 3, 6)
    states = [json.loads(json.dumps(whole.state_dict()))]
    batches = []
    ends = []
    for _ in range(7):
        batches.append(describe(whole.next_batch()))
        ends.append(whole.epoch_done)
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert ends == [False, False, True, False, False, True, False]
    assert len({id for ids, *_ in batches for id in ids}) == 28, (
        "ids are unique, also of rows read twice"
    )
    assert batches[0][1:] != batches[1][1:]
    for step in range(7):
        other = open_loader(rows, tokenizer)
        other.load_state_dict(states[step])
        assert describe(other.build_large_batches()[0]) == batches[step]
        assert [describe(other.next_batch()) for _ in range(7 - step)] == batches[step:]
        assert other.state_dict() == states[-1]


def test_rows_are_those_of_the_form(rows: str, tokenizer: Tokenizer) -> None:
    spec = DatasetSpec(train_path=rows, train_bs_n_seqs=4)
    table = load_data(spec, "prompt_answer", tokenizer, seed=1, progress=False)
    samples = [table.parts[0].dataset[index] for index in range(11)]
    loader = open_loader(rows, tokenizer, steps=2)
    for at in (0, 4):
        expected = [token for each in samples[at : at + 4] for token in each.data["completion"]]
        assert loader.next_batch().data["completion"].tolist() == expected


def test_a_bucket_is_not_copied(
    rows: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_BUCKET_CACHE", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe_file("/b/rows.jsonl", Path(rows).read_bytes())
    loader = open_loader("memory://b/rows.jsonl", tokenizer)
    assert describe(loader.next_batch()) == describe(open_loader(rows, tokenizer).next_batch())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("args", "kind", "words"),
    [
        ({"steps": 0}, ConfigError, "dataset.args.steps=0: must be a number, at least 1"),
        ({"batch": "x"}, ConfigError, "dataset.args.batch='x'"),
        ({"form": "stream"}, ConfigError, "dataset.args.form=stream: must be a dataset type"),
        ({"form": "txt"}, ConfigError, "did you mean"),
        ({"prompt_key": "none"}, DataError, r"rows.jsonl:1: .*none"),
        ({"colour": 1}, ConfigError, "colour"),
    ],
)
def test_wrong_options(
    args: dict[str, Any], kind: type[Exception], words: str, rows: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(kind, match=words):
        open_loader(rows, tokenizer, **args).next_batch()


def test_changed_data_are_noticed(rows: str, tokenizer: Tokenizer) -> None:
    loader = open_loader(rows, tokenizer)
    loader.next_batch()
    state = loader.state_dict()
    Path(rows).write_text(Path(rows).read_text().replace("a", "b"))
    with pytest.raises(DataError, match="has changed since the recovery point"):
        open_loader(rows, tokenizer).load_state_dict(state)
