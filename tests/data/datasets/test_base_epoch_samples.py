"""Samples that differ between epochs: the same in every run and layout, and redrawn each epoch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import templates

from weft.data.loader import load_data
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec, read_template_text
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError
from weft.registry import register_dataset

Make = Callable[..., Tokenizer]
ROWS = [
    {
        "id": f"r{number}",
        "messages": [
            {"role": "user", "content": f"question {number} " + "and so on " * (number % 7)},
            {
                "role": "assistant",
                "content": "yes " * (number + 1),
                "lang": "en",
                "quality": number / 20,
                "humor": 0.5,
            },
        ],
    }
    for number in range(20)
]


def spec_of(folder: Path, rows: Any = ROWS, **options: Any) -> DatasetSpec:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    usual: dict[str, Any] = {
        "train_path": str(path),
        "train_bs_n_seqs": 7,
        "cache_dir": str(folder / "cache"),
        "num_workers": 0,
    }
    return DatasetSpec(**{**usual, **options})


def epochs(
    spec: DatasetSpec, tokenizer: Tokenizer, count: int, seed: int = 1, type: str = "chat"
) -> list[dict[str, str]]:
    """Return the text of every id, one mapping per epoch."""
    loader = load_data(spec, type, tokenizer, seed=seed, progress=False).train
    found: list[dict[str, str]] = []
    for _ in range(count):
        found.append({})
        while True:
            batch = loader.next_batch()
            found[-1] |= {sample.ids[0]: text(sample, tokenizer) for sample in batch.unpack()}
            if loader.epoch_done:
                break
    return found


def text(sample: SequenceSample, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(sample.data["prompt"].tolist() + sample.data["completion"].tolist())


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


def test_tags_are_drawn_anew_every_epoch(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spec = spec_of(tmp_path, system_tags=True)
    one, two, three = epochs(spec, tokenizer, 3)
    assert one.keys() == two.keys() and one != two and two != three
    assert [one, two] == epochs(replace(spec, train_bs_n_seqs=3), tokenizer, 2), (
        "batches say nothing about draws"
    )
    assert [one, two] != epochs(spec, tokenizer, 2, seed=2)
    assert any("quality: " in said for said in one.values()) and any(
        "quality: " not in said for said in one.values()
    )


def test_a_run_goes_on_with_the_same_draws(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spec = spec_of(tmp_path, system_tags=True, random_window=0.9, max_seqlen=24)
    whole, other = (
        load_data(spec, "chat", tokenizer, seed=1, progress=False).train for _ in range(2)
    )
    for _ in range(4):
        whole.next_batch()
    other.load_state_dict(whole.state_dict())
    one, two = whole.next_batch(), other.next_batch()
    assert one.ids == two.ids and one.data["completion"].equal(two.data["completion"])


def test_threads_of_a_tree_are_drawn_each_by_itself(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def node(id: str, role: str, *replies: Any) -> dict[str, Any]:
        labels = {"quality": {"value": 0.5, "count": 2}, "spam": {"value": 0.0, "count": 1}}
        return {
            "message_id": id,
            "role": role,
            "text": f"text {id}",
            "lang": "en",
            "labels": labels,
            "replies": list(replies),
        }

    tree = {
        "message_tree_id": "t",
        "prompt": node("a", "prompter", *(node(f"b{n}", "assistant") for n in range(9))),
    }
    one, two = epochs(spec_of(tmp_path, [tree], system_tags=True), tokenizer, 2)
    assert {said.partition("assistant\n")[2] for said in one.values()} == {
        f"text b{n}<|im_end|>" for n in range(9)
    }
    tags = {
        said.partition("system\n")[2].partition("<|im_end|>")[0]
        for said in [*one.values(), *two.values()]
    }
    assert (
        tags == {"", "lang: en", "quality: 0.5", "lang: en\nquality: 0.5", "quality: 0.5\nlang: en"}
        and one != two
    )


def test_windows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": " ".join(map(str, range(300)))},
            ]
        }
    ]
    spec = spec_of(tmp_path, rows, random_window=1.0, max_seqlen=40, system_prefix="You are Joi")
    found = [said["0"] for said in epochs(spec, tokenizer, 8)]
    head = "<|im_start|>system\nYou are Joi<|im_end|>\n"
    assert len(set(found)) > 5 and all(said.startswith(head) for said in found)
    cut = epochs(replace(spec, random_window=0.0), tokenizer, 1)[0]["0"]
    assert cut.startswith(f"{head}<|im_start|>user\nHi")


def test_the_validation_set_is_not_drawn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    spec = spec_of(tmp_path, system_tags=True, valid_split=0.3, system_tag_dropout=1.0)
    data = load_data(spec, "chat", tokenizer, seed=1, progress=False)
    [part] = data.valid.values()
    assert all("lang: en\nquality: " in text(part[index], tokenizer) for index in range(len(part)))
    assert "lang" not in text(data.train.next_batch(), tokenizer)


def test_a_bad_reply_ranks_last_and_is_drawn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bad = ["bad one", "bad two", "bad three"]
    rows = [{"id": "a", "prompt": "Q: ", "replies": ["best", "good", "fair"], "augmented": bad}]
    spec = spec_of(tmp_path, rows, args={"max_replies": 3})
    loader = load_data(spec, "ranking", tokenizer, seed=1, progress=False).train
    last = set()
    for _ in range(20):
        sample = loader.next_batch()
        replies = [
            tokenizer.decode(part.tolist(), skip_special=True).strip()
            for part in sample.sequences("completion")
        ]
        assert replies[:2] == ["best", "good"] and sample.data["rank"].tolist() == [0, 1, 2]
        last.add(replies[2])
    assert last == set(bad)


def test_rankings_without_a_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows such as HellaSwag's, in which each ending is a whole text."""
    rows = [{"prefix": None, "replies": ["A man sits down.", "A man flies."]}]
    loader = load_data(spec_of(tmp_path, rows), "ranking", tokenizer, seed=1, progress=False).train
    sample = loader.next_batch()
    assert [tokenizer.decode(part.tolist()) for part in sample.sequences("completion")] == [
        "A man sits down.</s>",
        "A man flies.</s>",
    ]
    with pytest.raises(DataError, match="lacks the key 'prompt'"):
        load_data(
            spec_of(tmp_path, [{"replies": ["a", "b"]}]),
            "ranking",
            tokenizer,
            seed=1,
            progress=False,
        )


