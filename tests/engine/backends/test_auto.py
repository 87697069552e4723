"""The backend that holds where nobody names one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny import make_tokenizer
from weft.engine.backends.auto import choose_backend
from weft.engine.spec import ModelSpec
from weft.errors import CheckpointError, ConfigError
from weft.registry import backends
from weft.topology import Layout


@pytest.fixture(scope="module")
def bloom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a type that weft has no family for, by `transformers`."""
    import torch
    from transformers import BloomConfig, BloomForCausalLM

    folder = tmp_path_factory.mktemp("bloom")
    tokenizer = make_tokenizer(folder)
    torch.manual_seed(0)
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, **ids)
    BloomForCausalLM(config).save_pretrained(folder)
    return folder


def test_types_of_weft_s_own_and_others(bloom: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert choose_backend(ModelSpec(path=str(tmp_path))).backend == "torch"
    found = choose_backend(ModelSpec(path=str(bloom)))
    assert found.backend == "hf" and "no family for models of type bloom" in found.notes[0]
    assert choose_backend(ModelSpec(path=str(bloom), type="llama")).backend == "torch", (
        "who names a family wants that one"
    )
    assert choose_backend(ModelSpec(path=str(bloom), backend="torch")).backend == "torch"
    with pytest.raises(CheckpointError, match="no family for models of type 'bloom'"):
        backends.get("torch")(ModelSpec(path=str(bloom)), Layout())


def test_the_backend_is_the_chosen_one(bloom: Path) -> None:
    engine = backends.get("auto")(ModelSpec(path=str(bloom)), Layout())
    assert engine.description["family"] == "bloom"
    with pytest.raises(ConfigError, match="path is not set"):
        backends.get("auto")(ModelSpec(), Layout())


def test_it_is_trained_and_talked_to_without_a_word_about_backends(
    bloom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import io
    import sys

    from tests.tiny import prompt_answer_rows, write_jsonl
    from weft.cli.main import main

    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "rows.jsonl", prompt_answer_rows(4))
    words = [
        "experiment_name=e",
        "trial_name=t",
        f"model.path={bloom}",
        "dataset.path=rows.jsonl",
        "max_steps=1",
    ]
    assert main(["quickstart", "sft", *words, "dataset.train_bs_n_seqs=2"]) == 0
    told = capfd.readouterr().out
    assert "backend=hf runs it" in told and "next:   weft chat runs/e/t" in told
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    assert main(["chat", "e/t", "--max-new-tokens", "2"]) == 0
    assert "backend=hf runs it" in capfd.readouterr().err
