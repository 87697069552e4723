"""`weft eval suite`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.evaluation.harness_tasks import write_tasks
from tests.tiny import make_llama
from weft.cli.eval import build_parser
from weft.cli.eval_suite import parse_generation_options
from weft.cli.main import main
from weft.errors import ConfigError


def test_options_of_generation() -> None:
    assert parse_generation_options(None) == {}
    assert parse_generation_options("temperature=0.5,do_sample=true,max_gen_toks=8") == {
        "temperature": 0.5,
        "do_sample": True,
        "max_gen_toks": 8,
    }
    assert parse_generation_options('{"until": ["\\n", ","]}') == {"until": ["\n", ","]}
    for wrong in ("temperature", '{"until": ', "until=[a"):
        with pytest.raises(ConfigError, match="--gen_kwargs"):
            parse_generation_options(wrong)


def test_options_are_checked() -> None:
    for words, message in (
        (["m", "--tasks", "a", "--limit", "1.5"], "--limit"),
        (["m", "--tasks", "a", "--batch", "0"], "--batch"),
        (["m"], "--tasks"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_parser().parse_args(["suite", *words])
    given = build_parser().parse_args(["suite", "m", "--tasks", "a", "--num-fewshot", "2"])
    assert given.num_fewshot == 2 and given.log_samples and given.fewshot_as_multiturn is None


@pytest.mark.slow
def test_without_a_chat_template_nothing_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_llama(tmp_path / "model", chat=False)
    words = ["eval", "suite", str(model), "--tasks", "a"]
    assert main([*words, "--apply_chat_template"]) == 2
    assert f"{model}: the tokenizer has no chat template" in capsys.readouterr().err
    assert main([*words, "--fewshot_as_multiturn"]) == 2
    assert "needs --apply_chat_template" in capsys.readouterr().err


@pytest.mark.slow
def test_two_models_and_their_result_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Results are in the models' folders, where the harness' tools find them."""
    folder = write_tasks(tmp_path / "tasks")
    models = [make_llama(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    words = ["eval", "suite", *map(str, models), "--include_path", str(folder), "--limit", "4"]
    cache = ["--use_cache", str(tmp_path / "cache" / "answers")]
    assert main([*words, "--tasks", "choices,continued", *cache]) == 0
    shown = capsys.readouterr().out
    assert "acc_norm" in shown and "exact_match" in shown
    first = read_results(models[0])
    assert first["config"]["model_args"]["pretrained"] == str(models[0])
    assert first["n-samples"]["choices"] == {"original": 12, "effective": 4}
    samples = sorted(each.name for each in (models[1] / "eval").glob("samples_*.jsonl"))
    assert [each.split("_2")[0] for each in samples] == ["samples_choices", "samples_continued"]
    caches = list((tmp_path / "cache").glob("*.db"))
    assert len(caches) == 2, "each model has its own answers"
    # In the second evaluation, all answers come from the cache; the results are in other folders.
    assert main([*words, "--tasks", "choices", *cache, "--output", str(tmp_path / "out")]) == 0
    again = read_results(tmp_path / "out" / "a", "")
    assert again["results"]["choices"] == first["results"]["choices"]
    words += ["--no-log_samples", "--output", str(tmp_path / "few")]
    assert main([*words, "--tasks", "choices"]) == 0
    assert len(list((tmp_path / "few" / "a").iterdir())) == 1


def read_results(folder: Path, below: str = "eval") -> dict:
    """Return the content of the only result file in a folder."""
    (file,) = (folder / below).glob("results_*.json")
    return json.loads(file.read_text())
