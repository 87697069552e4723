"""`weft eval rm`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_answers_rewards import make_scorer
from tests.tiny import write_jsonl
from weft.cli.main import main


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_scorer(tmp_path_factory.mktemp("scorer") / "rm"))


def test_pairs_and_rankings_with_categories(
    scorer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = write_jsonl(
        tmp_path / "pairs.jsonl",
        [
            {"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No.", "subset": "ab"[n % 2]}
            for n in range(4)
        ],
    )
    ranks = write_jsonl(
        tmp_path / "ranks.jsonl",
        [{"prompt": "Who?", "replies": ["Me.", "You.", "Them."], "subset": "c"}],
    )
    out = tmp_path / "scores.json"
    assert (
        main(
            [
                "eval",
                "rm",
                scorer,
                str(pairs),
                str(ranks),
                "--category",
                "subset",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "kendalltau" in shown
    figures = json.loads(out.read_text())["data"]
    assert figures[str(pairs)]["all"]["pairs"] == 4 and sorted(
        figures[str(pairs)]["categories"]
    ) == ["a", "b"]
    assert figures[str(ranks)]["type"] == "ranking" and figures[str(ranks)]["all"]["pairs"] == 3
    assert main(["eval", "rm", scorer, str(ranks), "max_replies=2"]) == 0


@pytest.mark.slow
def test_real_pairs(scorer: str, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = next(iter(sorted((data_dir / "llamafactory_pref").glob("*.json*"))))
    assert main(["eval", "rm", scorer, str(file)]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_datasets_by_name_are_read_as_their_training_reads_them(
    scorer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    pairs = [
        {
            "chosen": f"\n\nHuman: {n}?\n\nAssistant: It is {n}.",
            "rejected": f"\n\nHuman: {n}?\n\nAssistant: No.",
        }
        for n in range(4)
    ]
    for split, found in (("train", pairs), ("test", pairs[:1])):
        write_jsonl(tmp_path / f"{split}.jsonl", found)
    out, named = tmp_path / "scores.json", ["--datasets", "hh-rlhf", f"data_path={tmp_path}"]

    def rows(*words: str) -> dict[str, int]:
        assert main(["eval", "rm", scorer, *words, "--out", str(out)]) == 0
        return {
            name: each["all"]["rows"] for name, each in json.loads(out.read_text())["data"].items()
        }

    assert list(rows(*named).values()) == [4, 1]
    assert "tokenizing anthropic_rlhf (valid): 1 rows" in capsys.readouterr().err
    ((name, count),) = rows(*named, "--split", "valid").items()
    assert name.endswith(" (valid)") and count == 1
    assert main(["eval", "rm", scorer, *named, "--split", "test"]) == 2
    assert "--split test: must be train or valid for named datasets" in capsys.readouterr().err


def test_no_data_is_exit_2(scorer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "rm", scorer, "max_replies=2"]) == 2
    assert "no data are named" in capsys.readouterr().err
