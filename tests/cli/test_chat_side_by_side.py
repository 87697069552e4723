"""`weft chat A B`: conversations with two models at once."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.test_chat import Says, Seen
from tests.tiny import make_llama
from weft.cli.chat import SideBySide
from weft.cli.conversation import Conversation, StreamedAnswer
from weft.cli.main import main
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine
from weft.engine.spec import GenerationSpec
from weft.errors import ConfigError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("two") / "model")


def talk(
    model: Path, view: Seen, answers: tuple[list[str], list[str]], width: int = 60, **fields: Any
) -> tuple[list[Conversation], list[Says]]:
    view._console.width = width
    engines, chats = [], []
    for texts in answers:
        tokenizer = Tokenizer.load(TokenizerSpec(), str(model))
        engines.append(Says(tokenizer, *texts))
        chats.append(
            Conversation(cast(Engine, engines[-1]), tokenizer, GenerationSpec(), view, **fields)
        )
    SideBySide(chats, view).converse()
    return chats, engines


def test_each_model_has_its_own_history(model: Path) -> None:
    chats, engines = talk(model, Seen("Hello", "Who?"), (["Hi!", "Me."], ["Yo.", "Me too."]))
    said = [[m["content"] for m in chat.messages] for chat in chats]
    assert said == [["Hello", "Hi!", "Who?", "Me."], ["Hello", "Yo.", "Who?", "Me too."]]
    assert "Yo." in chats[1].tokenizer.decode(engines[1].requests[1].prompt)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_answers_are_side_by_side_in_wide_terminals(model: Path, width: int) -> None:
    view = Seen("Hello", "/help")
    talk(model, view, (["Once upon a time"], ["What is two"]), width)
    lines = [line.rstrip() for line in view.text.splitlines()]
    together = [line for line in lines if "Once upon" in line and "What is two" in line]
    assert bool(together) == (width >= 80)
    assert all(len(line) <= width for line in lines if "Once" in line or "What" in line)
    if width < 80:
        assert any(line.startswith("A      Once") for line in lines) and any(
            line.startswith("B      What") for line in lines
        )
    assert (
        "per second" in view.text
        and view.text.count("clear the conversation") == 1
        and "/a LINE" in view.text
    )


@pytest.mark.parametrize("width", [60, 100])
def test_commands_are_for_both_or_for_one(model: Path, width: int, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    view = Seen(
        "Hello",
        "/set top_k 7",
        "/b /set top_k 3",
        "/a More",
        f"/save {file}",
        "/rety",
        "/retry",
        "/quit",
        "never",
    )
    answers = ["Hi!", "More.", "Again."], ["Yo.", "Again too."]
    chats, _ = talk(model, view, answers, width)
    assert [chat.spec.top_k for chat in chats] == [7, 3]
    assert [[m["content"] for m in chat.messages] for chat in chats] == [
        ["Hello", "Hi!", "More", "Again."],
        ["Hello", "Again too."],
    ]
    assert view.text.count("did you mean /retry") == 1 and view.lines == ["never"]
    assert view.text.count("top_k 7") == 1, "what both say is said once"
    assert [len(json.loads(line)["messages"]) for line in file.read_text().splitlines()] == [4, 2]


def test_the_oldest_turns_are_cut_for_each_by_its_own_context(model: Path) -> None:
    view = Seen("One one one", "Two two two", "Three")
    chats, engines = talk(model, view, (["First."] * 3, ["First."] * 3), 120, context=44)
    for chat, engine in zip(chats, engines, strict=True):
        last = chat.tokenizer.decode(engine.requests[-1].prompt)
        assert "One one one" not in last and "Three" in last
    assert " ".join(view.text.split()).count("does not see") >= 2


def test_a_pipe_gets_labels_and_an_error_ends_it(model: Path) -> None:
    from rich.console import Console

    shown = io.StringIO()
    with StreamedAnswer(Console(file=shown, width=20), interactive=False, label="B") as answer:
        answer.write("a long answer that is not wrapped")
    assert shown.getvalue() == "B: a long answer that is not wrapped\n"
    with pytest.raises(ConfigError, match="unknown command"):
        talk(model, Seen("/nothing", interactive=False), ([], []))


def test_the_command_opens_two_models(
    model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    other = make_llama(tmp_path / "other", chat=False, seed=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    capfd.readouterr()
    assert main(["chat", str(model), str(other), "--max-new-tokens", "3", "--seed", "1"]) == 0
    seen = capfd.readouterr()
    assert seen.out.startswith("A: ") and "\nB: " in seen.out
    assert f"A  {model}" in seen.err and f"B  {other}" in seen.err
    assert seen.err.count("plain text") == 1, "each has its own template"
    assert main(["chat", "a", "b", "c"]) == 2
    assert "or two: weft chat A B" in capfd.readouterr().err
