"""`dataset.columns`: rows of any file, with the column names that a form reads."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.tiny import make_tokenizer
from weft import registry
from weft.cli.quickstart import build_config
from weft.data.columns import check_names, read_renamed_rows
from weft.data.loader import load_data
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError

QA = [
    {"question": f"{n}+1?", "solution": {"text": f"it is {n + 1}", "steps": ["a", "b"]}, "n": n}
    for n in range(6)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer.load(TokenizerSpec(), str(folder))


def write(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(tmp_path: Path, tokenizer: Tokenizer, kind: str, **options):
    spec = DatasetSpec(
        train_bs_n_seqs=2, cache_dir=str(tmp_path / "cache"), shuffle=False, **options
    )
    return load_data(spec, kind, tokenizer, seed=1, progress=False)


def texts(data, tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode(part.dataset[i].data["prompt"].tolist())
        for part in data.parts
        for i in range(len(part))
    ]


@pytest.mark.parametrize("name", ["qa.jsonl", "qa.parquet"])
def test_rows_come_under_the_names_of_the_form(name, tmp_path, tokenizer):
    plain = write(
        tmp_path / "plain.jsonl",
        [{"prompt": r["question"], "answer": r["solution"]["text"]} for r in QA],
    )
    file = write(tmp_path / name, QA)
    columns = {"prompt": "question", "answer": "solution.text", "id": "n"}
    mapped = load(tmp_path, tokenizer, "prompt_answer", train_path=str(file), columns=columns)
    expected = load(tmp_path, tokenizer, "prompt_answer", train_path=str(plain))
    for a, b in zip(
        mapped.parts[0].dataset.table.sample.unpack(),
        expected.parts[0].dataset.table.sample.unpack(),
        strict=True,
    ):
        assert a.data["prompt"].tolist() == b.data["prompt"].tolist()
        assert a.data["completion"].tolist() == b.data["completion"].tolist()
    assert list(mapped.parts[0].dataset.table.sample.ids) == [str(n) for n in range(6)]


def test_columns_of_a_verifier_are_mapped_too(tmp_path, tokenizer):
    file = write(tmp_path / "qa.jsonl", QA)
    columns = {"prompt": "question", "answer": "solution.steps.1"}
    data = load(tmp_path, tokenizer, "prompt", path=str(file), columns=columns)
    sample = data.parts[0].dataset[0]
    assert "b" in repr(sample.metadata) and "question" not in repr(sample.metadata)


def test_a_change_of_the_mapping_is_not_answered_from_the_cache(tmp_path, tokenizer):
    file = write(tmp_path / "two.jsonl", [{"a": "one", "b": "two two", "c": "yes"}] * 2)
    first = load(
        tmp_path, tokenizer, "prompt_answer", path=str(file), columns={"prompt": "a", "answer": "c"}
    )
    second = load(
        tmp_path, tokenizer, "prompt_answer", path=str(file), columns={"prompt": "b", "answer": "c"}
    )
    assert texts(first, tokenizer) != texts(second, tokenizer)


def test_each_source_has_its_own(tmp_path, tokenizer):
    one, two = (
        write(tmp_path / "one.jsonl", QA),
        write(tmp_path / "two.jsonl", [{"q": "2?", "a": "3"}, {"q": "3?", "a": "4"}]),
    )
    sources = [
        {"path": str(one), "columns": {"answer": "solution.text"}},
        {"path": str(two), "columns": {"prompt": "q", "answer": "a"}},
    ]
    data = load(
        tmp_path, tokenizer, "prompt_answer", sources=sources, columns={"prompt": "question"}
    )
    assert len(texts(data, tokenizer)) == 8
    with pytest.raises(ConfigError, match=r"dataset\.sources\[0\]\.columns=3: must map names"):
        load(tmp_path, tokenizer, "prompt_answer", sources=[{"path": str(one), "columns": 3}])


def test_a_validation_file_and_rows_drawn_anew_are_read_alike(tmp_path, tokenizer):
    file = write(tmp_path / "qa.jsonl", QA)
    columns = {"prompt": "question", "answer": "solution.text"}
    data = load(
        tmp_path,
        tokenizer,
        "prompt_answer",
        path=str(file),
        valid_path=str(file),
        columns=columns,
        max_seqlen=6,
        random_window=1.0,
    )
    assert len(data.valid["qa"]) == 6
    assert data.parts[0].dataset.epoch_samples.take([0, 1], 1, "qa").ids


def test_a_column_that_is_nowhere_is_named_with_those_there_are(tmp_path, tokenizer):
    file = write(tmp_path / "qa.jsonl", QA)
    with pytest.raises(ConfigError) as caught:
        load(
            tmp_path,
            tokenizer,
            "prompt_answer",
            path=str(file),
            columns={"prompt": "questoin", "answer": "solution.text"},
        )
    message = str(caught.value)
    assert "prompt: no row of" in message and "'questoin'; did you mean question?" in message
    assert "? The columns are question, solution.text, solution.steps, n" in message
    with pytest.raises(
        ConfigError, match=r"no row of .* has the column 'solution.txt'; did you mean solution.text"
    ):
        load(
            tmp_path,
            tokenizer,
            "prompt_answer",
            path=str(file),
            columns={"prompt": "question", "answer": "solution.txt"},
        )
    with pytest.raises(ConfigError, match=r"has the column 'zzzz'; the columns are question, "):
        load(
            tmp_path,
            tokenizer,
            "prompt_answer",
            path=str(file),
            columns={"prompt": "question", "answer": "zzzz"},
        )


def test_a_row_without_its_column_is_reported_by_its_line(tmp_path, tokenizer):
    file = write(tmp_path / "qa.jsonl", [*QA, {"solution": {"text": "x"}}])
    with pytest.raises(DataError, match=r"qa\.jsonl:7: lacks the key 'prompt'"):
        load(
            tmp_path,
            tokenizer,
            "prompt_answer",
            path=str(file),
            columns={"prompt": "question", "answer": "solution.text"},
        )


def test_a_name_that_the_form_does_not_read_is_refused():
    with pytest.raises(ConfigError, match=r"no 'promt' .*did you mean prompt"):
        check_names({"promt": "question"}, "prompt_answer", {})
    with pytest.raises(ConfigError, match=r"names come first: \{prompt: question_text\}"):
        check_names({"question_text": "prompt"}, "prompt_answer", {})
    with pytest.raises(ConfigError, match="no 'chosn'"):
        check_names({"chosn": "a"}, "preference", {})
    check_names({"anything": "a"}, "prompt", {})  # a column for a verifier
    check_names({"q": "a"}, "prompt_answer", {"prompt_key": "q"})
    check_names({"anything": "a"}, "of-the-users", {})


def test_every_form_that_reads_rows_has_its_names():
    from weft.data.columns import TYPE_COLUMNS

    # `stream` reads rows of the other types.
    assert {*TYPE_COLUMNS, "prompt", "stream"} == set(registry.datasets.list_shipped())


def test_from_the_command_line():
    words = ["sft", "experiment_name=e", "trial_name=t"]
    config, _ = build_config([*words, "dataset.columns={prompt: question, answer: solution.text}"])
    assert config.dataset.columns == {"prompt": "question", "answer": "solution.text"}
    assert build_config([*words, "dataset.columns.prompt=q"])[0].dataset.columns == {"prompt": "q"}
    with pytest.raises(ConfigError, match=r"dataset\.columns"):
        build_config([*words, "dataset.columns=question"])


def test_a_column_whose_own_name_has_a_dot(tmp_path):
    file = write(tmp_path / "dots.jsonl", [{"a.b": 1, "a": {"b": 2}, "c": 3}])
    ((_, row),) = read_renamed_rows(str(file), None, {"x": "a.b"})
    assert row == {"a": {"b": 2}, "c": 3, "x": 1}


@pytest.mark.parametrize("key", ["prompt_key", "answer_key", "id_key"])
def test_a_column_without_a_name_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"dataset\.args\.{key}='': is empty"):
        check_names({}, "prompt_answer", {key: ""})
    check_names({}, "prompt_answer", {key: "a", "other": ""})
