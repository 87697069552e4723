"""The mask covers the assistant's text and its end token, for every template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.data import tokenizer_checks
from weft.data.chat import find_generation_spans
from weft.data.messages import normalize_messages, normalize_tools
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import DataError, UserError

Make = Callable[..., Tokenizer]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there!"},
    {"role": "user", "content": "日本 <b>?"},
    {"role": "assistant", "content": "🤗 ok <b>\n\nbye"},
]


def trained(tokenizer: Tokenizer, ids: Sequence[int], mask: Sequence[bool]) -> list[str]:
    """Return the text of each run of trained tokens."""
    runs: list[list[int]] = []
    for index, (id, on) in enumerate(zip(ids, mask, strict=True)):
        if on and index and mask[index - 1]:
            runs[-1].append(id)
        elif on:
            runs.append([id])
    return [tokenizer.decode(run) for run in runs]


def check(tokenizer: Tokenizer, messages: Any, wanted: list[str], tools: Any = None) -> None:
    conversation = tokenizer.mask_chat(messages, tools)
    ids, mask = conversation.ids, conversation.mask
    assert trained(tokenizer, ids, mask) == wanted
    assert ids == tokenizer.encode_chat(messages, tools)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("CHATML", ["Hello there!<|im_end|>", "🤗 ok <b>\n\nbye<|im_end|>"]),
        ("MARKED", ["Hello there!<|im_end|>", "🤗 ok <b>\n\nbye<|im_end|>"]),
        ("HEADERS", ["Hello there!<|eot_id|>", "🤗 ok <b>\n\nbye<|eot_id|>"]),
        ("INST", [" Hello there! </s>", " 🤗 ok <b>\n\nbye </s>"]),
        ("WORDS", ["Hello there!</s>", "🤗 ok <b>\n\nbye</s>"]),
        (
            "THINKING",
            ["Hello there!<|im_end|>", "<think>\n\n</think>\n\n🤗 ok <b>\n\nbye<|im_end|>"],
        ),
        ("OPENS", ["Hello there!<|im_end|>", "🤗 ok <b>\n\nbye<|im_end|>"]),
        ("LATE_TOOLS", ["Hello there!<|im_end|>", "🤗 ok <b>\n\nbye<|im_end|>"]),
        ("LAST_ENDS", ["Hello there!<|im_end|>", "🤗 ok <b>\n\nbye<|eot_id|>"]),
    ],
)
def test_the_mask_is_what_the_assistant_wrote(
    with_template: Make, template: str, wanted: list[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] if template == "LATE_TOOLS" else None
    check(with_template(getattr(templates, template)), TALK, wanted, tools)


def test_a_reply_that_begins_like_the_generation_prompt(with_template: Make) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "<b>yes</b>"}]
    check(with_template(templates.OPENS), talk, ["<b>yes</b><|im_end|>"])


def test_reasoning_is_the_assistants(with_template: Make) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "4", "reasoning_content": "2+2"}]
    check(with_template(templates.THINKING), talk, ["<think>\n2+2\n</think>\n\n4<|im_end|>"])


def test_a_template_without_end_tokens_gets_eos_after_the_last_reply(with_template: Make) -> None:
    tokenizer = with_template(templates.PLAIN)
    conversation = tokenizer.mask_chat(TALK[1:])
    ids, mask = conversation.ids, conversation.mask
    assert trained(tokenizer, ids, mask) == [" Hello there!", " 🤗 ok <b>\n\nbye</s>"]
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.turn_end is None and tokenizer.list_stop_ids() == [tokenizer.eos_id]
    conversation = tokenizer.mask_chat(TALK[1:4])
    assert conversation.ids[-1] != tokenizer.eos_id  # the conversation ends with the user


def test_end_tokens_stop_generation(with_template: Make) -> None:
    tokenizer = with_template(templates.CHATML)
    assert [tokenizer.decode([id]) for id in tokenizer.list_stop_ids()] == ["</s>", "<|im_end|>"]
    assert tokenizer.turn_end == "<|im_end|>"


def test_a_turn_can_be_left_out(with_template: Make) -> None:
    talk = [TALK[1], {**TALK[2], "train": False}, TALK[3], {**TALK[4], "loss_weight": 1.0}]
    check(with_template(templates.CHATML), talk, ["🤗 ok <b>\n\nbye<|im_end|>"])


texts = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\r"), min_size=1, max_size=20
).filter(lambda text: text.strip() == text and "<" not in text)


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.lists(st.tuples(texts, texts), min_size=1, max_size=3),
    st.sampled_from(["CHATML", "MARKED", "HEADERS", "THINKING"]),
)
def test_any_text_comes_back(
    with_template: Make, turns: list[tuple[str, str]], template: str
) -> None:
    tokenizer = with_template(getattr(templates, template))
    talk = [
        m
        for ask, say in turns
        for m in ({"role": "user", "content": ask}, {"role": "assistant", "content": say})
    ]
    end = tokenizer.turn_end
    wanted = [f"{say}{end}" for _, say in turns]
    if template == "THINKING":
        wanted[-1] = f"<think>\n\n</think>\n\n{wanted[-1]}"
    check(tokenizer, talk, wanted)


def load(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    return (
        json.loads(text)
        if path.suffix == ".json"
        else [json.loads(line) for line in text.splitlines()]
    )


@pytest.mark.default_cases("llamafactory")
@pytest.mark.parametrize(
    ("file", "exact", "calls"),
    [
        ("fastchat/dummy_conversation.json", 500, 0),
        ("llamafactory_sft/v1_sft_demo.jsonl", 500, 0),
        ("llamafactory_sft/glaive_toolcall_en_demo.json", 147, 153),
        ("llamafactory_sft/reason_tool_use_demo_50.jsonl", 19, 31),
    ],
)
def test_real_conversations_with_qwens_template(
    data_dir: Path, qwen: Tokenizer, file: str, exact: int, calls: int
) -> None:
    plain = with_calls = 0
    for row in load(data_dir / file):
        talk = row.get("messages") or row["conversations"]
        conversation = qwen.mask_chat(talk, row.get("tools"))
        ids, mask = conversation.ids, conversation.mask
        found = trained(qwen, ids, mask)
        turns = [m for m in normalize_messages(talk) if m["role"] == "assistant"]
        assert len(found) == len(turns)
        for text, turn in zip(found, turns, strict=True):
            assert text.endswith("<|im_end|>")
            names = [
                f"<tool_call>\n<function={call['function']['name']}>"
                for call in turn.get("tool_calls", ())
            ]
            assert all(name in text for name in names)
            assert names or text == turn["content"] + "<|im_end|>"
        if any("tool_calls" in turn for turn in turns):
            with_calls += 1
        else:
            plain += 1
    assert (plain, with_calls) == (exact, calls)


def test_real_conversations_with_llama2(data_dir: Path, llama2: Tokenizer) -> None:
    llama2 = Tokenizer.load(
        TokenizerSpec(
            path=str(data_dir / "tokenizers/llama2/tokenizer.model"), chat_template=templates.INST
        )
    )
    for row in load(data_dir / "fastchat/dummy_conversation.json"):
        conversation = llama2.mask_chat(row["conversations"])
        ids, mask = conversation.ids, conversation.mask
        wanted = [f"{m['value'].strip()} </s>" for m in row["conversations"] if m["from"] == "gpt"]
        assert [text.strip() for text in trained(llama2, ids, mask)] == wanted
        assert ids.count(1) == sum(m["from"] == "human" for m in row["conversations"])


def test_the_arithmetic_fixtures_template(data_dir: Path, with_template: Make) -> None:
    config = json.loads(
        (data_dir / "weights/verl_arithmetic_llama_random/tokenizer_config.json").read_text()
    )
    tokenizer = with_template(config["chat_template"])
    conversation = tokenizer.mask_chat(
        [{"role": "user", "content": "0,1:"}, {"role": "assistant", "content": "2"}]
    )
    ids, mask = conversation.ids, conversation.mask
    assert trained(tokenizer, ids, mask) == ["2</s>"]
    with pytest.raises(DataError, match="refuses these messages: System role not supported"):
        tokenizer.encode_chat(TALK)


# -- messages in one shape


def test_shapes_of_messages() -> None:
    assert normalize_messages(
        [{"from": "prompter", "value": "a"}, {"from": "bot", "value": "b"}]
    ) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    parts = [
        {
            "role": "assistant",
            "content": [{"type": "reasoning", "value": "r"}, {"type": "text", "text": "t"}],
        }
    ]
    nulls = [{"role": None, "from": "gpt", "content": None, "value": "a", "tool_calls": None}]
    assert normalize_messages(nulls) == [{"role": "assistant", "content": "a"}]
    assert normalize_messages(parts) == [
        {"role": "assistant", "content": "t", "reasoning_content": "r"}
    ]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    sharegpt = [{"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]
    openai = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        }
    ]
    older = [
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "f", "arguments": '{"x": 1}'},
        }
    ]
    both = [{**openai[0], **older[0]}]
    for shape in (sharegpt, openai, older, both):
        assert normalize_messages(shape) == [
            {"role": "assistant", "content": "", "tool_calls": [call]}
        ]
    result = {"role": "function", "name": "f", "content": "2", "function_call": None}
    assert normalize_messages([result]) == [{"role": "tool", "content": "2", "name": "f"}]
    for talk in (TALK, parts, sharegpt, openai, older):
        assert normalize_messages(normalize_messages(talk)) == normalize_messages(talk)


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ("hello", "must be a list"),
        ([], "is empty"),
        ([1], "message 1 must be a mapping"),
        ([{"content": "x"}], "message 1 has no role"),
        ([{"role": "usr", "content": "x"}], "unknown role 'usr'; did you mean user"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 3}], "content must be text, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url' is not text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "needs a name"),
        ([{"from": "function_call", "value": "{"}], "function_call is not JSON"),
        (
            [{"role": "assistant", "function_call": {"arguments": "{}"}}],
            "message 1: a tool call needs a name",
        ),
        ([{"role": "assistant", "function_call": "auto"}], "message 1: function_call is not JSON"),
        (
            [
                {
                    "role": "assistant",
                    "function_call": {"name": "f"},
                    "tool_calls": [{"function": {"name": "g"}}],
                }
            ],
            "message 1: tool_calls and function_call hold different calls; keep one of them",
        ),
    ],
)
def test_bad_messages_are_named(messages: Any, wrong: str) -> None:
    with pytest.raises(DataError, match=wrong):
        normalize_messages(messages)


def test_tools_come_as_text_or_lists() -> None:
    whole = {"type": "function", "function": {"name": "f"}}
    assert normalize_tools('[{"name": "f"}]') == normalize_tools([whole]) == [whole]
    assert normalize_tools({"type": "function", "name": "f"}) == [whole]
    assert normalize_tools([{"anything": 1}]) == [{"anything": 1}]
    assert normalize_tools("") is None and normalize_tools([]) is None
    with pytest.raises(DataError, match="tools is not JSON"):
        normalize_tools("{")
    with pytest.raises(DataError, match="list of JSON schemas"):
        normalize_tools([1])


def test_a_tokenizer_without_a_template_says_so(with_template: Make) -> None:
    with pytest.raises(UserError, match=r"no chat template.*write tokenizer\.chat_template"):
        with_template(None).encode_chat(TALK)


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"name": "look_up", "arguments": {"q": "x"}}],
}


@pytest.mark.parametrize("template", ["CHATML", "MARKED", "HEADERS", "WORDS"])
@pytest.mark.parametrize(
    ("reply", "lost"),
    [
        (CALL, "tool_calls"),
        ({**CALL, "content": "Let me see."}, "tool_calls"),
        ({"role": "assistant", "content": "", "reasoning_content": "2+2"}, "reasoning_content"),
    ],
)
def test_what_a_template_does_not_render_is_no_turn_to_learn(
    with_template: Make, template: str, reply: dict[str, Any], lost: str
) -> None:
    tokenizer = with_template(getattr(templates, template))
    wrong = rf"message 3: the chat template of .* does not render the assistant's {lost}"
    for turn in (reply, {**reply, "train": False}):
        with pytest.raises(DataError, match=wrong):
            tokenizer.mask_chat([*TALK[:2], turn, *TALK[3:]])
    with pytest.raises(DataError, match=wrong):
        tokenizer.encode_context([*TALK[:2], reply, TALK[3]])


def test_marked_turns_can_be_left_out_too(with_template: Make) -> None:
    talk = [TALK[1], {**TALK[2], "weight": 0}, TALK[3], {**TALK[4], "weight": 1}]
    check(with_template(templates.MARKED), talk, ["🤗 ok <b>\n\nbye<|im_end|>"])


def test_a_template_that_marks_some_turns_only_is_refused(with_template: Make) -> None:
    once = templates.MARKED.replace(
        "m.role == 'assistant' %}{% gen", "m.role == 'assistant' and loop.last %}{% gen"
    )
    with pytest.raises(
        DataError, match=r"marks 1 parts with \{% generation %\}, and the assistant has 2 turns"
    ):
        with_template(once).mask_chat(TALK)


RESULT = {"role": "tool", "content": 'a "b"\nc'}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Finds."}}]


@pytest.mark.parametrize("template", ["LAST_ENDS", "LAST_ENDS_IN_WORDS"])
def test_no_word_of_the_user_is_trained_where_the_last_reply_ends_otherwise(
    with_template: Make, template: str
) -> None:
    """Replies and questions also occur in headers and in each other."""
    tokenizer = with_template(getattr(templates, template))
    says, asks = ["user", "a", "a", "assistant"], ["a", "assistant", "<|im_start|>", "a"]
    talk = [
        m
        for ask, say in zip(asks, says, strict=True)
        for m in ({**TALK[1], "content": ask}, {**TALK[2], "content": say})
    ]
    wanted = [f"{say}<|im_end|>" for say in says[:-1]] + ["assistant<|eot_id|>"]
    if template == "LAST_ENDS":
        check(tokenizer, talk, wanted)
        masked = tokenizer.mask_chat([*talk, TALK[1]])
        assert trained(tokenizer, masked.ids, masked.mask) == [*wanted[:-1], "assistant<|im_end|>"]
    else:
        with pytest.raises(
            DataError,
            match=r"renders message 2 so that .* part ends; put \{% generation %\} markers into",
        ):
            tokenizer.mask_chat(talk)


@pytest.mark.parametrize("reply", ["You are", "a", "Hi"])
def test_a_conversation_that_the_assistant_begins(with_template: Make, reply: str) -> None:
    talk = [{"role": "assistant", "content": reply}, TALK[1], TALK[2]]
    check(
        with_template(templates.INTRODUCED), talk, [f"{reply}<|im_end|>", "Hello there!<|im_end|>"]
    )


def test_a_turn_without_words_ends_all_the_same(with_template: Make) -> None:
    for template in ("CHATML", "MARKED", "LAST_ENDS"):
        tokenizer = with_template(getattr(templates, template))
        found = tokenizer.mask_chat([TALK[1], {"role": "assistant", "content": ""}])
        assert trained(tokenizer, found.ids, found.mask) == [tokenizer.turn_end]


def test_templates_for_parts_are_refused(with_template: Make) -> None:
    tokenizer = with_template(templates.PARTS)
    for encode in (tokenizer.encode_chat, tokenizer.mask_chat, tokenizer.encode_context):
        with pytest.raises(
            UserError,
            match=r"reads the content of a message as a list of parts.*with tokenizer\.chat_template",
        ):
            encode(TALK)
    deaf = with_template(templates.CHATML.replace("m.content", "''"))
    with pytest.raises(
        UserError, match="leaves out the words of a plain reply, and weft gives it text"
    ):
        deaf.mask_chat(TALK)
    refuses = with_template(templates.CHATML.replace("m.content", "m.content[0].text"))
    with pytest.raises(UserError, match="as a list of parts"):
        refuses.mask_chat(TALK)


def test_a_reply_that_is_rendered_elsewhere_is_no_turn_to_learn(with_template: Make) -> None:
    """The template keeps only the text after the last dash of a reply."""
    cut = with_template(templates.CHATML.replace("m.content", "m.content.split(' - ')[-1]"))
    with pytest.raises(
        DataError,
        match=r"message 2: the chat template of .* does not render the assistant's content",
    ):
        cut.mask_chat([TALK[1], {"role": "assistant", "content": "yes - no"}])
    thoughts = with_template(
        templates.CHATML.replace("m.content", "m.content.split('</think>')[-1].strip()")
    )
    check(
        thoughts,
        [TALK[1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}],
        ["yes<|im_end|>"],
    )


@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_a_template_leaves_out_of_a_context(with_template: Make, role: str) -> None:
    deaf = with_template(
        templates.CHATML.replace("for m in messages", f"for m in messages if m.role != '{role}'")
    )
    talk = [TALK[1], TALK[2], {"role": role, "content": "What?"}]
    wrong = rf"message {1 if role == 'user' else 3}: the chat template of .* does not render the {role}'s content"
    for encode in (deaf.encode_context, lambda talk: deaf.mask_chat([*talk, TALK[2]])):
        with pytest.raises(DataError, match=wrong):
            encode(talk)


def test_calls_and_their_results_in_a_context(with_template: Make) -> None:
    tokenizer = with_template(templates.CALLS)
    talk = [TALK[1], {**CALL, "content": "Let me see."}, RESULT]
    for tools, unused in ((TOOLS, {"messages[].content"}), (None, {"messages[].content"})):
        ids, told = tokenizer.encode_context(talk, tools)
        assert (
            ids == tokenizer.encode_chat(talk, tools, add_generation_prompt=True) and told == unused
        )
        found = tokenizer.mask_chat([*talk, TALK[2]], tools)
        assert found.unused == frozenset() and [cut.part for cut in found.cut] == ["content"]
        call = '{"name": "look_up", "arguments": {"q": "x"}}'
        assert trained(tokenizer, found.ids, found.mask) == [
            f"{call}<|im_end|>",
            "Hello there!<|im_end|>",
        ]
    assert tokenizer.encode_context(TALK[:2])[1] == {"messages[] of the system"}
    one = with_template(templates.CALLS.replace("in m.tool_calls", "in m.tool_calls[:1]"))
    with pytest.raises(
        DataError, match=r"message 2: .* does not render the assistant's tool_calls"
    ):
        one.encode_context(
            [TALK[1], {**CALL, "tool_calls": [*CALL["tool_calls"], {"name": "f"}]}, RESULT]
        )


@pytest.mark.parametrize("words", ["", "Let me see."])
def test_calls_before_the_tools_are_written(with_template: Make, words: str) -> None:
    """The earlier turns are rendered differently from when they were the last ones."""
    talk = [
        TALK[1],
        {**CALL, "content": words},
        {**RESULT, "content": "x"},
        TALK[2],
        TALK[3],
        CALL,
        RESULT,
        TALK[4],
    ]
    call = '<|eot_id|>{"name": "look_up", "arguments": {"q": "x"}}</s>'
    check(
        with_template(templates.LATE_CALLS),
        talk,
        [call, " Hello there!</s>", call, " 🤗 ok <b>\n\nbye</s>"],
        TOOLS,
    )


def test_tools_that_a_template_ignores_are_told(with_template: Make) -> None:
    assert with_template(templates.CHATML).encode_context([TALK[1]], TOOLS)[1] == {"tools"}
    assert with_template(templates.CHATML).mask_chat(TALK, TOOLS).unused == {"tools"}
    assert with_template(templates.CALLS).mask_chat(TALK[1:], TOOLS).unused == frozenset()


def test_a_last_turn_of_the_user_is_told(with_template: Make) -> None:
    tokenizer = with_template(templates.CHATML)
    assert tokenizer.mask_chat(TALK[:4]).unused == {"messages[] after the last reply"}
    assert tokenizer.mask_chat(TALK).unused == frozenset()


def test_a_tokenizer_with_a_template_for_tools(with_template: Make) -> None:
    """The template `tool_use` renders conversations with tools, and its markers apply to them."""
    tokenizer = with_template({"default": templates.CHATML, "tool_use": templates.MARKED})
    found = tokenizer.mask_chat(TALK, TOOLS)
    assert trained(tokenizer, found.ids, found.mask) == [
        "Hello there!<|im_end|>",
        "🤗 ok <b>\n\nbye<|im_end|>",
    ]
    other = with_template({"default": templates.CHATML, "tool_use": templates.CALLS})
    assert tokenizer.fingerprint != other.fingerprint


def test_a_template_that_ends_for_a_greeting_alone_is_stopped(
    with_template: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = "{% generation %}{% endgeneration %}"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = with_template(
        f"{{% if messages | length > 3 %}}{loop}{{% endif %}}{marks}{templates.CHATML}"
    )
    monkeypatch.setattr(tokenizer_checks, "CONVERSATION_SECONDS", 0.05)
    talk = [{"role": role, "content": "a"} for role in ("user", "assistant") * 2]
    with pytest.raises(DataError, match=r"refuses these messages: does not end within 0\.05 s"):
        tokenizer.encode_chat(talk)
    with pytest.raises(DataError, match=r"refuses these messages: does not end within 0\.05 s"):
        find_generation_spans(str(tokenizer.chat_template), talk, None, {})
