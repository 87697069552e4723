"""Rows are tokenized once, by any number of processes, and cached.

The key of the cache is a hash of everything that affects the ids.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import templates

from weft.data import tokenizer_files, tokenizing
from weft.data.datasets._row_function import RowFunctionEncoder
from weft.data.datasets.chat import ChatEncoder
from weft.data.datasets.paired_comparison import PairedComparisonEncoder
from weft.data.datasets.preference import PreferenceEncoder
from weft.data.datasets.prompt import PromptEncoder
from weft.data.datasets.prompt_answer import PromptAnswerEncoder
from weft.data.datasets.ranking import RankingEncoder
from weft.data.datasets.text import TextEncoder
from weft.data.lengths import LengthLimits
from weft.data.table import TokenTable
from weft.data.tokenizer import Tokenizer
from weft.data.tokenizing import RowSource, skip_progress, tokenize
from weft.errors import DataError, RunError, UserError

Make = Callable[..., Tokenizer]
ROW_FUNCTION = RowFunctionEncoder(
    "prompt", PromptEncoder(), "rows", "rows.py", "convert", source="0" * 64, options={"key": 1}
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "\n".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) for i in range(1100))
    )
    return file


@pytest.fixture
def source(rows: Path, tmp_path: Path) -> RowSource:
    return RowSource(
        str(rows), cache_dir=str(tmp_path / "cache"), num_workers=0, progress=skip_progress
    )


@pytest.fixture(scope="module")
def tokenizer(with_template: Make) -> Tokenizer:
    return with_template(templates.CHATML)


def same(one: TokenTable, other: TokenTable) -> bool:
    return one.to_bytes() == other.to_bytes()


def test_processes_give_what_one_gives(source: RowSource, rows: Path, tokenizer: Tokenizer) -> None:
    chunks: list[tokenizing.Chunk] = [
        [(f"f:{i}", row) for i, row in enumerate(load(rows))][at : at + 512]
        for at in (0, 512, 1024)
    ]
    chunks[1].append(("f:bad", {"prompt": "x"}))
    job = tokenizing.EncodingJob(PromptAnswerEncoder(), LengthLimits(), tokenizer)
    seen: list[int] = []
    shared = tokenizing.encode_in_processes(job, chunks, 2, seen.append)
    assert shared == [tokenizing.encode_rows(job, chunk) for chunk in chunks]
    (index, wrong, _), *others = shared[1][2]
    assert (
        index == 512
        and wrong.startswith("lacks the key 'answer'")
        and not others
        and sorted(seen) == [76, 512, 513]
    )


def silent_advance(rows: int) -> None: ...


def load(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_process_that_dies_is_no_hang(
    source: RowSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing.sys, "executable", shutil.which("false"))
    with pytest.raises(RunError, match="ended early"):
        tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, replace(source, num_workers=2))


@pytest.mark.slow
def test_a_template_that_no_row_is_to_blame_for_is_one_error(
    source: RowSource, rows: Path, with_template: Make
) -> None:
    rows.write_text(
        "\n".join(
            json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) for i in range(1100)
        )
    )
    chunk: tokenizing.Chunk = [(f"f:{i}", row) for i, row in enumerate(load(rows)[:20])]
    for template, wrong in ((None, "no chat template"), (templates.PARTS, "as a list of parts")):
        tokenizer = with_template(template)
        with pytest.raises(UserError, match=wrong) as here:
            tokenize(PromptEncoder(), LengthLimits(), tokenizer, source)
        with pytest.raises(UserError, match=wrong) as in_a_process:
            tokenizing.encode_in_processes(
                tokenizing.EncodingJob(PromptEncoder(), LengthLimits(), tokenizer),
                [chunk],
                1,
                silent_advance,
            )
        assert not any(isinstance(caught.value, DataError) for caught in (here, in_a_process))


def test_the_cache_is_used(
    source: RowSource, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    monkeypatch.setattr(tokenizing, "encode_rows", None)  # tokenizing again would fail
    assert same(tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source), first)
    for form, lengths in (
        (PromptAnswerEncoder(as_chat=True), LengthLimits()),
        (PromptAnswerEncoder(), LengthLimits(max_seqlen=9)),
        (ChatEncoder(), LengthLimits()),
    ):
        with pytest.raises(TypeError):
            tokenize(form, lengths, tokenizer, source)


def test_the_cache_follows_content(
    source: RowSource,
    rows: Path,
    with_template: Make,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    files = set(Path(source.cache_dir or "", "tokens").iterdir())
    tokenize(
        PromptAnswerEncoder(), LengthLimits(), with_template(templates.CHATML, add_bos=True), source
    )
    rows.write_text(rows.read_text().replace("0+0", "0-0"))
    tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    monkeypatch.setattr(tokenizing, "VERSION", 0)
    tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    found = set(Path(source.cache_dir or "", "tokens").iterdir())
    assert len(files) == 1 and len(found) == 4
    moved = rows.rename(rows.with_name("elsewhere.jsonl"))
    tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, replace(source, path=str(moved)))
    assert set(Path(source.cache_dir or "", "tokens").iterdir()) == found


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("Chat", ChatEncoder()),
        ("PairedComparison", PairedComparisonEncoder()),
        ("Preference", PreferenceEncoder()),
        ("Prompt", PromptEncoder()),
        ("PromptAnswer", PromptAnswerEncoder()),
        ("Ranking", RankingEncoder()),
        ("RowFunction", ROW_FUNCTION),
        ("Text", TextEncoder()),
    ],
)
def test_a_cache_is_found_under_the_earlier_names_of_types(
    source: RowSource, rows: Path, tokenizer: Tokenizer, name: str, form: Any
) -> None:
    """Types of rows used to have no suffix: `PromptAnswer` instead of `PromptAnswerEncoder`."""
    earlier = make_dataclass(name, [(f.name, f.type, f) for f in fields(form)])
    values = {f.name: getattr(form, f.name) for f in fields(form)}

    def find(form: Any) -> Path:
        return tokenizing.find_cache_file(form, LengthLimits(), tokenizer, source, [rows])

    assert find(earlier(**values)) == find(form)
    assert find(make_dataclass("Other", [])()) != find(form)


def test_a_damaged_cache_is_made_again(source: RowSource, tokenizer: Tokenizer) -> None:
    first = tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    (kept,) = Path(source.cache_dir or "", "tokens").iterdir()
    whole = kept.read_bytes()
    for damaged in (whole[:1000], b"", b"hello", whole[:-7]):
        kept.write_bytes(damaged)
        assert same(tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source), first)
        assert kept.read_bytes() == whole


def test_bad_rows_leave_no_cache(source: RowSource, rows: Path, tokenizer: Tokenizer) -> None:
    rows.write_text('{"prompt": "x"}')
    with pytest.raises(DataError):
        tokenize(PromptAnswerEncoder(), LengthLimits(), tokenizer, source)
    assert not Path(source.cache_dir or "", "tokens").exists()


def test_a_cache_that_cannot_be_written_is_done_without(
    source: RowSource, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert (
        len(
            tokenize(
                PromptAnswerEncoder(),
                LengthLimits(),
                tokenizer,
                replace(source, cache_dir=str(tmp_path / "file")),
            )
        )
        == 1100
    )
    assert "tokenized rows are not cached" in capsys.readouterr().err


def test_progress_is_one_line_without_a_terminal(
    source: RowSource, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenize(
        PromptAnswerEncoder(),
        LengthLimits(),
        tokenizer,
        RowSource(source.path, cache_dir=source.cache_dir, num_workers=0),
    )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tokenizing rows.jsonl: 1,100 rows in ")


@pytest.mark.parametrize("overlong", ["drop", "error", "truncate"])
def test_a_text_that_is_too_long_for_certain_is_not_tokenized(
    overlong: str,
    source: RowSource,
    rows: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer_files, "MAX_UNCHECKED_CHARACTERS", 300)
    given = [*load(rows)[:3], {"prompt": "ab" * 5000, "answer": "c"}]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    lengths = LengthLimits(max_seqlen=12, overlong=overlong)
    seen: list[int] = []
    encoded = tokenizer_files.encode_text
    monkeypatch.setattr(
        tokenizer_files,
        "encode_text",
        lambda hf, text, max_tokens=None, **more: (
            encoded(hf, text, max_tokens, **more),
            seen.append(len(text)),
        )[0],
    )
    if overlong == "error":
        with pytest.raises(
            DataError, match=r"rows\.jsonl:4: .*the row has at least [\d,]+ tokens, .*max_seqlen=12"
        ):
            tokenize(PromptAnswerEncoder(), lengths, tokenizer, source)
    else:
        table = tokenize(PromptAnswerEncoder(), lengths, tokenizer, source)
        assert (len(table), table.report.dropped) == ((3, 1) if overlong == "drop" else (4, 0))
    assert (max(seen) > 300) == (overlong == "truncate"), (
        "rows that are cut are read whole, and give the same tokens"
    )
