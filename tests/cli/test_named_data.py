"""`weft data counts --datasets`, `lengths`, `scan` and runs on named datasets."""

from __future__ import annotations

import csv
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import make_llama
from weft.cli.data import main
from weft.cli.main import main as weft
from weft.data.named import fetch
from weft.errors import ConfigError, DataError
from weft.testing.datasets import build_small_tokenizer


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Write copies of gsm8k and vicuna to the cache, and a tokenizer."""
    rows = [{"question": f"q{i}", "answer": "a" * (i + 1)} for i in range(10)]
    talk = [{"from": "human", "value": "who?"}, {"from": "gpt", "value": "As an AI model, well"}]
    for name, file, found in (
        ("gsm8k", "train.jsonl", rows),
        ("gsm8k", "test.jsonl", rows[:3]),
        ("vicuna", "ShareGPT_V4.3_unfiltered_cleaned_split.json", [{"conversations": talk}]),
    ):
        (tmp_path / "datasets" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "datasets" / name / file).write_text(
            "".join(json.dumps(row) + "\n" for row in found)
        )
    build_small_tokenizer().save(tmp_path / "tokenizer")
    return tmp_path


def test_counts_are_a_table_and_csv(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "counts",
        f"dataset.cache_dir={here}",
        "--mode",
        "sft",
        "--output",
        str(here / "counts.csv"),
    ]
    assert main([*words, "--datasets", "gsm8k,vicuna"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table[:4]] == [
        ["dataset_name", "train_counts", "eval_counts", "total_counts"],
        ["gsm8k", "10", "3", "13"],
        ["vicuna", "1", "0", "1"],
        ["total", "11", "3", "14"],
    ]
    assert table[4:] == [
        "",
        "messages by language",
        "dataset_name  en",
        "gsm8k         26",
        f"written to {here}/counts.csv",
    ]
    with (here / "counts.csv").open() as stream:
        assert next(csv.DictReader(stream)) == {
            "dataset_name": "gsm8k",
            "train_counts": "10",
            "eval_counts": "3",
            "total_counts": "13",
            "en": "26",
        }
    assert main([*words, "dataset.named=[{gsm8k: {valid_split: 0.0}}]"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["gsm8k", "10", "0", "10"]


def test_missing_datasets_are_named_and_downloaded_only_with_yes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(entry: Any, cache: Path) -> Path:
        raise DataError(f"{entry.name}: asked for")

    monkeypatch.setattr(fetch, "_download_from_url", refuse)
    words = ["counts", f"dataset.cache_dir={here}", "--datasets", "gsm8k", "joke"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert (
        "joke: would be downloaded from https://gist.github.com" in said.err
        and "--yes downloads them" in said.err
    )
    assert "joke" not in said.out and "asked for" not in said.err
    assert main([*words, "--yes"]) == 2
    said = capsys.readouterr()
    assert "note: joke: asked for" in said.err and "gsm8k" in said.out
    with pytest.raises(ConfigError, match="unknown dataset or section 'jok'; did you mean joke"):
        main(["counts", "--datasets", "jok"])
    with pytest.raises(
        ConfigError,
        match="section 'zzzzzz'; weft data counts --datasets all lists the datasets, weft conf",
    ):
        main(["counts", "--datasets", "zzzzzz"])
    with pytest.raises(ConfigError, match="'xx-en' is not a pair of known languages"):
        main(["counts", "--datasets", "wmt2019_xx-en"])
    with pytest.raises(ConfigError, match="`all` cannot be combined"):
        main(["counts", "--datasets", "all", "joke"])


def test_languages_are_detected(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(Exception):
        pass

    def detect(text: str) -> str:
        if text.startswith("q"):
            raise Unknown
        return "xx"

    package = types.SimpleNamespace(
        detect=detect, LangDetectException=Unknown, DetectorFactory=types.SimpleNamespace(seed=None)
    )
    monkeypatch.setitem(sys.modules, "langdetect", package)  # type: ignore[arg-type]
    words = ["counts", f"dataset.cache_dir={here}", "--datasets", "gsm8k", "--detect-language"]
    assert (
        main(words) == 0
        and "dataset_name  unknown  xx\ngsm8k              13  13\n" in capsys.readouterr().out
        and package.DetectorFactory.seed == 0
    )
    (here / "own.jsonl").write_text(
        '{"prompt": "q", "answer": "a"}\n{"conversations": [{"from": "gpt", "value": "b"}]}\n{"x": 1}'
    )
    assert main(["counts", str(here / "own.jsonl"), "--detect-language"]) == 0
    assert "dataset_name  xx  unknown\nown            2        1\n" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "langdetect", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs the package langdetect"):
        main(words)


def test_lengths_scan_and_inspect(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        f"dataset.cache_dir={here}",
        "--tokenizer",
        str(here / "tokenizer"),
        "--datasets",
        "gsm8k",
    ]
    assert main(["lengths", *words, "--limit", "30"]) == 0
    told = capsys.readouterr()
    assert "tokenizing gsm8k (train): " in told.err and "tokenizing gsm8k (valid): " in told.err
    lines = told.out.splitlines()
    assert lines[0].split() == ["source", "longest", "p99", "above", "30"]
    name, longest, high, above = lines[1].split()
    assert name == "gsm8k" and longest == high
    assert int(above) == min(10, max(0, int(longest) - 30)) and lines[2].startswith("gsm8k (valid)")
    assert len({len(line) for line in lines}) == 1
    assert main(["scan", f"dataset.cache_dir={here}", "--datasets", "vicuna"]) == 0
    assert (
        "vicuna: 1 rows" in (said := capsys.readouterr().out)
        and "split.json:1: As an AI model, well" in said
    )
    assert said.count("train.jsonl") == 1  # the file of its rows, in the first line
    assert main(["inspect", *words, "-n", "1"]) == 0 and "\u27e6a" in capsys.readouterr().out
    assert (
        main(["inspect", *words, "-n", "1", "--mode", "rl"]) == 0
        and "answer: 'a'" in capsys.readouterr().out
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("named") / "m")


def run(tmp_path: Path, name: str, *words: str) -> dict[str, Any]:
    common = [
        "experiment_name=e",
        "trial_name=t",
        f"fileroot={tmp_path}",
        "dataset.train_bs_n_seqs=4",
        "max_steps=2",
    ]
    common += ["progress=false", f"dataset.cache_dir={tmp_path / 'cache'}"]
    assert weft(["quickstart", name, *common, *words]) == 0
    lines: list[dict[str, Any]] = list(
        map(json.loads, (tmp_path / "e/t/metrics.jsonl").read_text().splitlines())
    )
    return lines[-1]


@pytest.mark.slow
def test_runs_on_real_samples_by_name(model: Path, data_dir: Path, tmp_path: Path) -> None:
    """SFT, a reward model and PPO use mixtures of named datasets, with validation per dataset."""
    trees, pairs = (
        data_dir / "oasst" / "en_100_tree.jsonl",
        data_dir / "hh_rlhf" / "harmless-base_test.jsonl.gz",
    )
    of_trees = f"{{oasst_export: {{path: '{trees}', fraction: 0.2, valid_split: 0.05, max_valid: 4, lang: en}}}}"
    gsm8k = f"{{gsm8k: {{path: '{data_dir / 'gsm8k'}', size: 20, max_valid: 4}}}}"
    line = run(
        tmp_path / "sft",
        "sft",
        f"model.path={model}",
        f"dataset.named=[{of_trees},{gsm8k}]",
        "eval_freq_steps=2",
    )
    assert line["train/loss"] > 0 and {"eval/oasst_export/loss", "eval/gsm8k/loss"} <= line.keys()
    hh = f"{{hh-rlhf: {{path: '{pairs}', size: 20, valid_split: 0.01}}}}"
    line = run(
        tmp_path / "rw",
        "rw",
        f"model.path={model}",
        f"dataset.named=[{of_trees},{hh}]",
        "eval_freq_steps=2",
    )
    assert {
        "eval/oasst_export/accuracy",
        "eval/hh-rlhf/accuracy",
        "train/kendalltau",
    } <= line.keys()
    words = (
        f"actor.path={model}",
        f"rew.path={tmp_path}/rw/e/t/checkpoints/model/step2",
        "ppo.gen.max_new_tokens=4",
    )
    line = run(
        tmp_path / "ppo", "ppo", *words, f"dataset.named=[{of_trees}]", "dataset.overlong=drop"
    )
    assert "actor_train/loss" in line
    line = run(tmp_path / "dpo", "dpo", f"actor.path={model}", f"dataset.named=[{hh}]")
    assert "actor_train/rewards/accuracies" in line


def test_auto_cuts_no_row_of_a_run(
    here: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = f"dataset.named=[{{gsm8k: {{path: '{here / 'datasets' / 'gsm8k'}'}}}}]"
    run(tmp_path / "cut", "sft", f"model.path={model}", copy, "dataset.max_seqlen=12")
    assert (
        "with the end of the answer cut"
        in capsys.readouterr().err + (tmp_path / "cut/e/t/log.txt").read_text()
    )
    run(tmp_path / "auto", "sft", f"model.path={model}", copy, "dataset.max_seqlen=auto")
    assert "with the end of the answer cut" not in (tmp_path / "auto/e/t/log.txt").read_text()
