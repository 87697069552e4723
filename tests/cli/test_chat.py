"""`weft chat`: answers, saved conversations, the display, and invalid input."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import decoders
from torch import Tensor
from torch.testing import assert_close

from tests.models.common import logits
from tests.tiny import make_llama
from weft.checkpoints import hf_io, peft_io
from weft.cli import chat as chat_command
from weft.cli.conversation import LABEL_WIDTH, ChatView, Conversation, StreamedAnswer, StreamWrapper
from weft.cli.main import main
from weft.data.spec import TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.engine.base import Engine, Request, TokenEvent
from weft.engine.spec import GenerationSpec
from weft.errors import CheckpointError, ConfigError, DataError
from weft.models.network import lora
from weft.models.network.linear import find_canonical_values


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("base") / "model", chat=False)


class Says:
    """Engine that answers with the next of `texts`, cut at `max_new_tokens`."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)
        self.requests: list[Request] = []
        self.interrupt_after: int | None = None

    @contextmanager
    def generating(self, spec: GenerationSpec) -> Iterator[Says]:
        self.spec = spec
        ids = [*self.tokenizer.encode(self.texts.pop(0), bos=False), self.tokenizer.require_eos()]
        self.queue = ids[: spec.max_new_tokens]
        self.cut = len(ids) > len(self.queue)
        self.taken = 0
        yield self

    def submit(self, requests: list[Request]) -> None:
        self.requests += requests

    @property
    def idle(self) -> bool:
        return not self.queue

    def step(self) -> list[TokenEvent]:
        if self.taken == self.interrupt_after:
            raise KeyboardInterrupt
        token, self.taken = self.queue.pop(0), self.taken + 1
        finish = None if self.queue else "length" if self.cut else "stop"
        return [TokenEvent("chat", 0, token, -1.0, 0, cast(Any, finish))]


class Seen(ChatView):
    """Terminal of 60 columns, whose input and output are controlled by a test."""

    def __init__(self, *lines: str, interactive: bool = True) -> None:
        self.lines, self.interactive = list(lines), interactive
        self.shown = io.StringIO()
        self._console = self._notes = Console(
            file=self.shown, width=60, highlight=False, color_system=None
        )

    def read_line(self) -> str | None:
        return self.lines.pop(0) if self.lines else None

    @property
    def text(self) -> str:
        return self.shown.getvalue()


def talk(model: Path, view: Seen, *answers: str, **fields: Any) -> tuple[Conversation, Says]:
    """Run a conversation to its end."""
    tokenizer = Tokenizer.load(TokenizerSpec(), str(model))
    engine = Says(tokenizer, *answers)
    spec = fields.pop("spec", GenerationSpec())
    chat = Conversation(cast(Engine, engine), tokenizer, spec, view, **fields)
    engine.interrupt_after = None
    chat.run_until_end()
    return chat, engine


def test_a_conversation_has_a_history(chat_model: Path) -> None:
    chat, engine = talk(chat_model, Seen("Hello", "Who?"), "Hi!", "Me.", system="Be brief.")
    assert [m["content"] for m in chat.messages] == ["Hello", "Hi!", "Who?", "Me."]
    expected = (
        "<|system|>Be brief.</s><|user|>Hello</s><|assistant|>Hi!</s><|user|>Who?</s><|assistant|>"
    )
    assert chat.tokenizer.decode(engine.requests[1].prompt) == expected


def test_retry_samples_again_and_replaces_the_answer(chat_model: Path) -> None:
    chat, engine = talk(chat_model, Seen("Hello", "/retry"), "Hi!", "Hey!")
    assert [m["content"] for m in chat.messages] == ["Hello", "Hey!"]
    first, second = engine.requests
    assert first.prompt == second.prompt and first.step != second.step


