"""Rows that are tokenized during training: same samples, order, cache and reports as in advance."""

from __future__ import annotations

import json
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.data import background_table, background_tokenizing, encode_worker, tokenizing
from weft.data.background_table import BackgroundTokenTable
from weft.data.background_tokenizing import tokenize_in_background
from weft.data.datasets.chat import ChatEncoder
from weft.data.datasets.preference import PreferenceEncoder
from weft.data.datasets.prompt import PromptEncoder
from weft.data.datasets.prompt_answer import PromptAnswerEncoder
from weft.data.datasets.text import TextEncoder
from weft.data.lengths import LengthLimits
from weft.data.loader import LoadedData, load_data
from weft.data.sample import SequenceSample
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.data.table import TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import RowSource, skip_progress, tokenize
from weft.errors import ConfigError, DataError, RunError

Make = Callable[..., Tokenizer]
COUNT = 60  # rows


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all files as large, and make chunks small."""
    monkeypatch.setattr(tokenizing, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(background_table, "CHUNK", 7)
    monkeypatch.setattr(background_tokenizing, "CHUNK", 7)


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


def says(draw: random.Random, most: int = 12) -> str:
    return " ".join(
        draw.choice(["one", "two", "naïve", "日本", "x" * 9]) for _ in range(draw.randint(1, most))
    )


def chat_row(draw: random.Random, number: int) -> dict[str, Any]:
    system = [{"role": "system", "content": says(draw)}] if draw.random() < 0.3 else []
    turns = [("user", "assistant")] * draw.choice([1, 1, 2])
    talk = [{"role": role, "content": says(draw)} for turn in turns for role in turn]
    row: dict[str, Any] = {"messages": [*system, *talk]}
    if number == 41:
        row |= {
            "messages": [*talk[:1], {"role": "assistant", "content": "four", "weight": 1}],
            "late": "column",
        }
    return row


def prompt_row(draw: random.Random, number: int) -> dict[str, Any]:
    late = {"solution": "7", "note": None} if number in (51, 52) else {}
    first = {"level": number % 3} if number > 2 else {}
    # the first row with the late columns may be left out
    said = {51: "one " * 40, 52: "one"}.get(number, says(draw))
    return {"prompt": said, **first, **late}


ROWS: Mapping[str, tuple[Any, Callable[[random.Random, int], dict[str, Any]]]] = {
    "chat": (ChatEncoder(), chat_row),
    "prompt_answer": (
        PromptAnswerEncoder(),
        lambda draw, _: {"prompt": says(draw), "answer": says(draw)},
    ),
    "prompt_answer_as_chat": (
        PromptAnswerEncoder(as_chat=True),
        lambda draw, _: {"prompt": says(draw), "answer": says(draw)},
    ),
    "prompt": (PromptEncoder(), prompt_row),
    "prompt_of_chats": (
        PromptEncoder(prompt_key="messages"),
        lambda draw, n: chat_row(draw, n) | {"level": n},
    ),
    "text": (TextEncoder(), lambda draw, _: {"text": says(draw) + " end"}),
}
IDS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda _: {},
    "own": lambda number: {"id": f"row {number}"},
    "some": lambda number: {"id": number + 1} if number % 3 == 0 else {},
}


CASES = [
    (form, overlong, list(IDS)[(number + shift) % len(IDS)])
    for number, form in enumerate(ROWS)
    for shift, overlong in enumerate(["truncate", "drop"])
]


def write(file: Path, form: str, ids: str = "none") -> None:
    draw = random.Random(form)
    rows = [{**ROWS[form][1](draw, number), **IDS[ids](number)} for number in range(COUNT)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def source(tmp_path: Path, cache: str) -> RowSource:
    return RowSource(
        str(tmp_path / "rows.jsonl"),
        cache_dir=str(tmp_path / cache),
        num_workers=1,
        progress=skip_progress,
    )


def begun(
    form: Any, lengths: LengthLimits, tokenizer: Tokenizer, tmp_path: Path
) -> BackgroundTokenTable:
    table = tokenize_in_background(form, lengths, tokenizer, source(tmp_path, "ahead"))
    assert isinstance(table, BackgroundTokenTable)
    return table


def cached(tmp_path: Path, cache: str) -> tuple[str, bytes]:
    (file,) = (tmp_path / cache / "tokens").iterdir()
    return file.name, file.read_bytes()


def equal(one: SequenceSample, other: SequenceSample) -> bool:
    """Return whether all is the same, the order of keys and columns too."""
    return one.to_bytes() == other.to_bytes()


@pytest.mark.parametrize(("form", "overlong", "ids"), CASES)
def test_samples_and_cache_are_those_of_rows_tokenized_first(
    form: str, overlong: str, ids: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", form, ids)
    lengths = LengthLimits(max_seqlen=30, max_prompt_len=20, overlong=overlong)
    all_first = tokenize(ROWS[form][0], lengths, tokenizer, source(tmp_path, "first"))
    table = begun(ROWS[form][0], lengths, tokenizer, tmp_path)
    assert (len(table), table.ids) == (
        len(all_first),
        all_first.ids,
    ) and table.rows.tolist() == all_first.rows.tolist()
    assert all_first.report.too_long and (all_first.report.dropped > 0) == (overlong == "drop")
    order = np.random.default_rng(0).permutation(len(table))
    for at in range(0, len(order) // 2, 5):
        some = order[at : at + 5].tolist()
        assert equal(table.take(some), all_first.take(some))
    assert table.build_table().to_bytes() == all_first.to_bytes()
    assert equal(table.take(order.tolist()), all_first.take(order.tolist()))
    table.close()
    assert cached(tmp_path, "ahead") == cached(tmp_path, "first")
    assert isinstance(
        tokenize_in_background(ROWS[form][0], lengths, tokenizer, source(tmp_path, "ahead")),
        TokenTable,
    )


def test_what_a_template_cuts_is_told_of_the_first_row_that_has_it(
    with_template: Make, tmp_path: Path
) -> None:
    tokenizer = with_template(templates.CUTS_THOUGHTS)
    rows = []
    for number in range(COUNT):
        thought = f"<think>thought {number}</think> " if number % 5 == 4 else ""
        apart = {"reasoning_content": f"apart {number}"} if number % 7 == 6 else {}
        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": f"{thought}b", **apart},
        ]
        rows.append({"messages": talk})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    all_first = tokenize(ChatEncoder(), LengthLimits(), tokenizer, source(tmp_path, "first"))
    table = begun(ChatEncoder(), LengthLimits(), tokenizer, tmp_path)
    for index in reversed(range(0, COUNT, 2)):
        table.take([index])
    table.build_table()
    table.close()
    assert (
        cached(tmp_path, "ahead") == cached(tmp_path, "first")
        and table.build_report() == all_first.report
    )
    assert [(cut.turns, cut.example) for cut in all_first.report.cut] == [
        (12, "thought 4"),
        (8, "apart 6"),
    ]


@pytest.mark.parametrize("form", ROWS)
def test_the_text_of_a_row_bounds_its_tokens(
    form: str, with_template: Make, tmp_path: Path
) -> None:
    made, row_of = ROWS[form]
    for template in (templates.CHATML, templates.PLAIN):
        tokenizer = with_template(template, add_bos=True, chat_bos=True)
        for number in (0, 1, 2, 41, 55):
            row = row_of(random.Random(number), number)
            (sample,) = made.encode(row, tokenizer)
            text = made.render_text(row, tokenizer)
            tokens = len(sample.prompt) + sum(map(len, sample.completions))
            assert tokens <= len(tokenizer.encode(text)) + background_tokenizing.NUM_ADDED_TOKENS
            assert len(tokenizer.encode(text, bos=False)) <= (tokenizer.bound_tokens(text) or 0)


@pytest.fixture(scope="session")
def bounded(data_dir: Path) -> list[Tokenizer]:
    files = ("gpt2/tokenizer.json", "gpt_neox_pythia/20B_tokenizer.json", "llama2/tokenizer.json")
    loaded = [
        Tokenizer.load(TokenizerSpec(path=str(data_dir / "tokenizers" / file))) for file in files
    ]
    in_digits = TokenizerSpec(
        path=str(data_dir / "tokenizers/gpt2/tokenizer.json"), per_digit_tokens=True
    )
    return [*loaded, Tokenizer.load(in_digits)]


@settings(deadline=None, max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@example("<s></s><s>a<s> b<|endoftext|><|im_start|>")
@example("\ufb2c\u0958\U0001d15e\u2adc 1234 \u1e9b\u0323 \U0001f468\u200d\U0001f469")
def test_no_text_has_more_tokens_than_its_bytes_let_expect(
    bounded: list[Tokenizer], text: str
) -> None:
    found = [(len(each.encode(text, bos=False)), each.bound_tokens(text)) for each in bounded]
    assert all(most is not None and count <= most for count, most in found), found


def test_tokenizers_that_may_write_many_characters_for_one_have_no_bound(
    with_template: Make,
) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def of(model: Any, normalizer: Any, pre: Any) -> int | None:
        core = Core(model)
        core.normalizer, core.pre_tokenizer = normalizer, pre
        return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core)).bound_tokens("ab")

    bpe, in_bytes = (
        models.BPE(vocab={"a": 0}, merges=[]),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    assert of(bpe, None, in_bytes) == 2
    assert of(bpe, normalizers.NFKC(), in_bytes) is None
    assert of(bpe, normalizers.Replace("a", "bbb"), in_bytes) is None
    assert of(bpe, None, pre_tokenizers.Metaspace()) is None
    assert of(models.Unigram([("a", 0.0)], 0, False), None, in_bytes) is None


# -- processes


class Worker:
    """Encoding process that runs as a thread."""

    def __init__(self) -> None:
        (read, write), (answers, to) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(write, "wb"), os.fdopen(answers, "rb")
        ends = os.fdopen(read, "rb"), os.fdopen(to, "wb")

        def serve() -> None:
            with ends[0], ends[1]:
                encode_worker.serve(*ends)

        self.thread = threading.Thread(target=serve)
        self.thread.start()

    def kill(self) -> None:
        if not self.stdin.closed:
            self.stdin.close()

    def communicate(self) -> None:
        self.thread.join()
        self.stdout.close()


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 300  # ends what hangs
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_processes_make_all_samples(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_table, "start_process", Worker)
    write(tmp_path / "rows.jsonl", "prompt", "some")
    lengths = LengthLimits(max_seqlen=30, overlong="drop")
    all_first = tokenize(PromptEncoder(), lengths, tokenizer, source(tmp_path, "first"))
    table = begun(PromptEncoder(), lengths, tokenizer, tmp_path)
    table.prioritize(np.arange(len(table) - 1, 20, -1))
    table.start(3)
    for index in range(0, len(table), 7):
        some = [index, (index + 3) % len(table)]
        assert equal(table.take(some), all_first.take(some))
    until(table.build_report)
    table.close()
    assert table.build_report() == all_first.report and cached(tmp_path, "ahead") == cached(
        tmp_path, "first"
    )
    assert not [each for each in threading.enumerate() if each.name.startswith("weft-tokeniz")]


def test_close_ends_real_processes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "chat")
    table = begun(ChatEncoder(), LengthLimits(), tokenizer, tmp_path)
    table.start(2)
    until(lambda: len(table._processes) == 2)
    assert all(os.getsid(process.pid) == process.pid for process in table._processes), (
        "Ctrl-C is not for them"
    )
    table.close()
    assert all(process.returncode is not None for process in table._processes)
    assert not table._threads[0].is_alive() and not (tmp_path / "ahead").exists()
    assert len(table.take([0, 50]).ids) == 2, "what is asked for is still made"


def test_a_process_that_dies_is_an_error_of_the_next_batch(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", "chat")
    table = begun(ChatEncoder(), LengthLimits(), tokenizer, tmp_path)
    monkeypatch.setattr(tokenizing.sys, "executable", "/bin/false")
    table.start(1)
    table._threads[0].join()
    with pytest.raises(RunError, match="ended early"):
        table.take([3])
    table.close()


@pytest.mark.slow
def test_a_process_ends_without_a_word_where_its_run_is_gone(
    tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    process = tokenizing.start_process()
    assert process.stdin is not None and process.stdout is not None
    tokenizing.send_bytes(
        process, pickle.dumps(tokenizing.EncodingJob(TextEncoder(), LengthLimits(), tokenizer))
    )
    process.stdout.close()
    tokenizing.send_bytes(process, pickle.dumps([("", {"text": "a b"})]))
    assert process.wait(60) == 0 and capfd.readouterr().err == ""
    process.stdin.close()


# -- what is wrong with rows


def test_bad_rows_of_another_shape_are_reported_before_training(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = [chat_row(random.Random(number), number) for number in range(COUNT)]
    rows[10]["messages"][-1]["content"] = rows[20]["messages"][-1]["content"] = "  "
    rows[30] = {"messages": [{"role": "user", "content": 4}]}
    rows[31] = {"messages": [{"role": "asistant", "content": "a"}], "id": ""}
    rows[40]["id"] = rows[50]["id"] = "twice"
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "{nonsense\n"
    )
    with pytest.raises(DataError) as first:
        tokenize(ChatEncoder(), LengthLimits(), tokenizer, source(tmp_path, "first"))
    with pytest.raises(DataError) as now:
        tokenize_in_background(ChatEncoder(), LengthLimits(), tokenizer, source(tmp_path, "ahead"))
    assert now.value.reports == first.value.reports and len(first.value.reports) == 6
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n' * 5)
    with pytest.raises(DataError, match=r"each of the 5 rows lacks the key 'messages'"):
        tokenize_in_background(ChatEncoder(), LengthLimits(), tokenizer, source(tmp_path, "ahead"))


@pytest.mark.parametrize("by_a_process", [False, True])
def test_a_bad_row_that_looks_like_others_ends_the_run_with_the_same_report(
    by_a_process: bool, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_table, "start_process", Worker)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1.0}]
    rows = [{"messages": talk} for _ in range(COUNT)]
    rows[33] = {"messages": [talk[0], {**talk[1], "weight": 0.5}]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError) as first:
        tokenize(ChatEncoder(), LengthLimits(), tokenizer, source(tmp_path, "first"))
    table = begun(ChatEncoder(), LengthLimits(), tokenizer, tmp_path)
    assert table.take([1, 2]).num_ids == 2
    if by_a_process:
        table.start(1)
        until(lambda: table._failure)
    with pytest.raises(DataError) as later:
        table.take([1] if by_a_process else [33])
    table.close()
    assert later.value.reports == first.value.reports
    assert not (tmp_path / "ahead").exists()


def test_rows_that_are_too_long_are_errors_before_training(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", "prompt")
    lengths = LengthLimits(max_prompt_len=20, overlong="error")
    with pytest.raises(DataError, match="rows are too long") as first:
        tokenize(PromptEncoder(), lengths, tokenizer, source(tmp_path, "first"))
    with pytest.raises(DataError) as now:
        tokenize_in_background(PromptEncoder(), lengths, tokenizer, source(tmp_path, "ahead"))
    assert now.value.reports == first.value.reports
    write(tmp_path / "rows.jsonl", "chat")
    with pytest.raises(DataError, match="no row is left: all 60 are longer"):
        tokenize_in_background(
            ChatEncoder(),
            LengthLimits(max_seqlen=2, overlong="drop"),
            tokenizer,
            source(tmp_path, "ahead"),
        )


def test_what_has_to_be_tokenized_first_is(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "rows.jsonl", "prompt")
    given = source(tmp_path, "ahead")

    def ahead_of(form: Any, **changes: Any) -> bool:
        return isinstance(
            tokenize_in_background(form, LengthLimits(), tokenizer, replace(given, **changes)),
            BackgroundTokenTable,
        )

    assert ahead_of(PromptEncoder()) and ahead_of(PromptEncoder(), num_workers=None)
    assert not ahead_of(PromptEncoder(), num_workers=0, cache_dir=str(tmp_path / "a"))
    assert not ahead_of(PromptEncoder(), max_samples=5)
    monkeypatch.setattr(background_tokenizing, "MAX_SHAPES", 1)
    assert not ahead_of(PromptEncoder(), cache_dir=str(tmp_path / "b")), "too many kinds of rows"
    monkeypatch.undo()
    assert not ahead_of(PromptEncoder()), "a small file"
    monkeypatch.setattr(tokenizing, "PARALLEL_BYTES", 0)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(
            {
                "prompt": {"message_id": "1", "role": "prompter", "text": "a", "replies": []},
                "message_tree_id": "1",
            }
        )
    )
    assert not ahead_of(PromptEncoder()), "trees make several samples"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 20)
    assert not ahead_of(PreferenceEncoder())


# -- batches


def data_of(tokenizer: Tokenizer, tmp_path: Path, *, in_front: bool, **options: Any) -> LoadedData:
    path = None if "sources" in options else str(tmp_path / "rows.jsonl")
    cache, workers = str(tmp_path / f"cache{in_front}"), 0 if in_front else 1
    spec = DatasetSpec(
        path=path, train_bs_n_seqs=8, cache_dir=cache, num_workers=workers, **options
    )
    return load_data(spec, "chat", tokenizer, seed=3, progress=False, ahead=not in_front)


@pytest.fixture
def both(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Return a function that loads data tokenized during training, and tokenized in advance."""
    monkeypatch.setattr(background_table, "start_process", Worker)
    made: list[LoadedData] = []

    def make(**options: Any) -> tuple[LoadedData, LoadedData]:
        made.extend(
            data_of(tokenizer, tmp_path, in_front=in_front, **options) for in_front in (False, True)
        )
        return made[-2], made[-1]

    yield make
    for data in made:
        data.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"valid_split": 0.2, "max_seqlen": 30, "valid_max_seqlen": 25, "overlong": "drop"},
        {
            "sources": [
                {"path": "rows.jsonl", "fraction": 0.5},
                {"path": "more.jsonl", "type": "text"},
            ]
        },
        {"shuffle": False, "max_seqlen": 20, "valid_split": 0.1},
    ],
)
def test_batches_are_the_same_with_resume(
    options: dict[str, Any], both: Any, tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", "chat", "some")
    write(tmp_path / "more.jsonl", "text")
    if "sources" in options:
        options = {
            "sources": [
                {**each, "path": str(tmp_path / each["path"])} for each in options["sources"]
            ]
        }
    made, first = both(**options)
    assert (
        made.background_tables
        and not first.background_tables
        and made.max_seqlen <= first.max_seqlen
    )
    steps = 2 * first.train.batches_per_epoch + 3
    assert made.train.batches_per_epoch == first.train.batches_per_epoch
    states = []
    for _ in range(steps):
        states.append(made.train.state_dict())
        assert states[-1] == first.train.state_dict()
        assert equal(made.train.next_batch(), first.train.next_batch())
    assert list(made.valid) == list(first.valid)
    for name, part in made.valid.items():
        assert len(part) == len(first.valid[name])
        assert all(equal(part[index], first.valid[name][index]) for index in range(len(part)))
    resumed, _ = both(**options)
    resumed.train.load_state_dict(states[4])
    first.train.load_state_dict(states[4])
    assert all(equal(resumed.train.next_batch(), first.train.next_batch()) for _ in range(5))


def test_what_is_known_later_is_told_later(both: Any, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "chat")
    made, first = both(max_seqlen=20)
    assert "later" in made.format_counts() and "later" not in first.format_counts()
    assert made.notes == ("rows: 60 samples are tokenized during training",)
    until(lambda: made.background_tables[0].build_report())
    assert (
        made.take_new_notes() == ["rows: all 60 samples are tokenized", *first.notes]
        and len(first.notes) == 2
    )
    assert made.take_new_notes() == []


def test_lengths_that_decide_on_batches_are_known_first(both: Any, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", "chat")
    for options in ({"sort_by_length": True}, {"sample_mixing": 0.5}, {"system_tags": True}):
        with_all, _ = both(**options)
        assert not with_all.background_tables, options


def test_a_sample_that_no_call_can_hold_is_the_error_of_its_batch(
    both: Any, tmp_path: Path
) -> None:
    write(tmp_path / "rows.jsonl", "chat")
    made, first = both()
    longest = first.max_seqlen

    def check(size: int) -> None:
        if size >= longest:
            raise ConfigError(f"cannot hold {size}")

    made.check_max_seqlen(check)
    with pytest.raises(ConfigError, match=f"cannot hold {longest}"):
        for _ in range(first.train.batches_per_epoch):
            made.train.next_batch()


def test_the_largest_batches_are_looked_for_without_tokenizing_all(
    both: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_table.BackgroundTokenTable, "start", lambda self, workers: None)
    monkeypatch.setattr("weft.data.batches.MAX_FORECAST_SAMPLES", 8)
    write(tmp_path / "rows.jsonl", "prompt_answer")
    made, _ = both(type="prompt_answer")
    found = made.train.build_large_batches()
    assert (
        len(found) <= 2 and (made.background_tables[0]._state == background_table.DONE).sum() <= 17
    )
