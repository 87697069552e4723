"""Contents of messages: weights of turns, names of thoughts, and keys that are ignored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import templates

from weft.data.loader import load_data
from weft.data.messages import normalize_messages, track_unread_keys
from weft.data.spec import DatasetSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError

Make = Callable[..., Tokenizer]
ASKED = {"role": "user", "content": "2+2?"}
REPLY = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("key", ["train", "weight", "loss_weight"])
@pytest.mark.parametrize(
    ("value", "is_trained"),
    [
        (True, True),
        (1, True),
        (1.0, True),
        ("1", True),
        ("true", True),
        ("True ", True),
        (None, True),
        (False, False),
        (0, False),
        (0.0, False),
        ("0", False),
        ("0.0", False),
        ("false", False),
        ("FALSE", False),
    ],
)
def test_weights_that_say_all_or_nothing(key: str, value: Any, is_trained: bool) -> None:
    (message,) = normalize_messages([{**REPLY, key: value}])
    assert message == (REPLY if is_trained else {**REPLY, "train": False})
    assert normalize_messages([message]) == [message]


@pytest.mark.parametrize("key", ["train", "weight", "loss_weight"])
@pytest.mark.parametrize("value", [0.25, "0.5", 2, -1, "no", "", [], {"a": 1}, float("nan")])
def test_other_weights_are_refused(key: str, value: Any) -> None:
    with pytest.raises(
        DataError,
        match=rf"message 2: {key}=.*: weft trains a turn of the assistant whole or not at all",
    ):
        normalize_messages([ASKED, {**REPLY, key: value}])


def test_weights_that_contradict_each_other() -> None:
    with pytest.raises(
        DataError,
        match="message 1: train=True and weight='0' contradict each other; keep one of them",
    ):
        normalize_messages([{**REPLY, "train": True, "weight": "0"}])
    assert normalize_messages([{**REPLY, "train": False, "weight": 0}]) == [
        {**REPLY, "train": False}
    ]


def test_a_weight_is_refused_with_its_row(with_template: Make, tmp_path: Path) -> None:
    rows = [
        {"messages": [ASKED, REPLY]},
        {"messages": [ASKED, REPLY, ASKED, {**REPLY, "weight": 0.25}]},
    ]
    with pytest.raises(
        DataError,
        match=r"talks\.jsonl:2: message 4: weight=0\.25: .* write 1 \(true\) or 0 \(false\)",
    ):
        load(rows, "chat", with_template(templates.CHATML), tmp_path)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_one_name(key: str) -> None:
    assert normalize_messages([{**REPLY, key: "2+2"}]) == [{**REPLY, "reasoning_content": "2+2"}]
    assert normalize_messages([{**REPLY, key: ""}, {**REPLY, key: None}]) == [REPLY, REPLY]


def test_thoughts_under_two_names() -> None:
    assert normalize_messages([{**REPLY, "reasoning": "a", "reasoning_content": "a"}]) == [
        {**REPLY, "reasoning_content": "a"}
    ]
    with pytest.raises(
        DataError,
        match="message 1: reasoning_content and reasoning hold different thoughts; keep one",
    ):
        normalize_messages([{**REPLY, "reasoning": "a", "reasoning_content": "b"}])
    with pytest.raises(DataError, match="message 1: reasoning must be text, not dict"):
        normalize_messages([{**REPLY, "reasoning": {"summary": "a"}}])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize(
    "read", ["m.reasoning_content", "m['reasoning']", "m.thinking", 'm["reasoning_content"]']
)
def test_thoughts_come_under_the_name_that_the_template_reads(
    with_template: Make, key: str, read: str
) -> None:
    marked = templates.MARKED.replace(
        "{{ m.content }}{% endgen", "{{ m.reasoning_content ~ '|' ~ m.content }}{% endgen"
    )
    for template in (templates.THINKING, marked):
        tokenizer = with_template(template.replace("m.reasoning_content", read))
        found = tokenizer.mask_chat([ASKED, {**REPLY, key: "2+2"}])
        text = tokenizer.decode([id for id, on in zip(found.ids, found.mask, strict=True) if on])
        assert "2+2" in text and found.unused == frozenset() and found.cut == ()


CALL = {
    "id": "c1",
    "type": "function",
    "index": 3,
    "function": {"name": "f", "arguments": {}, "parameters": {"a": 1}},
}


def test_keys_that_nobody_reads(with_template: Make, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2+2?", "cache_control": {"type": "ephemeral"}}]
    talk = [
        {"role": "user", "content": parts, "weight": 1, "refusal": None, "annotations": []},
        {
            **REPLY,
            "reasoning_details": [{"text": "hm"}],
            "logprobs": {},
            "lang": "en",
            "name": "bot",
        },
        {"role": "user", "content": "again", "train": 0.5},
        {**REPLY, "tool_calls": [CALL], "loss": False},
    ]
    with track_unread_keys() as found:
        normalize_messages(normalize_messages(talk))
    assert found == {
        "messages[].content[].cache_control",
        "messages[].weight of the user",
        "messages[].train of the user",
        "messages[].reasoning_details",
        "messages[].loss",
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].function.parameters",
    }
    rows = [{"messages": talk[:2], "mood": "good"}, {"messages": [ASKED, {**REPLY, "loss": True}]}]
    (note,) = load(rows, "chat", with_template(templates.CHATML), tmp_path)
    assert note == (
        "talks: columns that rows of type chat do not use: messages[].content[].cache_control, "
        "messages[].loss, "
        "messages[].reasoning_details, messages[].weight of the user, mood"
    )


@pytest.mark.parametrize(
    ("type", "row"),
    [
        ("prompt", {"prompt": [{**ASKED, "mood": "good"}]}),
        ("prompt_answer", {"prompt": [{**ASKED, "mood": "good"}], "answer": "4"}),
        (
            "preference",
            {"prompt": [ASKED], "chosen": [{**REPLY, "mood": "good"}], "rejected": [REPLY]},
        ),
        ("ranking", {"prompt": [{**ASKED, "mood": "good"}], "replies": ["4", "5"]}),
    ],
)
def test_keys_that_nobody_reads_in_every_form(
    with_template: Make, tmp_path: Path, type: str, row: Any
) -> None:
    (note,) = load([row], type, with_template(templates.CHATML), tmp_path)
    assert note == f"talks: columns that rows of type {type} do not use: messages[].mood"


@pytest.mark.parametrize(
    ("type", "row", "wrong"),
    [
        ("prompt", {"prompt": 3}, "'prompt' must be text or a list of messages .*, not a number"),
        (
            "prompt",
            {"messages": True},
            "'messages' must be text or a list of messages .*, not true or false",
        ),
        (
            "prompt_answer",
            {"question": 3, "answer": "x"},
            "'question' must be text or a list of messages .*, not a number",
        ),
        (
            "chat",
            {"conversations": "hi"},
            "'conversations' must be a list of messages .*, not text",
        ),
        ("chat", {"messages": 0.5}, "'messages' must be a list of messages .*, not a number"),
        (
            "chat",
            {"prompt": 3, "completion": [REPLY]},
            "'prompt' must be text or a list of messages .*, not a number",
        ),
        (
            "chat",
            {"prompt": "a", "completion": [{"content": "b"}]},
            "'completion': message 1 has no role",
        ),
        (
            "preference",
            {"prompt": "a", "chosen": "b", "rejected": 3},
            "'rejected' must be text or a list .*, not a number",
        ),
        (
            "preference",
            {"prompt": 3, "chosen": "b", "rejected": "c"},
            "'prompt' must be text or a list .*, not a number",
        ),
        (
            "preference",
            {"messages": 3, "label": True},
            "'messages' must be a list of messages .*, not a number",
        ),
        (
            "ranking",
            {"prompt": 3, "replies": ["a", "b"]},
            "'prompt' must be text or a list of messages .*, not a number",
        ),
    ],
)
def test_a_column_of_another_kind_is_named(
    with_template: Make, tmp_path: Path, type: str, row: Any, wrong: str
) -> None:
    with pytest.raises(DataError, match=rf"talks\.jsonl:1: {wrong}"):
        load([row], type, with_template(templates.CHATML), tmp_path)


def load(
    rows: list[dict[str, Any]], type: str, tokenizer: Tokenizer, folder: Path
) -> tuple[str, ...]:
    """Return the notes on a file of these rows."""
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = DatasetSpec(
        path=str(folder / "talks.jsonl"), train_bs_n_seqs=1, cache_dir=str(folder / "cache")
    )
    return load_data(spec, type, tokenizer, seed=1, progress=False).notes


def test_older_function_calls_are_trained_and_reported_nowhere(
    with_template: Make, tmp_path: Path
) -> None:
    """OpenAI's older form: `function_call`, the role `function`, schemas in a column `functions`."""
    talk = [
        ASKED,
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
        },
        {"role": "function", "name": "add", "content": "4"},
        REPLY,
    ]
    row = {
        "messages": talk,
        "functions": [{"name": "add", "parameters": {"type": "object", "properties": {}}}],
    }
    tokenizer, file = with_template(templates.CALLS), tmp_path / "older.jsonl"
    file.write_text(json.dumps(row))
    columns = {"tools": "functions"}
    spec = DatasetSpec(
        path=str(file), columns=columns, train_bs_n_seqs=1, cache_dir=str(tmp_path / "cache")
    )
    loaded = load_data(spec, "chat", tokenizer, seed=1, progress=False)
    assert loaded.notes == ()
    sample = loaded.parts[0][0]
    text = tokenizer.decode([*sample.data["prompt"].tolist(), *sample.data["completion"].tolist()])
    assert (
        '{"name": "add", "parameters"' in text
        and '{"name": "add", "arguments": {"a": 2, "b": 2}}' in text
    )
    assert "<|im_start|>tool\n" in text
