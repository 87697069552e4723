"""A URL is refused by every command and option that takes a path of this machine, and one of a
bucket that cannot be read by all others. Nothing is made under its name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.runs import write_run
from weft.cli.main import main

SFT = [
    "quickstart",
    "sft",
    "model.path=none/none",
    "dataset.train_path=none.jsonl",
    "experiment_name=e",
    "trial_name=t",
    "device=cpu",
]
OPTIONS = (
    "fileroot",
    "resume_from",
    "model.path",
    "model.tokenizer.path",
    "dataset.train_path",
    "dataset.valid_path",
    "dataset.path",
    "dataset.cache_dir",
    "logger.wandb.dir",
)


# Options and commands that read and write buckets, if the package for it is installed.
IN_BUCKETS = {
    "fileroot",
    "model.path",
    "model.tokenizer.path",
    "dataset.train_path",
    "dataset.valid_path",
    "dataset.path",
}
BUCKET_COMMANDS = {"ls", "show", "report", "logs", "eval", "sample", "chat", "serve"}


@pytest.fixture(autouse=True)
def no_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str) -> None:
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(words: list[str], url: str, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    before = sorted(folder.rglob("*"))
    assert main(words) == 2, words
    said = capsys.readouterr().err
    assert url in said and ("is a URL" in said or "[gcs]'" in said or "[s3]'" in said), said
    assert sorted(folder.rglob("*")) == before, "nothing is made"
    return said


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("url", ["gs://OUT/x", "hf://owner/name"])
def test_options_that_are_paths(
    option: str, url: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    words = [word for word in SFT if not word.startswith(f"{option}=")]
    words = [
        word
        for word in words
        if (option, word.split("=")[0]) != ("dataset.path", "dataset.train_path")
    ]
    (folder / "none.jsonl").write_text("{}\n")
    in_bucket = url.startswith("gs://") and option in IN_BUCKETS
    said = refused([*words, f"{option}={url}"], url, capsys, folder)
    assert ("is a URL" not in said) is in_bucket, said


def test_options_of_a_file_and_of_a_mixture(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "none.jsonl").write_text("{}\n")
    (folder / "c.yaml").write_text("fileroot: s3://bucket/runs\n")
    refused([*SFT, "--config", "c.yaml"], "s3://bucket/runs", capsys, folder)
    words = [word for word in SFT if not word.startswith("dataset.train_path")]
    refused([*words, "dataset.sources=[{path: s3://b/a.jsonl}]"], "s3://b/a.jsonl", capsys, folder)
    refused([*SFT, "eval_prompts=s3://b/p.txt"], "s3://b/p.txt", capsys, folder)
    refused([*words, "--config", "http://host/c.yaml"], "http://host/c.yaml", capsys, folder)


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "URL"],
        ["show", "URL"],
        ["report", "URL"],
        ["report", "e/t", "-o", "URL"],
        ["report", "e/t", "--fileroot", "URL"],
        ["rm", "URL", "--yes"],
        ["dashboard", "URL"],
        ["logs", "-e", "e", "-f", "t", "--fileroot", "URL"],
        ["demo", "--fileroot", "URL"],
        ["examples", "write", "URL"],
        ["convert", "merge", "--base", "a", "--adapter", "b", "--output", "URL"],
        ["eval", "rm", "URL", "x.jsonl"],
        ["eval", "rm", "a", "x.jsonl", "--out", "URL"],
        ["sample", "report", "URL", "--prompts", "p.txt"],
        ["sample", "report", "m", "--prompts", "p.txt", "--out", "URL"],
        ["sample", "report", "m", "--prompts", "URL"],
        ["data", "counts", "x.jsonl", "--output", "URL"],
        ["data", "augment", "x.jsonl", "--out", "URL"],
        ["data", "trees", "filter", "URL", "out.jsonl"],
        ["data", "trees", "filter", "in.jsonl", "URL"],
        ["chat", "URL"],
        ["serve", "URL"],
        ["stop", "-e", "e", "-f", "t", "--fileroot", "URL"],
    ],
    ids=lambda words: "-".join(words),
)
def test_arguments_that_are_paths(
    words: list[str], capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    write_run(folder / "runs", "e/t")
    (folder / "x.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert main([word.replace("URL", "gs://OUT/x.jsonl") for word in words]) == 2
    said = capsys.readouterr().err
    reads_bucket = words[0] in BUCKET_COMMANDS and not {"-o", "--out", "--prompts"} & set(
        words[: words.index("URL")][-1:]
    )
    assert "gs://OUT/x.jsonl" in said and ("[gcs]'" if reads_bucket else "is a URL") in said, said
    assert {path.name for path in folder.iterdir()} == {"runs", "x.jsonl"}, "nothing is made"


def test_a_place_for_answers_that_is_no_folder_is_refused_before_a_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "file").write_text("a")
    assert main(["sample", "report", "nothing/here", "--prompts", "p.txt", "--out", "file"]) == 2
    assert capsys.readouterr().err == "error: --out file: is not a folder; name another\n"
