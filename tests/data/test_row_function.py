"""A dataset written as one function of a row equals the built-in dataset of the same rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.data.datasets.base import DatasetUtility
from weft.data.loader import load_data
from weft.data.spec import DatasetSpec
from weft.data.tokenizing import skip_progress
from weft.errors import ConfigError, DataError
from weft.registry import datasets, import_user_code, register_dataset
from weft.testing.datasets import build_small_tokenizer, check_dataset

MODULE = """
from weft import register_dataset


@register_dataset("{name}", rows="prompt_answer")
def make(row, ask: str = "Q"):
    return {{"prompt": f"{{ask}}: {{row['riddle']}}\\n", "answer": row["solution"]{more}}}
"""
ROWS = [{"id": f"r{n}", "riddle": f"what is {n}", "solution": f"it is {n}"} for n in range(6)]


def write(folder: Path, name: str, more: str = "") -> Path:
    (folder / f"{name}.py").write_text(MODULE.format(name=name, more=more))
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    import_user_code([str(folder / f"{name}.py")])
    return rows


def utility(folder: Path, workers: int | None = None) -> DatasetUtility:
    return DatasetUtility(
        build_small_tokenizer(), cache_dir=str(folder), num_workers=workers, progress=skip_progress
    )


@pytest.mark.default_cases("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_it_equals_the_shipped_type_of_the_rows_it_makes(tmp_path: Path, workers: int) -> None:
    path = write(tmp_path, f"riddles_{workers}")
    plain = tmp_path / "plain.jsonl"
    made = [{"id": r["id"], "prompt": f"A: {r['riddle']}\n", "answer": r["solution"]} for r in ROWS]
    plain.write_text("".join(json.dumps(row) + "\n" for row in made))
    util = utility(tmp_path, workers)
    own = datasets.get(f"riddles_{workers}")(util=util, path=str(path), ask="A", max_seqlen=12)
    shipped = datasets.get("prompt_answer")(util=util, path=str(plain), max_seqlen=12)
    assert len(own) == len(shipped) == 6
    for index in range(6):
        one, other = own[index], shipped[index]
        assert one.ids == other.ids
        assert {key: values.tolist() for key, values in one.data.items()} == {
            key: values.tolist() for key, values in other.data.items()
        }


def test_it_passes_the_checks_of_a_dataset_and_loads_by_options(tmp_path: Path) -> None:
    path = write(tmp_path, "riddles_checked")
    check_dataset("riddles_checked", path=str(path))
    spec = DatasetSpec(
        type="riddles_checked",
        train_path=str(path),
        train_bs_n_seqs=2,
        args={"ask": "?"},
        cache_dir=str(tmp_path),
    )
    loaded = load_data(spec, "prompt_answer", build_small_tokenizer(), seed=1, progress=False)
    assert loaded.counts[0].train == 6


def test_another_function_is_tokenized_anew(tmp_path: Path) -> None:
    path = write(tmp_path, "riddles_changed")
    util = utility(tmp_path)
    before = datasets.get("riddles_changed")(util=util, path=str(path))[0]
    del sys.modules["riddles_changed"]
    write(tmp_path, "riddles_changed", ' + "!"')
    after = datasets.get("riddles_changed")(util=util, path=str(path))[0]
    assert after.num_tokens() == before.num_tokens() + 1


def test_a_row_that_lacks_what_it_reads_is_reported_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "riddles_bad")
    path.write_text('{"riddle": "a", "solution": "b"}\n{"riddle": "a"}\n')
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: lacks the key 'solution', which make reads"
    ):
        datasets.get("riddles_bad")(util=utility(tmp_path), path=str(path))


def test_wrong_forms_and_options(tmp_path: Path) -> None:
    path = write(tmp_path, "riddles_options")
    with pytest.raises(ConfigError, match=r"dataset\.args\.sak"):
        datasets.get("riddles_options")(util=utility(tmp_path), path=str(path), sak="A")
    register_dataset("test-odd-rows", write, rows="prompt_anser")
    with pytest.raises(ConfigError, match="did you mean prompt_answer"):
        datasets.get("test-odd-rows")
    with pytest.raises(ConfigError, match="rows is for functions"):
        register_dataset("test-class-rows", DatasetUtility, rows="prompt")
