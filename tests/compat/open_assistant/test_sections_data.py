"""Data of sections: entries as they are written, repeated ones, and those on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.test_answers_rewards import make_scorer
from weft.cli.data import main
from weft.cli.main import main as weft
from weft.cli.named_data import resolve_sources
from weft.cli.stacked_data import build_stacked_options
from weft.compat.scripts import run
from weft.data.spec import DatasetSpec
from weft.errors import ConfigError

HEAD = ["dataset_name", "train_counts", "eval_counts", "total_counts", "epoch_counts"]
MIX = """
mix:
  datasets:
    - gsm8k: {{data_path: {0}/gsm8k, fraction: 0.5}}
    - squad_v2: {{data_path: {0}/squad.jsonl, max_val_set: 1}}
    - gsm8k: {{data_path: {0}/gsm8k, size: 2, val_split: 0.0}}
  datasets_extra:
    - gsm8k_hard: {{data_path: {0}/hard.jsonl, val_split: 0.4}}
odd: {{learning_rate: 1e-5}}
ours:
  dataset: {{named: [{{gsm8k: {{max_valid: 2}}}}]}}
plain:
  dataset.train_path: {0}/gsm8k/train.jsonl
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sections and copies of data sets."""
    rows = [{"question": f"q{i}", "answer": f"a{i} #### {i}"} for i in range(10)]
    squad = [
        {"context": "c", "question": f"q{i}", "answers": {"text": [f"a{i}"]}} for i in range(10)
    ]
    hard = [{"input": f"q{i}", "code": "c", "target": i} for i in range(5)]
    for file, found in (
        ("gsm8k/train.jsonl", rows),
        ("gsm8k/test.jsonl", rows[:4]),
        ("squad.jsonl", squad),
        ("hard.jsonl", hard),
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("".join(json.dumps(row) + "\n" for row in found))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mine.yaml").write_text(MIX.format(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    return [line.split() for line in lines]


COUNTED = [
    ["gsm8k", "10", "4", "14", "5"],
    ["squad_v2", "8", "1", "9", "8"],
    ["gsm8k-2", "10", "0", "10", "2"],
    ["gsm8k_hard", "3", "2", "5", "3"],
    ["total", "31", "7", "38", "18"],
]


def test_a_section_is_counted_as_it_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"dataset.cache_dir={here}/cache"
    for words in (
        ["--datasets", "mix"],
        ["--configs", "defaults", "mix"],
        ["--configs", "defaults,mix", "--mode", "sft"],
    ):
        assert main(["counts", *words, cache]) == 0
        assert table(capsys) == [HEAD, *COUNTED], words
    assert (
        run("check_dataset_counts", ["--datasets", "mix", cache, "--output_path", "c.csv"], {}) == 0
    )
    found = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split() for line in found[1:]] == [HEAD, *COUNTED]
    assert Path("c.csv").read_text().splitlines()[3].startswith("gsm8k-2,10,0,10,2")


def test_words_of_the_command_line_go_over_a_section(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        f"dataset.cache_dir={here}/cache",
        "datasets.squad_v2.max_val_set=2",
        "datasets.gsm8k.size=3",
    ]
    for named in (["--datasets", "mix"], ["--configs", "defaults", "mix"]):
        assert main(["counts", *named, *words]) == 0
        assert [row[-1] for row in table(capsys)[1:]] == ["3", "8", "3", "3", "17"]
    assert main(["counts", "--datasets", "mix", words[0], "dataset.valid_split=0.5"]) == 0
    assert table(capsys)[2] == ["squad_v2", "5", "1", "6", "5"]
    for named in (["--datasets", "ours"], ["--configs", "ours"]):
        assert (
            main(
                [
                    "counts",
                    *named,
                    words[0],
                    f"datasets.gsm8k.data_path={here}/gsm8k",
                    "datasets.gsm8k.size=6",
                ]
            )
            == 0
        )
        assert table(capsys)[1] == ["gsm8k", "10", "2", "12", "6"]
    assert (
        main(
            [
                "counts",
                "--configs",
                "defaults",
                f"datasets=[{{gsm8k: {{data_path: {here}/gsm8k}}}}]",
                words[0],
            ]
        )
        == 0
    )
    assert table(capsys)[1] == ["gsm8k", "10", "4", "14"]
    assert main(["counts", "--datasets", "plain", words[0]]) == 0
    assert table(capsys)[1] == ["train", "10", "0", "10"]


def test_a_copy_is_named_on_the_command_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"dataset.cache_dir={here}/cache"
    assert main(["counts", "--datasets", "gsm8k", "data_path=gsm8k/train.jsonl", cache]) == 0
    assert table(capsys) == [HEAD[:-1], ["gsm8k", "10", "0", "10"]]
    words = ["counts", "--datasets", "gsm8k", "squad_v2", cache]
    assert main([*words, f"data_path={here}", "datasets.squad_v2.data_path=squad.jsonl"]) == 0
    assert [row[0] for row in table(capsys)[1:]] == ["gsm8k", "squad_v2", "total"]
    for more, wrong in (
        (
            "data_path=squad.jsonl",
            "data_path=squad.jsonl: has no folder named gsm8k, squad_v2; write "
            "datasets.NAME.data_path",
        ),
        (
            "datasets.gsm8.fraction=0.5",
            "datasets.gsm8: is not among the named datasets; did you mean datasets.gsm8k?",
        ),
        ("datasets.gsm8k=1", "datasets.gsm8k: write datasets.NAME.PARAMETER=value"),
        ("datasets.gsm8k.fraction=2", "datasets.gsm8k.fraction=2: must be above 0"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            main([*words, more])
    with pytest.raises(
        ConfigError, match="data_path=a: is a copy of a named dataset; add --datasets NAME"
    ):
        main(["counts", "data_path=a", cache])


def test_a_folder_of_copies_has_the_files_that_a_section_names(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the folder of the name, in the folder of all, and else any file of the name's folder."""
    file = here / "configs/mine.yaml"
    file.write_text(
        "both:\n  datasets: [{gsm8k: {data_path: train.jsonl}}, {squad_v2: {data_path: "
        "squad.jsonl}}]\n"
    )
    place = here / "elsewhere"
    place.mkdir()
    (here / "gsm8k").rename(place / "gsm8k")
    (here / "squad.jsonl").rename(place / "squad.jsonl")
    words = [
        "counts",
        "--datasets",
        "both",
        f"dataset.cache_dir={here}/cache",
        "dataset.valid_split=0",
    ]
    assert main([*words, "data_path=elsewhere"]) == 0
    assert table(capsys)[1:3] == [["gsm8k", "10", "0", "10"], ["squad_v2", "10", "0", "10"]]
    (place / "gsm8k/train.jsonl").rename(place / "gsm8k/my-train.jsonl")
    assert main([*words, "data_path=elsewhere"]) == 0
    assert table(capsys)[1] == ["gsm8k", "10", "4", "14"]
    (here / "one.jsonl").write_text((place / "gsm8k/my-train.jsonl").read_text())
    assert main([*words, "data_path=elsewhere", "datasets.gsm8k.data_path=one.jsonl"]) == 0
    assert table(capsys)[1] == ["gsm8k", "10", "0", "10"]


