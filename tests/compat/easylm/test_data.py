"""EasyLM's forms of rows: tokens and losses by hand, and rows that cannot be used."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import make_tokenizer, write_jsonl
from weft import registry
from weft.compat.easylm.data import (
    ConversationPairEncoder,
    InstructionEncoder,
    TextFieldEncoder,
    TuluPromptEncoder,
)
from weft.data.datasets.base import DatasetUtility
from weft.data.lengths import EncodedSample
from weft.data.rows import BadRow
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError

USER = {"role": "user", "content": " Two? "}
GOOD = {"role": "assistant", "content": "4"}
BAD = {"role": "assistant", "content": "5"}
PROMPT = "<s><|user|>\nTwo?\n<|assistant|>\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, chat=False)
    return Tokenizer.load(TokenizerSpec(chat_template="tulu", add_bos_token=True), str(folder))


def encode(encoder: Any, row: dict[str, Any], tokenizer: Tokenizer) -> EncodedSample:
    (sample,) = encoder.encode(row, tokenizer)
    assert isinstance(sample, EncodedSample)
    return sample


def marked(sample: EncodedSample, tokenizer: Tokenizer, index: int = 0) -> str:
    """Return the text of a sample's prompt and one completion, trained parts in brackets."""
    text = tokenizer.decode(sample.prompt)
    ids, mask = sample.completions[index], sample.masks[index]
    begin = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or mask[at] != mask[begin]:
            part = tokenizer.decode(ids[begin:at])
            text, begin = text + (f"⟦{part}⟧" if mask[begin] else part), at
    return text


# -- preferences


def test_the_last_messages_of_both_conversations_are_trained(tokenizer: Tokenizer) -> None:
    row = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": 0.5}
    sample = encode(ConversationPairEncoder(), row, tokenizer)
    assert tokenizer.decode(sample.prompt) == PROMPT
    assert marked(sample, tokenizer, 0) == PROMPT + "⟦4</s>⟧"
    assert marked(sample, tokenizer, 1) == PROMPT + "⟦5</s>⟧"
    assert sample.values["rank"] == [0.0, 1.0] and sample.values["margin"] == [0.0, 0.0]
    with_margin = encode(ConversationPairEncoder(use_margin=True), row, tokenizer)
    assert with_margin.values["margin"] == [0.5, 0.5]


def test_earlier_turns_are_not_trained_where_conversations_part_earlier(
    tokenizer: Tokenizer,
) -> None:
    row = {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, BAD]}
    sample = encode(ConversationPairEncoder(), row, tokenizer)
    turn = "\n<|user|>\nTwo?\n<|assistant|>\n"
    assert marked(sample, tokenizer, 0) == f"{PROMPT}4</s>{turn}⟦4</s>⟧"
    assert marked(sample, tokenizer, 1) == f"{PROMPT}5</s>{turn}⟦5</s>⟧"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [USER, GOOD]}, "lacks the key 'rejected'"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "'chosen' must end with a message of the"),
        ({"chosen": "4", "rejected": "5"}, "'chosen' must be a list of messages"),
        (
            {"chosen": [USER, GOOD], "rejected": [USER, BAD], "margin": "much"},
            "margin",
        ),
    ],
)
def test_pairs_that_cannot_be_used(row: dict[str, Any], message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRow, match=re.escape(message)):
        encode(ConversationPairEncoder(use_margin=True), row, tokenizer)


# -- prompts

FORMS: list[dict[str, Any]] = [
    {"instruction": " Two? "},
    {"history_messages": [USER]},
    {"messages": [USER]},
    {"messages": [USER, GOOD]},
    {"conversation": [USER, GOOD]},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
]


@pytest.mark.parametrize("row", FORMS, ids=lambda row: "-".join(row))
def test_the_forms_of_prompts(row: dict[str, Any], tokenizer: Tokenizer) -> None:
    sample = encode(TuluPromptEncoder(), {"id": "a", "source": "s", **row}, tokenizer)
    assert tokenizer.decode(sample.prompt) == PROMPT and not sample.completions
    assert sample.metadata["source"] == "s" and "chosen" not in sample.metadata
    assert sample.metadata["prompt_messages"][-1]["role"] == "user"


