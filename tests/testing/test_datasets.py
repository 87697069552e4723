"""`check_dataset` passes on the shipped classes and finds each kind of mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.data.datasets.base import DatasetUtility
from weft.data.sample import SequenceSample
from weft.errors import DataError
from weft.registry import datasets
from weft.testing import check_dataset

ROWS: dict[str, dict[str, Any]] = {
    "prompt_answer": {"prompt": "a", "answer": "b"},
    "paired_comparison": {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c"]},
    "prompt": {"prompt": "a", "answer": "4", "nested": {"x": [1, None]}},
    "chat": {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    "preference": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "ranking": {"prompt": "a", "replies": ["b", "c", "d"]},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_shipped_classes_pass(tmp_path: Path, name: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(ROWS[name]) for _ in range(7)))
    check_dataset(datasets.get(name), path=str(file))


def sample(id: str, **keys: Any) -> SequenceSample:
    lengths = {key: [[len(value)]] for key, value in keys.items()}
    return SequenceSample.from_groups(
        [id], lengths, {k: torch.as_tensor(v) for k, v in keys.items()}
    )


class Good:
    def __init__(self, util: DatasetUtility, count: int = 5) -> None:
        self.util, self.count = util, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> SequenceSample:
        return sample(str(index), prompt=self.util.tokenizer.encode(f"{index}+"))


class Stream:
    def __init__(self, util: DatasetUtility) -> None:
        self.batches = 0

    def __iter__(self) -> Iterator[SequenceSample]:
        for number in range(3):
            yield sample(str(number), prompt=[number])


def test_good_ones_pass() -> None:
    check_dataset(Good)
    check_dataset(Good, count=200)
    check_dataset(Stream)


class TorchStream(torch.utils.data.IterableDataset[SequenceSample]):
    """It inherits a `__getitem__` that raises, and knows how many batches it has."""

    def __init__(self, util: DatasetUtility) -> None:
        pass

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[SequenceSample]:
        for number in range(3):
            yield sample(str(number), prompt=[number])


class TorchMap(Good, torch.utils.data.Dataset[SequenceSample]):
    pass


class NumberedIds(Good):
    def __getitem__(self, index: int) -> SequenceSample:
        return SequenceSample.from_default([index], [1], {"prompt": torch.tensor([index])})  # type: ignore[list-item]


def test_datasets_of_torch_are_read_as_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    check_dataset(TorchStream)
    assert (
        "check_dataset(TorchStream): 3 batches of an iterable dataset, with the keys prompt:"
        in capsys.readouterr().out
    )
    check_dataset(TorchMap, count=80)
    assert "check_dataset(TorchMap): 64 of 80 samples by index" in capsys.readouterr().out


def test_whole_numbers_are_ids() -> None:
    check_dataset(NumberedIds)
    assert NumberedIds(None)[3].ids == ("3",)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="ids are unique"):
        SequenceSample.from_default(["1", 1], [1, 1], {"prompt": [1, 2]})  # type: ignore[list-item]


class Once(Stream):
    def __iter__(self) -> Iterator[SequenceSample]:
        self.batches += 1
        yield sample(str(self.batches), prompt=[1])


class Random(Good):
    def __getitem__(self, index: int) -> SequenceSample:
        return sample(str(index), prompt=torch.randint(0, 200, (3,)).tolist())


def broken(make: Any) -> type:
    class Broken(Good):
        def __getitem__(self, index: int) -> SequenceSample:
            made: SequenceSample = make(index)
            return made

    return Broken


@pytest.mark.parametrize(
    ("cls", "wrong"),
    [
        (broken(lambda i: {"prompt": [1]}), "not a SequenceSample"),
        (broken(lambda i: sample("same", prompt=[1])), "ids are not unique"),
        (broken(lambda i: sample(str(i), prompt=[99999])), "outside the vocabulary"),
        (broken(lambda i: sample(str(i), prompt=[1.0])), "token ids must be int64"),
        (
            broken(lambda i: sample(str(i), **({"prompt": [1]} if i else {"other": [1]}))),
            "differ in their keys",
        ),
        (
            broken(lambda i: sample(str(i), completion=[1, 2], loss_mask=[1.0])),
            "'loss_mask' and 'completion' differ",
        ),
        (broken(lambda i: sample(str(i), prompt=[1]).meta()), "has lengths but no tensor"),
        (Random, "values of 'prompt' differ"),
        (Once, "in a second pass: ids"),
        (object, "takes no arguments"),
    ],
)
def test_mistakes_are_found(cls: type, wrong: str) -> None:
    with pytest.raises((AssertionError, TypeError), match=wrong):
        check_dataset(cls)


def test_an_empty_one_and_one_that_is_neither() -> None:
    with pytest.raises(AssertionError, match="the dataset is empty"):
        check_dataset(Good, count=0)

    class Neither:
        def __init__(self, util: DatasetUtility) -> None:
            pass

    with pytest.raises(AssertionError, match="Neither has neither"):
        check_dataset(Neither)