@pytest.mark.parametrize("reset", ["/reset", "!reset"])
def test_reset_forgets_the_messages_and_keeps_the_system_prompt(
    reset: str, chat_model: Path
) -> None:
    chat, engine = talk(
        chat_model,
        Seen("/system Be kind.", "Hello", reset, "Again", "quit", "never read"),
        "Hi!",
        "Yes?",
    )
    assert [m["content"] for m in chat.messages] == ["Again", "Yes?"]
    assert chat.tokenizer.decode(engine.requests[1].prompt).startswith(
        "<|system|>Be kind.</s><|user|>Again"
    )
    chat, _ = talk(chat_model, Seen("/system off"), system="Be kind.")
    assert chat.system is None


def test_saves_rows_that_the_chat_dataset_reads(chat_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    view = Seen("Hello", f"/save {file}", "Bye", f"/save {file}")
    talk(chat_model, view, "Hi!", "Bye!", system="Be brief.")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(row["messages"]) for row in rows] == [3, 5]
    assert rows[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    tokenizer = Tokenizer.load(TokenizerSpec(), str(chat_model))
    conversation = tokenizer.mask_chat(rows[1]["messages"])
    ids, mask = conversation.ids, conversation.mask
    assert (
        tokenizer.decode([id for id, said in zip(ids, mask, strict=True) if said])
        == "Hi!</s>Bye!</s>"
    )
    assert f"4 messages appended to {file}" in " ".join(view.text.split())


def test_plain_mode_continues_each_line_by_itself(base_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    view = Seen("Once", "Then", f"/save {file}")
    chat, engine = talk(base_model, view, " upon a time", " what?", plain=True)
    assert [chat.tokenizer.decode(request.prompt) for request in engine.requests] == [
        "Once",
        "Then",
    ]
    assert f"{'model':{LABEL_WIDTH}}Once upon a time\n" in view.text
    rows = [
        [m["content"] for m in json.loads(line)["messages"]]
        for line in file.read_text().splitlines()
    ]
    assert rows == [["Once", " upon a time"], ["Then", " what?"]]


def test_a_blank_between_prompt_and_answer_is_kept(base_model: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerSpec(), str(base_model))
    tokenizer.hf.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]
    )
    view = Seen("Once")
    chat = Conversation(
        cast(Engine, Says(tokenizer, " upon a time")), tokenizer, GenerationSpec(), view, plain=True
    )
    chat.run_until_end()
    assert tokenizer.decode(chat.answer_ids, skip_special=True) == "upon a time", (
        "the decoder drops a leading blank"
    )
    assert "model  Once upon a time" in view.text
    assert chat.messages[1]["content"] == " upon a time"


def test_an_empty_line_continues_a_cut_answer(chat_model: Path) -> None:
    view = Seen("Hello", "", "")
    spec = GenerationSpec(max_new_tokens=4)
    chat, engine = talk(chat_model, view, "Once upon a time", " in", spec=spec)
    assert list(engine.requests[1].prompt) == [*engine.requests[0].prompt, *chat.answer_ids[:4]]
    assert "cut at max_new_tokens, an empty line continues it" in " ".join(view.text.split())
    assert "the answer is complete" in view.text
    assert len(chat.messages) == 2
    assert chat.messages[1]["content"] == chat.tokenizer.decode(chat.answer_ids, skip_special=True)


def test_ctrl_c_keeps_the_tokens_sampled_so_far(chat_model: Path) -> None:
    tokenizer = Tokenizer.load(TokenizerSpec(), str(chat_model))
    view = Seen("Hello")
    engine = Says(tokenizer, "Once upon a time")
    engine.interrupt_after = 3
    chat = Conversation(cast(Engine, engine), tokenizer, GenerationSpec(), view)
    chat.run_until_end()
    assert len(chat.answer_ids) == 3 and not chat.is_answer_complete
    assert "stopped, an empty line continues it" in view.text


