"""`weft data augment` on real trees and with invalid input; its rows train a reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tokenizer, write_jsonl
from weft.cli import data
from weft.data.loader import load_data
from weft.data.spec import DatasetSpec, TokenizerSpec
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError

ROWS = [{"id": f"r{n}", "prompt": f"Q{n}", "answer": f" one two three four {n}"} for n in range(4)]


def test_rows_that_a_reward_model_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, out = write_jsonl(tmp_path / "rows.jsonl", ROWS), tmp_path / "made" / "out.jsonl"
    assert data.main(["augment", str(rows), "--worse", "shuffled,other", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "4 rows with bad replies, 0 without" in said and "dataset.type=ranking" in said
    assert all(len(json.loads(line)["augmented"]) == 2 for line in out.read_text().splitlines())
    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = Tokenizer.load(TokenizerSpec(), str(tmp_path / "tokenizer"))
    loaded = load_data(
        DatasetSpec(train_path=str(out), train_bs_n_seqs=4), "ranking", tokenizer, seed=1
    )
    batch = loaded.train.next_batch()
    assert [len(group) for group in batch.seqlens["completion"]] == [2] * 4


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "--model is missing: name a weak model, or kinds of bad replies with --worse"),
        (["--worse", "cut", "--reward", "x"], "--reward chooses among a model's answers"),
    ],
)
def test_invalid_input_is_refused(words: list[str], wrong: str, tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=wrong):
        data.main(["augment", str(rows), "--out", str(tmp_path / "out.jsonl"), *words])


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="exists, and files"):
        data.main(["augment", str(rows), "--worse", "cut", "--out", str(rows)])
    with pytest.raises(ConfigError, match="no rows are named: give a PATH or --datasets NAME"):
        data.main(["augment", "--worse", "cut", "--out", str(tmp_path / "out.jsonl")])
    with pytest.raises(ConfigError, match="unknown kind 'nonsense'"):
        data.main(
            ["augment", str(rows), "--worse", "nonsense", "--out", str(tmp_path / "out.jsonl")]
        )
