"""`weft sample`: reports, scores and the best of n, as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_answers_rewards import make_scorer
from tests.tiny import make_llama, write_jsonl
from weft.cli.main import main


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_llama(tmp_path_factory.mktemp("policy") / "first"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_scorer(tmp_path_factory.mktemp("scorer") / "rm"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_jsonl(
            tmp_path_factory.mktemp("prompts") / "p.jsonl",
            [{"prompt": "Who?"}, {"prompt": "What is two?"}],
        )
    )


def test_report_then_score_then_the_page_with_scores(
    policy: str, scorer: str, prompts: str, tmp_path: Path, capsys
) -> None:  # type: ignore[no-untyped-def]
    other, out = str(make_llama(tmp_path / "second", seed=3)), tmp_path / "answers"
    words = ["--prompts", prompts, "--max-new-tokens", "5", "--samples", "2", "--out", str(out)]
    capsys.readouterr()
    assert main(["sample", "report", policy, other, *words]) == 0
    reports = [out / "first.json", out / "second.json"]
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [*map(str, reports), str(out / "report.html")], (
        "and no blank lines for a bar"
    )
    assert not shown.err
    assert "mean reward" not in (out / "report.html").read_text(), "nothing is scored yet"
    assert main(["sample", "score", *map(str, reports), "--reward", scorer]) == 0
    assert "mean reward" in capsys.readouterr().out
    report = json.loads(reports[0].read_text())
    assert [len(result["scores"]) for result in report["prompts"][0]["results"]] == [1, 2]
    assert main(["sample", "report", *map(str, reports), "--out", str(out)]) == 0
    page = (out / "report.html").read_text()
    assert (
        page.count("<article>") == 2
        and "first / greedy" in page
        and "second / k50" in page
        and "<th>mean reward</th>" in page
    )


def test_best_of_n_is_data_to_train_on(
    policy: str, scorer: str, prompts: str, tmp_path: Path, capsys
) -> None:  # type: ignore[no-untyped-def]
    out = tmp_path / "best"
    words = [
        "--reward",
        scorer,
        "--prompts",
        prompts,
        "--samples",
        "4",
        "--max-new-tokens",
        "6",
        "--out",
        str(out),
    ]
    assert main(["sample", "best", policy, *words]) == 0
    assert "mean reward" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "selected.jsonl").read_text().splitlines()]
    assert rows and all(row["messages"][-1]["role"] == "assistant" for row in rows)
    pairs = [json.loads(line) for line in (out / "comparison.jsonl").read_text().splitlines()]
    assert all(pair["score_chosen"] > pair["score_rejected"] for pair in pairs)
    for name, kind in (("selected.jsonl", "chat"), ("comparison.jsonl", "preference")):
        assert main(["data", "counts", str(out / name), "--type", kind, "--tokenizer", policy]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "POLICY"], "--prompts is missing"),
        (["report", "POLICY", "--prompts", "none.jsonl"], "none.jsonl"),
        (["report", "POLICY", "--prompts", "PROMPTS", "--settings", "gredy"], "greedy"),
        (["report", "POLICY", "SCORER", "--prompts", "PROMPTS"], "it gives scores, not text"),
        (["report", "POLICY", "missing/model", "--prompts", "PROMPTS"], "missing/model"),
        (["report", "SCORER", "--prompts", "PROMPTS"], "it gives scores, not text"),
        (["best", "POLICY", "--prompts", "PROMPTS", "--reward", "POLICY"], "not a reward model"),
    ],
)
def test_invalid_input_has_exit_code_2(
    policy: str,
    scorer: str,
    prompts: str,
    words: list[str],
    message: str,
    capsys,
    monkeypatch,
    tmp_path,
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    named = {"POLICY": policy, "SCORER": scorer, "PROMPTS": prompts}
    assert main(["sample", *(named.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