def test_set_changes_how_answers_are_sampled(chat_model: Path) -> None:
    view = Seen(
        "/set temperature 0.5",
        "/set top_k=7",
        "/set",
        "/set temperature 0",
        "/set heat 2",
        "/set top_p 3",
    )
    chat, _ = talk(chat_model, view, spec=GenerationSpec(seed=5))
    assert "temperature 0.5, top_k 7, at most 1024 tokens" in view.text
    assert "unknown setting 'heat'" in view.text and "top_p=3.0: must be at most 1.0" in view.text
    assert (chat.spec.greedy, chat.spec.top_k, chat.spec.top_p, chat.spec.seed) == (True, 7, 1.0, 5)


def test_messages_for_unknown_commands_suggest_similar_ones(chat_model: Path) -> None:
    view = Seen("/rety", "/save", "/retry", "//slash", "/help", "/quit", "never read")
    chat, _ = talk(chat_model, view, "Yes.")
    assert "did you mean /retry" in view.text
    assert "/save needs the name of a file" in view.text
    assert "there are no messages yet" in view.text
    assert chat.messages[0]["content"] == "/slash"
    assert "/system [TEXT]" in view.text
    assert view.lines == ["never read"]


def test_a_template_that_refuses_leaves_the_conversation_as_it_was(chat_model: Path) -> None:
    view = Seen("Hello")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(chat_model))
    tokenizer.hf.chat_template = "{{ raise_exception('no') }}"
    chat = Conversation(cast(Engine, Says(tokenizer, "Hi")), tokenizer, GenerationSpec(), view)
    chat.run_until_end()
    assert chat.messages == []
    assert "the chat template refuses these messages" in view.text
    chat.view = Seen("Hello", interactive=False)
    with pytest.raises(DataError):
        chat.run_until_end()


# -- display


def test_text_is_wrapped_at_words_within_the_width() -> None:
    text = (
        "The quick brown fox jumps over the lazy dog.\n\n    indented code\nend "
        + "x" * 50
        + " 日本語の文章です"
    )
    for pieces in ([text], list(text)):
        wrap = StreamWrapper(width=30, indent=4)
        out = "".join(wrap.feed(piece) for piece in pieces) + wrap.flush()
        lines = ["    " + line if i == 0 else line for i, line in enumerate(out.split("\n"))]
        assert all(line.startswith("    ") for line in lines)
        assert lines[0].strip() == "The quick brown fox jumps"
        assert "        indented code" in lines
        console = Console(width=200)
        assert max(console.measure(line).maximum for line in lines) <= 30
        assert "".join(out.split()) == "".join(text.split())


def test_control_characters_do_not_reach_the_terminal() -> None:
    wrap = StreamWrapper(80, 0)
    assert wrap.feed("a\x1b[2Jb\x07 c\r ") == "a[2Jb c"


def test_a_word_is_shown_when_it_is_complete() -> None:
    wrap = StreamWrapper(80, 0)
    assert [wrap.feed("Hel"), wrap.feed("lo wor"), wrap.feed("ld\n"), wrap.flush()] == [
        "",
        "Hello",
        " world\n",
        "",
    ]


def test_piped_answers_are_bare() -> None:
    shown = io.StringIO()
    with StreamedAnswer(Console(file=shown, width=20), interactive=False) as answer:
        answer.write("the prompt", style="dim")
        answer.write("a long answer that is not wrapped at all")
    assert shown.getvalue() == "a long answer that is not wrapped at all\n"


# -- choice of the model


