"""Parts of trained turns that a chat template omits are reported.

The notice names the row, the turn, the template and a way to keep the parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import templates

from weft.data.loader import load_data
from weft.data.spec import DatasetSpec
from weft.data.tokenizer import Tokenizer
from weft.data.turns import TemplateOmission, find_missing_words
from weft.errors import DataError

Make = Callable[..., Tokenizer]

ASKED = {"role": "user", "content": "2+2?"}
INLINE = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}
APART = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
BEFORE = "what precedes </think> in content"
OTHER_TEMPLATE = "set tokenizer.chat_template to a template that writes it"


def cuts(tokenizer: Tokenizer, *talk: dict[str, Any]) -> list[TemplateOmission]:
    return list(tokenizer.mask_chat(talk).cut)


@pytest.mark.parametrize(
    ("template", "talk", "part", "message", "keep"),
    [
        ("CUTS_THOUGHTS", [ASKED, INLINE], BEFORE, 2, f"{OTHER_TEMPLATE} (such as chatml)"),
        (
            "CUTS_THOUGHTS",
            [ASKED, APART],
            "reasoning_content",
            2,
            f"{OTHER_TEMPLATE} (such as chatml, with <think>",
        ),
        (
            "CHATML",
            [ASKED, APART],
            "reasoning_content",
            2,
            "write it into content, between <think> and </think>",
        ),
        ("LAST_THINKS", [ASKED, INLINE, ASKED, APART], BEFORE, 2, "let the row end with that turn"),
        (
            "LAST_THINKS",
            [ASKED, APART, ASKED, INLINE],
            "reasoning_content",
            2,
            "let the row end with that turn",
        ),
        (
            "THINKING",
            [ASKED, APART, ASKED, APART],
            "reasoning_content",
            2,
            "let the row end with that turn",
        ),
    ],
)
def test_thoughts_that_a_template_cuts(
    with_template: Make,
    template: str,
    talk: list[dict[str, Any]],
    part: str,
    message: int,
    keep: str,
) -> None:
    (cut,) = cuts(with_template(getattr(templates, template)), *talk)
    assert (cut.part, cut.message, cut.example) == (part, message, "Two and two.")
    assert cut.keep.startswith(keep)


@pytest.mark.parametrize(
    ("template", "talk"),
    [
        ("CUTS_THOUGHTS", [ASKED, {"role": "assistant", "content": "Four."}]),
        (
            "CUTS_THOUGHTS",
            [ASKED, {**INLINE, "train": False}, ASKED, {"role": "assistant", "content": "Four."}],
        ),
        ("CHATML", [ASKED, INLINE, ASKED, INLINE]),
        ("LAST_THINKS", [ASKED, INLINE]),
        ("LAST_THINKS", [ASKED, {**INLINE, "content": "<think>\n\n</think>\n\n Four.\n"}]),
        ("LAST_THINKS", [ASKED, {**APART, "train": False}, ASKED, APART]),
        ("HEADERS", [ASKED, {"role": "assistant", "content": "\n Four.\n\nOr  not. \n"}]),
    ],
)
def test_what_is_written_otherwise_is_not_cut(
    with_template: Make, template: str, talk: list[dict[str, Any]]
) -> None:
    assert cuts(with_template(getattr(templates, template)), *talk) == []


def test_the_way_that_is_named_keeps_the_thoughts(with_template: Make) -> None:
    """The test follows the notice: it uses reasoning_content if the template writes it."""
    apart_only = templates.CUTS_THOUGHTS.replace(
        "'<|im_end|>' + content", "'<|im_end|>' + (m.reasoning_content or '') + content"
    )
    tokenizer = with_template(apart_only)
    (cut,) = cuts(tokenizer, ASKED, INLINE)
    assert cut.keep == "give the thoughts as reasoning_content"
    assert cuts(tokenizer, ASKED, APART) == []


def test_part_of_the_thoughts_is_missing(with_template: Make) -> None:
    short = with_template(
        templates.THINKING.replace("(m.reasoning_content or '')", "(m.reasoning_content or '')[:9]")
    )
    long = "One two and three and " + "four and " * 60 + "five"
    (cut,) = cuts(short, ASKED, {**APART, "reasoning_content": long})
    assert (
        cut.part == "reasoning_content"
        and cut.example.startswith("and three and four and")
        and "..." in cut.example
    )


def test_a_content_that_is_cut_elsewhere_is_refused_with_what_is_missing(
    with_template: Make,
) -> None:
    cut = with_template(templates.CHATML.replace("m.content", "m.content.split('[/THINK]')[-1]"))
    with pytest.raises(
        DataError,
        match=r"message 2: .* the assistant's content as it is \('\[THINK\]hm\[/THINK\]' is missing",
    ):
        cut.mask_chat([ASKED, {"role": "assistant", "content": "[THINK]hm[/THINK] Four."}])


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in "
    "m.tool_calls or [] %}"
    "{{ '[' + c.function.name }}{% for key, value in c.function.arguments.items() if WANTED %}"
    "{{ key ~ '=' ~ (value | tojson) }}{% endfor %}{{ ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def call(**arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "1 true",
        "tool_calls": [{"name": "look_up", "arguments": arguments}],
    }


@pytest.mark.parametrize(
    ("wanted", "part", "example"),
    [
        ("value is not none", "tool_calls[].arguments.unit", "None"),
        ("key != 'n'", "tool_calls[].arguments.n", "1"),
        ("key != 'on'", "tool_calls[].arguments.on", "True"),
        ("key != 'deep'", "tool_calls[].arguments.deep[].city", 'Pa"ris'),
        ("true", None, None),
    ],
)
def test_arguments_of_calls(
    with_template: Make, wanted: str, part: str | None, example: str | None
) -> None:
    tokenizer = with_template(CALLS.replace("WANTED", wanted))
    reply = call(unit=None, n=1, on=True, deep=[{"city": 'Pa"ris'}], text="a\nb")
    assert [(cut.part, cut.example) for cut in cuts(tokenizer, ASKED, reply)] == (
        [(part, example)] if part else []
    )


def test_a_call_without_any_of_its_arguments_is_refused(with_template: Make) -> None:
    tokenizer = with_template(CALLS.replace("WANTED", "false"))
    with pytest.raises(
        DataError,
        match=r"message 2: the chat template of .* does not render the assistant's tool_calls",
    ):
        tokenizer.mask_chat([ASKED, call(city="Paris")])
    assert cuts(tokenizer, ASKED, call()) == []


def test_what_the_user_said_in_part(with_template: Make) -> None:
    tokenizer = with_template(
        templates.CHATML.replace("m.content", "(m.content[:20] if m.role == 'user' else m.content)")
    )
    asked = {"role": "user", "content": "Please add 2 and 2, and say nothing else."}
    assert tokenizer.mask_chat([asked, APART | {"reasoning_content": ""}]).unused == {
        "messages[] of the user, a part of content"
    }


def test_a_run_is_told_once_with_row_turn_and_template(with_template: Make, tmp_path: Path) -> None:
    rows = [{"messages": [ASKED, {"role": "assistant", "content": "Four."}]}]
    rows += [
        {"messages": [ASKED, {"role": "assistant", "content": "Yes."}, ASKED, INLINE]}
        for _ in range(2)
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = with_template(templates.CUTS_THOUGHTS)
    spec = DatasetSpec(path=str(file), train_bs_n_seqs=1, cache_dir=str(tmp_path / "cache"))
    # later from the cache, which does not contain places
    for name in ("talks", "talks", "moved/talks"):
        moved = tmp_path / f"{name}.jsonl"
        moved.parent.mkdir(exist_ok=True)
        file = file.rename(moved)
        spec = replace(spec, path=str(file))
        (note,) = load_data(spec, "chat", tokenizer, seed=1, progress=False).notes
        assert note == (
            f"talks: the chat template of the tokenizer leaves {BEFORE} out of 2 trained turns, "
            f"so it is not learned; first in "
            f"{file}:2, message 4: 'Two and two.'; to keep it, {OTHER_TEMPLATE} (such as chatml)"
        )


@pytest.mark.parametrize("key", ["chosen", "rejected"])
def test_preferences_are_told_too(with_template: Make, tmp_path: Path, key: str) -> None:
    row = {
        "prompt": [ASKED],
        "chosen": [{"role": "assistant", "content": "4"}],
        "rejected": [APART],
    }
    row = (
        row if key == "rejected" else {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    )
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
    spec = DatasetSpec(
        path=str(tmp_path / "pairs.jsonl"), train_bs_n_seqs=1, cache_dir=str(tmp_path / "cache")
    )
    (note,) = load_data(
        spec, "preference", with_template(templates.CUTS_THOUGHTS), seed=1, progress=False
    ).notes
    assert re.search(
        r"leaves reasoning_content out of 1 trained turn, .*pairs.jsonl:1, message 2: 'Two and "
        r"two.'",
        note,
    )


def test_what_is_missing_between_what_is_there() -> None:
    assert find_missing_words("a b  f", "a b c d e f") == "c d e"
    assert find_missing_words("x", "a b") == "a b"
