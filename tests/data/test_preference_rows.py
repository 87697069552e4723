"""Preference rows in common formats: the prompt, the trained part, and the unused parts."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import templates

from weft.data.datasets.base import DatasetUtility, MapDataset
from weft.data.loader import load_data
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import skip_progress
from weft.errors import DataError
from weft.registry import datasets

Make = Callable[..., Tokenizer]
Open = Callable[..., MapDataset]

USER = {"role": "user", "content": "Hi"}
GOOD, BAD = {"role": "assistant", "content": "Ho"}, {"role": "assistant", "content": "Hm"}
START = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


@pytest.fixture
def opened(tmp_path: Path, tokenizer: Tokenizer) -> Open:
    def build(form: str, *rows: Mapping[str, Any], **options: Any) -> MapDataset:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        util = DatasetUtility(tokenizer, cache_dir=str(tmp_path / "cache"), progress=skip_progress)
        made = datasets.get(form)(util=util, path=str(path), **options)
        assert isinstance(made, MapDataset)
        return made

    return build


def whole(tokenizer: Tokenizer, sample: SequenceSample) -> list[str]:
    """Return each sequence, prompt and completion, as text."""
    prompt = sample.sequences("prompt")[0].tolist()
    return [tokenizer.decode([*prompt, *ids.tolist()]) for ids in sample.sequences("completion")]


def learned(tokenizer: Tokenizer, sample: SequenceSample) -> list[str]:
    """Return the trained part of each completion."""
    pairs = zip(sample.sequences("completion"), sample.sequences("loss_mask"), strict=True)
    return [tokenizer.decode(ids[mask > 0].tolist()) for ids, mask in pairs]


CONVERSATIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, START),
    (
        {"prompt": "Hi", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        START,
    ),
    ({"messages": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, START),
    ({"messages": [USER, GOOD], "chosen": "Ho", "rejected": "Hm"}, START),
    ({"prompt": "Hi", "messages": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, START),
    ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, START),
    ({"system": "Be brief.", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, SYSTEM + START),
    (
        {"system": "Be brief.", "prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        SYSTEM + START,
    ),
    (
        {
            "system": "no",
            "prompt": [{"role": "system", "content": "Be brief."}, USER],
            "chosen": "Ho",
            "rejected": "Hm",
        },
        SYSTEM + START,
    ),
    (
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Ho"},
            "rejected": {"from": "gpt", "value": "Hm"},
        },
        START,
    ),
]


@pytest.mark.parametrize(("row", "prompt"), CONVERSATIONS)
def test_a_conversation_is_rendered_once(
    opened: Open, tokenizer: Tokenizer, row: Mapping[str, Any], prompt: str
) -> None:
    sample = opened("preference", row)[0]
    assert whole(tokenizer, sample) == [f"{prompt}Ho<|im_end|>", f"{prompt}Hm<|im_end|>"]
    assert learned(tokenizer, sample) == ["Ho<|im_end|>", "Hm<|im_end|>"]
    assert tokenizer.decode(sample.data["prompt"].tolist()).startswith(prompt[:-1])


def test_several_turns_share_what_they_share(opened: Open, tokenizer: Tokenizer) -> None:
    more = {"role": "user", "content": "More"}
    row = {"prompt": "Hi", "chosen": [USER, GOOD, more, GOOD], "rejected": [USER, GOOD, more, BAD]}
    again = START.replace("Hi", "More")
    assert learned(tokenizer, opened("preference", row)[0]) == ["Ho<|im_end|>", "Hm<|im_end|>"]
    assert (
        whole(tokenizer, opened("preference", row)[0])[0]
        == f"{START}Ho<|im_end|>\n{again}Ho<|im_end|>"
    )


def test_one_conversation_and_one_reply_do_not_go_together(opened: Open) -> None:
    with pytest.raises(
        DataError,
        match=r"rows.jsonl:1: one of the two answers is a whole conversation and the other",
    ):
        opened("preference", {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [BAD]})


TEXTS: list[Mapping[str, Any]] = [
    {"prompt": "2+2="},
    {"instruction": "Add"},
    {"instruction": "Add", "input": "2 2"},
    {"question": "Two?"},
    {"system": "Be brief.", "instruction": "Add", "input": "2 2"},
    {"system": "Be brief.", "prompt": "2+2="},
    {"instruction": "Add", "input": "2 2", "history": [["One?", "1"], ["Two?", "2"]]},
]


@pytest.mark.parametrize("as_chat", [False, True])
@pytest.mark.parametrize("asked", TEXTS)
def test_every_form_renders_a_prompt_as_sft_does(
    opened: Open, tokenizer: Tokenizer, asked: Mapping[str, Any], as_chat: bool
) -> None:
    def ids(sample: SequenceSample) -> list[list[int]]:
        prompt = sample.sequences("prompt")[0].tolist()
        return [[*prompt, *completion.tolist()] for completion in sample.sequences("completion")]

    taught = [
        ids(opened("prompt_answer", {**asked, "answer": answer}, as_chat=as_chat)[0])[0]
        for answer in ("yes", "no")
    ]
    for form, answers in (
        ("preference", {"chosen": "yes", "rejected": "no"}),
        ("paired_comparison", {"pos_answers": ["yes"], "neg_answers": ["no"]}),
        ("ranking", {"replies": ["yes", "no"]}),
    ):
        assert ids(opened(form, {**asked, **answers}, as_chat=as_chat)[0]) == taught, form
    single = opened("preference", {**asked, "completion": "yes", "label": True}, as_chat=as_chat)[0]
    assert ids(single) == taught[:1]
    prompt = opened("prompt", asked, as_chat=as_chat)[0].data["prompt"].tolist()
    assert [each[: len(prompt)] for each in taught] == [prompt, prompt]


def test_an_alpaca_row_as_text(opened: Open, tokenizer: Tokenizer) -> None:
    row = {
        "system": "Be brief.",
        "instruction": "Add",
        "input": "2 2",
        "chosen": "4",
        "rejected": "5",
    }
    plain = opened("preference", row)[0]
    assert whole(tokenizer, plain) == ["Be brief.\nAdd\n2 2\n4</s>", "Be brief.\nAdd\n2 2\n5</s>"]
    chat = opened("preference", {**row, "history": [["One?", "1"]]}, as_chat=True)[0]
    turns = "<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
    asked = "<|im_start|>user\nAdd\n2 2<|im_end|>\n<|im_start|>assistant\n"
    assert whole(tokenizer, chat)[0] == f"{SYSTEM}{turns}{asked}4<|im_end|>"


def test_dialogues_as_chat(opened: Open, tokenizer: Tokenizer) -> None:
    shared = "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: More"
    row = {"chosen": f"{shared}\n\nAssistant: Ho", "rejected": f"{shared}\n\nAssistant: Hm"}
    again = START.replace("Hi", "More")
    sample = opened("preference", row, as_chat=True)[0]
    assert whole(tokenizer, sample) == [
        f"{START}Ho<|im_end|>\n{again}{said}<|im_end|>" for said in ("Ho", "Hm")
    ]
    assert learned(tokenizer, sample) == ["Ho<|im_end|>", "Hm<|im_end|>"]
    prompt = opened("prompt", row, as_chat=True)[0]
    assert tokenizer.decode(prompt.data["prompt"].tolist()) == f"{START}Ho<|im_end|>\n{again}"
    given = {
        "prompt": f"{shared}\n\nAssistant:",
        "chosen": row["chosen"],
        "rejected": row["rejected"],
    }
    assert whole(tokenizer, opened("preference", given)[0]) == whole(
        tokenizer, opened("preference", row)[0]
    )


def test_labels_are_true_or_one(opened: Open) -> None:
    rows = [{"prompt": "a", "completion": " b", "label": label} for label in (True, 1, False, 0)]
    found = opened("preference", *rows)
    assert [found[index].data["label"].tolist() for index in range(4)] == [[1], [1], [0], [0]]


def test_a_conversation_gets_the_system_column(opened: Open, tokenizer: Tokenizer) -> None:
    sample = opened("chat", {"system": "Be brief.", "conversations": [USER, GOOD]})[0]
    assert whole(tokenizer, sample) == [f"{SYSTEM}{START}Ho<|im_end|>"]


def test_columns_that_are_not_used_are_said_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {
        "prompt": "Hi",
        "messages": [USER, GOOD],
        "chosen": [USER, GOOD],
        "rejected": [USER, BAD],
        "score_chosen": 8.0,
    }
    path = tmp_path / "ultra.jsonl"
    path.write_text("\n".join(json.dumps({**row, "empty": None}) for _ in range(3)))
    for _ in range(2):  # the second time, from the cache
        spec = DatasetSpec(path=str(path), train_bs_n_seqs=2, cache_dir=str(tmp_path / "cache"))
        data = load_data(spec, "preference", tokenizer, seed=1, progress=False)
        assert data.notes == (
            "ultra: columns that rows of type preference do not use: messages, prompt, "
            "score_chosen",
        )
    lines = [{"prompt": "a", "answer": "b", "id": 1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    spec = DatasetSpec(path=str(path), train_bs_n_seqs=1, cache_dir=str(tmp_path / "cache"))
    assert load_data(spec, "prompt_answer", tokenizer, seed=1, progress=False).notes == ()
    path.write_text(json.dumps({"messages": [USER, GOOD, USER]}))
    notes = load_data(spec, "chat", tokenizer, seed=1, progress=False).notes
    assert notes == ("ultra: messages after the last reply of a row are not used",)


def test_an_empty_last_turn_of_a_dialogue_is_a_reply(opened: Open, tokenizer: Tokenizer) -> None:
    shared = "\n\nHuman: Hi\n\nAssistant: Ho\n\nHuman: More\n\nAssistant:"
    sample = opened("preference", {"chosen": f"{shared} Ho", "rejected": shared}, as_chat=True)[0]
    assert learned(tokenizer, sample) == ["Ho<|im_end|>", "<|im_end|>"]
    again = START.replace("Hi", "More")
    assert whole(tokenizer, sample)[1] == f"{START}Ho<|im_end|>\n{again}<|im_end|>"
    with pytest.raises(
        DataError, match=r"message 1 of continuation 2: the assistant's content is empty"
    ):
        opened("preference", {"chosen": [USER, GOOD], "rejected": [USER, {**GOOD, "content": ""}]})


def test_real_dialogues_as_chat(data_dir: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    packed = (data_dir / "hh_rlhf/harmless-base_test.jsonl.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines(keepends=True)[:400]
    path = tmp_path / "hh.jsonl"
    path.write_text("".join(lines))
    util = DatasetUtility(tokenizer, cache_dir=str(tmp_path / "cache"), progress=skip_progress)
    found = datasets.get("preference")(util=util, path=str(path), as_chat=True)
    assert len(found) == 400
    for index, line in enumerate(lines):
        for name, said in zip(
            ("chosen", "rejected"), learned(tokenizer, found[index]), strict=True
        ):
            reply = json.loads(line)[name].rpartition("\n\nAssistant:")[2].strip()
            assert said.endswith(f"{reply}<|im_end|>")


@pytest.mark.parametrize(
    ("form", "replies"),
    [
        ("preference", {"chosen": " Ho", "rejected": " Hm\n"}),
        ("paired_comparison", {"pos_answers": [" Ho"], "neg_answers": [" Hm"]}),
        ("ranking", {"replies": [" Ho", " Hm"]}),
    ],
)
def test_replies_to_a_dialogue_are_stripped_as_its_turns_are(
    opened: Open, tokenizer: Tokenizer, form: str, replies: Mapping[str, Any]
) -> None:
    prompt = {"prompt": "\n\nHuman: Hi\n\nAssistant:"}
    sample = opened(form, {**prompt, **replies}, as_chat=True)[0]
    assert whole(tokenizer, sample) == [f"{START}Ho<|im_end|>", f"{START}Hm<|im_end|>"]
    plain = opened(form, {**prompt, **replies})[0]
    assert whole(tokenizer, plain)[0] == "\n\nHuman: Hi\n\nAssistant: Ho</s>"


LABELLED: list[Mapping[str, Any]] = [
    {"messages": [USER, GOOD], "label": True},
    {"messages": [USER, GOOD], "label": True, "chosen": None, "rejected": None},
    {"prompt": [USER], "completion": [GOOD], "label": 1, "chosen": None},
    {"messages": [USER, GOOD], "kto_tag": True},
    {"instruction": "Hi", "input": "", "output": "Ho", "kto_tag": True, "label": None},
]


@pytest.mark.parametrize("row", LABELLED)
def test_labels_by_either_name_and_nulls_beside_them(
    opened: Open, tokenizer: Tokenizer, row: Mapping[str, Any]
) -> None:
    found = opened("preference", row, as_chat="instruction" in row)
    assert whole(tokenizer, found[0]) == [f"{START}Ho<|im_end|>"]
    assert found[0].data["label"].tolist() == [1]
    assert found.table.report.unused == []  # type: ignore[attr-defined]


def test_a_label_beside_a_pair_is_not_read(opened: Open) -> None:
    found = opened(
        "preference",
        {"prompt": "a", "chosen": " b", "rejected": " c", "label": None, "kto_tag": None},
    )
    assert found[0].data["label"].tolist() == [1, 0]


@pytest.mark.parametrize("prompt", [[USER], "Hi"])
def test_prompts_and_completions_of_messages_are_chats(
    opened: Open, tokenizer: Tokenizer, prompt: Any
) -> None:
    more = {"role": "user", "content": "More"}
    row = {"prompt": prompt, "completion": [GOOD, more, BAD], "system": "Be brief."}
    found = opened("chat", row)
    again = START.replace("Hi", "More")
    assert whole(tokenizer, found[0]) == [f"{SYSTEM}{START}Ho<|im_end|>\n{again}Hm<|im_end|>"]
    assert learned(tokenizer, found[0]) == ["Ho<|im_end|>Hm<|im_end|>"]
    assert found.table.report.unused == []  # type: ignore[attr-defined]
    last = opened("chat", row, train_on="last")[0]
    assert learned(tokenizer, last) == ["Hm<|im_end|>"]
    context = opened("chat", {"prompt": [USER, GOOD, more], "completion": BAD})[0]
    assert learned(tokenizer, context) == ["Hm<|im_end|>"]


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
RESULT = {"role": "tool", "content": "4"}


@pytest.mark.parametrize(
    ("form", "row", "unused"),
    [
        ("chat", {"messages": [USER, GOOD, USER]}, ["messages[] after the last reply"]),
        (
            "preference",
            {"chosen": [USER, GOOD, USER], "rejected": [USER, BAD]},
            ["messages[] after the last reply"],
        ),
        ("chat", {"messages": [USER, GOOD], "tools": TOOLS}, ["tools"]),
        (
            "preference",
            {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": TOOLS},
            ["tools"],
        ),
        ("prompt", {"prompt": [USER], "tools": TOOLS}, ["tools"]),
        ("prompt", {"messages": [USER, GOOD]}, ["messages[] of the last reply"]),
        ("prompt", {"prompt": [USER], "tools": None, "answer": "4"}, []),
    ],
)
def test_parts_of_a_row_that_no_token_holds_are_said(
    opened: Open, form: str, row: Mapping[str, Any], unused: list[str]
) -> None:
    assert opened(form, row).table.report.unused == unused  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("prompt", {"prompt": [USER, CALL, RESULT]}),
        ("preference", {"prompt": [USER, CALL, RESULT], "chosen": [GOOD], "rejected": [BAD]}),
        ("chat", {"messages": [USER, {**CALL, "train": False}, RESULT, GOOD]}),
        ("ranking", {"prompt": [USER, CALL, RESULT], "replies": ["a", "b"]}),
    ],
)
def test_calls_that_a_template_leaves_out_of_a_context_are_refused(
    opened: Open, form: str, row: Mapping[str, Any]
) -> None:
    good = {"messages": [USER, GOOD]} if form == "chat" else {"prompt": [USER]}
    with pytest.raises(
        DataError,
        match=r"rows.jsonl:2: message 2: the chat template of .* not render .* tool_calls",
    ):
        opened(form, {**row, **good}, row)
