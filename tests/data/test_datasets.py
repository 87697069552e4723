"""The seven forms: rows to keys, on small rows by hand and on real ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import templates
import torch

from weft.data.datasets.base import DatasetUtility, MapDataset
from weft.data.loader import load_data
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import skip_progress
from weft.errors import ConfigError, DataError, UserError
from weft.registry import datasets

Make = Callable[..., Tokenizer]
Open = Callable[..., MapDataset]


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Tokenizer) -> Open:
    """Return a function of (form, rows or path, **options) that builds the dataset."""

    def build(form: str, rows: Any, use: Tokenizer = tokenizer, **options: Any) -> MapDataset:
        path = rows
        if not isinstance(rows, Path):
            path = tmp_path / "rows.jsonl"
            path.write_text(
                "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
            )
        util = DatasetUtility(use, cache_dir=str(tmp_path / "cache"), progress=skip_progress)
        made = datasets.get(form)(util=util, path=str(path), **options)
        assert isinstance(made, MapDataset)
        return made

    return build


def texts(tokenizer: Tokenizer, sample: SequenceSample) -> tuple[str, list[str]]:
    """Return (prompt, trained text of each completion)."""
    masks = sample.sequences("loss_mask")
    trained = [
        tokenizer.decode(ids[mask > 0].tolist())
        for ids, mask in zip(sample.sequences("completion"), masks, strict=True)
    ]
    return tokenizer.decode(sample.sequences("prompt")[0].tolist()), trained


def values(sample: SequenceSample, *keys: str) -> dict[str, list[float]]:
    return {key: sample.data[key].tolist() for key in keys}


def test_prompt_answer(opened: Open, tokenizer: Tokenizer) -> None:
    rows: list[Mapping[str, Any]] = [
        {"id": 7, "prompt": "2+2=", "answer": "4"},
        {"instruction": "Add", "input": "2 2", "output": "4"},
        {"question": "Two? ", "answer": "2"},
        {"prompt": "", "completion": "plain text"},
        {"prompt": "Two? ", "answer": "2"},
    ]
    found = opened("prompt_answer", rows)
    assert len(found) == 5
    assert [texts(tokenizer, found[i]) for i in range(5)] == [
        ("2+2=", ["4</s>"]),
        ("Add\n2 2\n", ["4</s>"]),
        ("Two? \n", ["2</s>"]),
        ("", ["plain text</s>"]),
        ("Two?", [" 2</s>"]),  # the blank and the digit are one token, which belongs to the answer
    ]
    assert [found[i].ids[0] for i in range(4)] == ["7", "1", "2", "3"]
    dtypes = {key: value.dtype for key, value in found[0].data.items()}
    assert dtypes == {"prompt": torch.int64, "completion": torch.int64, "loss_mask": torch.float32}


def test_prompt_answer_as_chat_and_with_named_columns(opened: Open, tokenizer: Tokenizer) -> None:
    rows = [{"q": "Hi", "a": "Ho", "key": "x"}]
    options = {"prompt_key": "q", "answer_key": "a", "id_key": "key", "as_chat": True}
    sample = opened("prompt_answer", rows, **options)[0]
    assert texts(tokenizer, sample) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ["Ho<|im_end|>"],
    )
    assert sample.ids == ("x",)


def test_an_answer_that_ends_with_eos_gets_no_second(opened: Open, tokenizer: Tokenizer) -> None:
    assert texts(tokenizer, opened("prompt_answer", [{"prompt": "a", "answer": " b</s>"}])[0])[
        1
    ] == [" b</s>"]


def test_paired_comparison(opened: Open, tokenizer: Tokenizer) -> None:
    rows = [
        {
            "prompt": "Q: ",
            "pos_answers": ["yes", "yes!"],
            "neg_answers": ["no", "yes"],
            "margin": [0.5, 2],
        }
    ]
    sample = opened("paired_comparison", rows)[0]
    assert texts(tokenizer, sample) == ("Q:", [" yes</s>", " no</s>", " yes!</s>", " yes</s>"])
    assert values(sample, "rank", "comparison", "margin", "label") == {
        "rank": [0, 1, 0, 1],
        "comparison": [0, 0, 1, 1],
        "margin": [0.5, 0.5, 2, 2],
        "label": [1, 0, 1, 0],
    }
    assert sample.data["rank"].dtype == torch.int64 and sample.data["margin"].dtype == torch.float32
    assert (
        len(opened("paired_comparison", rows, max_pairs_per_prompt=1)[0].sequences("completion"))
        == 2
    )


def test_answers_that_begin_alike_keep_what_they_share(opened: Open, tokenizer: Tokenizer) -> None:
    sample = opened(
        "paired_comparison",
        [{"prompt": "Q:", "pos_answers": [" a b c"], "neg_answers": [" a b d"]}],
    )[0]
    assert texts(tokenizer, sample) == ("Q:", [" a b c</s>", " a b d</s>"])


def test_prompt(opened: Open, tokenizer: Tokenizer) -> None:
    rows: list[Mapping[str, Any]] = [
        {"prompt": "2+2=", "answer": "4", "kwargs": [{"n": 1}], "id": "x"},
        {"prompt": [{"role": "user", "content": "Hi"}], "ground_truth": 3},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
    ]
    found = opened("prompt", rows)
    chat = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.decode(found[i].data["prompt"].tolist()) for i in range(4)]
    assert prompts == ["2+2=", chat, chat, "\n\nHuman: a\n\nAssistant:"]
    assert dict(found[0].metadata) == {
        "answer": ("4",),
        "kwargs": ([{"n": 1}],),
        "ground_truth": (None,),
        "prompt_messages": (None,),
    }
    assert found[2].metadata["prompt_messages"] == ([{"role": "user", "content": "Hi"}],)
    assert found[1].metadata["ground_truth"] == (3,)
    assert found[0].keys == ("prompt",)
    assert (
        tokenizer.decode(
            opened("prompt", [{"prompt": "Hi"}], as_chat=True)[0].data["prompt"].tolist()
        )
        == chat
    )


def test_chat(opened: Open, tokenizer: Tokenizer) -> None:
    talk = [("human", "Hi"), ("gpt", "Ho"), ("human", "More"), ("gpt", "No"), ("human", "Bye")]
    rows = [{"conversations": [{"from": who, "value": said} for who, said in talk], "id": "c"}]
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    sample = opened("chat", rows)[0]
    assert texts(tokenizer, sample) == (start, ["Ho<|im_end|>No<|im_end|>"])
    assert (
        tokenizer.decode(sample.data["completion"].tolist()[-3:]) == "No<|im_end|>"
        or sample.data["loss_mask"][-1] == 1
    )
    last = opened("chat", rows, train_on="last")[0]
    assert texts(tokenizer, last)[1] == ["No<|im_end|>"]
    with pytest.raises(ConfigError, match="train_on='first'"):
        opened("chat", rows, train_on="first")


def test_preference_of_texts(opened: Open, tokenizer: Tokenizer) -> None:
    rows: list[Mapping[str, Any]] = [
        {"prompt": "Q:", "chosen": " yes", "rejected": " no", "margin": 1},
        {"chosen": "\n\nHuman: a\n\nAssistant: b b", "rejected": "\n\nHuman: a\n\nAssistant: b c"},
        {"chosen": "the same words here", "rejected": "the same words there"},
    ]
    found = opened("preference", rows)
    assert texts(tokenizer, found[0]) == ("Q:", [" yes</s>", " no</s>"])
    assert texts(tokenizer, found[1]) == ("\n\nHuman: a\n\nAssistant:", [" b b</s>", " b c</s>"])
    assert texts(tokenizer, found[2]) == ("the same words", [" here</s>", " there</s>"])
    assert values(found[0], "rank", "margin", "label") == {
        "rank": [0, 1],
        "margin": [1, 1],
        "label": [1, 0],
    }


def test_dialogues_that_part_earlier_are_masked_by_turns(
    opened: Open, tokenizer: Tokenizer
) -> None:
    shared = "\n\nHuman: a\n\nAssistant:"
    chosen = f"{shared} b\n\nHuman: c\n\nAssistant: d"
    rejected = f"{shared} x\n\nHuman: y\n\nAssistant: z"
    sample = opened("preference", [{"chosen": chosen, "rejected": rejected}])[0]
    assert texts(tokenizer, sample) == (shared, [" b d</s>", " x z</s>"])
    assert [tokenizer.decode(ids.tolist()) for ids in sample.sequences("completion")] == [
        chosen.removeprefix(shared) + "</s>",
        rejected.removeprefix(shared) + "</s>",
    ]


def test_preference_of_messages(opened: Open, tokenizer: Tokenizer) -> None:
    user, good, bad = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"from": "gpt", "value": "Hm"},
    )
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    rows: list[Mapping[str, Any]] = [
        {"chosen": [user, good], "rejected": [user, bad]},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"conversations": [user], "chosen": good, "rejected": bad},
        {"prompt": [user], "chosen": "Ho", "rejected": "Hm"},
        {"chosen_messages": [user, good, user, good], "rejected_messages": [user, good, user, bad]},
    ]
    found = opened("preference", rows)
    for index in range(4):
        assert texts(tokenizer, found[index]) == (start, ["Ho<|im_end|>", "Hm<|im_end|>"])
    assert texts(tokenizer, found[4]) == (
        f"{start}Ho<|im_end|>\n{start}",
        ["Ho<|im_end|>", "Hm<|im_end|>"],
    )


def test_single_labelled_replies(opened: Open, tokenizer: Tokenizer) -> None:
    rows: list[Mapping[str, Any]] = [
        {"prompt": "Q:", "completion": " yes", "label": True},
        {
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}],
            "label": False,
        },
    ]
    found = opened("preference", rows)
    assert texts(tokenizer, found[0]) == ("Q:", [" yes</s>"])
    assert texts(tokenizer, found[1])[1] == ["Ho<|im_end|>"]
    assert [values(found[i], "label", "rank") for i in range(2)] == [
        {"label": [1], "rank": [0]},
        {"label": [0], "rank": [0]},
    ]


def test_ranking(opened: Open, tokenizer: Tokenizer) -> None:
    rows: list[Mapping[str, Any]] = [
        {"prompt": "Q:", "replies": [" a", " b", " c"]},
        {"messages": [{"role": "user", "content": "Hi"}], "replies": ["x", "y", "z"]},
    ]
    found = opened("ranking", rows, max_replies=2)
    assert texts(tokenizer, found[0]) == ("Q:", [" a</s>", " b</s>"])
    assert texts(tokenizer, found[1])[1] == ["x<|im_end|>", "y<|im_end|>"]
    assert values(found[0], "rank", "comparison", "margin") == {
        "rank": [0, 1],
        "comparison": [0, 0],
        "margin": [0, 0],
    }
    with pytest.raises(ConfigError, match="max_replies=1"):
        opened("ranking", rows, max_replies=1)


# -- real data


@pytest.mark.slow
def test_hh_rlhf(data_dir: Path, opened: Open, llama2: Tokenizer) -> None:
    found = opened("preference", data_dir / "hh_rlhf", use=llama2, max_seqlen=4096)
    assert len(found) == 2312
    odd = 0
    for index in range(len(found)):
        sample = found[index]
        prompt, trained = texts(llama2, sample)
        assert prompt.endswith("\n\nAssistant:")
        assert all(text.endswith("</s>") for text in trained)
        odd += int((sample.data["loss_mask"] == 0).any())
    assert odd == 5


@pytest.mark.slow
def test_open_assistant_trees(data_dir: Path, opened: Open, qwen: Tokenizer) -> None:
    path = data_dir / "oasst/en_100_tree.jsonl"
    ranked = opened("ranking", path, use=qwen, max_seqlen=4096)
    talks = opened("chat", path, use=qwen, max_seqlen=4096)
    trees = [json.loads(line) for line in path.read_text().splitlines()]

    def nodes(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        people = [reply for reply in node["replies"] if not reply["synthetic"]]
        return [{**node, "replies": people}, *(n for reply in people for n in nodes(reply))]

    every = [
        node for tree in trees if not tree["prompt"]["synthetic"] for node in nodes(tree["prompt"])
    ]
    groups = [
        [r for r in n["replies"] if r.get("rank") is not None]
        for n in every
        if n["role"] == "prompter"
    ]
    assert len(ranked) == sum(len(group) > 1 for group in groups) == 207
    leaves = {
        n["message_id"]
        for n in every
        if n["role"] == "assistant" and all(not r["replies"] for r in n["replies"])
    }
    assert {talks[i].ids[0].split("/")[1] for i in range(len(talks))} >= {n for n in leaves if n}
    first = ranked[0]
    best = texts(qwen, first)[1][0].removesuffix("<|im_end|>")
    node = next(n for n in every if n["message_id"] == first.ids[0].split("/")[1])
    assert (
        best
        == min((r for r in node["replies"] if r.get("rank") is not None), key=lambda r: r["rank"])[
            "text"
        ]
    )


@pytest.mark.slow
def test_other_real_files(data_dir: Path, opened: Open, qwen: Tokenizer) -> None:
    expected = [
        ("prompt_answer", "dolly_sample", 151),
        ("prompt_answer", "llamafactory_sft/alpaca_en_demo.json", 999),
        ("preference", "llamafactory_pref/dpo_en_demo.json", 300),
        ("preference", "llamafactory_pref/v1_dpo_demo.jsonl", 10),
        ("preference", "llamafactory_pref/kto_en_demo.json", 300),
        ("prompt", "ifeval", 541),
        ("prompt", "gsm8k/test.jsonl", 1319),
    ]
    for form, file, count in expected:
        assert len(opened(form, data_dir / file, use=qwen)) == count, file


# -- rows that cannot be used

BAD: list[tuple[str, Any, str]] = [
    ("prompt_answer", '{"prompt": "a", "answer"', "rows.jsonl:1: not JSON"),
    ("prompt_answer", [1], "a row must be a JSON object, not int"),
    ("prompt_answer", {"prompt": "a"}, "lacks the key 'answer'"),
    (
        "prompt_answer",
        {"promt": "a", "answer": "b"},
        r"lacks the key 'prompt' \(did you mean 'promt'\?\)",
    ),
    ("prompt_answer", {"prompt": "a", "answer": 4}, "'answer' must be text, not a number"),
    ("prompt_answer", {"prompt": None, "answer": "4"}, "'prompt' is null"),
    ("prompt_answer", {"prompt": "a", "answer": " \n"}, "'answer' is empty"),
    ("prompt_answer", {"chosen": "a", "rejected": "b"}, "such rows are of dataset.type=preference"),
    (
        "prompt_answer",
        {"prompt": "a", "answer": "b", "id": [1]},
        "'id' must be text or a whole number",
    ),
    (
        "paired_comparison",
        {"prompt": "a", "pos_answers": ["b"], "neg_answers": []},
        "'neg_answers' has 0 entries; it needs",
    ),
    (
        "paired_comparison",
        {"prompt": "a", "pos_answers": ["b", "c"], "neg_answers": ["d"]},
        "2 entries and 'neg_answers' 1",
    ),
    (
        "paired_comparison",
        {"prompt": "a", "pos_answers": "b", "neg_answers": ["d"]},
        "'pos_answers' must be a list of texts",
    ),
    (
        "paired_comparison",
        {"prompt": "a", "pos_answers": ["b"], "neg_answers": [""]},
        "'neg_answers', entry 1, is empty",
    ),
    (
        "paired_comparison",
        {"prompt": "a", "pos_answers": ["b"], "neg_answers": ["c"], "margin": "x"},
        "'margin' must be a finite",
    ),
    ("prompt", {"prompt": ""}, "'prompt' is empty"),
    ("prompt", {"text": "a"}, "lacks the key 'prompt'"),
    (
        "prompt",
        {"prompt": [{"role": "assistant", "content": "x"}]},
        "no turn that a reply could follow",
    ),
    ("chat", {"messages": []}, "the list of messages is empty"),
    ("chat", {"messages": [{"role": "user", "content": "x"}]}, "no turn of the assistant"),
    (
        "chat",
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
        "message 2: .* is empty",
    ),
    ("chat", {"messages": [{"role": "asistant", "content": "x"}]}, "did you mean assistant"),
    (
        "preference",
        {"prompt": "a", "completion": "b", "label": 2},
        r"'label' must be true or false \(or 1 or 0\), not 2",
    ),
    ("preference", {"chosen": "a"}, "lacks the key 'rejected'"),
    ("preference", {"prompt": "a", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
    (
        "preference",
        {"chosen": "\n\nHuman: a", "rejected": "\n\nHuman: a\n\nAssistant: b"},
        "does not end with the assistant",
    ),
    (
        "prompt_answer",
        {
            "prompt": [{"role": "user", "content": "x"}],
            "completion": [{"role": "assistant", "content": "y"}],
        },
        "'completion' holds messages, not text; such rows are of dataset.type=chat",
    ),
    (
        "paired_comparison",
        {
            "prompt": [{"role": "user", "content": "x"}],
            "completion": [{"role": "assistant", "content": "y"}],
        },
        "such rows are of dataset.type=chat",
    ),
    ("chat", {"prompt": "x", "completion": "y"}, "such rows are of dataset.type=prompt_answer"),
    (
        "prompt_answer",
        {"instruction": "a", "label": None, "kto_tag": True},
        "such rows are of dataset.type=preference",
    ),
    (
        "preference",
        {"prompt": "a", "completion": "b", "label": None},
        "'label' must be true or false .*, not null",
    ),
    (
        "preference",
        {"prompt": "a", "completion": "b", "kto_tag": "no"},
        "'kto_tag' must be true or false .*, not 'no'",
    ),
    (
        "preference",
        {"prompt": "a", "chosen": None, "rejected": "b", "label": True},
        "'chosen' is null",
    ),
    ("ranking", {"prompt": "a", "replies": ["b"]}, "'replies' has 1 entries; it needs at least 2"),
    ("ranking", {"replies": ["b", "c"]}, "lacks the key 'prompt'"),
]


@pytest.mark.parametrize(("form", "row", "wrong"), BAD)
def test_bad_rows_are_named(opened: Open, form: str, row: Any, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong) as caught:
        opened(form, [row])
    assert caught.value.reports[0].split(": ")[0].endswith("rows.jsonl:1")


def test_all_bad_rows_are_reported_up_to_twenty(opened: Open) -> None:
    rows = [{"prompt": "a", "answer": "b" if i % 2 else ""} for i in range(1200)]
    with pytest.raises(DataError) as caught:
        opened("prompt_answer", rows)
    assert len(caught.value.reports) == 600
    shown = str(caught.value).splitlines()
    assert (
        len(shown) == 21
        and shown[-1] == "... and 580 more"
        and "rows.jsonl:39: 'answer' is empty" in shown[19]
    )


def test_rows_of_another_form_are_one_report(opened: Open) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": True} for _ in range(30)]
    with pytest.raises(DataError) as caught:
        opened("paired_comparison", rows)
    (told,) = str(caught.value).splitlines()
    assert (
        "rows.jsonl:1, " in told
        and "rows.jsonl:3, ...: each of the 30 rows lacks the key 'pos_answers'" in told
    )
    assert told.endswith("such rows are of dataset.type=preference)")
    with pytest.raises(DataError, match=r"rows.jsonl:2: lacks the key 'answer'") as caught:
        opened("prompt_answer", [{"prompt": "a", "answer": "b"}, {"prompt": "a"}])
    assert len(caught.value.reports) == 1


def test_reports_are_in_the_order_of_the_lines(opened: Open) -> None:
    rows = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"prompt": ""}]
    with pytest.raises(DataError) as caught:
        opened("prompt", rows)
    assert [report.split(": ")[0][-1] for report in caught.value.reports] == ["2", "3"]


def test_ids_are_unique(opened: Open) -> None:
    rows = [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}]
    with pytest.raises(DataError, match=r"rows.jsonl:3: the id 'a' is taken by .*rows.jsonl:1"):
        opened("prompt", rows)


def test_numbers_of_rows_without_an_id_avoid_the_ids_that_others_have(opened: Open) -> None:
    given = ["a", None, "1", "row-1", None, 0]
    rows = [{"id": id, "prompt": "x"} if id is not None else {"prompt": "x"} for id in given]
    found = opened("prompt", rows)
    assert [found[i].ids[0] for i in range(6)] == ["a", "row-row-1", "1", "row-1", "4", "0"]


def test_tokenizers_that_lack_something(opened: Open, with_template: Make) -> None:
    bare = with_template(None)
    with pytest.raises(UserError, match="no chat template"):
        opened("chat", [{"messages": [{"role": "user", "content": "x"}]}], use=bare)
    with pytest.raises(UserError, match="no chat template"):
        opened("prompt", [{"prompt": [{"role": "user", "content": "x"}]}], use=bare)
    bare.hf.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        opened("prompt_answer", [{"prompt": "a", "answer": "b"}], use=bare)
    bare.hf.eos_token = "</s>"


# -- rows that are too long


def test_overlong_rows(opened: Open, tokenizer: Tokenizer) -> None:
    words = " ".join(["a"] * 20)
    rows = [
        {"prompt": words, "answer": " b"},
        {"prompt": "a", "answer": f" {words}"},
        {"prompt": "a", "answer": " b"},
    ]
    cut = opened("prompt_answer", rows, max_seqlen=10)
    assert [texts(tokenizer, cut[i]) for i in range(3)] == [
        (" a" * 8, [" b</s>"]),
        ("a", [" a" * 9]),
        ("a", [" b</s>"]),
    ]
    report = cut.table.report  # type: ignore[attr-defined]
    assert (report.rows, report.prompts_cut, report.answers_cut, report.dropped) == (3, 1, 1, 0)
    right = opened("prompt_answer", rows, max_seqlen=10, truncate_side="right")
    assert texts(tokenizer, right[0])[0] == "a" + " a" * 7
    dropped = opened("prompt_answer", rows, max_seqlen=10, overlong="drop")
    assert len(dropped) == 1 and dropped[0].ids == ("2",)
    assert dropped.table.report.dropped == 2  # type: ignore[attr-defined]
    with pytest.raises(DataError) as caught:
        opened("prompt_answer", rows, max_seqlen=10, overlong="error")
    (told,) = caught.value.reports
    assert (
        "rows.jsonl:1, " in told
        and "rows.jsonl:2: 2 of 3 rows are too long (the row has 22 tokens, more than " in told
    )
    assert "raise dataset.max_seqlen" in told and "dataset.overlong=drop" in told
    with pytest.raises(
        DataError, match=r"the prompt has 20 tokens, more than dataset.max_prompt_len=4"
    ):
        opened("prompt_answer", rows, max_prompt_len=4, overlong="error")
    with pytest.raises(DataError, match="no row is left"):
        opened("prompt_answer", rows[:2], max_seqlen=5, overlong="drop")


def test_answers_give_way_before_prompts(opened: Open, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": " a" * 9, "answer": " b" * 9}, {"prompt": " a" * 10, "answer": " b" * 9}]
    found = opened("prompt_answer", rows, max_seqlen=10)
    assert texts(tokenizer, found[0]) == (" a" * 9, [" b"])
    # no room for an answer after the whole prompt
    assert texts(tokenizer, found[1]) == (" a" * 5, [" b" * 5])


def test_a_row_that_is_cut_at_both_ends_counts_for_both(opened: Open) -> None:
    rows = [
        {"prompt": " a" * 20, "answer": " b" * 20},
        {"prompt": " a" * 20, "answer": " b"},
        {"prompt": "a", "answer": "b"},
    ]
    report = opened("prompt_answer", rows, max_seqlen=10).table.report  # type: ignore[attr-defined]
    assert (
        report.prompts_cut,
        report.answers_cut,
        report.both_cut,
        report.dropped,
        report.too_long,
    ) == (2, 1, 1, 0, 2)
    report = opened("prompt_answer", rows, max_seqlen=12, max_prompt_len=4).table.report  # type: ignore[attr-defined]
    assert (report.prompts_cut, report.answers_cut, report.both_cut, report.too_long) == (
        2,
        1,
        1,
        2,
    )


def test_a_cut_prompt_keeps_its_bos(opened: Open, with_template: Make) -> None:
    tokenizer = with_template(None, add_bos=True)
    rows = [{"prompt": " ".join(["a"] * 20)}]
    sample = opened("prompt", rows, use=tokenizer, max_prompt_len=4, overlong="truncate")[0]
    assert tokenizer.decode(sample.data["prompt"].tolist()) == "<s> a a a"


def test_prompts_that_are_too_long_are_an_error_unless_asked_otherwise(opened: Open) -> None:
    rows = [{"prompt": "a " * 400, "answer": "b"}, {"prompt": "a"}]
    assert opened("prompt", rows)[0].num_tokens("prompt") == 401
    with pytest.raises(
        DataError,
        match=r"1 of 2 rows are too long \(the prompt has 401 tokens.*max_prompt_len=300\); raise",
    ):
        opened("prompt", rows, max_prompt_len=300)
    assert opened("prompt", rows, max_prompt_len=300, overlong="drop")[0].ids == ("1",)
    assert (
        opened("prompt", rows, max_prompt_len=300, overlong="truncate")[0].num_tokens("prompt")
        == 300
    )
    assert opened("prompt_answer", rows[:1], max_prompt_len=300)[0].num_tokens("prompt") == 300


def test_pairs_lose_both_ends_alike(opened: Open) -> None:
    rows = [{"prompt": " a" * 20, "pos_answers": [" b" * 20], "neg_answers": [" c"]}]
    sample = opened("paired_comparison", rows, max_seqlen=16)[0]
    assert sample.num_tokens("prompt") == 8 and sample.lengths["completion"].tolist() == [8, 2]


def test_unknown_arguments_are_named(opened: Open) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.args.answer_kye='x': no such argument; did you mean answer_key"
    ):
        opened("prompt_answer", [{"prompt": "a", "answer": "b"}], answer_kye="x")
    with pytest.raises(ConfigError, match="overlong='cut'"):
        opened("prompt_answer", [{"prompt": "a", "answer": "b"}], overlong="cut")


@pytest.mark.parametrize(
    ("usual", "type", "count"),
    [("prompt_answer", "chat", 2), ("paired_comparison", "ranking", 1), ("prompt", "prompt", 2)],
)
def test_trees_are_recognized(
    tmp_path: Path, with_template: Make, usual: str, type: str, count: int
) -> None:
    def node(id: str, role: str, *replies: Any, **more: Any) -> dict[str, Any]:
        return {
            "message_id": id,
            "role": role,
            "text": f"text of {id}",
            "replies": list(replies),
            **more,
        }

    best = node("b", "assistant", node("d", "prompter", node("e", "assistant")), rank=0)
    tree = {
        "message_tree_id": "a",
        "prompt": node("a", "prompter", best, node("c", "assistant", rank=1)),
    }
    (tmp_path / "trees.jsonl").write_text(json.dumps(tree))
    spec = DatasetSpec(
        path=str(tmp_path / "trees.jsonl"), train_bs_n_seqs=1, cache_dir=str(tmp_path / "cache")
    )
    tokenizer = with_template(templates.CHATML)
    data = load_data(spec, usual, tokenizer, seed=1, progress=False)
    (counts,) = data.counts
    assert (counts.type, counts.train) == (type, count)
    if type == "prompt":
        table = data.parts[0].dataset.table  # type: ignore[attr-defined]
        assert sorted(table.sample.ids) == ["0/a", "0/d"]
        said = [
            [m["content"][-1] for m in talk] for talk in table.sample.metadata["prompt_messages"]
        ]
        assert sorted(said) == [["a"], ["a", "b", "d"]]
    loose = tmp_path / "messages.jsonl"
    loose.write_text(
        json.dumps({"message_id": "a", "parent_id": None, "role": "prompter", "text": "hi"})
    )
    with pytest.raises(
        DataError,
        match=r"messages\.jsonl:1: is one message of an Open-Assistant export; dataset\.named=",
    ):
        load_data(replace(spec, path=str(loose)), usual, tokenizer, seed=1, progress=False)
