"""Chat templates by name: the text that each of them trains, and the tokens that it adds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.data.messages import ConversationAdditions
from weft.data.spec import TEMPLATES, TokenizerSpec, read_template_text
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizer_files import COMMAND
from weft.errors import ConfigError, UserError

EOS = "<|endoftext|>"
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there!"},
    {"role": "user", "content": "日本 <b>?"},
    {"role": "assistant", "content": "🤗 ok\n\nbye"},
]
# name -> (text of the conversation, trained parts in ⟦ ⟧)
FORMS = {
    "oasst": (
        "<|system|>Be brief.{eos}<|prompter|>Hi{eos}<|assistant|>⟦Hello "
        "there!{eos}⟧<|prompter|>日本 <b>?{eos}<|assistant|>"
        "⟦🤗 ok\n\nbye{eos}⟧"
    ),
    "oasst_v25": (
        "<|prefix_begin|>Be brief.<|prefix_end|><|prompter|>Hi{eos}<|assistant|>⟦Hello "
        "there!{eos}⟧<|prompter|>日本 <b>?{eos}"
        "<|assistant|>⟦🤗 ok\n\nbye{eos}⟧"
    ),
    "chatml": (
        "<|im_start|>system\nBe "
        "brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hello there!<|im_end|>⟧\n<|im_start|>user\n日本 <b>?<|im_end|>\n<|im_start|>assistant\n⟦🤗 "
        "ok\n\nbye<|im_end|>⟧\n"
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe "
        "brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Hi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello "
        "there!<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>\n\n"
        "日本 <b>?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n⟦🤗 ok\n\nbye<|eot_id|>⟧"
    ),
    "mistral": (
        "[INST] Be brief.\n\nHi[/INST]⟦ Hello there!{eos}⟧[INST] 日本 <b>?[/INST]⟦ 🤗 "
        "ok\n\nbye{eos}⟧"
    ),
    "gemma": (
        "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello "
        "there!<end_of_turn>⟧\n"
        "<start_of_turn>user\n日本 <b>?<end_of_turn>\n<start_of_turn>model\n⟦🤗 "
        "ok\n\nbye<end_of_turn>⟧\n"
    ),
    "zephyr": (
        "<|system|>\nBe brief.{eos}\n<|user|>\nHi{eos}\n<|assistant|>\n⟦Hello "
        "there!{eos}⟧\n<|user|>\n日本 <b>?{eos}\n"
        "<|assistant|>\n⟦🤗 ok\n\nbye{eos}⟧\n"
    ),
    "tulu": (
        "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n⟦Hello there!{eos}⟧\n<|user|>\n日本 "
        "<b>?\n<|assistant|>\n"
        "⟦🤗 ok\n\nbye{eos}⟧"
    ),
    "vicuna": (
        "Be brief. USER: Hi ASSISTANT:⟦ Hello there!{eos}⟧USER: 日本 <b>? ASSISTANT:⟦ 🤗 "
        "ok\n\nbye{eos}⟧"
    ),
    "alpaca": (
        "Be brief.\n\n### Instruction:\nHi\n\n### Response:\n⟦Hello there!{eos}⟧\n\n"
        "### Instruction:\n日本 <b>?\n\n### Response:\n⟦🤗 ok\n\nbye{eos}⟧"
    ),
}


def load(data_dir: Path, **spec: Any) -> Tokenizer:
    path = str(data_dir / "tokenizers/gpt2/tokenizer.json")
    return Tokenizer.load(TokenizerSpec(path=path, eos_token=EOS, **spec))


def marked(tokenizer: Tokenizer, messages: Any) -> str:
    """Return the conversation's text with its trained parts in ⟦ ⟧."""
    conversation = tokenizer.mask_chat(messages)
    ids, mask = conversation.ids, conversation.mask
    text, begin = "", 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or mask[at] != mask[begin]:
            part = tokenizer.decode(ids[begin:at])
            text, begin = text + (f"⟦{part}⟧" if mask[begin] else part), at
    return text


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_of_every_form(name: str, data_dir: Path) -> None:
    tokenizer = load(data_dir, chat_template=name, add_tokens=["template"])
    assert marked(tokenizer, TALK) == FORMS[name].format(eos=EOS)
    assert tokenizer.mask_chat(TALK).ids == tokenizer.encode_chat(TALK)
    prompt = tokenizer.render(TALK[:4], add_generation_prompt=True)
    assert tokenizer.render(TALK).startswith(prompt), (
        "what the model sees when it is its turn begins what it was trained on"
    )


def test_tulu_is_what_easylm_writes_byte_for_byte(data_dir: Path) -> None:
    """EasyLM strips contents and the whole text, and trains the assistant's text and its end."""
    tokenizer = load(data_dir, chat_template="tulu")
    talk = [{**turn, "content": f" \n{turn['content']}\t "} for turn in TALK]
    written = ""
    for turn in talk:
        end = EOS if turn["role"] == "assistant" else ""
        written += f"<|{turn['role']}|>\n{turn['content'].strip()}{end}\n"
    assert tokenizer.render(talk) == written.strip()
    assert marked(tokenizer, talk) == FORMS["tulu"].format(eos=EOS)
    prompt = tokenizer.render(talk[:2], add_generation_prompt=True)
    assert prompt == "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n"


