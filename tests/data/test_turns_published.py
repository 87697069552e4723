"""Published chat templates, as in TRL: all of the assistant's words are trained, and no others."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from weft.data.tokenizer import Tokenizer
from weft.errors import DataError, UserError

found = importlib.util.find_spec("trl")
FILES = (
    sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    if found and found.origin
    else []
)
NAMES = [file.stem for file in FILES if not file.stem.endswith("_training")]
FOR_PARTS = ("idefics3", "smolvlm", "llava_next")
TOKENS = re.compile(
    r"<[|｜][^'\"{}\s]{1,40}?[|｜]>|</?[a-z_]+_of_turn>|<\|?turn\|?>|</?think>|</?tool_call>|<\|?channel\|?>"
)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str, thought: str = "") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"reasoning_content": thought} if thought else {}),
    }


def asks(city: str, thought: str = "") -> dict[str, Any]:
    call = {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": city} if city else {}},
    }
    return {**says("", thought), "tool_calls": [call]}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "content": content}


TALKS: dict[str, list[dict[str, Any]]] = {
    "plain": [user("alpha?"), says("bravo"), user("charlie?"), says("delta")],
    "alike": [user("user"), says("assistant"), user("a"), says("final"), user("model"), says("e")],
    "begun": [says("You are"), user("alpha?"), says("bravo")],
    "thoughts": [
        user("alpha?"),
        says("bravo", "hm"),
        user("charlie?"),
        says("delta", "well"),
        user("e?"),
        says("fox", "so"),
    ],
    "calls": [
        user("alpha?"),
        asks("Rome"),
        tool("Rome"),
        says("delta"),
        user("charlie?"),
        asks(""),
        tool("x"),
        says("fox"),
    ],
    "thoughtful calls": [
        user("alpha?"),
        asks("Rome", "hm"),
        tool("Rome"),
        says("Rome", "well"),
        user("Rome"),
        asks("", "so"),
        tool("golf"),
        says("fox", "yes"),
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "c"}},
            },
        },
    }
]


@pytest.fixture(scope="session")
def published(data_dir: Path) -> Callable[[str], Tokenizer]:
    """Return a tokenizer with GPT-2's vocabulary, a published template and its tokens."""

    def make(name: str) -> Tokenizer:
        template = next(file for file in FILES if file.stem == name).read_text()
        core = tokenizers.Tokenizer.from_file(str(data_dir / "tokenizers/gpt2/tokenizer.json"))
        special = sorted({*TOKENS.findall(template), "<bos>", "<eos>"})
        core.add_special_tokens(
            [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
        )
        hf = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
        hf.chat_template = template
        return Tokenizer(hf)

    return make


def spans(tokenizer: Tokenizer, talk: list[dict[str, Any]]) -> list[str]:
    """Return the text of each run of trained tokens."""
    tools = TOOLS if any("tool_calls" in message for message in talk) else None
    masked = tokenizer.mask_chat(talk, tools)
    runs: list[list[int]] = []
    for index, (id, on) in enumerate(zip(masked.ids, masked.mask, strict=True)):
        if on and index and masked.mask[index - 1]:
            runs[-1].append(id)
        elif on:
            runs.append([id])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.default_cases(
    "cohere2",
    "deepseekv3",
    "gemma3",
    "gptoss",
    "llama3_1",
    "nemotron_3_ultra",
    "phi3",
    "qwen2_5",
    "qwen3",
    "qwen3_8",
    "lfm2_v2",
)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained_with_a_published_template(
    published: Callable[[str], Tokenizer], name: str
) -> None:
    """Each turn is a separate run of trained tokens with only its own words.

    Otherwise, the template refuses the conversation.
    """
    tokenizer = published(name)
    if name in FOR_PARTS:
        with pytest.raises(UserError, match="as a list of parts"):
            tokenizer.mask_chat(TALKS["plain"])
        return
    for kind, talk in TALKS.items():
        try:
            runs = spans(tokenizer, talk)
        except DataError as error:
            assert kind not in ("plain", "alike", "thoughts"), error
            continue
        turns = [message for message in talk if message["role"] == "assistant"]
        assert len(runs) == len(turns), (kind, runs)
        for run, turn in zip(runs, turns, strict=True):
            assert turn["content"] in run, (kind, runs)
            assert all(call["function"]["name"] in run for call in turn.get("tool_calls", ())), (
                kind,
                runs,
            )
        others = ("alpha", "charlie", "e?", "golf", "You are C", "You are Q", "helpful")
        assert not any(word in run for run in runs for word in others), (kind, runs)


def final(content: str, end: str = "end", thought: str = "") -> str:
    thoughts = (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    )
    return f"{thoughts}<|channel|>final<|message|>{content}<|{end}|>"


@pytest.mark.parametrize(
    ("name", "kind", "wanted"),
    [
        ("gptoss", "plain", [final("bravo"), final("delta", "return")]),
        ("gptoss", "begun", ["You are<|end|>", final("bravo", "return")]),
        (
            "gptoss",
            "thoughtful calls",
            [
                ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
                final("Rome"),
                " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>",
                final("fox", "return", "yes"),
            ],
        ),
        (
            "qwen3_5_think",
            "thoughtful calls",
            [
                "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>",
                "Rome<|im_end|>",
                "so\n</think>\n\n<tool_call>\n<function=weather>\n</function>\n</tool_call><|im_end|>",
                "yes\n</think>\n\nfox<|im_end|>",
            ],
        ),
        (
            "glm4moe",
            "thoughtful calls",
            [
                "\n<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
                "\n<think></think>\nRome",
                "\n<think>so</think>\n<tool_call>weather\n</tool_call>",
                "\n<think>yes</think>\nfox<eos>",
            ],
        ),
    ],
)
def test_turns_that_change_once_others_follow(
    published: Callable[[str], Tokenizer], name: str, kind: str, wanted: list[str]
) -> None:
    if name not in NAMES:
        pytest.skip("this TRL has no such template")
    thinking = name == "gptoss"  # its template has another name for thoughts
    talk = [
        {
            "thinking" if thinking and key == "reasoning_content" else key: value
            for key, value in message.items()
        }
        for message in TALKS[kind]
    ]
    assert spans(published(name), talk) == wanted