def test_the_first_form_of_a_row_counts(tokenizer: Tokenizer) -> None:
    row: dict[str, Any] = {}
    for form in reversed(FORMS):
        row = {**form, **row}
    row["instruction"] = "One?"
    sample = encode(TuluPromptEncoder(), row, tokenizer)
    assert tokenizer.decode(sample.prompt) == "<s><|user|>\nOne?\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Two?"}, "its columns can be instruction, history_messages, messages"),
        ({"chosen": [USER, GOOD]}, "or chosen and rejected"),
        ({"history_messages": [USER, GOOD]}, "must end with a message of the user"),
        ({"messages": [GOOD]}, "must end with a message of the user"),
        ({"instruction": " "}, "'instruction' is empty"),
    ],
)
def test_prompts_that_cannot_be_used(
    row: dict[str, Any], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(BadRow, match=re.escape(message)):
        encode(TuluPromptEncoder(), row, tokenizer)


def test_a_prompt_has_one_beginning_token(tokenizer: Tokenizer) -> None:
    """EasyLM has two in json_torch and none in PPO (its defect g)."""
    for encoder, row in ((TuluPromptEncoder(), FORMS[0]), (InstructionEncoder(), FORMS[0])):
        ids = encode(encoder, row, tokenizer).prompt
        assert ids.count(tokenizer.bos_id or -1) == 1 == ids.index(tokenizer.bos_id or -1) + 1


def test_instructions_between_texts(tokenizer: Tokenizer) -> None:
    encoder = InstructionEncoder("Human: ", "\nAssistant: ")
    sample = encode(encoder, {"instruction": "Two?", "source": "s"}, tokenizer)
    assert tokenizer.decode(sample.prompt) == "<s>Human: Two?\nAssistant: "
    assert sample.metadata == {"source": "s", "prompt_text": "Two?"}
    usual = encode(InstructionEncoder(), {"instruction": "Two?"}, tokenizer)
    assert tokenizer.decode(usual.prompt) == PROMPT
    with pytest.raises(BadRow, match="lacks the key 'instruction'"):
        encode(encoder, {"prompt": "Two?"}, tokenizer)


# -- text fields


def fields(tokenizer: Tokenizer, text: str, row: dict[str, Any], **options: Any) -> str:
    return marked(encode(TextFieldEncoder(text, **options), row, tokenizer), tokenizer)


def test_fields_with_and_without_loss(tokenizer: Tokenizer) -> None:
    row = {"prompt": "Two?", "completion": "4", "note": "ok\n"}
    assert fields(tokenizer, "[prompt],completion", row) == "<s>Two?⟦ 4</s>⟧"
    assert fields(tokenizer, "prompt,[note],completion", row) == "<s>⟦Two?⟧ ok⟦ 4</s>⟧"
    joined = fields(tokenizer, "[prompt+note],completion", row, subfield_separator="/")
    assert joined == "<s>Two?/ok\n⟦4</s>⟧"
    options = {"prepend_text": "Q: ", "add_bos_token": False, "add_eos_token": False}
    assert fields(tokenizer, "[prompt],completion", row, **options) == "Q: Two?⟦ 4⟧"


def test_tokens_in_fields(tokenizer: Tokenizer) -> None:
    row = {"prompt": "Two?", "completion": "4"}
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert fields(tokenizer, "[<|bos|>],[prompt],completion,<|eos|>", row) == "<s> Two?⟦ 4</s>⟧"
    assert fields(tokenizer, "<|bos|>,[prompt],completion", row) == "⟦<s>⟧ Two?⟦ 4</s>⟧"
    assert fields(tokenizer, f"[<|{bos}|>],[prompt],<|{eos}|>", row) == "<s> Two?⟦</s>⟧"
    ids = tokenizer.encode("four", bos=False)
    for kind in ("i4", "u2"):
        packed = base64.b64encode(np.array(ids, f"<{kind}").tobytes()).decode()
        text = fields(
            tokenizer, "[prompt],{tokens}", {**row, "tokens": packed}, base64_token_dtype=kind
        )
        assert text == "<s>Two?⟦four</s>⟧"


def test_fields_named_by_the_row(tokenizer: Tokenizer) -> None:
    row = {"parts": "[a],b", "a": "One", "b": "two"}
    assert fields(tokenizer, "", row, fields_from_example="parts") == "<s>One⟦ two</s>⟧"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[prompt],reply", "lacks the key 'reply', which dataset.args.fields names"),
        ("<|5000|>", "<|5000|>: must be <|bos|>, <|eos|>, or an id below"),
        ("<|sep|>", "must be <|bos|>, <|eos|>, or an id"),
        ("{prompt}", "'prompt' is not base64 of i4 numbers"),
        ("{ids}", "'ids' holds ids that the tokenizer does not have"),
    ],
)
def test_fields_that_cannot_be_used(text: str, message: str, tokenizer: Tokenizer) -> None:
    ids = base64.b64encode(np.array([70000], "<i4").tobytes()).decode()
    with pytest.raises(BadRow, match=re.escape(message)):
        fields(tokenizer, text, {"prompt": "Two?", "ids": ids})


def test_options_of_fields_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"dataset.args.fields: is empty"):
        TextFieldEncoder("")
    with pytest.raises(ConfigError, match=r"base64_token_dtype='f4': must be one of i2"):
        TextFieldEncoder(base64_token_dtype="f4")


def test_without_a_trained_field_nothing_is_learned(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRow, match="nothing in it is to be learned"):
        fields(tokenizer, "[prompt]", {"prompt": "Two?"}, add_eos_token=False)


# -- as dataset types


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("preference_json_torch", {"chosen": [USER, GOOD], "rejected": [USER, BAD]}),
        ("tulu_prompt", {"instruction": "Two?"}),
        ("hf_prompt", {"instruction": "Two?"}),
        ("text_fields", {"prompt": "Two?", "completion": "4"}),
    ],
)
def test_types_are_registered_and_drop_truncated_rows(
    name: str, row: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    long = json.loads(json.dumps(row).replace("Two?", "Two? " * 30))
    path = write_jsonl(tmp_path / "rows.jsonl", [row, long])
    util = DatasetUtility(tokenizer, cache_dir=str(tmp_path))
    build = registry.datasets.get(name)
    limit = {"max_prompt_len": 40} if name.endswith("prompt") else {"max_seqlen": 60}
    assert len(build(util=util, path=str(path), **limit)) == 2
    assert len(build(util=util, path=str(path), overlong="drop", **limit)) == 1


def test_a_long_prompt_keeps_the_turn_of_the_assistant(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """EasyLM cuts off the right end (its defect i)."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"instruction": "Two? " * 30}])
    util = DatasetUtility(tokenizer, cache_dir=str(tmp_path))
    dataset = registry.datasets.get("tulu_prompt")(util=util, path=str(path), max_prompt_len=20)
    ids = dataset[0].data["prompt"].tolist()
    assert len(ids) == 20 and ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids).endswith("Two?\n<|assistant|>\n")
