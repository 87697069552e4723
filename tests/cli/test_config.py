"""`weft config ls|show|cp|validate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from weft.cli.main import main
from weft.cli.sections import find_shipped_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ls_names_file_and_keys(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "a.yaml").write_text("\npythia-mine: {seed: 1, learning_rate: 1e-5}\n")
    assert main(["config", "ls", "pythia-"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["pythia-mine", "configs/a.yaml:2", "seed,", "learning_rate"] in lines
    assert any(line[:1] == ["sft-tldr-pythia-1b"] for line in lines)
    assert main(["config", "ls", "zzz"]) == 2


def test_ls_begins_with_recipes_and_their_purposes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "a.yaml").write_text("mine: {seed: 1}\n")
    assert main(["config", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    blank = lines.index("")
    assert lines[0].startswith(
        "recipes: complete runs on real models (weft quickstart ALGORITHM --config recipes/NAME.yaml)"
    )
    shipped = sorted(path.stem for path in find_shipped_file("ready").glob("*.yaml"))
    assert [line.split()[0] for line in lines[1:blank]] == shipped
    told = next(line for line in lines if line.split()[:1] == ["grpo-gsm8k-qwen3-0.6b"])
    assert told.endswith(
        "  Arithmetic word problems: GRPO with a verifier; one GPU of 24 GB, such as an RTX 4090"
    )
    assert lines[blank + 1].startswith("sections: ") and lines[blank + 2].startswith("mine ")
    assert main(["config", "ls", "gsm8k"]) == 0
    assert "sections" not in capsys.readouterr().out


def test_cp_keeps_comments_and_the_values_of_anchors(here: Path) -> None:
    text = "a: &a\n  seed: 1  # one\n\n# the next\nb:\n  <<: *a\n  dtype: fp32\n"
    (here / "configs").mkdir()
    (here / "configs" / "a.yaml").write_text(text)
    assert main(["config", "cp", "a", "a.yaml"]) == 0 and main(["config", "cp", "b", "b.yaml"]) == 0
    assert (here / "a.yaml").read_text() == "a: &a\n  seed: 1  # one\n"
    assert yaml.safe_load((here / "b.yaml").read_text()) == {"b": {"seed": 1, "dtype": "fp32"}}


def test_validate_finds_every_problem(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "good.yaml").write_text("a: {learning_rate: 1e-5}\nb: {ppo.kl_ctl: 0.1}\n")
    assert main(["config", "validate", "good.yaml"]) == 0
    out = capsys.readouterr().out
    assert "good.yaml:1: a is valid for sft" in out and "good.yaml:2: b is valid for ppo" in out
    (here / "bad.yaml").write_text(
        "a: {learning_rat: 1e-5}\nb:\n  model.dtype: int3\nc:\n  save_total_limit: many\nstray: 3\nd: "
        "{seed: 1}\n"
    )
    assert main(["config", "validate", "bad.yaml"]) == 2
    captured = capsys.readouterr()
    for problem in (
        "bad.yaml:1: section 'a': unknown key 'learning_rat'; did you mean learning_rate",
        "model.dtype='int3': must be one of",
        "save_total_limit='many': must be a whole number, such as 8 (c, bad.yaml:5)",
        "bad.yaml:6: 'stray' is outside of any section",
    ):
        assert problem in captured.err
    assert "bad.yaml:7: d is valid for sft" in captured.out


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{model.path: ./absent}", "model.path='./absent': there is no such file or directory"),
        (
            "{model.tokenizer.path: ./absent.json}",
            "model.tokenizer.path='./absent.json': there is no such file",
        ),
        (
            "{dataset.path: rows.jsonl}",
            "dataset.path='rows.jsonl': there is no such file or directory",
        ),
        ("{dataset.type: prompt_answr}", "did you mean prompt_answer"),
        ("{ppo.kl_ctl: 0.1, reward: 'mine.py:score'}", "mine.py"),
        ("{ppo.kl_ctl: 0.1, reward: gsm9k}", "did you mean gsm8k"),
        (
            "{ppo.kl_ctl: 0.1, reward: 'there.py:scoer'}",
            "no function 'scoer' in there.py; did you mean score?",
        ),
        ("{ppo.kl_ctl: 0.1, reward: 'cut.py:score'}", "cut.py cannot be read as Python"),
        ("{ppo.kl_ctl: 0.1, reward: 'no.such:score'}", "No module named 'no'"),
        (
            "{ppo.kl_ctl: 0.1, rew_inf.interface: scring}",
            "rew_inf.interface: unknown interface 'scring'",
        ),
        (
            "{ppo.kl_ctl: 0.1, actor_train.post_hooks: [napp]}",
            "actor_train.post_hooks: unknown host function 'napp'",
        ),
        ("{imports: [mine.py]}", "mine.py"),
        (
            "{eval_suite: {tasks: [a], include_path: [nowhere]}}",
            r"eval_suite.include_path=[nowhere]: there is no such folder",
        ),
        ("{eval_prompts: asked.txt}", "eval_prompts='asked.txt': there is no such file"),
    ],
)
def test_validate_looks_for_files_and_functions(
    section: str, problem: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "there.py").write_text("def score(prompts, completions): ...\n")
    (here / "cut.py").write_text("def score(\n")
    (here / "mine.yaml").write_text(f"a: {section}\n")
    assert main(["config", "validate", "mine.yaml"]) == 2
    assert problem in capsys.readouterr().err


def test_validate_finds_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (here / "scores_of_mine.py").write_text(
        "def score(prompts, completions):\n    return [1.0 for _ in completions]\n"
    )
    (here / "mine.yaml").write_text(
        "a: {ppo.kl_ctl: 0.1, dataset.path: rows.jsonl, reward: 'scores_of_mine.py:score'}\n"
    )
    assert main(["config", "validate", "mine.yaml"]) == 0
    assert "mine.yaml:1: a is valid for ppo" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_listed_with_its_error(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "bad.yaml").write_text("a: {b: [1\n")
    (here / "configs" / "odd.yaml").write_text("mine-odd: {seed: 1}\nx: 3\n")
    (here / "configs" / "good.yaml").write_text("mine-good: {seed: 1}\n")
    assert main(["config", "ls", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine-good  configs/good.yaml:1  seed") and len(lines) == 3
    assert lines[1].startswith("cannot be used: configs/odd.yaml:2: 'x' is outside") or lines[
        2
    ].startswith("cannot be used: configs/odd.yaml:2: 'x' is outside")
    assert any(line.startswith("cannot be used: configs/bad.yaml:") for line in lines)
    assert (
        main(["config", "validate", "configs/good.yaml"]) == 0
        and main(["config", "validate", "configs"]) == 2
    )
    said = capsys.readouterr()
    assert "configs/bad.yaml:" in said.err and "configs/odd.yaml:2" in said.err
    assert "configs/good.yaml:1: mine-good is valid for sft" in said.out
    # A run stops at this error, too: the file may have another section with the same name.
    assert (
        main(["config", "show", "pythia-1b"]) == 2 and "configs/bad.yaml" in capsys.readouterr().err
    )


def test_validate_takes_a_stack(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "configs").mkdir()
    (here / "configs" / "a.yaml").write_text("low: {learning_rate: 1e-5}\nhigh: {seed: 2}\n")
    assert main(["config", "validate", "low,high", "learning_rate=2e-6"]) == 0
    assert capsys.readouterr().out == "low high: valid for sft\n"
    for words, wrong in (
        (["lowe", "high"], "unknown section 'lowe'; did you mean low"),
        (["low", "learning_rat=1"], "unknown key 'learning_rat'; did you mean learning_rate"),
        (["learning_rate=1"], "learning_rate=1: overrides sections; name them before it"),
    ):
        assert main(["config", "validate", *words]) == 2 and wrong in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "absent.yaml"],
        ["cp", "grpo-gsm8k-qwen3-8b"],
        ["sho"],
        ["show", "grpo-gsm8k-qwen3-8b", "--for", "sftt"],
    ],
)
def test_invalid_input_has_exit_code_2(words: list[str]) -> None:
    assert main(["config", *words]) == 2