def test_a_leading_system_message_is_never_trained(data_dir: Path) -> None:
    """Open-Assistant's collator trained it, because -1 is odd (defect 2)."""
    tokenizer = load(data_dir, chat_template="oasst", add_tokens=["template"])
    conversation = tokenizer.mask_chat(TALK)
    ids, mask = conversation.ids, conversation.mask
    system = len(tokenizer.encode_chat(TALK[:1]))
    assert tokenizer.decode(ids[:system]) == f"<|system|>Be brief.{EOS}" and not any(mask[:system])


def test_the_chat_window_keeps_the_conversation_behind_a_system_prefix(data_dir: Path) -> None:
    """Open-Assistant's model_cli printed only the prefix (defect 6)."""
    tokenizer = load(data_dir, chat_template="oasst", add_tokens=["template"])
    text = tokenizer.render(TALK[:2], add_generation_prompt=True)
    assert text == f"<|system|>Be brief.{EOS}<|prompter|>Hi{EOS}<|assistant|>"


def test_tokens_that_a_template_needs(data_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"writes <\|im_start\|>.*tokenizer.add_tokens=\[template\]"
    ):
        load(data_dir, chat_template="chatml")
    with pytest.raises(ConfigError, match=r"tokenizer\.eos_token"):
        Tokenizer.load(
            TokenizerSpec(str(data_dir / "tokenizers/gpt2/tokenizer.json"), chat_template="zephyr")
        )
    with pytest.raises(ConfigError, match="did you mean chatml"):
        load(data_dir, chat_template="chatm")
    with pytest.raises(ConfigError, match="write the tokens themselves"):
        load(data_dir, add_tokens=["template"], chat_template="{{ messages }}")


def test_the_error_names_the_option_as_it_is_typed(data_dir: Path) -> None:
    from dataclasses import replace

    with pytest.raises(UserError, match=r"write actor\.tokenizer\.chat_template=zephyr"):
        replace(load(data_dir), option="actor.tokenizer").encode_chat(TALK)


@pytest.mark.parametrize(
    ("changes", "option", "words"),
    [
        (
            {"chat_template": "chatml"},
            "actor.tokenizer",
            "with 'actor.tokenizer.add_tokens=[template]'",
        ),
        ({"chat_template": "chatml"}, COMMAND, "--chat-template=chatml writes <|im_start|>"),
        ({"chat_template": "chatm"}, COMMAND, "--chat-template='chatm': neither"),
        (
            {"chat_template": "chatm"},
            "rew.tokenizer",
            "rew.tokenizer.chat_template='chatm': neither",
        ),
        (
            {"chat_template": "{% x"},
            "rew.tokenizer",
            "rew.tokenizer.chat_template does not compile",
        ),
        (
            {"bos_token": "<nope>"},
            "rew.tokenizer",
            "rew.tokenizer.bos_token='<nope>' is not in the vocabulary",
        ),
        (
            {"add_tokens": ["template"]},
            "rew.tokenizer",
            "rew.tokenizer.add_tokens: 'template' means the tokens",
        ),
    ],
)
def test_errors_name_the_option_of_the_role_or_the_command(
    changes: dict[str, Any], option: str, words: str, data_dir: Path
) -> None:
    path = str(data_dir / "tokenizers/gpt2/tokenizer.json")
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(TokenizerSpec(path=path, **changes), option=option)
    assert words in str(caught.value)
    for name in (name for name in TEMPLATES if "chatm'" in words):
        assert name in str(caught.value), "the names that there are"


def test_added_tokens(data_dir: Path, tmp_path: Path) -> None:
    tokenizer = load(data_dir, chat_template="oasst", add_tokens=["template", "<|extra|>", EOS])
    assert tokenizer.added_from == 50257 and tokenizer.vocab_size == 50257 + 6
    assert tokenizer.encode("a<|extra|>b") == [64, 50262, 65]
    assert load(data_dir, add_tokens=[EOS]).added_from is None, "a token that is there is not new"
    tokenizer.save(tmp_path)
    again = Tokenizer.load(TokenizerSpec(path=str(tmp_path)))
    assert again.mask_chat(TALK) == tokenizer.mask_chat(TALK)
    assert (
        again.chat_template == read_template_text("oasst")
        and again.decode([50262], skip_special=True) == ""
    )


def test_every_digit_is_a_token(data_dir: Path, tmp_path: Path) -> None:
    tokenizer = load(data_dir, per_digit_tokens=True)
    assert [tokenizer.decode([id]) for id in tokenizer.encode("in 1984!")] == [
        "in",
        " ",
        "1",
        "9",
        "8",
        "4",
        "!",
    ]
    assert len(load(data_dir).encode("in 1984!")) == 3
    tokenizer.save(tmp_path)
    again = Tokenizer.load(TokenizerSpec(path=str(tmp_path)))
    assert again.encode("in 1984!") == tokenizer.encode("in 1984!")


def test_the_form_of_tags(data_dir: Path) -> None:
    from dataclasses import replace

    tokenizer = replace(
        load(data_dir, chat_template="oasst_v25", add_tokens=["template"]),
        additions=ConversationAdditions(tags=True),
    )
    talk = [TALK[1], {**TALK[2], "lang": "en", "quality": 0.75, "context": "one\ntwo"}]
    assert marked(tokenizer, talk) == (
        f"<|prompter|>Hi{EOS}<|system|>lang: en\nquality: 0.8\ncontext: "
        f"one\ntwo\n{EOS}<|assistant|>⟦Hello there!{EOS}⟧"
    )
