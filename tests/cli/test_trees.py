"""`weft data trees`: counts, filters, splits, flattens and builds on the real sample."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.data import main
from weft.errors import ConfigError, DataError


@pytest.fixture
def trees(data_dir: Path) -> str:
    return str(data_dir / "oasst" / "en_100_tree.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (gzip.open(path, "rt") if path.suffix == ".gz" else path.open())
    ]


def test_stats(trees: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trees", "stats", trees]) == 0
    said = [line.split(None, 1) for line in capsys.readouterr().out.splitlines()]
    assert (
        ["100", "trees"] in said
        and ["1,167", "messages"] in said
        and ["641", "with a rank"] in said
    )
    assert ["languages:", "en 1,167"] in said
    for word in ("count", "counts"):
        assert main(["trees", word, trees]) == 0
        assert [line.split(None, 1) for line in capsys.readouterr().out.splitlines()] == said


def test_filter(trees: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kept.jsonl.gz"
    assert main(["trees", "filter", trees, str(out), "--lang", "en", "--top-k", "1"]) == 0
    assert "trees in" in capsys.readouterr().out
    replies = [len(tree["prompt"]["replies"]) for tree in read(out)]
    assert 0 < len(replies) < 100 and max(replies) == 1  # trees that a model began are left out
    assert main(["trees", "filter", trees, str(out), "--lang", "de"]) == 0 and read(out) == []
    assert "warning: no tree of " in capsys.readouterr().err


def test_split_by_tree(trees: str, tmp_path: Path) -> None:
    files = [tmp_path / "train.jsonl", tmp_path / "valid.jsonl"]
    found = []
    for seed in ("1", "1", "2"):
        assert (
            main(["trees", "split", trees, *map(str, files), "--valid", "0.2", "--seed", seed]) == 0
        )
        found.append([{tree["message_tree_id"] for tree in read(file)} for file in files])
    assert [len(part) for part in found[0]] == [80, 20] and not found[0][0] & found[0][1]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("filter", ["--top-k", "0"], "--top-k 0: must be at least 1"),
        ("filter", ["--least", "quality"], "--least quality: must be LABEL=NUMBER"),
        ("filter", ["--most", "toxicity=x"], "--most toxicity=x: must be LABEL=NUMBER"),
        ("split", ["VALID.jsonl", "--valid", "1"], "--valid 1.0: must be between 0 and 1"),
        ("split", ["valid.json"], r"valid.json: must end in .jsonl or .jsonl.gz"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read_or_written(
    command: str, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = Path("out.jsonl")
    output.write_text("kept\n")
    with pytest.raises(ConfigError, match=message):  # a file that is missing would be a DataError
        main(["trees", command, "missing.jsonl", str(output), *words])
    assert output.read_text() == "kept\n" and list(tmp_path.iterdir()) == [tmp_path / output]


def test_flattened_and_built_again(
    trees: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat, built = tmp_path / "messages.jsonl", tmp_path / "trees.jsonl"
    assert main(["trees", "flatten", trees, str(flat)]) == 0 and len(read(flat)) == 1167
    assert main(["trees", "build", str(flat), str(built)]) == 0
    capsys.readouterr()
    said = []
    for file in (trees, str(built), str(flat)):
        main(["trees", "stats", file])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    with pytest.raises(ConfigError, match=r"must end in .jsonl or .jsonl.gz"):
        main(["trees", "build", str(flat), str(tmp_path / "x.json")])
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:1: is not a tree"):
        main(["trees", "stats", str(tmp_path / "bad.jsonl")])