def run(words: list[str], lines: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", *words])


def test_answers_lines_from_a_pipe(
    chat_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(chat_model), "--max-new-tokens", "12", "--seed", "3", "--temperature", "0.5"]
    assert run(words, "Hello\n\nWho?\n", monkeypatch) == 0
    first = capfd.readouterr()
    assert run(words, "Hello\nWho?\n", monkeypatch) == 0
    assert capfd.readouterr().out == first.out, "the same seed gives the same answers"
    assert "temperature 0.5, at most 12 tokens" in first.err
    assert "plain text" not in first.err


def test_says_when_there_is_no_chat_template(
    base_model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        run(
            [str(base_model), "--max-new-tokens", "3", "--temperature", "0"],
            "Once upon\n",
            monkeypatch,
        )
        == 0
    )
    seen = capfd.readouterr()
    assert "plain text: each line is continued on its own" in seen.err
    assert "greedy" in seen.err
    assert seen.out.endswith("\n")


def test_an_adapter_talks_on_its_base(
    chat_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    network = hf_io.load(chat_model, "lm")
    lora.attach(network, r=4, alpha=64.0, seed=1)
    parameters = find_canonical_values(network)
    for name, parameter in parameters.items():
        if name.endswith(lora.B):
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    peft_io.save_adapter(
        adapter, parameters, lora.collect_scales(network), network.config, base=str(chat_model)
    )
    words = ["--base", str(chat_model), "--adapter", str(adapter), "--output", str(merged)]
    assert main(["convert", "merge", *words]) == 0
    capfd.readouterr()
    answers = []
    for path in (adapter, merged, chat_model):
        assert (
            run([str(path), "--max-new-tokens", "12", "--seed", "3"], "Hello\n", monkeypatch) == 0
        )
        answers.append(capfd.readouterr())
    assert answers[0].out == answers[1].out != answers[2].out
    assert f"adapter of {chat_model}" in answers[0].err


def trained_whole(base: Path, adapter: Path, more_tokens: int = 0) -> Tensor:
    """Write an adapter of `base` with the whole embedding trained, of more tokens too, and return
    logits of what it is of.
    """
    network = hf_io.load(base, "lm")
    config = replace(network.config, vocab_size=network.config.vocab_size + more_tokens)
    grown = hf_io.init_random(config, network.kind, seed=3)
    lora.attach(grown, r=4, alpha=64.0, seed=1)
    held, draws = find_canonical_values(network), torch.Generator().manual_seed(1)
    for name, value in find_canonical_values(grown).items():
        if (
            name.endswith(lora.B)
            or name not in held
            or held[name].shape != value.shape
            or "embed" in name
        ):
            value.normal_(std=0.1, generator=draws)
        elif not lora.is_adapter(name):
            value.copy_(held[name])
    peft_io.save_adapter(
        adapter,
        find_canonical_values(grown),
        lora.collect_scales(grown),
        config,
        base=str(base),
        save_embeddings=True,
    )
    return logits(grown, torch.tensor([5, 6, config.vocab_size - 1]))


def untied_by_peft(base: Path, adapter: Path) -> Tensor:
    """Write an adapter of PEFT's whose output matrix is trained apart from the embedding, and
    return its logits.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(
        r=4,
        target_modules=["q_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
        modules_to_save=["lm_head"],
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, settings).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    wrapped.save_pretrained(adapter, save_embedding_layers=False)
    return wrapped(torch.tensor([[5, 6, 7]])).logits[0].detach()


OTHER_SHAPE = (
    "has another vocabulary than",
    "or an output matrix apart from the embedding",
    "weft convert merge",
)


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["whole embedding", "added tokens", "untied output"])
def test_adapters_that_replace_whole_matrices_are_merged_and_talk(
    kind: str,
    tied: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`weft chat` takes one whose matrices have the base's shapes, and names the merge otherwise;
    what is merged talks.
    """
    base, adapter, merged = (
        make_llama(tmp_path / "base", tie_word_embeddings=tied),
        tmp_path / "a",
        tmp_path / "merged",
    )
    if kind == "untied output":
        wanted, ids = untied_by_peft(base, adapter), torch.tensor([5, 6, 7])
    else:
        more = 8 if kind == "added tokens" else 0
        wanted = trained_whole(base, adapter, more)
        ids = torch.tensor([5, 6, hf_io.read_config(base)[1].vocab_size + more - 1])
    assert (
        main(
            [
                "convert",
                "merge",
                "--base",
                str(base),
                "--adapter",
                str(adapter),
                "--output",
                str(merged),
            ]
        )
        == 0
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(merged)
    assert theirs.config.tie_word_embeddings is (tied and kind != "untied output")
    assert_close(theirs(ids[None]).logits[0].detach(), wanted)
    capfd.readouterr()
    words = ["--max-new-tokens", "12", "--seed", "3"]
    assert run([str(merged), *words], "Hello\n", monkeypatch) == 0
    answer = capfd.readouterr().out
    assert run([str(base), *words], "Hello\n", monkeypatch) == 0
    assert answer != capfd.readouterr().out
    fits = kind == "whole embedding" or (kind == "untied output" and not tied)
    assert run([str(adapter), *words], "Hello\n", monkeypatch) == (0 if fits else 2)
    seen = capfd.readouterr()
    if fits:
        assert seen.out == answer
    else:
        assert all(part in seen.err for part in OTHER_SHAPE) and "Traceback" not in seen.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["./absent"], "error: MODEL_DIR='./absent': there is no such file or directory"),
        (["MODEL", "--top-p", "2"], "top_p=2.0: must be at most 1"),
        (["MODEL", "--backend", "nope"], "unknown backend 'nope'"),
        (["MODEL", "--device", "nope"], "device='nope'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    words: list[str],
    message: str,
    chat_model: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        run(
            [str(chat_model) if word == "MODEL" else word for word in words], "Hello\n", monkeypatch
        )
        == 2
    )
    seen = capfd.readouterr()
    assert message in seen.err and "Traceback" not in seen.err


def test_a_folder_of_runs_means_its_newest_run(
    chat_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = tmp_path / "saved_model" / "sft" / "a" / "checkpoints" / "model" / "step3"
    step.parent.mkdir(parents=True)
    step.symlink_to(chat_model, target_is_directory=True)
    words = [str(tmp_path / "saved_model"), "--max_new_tokens", "3", "--top_k=5", "--no_history"]
    assert run(words, "Hello\n", monkeypatch) == 0
    assert "sft/a/checkpoints/model/step3" in capfd.readouterr().err


def test_a_reward_model_does_not_talk(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(CheckpointError, match="reward or value model"):
        chat_command.main([str(tmp_path)])


def test_invalid_settings_are_reported_before_a_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        chat_command.main(["absent", "--max-new-tokens", "0"])


def test_help_loads_no_torch() -> None:
    code = "import sys\nfrom weft.cli.main import main\ntry:\n main(['chat', '--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "MODEL_DIR" in done.stdout


def test_a_conversation_longer_than_the_context_loses_its_oldest_turns(chat_model: Path) -> None:
    view = Seen("One one one", "Two two two", "Three")
    chat, engine = talk(
        chat_model, view, "First.", "Second.", "Third.", system="Be kind.", context=60
    )
    last = chat.tokenizer.decode(engine.requests[-1].prompt)
    assert (
        "One one one" not in last
        and last.startswith("<|system|>Be kind.</s><|user|>")
        and "Three" in last
    )
    assert "it does not see the oldest" in " ".join(view.text.split())
    assert len(chat.messages) == 6, "the conversation itself is whole"
    assert all(
        len(request.prompt) + (request.max_new_tokens or 0) == 60 for request in engine.requests
    )


def test_a_message_longer_than_the_context_is_refused_and_forgotten(chat_model: Path) -> None:
    view = Seen("Hello " * 40, "Hi")
    chat, _ = talk(chat_model, view, "Yes?", context=40)
    assert "context is 40, including the answer" in " ".join(view.text.split())
    assert [m["content"] for m in chat.messages] == ["Hi", "Yes?"]


def test_without_history_each_message_is_answered_separately(chat_model: Path) -> None:
    _, engine = talk(
        chat_model, Seen("Hello", "Who?"), "Hi!", "Me.", system="Be brief.", history=False
    )
    tokenizer = Tokenizer.load(TokenizerSpec(), str(chat_model))
    assert (
        tokenizer.decode(engine.requests[1].prompt)
        == "<|system|>Be brief.</s><|user|>Who?</s><|assistant|>"
    )


def test_a_model_is_named_once(chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(chat_model), "--model_path", str(chat_model)]) == 2
    assert "name one model" in capsys.readouterr().err