def test_plain_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    loader = load_data(
        spec_of(tmp_path, [{"text": "one two three"}]), "text", tokenizer, seed=1, progress=False
    ).train
    sample = loader.next_batch()
    assert text(sample, tokenizer) == "one two three</s>"
    assert (
        sample.lengths["prompt"].tolist() == [1] and sample.data["loss_mask"].tolist() == [1.0] * 3
    )


def test_without_label_masking(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for type, rows in (("chat", ROWS), ("prompt_answer", [{"prompt": "a b c", "answer": " d e"}])):
        spec = spec_of(tmp_path, rows, label_masking=False)
        sample = load_data(spec, type, tokenizer, seed=1, progress=False).train.next_batch()
        assert set(sample.lengths["prompt"].tolist()) == {1} and sample.data["loss_mask"].all()


def test_short_samples_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Open-Assistant shuffled a copy, so ties always came in the order of the file (defect 3)."""
    rows = [{"id": f"r{n}", "prompt": "a", "answer": " b" * (n % 3 + 1)} for n in range(30)]
    spec = spec_of(tmp_path, rows, sort_by_length=True, train_bs_n_seqs=1)
    loader = load_data(spec, "prompt_answer", tokenizer, seed=1, progress=False).train
    orders = []
    for _ in range(2):
        batches = [loader.next_batch() for _ in range(30)]
        sizes = [int(batch.lengths["completion"][0]) for batch in batches]
        assert sizes == sorted(sizes)
        orders.append([batch.ids[0] for batch in batches])
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert orders[0][:10] != sorted(orders[0][:10], key=lambda id: int(id[1:]))


def test_mixed_samples_fill_batches(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a", "answer": " b" * (2 if n % 4 else 300)} for n in range(80)]
    spec = spec_of(tmp_path, rows, sample_mixing=1.0, train_bs_n_seqs=8)
    loader = load_data(spec, "prompt_answer", tokenizer, seed=1, progress=False).train
    assert loader.batches_per_epoch == 7 and loader.num_ids == 80  # 20 long ones, 30 pairs
    ids: list[str] = []
    while True:
        batch = loader.next_batch()
        ids += batch.ids
        if loader.epoch_done:
            break
    assert sorted(ids, key=int) == [str(n) for n in range(80)]


class Own:
    """Dataset class that a user defines."""

    def __init__(self, util: Any, path: str) -> None: ...

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> SequenceSample:
        return SequenceSample.from_default([str(index)], [2], {"completion": [5, 6]})


register_dataset("own", Own)


def test_options_that_do_not_fit(tmp_path: Path, with_template: Make, tokenizer: Tokenizer) -> None:
    def refused(
        match: str,
        type: str = "chat",
        tokenizer: Tokenizer = tokenizer,
        rows: Any = ROWS,
        **options: Any,
    ) -> None:
        with pytest.raises((ConfigError, DataError), match=match):
            load_data(spec_of(tmp_path, rows, **options), type, tokenizer, seed=1, progress=False)

    refused(
        "does not write a system message before a reply",
        tokenizer=with_template(templates.INST),
        system_tags=True,
    )
    refused(
        "does not write a system message;",
        tokenizer=with_template(templates.CALLS),
        system_prefix="Hi",
    )
    refused(
        "as_chat=true", "prompt_answer", rows=[{"prompt": "a", "answer": "b"}], system_prefix="Hi"
    )
    refused("for rows of one answer", "preference", label_masking=False)
    refused("not known; set it", random_window=0.5)
    refused(
        "leave sample_mixing out",
        sample_mixing=0.5,
        train_bs_n_seqs=None,
        train_tokens_per_batch=512,
    )
    refused("which is false", system_tag_length=True)
    refused(
        "no system message by itself",
        tokenizer=with_template(read_template_text("gemma")),
        system_prefix="P",
        random_window=0.5,
        max_seqlen=40,
    )
    refused("makes its samples itself", "own", system_prefix="Hi")
    refused("prompts to complete have none", "prompt", system_tags=True)