def test_the_mode_is_that_of_the_sections(here: Path) -> None:
    assert build_stacked_options(["oasst_export_eu"], [], None, [])[1] == "sft"
    assert build_stacked_options(["defaults_rm", "oasst-rm-1-pythia-1.4b"], [], None, [])[1] == "rm"
    values, mode = build_stacked_options(
        ["defaults_rlhf", "oasst_export_latin_cyrillic_rlhf"], [], None, []
    )
    assert mode == "rl" and values["dataset"]["sources"][0]["named"] == "oasst_export"
    with pytest.raises(ConfigError, match=r"mine.yaml:\d+: section 'odd' lists no datasets"):
        main(["counts", "--datasets", "odd"])


def test_rows_of_a_section_are_shown_in_its_form(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.testing.datasets import build_small_tokenizer

    build_small_tokenizer().save(here / "tokenizer")
    words = [
        "--configs",
        "defaults",
        "mix",
        "--tokenizer",
        str(here / "tokenizer"),
        f"dataset.cache_dir={here}/cache",
    ]
    assert main(["inspect", *words, "-n", "1"]) == 0
    assert "<|prompter|>|q|0|" in capsys.readouterr().out


def test_a_section_stands_for_the_datasets_that_it_lists() -> None:
    found = resolve_sources(["reference-data"], "sft", DatasetSpec())
    assert [source.named for source in found] == ["oasst_export", "alpaca"]
    with pytest.raises(ConfigError, match="reference-dat"):
        resolve_sources(["reference-dat"], "sft", DatasetSpec())


def test_rewards_are_compared_on_a_file_of_a_dataset_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    dialogue = "\n\nHuman: {0}?\n\nAssistant: {1}."
    pair = {"chosen": dialogue.format(1, "It is 1"), "rejected": dialogue.format(1, "No")}
    (tmp_path / "test.jsonl").write_text(json.dumps(pair) + "\n")
    file, out = f"datasets.hh-rlhf.data_path={tmp_path / 'test.jsonl'}", tmp_path / "scores.json"
    scorer = str(make_scorer(tmp_path / "rm"))
    words = ["eval", "rm", scorer, "--datasets", "hh-rlhf", file, "max_replies=2"]
    assert weft([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["data"]
    assert [each["all"]["rows"] for each in found.values()] == [1]
